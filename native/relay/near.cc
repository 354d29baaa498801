// Near the client: takes the place of its worker, and connects to the other host.
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sodium.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "relay/pair.h"
#include "relay/proof.h"
#include "relay/protocol.h"
#include "relay/relay.h"
#include "wire/handshake.h"
#include "worker/connection.h"

namespace gpupool::relay {
namespace {

using carriers::Patience;

constexpr int64_t kAttemptNs = 3'000'000'000;
constexpr int64_t kConnectNs = 10'000'000'000, kAgainNs = 50'000'000;  // at a session's beginning

int left_ms(int64_t deadline_ns) {
  return static_cast<int>(std::max<int64_t>(0, (deadline_ns - Patience::now_ns()) / 1'000'000));
}

bool split(const std::string& address, std::string* host, std::string* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  *host = address.substr(0, colon);
  *port = address.substr(colon + 1);
  if (host->size() > 2 && host->front() == '[' && host->back() == ']') {
    *host = host->substr(1, host->size() - 2);
  }
  return !host->empty() && !port->empty();
}

bool await(int fd, short events, int64_t deadline_ns) {
  pollfd entry{fd, events, 0};
  return poll(&entry, 1, left_ms(deadline_ns)) > 0;
}

Fd connect_to(const std::string& address, int64_t deadline_ns, std::string* why) {
  std::string host, port;
  if (!split(address, &host, &port)) return *why = "the address " + address + " is wrong", Fd();
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  // Numbers only: gpupoold has looked the name up.
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found)) {
    return *why = "the address " + address + ": " + gai_strerror(error), Fd();
  }
  Fd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = 0;
  if (!fd) {
    error = errno;
  } else if (::connect(fd.get(), found->ai_addr, found->ai_addrlen) != 0) {
    error = errno;
    socklen_t size = sizeof error;
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      if (await(fd.get(), POLLOUT, deadline_ns)) {
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
  }
  freeaddrinfo(found);
  if (error != 0) return *why = address + ": " + strerror(error), Fd();
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

class NearRenewal final : public Renewal {
 public:
  NearRenewal(const TlsContext& tls, const worker::RelayPayload& payload)
      : tls_(tls), peer_(payload.peer), address_(payload.address) {
    preamble_.magic = kPreambleMagic;
    preamble_.wish = static_cast<uint32_t>(Wish::kNew);
    randombytes_buf(preamble_.id, sizeof preamble_.id);
  }

  std::unique_ptr<TlsConnection> renew(int64_t deadline_ns, bool* hopeless,
                                       std::string* why) override {
    const int64_t deadline = std::min(deadline_ns, Patience::now_ns() + kAttemptNs);
    busy_ = false;
    Fd fd = connect_to(address_, deadline, why);
    if (!fd) return nullptr;
    if (preamble_.wish == static_cast<uint32_t>(Wish::kResume)) {
      preamble_.count++;
      prove(preamble_, secret_);
    }
    char answer = 0;
    if (send(fd.get(), &preamble_, sizeof preamble_, MSG_NOSIGNAL) !=
            static_cast<ssize_t>(sizeof preamble_) ||
        !await(fd.get(), POLLIN, deadline) || recv(fd.get(), &answer, 1, 0) != 1) {
      return *why = address_ + " does not answer as a relay", nullptr;
    }
    busy_ = answer == kBusy;
    if (answer != kGoOn) {
      *hopeless = answer == kUnknown;
      *why = answer == kUnknown ? "the relay on the other host has ended"
                                : address_ +
                                      " has too many connections that have not proven "
                                      "themselves";
      return nullptr;
    }
    auto connection = tls_.connect(std::move(fd), peer_, deadline, why);
    if (connection == nullptr)
      return *why = "host " + peer_ + " (" + address_ + "): " + *why, nullptr;
    if (preamble_.wish == static_cast<uint32_t>(Wish::kNew) && !connection->secret(secret_)) {
      return *why = "OpenSSL gives no secret", nullptr;
    }
    return connection;
  }
  // The other host has too many now that have not proven themselves: that passes.
  bool was_busy() const { return busy_; }
  void resume_from_now_on() { preamble_.wish = static_cast<uint32_t>(Wish::kResume); }

 private:
  const TlsContext& tls_;
  const std::string peer_, address_;
  Preamble preamble_{};
  uint8_t secret_[32] = {};
  bool busy_ = false;
};

// The handshake with the other host's broker, over the link.
class LinkStream final : public wire::HandshakeStream {
 public:
  explicit LinkStream(Link& link) : link_(link) {}
  bool send_all(const void* data, size_t bytes, int timeout_ms) override {
    return carriers::write_all(link_, data, bytes, timeout_ms * int64_t{1000});
  }
  bool receive_all(void* data, size_t bytes, int timeout_ms) override {
    return carriers::read_all(link_, data, bytes, timeout_ms * int64_t{1000});
  }

 private:
  Link& link_;
};

void refuse(carriers::Carrier& carrier, uint32_t epoch, uint64_t sequence, const std::string& why) {
  const std::string frame =
      wire::refusal_frame(wire::RefusalCode::kNoWorker, why, epoch, sequence + 1);
  carriers::write_all(carrier, frame.data(), frame.size(), 1'000'000);
}

// A session there with the lease that this host has, and its device. Empty: `epoch` is that of its
// frames.
std::string open_there(Link& link, const worker::AssignPayload& assigned,
                       const worker::RelayPayload& relay, uint32_t* epoch) {
  wire::LeaseFile lease;
  std::copy_n(relay.lease, lease.lease.size(), lease.lease.begin());
  std::copy_n(relay.key, lease.key.size(), lease.key.begin());
  LinkStream stream(link);
  wire::HelloRequest request;
  request.minor = assigned.minor;
  request.minor_min = assigned.minor;
  request.pid = relay.pid;
  request.program = relay.program;
  auto result = wire::client_handshake(stream, lease, request);
  if (result.ok) {
    request.purpose = wire::ConnectionPurpose::kDevice;
    request.session = result.session;
    request.arena_base = assigned.arena_base;
    request.arena_bytes = assigned.arena_bytes;
    request.accepts = wire::kAcceptsRing;
    *epoch = result.epoch;
    result = wire::client_handshake(stream, lease, request);
  }
  if (!result.ok) {
    const std::string ending = link.ending();
    return ending.empty() ? result.message : ending;
  }
  if (result.initial_credit != assigned.initial_credit) {
    return "the other host's broker gives another credit than this one's";
  }
  return {};
}

}  // namespace

Outcome serve_near(const TlsContext& tls, worker::Message& message) {
  worker::AssignPayload assigned;
  worker::RelayPayload relay;
  if (message.payload.size() != sizeof assigned + sizeof relay || message.fds.empty()) {
    return {true, "the broker sent something else than an assignment"};
  }
  memcpy(&assigned, message.payload.data(), sizeof assigned);
  memcpy(&relay, message.payload.data() + sizeof assigned, sizeof relay);
  relay.peer[sizeof relay.peer - 1] = relay.address[sizeof relay.address - 1] =
      relay.program[sizeof relay.program - 1] = '\0';
  carriers::SpinGate* gate =
      message.fds.size() > 1 ? worker::open_gate(dup(message.fds[1]), assigned.spinners) : nullptr;
  auto carrier = worker::take_connection(assigned, message.fds);
  if (carrier == nullptr) return {true, "the client did not say in time what its carrier is to be"};

  NearRenewal renewal(tls, relay);
  LinkLimits limits;
  limits.interruption_ns = relay.interruption_ms * int64_t{1'000'000};
  Link link(renewal, limits, gate);
  link.on_usage = [](uint64_t bytes, uint32_t busy_permille) {
    worker::send_message(worker::kChannelFd, worker::MessageKind::kUsage, bytes, {}, {}, 0,
                         busy_permille);
  };
  uint32_t epoch = 0;
  std::string why;
  // Where many programs start at once some are asked to come again.
  const int64_t deadline = Patience::now_ns() + kConnectNs;
  bool hopeless = false;
  auto connection = renewal.renew(deadline, &hopeless, &why);
  while (renewal.was_busy() && Patience::now_ns() + kAgainNs < deadline) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kAgainNs));
    connection = renewal.renew(deadline, &hopeless, &why);
  }
  if (connection == nullptr || !link.begin(std::move(connection), deadline, &why)) {
    why = "the slice's host cannot be reached: " + why;
  } else {
    renewal.resume_from_now_on();
    why = open_there(link, assigned, relay, &epoch);
    if (!why.empty()) why = "host " + std::string(relay.peer) + " refused: " + why;
  }
  sodium_memzero(relay.key, sizeof relay.key);
  if (!why.empty()) {
    link.shutdown();
    refuse(*carrier, assigned.epoch, 0, why);
    carrier->shutdown();
    return {true, why};
  }
  PairEvents events;
  events.last_word = [] { return std::string("the client closed the connection"); };
  events.on_link_end = [&](const PairEnd& end) {
    if (end.between) refuse(*carrier, assigned.epoch, end.sequence, end.sentence);
  };
  const PairEnd end = run_pair(*carrier, assigned.epoch, link, epoch, events);
  if (end.fault && end.between) {
    refuse(*carrier, assigned.epoch, end.sequence, end.sentence);
    carrier->shutdown();
  }
  return {end.fault || end.by_link, end.sentence};
}

}  // namespace gpupool::relay
