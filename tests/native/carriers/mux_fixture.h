// Two ends of a multiplexer over a stream that is cut into random pieces.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "carriers/mux.h"

namespace gpupool::carriers {

inline void socket_pair(int fds[2]) {
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
}

// One side: its Mux, its end of the port, and the programs' ends of the channels' sockets.
class End final : public MuxOwner {
 public:
  explicit End(Mux::Side side, size_t max_channels = Mux::kMaxChannels)
      : side_(side), max_channels_(max_channels) {
    int fds[2];
    socket_pair(fds);
    port_ = fds[0];
    outside = fds[1];
    restart();
  }
  ~End() override {
    mux.reset();
    for (int fd : {port_, outside}) close(fd);
    for (int fd : sockets) close(fd);
  }

  // As a process that dies and is started again: nothing of its state is left.
  void restart() {
    mux.reset();
    for (int& fd : sockets) {
      close(fd);
      fd = -1;
    }
    mux = std::make_unique<Mux>(side_, port_, *this, max_channels_);
  }

  int open() {
    int fds[2];
    socket_pair(fds);
    std::string why;
    EXPECT_TRUE(mux->open(fds[0], &why)) << why;
    sockets.push_back(fds[1]);
    return fds[1];
  }

  int on_open(std::string* why) override {
    if (!refuse.empty()) return *why = refuse, -1;
    int fds[2];
    socket_pair(fds);
    sockets.push_back(fds[1]);
    return fds[0];
  }
  void on_up() override { ups++; }
  void on_down(const std::string& why, bool fault) override {
    downs.push_back(why);
    faults += fault ? 1 : 0;
  }
  void on_refused(const std::string& why) override { refused = why; }
  void on_close(int, bool accepted, const std::string& why) override {
    (accepted ? closed : not_accepted).push_back(why);
  }
  void on_info(std::string_view json) override { info = json; }
  int descriptor() override { return given; }

  std::unique_ptr<Mux> mux;
  int outside = -1;  // the other end of the port
  std::vector<int> sockets;
  std::string refuse, refused, info;
  std::vector<std::string> downs, closed, not_accepted;
  int ups = 0, faults = 0;
  int given = -1;

 private:
  const Mux::Side side_;
  const size_t max_channels_;
  int port_ = -1;
};

// Moves what one end sent to the other end, in pieces.
class Wire {
 public:
  explicit Wire(unsigned seed) : random(seed) {}

  void move(int from, int to, std::string& waiting) {
    char buffer[70000];
    std::uniform_int_distribution<size_t> sizes(1, random() % 4 == 0 ? sizeof buffer : 300);
    const ssize_t got = recv(from, buffer, sizes(random), MSG_DONTWAIT);
    if (got > 0) waiting.append(buffer, static_cast<size_t>(got));
    if (waiting.empty()) return;
    const ssize_t sent = send(to, waiting.data(), waiting.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) waiting.erase(0, static_cast<size_t>(sent));
  }

  void step(End& guest, End& host) {
    ASSERT_TRUE(guest.mux->run());
    ASSERT_TRUE(host.mux->run());
    move(guest.outside, host.outside, upwards);
    move(host.outside, guest.outside, downwards);
  }

  template <typename Condition>
  ::testing::AssertionResult until(End& guest, End& host, Condition&& condition) {
    for (int i = 0; i < 400000; i++) {
      if (condition()) return ::testing::AssertionSuccess();
      step(guest, host);
      if (::testing::Test::HasFatalFailure()) break;
    }
    return ::testing::AssertionFailure() << "it did not come about";
  }
  ::testing::AssertionResult up(End& guest, End& host) {
    return until(guest, host, [&] { return guest.mux->up() && host.mux->up(); });
  }

  std::mt19937 random;
  std::string upwards, downwards;
};

class MuxTest : public ::testing::Test {
 protected:
  MuxTest() { signal(SIGPIPE, SIG_IGN); }
  End guest{Mux::Side::kGuest};
  End host{Mux::Side::kHost};
  Wire wire{7};
};

}  // namespace gpupool::carriers
