// TCP between watchdogs: framed, authenticated, capped. Everything here runs on one thread, the one that runs
// the io_context.
//
//   frame := length u32, type u8, payload (length - 1 bytes); length at most kMaxFrameBytes, and at most
//            kMaxStrangerBytes before the peer has proved itself
#pragma once

#include <asio.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/departure.h"
#include "holdfast/collectives/status.h"

namespace holdfast {

enum class FrameType : std::uint8_t {
  kChallenge = 1,  // server: nonce
  kHello = 2,      // client: identity text, nonce, proof
  kWelcome = 3,    // server: proof
  kSuspect = 10,   // client: I stand still; "hurry": I was asked to end
  kAsk = 11,       // server: where are you?
  kAnswer = 12,    // client: see encode_answer()
  kLeave = 13,     // server: why, as text; end now with exit code 84
  kGoodbye = 14    // either: I am done and will close
};

inline constexpr std::uint32_t kMaxFrameBytes = 64 * 1024;
inline constexpr std::uint32_t kMaxStrangerBytes = 512;
inline constexpr std::size_t kMaxStrangers = 64;  // connections that have not proved themselves, at once
inline constexpr std::chrono::seconds kHandshakeTime{2};

// One connection.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Both may close the link. `on_closed` comes once, after the last frame; not after close().
  using OnFrame = std::function<void(FrameType, std::string_view payload)>;
  using OnClosed = std::function<void()>;

  explicit Link(asio::ip::tcp::socket socket);

  void handle(OnFrame on_frame, OnClosed on_closed);  // from the next frame on
  void start();                                       // begins to read; once
  void send(FrameType type, std::string_view payload = {});
  void close();
  void trust() { max_frame_ = kMaxFrameBytes; }  // the peer has proved itself
  bool open() const { return socket_.is_open(); }
  bool flushed() const { return outgoing_.empty() || !open(); }

 private:
  void read_header();
  void read_body(std::uint32_t length);
  void write_next();
  void fail();

  asio::ip::tcp::socket socket_;
  std::uint32_t max_frame_ = kMaxStrangerBytes;
  OnFrame on_frame_;
  OnClosed on_closed_;
  std::array<char, 4> header_{};
  std::string body_;
  std::deque<std::string> outgoing_;
};

// The listening side: rank 0 and its deputy. Listens until all expected ranks have joined, then no longer.
class Listener {
 public:
  struct Handlers {
    std::function<void(const RankIdentity&)> on_joined;
    std::function<void(int rank, FrameType, std::string_view)> on_frame;
    std::function<void(int rank)> on_closed;
  };

  // `expected`: the ranks that may join, each once.
  Listener(asio::io_context& io, std::string token, std::set<int> expected, Handlers handlers);
  ~Listener();

  // Binds to a free port of each address. INTERNAL when none can be bound.
  Status listen(const std::vector<asio::ip::address>& addresses);
  // "10.0.0.1:40123" each.
  const std::vector<std::string>& endpoints() const { return endpoints_; }

  bool complete() const { return expected_.empty(); }
  const std::vector<RankIdentity>& joined() const { return joined_; }

  void send_all(FrameType type, std::string_view payload = {});
  bool flushed() const;

 private:
  struct Stranger;
  void accept(asio::ip::tcp::acceptor& acceptor);
  void greet(asio::ip::tcp::socket socket);
  void check_hello(const std::shared_ptr<Stranger>& stranger, FrameType type, std::string_view payload);
  void drop(const std::shared_ptr<Stranger>& stranger);
  void lost(int rank);
  void stop_listening();

  asio::io_context& io_;
  const std::string token_;
  std::set<int> expected_;  // not joined yet
  const Handlers handlers_;
  std::vector<std::unique_ptr<asio::ip::tcp::acceptor>> acceptors_;
  std::vector<std::string> endpoints_;
  std::set<std::shared_ptr<Stranger>> strangers_;
  std::vector<RankIdentity> joined_;
  std::vector<std::pair<int, std::shared_ptr<Link>>> links_;  // by order of joining
};

// The connecting side: tries the endpoints in turn, again and again until stopped, until one proves itself.
class Dialer : public std::enable_shared_from_this<Dialer> {
 public:
  struct Handlers {
    std::function<void()> on_joined;
    std::function<void(FrameType, std::string_view)> on_frame;
    std::function<void()> on_closed;  // after on_joined only
  };

  Dialer(asio::io_context& io, std::string token, RankIdentity self, std::vector<std::string> endpoints,
         Handlers handlers);

  void start();
  void stop();
  void send(FrameType type, std::string_view payload = {});
  bool joined() const { return joined_; }
  bool connected() const { return joined_ && link_ && link_->open(); }
  bool flushed() const { return !link_ || link_->flushed(); }

 private:
  void try_next();
  void on_connected(asio::ip::tcp::socket socket);
  void on_handshake(FrameType type, std::string_view payload);
  void retry();

  asio::io_context& io_;
  const std::string token_;
  const RankIdentity self_;
  const std::vector<std::string> endpoints_;
  Handlers handlers_;
  std::shared_ptr<Link> link_;
  asio::steady_timer timer_;
  std::size_t next_ = 0;
  bool stopped_ = false;
  bool joined_ = false;
  std::string server_nonce_;
  std::string client_nonce_;
};

// Loopback alone when the whole job is on one host, else the addresses of the interfaces that are up.
std::vector<asio::ip::address> addresses_to_bind(bool one_host);

}  // namespace holdfast
