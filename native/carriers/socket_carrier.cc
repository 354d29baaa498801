// Stream sockets as carriers: unix and TCP.
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "carriers/carrier.h"
#include "carriers/descriptors.h"
#include "carriers/patience.h"
#include "carriers/spin_gate.h"

namespace gpupool::carriers {
namespace {

constexpr int kMaxParts = 64;
constexpr int64_t kGlanceNs = 10'000;  // a spinning worker answers sooner
constexpr int kWriteWaitUs = 10'000;
constexpr int kSocketBufferBytes = 4 * 1024 * 1024;  // the kernel takes less where it has to

int64_t now_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

class SocketCarrier final : public Carrier {
 public:
  SocketCarrier(int fd, const char* kind, SpinGate* gate) : fd_(fd), kind_(kind), gate_(gate) {}
  // Descriptors that come are dropped, unless this was called.
  void keep_descriptor() { keeps_ = true; }
  int take_descriptor() {
    keeps_ = false;
    return std::exchange(received_, -1);
  }
  int release() { return fd_.exchange(-1); }
  ~SocketCarrier() override {
    abandon();
    if (received_ >= 0) ::close(received_);
  }

  Moved write(const Part* parts, int count, bool may_wait) override {
    return move(parts, count, true, may_wait);
  }
  Moved read(const Part* parts, int count, bool may_wait) override {
    if (!may_wait || gate_ == nullptr) return move(parts, count, false, may_wait);
    Moved moved = move(parts, count, false, false);  // often there is something already
    if (moved.status != Status::kBlocked) return moved;
    const int64_t start = Patience::now_ns();
    spin(start, INT64_MAX, [&] {
      moved = move(parts, count, false, false);
      return moved.status != Status::kBlocked;
    });
    if (moved.status == Status::kBlocked) moved = move(parts, count, false, true);
    patience_.waited(Patience::now_ns() - start);
    return moved;
  }

  int wait(int what, int64_t timeout_us) override {
    if (gate_ == nullptr || what != kReadable || timeout_us == 0) return sleep(what, timeout_us);
    int found = 0;
    const int64_t start = Patience::now_ns();
    spin(start, timeout_us < 0 ? INT64_MAX : timeout_us * 1000, [&] {
      found = sleep(what, 0);
      return found != 0;
    });
    if (found == 0) found = sleep(what, timeout_us);
    patience_.waited(Patience::now_ns() - start);
    return found;
  }

  void shutdown() override { ::shutdown(fd_, SHUT_RDWR); }

  void abandon() override {
    const int fd = fd_.exchange(-1);
    if (fd >= 0) ::close(fd);
  }

  const char* kind() const override { return kind_; }
  int64_t glance_ns() const override { return kGlanceNs; }

 private:
  // Looks until `there()`, at most as long as is worth it.
  template <typename There>
  void spin(int64_t start, int64_t limit_ns, There there) {
    limit_ns = std::min(limit_ns, patience_.spin_ns());
    if (!patience_.worthwhile() || !gate_->enter(start, limit_ns)) return;
    while (!there() && Patience::now_ns() - start < limit_ns) {
    }
    gate_->leave();
  }

  int sleep(int what, int64_t timeout_us) {
    pollfd entry{fd_,
                 static_cast<short>(((what & kReadable) ? POLLIN | POLLRDHUP : 0) |
                                    ((what & kWritable) ? POLLOUT : 0)),
                 0};
    const int64_t deadline = timeout_us < 0 ? 0 : now_us() + timeout_us;
    for (;;) {
      timespec left{};
      if (timeout_us >= 0) {
        const int64_t remaining = std::max<int64_t>(0, deadline - now_us());
        left.tv_sec = remaining / 1000000;
        left.tv_nsec = remaining % 1000000 * 1000;
      }
      const int n = ::ppoll(&entry, 1, timeout_us < 0 ? nullptr : &left, nullptr);
      if (n < 0 && errno == EINTR) continue;
      if (n == 0) return 0;
      if (n < 0 || (entry.revents & (POLLERR | POLLNVAL))) return what;
      int result = 0;
      if (entry.revents & (POLLIN | POLLRDHUP | POLLHUP)) result |= kReadable;
      if (entry.revents & (POLLOUT | POLLHUP)) result |= kWritable;
      return result & what;
    }
  }

  Moved move(const Part* parts, int count, bool outwards, bool may_wait) {
    iovec vectors[kMaxParts];
    if (count > kMaxParts) count = kMaxParts;
    for (int i = 0; i < count; i++) vectors[i] = {parts[i].data, parts[i].bytes};
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = static_cast<size_t>(count);
    DescriptorRoom room;
    const bool attachments = !outwards && keeps_;
    for (;;) {
      if (attachments) room.prepare(&message);
      const int wait = may_wait ? 0 : MSG_DONTWAIT;
      const ssize_t n = outwards
                            ? ::sendmsg(fd_, &message, MSG_NOSIGNAL | wait)
                            : recvmsg(fd_, &message, wait | (attachments ? MSG_CMSG_CLOEXEC : 0));
      if (n > 0 && attachments) {
        take_descriptors(&message, [this](int fd) {
          if (received_ < 0) {
            received_ = fd;
          } else {
            ::close(fd);
          }
        });
      }
      if (n > 0) return {Status::kOk, static_cast<size_t>(n)};
      if (n == 0) return {outwards ? Status::kBlocked : Status::kClosed, 0};
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return {Status::kBlocked, 0};
      return {Status::kClosed, 0};
    }
  }

  std::atomic<int> fd_;
  const char* kind_;
  SpinGate* const gate_;
  Patience patience_{Patience::kWorkerSpinNs, Patience::kWorkerWorthwhileNs};  // of who reads
  bool keeps_ = false;
  int received_ = -1;
};

std::string system_error(const std::string& what) { return what + ": " + strerror(errno); }

bool transfer_all(Carrier& carrier, void* data, size_t bytes, int64_t timeout_us, bool outwards) {
  const int64_t deadline = timeout_us < 0 ? 0 : now_us() + timeout_us;
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const Part part{at, bytes};
    const Moved moved = outwards ? carrier.write(&part, 1, false) : carrier.read(&part, 1, false);
    if (moved.status == Status::kClosed) return false;
    if (moved.status == Status::kOk) {
      at += moved.bytes;
      bytes -= moved.bytes;
      continue;
    }
    int64_t left = -1;
    if (timeout_us >= 0 && (left = deadline - now_us()) <= 0) return false;
    carrier.wait(outwards ? kWritable : kReadable, left);
  }
  return true;
}

}  // namespace

std::unique_ptr<Carrier> make_socket_carrier(int fd, SpinGate* gate) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  const bool unix_socket = ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
                           address.ss_family == AF_UNIX;
  if (unix_socket) {
    const int size = kSocketBufferBytes;  // TCP tunes its own
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  } else {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  const timeval patience{0, kWriteWaitUs};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return std::make_unique<SocketCarrier>(fd, unix_socket ? "unix" : "tcp", gate);
}

int take_descriptor(Carrier& carrier) {
  return static_cast<SocketCarrier&>(carrier).take_descriptor();
}

int release_socket(std::unique_ptr<Carrier> carrier) {
  return static_cast<SocketCarrier&>(*carrier).release();
}

std::unique_ptr<Carrier> connect_unix(const std::string& path, std::string* why) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    *why = "the socket path is too long: " + path;
    return nullptr;
  }
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    *why = system_error("socket");
    return nullptr;
  }
  while (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) continue;
    *why = system_error("cannot connect to " + path);
    ::close(fd);
    return nullptr;
  }
  auto carrier = make_socket_carrier(fd);
  static_cast<SocketCarrier&>(*carrier).keep_descriptor();
  return carrier;
}

std::unique_ptr<Carrier> connect_tcp(const std::string& host, uint16_t port, std::string* why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // no name service in the application's process
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    *why = "not a numeric address: " + host + ": " + gai_strerror(rc);
    return nullptr;
  }
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    const int fd = ::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      *why = system_error("socket");
      continue;
    }
    if (::connect(fd, entry->ai_addr, entry->ai_addrlen) == 0) return make_socket_carrier(fd);
    *why = system_error("cannot connect to " + host + " port " + std::to_string(port));
    ::close(fd);
  }
  return nullptr;
}

bool write_all(Carrier& carrier, const void* data, size_t bytes, int64_t timeout_us) {
  return transfer_all(carrier, const_cast<void*>(data), bytes, timeout_us, true);
}

bool read_all(Carrier& carrier, void* data, size_t bytes, int64_t timeout_us) {
  return transfer_all(carrier, data, bytes, timeout_us, false);
}

}  // namespace gpupool::carriers
