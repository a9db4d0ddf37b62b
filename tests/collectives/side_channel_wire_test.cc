// What somebody sees, keeps back and repeats who sits between a rank and its server.
#include <gtest/gtest.h>

#include "collectives/side_channel_peers.h"

namespace holdfast {
namespace {

using asio::ip::tcp;
using std::chrono::milliseconds;

// Relays each connection to `target`, writing down all bytes.
class Relay {
 public:
  Relay(asio::io_context& io, unsigned short target)
      : io_(io), acceptor_(io, {asio::ip::address_v4::loopback(), 0}), target_(target) {
    accept();
  }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(acceptor_.local_endpoint().port()); }

  std::vector<std::string> to_server;  // one a connection
  std::vector<std::string> to_client;
  // From this number of bytes on, what the server says on the first connection is kept back.
  std::size_t most_to_first_client = ~std::size_t{0};

  std::string all_bytes() const {
    std::string all;
    for (const auto* side : {&to_server, &to_client}) {
      for (const std::string& bytes : *side) all += bytes;
    }
    return all;
  }

 private:
  struct Pair {
    tcp::socket client;
    tcp::socket server;
    std::array<char, 4096> up{};
    std::array<char, 4096> down{};
  };

  void accept() {
    acceptor_.async_accept([this](asio::error_code error, tcp::socket socket) {
      if (error) return;
      auto pair = std::make_shared<Pair>(Pair{std::move(socket), tcp::socket(io_), {}, {}});
      asio::error_code refused;
      pair->server.connect({asio::ip::address_v4::loopback(), target_}, refused);
      if (!refused) {
        to_server.emplace_back();
        to_client.emplace_back();
        pass_up(pair, to_server.size() - 1);
        pass_down(pair, to_client.size() - 1);
      }
      accept();
    });
  }
  void pass_up(const std::shared_ptr<Pair>& pair, std::size_t connection) {
    pair->client.async_read_some(asio::buffer(pair->up), [=, this](asio::error_code error, std::size_t size) {
      asio::error_code ignored;
      if (error) {
        pair->server.close(ignored);
        return;
      }
      to_server[connection].append(pair->up.data(), size);
      asio::write(pair->server, asio::buffer(pair->up.data(), size), ignored);
      pass_up(pair, connection);
    });
  }
  void pass_down(const std::shared_ptr<Pair>& pair, std::size_t connection) {
    pair->server.async_read_some(
        asio::buffer(pair->down), [=, this](asio::error_code error, std::size_t size) {
          asio::error_code ignored;
          if (error) {
            pair->client.close(ignored);
            return;
          }
          const std::size_t passed = to_client[connection].size();
          const std::size_t most = connection == 0 ? most_to_first_client : ~std::size_t{0};
          const std::size_t now = most > passed ? std::min(size, most - passed) : 0;
          to_client[connection].append(pair->down.data(), now);
          asio::write(pair->client, asio::buffer(pair->down.data(), now), ignored);
          pass_down(pair, connection);
        });
  }

  asio::io_context& io_;
  tcp::acceptor acceptor_;
  const unsigned short target_;
};

constexpr std::size_t kChallengeBytes = 4 + 1 + kSecretBytes;

class SideChannelWire : public testing::Test {
 protected:
  Server server{3};
  Relay relay{server.io, server.port()};
};

TEST_F(SideChannelWire, TheTokenIsNeverInTheBytesNorAnyPieceOfIt) {
  Client client(server.io, 1, {relay.endpoint()});
  Client stranger(server.io, 2, {relay.endpoint()}, "ANOTHER-TOKEN-OF-THE-SAME-LENGTH");
  ASSERT_TRUE(server.run_until([&] { return client.joined == 1 && relay.to_server.size() >= 3; }));
  client.dialer->send(FrameType::kAnswer, "I am here");
  server.listener->send_all(FrameType::kLeave, "rank 2 is silent");
  ASSERT_TRUE(server.run_until([&] { return server.frames.size() == 1 && client.frames.size() == 1; }));

  const std::string bytes = relay.all_bytes();
  EXPECT_NE(bytes.find("I am here"), std::string::npos);  // the relay sees what there is to see
  EXPECT_NE(bytes.find("rank 2 is silent"), std::string::npos);
  for (std::size_t i = 0; i + 8 <= kToken.size(); ++i) {
    EXPECT_EQ(bytes.find(kToken.substr(i, 8)), std::string::npos) << "piece at " << i;
  }
}

TEST_F(SideChannelWire, AWholeGoodHandshakePlayedAgainIsRefused) {
  {
    Client client(server.io, 1, {relay.endpoint()});
    ASSERT_TRUE(server.run_until([&] { return client.joined == 1; }));
  }
  const std::string recorded = relay.to_server.at(0);
  ASSERT_GT(recorded.size(), 2 * kSecretBytes);

  Server again(3);  // the same token; rank 1 is expected
  for (const bool waits : {true, false}) {
    RawPeer peer(again.port());
    if (waits) {
      ASSERT_TRUE(again.run_until([&] { return !peer.challenge().empty(); }));
    }
    peer.send(recorded);
    ASSERT_TRUE(again.run_until([&] { return peer.closed(); }));
    EXPECT_TRUE(again.joined.empty());
  }
  // And where it was recorded.
  RawPeer peer(server.port());
  peer.send(recorded);
  ASSERT_TRUE(server.run_until([&] { return peer.closed(); }));
  EXPECT_EQ(server.joined, std::vector<int>{1});
}

TEST_F(SideChannelWire, ARecordedServerDoesNotFoolARank) {
  {
    Client client(server.io, 1, {relay.endpoint()});
    ASSERT_TRUE(server.run_until([&] { return client.joined == 1; }));
  }
  const std::string recorded = relay.to_client.at(0).substr(0, kChallengeBytes + 4 + 1 + kSecretBytes);

  tcp::acceptor acceptor(server.io, {asio::ip::address_v4::loopback(), 0});
  std::vector<tcp::socket> links;
  const std::function<void()> accept = [&] {
    acceptor.async_accept([&](asio::error_code error, tcp::socket socket) {
      if (error) return;
      asio::error_code ignored;
      asio::write(socket, asio::buffer(recorded), ignored);
      links.push_back(std::move(socket));
      accept();
    });
  };
  accept();
  Client client(server.io, 1, {"127.0.0.1:" + std::to_string(acceptor.local_endpoint().port())});
  EXPECT_TRUE(server.run_until([&] { return links.size() >= 3; }));
  EXPECT_EQ(client.joined, 0);
  client.dialer->stop();
  acceptor.close();
  server.settle();
}

TEST_F(SideChannelWire, EveryHandshakeIsDifferentToTheLastByteOfItsSecrets) {
  Client one(server.io, 1, {relay.endpoint()});
  Client two(server.io, 2, {relay.endpoint()});
  ASSERT_TRUE(server.run_until([&] { return one.joined + two.joined == 2; }));
  ASSERT_EQ(relay.to_server.size(), 2u);
  EXPECT_NE(relay.to_client[0].substr(5, kSecretBytes), relay.to_client[1].substr(5, kSecretBytes));
  const auto tail = [](const std::string& bytes) { return bytes.substr(bytes.size() - 2 * kSecretBytes); };
  EXPECT_NE(tail(relay.to_server[0]).substr(0, kSecretBytes),
            tail(relay.to_server[1]).substr(0, kSecretBytes));
  EXPECT_NE(tail(relay.to_server[0]).substr(kSecretBytes), tail(relay.to_server[1]).substr(kSecretBytes));
}

// On a network that loses packets the welcome may come after the rank's patience is at its end.
TEST_F(SideChannelWire, ARankWhoseWelcomeWasLostJoinsWhenItTriesAgain) {
  relay.most_to_first_client = kChallengeBytes;
  Client client(server.io, 1, {relay.endpoint()});
  EXPECT_TRUE(server.run_until([&] { return client.joined == 1; }, std::chrono::seconds(15)))
      << "tried " << relay.to_server.size() << " times";
}

TEST_F(SideChannelWire, AChallengeThatWasLostIsAskedForAgain) {
  relay.most_to_first_client = 10;
  Client client(server.io, 1, {relay.endpoint()});
  EXPECT_TRUE(server.run_until([&] { return client.joined == 1; }));
}

}  // namespace
}  // namespace holdfast
