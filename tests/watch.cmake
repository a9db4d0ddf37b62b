# Tests of what watches over the job: watchdogs, their side channel, topology, disagreement. Included by CMakeLists.txt.
set(watch ${CMAKE_CURRENT_LIST_DIR})

# Parts without a public header are reached where they are.
holdfast_unit_test(
  watch_test
  SOURCES
  ${watch}/collectives/byte_codec_test.cc
  ${watch}/collectives/departure_test.cc
  ${watch}/collectives/gather_test.cc
  ${watch}/collectives/handshake_test.cc
  ${watch}/collectives/lookout_death_test.cc
  ${watch}/collectives/lookout_property_test.cc
  ${watch}/collectives/lookout_test.cc
  ${watch}/collectives/progress_board_test.cc
  ${watch}/collectives/stall_clock_test.cc
  LIBRARIES
  holdfast::threads)
target_include_directories(watch_test PRIVATE ${PROJECT_SOURCE_DIR}/collectives)

holdfast_unit_test(
  side_channel_test
  SOURCES
  ${watch}/collectives/side_channel_attack_test.cc
  ${watch}/collectives/side_channel_test.cc
  ${watch}/collectives/side_channel_wire_test.cc
  ${watch}/collectives/watchdog_team_test.cc
  LIBRARIES
  holdfast::threads
  holdfast_asio)
target_include_directories(side_channel_test PRIVATE ${PROJECT_SOURCE_DIR}/collectives)

holdfast_unit_test(
  topology_test
  SOURCES
  ${watch}/collectives/topology_test.cc
  LIBRARIES
  holdfast::hardware
  holdfast::threads)

holdfast_unit_test(
  watch_coord_test
  SOURCES
  ${watch}/coord/departure_log_test.cc
  ${watch}/coord/disagreement_test.cc
  ${watch}/coord/placement_event_test.cc
  ${watch}/coord/suspects_test.cc
  LIBRARIES
  holdfast::coord
  protobuf::libprotobuf)

holdfast_unit_test(
  watch_ranks_test
  SOURCES
  ${watch}/ranks/desync_test.cc
  ${watch}/ranks/layout_agreement_test.cc
  ${watch}/ranks/uneven_data_test.cc
  LIBRARIES
  holdfast::ranks
  holdfast::threads)

if(HOLDFAST_WITH_MPI)
  add_executable(mpi_nodes_test ${watch}/collectives/mpi_nodes_test.cc)
  add_executable(watchdog_rank ${watch}/collectives/watchdog_rank.cc)
  foreach(program mpi_nodes_test watchdog_rank)
    holdfast_own_target(${program})
    target_include_directories(${program} PRIVATE ${watch})
    target_link_libraries(${program} PRIVATE holdfast::mpi)
  endforeach()
  target_link_libraries(mpi_nodes_test PRIVATE holdfast::hardware GTest::gtest)
  holdfast_mpi_test(mpi_nodes_test RANKS 1 2 3 4 7 COMMAND $<TARGET_FILE:mpi_nodes_test>)

  set(watched_jobs
      a_pause_of_three_deadlines_is_waited_for
      a_rank_within_the_deadline_is_waited_for
      all_slow_at_one_place_is_a_warning
      all_standing_still_for_ever_leave_in_the_end
      an_exit_0_in_the_middle_is_not_success
      of_two_ranks_that_hang_nobody_else_is_blamed
      ranks_that_wake_up_do_not_call_those_dead_who_left_without_them
      two_ranks_that_die_together_are_reported_together
      who_reaches_neither_rank_0_nor_the_deputy_leaves_alone
      without_a_fault_nothing_is_said)
  foreach(rank 0 1 2)
    foreach(fate hanging_is_stuck killed_has_died stopped_is_silent that_exits_with_7_has_died
                 that_says_goodbye_has_left)
      list(APPEND watched_jobs rank_${rank}_${fate})
    endforeach()
  endforeach()
  foreach(job ${watched_jobs})
    add_test(
      NAME watchdog_jobs.${job}
      COMMAND ${Python3_EXECUTABLE} ${watch}/collectives/watchdog_jobs.py $<TARGET_FILE:watchdog_rank>
              ${MPIEXEC_EXECUTABLE} WatchedJobs.test_${job})
    set_tests_properties(
      watchdog_jobs.${job} PROPERTIES LABELS mpi TIMEOUT 120 ENVIRONMENT "${mpi_environment}")
  endforeach()
endif()
