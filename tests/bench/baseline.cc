#include "baseline.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
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

class SocketPipe final : public Pipe {
 public:
  explicit SocketPipe(int socket) : socket_(socket) {}
  ~SocketPipe() override { close(socket_); }
  void send(const void* data, size_t bytes) override {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      ssize_t sent = write(socket_, next, bytes);
      if (sent <= 0) fail("baseline: write");
      next += sent;
      bytes -= static_cast<size_t>(sent);
    }
  }
  size_t receive_some(void* data, size_t bytes) override {
    ssize_t got = read(socket_, data, bytes);
    if (got < 0) fail("baseline: read");
    return static_cast<size_t>(got);
  }

 private:
  const int socket_;
};

// The plainest ring there is: two positions, and both sides only ever spin.
struct SharedRing {
  static constexpr size_t kBytes = 4 << 20;
  alignas(128) std::atomic<uint64_t> written, read;
  alignas(128) char data[kBytes];
};

class RingPipe final : public Pipe {
 public:
  RingPipe(SharedRing* out, SharedRing* in, int hang_up) : out_(out), in_(in), hang_up_(hang_up) {}
  ~RingPipe() override {
    if (hang_up_ >= 0) close(hang_up_);
  }
  void send(const void* data, size_t bytes) override {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      const uint64_t at = out_->written.load(std::memory_order_relaxed);
      size_t room = SharedRing::kBytes - (at - out_->read.load(std::memory_order_acquire));
      room = std::min({room, bytes, kStep, SharedRing::kBytes - at % SharedRing::kBytes});
      if (room == 0) continue;
      std::memcpy(out_->data + at % SharedRing::kBytes, next, room);
      out_->written.store(at + room, std::memory_order_release);
      next += room;
      bytes -= room;
    }
  }
  size_t receive_some(void* data, size_t bytes) override {
    const uint64_t at = in_->read.load(std::memory_order_relaxed);
    size_t there = 0;
    while (there == 0) there = in_->written.load(std::memory_order_acquire) - at;
    there = std::min({there, bytes, SharedRing::kBytes - at % SharedRing::kBytes});
    std::memcpy(data, in_->data + at % SharedRing::kBytes, there);
    in_->read.store(at + there, std::memory_order_release);
    return there;
  }

  bool await() override {
    char byte;
    while (in_->written.load(std::memory_order_relaxed) ==
           in_->read.load(std::memory_order_relaxed)) {
      if (hang_up_ >= 0 && recv(hang_up_, &byte, 1, MSG_DONTWAIT) == 0) return false;
      usleep(100);
    }
    return true;
  }

 private:
  static constexpr size_t kStep = 128 * 1024;
  SharedRing *const out_, *const in_;
  const int hang_up_;
};

bool receive_all(Pipe& pipe, void* data, size_t bytes) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    size_t got = pipe.receive_some(next, bytes);
    if (got == 0) return false;
    next += got;
    bytes -= got;
  }
  return true;
}

void receive_or_fail(Pipe& pipe, void* data, size_t bytes) {
  if (!receive_all(pipe, data, bytes)) fail("baseline: the peer has gone");
}

// Takes `bytes` in chunks and copies each chunk once, as a receiver must that checks what it got.
void receive_copying(Pipe& pipe, char* chunk, char* target, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    size_t got = pipe.receive_some(chunk, std::min(kChunk, bytes - done));
    if (got == 0) fail("baseline: the peer has gone");
    std::memcpy(target + done, chunk, got);
    done += got;
  }
}

[[noreturn]] void serve(Pipe& pipe) {
  std::vector<char> target(kTargetBytes, 1), chunk(kChunk), request(64);
  for (;;) {
    Order order;
    if (!pipe.await() || !receive_all(pipe, &order, sizeof order)) _exit(0);
    for (uint32_t i = 0; i < order.count; ++i) {
      switch (order.work) {
        case Work::kEcho:
          receive_or_fail(pipe, target.data(), order.bytes);
          pipe.send(target.data(), order.bytes);
          break;
        case Work::kSink:
          receive_copying(pipe, chunk.data(), target.data(), order.bytes);
          break;
        case Work::kSource:
          receive_or_fail(pipe, request.data(), request.size());
          pipe.send(target.data(), order.bytes);
          break;
      }
    }
    if (order.work == Work::kSink) pipe.send("a", 1);
  }
}

void no_delay(int socket) {
  int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

void connect_pair(Carrier carrier, int pair[2]) {
  if (carrier != Carrier::kTcp) {
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

SharedRing* map_rings(int file) {
  void* memory = mmap(nullptr, 2 * sizeof(SharedRing), PROT_READ | PROT_WRITE,
                      MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
  if (memory == MAP_FAILED) fail("mmap");
  return static_cast<SharedRing*>(memory);
}

SharedRing* open_rings(const char* region) {
  const int file = open(region, O_RDWR | O_CLOEXEC);
  struct stat status{};
  if (file < 0 || fstat(file, &status) != 0) fail(region);
  if (static_cast<size_t>(status.st_size) < 2 * sizeof(SharedRing)) {
    std::fprintf(stderr, "bench: %s is smaller than %zu bytes\n", region, 2 * sizeof(SharedRing));
    std::exit(2);
  }
  SharedRing* rings = map_rings(file);
  close(file);
  return rings;
}

}  // namespace

void serve_region(const char* region) {
  SharedRing* rings = open_rings(region);
  RingPipe pipe(&rings[1], &rings[0], -1);
  serve(pipe);
}

RawPeer::RawPeer(const char* region) {
  SharedRing* rings = open_rings(region);
  pipe_ = std::make_unique<RingPipe>(&rings[0], &rings[1], -1);
}

RawPeer::RawPeer(Carrier carrier) {
  int pair[2];
  connect_pair(carrier, pair);
  SharedRing* rings = carrier == Carrier::kRing ? map_rings(-1) : nullptr;
  const auto end_of = [&](int side) -> std::unique_ptr<Pipe> {
    if (rings == nullptr) return std::make_unique<SocketPipe>(pair[side]);
    return std::make_unique<RingPipe>(&rings[side], &rings[1 - side], pair[side]);
  };
  process_ = fork();
  if (process_ < 0) fail("fork");
  if (process_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[0]);
    serve(*end_of(1));
  }
  close(pair[1]);
  pipe_ = end_of(0);
}

RawPeer::~RawPeer() {
  pipe_.reset();
  if (process_ >= 0) waitpid(process_, nullptr, 0);
}

std::vector<double> RawPeer::ping_pong(int count, size_t bytes) {
  std::vector<char> message(bytes, 0);
  std::vector<double> seconds(static_cast<size_t>(count));
  Order order{Work::kEcho, static_cast<uint32_t>(count), bytes};
  pipe_->send(&order, sizeof order);
  for (double& one : seconds) {
    double start = now_seconds();
    pipe_->send(message.data(), bytes);
    receive_or_fail(*pipe_, message.data(), bytes);
    one = now_seconds() - start;
  }
  return seconds;
}

double RawPeer::send_stream(const char* data, size_t bytes, int count) {
  Order order{Work::kSink, static_cast<uint32_t>(count), bytes};
  char acknowledgement;
  pipe_->send(&order, sizeof order);
  double start = now_seconds();
  for (int i = 0; i < count; ++i) pipe_->send(data, bytes);
  receive_or_fail(*pipe_, &acknowledgement, 1);
  return now_seconds() - start;
}

double RawPeer::receive(char* target, size_t bytes, int count) {
  static std::vector<char> chunk(kChunk);
  Order order{Work::kSource, static_cast<uint32_t>(count), bytes};
  char request[64] = {0};
  pipe_->send(&order, sizeof order);
  double start = now_seconds();
  for (int i = 0; i < count; ++i) {
    pipe_->send(request, sizeof request);
    receive_copying(*pipe_, chunk.data(), target, bytes);
  }
  return now_seconds() - start;
}

}  // namespace gpupool::bench
