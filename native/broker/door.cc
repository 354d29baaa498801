#include "broker/door.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "broker/log.h"
#include "broker/sockets.h"
#include "carriers/descriptors.h"

namespace gpupool::broker {
namespace {

constexpr int kAcceptsAtOnce = 16;  // then the loop looks after the others
constexpr int64_t kHalfOpenMs = wire::kHandshakeTimeoutSeconds * 1000;
constexpr int64_t kWaitMs = 60 * 1000;  // proven, and waiting for a probe or a worker
constexpr int64_t kLingerMs = 500;      // refused: time to read the sentence
constexpr size_t kLingerBytes = 64 * 1024;

// Whose a connection is that has not proven itself.
struct Whose {
  uint32_t uid;
  std::optional<wire::Uuid> lease;  // over a port nobody has a user: there it is the lease
  std::string address;              // and over TCP the address
  auto operator<=>(const Whose&) const = default;

  std::string text() const {
    if (lease) return "the port of lease " + wire::format_uuid(*lease);
    return address.empty() ? "uid " + std::to_string(uid) : "address " + address;
  }
};

}  // namespace

Door::Door(EventLoop& loop, Callbacks callbacks) : loop_(loop), callbacks_(std::move(callbacks)) {}

Door::~Door() {
  while (!guests_.empty()) drop(Guest(guests_.front()));
  for (Listener& listener : listeners_) loop_.forget(listener.fd.get());
}

int Door::listen(Fd fd, const std::string& carrier, std::shared_ptr<Entrance> entrance) {
  Listener& listener =
      listeners_.emplace_back(Listener{std::move(fd), carrier, std::move(entrance)});
  loop_.watch(listener.fd.get(), EPOLLIN, [this, at = &listener](uint32_t) { on_knock(*at); });
  return listener.fd.get();
}

void Door::close(int number) {
  listeners_.remove_if([&](const Listener& listener) {
    if (listener.fd.get() != number) return false;
    loop_.forget(number);
    return true;
  });
}

void Door::stop_tcp() {
  listeners_.remove_if([this](const Listener& listener) {
    if (listener.carrier != "tcp") return false;
    loop_.forget(listener.fd.get());
    return true;
  });
}

void Door::on_knock(Listener& listener) {
  for (int i = 0; i < kAcceptsAtOnce; i++) {
    Fd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      accepted(std::move(fd), listener);
      continue;
    }
    if (!reserve_.turn_away(listener.fd.get(), errno)) return;
    const std::string who = callbacks_.who_holds_most();
    log_limited("a client is turned away: no file descriptor is left (LimitNOFILE, ulimit -n)" +
                (who.empty() ? "" : "; " + who));
    return;
  }
}

void Door::accepted(Fd fd, const Listener& listener) {
  Peer peer;
  peer.carrier = listener.carrier;
  if (peer.carrier == "unix") {
    peer_of(fd.get(), &peer.uid, &peer.pid);
  } else {
    peer.address = address_of(fd.get());
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  admit(std::move(fd), std::move(peer), listener.entrance.get());
}

void Door::admit(Fd fd, Peer peer, const Entrance* entrance) {
  make_room(peer);
  auto guest =
      entrance != nullptr
          ? std::make_shared<Connection>(std::move(fd), std::move(peer), *entrance)
          : std::make_shared<Connection>(std::move(fd), std::move(peer), callbacks_.find_key);
  const int number = guest->fd_.get();
  if (!loop_.watch(number, EPOLLIN | EPOLLRDHUP,
                   [this, guest](uint32_t events) { on_event(guest, events); })) {
    return;
  }
  guests_.push_back(guest);
  guest->timer_ = loop_.after(kHalfOpenMs, [this, guest] {
    guest->timer_ = 0;
    log_limited("a connection did not prove itself in time and is closed");
    drop(guest);
  });
  std::string why;
  if (entrance != nullptr && entrance->admits && !entrance->admits(guest->peer_, &why)) {
    refuse(guest, wire::RefusalCode::kUnknownLease, why);
  }
}

// When too many have not proven themselves, the one who has the most of them loses his oldest, so
// that the idle connections of one user, of one virtual machine, or of one address do not keep the
// others out. All of TCP get half of the places, one address a quarter: who has 127.0.0.0/8 has
// many addresses.
void Door::make_room(const Peer& newcomer) {
  using State = wire::ServerHandshake::State;
  const auto whose = [](const Connection& guest) {
    const bool unknown = guest.peer_.uid == kUnknownUid;
    return Whose{guest.peer_.uid, unknown ? guest.stands_for_ : std::nullopt, guest.peer_.address};
  };
  std::map<Whose, std::vector<Guest>> by_owner;  // the oldest first
  size_t count = 0, tcp = 0;
  for (const Guest& guest : guests_) {
    if (guest->handshake_.state() == State::kProven) continue;
    count++;
    if (guest->peer_.carrier == "tcp") tcp++;
    by_owner[whose(*guest)].push_back(guest);
  }
  const bool from_tcp = newcomer.carrier == "tcp";
  const size_t most_tcp = std::max<size_t>(max_half_open_ / 2, 1);
  const size_t most_of_address = std::max<size_t>(max_half_open_ / 4, 1);
  const auto drop_oldest_of = [this](const auto& owner) {
    log_limited("too many connections have not proven themselves: the oldest of " +
                owner.first.text() + " is closed");
    drop(Guest(owner.second.front()));
  };
  if (from_tcp) {
    const auto own = by_owner.find(Whose{newcomer.uid, std::nullopt, newcomer.address});
    if (own != by_owner.end() && own->second.size() >= most_of_address) return drop_oldest_of(*own);
  }
  const bool tcp_is_full = from_tcp && tcp >= most_tcp;
  if (count < max_half_open_ && !tcp_is_full) return;
  // Of equals one of TCP goes.
  const auto rank = [&](const auto& owner) {
    const bool of_tcp = !owner.first.address.empty();
    return std::tuple(!tcp_is_full || of_tcp, owner.second.size(), of_tcp);
  };
  drop_oldest_of(*std::max_element(by_owner.begin(), by_owner.end(),
                                   [&](auto& a, auto& b) { return rank(a) < rank(b); }));
}

void Door::drop(const Guest& guest) {
  if (!guest->fd_) return;
  loop_.forget(guest->fd_.get());
  loop_.cancel(guest->timer_);
  guest->fd_.reset();
  guests_.remove(guest);
}

void Door::on_event(const Guest& guest, uint32_t events) {
  using State = wire::ServerHandshake::State;
  switch (guest->handshake_.state()) {
    case State::kReadingHello:
    case State::kReadingProof:
      return read(guest);
    case State::kProven:
      // It waits for a probe or a worker. What it sends is for later, but not its leaving.
      if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
        drop(guest);
      } else {
        loop_.change(guest->fd_.get(), EPOLLRDHUP);
      }
      return;
    case State::kRefused:
      return discard(guest);
    case State::kWelcomed:
      return drop(guest);
  }
}

void Door::read(const Guest& guest) {
  using State = wire::ServerHandshake::State;
  wire::ServerHandshake& handshake = guest->handshake_;
  while (const size_t wanted = handshake.wanted()) {
    uint8_t buffer[4096];
    const ssize_t got = recv(guest->fd_.get(), buffer, std::min(wanted, sizeof buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) return drop(guest);
    handshake.input(buffer, static_cast<size_t>(got));
    if (!flush(guest)) return drop(guest);
  }
  if (handshake.state() == State::kRefused) {
    log_limited("a connection (" + guest->peer_.carrier + ", uid " +
                std::to_string(static_cast<int32_t>(guest->peer_.uid)) +
                ") is refused before it has proven itself");
    return linger(guest);
  }
  if (handshake.state() != State::kProven) return;
  loop_.cancel(guest->timer_);
  guest->timer_ = loop_.after(kWaitMs, [this, guest] {
    guest->timer_ = 0;
    refuse(guest, wire::RefusalCode::kNoWorker, "the GPU's driver did not answer in time");
  });
  callbacks_.on_proven(guest);
}

// The socket's buffer is empty and what the broker says in a handshake fits: a client for whom it
// doesn't has not read, and is let go.
bool Door::flush(const Guest& guest, int fd_to_pass) {
  std::string& output = guest->handshake_.output();
  while (!output.empty()) {
    iovec part{output.data(), output.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    carriers::DescriptorRoom room;
    room.attach(&message, &fd_to_pass, fd_to_pass >= 0 ? 1 : 0);
    const ssize_t sent = sendmsg(guest->fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    fd_to_pass = -1;  // it goes with the first byte
    output.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

Fd Door::welcome(const Guest& guest, const wire::Uuid& session, uint32_t epoch, uint64_t credit,
                 const std::vector<wire::DeviceSnapshot>& devices, const wire::CarrierOffer& offer,
                 const wire::RegionOffer& region, int offered_fd) {
  if (guest->gone()) return {};
  guest->handshake_.welcome(session, epoch, credit, devices, offer, region);
  if (!flush(guest, offered_fd)) {
    drop(guest);
    return {};
  }
  loop_.forget(guest->fd_.get());
  loop_.cancel(guest->timer_);
  guests_.remove(guest);
  return std::move(guest->fd_);
}

void Door::answer(const Guest& guest, const std::vector<wire::DeviceSnapshot>& devices,
                  const std::string& frame) {
  if (guest->gone()) return;
  guest->handshake_.welcome({}, 0, 0, devices);
  guest->handshake_.output() += frame;
  flush(guest);
  drop(guest);
}

void Door::refuse(const Guest& guest, wire::RefusalCode code, const std::string& sentence,
                  bool logs) {
  if (guest->gone()) return;
  if (logs) {
    log_limited("lease " + wire::format_uuid(guest->handshake_.lease()) +
                ": a connection is refused: " + sentence);
  }
  guest->handshake_.refuse(code, sentence);
  if (!flush(guest)) return drop(guest);
  linger(guest);
}

// Over TCP a close with unread data would be a reset, which can destroy the sentence on its way.
void Door::linger(const Guest& guest) {
  shutdown(guest->fd_.get(), SHUT_WR);
  loop_.cancel(guest->timer_);
  guest->timer_ = loop_.after(kLingerMs, [this, guest] {
    guest->timer_ = 0;
    drop(guest);
  });
  loop_.change(guest->fd_.get(), EPOLLIN | EPOLLRDHUP);
  discard(guest);
}

void Door::discard(const Guest& guest) {
  uint8_t buffer[4096];
  for (;;) {
    const ssize_t got = recv(guest->fd_.get(), buffer, sizeof buffer, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    guest->discarded_ += got > 0 ? static_cast<size_t>(got) : 0;
    if (got <= 0 || guest->discarded_ > kLingerBytes) return drop(guest);
  }
}

}  // namespace gpupool::broker
