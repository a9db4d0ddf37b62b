# Functions shared by the folders' CMakeLists.txt.

# Warnings are errors on our own targets, and only there.
function(holdfast_own_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 sees an overlapping copy in std::string's operator+ where there is none (GCC bug 105651).
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
endfunction()

# The same for a target's CUDA files. (2810: an assignment to a Status discards nothing.)
function(holdfast_own_cuda target)
  set(options -diag-suppress=2810 -Werror=all-warnings -Xcompiler=-Wall,-Wextra)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${options}>")
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)
endfunction()

# holdfast_library(NAME sources...): the static library holdfast_NAME, alias holdfast::NAME. Its public headers are in
# include/ beside its sources.
function(holdfast_library name)
  add_library(holdfast_${name} STATIC ${ARGN})
  add_library(holdfast::${name} ALIAS holdfast_${name})
  set_target_properties(holdfast_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(
    holdfast_${name} PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  holdfast_own_target(holdfast_${name})
  set_property(GLOBAL APPEND PROPERTY HOLDFAST_LIBRARIES holdfast_${name})
endfunction()

list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})

# holdfast_optional(DEP): finds what HOLDFAST_DEP (AUTO, ON, OFF) asks for and sets HOLDFAST_WITH_DEP. ON with the
# dependency missing is an error; AUTO goes on without it and says so.
macro(holdfast_optional dep)
  set(HOLDFAST_WITH_${dep} OFF)
  if(NOT HOLDFAST_${dep} STREQUAL "OFF")
    if("${dep}" STREQUAL "MPI")
      set(MPI_CXX_SKIP_MPICXX ON)  # the C++ bindings were removed from the standard
      find_package(MPI COMPONENTS CXX QUIET)
      set(HOLDFAST_WITH_MPI ${MPI_CXX_FOUND})
    elseif("${dep}" STREQUAL "TORCH")
      find_package(Torch QUIET)
      find_package(CLI11 QUIET)
      find_package(ZLIB QUIET)
      if(Torch_FOUND AND CLI11_FOUND AND ZLIB_FOUND AND HOLDFAST_WITH_MPI)
        set(HOLDFAST_WITH_TORCH ON)
      endif()
    elseif("${dep}" STREQUAL "CUDA")
      include(CheckLanguage)
      check_language(CUDA)
      if(CMAKE_CUDA_COMPILER)
        if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
          set(CMAKE_CUDA_ARCHITECTURES 80 90)
        endif()
        enable_language(CUDA)
        find_package(CUDAToolkit QUIET)
        if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
          set(HOLDFAST_WITH_CUDA ON)
        endif()
        if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
          set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # which CMake 3.25 does not know
        endif()
      endif()
    elseif("${dep}" STREQUAL "NCCL")
      if(HOLDFAST_WITH_CUDA)
        find_package(NCCL 2.18 MODULE QUIET)  # the first with ncclCommSplit
        set(HOLDFAST_WITH_NCCL ${NCCL_FOUND})
      endif()
    endif()
    if(NOT HOLDFAST_WITH_${dep} AND HOLDFAST_${dep} STREQUAL "ON")
      message(FATAL_ERROR "HOLDFAST_${dep}=ON, but what it needs was not found (see README.md, Packages). "
                          "Install it, or configure with -DHOLDFAST_${dep}=OFF.")
    endif()
  endif()
  message(STATUS "holdfast: ${dep} ${HOLDFAST_WITH_${dep}} (HOLDFAST_${dep}=${HOLDFAST_${dep}})")
endmacro()
