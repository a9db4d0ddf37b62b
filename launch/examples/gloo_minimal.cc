// A guarded trainer whose own transport is Gloo, the one of PyTorch's process groups on CPUs: no MPI, no
// launcher. The guard rides on it through three C callbacks, of which only the all-reduce is needed.
//
//   for r in 0 1 2 3; do RANK=$r WORLD_SIZE=4 gloo_minimal STORE [RUN_DIR [R]] & done; wait
//
// STORE is an empty folder that all ranks see, in which they find each other. Rank R throws at attempt 100.
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "examples/least_squares.h"
#include "holdfast/collectives/callback_collective.h"
#include "holdfast/step_guard.h"

namespace {

using holdfast::Decision;
using holdfast::Stage;
using holdfast::StepGuard;
using holdfast::TensorView;
using GlooContext = std::shared_ptr<gloo::rendezvous::Context>;

template <typename Number>
void sum_over_ranks(const GlooContext& context, Number* values, std::size_t count) {
  gloo::AllreduceOptions options(context);
  options.setOutput(values, count);
  options.setReduceFunction(
      static_cast<void (*)(void*, const void*, const void*, std::size_t)>(&gloo::sum<Number>));
  gloo::allreduce(options);
}

holdfast_callbacks callbacks_over(GlooContext& context) {
  holdfast_callbacks callbacks{};
  callbacks.struct_bytes = sizeof callbacks;
  callbacks.context = &context;
  callbacks.rank = context->rank;
  callbacks.size = context->size;
  // Gloo throws when a peer is gone or late: the guard takes that for a failure of the group.
  callbacks.all_reduce = [](void* of, std::uint64_t* values, std::size_t count) {
    sum_over_ranks(*static_cast<GlooContext*>(of), values, count);
    return 0;
  };
  return callbacks;
}

int train(GlooContext context, const char* run_dir, int throwing_rank) {
  std::unique_ptr<holdfast::Collective> collective;
  holdfast::Status status = holdfast::CallbackCollective::create(callbacks_over(context), &collective);
  std::unique_ptr<StepGuard> guard;
  holdfast::GuardOptions options;
  options.run_dir = run_dir;
  if (status.ok()) status = StepGuard::create(*collective, options, &guard);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return status.exit_code();
  }

  least_squares::Vector weights{};
  least_squares::Vector gradient{};
  const holdfast::BucketSlice layout{"weights", 0, least_squares::kFeatures};
  for (int attempt = 0; attempt < least_squares::kAttempts; ++attempt) {
    guard->begin();
    guard->run(Stage::kBackward, [&] {
      if (attempt == 100 && context->rank == throwing_rank) throw std::runtime_error("asked to throw");
      guard->observe_loss(
          least_squares::gradient_of(weights, context->rank, context->size, attempt, &gradient));
    });
    if (!guard->healthy()) gradient.fill(0);
    guard->observe(Stage::kBackward, "weights", TensorView::of(gradient));
    guard->reducing();
    try {  // and not in run(), which leaves it out on a rank that has failed
      sum_over_ranks(context, gradient.data(), gradient.size());
    } catch (const std::exception& error) {
      guard->report_error(Stage::kReduction, error.what());
    }
    guard->observe_share(TensorView::of(gradient), {&layout, 1});

    const Decision decision = guard->decide();
    if (decision.apply()) {
      guard->update([&] { least_squares::descend(gradient, context->size, &weights); });
    } else if (context->rank == 0) {
      std::printf("attempt %d: %s\n", attempt, decision.reason.c_str());
    }
    guard->finish();
    if (!decision.agreed) std::_Exit(decision.exit_code());  // others may be gone
    if (decision.ends_run()) return decision.exit_code();
  }
  const Decision end = guard->close();
  if (!end.agreed) std::_Exit(end.exit_code());
  if (context->rank == 0) {
    std::printf("updates %llu of %d attempts, largest error of a weight %.6f\n",
                static_cast<unsigned long long>(guard->updates()), least_squares::kAttempts,
                static_cast<double>(least_squares::largest_error(weights)));
  }
  return end.exit_code();
}

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? -1 : std::atoi(text);
}

}  // namespace

int main(int argc, char** argv) {
  const int rank = number("RANK");
  const int size = number("WORLD_SIZE");
  if (argc < 2 || size < 1 || rank < 0 || rank >= size) {
    std::fprintf(stderr, "usage: RANK=r WORLD_SIZE=n gloo_minimal STORE [RUN_DIR [R]]\n");
    return 64;
  }
  std::signal(SIGPIPE, SIG_IGN);  // Gloo writes to peers that may be gone
  try {
    gloo::transport::tcp::attr where;
    where.iface = "lo";  // between hosts: the name of the interface, such as eth0
    auto device = gloo::transport::tcp::CreateDevice(where);
    gloo::rendezvous::FileStore store(argv[1]);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    context->setTimeout(std::chrono::seconds(30));
    context->connectFullMesh(store, device);
    const int exit_code = train(context, argc > 2 ? argv[2] : "", argc > 3 ? std::atoi(argv[3]) : -1);
    std::fflush(nullptr);
    std::_Exit(exit_code);  // a group that failed is not taken down in an orderly way
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 80;
  }
}
