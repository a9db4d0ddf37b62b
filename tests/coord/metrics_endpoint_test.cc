#include "holdfast/coord/metrics_endpoint.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

namespace holdfast {
namespace {

// A connection to the endpoint, that gives up after ten seconds.
class Client {
 public:
  explicit Client(const MetricsEndpoint& endpoint) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in where = {};
    where.sin_family = AF_INET;
    const std::string& url = endpoint.url();
    where.sin_port = htons(static_cast<in_port_t>(std::stoi(url.substr(url.rfind(':') + 1))));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval patience = {10, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&where), sizeof where) == 0;
  }
  ~Client() { close(fd_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(const std::string& text) {
    static_cast<void>(::send(fd_, text.data(), text.size(), MSG_NOSIGNAL));
  }
  // Until the other side closes.
  std::string read_all() {
    std::string text;
    char part[4096];
    for (ssize_t n = 1; (n = recv(fd_, part, sizeof part, 0)) > 0;)
      text.append(part, static_cast<std::size_t>(n));
    return text;
  }
  // Whether the other side closes within `time`, with an answer or without.
  bool closed_within(std::chrono::milliseconds time) {
    pollfd readable = {fd_, POLLIN, 0};
    if (poll(&readable, 1, static_cast<int>(time.count())) != 1) return false;
    char byte = 0;
    return recv(fd_, &byte, 1, 0) <= 0;
  }
  bool connected() const { return connected_; }

 private:
  const int fd_;
  bool connected_;
};

struct Endpoint {
  Endpoint() {
    const Status status = MetricsEndpoint::create("127.0.0.1", 0, metrics, &server);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  std::string ask(const std::string& request) {
    Client client(*server);
    client.send(request);
    return client.read_all();
  }
  RunMetrics metrics{{"r"}, 3, 2};
  std::unique_ptr<MetricsEndpoint> server;
};

TEST(MetricsEndpoint, GivesTheTextOfTheMetrics) {
  Endpoint endpoint;
  endpoint.metrics.count_update();
  const std::string text = metrics_text(endpoint.metrics.collect());
  const std::string answer = endpoint.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n"));
  EXPECT_NE(answer.find("Content-Length: " + std::to_string(text.size()) + "\r\n"), std::string::npos);
  EXPECT_TRUE(answer.ends_with("\r\n\r\n" + text));
}

TEST(MetricsEndpoint, AnswersNothingElse) {
  Endpoint endpoint;
  EXPECT_TRUE(endpoint.ask("GET /metrics?x=1 HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200"));
  EXPECT_TRUE(endpoint.ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
  EXPECT_TRUE(endpoint.ask("GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
  EXPECT_TRUE(endpoint.ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
  EXPECT_TRUE(endpoint.ask("\r\n\r\n").starts_with("HTTP/1.1 405"));
  EXPECT_TRUE(endpoint.ask("GET \r\n\r\n").starts_with("HTTP/1.1 404"));
  EXPECT_EQ(endpoint.ask(std::string(20000, 'x')), "") << "no request is so long";
}

// The server keeps what it has read of a request, so the limit bounds its memory. Every connection is closed
// after three seconds: only what is closed sooner was cut off for its size.
TEST(MetricsEndpoint, AHeaderWithoutEndIsCutOffOnceItIsBeyondTheLimit) {
  constexpr std::size_t kLimit = 8192;
  Endpoint endpoint;
  Client client(*endpoint.server);
  std::string header = "GET /metrics HTTP/1.1\r\nX: ";
  header.append(kLimit - header.size(), 'x');
  const auto begin = std::chrono::steady_clock::now();
  client.send(header);
  EXPECT_FALSE(client.closed_within(std::chrono::milliseconds(500))) << "the limit itself is waited for";
  client.send("x");
  EXPECT_TRUE(client.closed_within(std::chrono::milliseconds(1500)));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(2500));
}

TEST(MetricsEndpoint, AFloodIsNotTakenInBeyondTheLimit) {
  constexpr std::size_t kPart = 1024;
  constexpr int kMostParts = 128;  // 16 times the limit
  Endpoint endpoint;
  Client client(*endpoint.server);
  bool closed = false;
  int parts = 0;
  client.send("GET /metrics HTTP/1.1\r\nX: ");
  for (; parts < kMostParts && !closed; ++parts) {
    client.send(std::string(kPart, 'x'));
    closed = client.closed_within(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(closed) << "after " << parts << " KiB";
  EXPECT_TRUE(endpoint.ask("GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
}

TEST(MetricsEndpoint, ThoseThatStallAreDroppedAndMakeRoom) {
  Endpoint endpoint;
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(std::make_unique<Client>(*endpoint.server));
  EXPECT_TRUE(silent.back()->connected());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(silent.back()->read_all(), "") << "one too many";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2))
      << "closed at once, not in its time";
  EXPECT_EQ(silent.front()->read_all(), "") << "dropped after its time";
  EXPECT_TRUE(endpoint.ask("GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
}

TEST(MetricsEndpoint, APortOrAddressThatCannotBeHadIsUsage) {
  Endpoint endpoint;
  const std::string& url = endpoint.server->url();
  const int port = std::stoi(url.substr(url.rfind(':') + 1));
  std::unique_ptr<MetricsEndpoint> other;
  const Status taken = MetricsEndpoint::create("127.0.0.1", port, endpoint.metrics, &other);
  EXPECT_EQ(taken.code(), StatusCode::kUsage);
  EXPECT_NE(taken.message().find("127.0.0.1 port " + std::to_string(port)), std::string::npos);
  EXPECT_EQ(MetricsEndpoint::create("localhost", 0, endpoint.metrics, &other).code(), StatusCode::kUsage);
  EXPECT_EQ(MetricsEndpoint::create("192.0.2.1", 0, endpoint.metrics, &other).code(), StatusCode::kUsage);
}

TEST(MetricsEndpoint, EndsWithConnectionsOpen) {
  auto endpoint = std::make_unique<Endpoint>();
  Client client(*endpoint->server);
  client.send("GET /met");
  endpoint.reset();
  EXPECT_EQ(client.read_all(), "");
}

}  // namespace
}  // namespace holdfast
