#include "worker/output_capture.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>

namespace gpupool::worker {
namespace {

constexpr size_t kMaxText =
    8 * 1024 * 1024;  // the rest overflows, or waits in the pipe, and then the driver does
constexpr size_t kMaxTee = 64 * 1024;

void flush(int fd) {
  if (fd == STDOUT_FILENO) fflush(stdout);
  if (fd == STDERR_FILENO) fflush(stderr);
}

}  // namespace

OutputCapture::OutputCapture(int fd, Kind kind, std::function<void(const std::string&)> overflow)
    : fd_(fd), kind_(kind), overflow_(std::move(overflow)) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;
  read_end_ = ends[0];
  fcntl(read_end_, F_SETFL, O_NONBLOCK);
  fcntl(read_end_, F_SETPIPE_SZ, 1024 * 1024);
  flush(fd_);
  before_ = fcntl(fd_, F_DUPFD_CLOEXEC, 10);
  dup2(ends[1], fd_);
  ::close(ends[1]);
  if (pipe2(stop_, O_CLOEXEC) != 0) return;
  drainer_ = std::thread([this] { drain_loop(); });
}

OutputCapture::~OutputCapture() {
  if (drainer_.joinable()) {
    if (::write(stop_[1], "", 1) < 0) return;
    drainer_.join();
  }
  flush(fd_);
  if (before_ >= 0) {
    dup2(before_, fd_);
    while (kind_ == Kind::kTee && drain_locked() && !text_.empty()) text_.clear();
    ::close(before_);
  }
  for (int fd : {read_end_, stop_[0], stop_[1]}) {
    if (fd >= 0) ::close(fd);
  }
}

bool OutputCapture::drain_locked() {
  char piece[16384];
  while (kind_ == Kind::kTee || text_.size() < kMaxText) {
    const ssize_t n = ::read(read_end_, piece, sizeof piece);
    if (n <= 0) return true;
    const auto bytes = static_cast<size_t>(n);
    if (kind_ == Kind::kTee) {
      for (size_t done = 0; done < bytes;) {
        const ssize_t written = ::write(before_, piece + done, bytes - done);
        if (written <= 0) break;  // nobody keeps the log
        done += static_cast<size_t>(written);
      }
      text_.append(piece, std::min(bytes, kMaxTee - std::min(kMaxTee, text_.size())));
    } else {
      text_.append(piece, bytes);
    }
  }
  return false;
}

void OutputCapture::drain_loop() {
  for (;;) {
    pollfd waits[2] = {{read_end_, POLLIN, 0}, {stop_[0], POLLIN, 0}};
    if (::poll(waits, 2, -1) < 0) continue;
    if (waits[1].revents != 0) return;
    bool room;
    {
      std::lock_guard guard(lock_);
      room = drain_locked();
      if (!room && overflow_) {
        overflow_(text_);
        text_.clear();
        room = true;
      }
    }
    if (!room) {
      pollfd stop{stop_[0], POLLIN, 0};
      if (::poll(&stop, 1, 10) > 0) return;
    }
  }
}

std::string OutputCapture::take() {
  if (read_end_ < 0) return {};
  flush(fd_);
  std::lock_guard guard(lock_);
  drain_locked();
  std::string text;
  text.swap(text_);
  return text;
}

}  // namespace gpupool::worker
