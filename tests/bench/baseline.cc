#include "baseline.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "measure.h"

namespace gpupool::bench {
namespace {

constexpr size_t kChunk = 256 * 1024;              // what one read takes at most
constexpr size_t kTargetBytes = 64 * 1024 * 1024;  // largest transfer

enum class Work : uint32_t { kEcho = 1, kSink = 2, kSource = 3 };

struct Order {
  Work work;
  uint32_t count;
  uint64_t bytes;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "bench: %s: %s\n", what, std::strerror(errno));
  std::exit(2);
}

void send_all(int socket, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    ssize_t sent = write(socket, next, bytes);
    if (sent <= 0) fail("baseline: write");
    next += sent;
    bytes -= static_cast<size_t>(sent);
  }
}

void receive_all(int socket, void* data, size_t bytes) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    ssize_t got = read(socket, next, bytes);
    if (got <= 0) fail("baseline: read");
    next += got;
    bytes -= static_cast<size_t>(got);
  }
}

// Takes `bytes` in chunks and copies each chunk once, as a receiver must that checks what it got.
void receive_copying(int socket, char* chunk, char* target, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    ssize_t got = read(socket, chunk, std::min(kChunk, bytes - done));
    if (got <= 0) fail("baseline: read");
    std::memcpy(target + done, chunk, static_cast<size_t>(got));
    done += static_cast<size_t>(got);
  }
}

[[noreturn]] void serve(int socket) {
  std::vector<char> target(kTargetBytes, 1), chunk(kChunk), request(64);
  for (;;) {
    Order order;
    if (recv(socket, &order, sizeof order, MSG_WAITALL) != static_cast<ssize_t>(sizeof order)) {
      _exit(0);
    }
    for (uint32_t i = 0; i < order.count; ++i) {
      switch (order.work) {
        case Work::kEcho:
          receive_all(socket, target.data(), order.bytes);
          send_all(socket, target.data(), order.bytes);
          break;
        case Work::kSink:
          receive_copying(socket, chunk.data(), target.data(), order.bytes);
          break;
        case Work::kSource:
          receive_all(socket, request.data(), request.size());
          send_all(socket, target.data(), order.bytes);
          break;
      }
    }
    if (order.work == Work::kSink) send_all(socket, "a", 1);
  }
}

void no_delay(int socket) {
  int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

void connect_pair(Carrier carrier, int pair[2]) {
  if (carrier == Carrier::kUnix) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) fail("socketpair");
    return;
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (listener < 0 || bind(listener, generic, length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, generic, &length) != 0) {
    fail("listen on loopback");
  }
  pair[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (pair[0] < 0 || connect(pair[0], generic, length) != 0) fail("connect on loopback");
  pair[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (pair[1] < 0) fail("accept on loopback");
  close(listener);
  no_delay(pair[0]);
  no_delay(pair[1]);
}

}  // namespace

RawPeer::RawPeer(Carrier carrier) {
  int pair[2];
  connect_pair(carrier, pair);
  process_ = fork();
  if (process_ < 0) fail("fork");
  if (process_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[0]);
    serve(pair[1]);
  }
  close(pair[1]);
  socket_ = pair[0];
}

RawPeer::~RawPeer() {
  close(socket_);
  waitpid(process_, nullptr, 0);
}

std::vector<double> RawPeer::ping_pong(int count, size_t bytes) {
  std::vector<char> message(bytes, 0);
  std::vector<double> seconds(static_cast<size_t>(count));
  Order order{Work::kEcho, static_cast<uint32_t>(count), bytes};
  send_all(socket_, &order, sizeof order);
  for (double& one : seconds) {
    double start = now_seconds();
    send_all(socket_, message.data(), bytes);
    receive_all(socket_, message.data(), bytes);
    one = now_seconds() - start;
  }
  return seconds;
}

double RawPeer::send_stream(const char* data, size_t bytes, int count) {
  Order order{Work::kSink, static_cast<uint32_t>(count), bytes};
  char acknowledgement;
  send_all(socket_, &order, sizeof order);
  double start = now_seconds();
  for (int i = 0; i < count; ++i) send_all(socket_, data, bytes);
  receive_all(socket_, &acknowledgement, 1);
  return now_seconds() - start;
}

double RawPeer::receive(char* target, size_t bytes, int count) {
  static std::vector<char> chunk(kChunk);
  Order order{Work::kSource, static_cast<uint32_t>(count), bytes};
  char request[64] = {0};
  send_all(socket_, &order, sizeof order);
  double start = now_seconds();
  for (int i = 0; i < count; ++i) {
    send_all(socket_, request, sizeof request);
    receive_copying(socket_, chunk.data(), target, bytes);
  }
  return now_seconds() - start;
}

}  // namespace gpupool::bench
