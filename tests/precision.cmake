# Tests of 16-bit training: loss scale, calibration, early warnings, the optimizer stage. Included by CMakeLists.txt.
set(precision ${CMAKE_CURRENT_LIST_DIR})

holdfast_unit_test(
  precision_test
  SOURCES
  ${precision}/coord/calibration_test.cc
  ${precision}/ranks/check_update_test.cc
  ${precision}/ranks/loss_scaler_test.cc
  ${precision}/ranks/loss_scaling_test.cc
  ${precision}/ranks/spike_detector_test.cc
  LIBRARIES
  holdfast::ranks
  holdfast::threads
  protobuf::libprotobuf)

holdfast_unit_test(
  train_math_test
  SOURCES
  ${precision}/ranks/half_test.cc
  ${precision}/launch/natural_fault_spec_test.cc
  ${precision}/launch/optimizer_test.cc
  ${precision}/launch/schedule_test.cc
  LIBRARIES
  holdfast::train
  PkgConfig::hwy)
