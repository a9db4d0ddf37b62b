// Own code, a page of it, since prometheus-cpp's server (civetweb) gives its threads 100 KiB of stack. That
// includes thread-local storage, of which a process with OpenBLAS and glog has more: pthread_create() refuses
// there (EINVAL).
#include "holdfast/coord/metrics_endpoint.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <array>
#include <asio.hpp>
#include <chrono>
#include <string_view>
#include <thread>

namespace holdfast {
namespace {

using asio::ip::tcp;

constexpr std::size_t kMostConnections = 64;
constexpr std::size_t kMostRequestBytes = 8192;
constexpr std::chrono::seconds kConnectionTime{3};
constexpr std::chrono::milliseconds kRestTime{
    100};  // when nothing can be accepted, such as for want of descriptors

std::string response(std::string_view status, std::string_view body) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
      "Content-Length: {}\r\nConnection: close\r\n\r\n{}",
      status, body.size(), body);
}

std::string answer(std::string_view request, const RunMetrics& metrics) {
  const std::string_view line = request.substr(0, request.find("\r\n"));
  if (!line.starts_with("GET ")) return response("405 Method Not Allowed", "GET only\n");
  const std::string_view target = line.substr(4, line.find(' ', 4) - 4);
  if (target.substr(0, target.find('?')) != "/metrics") return response("404 Not Found", "see /metrics\n");
  return response("200 OK", metrics_text(metrics.collect()));
}

// One request and its answer. Lives as long as an operation of it is pending.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, const RunMetrics& metrics, std::shared_ptr<void> counted)
      : socket_(std::move(socket)),
        deadline_(socket_.get_executor(), kConnectionTime),
        metrics_(metrics),
        counted_(std::move(counted)) {}

  void start() {
    deadline_.async_wait([self = shared_from_this()](const asio::error_code& error) {
      if (!error) self->close();
    });
    read();
  }

 private:
  void read() {
    socket_.async_read_some(asio::buffer(part_),
                            [self = shared_from_this()](const asio::error_code& error, std::size_t bytes) {
                              if (error) return self->close();
                              self->text_.append(self->part_.data(), bytes);
                              if (self->text_.find("\r\n\r\n") != std::string::npos) return self->write();
                              if (self->text_.size() > kMostRequestBytes) return self->close();
                              self->read();
                            });
  }

  void write() {
    text_ = answer(text_, metrics_);
    asio::async_write(socket_, asio::buffer(text_),
                      [self = shared_from_this()](const asio::error_code&, std::size_t) { self->close(); });
  }

  void close() {
    asio::error_code ignored;
    deadline_.cancel();
    socket_.shutdown(tcp::socket::shutdown_both, ignored);
    socket_.close(ignored);
  }

  tcp::socket socket_;
  asio::steady_timer deadline_;
  const RunMetrics& metrics_;
  const std::shared_ptr<void> counted_;
  std::array<char, 1024> part_;
  std::string text_;  // the request, then the answer
};

}  // namespace

class MetricsEndpoint::Server {
 public:
  // Throws when the port cannot be had.
  Server(const tcp::endpoint& where, const RunMetrics& metrics)
      : metrics_(metrics), acceptor_(io_, where), rest_(io_) {
    accept();
    thread_ = std::thread([this] {
      setpriority(PRIO_PROCESS, 0, 19);  // of this thread alone, on Linux
      io_.run();
    });
  }
  ~Server() {
    io_.stop();
    thread_.join();
  }
  int port() const { return acceptor_.local_endpoint().port(); }

 private:
  void accept() {
    acceptor_.async_accept([this](const asio::error_code& error, tcp::socket socket) {
      if (error) {
        rest_.expires_after(kRestTime);
        return rest_.async_wait([this](const asio::error_code&) { accept(); });
      }
      // The count is of its copies: one here, and one in each connection.
      if (static_cast<std::size_t>(connections_.use_count()) <= kMostConnections) {
        std::make_shared<Connection>(std::move(socket), metrics_, connections_)->start();
      }
      accept();
    });
  }

  const RunMetrics& metrics_;
  const std::shared_ptr<void> connections_ = std::make_shared<char>();
  asio::io_context io_{1};
  tcp::acceptor acceptor_;
  asio::steady_timer rest_;
  std::thread thread_;
};

Status MetricsEndpoint::create(const std::string& address, int port, const RunMetrics& metrics,
                               std::unique_ptr<MetricsEndpoint>* out) {
  if (port < 0 || port > 65535) return Status::usage(fmt::format("{} is no port for metrics", port));
  asio::error_code error;
  const asio::ip::address parsed = asio::ip::make_address(address, error);
  if (error) return Status::usage("the metrics' address '" + address + "' is not a numeric IP address");
  const std::string host = parsed.is_v6() ? "[" + address + "]" : address;
  try {
    auto server = std::make_unique<Server>(tcp::endpoint(parsed, static_cast<unsigned short>(port)), metrics);
    std::string url = fmt::format("http://{}:{}/metrics", host, server->port());
    out->reset(new MetricsEndpoint(std::move(server), std::move(url)));
    return Status();
  } catch (const std::exception& failure) {
    return Status::usage(
        fmt::format("cannot serve metrics on {} port {}: {}", address, port, failure.what()));
  }
}

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<Server> server, std::string url)
    : server_(std::move(server)), url_(std::move(url)) {}
MetricsEndpoint::~MetricsEndpoint() = default;

}  // namespace holdfast
