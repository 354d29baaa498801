// A broker for one program, without slices, confinement or a daemon: serves the client library from
// a driver directory, one worker process per data connection. For tests and measurements of the
// data plane alone.
//
//   local_server DRIVER_DIRECTORY MEMORY_MIB unix|tcp -- PROGRAM ARGUMENTS…
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "carriers/carrier.h"
#include "wire/handshake.h"
#include "worker/driver.h"
#include "worker/session.h"

using namespace gpupool;  // NOLINT

namespace {

constexpr char kUuid[] = "6b1f2c3d-0102-4304-8506-0708090a0b0c";

// Shared by the worker processes of this server.
class SharedAccount final : public worker::MemoryAccount {
 public:
  explicit SharedAccount(uint64_t limit) : limit_(limit) {
    used_ = static_cast<std::atomic<uint64_t>*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  bool charge(uint64_t bytes) override {
    uint64_t used = used_->load();
    do {
      if (bytes > limit_ - used) return false;
    } while (!used_->compare_exchange_weak(used, used + bytes));
    return true;
  }
  void refund(uint64_t bytes) override { used_->fetch_sub(bytes); }
  State query() override { return {limit_, used_->load()}; }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t>* used_;
};

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "local_server: %s\n", why.c_str());
  _exit(3);
}

int run_and_collect(int fd, wire::ServerHandshake& handshake, wire::ServerHandshake::State until) {
  while (handshake.state() != until) {
    uint8_t buffer[4096];
    const size_t wanted = std::min(handshake.wanted(), sizeof buffer);
    if (wanted > 0) {
      const ssize_t n = ::recv(fd, buffer, wanted, 0);
      if (n <= 0) return -1;
      handshake.input(buffer, static_cast<size_t>(n));
    }
    std::string& out = handshake.output();
    while (!out.empty()) {
      const ssize_t n = ::send(fd, out.data(), out.size(), MSG_NOSIGNAL);
      if (n <= 0) return -1;
      out.erase(0, static_cast<size_t>(n));
    }
    if (handshake.state() == wire::ServerHandshake::State::kRefused) return -1;
  }
  return 0;
}

// One connection, in a process of its own.
[[noreturn]] void serve(int fd, const std::string& driver_directory, uint64_t memory,
                        worker::MemoryAccount& account, const wire::LeaseKey& key) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  wire::ServerHandshake handshake([&](const wire::Uuid&) { return key; });
  if (run_and_collect(fd, handshake, wire::ServerHandshake::State::kProven) != 0) _exit(1);
  std::string why;
  auto driver = worker::Driver::load(driver_directory, &why);
  if (driver == nullptr) fail(why);
  const bool device =
      handshake.hello().purpose == static_cast<uint16_t>(wire::ConnectionPurpose::kDevice);
  std::vector<wire::DeviceSnapshot> snapshots;
  if (!device) {
    snapshots.resize(1);
    if (!worker::take_snapshot(*driver, 0, &snapshots[0], &why)) fail(why);
    snapshots[0].memory_bytes = memory;
  }
  constexpr uint32_t kEpoch = 7;
  handshake.welcome(*wire::parse_uuid(kUuid), kEpoch, wire::kInitialCredit, snapshots);
  run_and_collect(fd, handshake, wire::ServerHandshake::State::kWelcomed);
  std::string& out = handshake.output();
  while (!out.empty()) {
    const ssize_t n = ::send(fd, out.data(), out.size(), MSG_NOSIGNAL);
    if (n <= 0) _exit(1);
    out.erase(0, static_cast<size_t>(n));
  }
  if (!device) {
    char byte;
    while (::recv(fd, &byte, 1, 0) > 0) {
    }
    _exit(0);
  }
  worker::Assignment assignment;
  assignment.epoch = kEpoch;
  assignment.minor = handshake.minor();
  assignment.initial_credit = wire::kInitialCredit;
  assignment.arena_base = handshake.hello().arena_base;
  assignment.arena_bytes = handshake.hello().arena_bytes;
  worker::SessionOutcome outcome;
  {
    worker::Session session(carriers::make_socket_carrier(fd), assignment, *driver, account);
    outcome = session.run();
    const worker::SessionCounters counters = session.counters();
    if (getenv("LOCAL_SERVER_VERBOSE") != nullptr) {
      fprintf(stderr, "local_server: %s; %lu commands, %lu launches\n", outcome.sentence.c_str(),
              static_cast<unsigned long>(counters.commands),
              static_cast<unsigned long>(counters.launches));
    }
  }
  if (outcome.end != worker::SessionEnd::kClientGone) fail(outcome.sentence);
  const uint64_t left = account.query().used_bytes;
  if (left != 0)
    fprintf(stderr, "local_server: %lu bytes are still charged\n", (unsigned long)left);
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6 || strcmp(argv[4], "--") != 0)
    fail("usage: DRIVER_DIRECTORY MEMORY_MIB unix|tcp -- PROGRAM …");
  const std::string driver_directory = argv[1];
  const uint64_t memory = strtoull(argv[2], nullptr, 10) << 20;
  const bool tcp = strcmp(argv[3], "tcp") == 0;
  char directory[] = "/tmp/local_server.XXXXXX";
  if (mkdtemp(directory) == nullptr) fail("mkdtemp");
  const std::string path = std::string(directory) + "/session.sock";
  int listener;
  std::string carrier;
  if (tcp) {
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0) fail("bind");
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
    carrier = R"({"kind":"tcp","host":"127.0.0.1","port":)" +
              std::to_string(ntohs(address.sin_port)) + "}";
  } else {
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path, path.c_str());
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail("bind");
    carrier = R"({"kind":"unix","path":")" + path + "\"}";
  }
  listen(listener, 64);
  wire::LeaseKey key;
  for (size_t i = 0; i < key.size(); i++) key[i] = static_cast<uint8_t>(i * 7 + 1);
  std::string hex;
  for (uint8_t byte : key) {
    char text[3];
    snprintf(text, sizeof text, "%02x", byte);
    hex += text;
  }
  const std::string lease_path = std::string(directory) + "/lease.json";
  FILE* lease = fopen(lease_path.c_str(), "w");
  fchmod(fileno(lease), 0600);
  fprintf(lease, R"({"version":1,"lease":"%s","key":"%s","carriers":[%s]})", kUuid, hex.c_str(),
          carrier.c_str());
  fclose(lease);

  SharedAccount account(memory);
  const pid_t program = fork();
  if (program == 0) {
    setenv("GPUPOOL_LEASE_FILE", lease_path.c_str(), 1);
    execvp(argv[5], argv + 5);
    fail(std::string("cannot run ") + argv[5]);
  }
  const pid_t acceptor = fork();
  if (acceptor == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
      const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      if (fork() == 0) {
        close(listener);
        signal(SIGCHLD, SIG_DFL);
        serve(fd, driver_directory, memory, account, key);
      }
      close(fd);
    }
  }
  int status = 0;
  waitpid(program, &status, 0);
  usleep(20000);  // the workers' last words
  kill(acceptor, SIGKILL);
  waitpid(acceptor, nullptr, 0);
  unlink(lease_path.c_str());
  unlink(path.c_str());
  rmdir(directory);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
