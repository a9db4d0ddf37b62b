#!/usr/bin/env bash
# Builds the CUDA scan with nvcc alone (no CMake, MPI, Protobuf or GoogleTest), for the GPU that is there, and checks it:
# the CPU's bits, CUDA graphs, speed. With NCCL, wherever nvcc finds it or in $NCCL_HOME, also the NCCL backend, on all GPUs,
# and with cuBLAS the example trainer nccl_minimal: with zlib and xxHash on Fashion-MNIST, where $HOLDFAST_DATA or the usual
# folder has it, and on made-up data otherwise.
#
# The guarded trainer nccl_train needs more than nvcc. It is run where CMake's build/bin has it, or can build it, and mpirun
# is there; or as --trainer says: without mpirun as one process on one GPU.
#
#   tests/gpu/check.sh [--build-only] [--no-speed] [--dir BUILD_FOLDER] [--trainer NCCL_TRAIN]
#
# Exit status: 0, or 1 when a result differs, the build fails or an argument is wrong; 77 without nvcc or a GPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=$root/build-gpu-check
build_only=0
trainer_program=
arguments=()
while (($#)); do
  case $1 in
    --build-only) build_only=1 ;;
    --no-speed) arguments+=(--no-speed) ;;
    --dir)
      out=${2:?--dir wants a folder}
      shift
      ;;
    --trainer)
      trainer_program=${2:?--trainer wants a program}
      if ! [[ -f $trainer_program && -x $trainer_program ]]; then
        echo "--trainer $trainer_program: not a program" >&2
        exit 1
      fi
      trainer_program=$(realpath "$trainer_program")
      shift
      ;;
    *)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
      exit 1
      ;;
  esac
  shift
done

PATH=$PATH:/usr/local/cuda/bin
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d ' .') || capability=
if ! [[ $capability =~ ^[0-9]+$ ]]; then
  if ((!build_only)); then
    echo "not run: no GPU"
    exit 77
  fi
  capability=90
fi
if ! command -v nvcc >/dev/null; then
  echo "not run: no nvcc"
  exit 77
fi

mkdir -p "$out"
cd "$root"
common=(-std=c++20 -O3 -Iranks/include -Icollectives/include -Iranks -Itests)
host=("${common[@]}" -ffp-contract=off -Wall -Wextra)
device=("${common[@]}" -arch="sm_$capability" --fmad=false -diag-suppress=2810 "-Xcompiler=-Wall,-Wextra")
sources=(ranks/tensor_view.cc ranks/cuda/scan_plan.cc collectives/status.cc tests/gpu/reference.cc)
libraries=()
if echo '#include <hwy/targets.h>
int main() { return hwy::SupportedTargets() == 0; }' | g++ -std=c++20 -x c++ - -lhwy -o "$out/hwy" 2>/dev/null; then
  sources+=(ranks/scan.cc ranks/scan_kernels.cc)
  libraries=(-lhwy)
else
  host+=(-DHOLDFAST_CHECK_WITHOUT_HIGHWAY=1)
fi

objects=()
jobs=()
compile() { # compiler source options...
  local object
  object=$out/$(basename "$2").o
  objects+=("$object")
  "$1" "${@:3}" -c "$2" -o "$object" &
  jobs+=($!)
}
link() { # program libraries...
  for job in "${jobs[@]}"; do wait "$job"; done
  nvcc -arch="sm_$capability" "${objects[@]}" "${@:2}" -o "$out/$1"
  echo "built for sm_$capability: $out/$1"
  jobs=()
}
for source in ranks/cuda/scan_cuda.cu tests/gpu/scan_check.cu tests/gpu/scan_speed.cu; do
  compile nvcc "$source" "${device[@]}"
done
for source in "${sources[@]}"; do compile g++ "$source" "${host[@]}"; done
link scan_check ${libraries[@]+"${libraries[@]}"}

programs=(scan_check)
cuda=$(dirname "$(dirname "$(command -v nvcc)")")
with_trainer=0
trainer_options=()
data=${HOLDFAST_DATA:-/usr/share/datasets/fashion-mnist}
nccl=(-I"$cuda/include" -L"$cuda/lib" -Xlinker "-rpath=$cuda/lib")
if [[ ${NCCL_HOME:-} ]]; then
  nccl+=(-I"$NCCL_HOME/include" -L"$NCCL_HOME/lib" -Xlinker "-rpath=$NCCL_HOME/lib")
fi
if echo '#include <nccl.h>
int main() { int version; return ncclGetVersion(&version); }' >"$out/has_nccl.cu" &&
  nvcc "${nccl[@]}" "$out/has_nccl.cu" -lnccl -o "$out/has_nccl" 2>"$out/has_nccl.log"; then
  includes=(-isystem "$cuda/include")
  if [[ ${NCCL_HOME:-} ]]; then includes+=(-isystem "$NCCL_HOME/include"); fi
  objects=("$out"/{scan_cuda.cu,tensor_view.cc,scan_plan.cc,status.cc}.o)
  for source in collectives/nccl_verdict.cu ranks/cuda/record_cuda.cu tests/gpu/nccl_check.cu; do
    compile nvcc "$source" "${device[@]}" "${includes[@]}"
  done
  for source in collectives/{nccl_collective,nccl_link,record,verdict}.cc ranks/cuda/cuda_attempt.cc; do
    compile g++ "$source" "${host[@]}" "${includes[@]}"
  done
  link nccl_check "${nccl[@]}" -lnccl
  programs+=(nccl_check)

  if echo '#include <cublas_v2.h>
int main() { cublasHandle_t handle; return cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS ? 0 : 1; }' >"$out/has_cublas.cu" &&
    nvcc "${nccl[@]}" "$out/has_cublas.cu" -lcublas -o "$out/has_cublas" 2>"$out/has_cublas.log"; then
    objects=("$out"/{scan_cuda.cu,record_cuda.cu,nccl_verdict.cu,tensor_view.cc,scan_plan.cc,status.cc}.o
      "$out"/{nccl_collective,nccl_link,record,verdict,cuda_attempt}.cc.o)
    trainer=(-Ilaunch "${includes[@]}")
    if echo '#include <xxhash.h>
#include <zlib.h>
int main() { return XXH3_64bits("", 0) == crc32(0, nullptr, 0); }' |
      g++ -x c++ - -lz -lxxhash -o "$out/has_libraries" 2>/dev/null; then
      libraries=(-lz -lxxhash)
      compile g++ launch/train/idx_dataset.cc "${host[@]}" "${trainer[@]}"
      if [[ -d $data ]]; then trainer_options=(--data "$data"); fi
    else
      libraries=()
      trainer+=(-DHOLDFAST_WITHOUT_LIBRARIES)
    fi
    compile nvcc launch/examples/nccl_minimal.cu "${device[@]}" "${trainer[@]}"
    compile g++ launch/train/sampler.cc "${host[@]}" "${trainer[@]}"
    link nccl_minimal "${nccl[@]}" -lcublas -lnccl ${libraries[@]+"${libraries[@]}"}
    with_trainer=1
  else
    echo "nccl_minimal: not built, no cuBLAS (see $out/has_cublas.log)"
  fi
else
  echo "NCCL: not built, no nccl.h or no library (see $out/has_nccl.log)"
fi

((build_only)) && exit 0
failed=0
for program in "${programs[@]}"; do "$out/$program" ${arguments[@]+"${arguments[@]}"} || failed=1; done
if ((with_trainer)); then
  tests/gpu/train_check.sh "$out/nccl_minimal" ${trainer_options[@]+"${trainer_options[@]}"} || failed=1
fi

# The guarded one, with a process for each GPU.
if [[ -z $trainer_program ]] && command -v mpirun >/dev/null; then
  if [[ -f build/CMakeCache.txt ]] && command -v cmake >/dev/null; then
    if ! cmake --build build --parallel --target nccl_train >"$out/nccl_train.log" 2>&1; then
      tail -n 30 "$out/nccl_train.log"
      echo "nccl_train: does not build, see $out/nccl_train.log"
      exit 1
    fi
  fi
  if [[ -x build/bin/nccl_train ]]; then trainer_program=$root/build/bin/nccl_train; fi
fi
if [[ $trainer_program ]]; then
  guarded=("$trainer_program")
  export OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_rmaps_base_oversubscribe=1
  if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
  if command -v mpirun >/dev/null; then
    echo 'int main() { int count = 0; return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0; }' >"$out/gpus.cu"
    nvcc "$out/gpus.cu" -o "$out/gpus"
    gpus=0
    "$out/gpus" || gpus=$?
    guarded=(mpirun -np "$gpus" "$trainer_program")
  fi
  if [[ -d $data ]]; then guarded+=(--data "$data"); fi
  tests/gpu/train_check.sh "${guarded[@]}" || failed=1
else
  echo "nccl_train: not run, there is no mpirun, or no build/bin/nccl_train and none could be built; see --trainer"
fi
exit "$failed"
