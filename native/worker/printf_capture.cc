#include "worker/printf_capture.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

namespace gpupool::worker {
namespace {
constexpr size_t kMaxText =
    8 * 1024 * 1024;  // the rest waits in the pipe, and then the driver does
}

PrintfCapture::PrintfCapture() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;
  read_end_ = ends[0];
  fcntl(read_end_, F_SETFL, O_NONBLOCK);
  fcntl(read_end_, F_SETPIPE_SZ, 1024 * 1024);
  fflush(stdout);
  saved_stdout_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 10);
  dup2(ends[1], STDOUT_FILENO);
  ::close(ends[1]);
  if (pipe2(stop_, O_CLOEXEC) != 0) return;
  drainer_ = std::thread([this] { drain_loop(); });
}

PrintfCapture::~PrintfCapture() {
  if (drainer_.joinable()) {
    if (::write(stop_[1], "", 1) < 0) return;
    drainer_.join();
  }
  fflush(stdout);
  if (saved_stdout_ >= 0) {
    dup2(saved_stdout_, STDOUT_FILENO);
    ::close(saved_stdout_);
  }
  for (int fd : {read_end_, stop_[0], stop_[1]}) {
    if (fd >= 0) ::close(fd);
  }
}

void PrintfCapture::drain_locked() {
  char piece[16384];
  while (text_.size() < kMaxText) {
    const ssize_t n = ::read(read_end_, piece, sizeof piece);
    if (n <= 0) return;
    text_.append(piece, static_cast<size_t>(n));
  }
}

void PrintfCapture::drain_loop() {
  for (;;) {
    pollfd waits[2] = {{read_end_, POLLIN, 0}, {stop_[0], POLLIN, 0}};
    if (::poll(waits, 2, -1) < 0) continue;
    if (waits[1].revents != 0) return;
    bool full;
    {
      std::lock_guard guard(lock_);
      drain_locked();
      full = text_.size() >= kMaxText;
    }
    if (full) {
      pollfd stop{stop_[0], POLLIN, 0};
      if (::poll(&stop, 1, 10) > 0) return;
    }
  }
}

std::string PrintfCapture::take() {
  if (read_end_ < 0) return {};
  fflush(stdout);
  std::lock_guard guard(lock_);
  drain_locked();
  std::string text;
  text.swap(text_);
  return text;
}

}  // namespace gpupool::worker
