// Checkpoints of a run with several replica groups: the same names in each, and other values.
#include <gtest/gtest.h>

#include "generation_folder.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/storage/publication.h"
#include "manifest_limits.h"
#include "part_reports.h"
#include "ranks/collective_decorators.h"
#include "store_world.h"

namespace holdfast {
namespace {

// Of one rank: what its group shares, its part of the group's array, and, if asked, something of its own.
struct Layers {
  bool own = false;
  std::string extra = "";  // a replicated tensor that only ranks of this group have
};

// A run of ranks with these groups, by rank.
struct GroupedRun {
  std::string folder;
  std::vector<std::string> groups;
  Layers layers = {};

  // Names are numbers: "0", "1", ...
  void start(const std::function<void(Rank&, int group, const Status& created)>& body) const {
    const int ranks = static_cast<int>(groups.size());
    ThreadGroup(ranks, std::chrono::seconds(20)).run([&](Collective& collective) {
      const int rank = collective.rank();
      const std::string& name = groups[static_cast<std::size_t>(rank)];
      ReplicaGroups agreed(ranks);
      ASSERT_TRUE(ReplicaGroups::agree(collective, {}, std::stoi(name), &agreed).ok());
      const std::vector<int> members = agreed.members(agreed.group_of(rank));
      const std::int64_t place = std::ranges::find(members, rank) - members.begin();
      const std::int64_t size = std::ssize(members);
      RankState state(rank, ranks);
      state.add("layer", DType::kFloat32, {5}, Held::kReplicated);
      state.add_bytes("schedule", Held::kReplicated);
      state.add_shard("moments", DType::kFloat32, 12 * place / size, 12 * (place + 1) / size, 12);
      if (layers.own) state.add_bytes("rng", Held::kPerRank);
      if (layers.extra == name) state.add("head", DType::kFloat32, {3}, Held::kReplicated);
      Rank entry{collective, state, nullptr};
      const Status created =
          CheckpointStore::create(collective, real_file_system(), rank == 0 ? folder : "",
                                  {.interval_attempts = 1, .keep = 3}, state.state(), agreed, &entry.store);
      body(entry, std::stoi(name), created);
    });
  }
  void run(const std::function<void(Rank&, int group)>& body) const {
    start([&](Rank& rank, int group, const Status& created) {
      ASSERT_TRUE(created.ok()) << created.to_string();
      body(rank, group);
    });
  }
  // Each group has values of its own.
  void publish() const {
    run([](Rank& rank, int group) {
      rank.state.fill(10 + static_cast<std::uint64_t>(group));
      rank.begin(600);
      const CheckpointOutcome outcome = rank.finish();
      EXPECT_EQ(outcome.published, rank.is_first()) << outcome.reason;
    });
  }
  void expect_restored() const {
    run([](Rank& rank, int group) {
      RestoredGeneration restored;
      rank.state.scribble();
      const Status status = rank.store->restore(&restored);
      EXPECT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(rank.state.values(), rank.state.expected(10 + static_cast<std::uint64_t>(group)))
          << "rank " << rank.number();
    });
  }
  // What every rank is told.
  std::string refusal() const {
    std::vector<std::string> told(groups.size());
    run([&](Rank& rank, int) {
      RestoredGeneration restored;
      const Status status = rank.store->restore(&restored);
      EXPECT_EQ(status.exit_code(), 64);
      told[static_cast<std::size_t>(rank.number())] = status.message();
    });
    for (const std::string& text : told) EXPECT_EQ(text, told[0]);
    return told[0];
  }
};

constexpr char kName[] = "e0001-a0000000600";
constexpr char kOther[] = "e0001-a0000000600 is of another model or run: rank ";

Manifest manifest_in(const std::string& folder) {
  Manifest manifest;
  EXPECT_TRUE(read_manifest(real_file_system(), folder, {1, 600}, &manifest).ok());
  return manifest;
}

TEST(CheckpointGroups, EachGroupIsWrittenOnceByItsFirstRankAndReadByAllOfIt) {
  const MemoryDir temp;
  const GroupedRun run{temp / "c", {"0", "1", "0", "1"}, {.own = true, .extra = "1"}};
  run.publish();
  std::vector<std::string> names = names_in(temp / "c" + "/" + kName);
  std::ranges::sort(names);
  EXPECT_EQ(names,
            (std::vector<std::string>{"group-00000.safetensors", "group-00001.safetensors", "manifest.pb",
                                      "rank-00000.safetensors", "rank-00001.safetensors",
                                      "rank-00002.safetensors", "rank-00003.safetensors"}));
  const Manifest manifest = manifest_in(temp / "c");
  EXPECT_EQ(std::vector<std::string>(manifest.groups().begin(), manifest.groups().end()),
            (std::vector<std::string>{"0", "1"}));
  for (const Part& part : manifest.parts()) {
    EXPECT_EQ(part.group(), part.has_rank() ? static_cast<unsigned>(part.rank() % 2) : part.file()[10] - '0');
  }
  EXPECT_TRUE(verify_generation(real_file_system(), temp / "c", {1, 600}).clean());
  run.expect_restored();
}

TEST(CheckpointGroups, OneGroupOfAllIsKeptAsWithoutGroups) {
  const MemoryDir temp;
  GroupedRun{temp / "c", {"3", "3"}}.publish();
  EXPECT_EQ(manifest_in(temp / "c").groups_size(), 0);
  EXPECT_TRUE(std::filesystem::exists(temp / "c" + "/" + kName + "/replicated.safetensors"));
  GroupedRun{temp / "c", {"3"}}.expect_restored();
}

TEST(CheckpointGroups, AnotherNumberOfReplicasInEachGroupGoesOnAndSharesTheArraysAnew) {
  const MemoryDir temp;
  GroupedRun{temp / "c", {"0", "1", "0", "1"}}.publish();
  for (const std::vector<std::string>& groups : std::vector<std::vector<std::string>>{
           {"0", "1"}, {"1", "0"}, {"0", "0", "0", "1", "1", "1"}, {"1", "0", "1", "1"}}) {
    GroupedRun{temp / "c", groups}.expect_restored();
  }
}

TEST(CheckpointGroups, OtherGroupsAreRefusedWithTheReason) {
  const MemoryDir temp;
  GroupedRun{temp / "c", {"0", "1", "0", "1"}}.publish();
  EXPECT_EQ(
      (GroupedRun{temp / "c", {"0", "0", "0", "0"}}.refusal()),
      std::string(kOther) +
          "0: in this run all ranks are replicas of each other, and the generation has 2 replica groups");
  EXPECT_EQ((GroupedRun{temp / "c", {"0", "1", "2", "1"}}.refusal()),
            std::string(kOther) + "0: replica group 2 is in this run and not in the generation");
  EXPECT_EQ((GroupedRun{temp / "c", {"0", "5", "0", "5"}}.refusal()),
            std::string(kOther) + "0: replica group 5 is in this run and not in the generation");
  GroupedRun{temp / "d", {"0", "1", "2"}}.publish();
  EXPECT_EQ((GroupedRun{temp / "d", {"0", "1", "0"}}.refusal()),
            std::string(kOther) + "0: replica group 2 is in the generation and not in this run");
  GroupedRun{temp / "e", {"0", "0"}}.publish();
  EXPECT_EQ(
      (GroupedRun{temp / "e", {"0", "1"}}.refusal()),
      std::string(kOther) +
          "0: in the generation all ranks are replicas of each other, and this run has 2 replica groups");
}

TEST(CheckpointGroups, AGroupWithOtherLayersIsRefused) {
  const MemoryDir temp;
  GroupedRun{temp / "c", {"0", "1", "0", "1"}, {.extra = "1"}}.publish();
  EXPECT_EQ((GroupedRun{temp / "c", {"0", "1", "0", "1"}}.refusal()),
            std::string(kOther) + "1: head is in the generation and not in this run's state");
}

TEST(CheckpointGroups, ARankThatIsInAnotherGroupCannotUseItsOwnState) {
  const MemoryDir temp;
  GroupedRun{temp / "c", {"0", "1", "0", "1"}, {.own = true}}.publish();
  EXPECT_EQ((GroupedRun{temp / "c", {"0", "0", "1", "1"}, {.own = true}}.refusal()),
            std::string(kOther) +
                "1: rank 1 is of replica group 0 in this run and was of another, but rng is its own state");
  GroupedRun{temp / "d", {"0", "1", "0", "1"}}.publish();
  GroupedRun{temp / "d", {"0", "0", "1", "1"}}.expect_restored();
}

TEST(CheckpointGroups, ReplicasThatShareAnotherStateAreNamedWithTheFirstOfTheirGroup) {
  const MemoryDir temp;
  ThreadGroup(4).run([&](Collective& collective) {
    const int rank = collective.rank();
    ReplicaGroups groups(4);
    ASSERT_TRUE(ReplicaGroups::agree(collective, {}, rank % 2, &groups).ok());
    RankState state(rank, 4);
    state.add(rank == 3 ? "other" : "layer", DType::kFloat32, {5 + rank % 2}, Held::kReplicated);
    std::unique_ptr<CheckpointStore> store;
    const Status status = CheckpointStore::create(collective, real_file_system(), temp / "c",
                                                  {.interval_attempts = 1}, state.state(), groups, &store);
    EXPECT_EQ(status.message(),
              "rank 3: the ranks share another state: other is in its replicated state and not in rank 1's");
  });
}

// What a group shares may be long, and all ranks would be told it, for each of the groups.
TEST(CheckpointGroups, RanksThatShareTheSameTellEachOtherDigestsAndRanksThatDoNotWhatItIs) {
  for (const bool odd : {false, true}) {
    const MemoryDir temp;
    std::vector<std::string> calls(6);
    std::atomic<std::size_t> sent = 0;
    ThreadGroup(6).run([&](Collective& collective) {
      const int rank = collective.rank();
      ReplicaGroups groups(6);
      ASSERT_TRUE(ReplicaGroups::agree(collective, {}, rank % 3, &groups).ok());
      RankState state(rank, 6);
      for (int t = 0; t < 100; ++t) {
        const std::string name = "a tensor with a long name and number " + std::to_string(t);
        state.add(name, DType::kFloat32, {odd && rank > 3 && t == 50 ? 2 : 1}, Held::kReplicated);
      }
      RecordingCollective recorded(collective);
      std::unique_ptr<CheckpointStore> store;
      const Status status = CheckpointStore::create(recorded, real_file_system(), temp / "c",
                                                    {.interval_attempts = 1}, state.state(), groups, &store);
      EXPECT_EQ(
          status.message(),
          odd ? "rank 4: the ranks share another state: a tensor with a long name and number 50 is F32[2] in "
                "its replicated state and F32[1] in rank 1's"
              : "");
      calls[static_cast<std::size_t>(rank)] = recorded.calls;
      sent += recorded.sent;
    });
    EXPECT_EQ(calls, std::vector<std::string>(6, calls[0])) << "the same collectives on all ranks";
    constexpr std::size_t kShortest = 100 * 40;  // of a declaration of these names
    EXPECT_EQ(sent / kShortest, odd ? 1u : 0u) << sent;
  }
}

TEST(CheckpointGroups, AnArrayIsHeldInFullByEachGroup) {
  const MemoryDir temp;
  ThreadGroup(4).run([&](Collective& collective) {
    const int rank = collective.rank();
    ReplicaGroups groups(4);
    ASSERT_TRUE(ReplicaGroups::agree(collective, {{"dp", rank / 2}, {"tp", rank % 2}}, {}, &groups).ok());
    RankState state(rank, 4);
    const std::int64_t begin = rank == 3 ? 7 : 6;
    state.add_shard("moments", DType::kFloat32, rank < 2 ? 0 : begin, rank < 2 ? 6 : 12, 12);
    std::unique_ptr<CheckpointStore> store;
    const Status status = CheckpointStore::create(collective, real_file_system(), temp / "c",
                                                  {.interval_attempts = 1}, state.state(), groups, &store);
    EXPECT_EQ(status.message(),
              "rank 0: sharded moments of replica group tp=1: element 6 of 12 is held by no rank");
  });
}

// ---- what could not be read back is not published

TEST(CheckpointGroups, ANameThatAManifestMayNotHoldIsRefusedBeforePublication) {
  const MemoryDir temp;
  const std::string longest(4097, 'x');
  ThreadGroup(2).run([&](Collective& collective) {
    ReplicaGroups groups(2);
    ASSERT_TRUE(ReplicaGroups::agree(collective, {{longest, collective.rank()}}, {}, &groups).ok());
    RankState state(collective.rank(), 2);
    state.add("layer", DType::kFloat32, {5}, Held::kReplicated);
    Rank rank{collective, state, nullptr};
    ASSERT_TRUE(CheckpointStore::create(collective, real_file_system(), temp / "c", {.interval_attempts = 1},
                                        state.state(), groups, &rank.store)
                    .ok());
    const CheckpointOutcome outcome = rank.publish(10);
    if (!rank.is_first()) return;
    EXPECT_FALSE(outcome.published);
    EXPECT_FALSE(outcome.non_finite);
    EXPECT_EQ(
        outcome.reason,
        "e0001-a0000000010 refused: no restore would read it: the manifest is damaged: it has a replica "
        "group without a name");
  });
  EXPECT_EQ(names_in(temp / "c"), std::vector<std::string>{});
}

// Two groups, each with as many tensors as are allowed in all.
TEST(CheckpointGroups, MoreTensorsThanAManifestMayHoldAreRefusedAndTheOlderGenerationStays) {
  const MemoryDir temp;
  FileSystem& files = real_file_system();
  GroupedRun{temp / "c", {"0", "1"}}.publish();
  GenerationFolder folder(files, temp / "c", {.keep = 1});
  ASSERT_TRUE(folder.open().ok());
  ASSERT_TRUE(begin_publication(files, temp / "c", "e0001-a0000000601").ok());
  Manifest manifest = manifest_in(temp / "c");
  manifest.set_attempt(601);
  for (Part& part : *manifest.mutable_parts()) {
    const std::string file = partial_path(temp / "c", "e0001-a0000000601") + "/" + part.file();
    ASSERT_TRUE(write_synced(files, file, std::string(part.file_bytes(), '\0')).ok());
    if (part.has_rank()) continue;
    while (static_cast<std::uint64_t>(part.tensors_size()) < kMostManifestTensors) part.add_tensors();
  }
  CheckpointOutcome outcome;
  folder.publish(manifest, &outcome);
  EXPECT_FALSE(outcome.published);
  EXPECT_EQ(
      outcome.reason,
      "e0001-a0000000601 refused: no restore would read it: the manifest is damaged: it is none, or too "
      "large");
  EXPECT_EQ(outcome.removed, std::vector<std::string>{});
  EXPECT_EQ(names_in(temp / "c"), std::vector<std::string>{kName});
}

// ---- what is read back may be anything

std::string fault_of(const std::function<void(Manifest*)>& change) {
  static const std::string kSound = [] {
    const MemoryDir temp;
    GroupedRun{temp / "c", {"0", "1", "0", "1"}}.publish();
    return encode_manifest(manifest_in(temp / "c"));
  }();
  Manifest manifest;
  EXPECT_TRUE(decode_manifest(kSound, &manifest).ok());
  change(&manifest);
  const Status status = decode_manifest(encode_manifest(manifest), &manifest);
  return status.ok() ? "" : status.message();
}

TEST(CheckpointGroups, AManifestWhoseGroupsAreNotSoundIsRefused) {
  const std::string damaged = "the manifest is damaged: it ";
  EXPECT_EQ(fault_of([](Manifest*) {}), "");
  EXPECT_EQ(fault_of([](Manifest* m) { m->set_groups(1, "0"); }),
            damaged + "has the replica group \"0\" twice");
  EXPECT_EQ(fault_of([](Manifest* m) { m->set_groups(1, ""); }),
            damaged + "has a replica group without a name");
  EXPECT_EQ(fault_of([](Manifest* m) { m->mutable_groups()->RemoveLast(); }),
            damaged + "has a number of replica groups that cannot be");
  EXPECT_EQ(fault_of([](Manifest* m) {
              for (const char* g : {"2", "3", "4"}) m->add_groups(g);
            }),
            damaged + "has a number of replica groups that cannot be");
  EXPECT_EQ(fault_of([](Manifest* m) { m->clear_groups(); }),
            damaged + "has a part of no replica group: \"group-00000.safetensors\"");
  EXPECT_EQ(fault_of([](Manifest* m) { m->mutable_parts(2)->set_group(2); }),
            damaged + "has a part of no replica group: \"rank-00000.safetensors\"");
  EXPECT_EQ(fault_of([](Manifest* m) { m->mutable_parts(2)->clear_group(); }),
            damaged + "has a part of no replica group: \"rank-00000.safetensors\"");
  EXPECT_EQ(fault_of([](Manifest* m) { m->mutable_parts(1)->set_group(0); }),
            damaged + "has a file that is no part: \"group-00001.safetensors\"");
  EXPECT_EQ(fault_of([](Manifest* m) { m->mutable_parts()->SwapElements(0, 1); }),
            damaged + "has its parts twice or in disorder");
  // Of one group, as of the rank's own part: a name is there once.
  EXPECT_EQ(fault_of([](Manifest* m) { m->mutable_parts(3)->mutable_tensors(0)->set_name("layer"); }),
            damaged + "rank-00001.safetensors has a tensor, \"layer\", that is there twice");
}

TEST(CheckpointGroups, ARankReportsItsOwnGroupsPartOnlyAndOnlyTheFirstDoes) {
  RanksState ranks = {.writes = {true, true, true, true}, .arrays = {}};
  ThreadGroup(4).run([&](Collective& collective) {
    ReplicaGroups groups(4);
    ASSERT_TRUE(ReplicaGroups::agree(collective, {}, collective.rank() % 2, &groups).ok());
    if (collective.rank() == 0) ranks.groups = groups;
  });
  const auto refusal_of = [&](int rank, unsigned group, const std::string& file) {
    std::vector<Bytes> reports;
    for (int r = 0; r < 4; ++r) {
      PartReport report;
      report.set_rank(r);
      report.set_epoch(1);
      report.set_attempt(600);
      Part* part = report.add_parts();
      part->set_file("rank-0000" + std::to_string(r) + ".safetensors");
      part->set_rank(r);
      part->set_group(static_cast<unsigned>(r % 2));
      if (r == rank) {
        part = report.add_parts();
        part->set_file(file);
        part->set_group(group);
      }
      reports.push_back(report.SerializeAsString());
    }
    Manifest manifest;
    return assemble(reports, ranks, {1, 600}, &manifest).reason;
  };
  EXPECT_EQ(refusal_of(1, 1, "group-00001.safetensors"), "");
  EXPECT_EQ(refusal_of(3, 1, "group-00001.safetensors"), "rank 3: its report names group-00001.safetensors");
  EXPECT_EQ(refusal_of(1, 0, "group-00001.safetensors"), "rank 1: its report names group-00001.safetensors");
  EXPECT_EQ(refusal_of(1, 0, "group-00000.safetensors"), "rank 1: its report names group-00000.safetensors");
  EXPECT_EQ(refusal_of(0, 0, "replicated.safetensors"), "rank 0: its report names replicated.safetensors");
}

}  // namespace
}  // namespace holdfast
