#include "side_channel.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include "byte_codec.h"
#include "handshake.h"

namespace holdfast {
namespace {

using asio::error_code;
using asio::ip::tcp;

std::string encode_identity(const RankIdentity& who) {
  return ByteWriter()
      .u32(static_cast<std::uint32_t>(who.rank))
      .u64(static_cast<std::uint64_t>(who.pid))
      .text(who.host)
      .take();
}

bool decode_identity(std::string_view bytes, RankIdentity* who) {
  ByteReader reader(bytes);
  who->rank = static_cast<int>(reader.u32());
  who->pid = static_cast<std::int64_t>(reader.u64());
  who->host = std::string(reader.text());
  return reader.done();
}

// "address:port"; IPv6 addresses hold colons of their own.
bool parse_endpoint(const std::string& text, tcp::endpoint* endpoint) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos) return false;
  error_code error;
  const auto address = asio::ip::make_address(text.substr(0, colon), error);
  if (error) return false;
  *endpoint = tcp::endpoint(address, static_cast<unsigned short>(std::atoi(text.c_str() + colon + 1)));
  return true;
}

}  // namespace

// ---- Link

Link::Link(tcp::socket socket) : socket_(std::move(socket)) {
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
}

void Link::handle(OnFrame on_frame, OnClosed on_closed) {
  on_frame_ = std::move(on_frame);
  on_closed_ = std::move(on_closed);
}

void Link::start() { read_header(); }

void Link::read_header() {
  asio::async_read(
      socket_, asio::buffer(header_), [self = shared_from_this()](error_code error, std::size_t) {
        if (error) return self->fail();
        const std::uint32_t length = ByteReader({self->header_.data(), self->header_.size()}).u32();
        if (length == 0 || length > self->max_frame_) return self->fail();
        self->read_body(length);
      });
}

void Link::read_body(std::uint32_t length) {
  body_.resize(length);
  asio::async_read(socket_, asio::buffer(body_), [self = shared_from_this()](error_code error, std::size_t) {
    if (error) return self->fail();
    const auto type = static_cast<FrameType>(self->body_.front());
    const OnFrame handler = self->on_frame_;  // it may be replaced meanwhile
    if (handler) handler(type, std::string_view(self->body_).substr(1));
    if (self->open()) self->read_header();
  });
}

void Link::send(FrameType type, std::string_view payload) {
  if (!open()) return;
  outgoing_.push_back(ByteWriter()
                          .u32(static_cast<std::uint32_t>(payload.size() + 1))
                          .u8(static_cast<std::uint8_t>(type))
                          .raw(payload)
                          .take());
  if (outgoing_.size() == 1) write_next();
}

void Link::write_next() {
  asio::async_write(socket_, asio::buffer(outgoing_.front()),
                    [self = shared_from_this()](error_code error, std::size_t) {
                      if (error || !self->open()) return self->fail();
                      self->outgoing_.pop_front();
                      if (!self->outgoing_.empty()) self->write_next();
                    });
}

void Link::close() {
  on_frame_ = nullptr;
  on_closed_ = nullptr;
  fail();
}

void Link::fail() {
  error_code ignored;
  socket_.close(ignored);
  const OnClosed handler = std::exchange(on_closed_, nullptr);
  on_frame_ = nullptr;
  if (handler) handler();
}

// ---- Listener

struct Listener::Stranger {
  explicit Stranger(asio::io_context& io) : deadline(io) {}
  std::shared_ptr<Link> link;
  std::string nonce;
  asio::steady_timer deadline;
};

Listener::Listener(asio::io_context& io, std::string token, std::set<int> expected, Handlers handlers)
    : io_(io), token_(std::move(token)), expected_(std::move(expected)), handlers_(std::move(handlers)) {}

Listener::~Listener() {
  for (const auto& stranger : strangers_) stranger->link->close();
  for (const auto& [rank, link] : links_) link->close();
}

Status Listener::listen(const std::vector<asio::ip::address>& addresses) {
  std::string why = "no network interface is up";
  for (const asio::ip::address& address : addresses) {
    auto acceptor = std::make_unique<tcp::acceptor>(io_);
    const tcp::endpoint wanted(address, 0);
    error_code error;
    acceptor->open(wanted.protocol(), error);
    if (!error) acceptor->bind(wanted, error);
    if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      why = address.to_string() + ": " + error.message();
      continue;
    }
    endpoints_.push_back(address.to_string() + ":" + std::to_string(acceptor->local_endpoint().port()));
    acceptors_.push_back(std::move(acceptor));
  }
  if (acceptors_.empty()) return Status::internal("side channel: cannot listen: " + why);
  if (complete()) {
    stop_listening();
  } else {
    for (const auto& acceptor : acceptors_) accept(*acceptor);
  }
  return Status();
}

void Listener::accept(tcp::acceptor& acceptor) {
  acceptor.async_accept([this, &acceptor](error_code error, tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (!error) greet(std::move(socket));
    if (acceptor.is_open()) accept(acceptor);
  });
}

void Listener::greet(tcp::socket socket) {
  if (strangers_.size() >= kMaxStrangers) return;  // closes it
  auto stranger = std::make_shared<Stranger>(io_);
  if (!random_secret(&stranger->nonce).ok()) return;
  stranger->link = std::make_shared<Link>(std::move(socket));
  strangers_.insert(stranger);
  stranger->deadline.expires_after(kHandshakeTime);
  stranger->deadline.async_wait([this, weak = std::weak_ptr(stranger)](error_code error) {
    if (const auto held = weak.lock(); held && !error) drop(held);
  });
  const std::weak_ptr weak(stranger);
  stranger->link->handle(
      [this, weak](FrameType type, std::string_view payload) {
        if (const auto held = weak.lock()) check_hello(held, type, payload);
      },
      [this, weak] {
        if (const auto held = weak.lock()) drop(held);
      });
  stranger->link->start();
  stranger->link->send(FrameType::kChallenge, stranger->nonce);
}

void Listener::drop(const std::shared_ptr<Stranger>& stranger) {
  stranger->deadline.cancel();
  stranger->link->close();
  strangers_.erase(stranger);
}

void Listener::check_hello(const std::shared_ptr<Stranger>& stranger, FrameType type,
                           std::string_view payload) {
  ByteReader reader(payload);
  const std::string identity(reader.text());
  const std::string_view nonce = reader.raw(kSecretBytes);
  const std::string_view proof = reader.raw(kSecretBytes);
  RankIdentity who;
  const bool proved = type == FrameType::kHello && reader.done() &&
                      same_secret(proof, client_proof(token_, stranger->nonce, nonce, identity)) &&
                      decode_identity(identity, &who) && expected_.contains(who.rank);
  if (!proved) return drop(stranger);

  const std::shared_ptr<Link> link = stranger->link;
  stranger->deadline.cancel();
  strangers_.erase(stranger);
  expected_.erase(who.rank);
  joined_.push_back(who);
  links_.emplace_back(who.rank, link);
  link->trust();
  link->handle([this, rank = who.rank](FrameType t, std::string_view p) { handlers_.on_frame(rank, t, p); },
               [this, rank = who.rank] { lost(rank); });
  link->send(FrameType::kWelcome, server_proof(token_, nonce, stranger->nonce));
  if (complete()) stop_listening();
  handlers_.on_joined(who);
}

// Before all are there, a rank whose welcome was lost tries again.
void Listener::lost(int rank) {
  if (complete()) return handlers_.on_closed(rank);
  std::erase_if(links_, [&](const auto& link) { return link.first == rank; });
  std::erase_if(joined_, [&](const RankIdentity& who) { return who.rank == rank; });
  expected_.insert(rank);
}

void Listener::stop_listening() {
  for (const auto& acceptor : acceptors_) {
    error_code ignored;
    acceptor->close(ignored);
  }
  for (const auto& stranger : strangers_) {
    stranger->deadline.cancel();
    stranger->link->close();
  }
  strangers_.clear();
}

void Listener::send_all(FrameType type, std::string_view payload) {
  for (const auto& [rank, link] : links_) link->send(type, payload);
}

bool Listener::flushed() const {
  for (const auto& [rank, link] : links_) {
    if (!link->flushed()) return false;
  }
  return true;
}

// ---- Dialer

Dialer::Dialer(asio::io_context& io, std::string token, RankIdentity self, std::vector<std::string> endpoints,
               Handlers handlers)
    : io_(io),
      token_(std::move(token)),
      self_(std::move(self)),
      endpoints_(std::move(endpoints)),
      handlers_(std::move(handlers)),
      timer_(io) {}

void Dialer::start() { try_next(); }

void Dialer::stop() {
  stopped_ = true;
  timer_.cancel();
  if (link_) link_->close();
}

void Dialer::try_next() {
  tcp::endpoint endpoint;
  if (stopped_ || endpoints_.empty()) return;
  if (!parse_endpoint(endpoints_[next_++ % endpoints_.size()], &endpoint)) return retry();
  auto socket = std::make_shared<tcp::socket>(io_);
  timer_.expires_after(kHandshakeTime);
  timer_.async_wait([self = shared_from_this(), socket](error_code error) {
    if (error || self->joined_) return;
    error_code ignored;
    socket->close(ignored);
    if (self->link_) self->link_->close();
    self->try_next();
  });
  socket->async_connect(endpoint, [self = shared_from_this(), socket](error_code error) {
    if (self->stopped_ || error == asio::error::operation_aborted) return;
    if (error) return self->retry();
    self->on_connected(std::move(*socket));
  });
}

void Dialer::retry() {
  if (stopped_ || joined_) return;
  timer_.expires_after(std::chrono::milliseconds(50));
  timer_.async_wait([self = shared_from_this()](error_code error) {
    if (!error) self->try_next();
  });
}

void Dialer::on_connected(tcp::socket socket) {
  link_ = std::make_shared<Link>(std::move(socket));
  client_nonce_.clear();
  link_->handle([self = shared_from_this()](FrameType t, std::string_view p) { self->on_handshake(t, p); },
                [self = shared_from_this()] { self->retry(); });
  link_->start();
}

void Dialer::on_handshake(FrameType type, std::string_view payload) {
  if (type == FrameType::kChallenge && payload.size() == kSecretBytes && client_nonce_.empty()) {
    server_nonce_ = payload;
    if (!random_secret(&client_nonce_).ok()) return link_->close();
    const std::string identity = encode_identity(self_);
    link_->send(FrameType::kHello, ByteWriter()
                                       .text(identity)
                                       .raw(client_nonce_)
                                       .raw(client_proof(token_, server_nonce_, client_nonce_, identity))
                                       .take());
    return;
  }
  const bool welcome = type == FrameType::kWelcome && !client_nonce_.empty() &&
                       same_secret(payload, server_proof(token_, client_nonce_, server_nonce_));
  if (!welcome) {
    link_->close();
    return retry();
  }
  joined_ = true;
  timer_.cancel();
  link_->trust();
  link_->handle(
      [self = shared_from_this()](FrameType t, std::string_view p) { self->handlers_.on_frame(t, p); },
      [self = shared_from_this()] { self->handlers_.on_closed(); });
  handlers_.on_joined();
}

void Dialer::send(FrameType type, std::string_view payload) {
  if (connected()) link_->send(type, payload);
}

// ---- addresses

std::vector<asio::ip::address> addresses_to_bind(bool one_host) {
  if (one_host) return {asio::ip::address_v4::loopback()};
  std::vector<asio::ip::address> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return found;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    const bool up = (i->ifa_flags & IFF_UP) != 0 && (i->ifa_flags & IFF_LOOPBACK) == 0;
    if (!up || i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    const auto* ipv4 = reinterpret_cast<const sockaddr_in*>(i->ifa_addr);
    found.emplace_back(asio::ip::address_v4(ntohl(ipv4->sin_addr.s_addr)));
  }
  freeifaddrs(list);
  return found;
}

}  // namespace holdfast
