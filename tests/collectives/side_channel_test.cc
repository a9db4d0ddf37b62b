// Ranks that belong to the job: they find each other and hear each other.
#include "side_channel.h"

#include <gtest/gtest.h>

#include "collectives/side_channel_peers.h"

namespace holdfast {
namespace {

TEST(SideChannel, ARankWithTheTokenJoinsAsWhoItIs) {
  Server server(2);
  Client client(server.io, 1, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return client.joined == 1 && server.joined.size() == 1; }));
  ASSERT_EQ(server.listener->joined().size(), 1u);
  EXPECT_EQ(server.listener->joined()[0].rank, 1);
  EXPECT_EQ(server.listener->joined()[0].host, "host1");
  EXPECT_EQ(server.listener->joined()[0].pid, 101);
  EXPECT_TRUE(client.dialer->joined());
  EXPECT_TRUE(client.dialer->connected());
  EXPECT_TRUE(server.listener->complete());
}

TEST(SideChannel, ManyRanksJoinInAnyOrderEachOnce) {
  Server server(65);
  std::vector<std::unique_ptr<Client>> clients;
  for (int r = 64; r > 0; --r) {
    clients.push_back(std::make_unique<Client>(server.io, r, server.listener->endpoints()));
  }
  ASSERT_TRUE(server.run_until([&] {
    return server.listener->complete() &&
           std::ranges::all_of(clients, [](const auto& client) { return client->joined == 1; });
  }));
  std::ranges::sort(server.joined);
  for (int r = 1; r < 65; ++r) EXPECT_EQ(server.joined[static_cast<std::size_t>(r - 1)], r);
}

TEST(SideChannel, NothingIsListenedOnOnceAllHaveJoined) {
  Server server(3);
  Client first(server.io, 1, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return first.joined == 1; }));
  EXPECT_FALSE(server.refuses_everybody());  // one is still expected
  Client second(server.io, 2, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return server.listener->complete(); }));
  server.settle();
  EXPECT_TRUE(server.refuses_everybody());
  EXPECT_TRUE(server.closed.empty());
}

TEST(SideChannel, AListenerThatExpectsNobodyDoesNotListen) {
  Server server(1);
  EXPECT_TRUE(server.listener->complete());
  server.settle();
  EXPECT_TRUE(server.refuses_everybody());
}

TEST(SideChannel, AStrangerWhoWaitsAtTheDoorIsClosedWhenAllHaveJoined) {
  Server server(2);
  RawPeer stranger(server.port());
  ASSERT_TRUE(server.run_until([&] { return !stranger.challenge().empty(); }));
  Client client(server.io, 1, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return client.joined == 1 && stranger.closed(); }));
}

TEST(SideChannel, FramesArriveWholeAndInOrderBothWays) {
  Server server(3);
  Client one(server.io, 1, server.listener->endpoints());
  Client two(server.io, 2, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return one.joined + two.joined == 2; }));
  const std::string biggest(kMaxFrameBytes - 1, '\xfe');
  for (int i = 0; i < 200; ++i)
    one.dialer->send(FrameType::kAnswer, std::string("\0\n", 2) + std::to_string(i));
  one.dialer->send(FrameType::kSuspect);
  one.dialer->send(FrameType::kAnswer, biggest);
  server.listener->send_all(FrameType::kAsk);
  server.listener->send_all(FrameType::kLeave, biggest);
  ASSERT_TRUE(server.run_until(
      [&] { return server.frames.size() == 202 && one.frames.size() == 2 && two.frames.size() == 2; }));
  for (int i = 0; i < 200; ++i) {
    const Server::Frame expected{1, FrameType::kAnswer, std::string("\0\n", 2) + std::to_string(i)};
    EXPECT_TRUE(server.frames[static_cast<std::size_t>(i)] == expected) << i;
  }
  EXPECT_TRUE((server.frames[200] == Server::Frame{1, FrameType::kSuspect, ""}));
  EXPECT_TRUE((server.frames[201] == Server::Frame{1, FrameType::kAnswer, biggest}));
  for (const Client* client : {&one, &two}) {
    EXPECT_TRUE((client->frames[0] == std::pair(FrameType::kAsk, std::string())));
    EXPECT_TRUE((client->frames[1] == std::pair(FrameType::kLeave, biggest)));
  }
  EXPECT_TRUE(server.run_until([&] { return server.listener->flushed() && one.dialer->flushed(); }));
}

TEST(SideChannel, TheServerLearnsAtOnceThatARankIsGone) {
  Server server(3);
  auto one = std::make_unique<Client>(server.io, 1, server.listener->endpoints());
  Client two(server.io, 2, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return one->joined + two.joined == 2; }));
  one.reset();
  ASSERT_TRUE(server.run_until([&] { return !server.closed.empty(); }));
  EXPECT_EQ(server.closed, std::vector<int>{1});
  two.dialer->send(FrameType::kSuspect);
  EXPECT_TRUE(server.run_until([&] { return server.frames.size() == 1; }));
}

TEST(SideChannel, WhatWasSaidBeforeClosingIsHeardBeforeTheEnd) {
  Server server(2);
  auto client = std::make_unique<Client>(server.io, 1, server.listener->endpoints());
  ASSERT_TRUE(server.run_until([&] { return client->joined == 1; }));
  for (int i = 0; i < 20; ++i) client->dialer->send(FrameType::kAnswer, "x");
  client->dialer->send(FrameType::kGoodbye);
  ASSERT_TRUE(server.run_until([&] { return client->dialer->flushed(); }));
  client.reset();
  ASSERT_TRUE(server.run_until([&] { return !server.closed.empty(); }));
  ASSERT_EQ(server.frames.size(), 21u);
  EXPECT_EQ(server.frames.back().type, FrameType::kGoodbye);
}

TEST(SideChannel, ARankLearnsAtOnceThatItsServerIsGone) {
  asio::io_context io;
  Server server(2);
  Client client(io, 1, server.listener->endpoints());
  ASSERT_TRUE(run_until(io, [&] {
    server.io.restart();
    server.io.poll();
    return client.joined == 1;
  }));
  server.listener.reset();
  ASSERT_TRUE(run_until(io, [&] { return client.closed == 1; }));
  EXPECT_FALSE(client.dialer->connected());
  EXPECT_TRUE(client.dialer->joined());
}

TEST(SideChannel, ADialerTriesItsEndpointsInTurnUntilOneProvesItself) {
  Server elsewhere(2, "another job's token");
  Server server(2);
  unsigned short closed_port = 0;
  {
    Server gone(2);
    closed_port = gone.port();
  }
  Client client(server.io, 1,
                {"nonsense", "127.0.0.1:" + std::to_string(closed_port), elsewhere.listener->endpoints()[0],
                 server.listener->endpoints()[0]});
  EXPECT_TRUE(server.run_until([&] {
    elsewhere.io.restart();
    elsewhere.io.poll();
    return client.joined == 1;
  }));
  EXPECT_TRUE(elsewhere.joined.empty());
}

TEST(SideChannel, AServerThatComesLateIsFound) {
  asio::io_context io;
  unsigned short port = 0;
  {
    Server probe(2);
    port = probe.port();
  }
  Client client(io, 1, {"127.0.0.1:" + std::to_string(port)});
  run_until(
      io, [] { return false; }, std::chrono::milliseconds(300));
  EXPECT_EQ(client.joined, 0);
  EXPECT_FALSE(client.dialer->connected());

  // By hand, since a listener chooses its port.
  asio::ip::tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), port});
  bool connected = false;
  acceptor.async_accept([&](asio::error_code error, asio::ip::tcp::socket) { connected = !error; });
  EXPECT_TRUE(run_until(io, [&] { return connected; }));
}

TEST(SideChannel, AJobOnOneHostBindsToLoopbackAlone) {
  const auto addresses = addresses_to_bind(true);
  ASSERT_EQ(addresses.size(), 1u);
  EXPECT_TRUE(addresses[0].is_loopback());
}

TEST(SideChannel, AJobOnSeveralHostsBindsToNoWildcardAndNoLoopback) {
  for (const asio::ip::address& address : addresses_to_bind(false)) {
    EXPECT_FALSE(address.is_loopback()) << address.to_string();
    EXPECT_FALSE(address.is_unspecified()) << address.to_string();
  }
}

TEST(SideChannel, ListeningOnNoAddressIsAFailureThatSaysSo) {
  asio::io_context io;
  Listener listener(io, kToken, {1}, {});
  const Status status = listener.listen({});
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("cannot listen"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace holdfast
