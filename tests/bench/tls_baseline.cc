// gpupool-bench-tls: TLS 1.3 over TCP on loopback between two processes that do nothing else, as a
// baseline for sessions that go to another host. Prints what gpupool-bench-client prints.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "carriers/patience.h"
#include "measure.h"
#include "relay/tls.h"

namespace {

using namespace gpupool;
using relay::TlsConnection;

constexpr size_t kMessage = 64, kCopy = 64 << 20, kPiece = 64 << 10;
constexpr int kRounds = 2000;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::exit(1);
}

void wait_for(TlsConnection& tls, TlsConnection::Result result) {
  if (result == TlsConnection::Result::kClosed) fail("the TLS connection: " + tls.problem());
  const bool reads = result == TlsConnection::Result::kWantsRead;
  pollfd entry{tls.fd(), static_cast<short>(reads ? POLLIN : POLLOUT), 0};
  poll(&entry, 1, -1);
}

void write_all(TlsConnection& tls, const char* data, size_t bytes) {
  while (bytes > 0) {
    size_t done = 0;
    const auto result = tls.write(data, std::min(bytes, kPiece), &done);
    if (result != TlsConnection::Result::kOk) wait_for(tls, result);
    data += done;
    bytes -= done;
  }
}

// Into a buffer that the caches keep, and from there to where it belongs.
void read_all(TlsConnection& tls, char* data, size_t bytes) {
  static char piece[kPiece];
  while (bytes > 0) {
    size_t done = 0;
    const auto result = tls.read(piece, std::min(bytes, kPiece), &done);
    if (result != TlsConnection::Result::kOk) wait_for(tls, result);
    std::memcpy(data, piece, done);
    data += done;
    bytes -= done;
  }
}

void connect_pair(int pair[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  pair[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, generic, size) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, generic, &size) != 0 || connect(pair[0], generic, size) != 0 ||
      (pair[1] = accept(listener, nullptr, nullptr)) < 0) {
    fail(std::string("loopback: ") + std::strerror(errno));
  }
  close(listener);
  const int on = 1;
  for (int i = 0; i < 2; i++) setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::unique_ptr<TlsConnection> shake_hands(const relay::TlsFiles& files, relay::Role role, int fd,
                                           const std::string& peer) {
  std::string why;
  const auto context = relay::TlsContext::load(files, role, &why);
  if (context == nullptr) fail(why);
  auto connection =
      context->connect(relay::Fd(fd), peer, carriers::Patience::now_ns() + 10'000'000'000, &why);
  if (connection == nullptr) fail(why);
  return connection;
}

char* memory() {
  void* at = mmap(nullptr, kCopy, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail("mmap");
  std::memset(at, 1, kCopy);
  return static_cast<char*>(at);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: gpupool-bench-tls CERTIFICATE KEY AUTHORITIES NAME REPETITIONS\n");
    return 2;
  }
  const relay::TlsFiles files{argv[1], argv[2], argv[3]};
  const int repetitions = std::atoi(argv[5]);
  std::signal(SIGPIPE, SIG_IGN);
  int pair[2];
  connect_pair(pair);
  const pid_t child = fork();
  char small[kMessage] = {};
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[0]);
    const auto tls = shake_hands(files, relay::Role::kServer, pair[1], {});
    char* to = memory();
    for (int repetition = 0; repetition < repetitions; repetition++) {
      for (int i = 0; i < kRounds; i++) {
        read_all(*tls, small, sizeof small);
        write_all(*tls, small, sizeof small);
      }
      read_all(*tls, to, kCopy);
      write_all(*tls, small, 1);
      read_all(*tls, small, 1);
      write_all(*tls, to, kCopy);
    }
    return 0;
  }
  close(pair[1]);
  const auto tls = shake_hands(files, relay::Role::kClient, pair[0], argv[4]);
  char* from = memory();
  bench::Results results;
  for (int repetition = 0; repetition < repetitions; repetition++) {
    double start = bench::now_seconds();
    for (int i = 0; i < kRounds; i++) {
      write_all(*tls, small, sizeof small);
      read_all(*tls, small, sizeof small);
    }
    results.add("TLS ping-pong", "us", (bench::now_seconds() - start) / kRounds * 1e6);
    start = bench::now_seconds();
    write_all(*tls, from, kCopy);
    read_all(*tls, small, 1);
    results.add("TLS to device, 64 MiB", "MB/s", kCopy / (bench::now_seconds() - start) / 1e6);
    write_all(*tls, small, 1);
    start = bench::now_seconds();
    read_all(*tls, from, kCopy);
    results.add("TLS to host, 64 MiB", "MB/s", kCopy / (bench::now_seconds() - start) / 1e6);
  }
  results.print();
  waitpid(child, nullptr, 0);
  return 0;
}
