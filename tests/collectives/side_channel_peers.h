// The two ends of the side channel on one thread, and peers that do as they like.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "byte_codec.h"
#include "handshake.h"
#include "side_channel.h"

namespace holdfast {

inline constexpr std::chrono::seconds kPatience{60};  // far more than anything takes
inline const std::string kToken = "0123456789abcdefTHE-JOBS-TOKEN!!";

// Runs the event loop until `done`. False when that does not come.
inline bool run_until(asio::io_context& io, const std::function<bool()>& done,
                      std::chrono::milliseconds patience = kPatience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) return false;
    io.restart();
    io.run_one_for(std::chrono::milliseconds(5));
  }
  return true;
}

inline unsigned short port_of(const std::string& endpoint) {
  return static_cast<unsigned short>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1)));
}

inline std::string frame(FrameType type, std::string_view payload = {}) {
  return ByteWriter()
      .u32(static_cast<std::uint32_t>(payload.size() + 1))
      .u8(static_cast<std::uint8_t>(type))
      .raw(payload)
      .take();
}

inline std::string identity_bytes(int rank) {
  return ByteWriter().u32(static_cast<std::uint32_t>(rank)).u64(4711).text("somewhere").take();
}

inline std::string hello(std::string_view token, std::string_view server_nonce, const std::string& identity) {
  const std::string nonce(kSecretBytes, 'c');
  return frame(
      FrameType::kHello,
      ByteWriter().text(identity).raw(nonce).raw(client_proof(token, server_nonce, nonce, identity)).take());
}

// A plain TCP connection to a port of this host.
class RawPeer {
 public:
  explicit RawPeer(unsigned short port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    fcntl(fd_, F_SETFL, O_NONBLOCK);
  }
  ~RawPeer() { close(fd_); }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  bool connected() const { return connected_; }
  void send(std::string_view bytes) {
    [[maybe_unused]] const auto sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // All that came so far.
  const std::string& received() {
    char buffer[4096];
    ssize_t n = 0;
    while ((n = recv(fd_, buffer, sizeof(buffer), 0)) > 0)
      received_.append(buffer, static_cast<std::size_t>(n));
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) closed_ = true;
    return received_;
  }
  bool closed() {
    received();
    return closed_;
  }
  // The nonce of the server's challenge; "" while it is not there.
  std::string challenge() {
    ByteReader reader(received());
    if (reader.u32() != kSecretBytes + 1 || reader.u8() != static_cast<std::uint8_t>(FrameType::kChallenge))
      return "";
    return std::string(reader.raw(kSecretBytes));
  }

 private:
  const int fd_;
  bool connected_ = false;
  bool closed_ = false;
  std::string received_;
};

// A listener for ranks 1..ranks-1 that writes down what happens.
class Server {
 public:
  explicit Server(int ranks, const std::string& token = kToken) {
    std::set<int> expected;
    for (int r = 1; r < ranks; ++r) expected.insert(r);
    Listener::Handlers handlers;
    handlers.on_joined = [this](const RankIdentity& who) { joined.push_back(who.rank); };
    handlers.on_frame = [this](int rank, FrameType type, std::string_view payload) {
      frames.push_back({rank, type, std::string(payload)});
    };
    handlers.on_closed = [this](int rank) { closed.push_back(rank); };
    listener = std::make_unique<Listener>(io, token, std::move(expected), std::move(handlers));
    const Status status = listener->listen({asio::ip::address_v4::loopback()});
    EXPECT_TRUE(status.ok()) << status.to_string();
  }

  unsigned short port() const { return port_of(listener->endpoints().at(0)); }
  bool run_until(const std::function<bool()>& done, std::chrono::milliseconds patience = kPatience) {
    return holdfast::run_until(io, done, patience);
  }
  // Lets everything happen that is about to.
  void settle() {
    run_until([] { return false; }, std::chrono::milliseconds(50));
  }
  bool refuses_everybody() { return !RawPeer(port()).connected(); }

  struct Frame {
    int rank;
    FrameType type;
    std::string payload;
    bool operator==(const Frame&) const = default;
  };
  asio::io_context io;
  std::unique_ptr<Listener> listener;
  std::vector<int> joined;
  std::vector<Frame> frames;
  std::vector<int> closed;
};

// A legitimate rank.
class Client {
 public:
  Client(asio::io_context& io, int rank, std::vector<std::string> endpoints,
         const std::string& token = kToken) {
    Dialer::Handlers handlers;
    handlers.on_joined = [this] { ++joined; };
    handlers.on_frame = [this](FrameType type, std::string_view payload) {
      frames.emplace_back(type, std::string(payload));
    };
    handlers.on_closed = [this] { ++closed; };
    dialer =
        std::make_shared<Dialer>(io, token, RankIdentity{rank, "host" + std::to_string(rank), 100 + rank},
                                 std::move(endpoints), std::move(handlers));
    dialer->start();
  }
  ~Client() { dialer->stop(); }

  std::shared_ptr<Dialer> dialer;
  int joined = 0;
  int closed = 0;
  std::vector<std::pair<FrameType, std::string>> frames;
};

}  // namespace holdfast
