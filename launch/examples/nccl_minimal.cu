// nccl_train.cu for a machine with nothing but CUDA, cuBLAS and NCCL: one process runs all GPUs, a thread
// each. There is no StepGuard, which needs Protobuf: the verdict of judge() alone decides, and what it
// decides is to skip. No budgets, no run folder, no watchdog: a rank that is missing is noticed by
// NcclOptions::deadline. tests/gpu/check.sh builds it.
#include <barrier>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "examples/device_replica.h"
#include "holdfast/collectives/verdict.h"

namespace holdfast::example {
namespace {

void train(Replica& replica, const Options& options) {
  const std::uint64_t coefficient = agreement_coefficient(replica.rank(), replica.size());
  for (std::uint64_t attempt = 0; attempt < options.steps; ++attempt) {
    replica.compute(attempt);
    Record record;
    record.set_participant(coefficient * agreement_hash({0, attempt, 0}));
    must(replica.attempt().sum(&record));
    const Verdict verdict = judge(record, replica.size());
    if (verdict.clean()) {
      must(replica.attempt().update_status());
      replica.count_update();
    } else if (verdict.kind == Verdict::Kind::kNonFinite || verdict.kind == Verdict::Kind::kError) {
      std::vector<DeviceMeasurement> measured;
      must(replica.attempt().measured(&measured));
      if (verdict.kind == Verdict::Kind::kError) leave("another rank failed", 80, Where::current());
      for (const DeviceMeasurement& found : measured) {
        if (found.probe.finite()) continue;
        std::printf("attempt %llu: skipped, rank %d, %s: %s[%lld]\n",
                    static_cast<unsigned long long>(attempt), replica.rank(),
                    std::string(stage_name(found.stage)).c_str(), found.tensor.c_str(),
                    static_cast<long long>(found.offset + found.probe.first_bad));
      }
    } else {
      leave("ranks disagree, or are missing", 83, Where::current());
    }
    say_loss(replica, options, attempt);
  }
}

int run(Options options) {
  const int size = gpus();
  if (size == 0) {
    std::printf("not run: no GPU\n");
    return 77;
  }
  Data data;
  Status s = prepare(&options, size, &data);
  if (!options.run_dir.empty())
    s = Status::usage("--run-dir is nccl_train's: here is no guard to keep a record");
  if (!s.ok()) {
    std::fprintf(stderr, "%s\n", s.to_string().c_str());
    return s.exit_code();
  }
  Ids ids;
  must(NcclCollective::make_id(&ids.gradients));
  must(NcclCollective::make_id(&ids.verdicts));
  // With several GPUs in a process, memory is best allocated and freed while none is in a collective.
  std::barrier<> all(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Replica replica(options, data, ids, rank, size, rank);
      all.arrive_and_wait();
      train(replica, options);
      say_result(replica);
      all.arrive_and_wait();
    });
  }
  return 0;
}

}  // namespace
}  // namespace holdfast::example

int main(int argc, char** argv) {
  holdfast::example::Options options;
  if (!holdfast::example::parse(argc, argv, &options)) {
    std::fputs(holdfast::example::kUsage, stderr);
    return 64;
  }
  return holdfast::example::run(options);
}
