#include "broker/relays.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "broker/log.h"
#include "broker/sockets.h"

namespace gpupool::broker {
namespace {

constexpr int kAcceptsAtOnce = 16;
constexpr size_t kMaxKnocks = 64, kMaxUnproven = 32, kMaxOfHost = 512;
constexpr size_t kUserShare = 4;  // one address gets a quarter of them
constexpr int64_t kHalfOpenMs = relay::kHalfOpenNs / 1'000'000;

void say(const Fd& fd, char answer) { send(fd.get(), &answer, 1, MSG_NOSIGNAL | MSG_DONTWAIT); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (end > at) lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

}  // namespace

RelayTable::RelayTable(EventLoop& loop, Door& door, WorkerPool& workers)
    : loop_(loop), door_(door), workers_(workers) {}

RelayTable::~RelayTable() {
  if (listener_) loop_.forget(listener_.get());
  while (!knocks_.empty()) drop(knocks_.front());
}

void RelayTable::configure(const RelaySettings& settings, Applied* applied) {
  if (settings.listen() != listen_ || !error_.empty()) {
    if (listener_) loop_.forget(listener_.get());
    listener_.reset();
    listen_ = settings.listen();
    bound_.clear();
    error_.clear();
    if (!listen_.empty()) {
      listener_ = listen_tcp(listen_, "[relay] listen", false, &bound_, &error_);
      if (listener_) {
        loop_.watch(listener_.get(), EPOLLIN, [this](uint32_t) { on_knock(); });
      } else {
        log(LogLevel::kWarning, error_);
      }
    }
  }
  applied->set_relay_address(bound_);
  applied->set_relay_error(error_);
}

// ---- Until it is known which relay is meant -----------------------------------------------------

void RelayTable::on_knock() {
  for (int i = 0; i < kAcceptsAtOnce; i++) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (reserve_.turn_away(listener_.get(), errno)) {
        log_limited("a relay is turned away: no file descriptor is left (LimitNOFILE, ulimit -n)");
      }
      return;
    }
    const std::string address = address_of(fd.get());
    make_room(address);
    Knock& knock = knocks_.emplace_back();
    knock.fd = std::move(fd);
    knock.address = address;
    loop_.watch(knock.fd.get(), EPOLLIN | EPOLLRDHUP,
                [this, &knock](uint32_t) { on_event(knock); });
    knock.timer = loop_.after(kHalfOpenMs, [this, &knock] {
      knock.timer = 0;
      log_limited("a connection of " + knock.address + " to the relays' door said nothing in time");
      drop(knock);
    });
  }
}

void RelayTable::make_room(const std::string& address) {
  const auto own = [&](const Knock& knock) { return knock.address == address; };
  const auto count = std::count_if(knocks_.begin(), knocks_.end(), own);
  if (static_cast<size_t>(count) >= kMaxKnocks / kUserShare) {
    drop(*std::find_if(knocks_.begin(), knocks_.end(), own));
  } else if (knocks_.size() >= kMaxKnocks) {
    drop(knocks_.front());
  }
}

void RelayTable::drop(Knock& knock) {
  loop_.forget(knock.fd.get());
  loop_.cancel(knock.timer);
  knocks_.remove_if([&knock](const Knock& entry) { return &entry == &knock; });
}

void RelayTable::on_event(Knock& knock) {
  auto* to = reinterpret_cast<uint8_t*>(&knock.preamble) + knock.got;
  const ssize_t got = recv(knock.fd.get(), to, sizeof knock.preamble - knock.got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return drop(knock);
  knock.got += static_cast<size_t>(got);
  if (knock.got < sizeof knock.preamble) return;
  if (knock.preamble.magic == relay::kPreambleMagic && knock.preamble.reserved == 0) {
    if (knock.preamble.wish == static_cast<uint32_t>(relay::Wish::kNew)) {
      begin(knock);
    } else if (knock.preamble.wish == static_cast<uint32_t>(relay::Wish::kResume)) {
      resume(knock);
    }
  } else {
    log_limited(knock.address + " is no relay and is turned away");
  }
  drop(knock);
}

void RelayTable::resume(Knock& knock) {
  const auto found = std::find_if(fars_.begin(), fars_.end(), [&](const auto& far) {
    return std::equal(far->id.begin(), far->id.end(), knock.preamble.id);
  });
  if (found == fars_.end() || (*found)->worker == nullptr || !(*found)->proven) {
    return say(knock.fd, relay::kUnknown);
  }
  say(knock.fd, relay::kGoOn);
  // If it takes no more of them, it has enough.
  const std::string_view preamble(reinterpret_cast<const char*>(&knock.preamble),
                                  sizeof knock.preamble);
  worker::send_message((*found)->worker->channel.get(), worker::MessageKind::kFarResume, 0,
                       preamble, {knock.fd.get()}, 0, 0, false);
}

void RelayTable::begin(Knock& knock) {
  size_t unproven = 0, own = 0;
  bool known = false;
  for (const auto& far : fars_) {
    known |= std::equal(far->id.begin(), far->id.end(), knock.preamble.id);
    if (far->proven) continue;
    unproven++;
    if (far->address == knock.address) own++;
  }
  if (known || unproven >= kMaxUnproven || own >= kMaxUnproven / kUserShare) {
    if (!known) log_limited(knock.address + " is turned away: too many relays prove themselves");
    return say(knock.fd, known ? relay::kUnknown : relay::kBusy);
  }
  say(knock.fd, relay::kGoOn);
  auto far = std::make_shared<Far>();
  std::copy_n(knock.preamble.id, far->id.size(), far->id.begin());
  far->address = knock.address;
  fars_.push_back(far);
  loop_.forget(knock.fd.get());
  auto fd = std::make_shared<Fd>(std::move(knock.fd));
  workers_.acquire(kFarRelay, [this, far, fd](Worker* worker, const std::string& why) {
    assign(worker, why, far, fd);
  });
}

// ---- A relay's process --------------------------------------------------------------------------

void RelayTable::assign(Worker* worker, const std::string& why, const std::shared_ptr<Far>& far,
                        const std::shared_ptr<Fd>& fd) {
  if (worker == nullptr) {
    log_limited("no relay for " + far->address + ": " + why);
    return on_end(*far);
  }
  far->worker = worker;
  // The relay itself gives up in time; this is for one that does not.
  far->timer = loop_.after(kHalfOpenMs + 1000, [this, far] {
    far->timer = 0;
    if (far->worker != nullptr) workers_.end(*far->worker);
  });
  workers_.assign_far(*worker, fd->get(),
                      {[this, far](worker::Message& message) { on_message(*far, message); },
                       [this, far](const WorkerExit&) {
                         far->worker = nullptr;
                         on_end(*far);
                       }});
}

void RelayTable::on_end(const Far& far) {
  const auto found = std::find_if(fars_.begin(), fars_.end(),
                                  [&far](const auto& entry) { return entry.get() == &far; });
  if (found == fars_.end()) return;
  loop_.cancel((*found)->timer);
  fars_.erase(found);
}

std::weak_ptr<RelayTable::Far> RelayTable::weak_from(const Far& far) const {
  for (const auto& entry : fars_) {
    if (entry.get() == &far) return entry;
  }
  return {};
}

void RelayTable::on_message(Far& far, worker::Message& message) {
  using Kind = worker::MessageKind;
  const auto kind = static_cast<Kind>(message.header.kind);
  if (kind == Kind::kFarPeer && !far.proven) {
    const std::vector<std::string> hosts = lines_of(message.payload);
    const auto same = std::count_if(fars_.begin(), fars_.end(),
                                    [&](const auto& entry) { return entry->hosts == hosts; });
    if (hosts.empty() || static_cast<size_t>(same) >= kMaxOfHost) {
      log_limited(far.address + " has too many relays here: another one is ended");
      return workers_.end(*far.worker);
    }
    far.hosts = hosts;
    far.proven = true;
    loop_.cancel(far.timer);
    return;
  }
  if (kind != Kind::kFarOpen || !far.proven) return;
  std::string why;
  int fds[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    why = std::string("this host has no room for another connection: ") + strerror(errno);
  }
  Fd own(fds[0]), theirs(fds[1]);
  std::vector<int> passed;
  if (theirs) passed.push_back(theirs.get());
  worker::send_message(far.worker->channel.get(), Kind::kFarConnection, 0, why, passed, 0, 0,
                       false);
  if (!own) return;
  Peer peer;
  peer.carrier = "relay";
  peer.address = "host " + far.hosts.front();
  peer.hosts = far.hosts;
  peer.on_usage = [weak = weak_from(far)](uint64_t bytes, uint32_t busy_permille) {
    const auto far = weak.lock();
    if (far == nullptr || far->worker == nullptr || !far->worker->channel) return;
    worker::send_message(far->worker->channel.get(), worker::MessageKind::kFarUsage, bytes, {}, {},
                         0, busy_permille, false);
  };
  door_.admit(std::move(own), std::move(peer), nullptr);
}

}  // namespace gpupool::broker
