#include "holdfast/coord/departure_log.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "coord/events.h"

namespace holdfast {
namespace {

std::vector<Json> departures(const std::string& run_dir) {
  return parse_events(read_file(run_dir + "/departures.jsonl"));
}

Departure sample() {
  Departure departure;
  departure.reported_by = 1;
  departure.missing = {{{0, "node0", 100}, Absence::kSilent, std::nullopt},
                       {{2, "node2", 102}, Absence::kDied, Place{3, 41, 7, Phase::kObserve}}};
  departure.survivors = {{{1, "node1", 101}, Place{3, 42, 0, Phase::kDecide}},
                         {{3, "node1", 103}, Place{3, 42, 1, Phase::kUpdate}}};
  return departure;
}

TEST(DepartureLog, IsOneStrictLineWithTheFieldsInTheirOrder) {
  const TempDir temp;
  ASSERT_TRUE(append_departure(temp.path(), sample()).ok());
  const std::vector<Json> lines = departures(temp.path());
  ASSERT_EQ(lines.size(), 1u);
  Json event = lines[0];
  std::string time = event["time"].get<std::string>();
  for (char& c : time) c = c >= '0' && c <= '9' ? '0' : c;
  EXPECT_EQ(time, "0000-00-00T00:00:00.000Z");
  event["time"] = "T";
  EXPECT_EQ(event, Json::parse(R"({
    "event": "departure", "time": "T", "reported_by": 1, "alone": false, "epoch": 3,
    "missing": [
      {"rank": 0, "host": "node0", "pid": 100, "epoch": null, "attempt": null, "phase": null, "absence": "silent"},
      {"rank": 2, "host": "node2", "pid": 102, "epoch": 3, "attempt": 41, "phase": "observe", "absence": "died"}],
    "survivors": [
      {"rank": 1, "host": "node1", "pid": 101, "epoch": 3, "attempt": 42, "phase": "decide"},
      {"rank": 3, "host": "node1", "pid": 103, "epoch": 3, "attempt": 42, "phase": "update"}]})"));
}

TEST(DepartureLog, EveryAbsenceAndPhaseHasItsWord) {
  const TempDir temp;
  Departure departure;
  for (int i = 0; i < 5; ++i) {
    departure.missing.push_back(
        {{i, "h", i}, static_cast<Absence>(i % 4), Place{1, 1, 0, static_cast<Phase>(i + 1)}});
  }
  ASSERT_TRUE(append_departure(temp.path(), departure).ok());
  const Json missing = departures(temp.path()).at(0)["missing"];
  const char* const absences[] = {"died", "silent", "stuck", "left"};
  const char* const phases[] = {"begin", "observe", "reduce", "decide", "update"};
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(missing[i]["absence"], absences[i % 4]);
    EXPECT_EQ(missing[i]["phase"], phases[i]);
  }
}

TEST(DepartureLog, NobodyMissingAndALonelyReporterAreWrittenAsSuch) {
  const TempDir temp;
  Departure departure;
  departure.alone = true;
  departure.reported_by = 5;
  ASSERT_TRUE(append_departure(temp.path(), departure).ok());
  const Json event = departures(temp.path()).at(0);
  EXPECT_EQ(event["alone"], true);
  EXPECT_EQ(event["reported_by"], 5);
  EXPECT_EQ(event["epoch"], nullptr);
  EXPECT_EQ(event["missing"], Json::array());
  EXPECT_EQ(event["survivors"], Json::array());
}

TEST(DepartureLog, ATransportThatFailedIsWrittenWhereThereIsOne) {
  const TempDir temp;
  Departure departure = sample();
  departure.transport_failure = "rank 1: the cable is out";
  ASSERT_TRUE(append_departure(temp.path(), departure).ok());
  EXPECT_EQ(departures(temp.path()).at(0)["transport_failure"], "rank 1: the cable is out");
}

TEST(DepartureLog, IsOfTheNewestEpochThatARankWasAt) {
  const TempDir temp;
  Departure going_back = sample();
  going_back.missing[1].last_seen->epoch = 4;
  ASSERT_TRUE(append_departure(temp.path(), going_back).ok());
  going_back.survivors[0].place.epoch = 5;
  ASSERT_TRUE(append_departure(temp.path(), going_back).ok());
  Departure not_begun;
  not_begun.survivors = {{{0, "h", 1}, Place{}}};
  ASSERT_TRUE(append_departure(temp.path(), not_begun).ok());
  const std::vector<Json> lines = departures(temp.path());
  EXPECT_EQ(lines[0]["epoch"], 4);
  EXPECT_EQ(lines[1]["epoch"], 5);
  EXPECT_EQ(lines[2]["epoch"], nullptr);
}

TEST(DepartureLog, GoesOnAtTheEndOfWhatIsThere) {
  const TempDir temp;
  ASSERT_TRUE(append_departure(temp.path(), sample()).ok());
  const std::string first = read_file(temp / "departures.jsonl");
  Departure second = sample();
  second.reported_by = 3;
  ASSERT_TRUE(append_departure(temp.path(), second).ok());
  EXPECT_TRUE(read_file(temp / "departures.jsonl").starts_with(first));
  const std::vector<Json> lines = departures(temp.path());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["reported_by"], 1);
  EXPECT_EQ(lines[1]["reported_by"], 3);
}

TEST(DepartureLog, IsPrivate) {
  const TempDir temp;
  ASSERT_TRUE(append_departure(temp.path(), sample()).ok());
  struct stat file {};
  ASSERT_EQ(stat((temp / "departures.jsonl").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777u, 0600u);
}

TEST(DepartureLog, NumbersOf64BitsAreExactAndHostNamesMayHoldAnyBytes) {
  const TempDir temp;
  Departure departure;
  departure.survivors = {{{0, "a\"\n\xff", (std::int64_t{1} << 62) + 1},
                          Place{~std::uint64_t{0}, ~std::uint64_t{0} - 1, 0, Phase::kBegin}}};
  ASSERT_TRUE(append_departure(temp.path(), departure).ok());
  const Json survivor = departures(temp.path()).at(0)["survivors"][0];
  EXPECT_EQ(survivor["host"], "a\"\n\xef\xbf\xbd");
  EXPECT_EQ(survivor["pid"].get<std::int64_t>(), (std::int64_t{1} << 62) + 1);
  EXPECT_EQ(survivor["epoch"].get<std::uint64_t>(), ~std::uint64_t{0});
  EXPECT_EQ(survivor["attempt"].get<std::uint64_t>(), ~std::uint64_t{0} - 1);
}

TEST(DepartureLog, AFolderThatIsMissingIsAStatusThatNamesTheFile) {
  const TempDir temp;
  const Status status = append_departure(temp / "nowhere", sample());
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("nowhere/departures.jsonl"), std::string::npos) << status.message();
  EXPECT_FALSE(std::filesystem::exists(temp / "nowhere"));
}

}  // namespace
}  // namespace holdfast
