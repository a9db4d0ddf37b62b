// Peers that do not belong to the job: none of them joins, and none keeps a rank from joining.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <random>

#include "collectives/side_channel_peers.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Two ranks are expected, so that the door stays open after the first.
class SideChannelAttack : public testing::Test {
 protected:
  Server server{3};

  void expect_refused(RawPeer& peer) {
    EXPECT_TRUE(server.run_until([&] { return peer.closed(); }));
    EXPECT_TRUE(server.joined.empty());
    EXPECT_TRUE(server.frames.empty());
    EXPECT_TRUE(server.closed.empty());
  }
  std::string challenge_of(RawPeer& peer) {
    EXPECT_TRUE(server.run_until([&] { return !peer.challenge().empty(); }));
    return peer.challenge();
  }
  void expect_open_to_ranks() {
    Client one(server.io, 1, server.listener->endpoints());
    Client two(server.io, 2, server.listener->endpoints());
    EXPECT_TRUE(server.run_until([&] { return one.joined == 1 && two.joined == 1; }));
    EXPECT_TRUE(server.listener->complete());
  }
};

TEST_F(SideChannelAttack, TheWrongTokenIsRefused) {
  RawPeer peer(server.port());
  peer.send(hello(std::string(kSecretBytes, '?'), challenge_of(peer), identity_bytes(1)));
  expect_refused(peer);
  EXPECT_EQ(peer.received().size(), 4 + 1 + kSecretBytes) << "no more than the challenge was said";
  expect_open_to_ranks();
}

TEST_F(SideChannelAttack, TheTokenAloneDoesNotMakeARankThatIsNotExpected) {
  for (const int rank : {0, 3, -1, 1 << 30}) {
    RawPeer peer(server.port());
    peer.send(hello(kToken, challenge_of(peer), identity_bytes(rank)));
    expect_refused(peer);
  }
  expect_open_to_ranks();
}

TEST_F(SideChannelAttack, AProofForOneIdentityIsNoneForAnother) {
  RawPeer peer(server.port());
  const std::string nonce(kSecretBytes, 'c');
  peer.send(
      frame(FrameType::kHello, ByteWriter()
                                   .text(identity_bytes(2))
                                   .raw(nonce)
                                   .raw(client_proof(kToken, challenge_of(peer), nonce, identity_bytes(1)))
                                   .take()));
  expect_refused(peer);
}

TEST_F(SideChannelAttack, AMalformedIdentityIsRefusedEvenWithTheToken) {
  for (const std::string& identity :
       {std::string(), std::string("x"), identity_bytes(1) + "x", identity_bytes(1).substr(1)}) {
    RawPeer peer(server.port());
    peer.send(hello(kToken, challenge_of(peer), identity));
    expect_refused(peer);
  }
}

TEST_F(SideChannelAttack, TheSameRankCannotJoinTwiceAndTheFirstStays) {
  Client one(server.io, 1, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return one.joined == 1; }));
  RawPeer again(server.port());
  again.send(hello(kToken, challenge_of(again), identity_bytes(1)));
  EXPECT_TRUE(server.run_until([&] { return again.closed(); }));
  EXPECT_EQ(server.joined, std::vector<int>{1});
  EXPECT_TRUE(server.closed.empty());
  one.dialer->send(FrameType::kSuspect);
  EXPECT_TRUE(server.run_until([&] { return server.frames.size() == 1; }));
}

TEST_F(SideChannelAttack, AProofFromAnEarlierChallengeIsRefused) {
  std::string overheard;
  {
    RawPeer first(server.port());
    overheard = hello(kToken, challenge_of(first), identity_bytes(1));  // good for this connection only
  }
  RawPeer second(server.port());
  challenge_of(second);
  second.send(overheard);
  expect_refused(second);
}

TEST_F(SideChannelAttack, TheServersOwnWordsSentBackAreRefused) {
  RawPeer peer(server.port());
  const std::string nonce = challenge_of(peer);
  peer.send(peer.received());
  expect_refused(peer);
  RawPeer other(server.port());
  const std::string theirs = challenge_of(other);
  // A server's proof in a client's place.
  other.send(frame(FrameType::kHello,
                   ByteWriter().text("").raw(nonce).raw(server_proof(kToken, theirs, nonce)).take()));
  expect_refused(other);
}

TEST_F(SideChannelAttack, FramesOfALaterStageBeforeTheProofAreRefused) {
  for (const FrameType type :
       {FrameType::kSuspect, FrameType::kAnswer, FrameType::kLeave, FrameType::kGoodbye, FrameType::kWelcome,
        FrameType::kChallenge, static_cast<FrameType>(0), static_cast<FrameType>(255)}) {
    RawPeer peer(server.port());
    challenge_of(peer);
    peer.send(frame(type, "payload"));
    expect_refused(peer);
  }
}

TEST_F(SideChannelAttack, LengthsOutOfRangeAreRefusedFromTheHeaderAlone) {
  for (const std::uint32_t length : {0u, kMaxStrangerBytes + 1, kMaxFrameBytes, 0x7fffffffu, 0xffffffffu}) {
    RawPeer peer(server.port());
    challenge_of(peer);
    peer.send(ByteWriter().u32(length).take());
    expect_refused(peer);
  }
  expect_open_to_ranks();
}

// The bytes are there before the connection is accepted, and the challenge goes out while they are refused.
TEST_F(SideChannelAttack, BytesThatAreThereBeforeTheChallengeAreRefused) {
  for (const std::string& bytes :
       {ByteWriter().u32(0).take(), ByteWriter().u32(0xffffffffu).take(), frame(FrameType::kHello, "x"),
        frame(FrameType::kGoodbye), std::string(400, '\0'), std::string("GET / HTTP/1.1\r\n\r\n")}) {
    for (int i = 0; i < 20; ++i) {
      RawPeer peer(server.port());
      peer.send(bytes);
      expect_refused(peer);
    }
  }
  expect_open_to_ranks();
}

TEST_F(SideChannelAttack, RandomGarbageNeverJoins) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    RawPeer peer(server.port());
    std::string garbage(random() % 2000, '\0');
    for (char& byte : garbage) byte = static_cast<char>(random());
    // Sometimes it looks like a frame of the right kind and size.
    if (round % 3 == 0) {
      garbage.resize(random() % kMaxStrangerBytes);
      garbage = frame(FrameType::kHello, garbage);
    }
    if (round % 2 == 0) challenge_of(peer);
    peer.send(garbage);
    if (round % 5 == 0) continue;  // and leaves in the middle of it
    server.run_until([&] { return peer.closed(); }, milliseconds(1));
  }
  EXPECT_TRUE(server.joined.empty());
  EXPECT_TRUE(server.frames.empty());
  expect_open_to_ranks();
}

TEST_F(SideChannelAttack, BytesThatComeOneByOneAreAFrameLikeAnyOther) {
  RawPeer slow(server.port());
  for (const char byte : hello(kToken, challenge_of(slow), identity_bytes(2))) {
    EXPECT_TRUE(server.joined.empty());
    slow.send(std::string(1, byte));
    server.run_until([] { return false; }, milliseconds(1));
  }
  ASSERT_TRUE(server.run_until([&] { return server.joined == std::vector<int>{2}; }));
  for (const char byte : frame(FrameType::kAnswer, "slowly")) {
    slow.send(std::string(1, byte));
    server.run_until([] { return false; }, milliseconds(1));
  }
  ASSERT_TRUE(server.run_until([&] { return server.frames.size() == 1; }));
  EXPECT_EQ(server.frames[0].payload, "slowly");
}

TEST_F(SideChannelAttack, WhoDoesNotProveItselfInTimeIsClosed) {
  RawPeer silent(server.port());
  RawPeer dripping(server.port());
  const std::string greeting = hello(kToken, challenge_of(dripping), identity_bytes(1)).substr(0, 40);
  const auto start = steady_clock::now();
  std::size_t sent = 0;
  ASSERT_TRUE(server.run_until([&] {
    if (sent < greeting.size() && steady_clock::now() - start > milliseconds(100) * sent) {
      dripping.send(greeting.substr(sent++, 1));
    }
    return silent.closed() && dripping.closed();
  }));
  EXPECT_GE(steady_clock::now() - start, kHandshakeTime - milliseconds(500));
  EXPECT_TRUE(server.joined.empty());
  expect_open_to_ranks();
}

TEST_F(SideChannelAttack, HalfOpenConnectionsBeyondTheCapAreClosedAtOnce) {
  std::vector<std::unique_ptr<RawPeer>> strangers;
  for (std::size_t i = 0; i < kMaxStrangers; ++i)
    strangers.push_back(std::make_unique<RawPeer>(server.port()));
  ASSERT_TRUE(server.run_until(
      [&] { return std::ranges::all_of(strangers, [](auto& peer) { return !peer->challenge().empty(); }); }));
  RawPeer one_too_many(server.port());
  ASSERT_TRUE(server.run_until([&] { return one_too_many.closed(); }));
  EXPECT_EQ(one_too_many.received(), "");
  // A place that becomes free is given to the next.
  strangers.pop_back();
  ASSERT_TRUE(server.run_until([&] {
    RawPeer next(server.port());
    return server.run_until([&] { return !next.challenge().empty(); }, milliseconds(50));
  }));
  expect_open_to_ranks();  // at the latest when the others' time is over
}

TEST_F(SideChannelAttack, AFloodOf500ConnectionsDoesNotKeepTheRanksOut) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  ASSERT_GE(files.rlim_cur, 700u) << "this test needs more open files";
  std::vector<std::unique_ptr<RawPeer>> flood;
  for (int i = 0; i < 500; ++i) {
    flood.push_back(std::make_unique<RawPeer>(server.port()));
    if (i % 3 == 0) flood.back()->send(std::string(100, static_cast<char>(i)));
  }
  const auto start = steady_clock::now();
  expect_open_to_ranks();
  // The watchdogs give each other fifteen seconds.
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(15));
  EXPECT_TRUE(server.run_until(
      [&] { return std::ranges::all_of(flood, [](auto& peer) { return peer->closed(); }); }));
  EXPECT_TRUE(server.frames.empty());
  EXPECT_TRUE(server.refuses_everybody());
}

TEST_F(SideChannelAttack, AFrameOverTheCapClosesOnlyTheLinkOfTheRankThatSentIt) {
  RawPeer one(server.port());
  one.send(hello(kToken, challenge_of(one), identity_bytes(1)));
  Client two(server.io, 2, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return server.joined.size() == 2 && two.joined == 1; }));
  one.send(ByteWriter().u32(kMaxFrameBytes + 1).take());
  ASSERT_TRUE(server.run_until([&] { return one.closed() && !server.closed.empty(); }));
  EXPECT_EQ(server.closed, std::vector<int>{1});
  two.dialer->send(FrameType::kSuspect);
  server.listener->send_all(FrameType::kAsk);
  EXPECT_TRUE(server.run_until([&] { return server.frames.size() == 1 && two.frames.size() == 1; }));
  EXPECT_EQ(two.closed, 0);
}

// ---- a server that is not the job's

class Impostor {
 public:
  explicit Impostor(asio::io_context& io) : acceptor_(io, {asio::ip::address_v4::loopback(), 0}) { accept(); }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(acceptor_.local_endpoint().port()); }

  // What it answers to a hello.
  std::function<std::string(const std::string& hello)> answer = [](const std::string&) { return ""; };
  std::string challenge = frame(FrameType::kChallenge, std::string(kSecretBytes, 'n'));
  int hellos = 0;

 private:
  void accept() {
    acceptor_.async_accept([this](asio::error_code error, asio::ip::tcp::socket socket) {
      if (error) return;
      auto link = std::make_shared<asio::ip::tcp::socket>(std::move(socket));
      asio::write(*link, asio::buffer(challenge));
      auto bytes = std::make_shared<std::string>(1000, '\0');
      link->async_read_some(asio::buffer(*bytes),
                            [this, link, bytes](asio::error_code failed, std::size_t size) {
                              if (failed) return;
                              ++hellos;
                              asio::error_code ignored;
                              asio::write(*link, asio::buffer(answer(bytes->substr(0, size))), ignored);
                              links_.push_back(link);
                            });
      accept();
    });
  }
  asio::ip::tcp::acceptor acceptor_;
  std::vector<std::shared_ptr<asio::ip::tcp::socket>> links_;
};

TEST(SideChannelImpostor, AServerWithoutTheTokenIsNotBelieved) {
  const std::function<std::string(const std::string&)> answers[] = {
      [](const std::string&) { return frame(FrameType::kWelcome, std::string(kSecretBytes, 'p')); },
      [](const std::string&) { return frame(FrameType::kWelcome); },
      // The rank's own proof, or nonce, sent back.
      [](const std::string& hello) {
        return frame(FrameType::kWelcome, hello.substr(hello.size() - kSecretBytes));
      },
      [](const std::string& hello) {
        return frame(FrameType::kWelcome, hello.substr(hello.size() - 2 * kSecretBytes, kSecretBytes));
      },
      [](const std::string&) { return frame(FrameType::kLeave, "go"); },
      [](const std::string&) { return ByteWriter().u32(0xffffffffu).take(); },
      [](const std::string& hello) { return hello; }};
  for (const auto& answer : answers) {
    asio::io_context io;
    Impostor impostor(io);
    impostor.answer = answer;
    Client client(io, 1, {impostor.endpoint()});
    EXPECT_TRUE(run_until(io, [&] { return impostor.hellos >= 2; }));  // refused, and tried again
    EXPECT_EQ(client.joined, 0);
    EXPECT_TRUE(client.frames.empty());
    EXPECT_FALSE(client.dialer->connected());
  }
}

TEST(SideChannelImpostor, AMalformedChallengeIsNotAnswered) {
  for (const std::string& challenge :
       {frame(FrameType::kChallenge, "short"),
        frame(FrameType::kChallenge, std::string(kSecretBytes + 1, 'n')),
        frame(FrameType::kWelcome, std::string(kSecretBytes, 'n')), frame(FrameType::kAsk)}) {
    asio::io_context io;
    Impostor impostor(io);
    impostor.challenge = challenge;
    Client client(io, 1, {impostor.endpoint()});
    run_until(
        io, [] { return false; }, milliseconds(300));
    EXPECT_EQ(impostor.hellos, 0);
    EXPECT_EQ(client.joined, 0);
  }
}

}  // namespace
}  // namespace holdfast
