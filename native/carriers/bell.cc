#include "carriers/bell.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "carriers/patience.h"

namespace gpupool::carriers {
namespace {

class SocketBell final : public Bell {
 public:
  explicit SocketBell(int fd) : fd_(fd) {}
  ~SocketBell() override { abandon(); }

  // A full socket holds bells enough; that the other side has gone is for wait() to notice.
  void ring() override {
    while (::send(fd_, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
  }

  Heard wait(int64_t timeout_us) override {
    pollfd entry{fd_, POLLIN | POLLRDHUP, 0};
    const int64_t deadline = timeout_us < 0 ? 0 : Patience::now_ns() + timeout_us * 1000;
    for (;;) {
      timespec left{};
      if (timeout_us >= 0) {
        const int64_t ns = std::max<int64_t>(0, deadline - Patience::now_ns());
        left = {ns / 1'000'000'000, ns % 1'000'000'000};
      }
      const int n = ::ppoll(&entry, 1, timeout_us < 0 ? nullptr : &left, nullptr);
      if (n < 0 && errno == EINTR) continue;
      if (n == 0) return Heard::kNothing;
      if (n < 0 || (entry.revents & (POLLERR | POLLNVAL | POLLHUP))) return Heard::kGone;
      char bells[256];
      const ssize_t got = ::recv(fd_, bells, sizeof bells, MSG_DONTWAIT);
      if (got > 0) return Heard::kBell;
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      return Heard::kGone;
    }
  }

  bool gone() override {
    pollfd entry{fd_, POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) > 0;  // the others are always told
  }

  void shutdown() override { ::shutdown(fd_, SHUT_RDWR); }

  void abandon() override {
    const int fd = fd_.exchange(-1);
    if (fd >= 0) ::close(fd);
  }

 private:
  std::atomic<int> fd_;
};

}  // namespace

std::unique_ptr<Bell> make_socket_bell(int fd) { return std::make_unique<SocketBell>(fd); }

}  // namespace gpupool::carriers
