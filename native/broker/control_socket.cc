#include "broker/control_socket.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <vector>

#include "broker/log.h"
#include "broker/sockets.h"

namespace gpupool::broker {
namespace {

constexpr size_t kMaxPacket = 64 * 1024;
constexpr size_t kMaxQueued = 16 << 20;  // for somebody who does not read
constexpr int kPacketsAtOnce = 64;       // then the loop looks after the others

}  // namespace

ControlSocket::ControlSocket(EventLoop& loop, Fd listener, Callbacks callbacks)
    : loop_(loop), listener_(std::move(listener)), callbacks_(std::move(callbacks)) {
  loop_.watch(listener_.get(), EPOLLIN, [this](uint32_t) { on_knock(); });
}

ControlSocket::~ControlSocket() {
  loop_.cancel(closing_);
  loop_.forget(listener_.get());
  if (peer_) loop_.forget(peer_.get());
}

void ControlSocket::on_knock() {
  Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) return;
  uint32_t uid = 0, pid = 0;
  if (!peer_of(fd.get(), &uid, &pid) || (uid != 0 && uid != geteuid())) {
    log_limited("broker.sock: uid " + std::to_string(uid) + " is turned away");
    return;
  }
  if (peer_) {
    log(LogLevel::kNotice, "broker.sock: process " + std::to_string(pid) +
                               " takes the place of the one that was connected");
    close();
  }
  peer_ = std::move(fd);
  loop_.watch(peer_.get(), EPOLLIN, [this](uint32_t events) { on_event(events); });
  callbacks_.on_connect();
}

void ControlSocket::close() {
  if (!peer_) return;
  loop_.forget(peer_.get());
  loop_.cancel(closing_);
  peer_.reset();
  queue_.clear();
  queued_bytes_ = 0;
  event_waits_ = false;
  callbacks_.on_disconnect();
}

void ControlSocket::on_event(uint32_t events) {
  if (events & EPOLLOUT) {
    flush();
    if (event_waits_ && queue_.empty()) {
      event_waits_ = false;
      callbacks_.on_writable();
      watch();
    }
  }
  static std::vector<char> packet(kMaxPacket);
  const int number = peer_ ? peer_.get() : -1;
  for (int i = 0; i < kPacketsAtOnce && peer_ && peer_.get() == number; i++) {
    const ssize_t got = recv(number, packet.data(), packet.size(), MSG_TRUNC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) return close();
    ToBroker message;
    if (static_cast<size_t>(got) > packet.size() ||
        !message.ParseFromArray(packet.data(), static_cast<int>(got))) {
      log(LogLevel::kWarning, "broker.sock: a packet that is no message; the connection is closed");
      return close();
    }
    callbacks_.on_message(message);
  }
}

bool ControlSocket::send(const FromBroker& message) {
  if (!peer_) return false;
  std::string packet = message.SerializeAsString();
  if (queued_bytes_ + packet.size() > kMaxQueued) {
    // Later: the caller may be in the middle of something that the end of a connection changes.
    if (closing_ == 0) {
      log(LogLevel::kWarning,
          "broker.sock: the other side does not read; the connection is closed");
      closing_ = loop_.after(0, [this] {
        closing_ = 0;
        close();
      });
    }
    return false;
  }
  queued_bytes_ += packet.size();
  queue_.push_back(std::move(packet));
  flush();
  return true;
}

bool ControlSocket::send_event(const FromBroker& message) {
  if (!peer_) return false;
  if (queue_.empty() && send_now(message.SerializeAsString())) return true;
  if (!event_waits_) {
    event_waits_ = true;
    watch();
  }
  return false;
}

bool ControlSocket::send_now(const std::string& packet) {
  for (;;) {
    if (::send(peer_.get(), packet.data(), packet.size(), MSG_NOSIGNAL) >= 0) return true;
    if (errno != EINTR) return false;  // the socket is full, or gone: then reading tells
  }
}

void ControlSocket::flush() {
  while (!queue_.empty() && send_now(queue_.front())) {
    queued_bytes_ -= queue_.front().size();
    queue_.pop_front();
  }
  watch();
}

void ControlSocket::watch() {
  loop_.change(peer_.get(), EPOLLIN | (queue_.empty() && !event_waits_ ? 0u : EPOLLOUT));
}

}  // namespace gpupool::broker
