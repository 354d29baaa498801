// On the GPU's host: the worker's client, for one on another host.
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "carriers/ring.h"
#include "relay/pair.h"
#include "relay/proof.h"
#include "relay/protocol.h"
#include "relay/relay.h"
#include "wire/control.h"
#include "wire/frame.h"
#include "worker/connection.h"

namespace gpupool::relay {
namespace {

using carriers::Patience;
using worker::kChannelFd;
using worker::MessageKind;

constexpr size_t kMostHandshake = 256 * 1024;  // bytes of a frame of the handshake
constexpr int kAnswerMs = 10'000;

std::string lines_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : "\n") + name;
  return text.substr(0, 2048);
}

// Connections of the same relay come from the broker, which has led them here by their id.
class FarRenewal final : public Renewal {
 public:
  explicit FarRenewal(const TlsContext& tls) : tls_(tls) {}
  // False: OpenSSL failed.
  bool expect(const TlsConnection& first) {
    names_ = first.peer_names();
    return first.secret(secret_);
  }

  std::unique_ptr<TlsConnection> renew(int64_t deadline_ns, bool* hopeless,
                                       std::string* why) override {
    pollfd entry{kChannelFd, POLLIN, 0};
    const int64_t left = (deadline_ns - Patience::now_ns()) / 1'000'000;
    if (!later_ && left > 0 &&
        poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 500))) > 0) {
      take_news();
    }
    if (gone_) return *hopeless = true, *why = "the broker has gone", nullptr;
    if (!later_) return nullptr;
    auto connection = tls_.connect(std::move(later_), {},
                                   std::min(deadline_ns, Patience::now_ns() + kHalfOpenNs), why);
    if (connection != nullptr && connection->peer_names() != names_) {
      return *why = "another host than before has connected", nullptr;
    }
    return connection;
  }
  int news() const override { return gone_ ? -1 : kChannelFd; }
  bool take_news() override {
    worker::Message message;
    switch (worker::receive_message(kChannelFd, &message, false)) {
      case worker::ReceiveStatus::kNothing:
        return false;
      case worker::ReceiveStatus::kClosed:
        gone_ = true;
        return false;
      case worker::ReceiveStatus::kMessage:
        return take(message);
    }
    return false;
  }

  // A message that is no answer.
  bool take(worker::Message& message) {
    if (message.header.kind == static_cast<uint32_t>(MessageKind::kFarUsage) && link != nullptr) {
      link->tell_usage(message.header.value, static_cast<uint32_t>(message.header.used));
    }
    Fd fd(message.fds.empty() ? -1 : message.fds[0]);
    message.fds.clear();
    Preamble preamble;
    if (!fd || message.payload.size() != sizeof preamble) return false;
    memcpy(&preamble, message.payload.data(), sizeof preamble);
    // Who has only seen where the link is does not get to break it.
    if (preamble.count <= count_ || !proves(preamble, secret_)) return false;
    count_ = preamble.count;
    later_ = std::move(fd);
    return true;
  }

  Link* link = nullptr;  // that is told of usage

 private:
  const TlsContext& tls_;
  std::vector<std::string> names_;
  uint8_t secret_[32] = {};
  uint64_t count_ = 0;  // of the last attempt
  Fd later_;
  bool gone_ = false;
};

bool send_bytes(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

// Exactly so many bytes, and a descriptor that comes along.
bool receive_bytes(int fd, void* data, size_t bytes, Fd* descriptor) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    pollfd entry{fd, POLLIN, 0};
    if (poll(&entry, 1, kAnswerMs) <= 0) return false;
    iovec part{at, bytes};
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    const ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    const cmsghdr* extra = CMSG_FIRSTHDR(&message);
    if (extra != nullptr && extra->cmsg_type == SCM_RIGHTS) {
      int passed = -1;
      memcpy(&passed, CMSG_DATA(extra), sizeof passed);
      descriptor->reset(passed);
    }
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

struct Handshaken {
  Fd fd, ring;
  wire::FrameHeader header{};
  std::string body;  // of the welcome
};

// A new connection to the broker, and the other relay's handshake over it. False: `why`; the other
// relay has heard it, or hears it in the farewell.
bool hand_through(Link& link, FarRenewal& renewal, Handshaken* done, std::string* why) {
  const auto from_link = [&](wire::FrameHeader* header, std::string* body) {
    if (!carriers::read_all(link, header, sizeof *header, kAnswerMs * 1000ll)) return false;
    if (header->body_bytes > kMostHandshake || header->bulk_count != 0) return false;
    body->resize(header->body_bytes);
    return body->empty() ||
           carriers::read_all(link, body->data(), body->size(), kAnswerMs * 1000ll);
  };
  wire::FrameHeader header;
  std::string body;
  if (!from_link(&header, &body)) return *why = "the other relay's greeting is not one", false;
  worker::send_message(kChannelFd, MessageKind::kFarOpen, 0);
  for (;;) {
    worker::Message message;
    if (worker::receive_message(kChannelFd, &message, true) != worker::ReceiveStatus::kMessage) {
      return *why = "the broker has gone", false;
    }
    if (message.header.kind != static_cast<uint32_t>(MessageKind::kFarConnection)) {
      renewal.take(message);
      continue;
    }
    if (message.fds.empty()) return *why = message.payload, false;
    done->fd.reset(message.fds[0]);
    break;
  }
  for (;;) {
    if (!send_bytes(done->fd.get(), &header, sizeof header) ||
        !send_bytes(done->fd.get(), body.data(), body.size()) ||
        !receive_bytes(done->fd.get(), &done->header, sizeof done->header, &done->ring) ||
        done->header.body_bytes > kMostHandshake || done->header.bulk_count != 0) {
      return *why = "the broker closed the connection", false;
    }
    done->body.resize(done->header.body_bytes);
    if (!receive_bytes(done->fd.get(), done->body.data(), done->body.size(), &done->ring) ||
        !carriers::write_all(link, &done->header, sizeof done->header, kAnswerMs * 1000ll) ||
        !carriers::write_all(link, done->body.data(), done->body.size(), kAnswerMs * 1000ll)) {
      return *why = "the handshake was cut off", false;
    }
    const auto kind = static_cast<wire::FrameKind>(done->header.kind);
    if (kind == wire::FrameKind::kWelcome) return true;
    if (kind != wire::FrameKind::kChallenge) return *why = "the broker refused", false;
    if (!from_link(&header, &body)) return *why = "the other relay's proof is not one", false;
  }
}

// The reason that the broker gave, if it ended the session.
std::string reason_of(int control) {
  wire::FrameHeader header;
  char text[2048];
  if (recv(control, &header, sizeof header, MSG_DONTWAIT) != sizeof header) return {};
  const ssize_t got =
      recv(control, text, std::min<size_t>(sizeof text, header.body_bytes), MSG_DONTWAIT);
  wire::RefusedBody body;
  if (header.kind != static_cast<uint16_t>(wire::FrameKind::kRefused) ||
      got < static_cast<ssize_t>(sizeof body)) {
    return {};
  }
  memcpy(&body, text, sizeof body);
  return std::string(text + sizeof body,
                     std::min<size_t>(body.text_bytes, static_cast<size_t>(got) - sizeof body));
}

std::unique_ptr<carriers::Carrier> carrier_of(Handshaken& device, uint32_t epoch,
                                              carriers::SpinGate* gate) {
  wire::CarrierOffer offer{};
  const size_t at = sizeof(wire::WelcomeBody);
  if (device.ring && device.body.size() >= at + sizeof offer) {
    memcpy(&offer, device.body.data() + at, sizeof offer);
  }
  auto socket = carriers::make_socket_carrier(device.fd.release(), gate);
  if (offer.kind != static_cast<uint32_t>(wire::OfferKind::kRing)) return socket;
  return carriers::choose_ring(std::move(socket), device.ring.release(), offer.version,
                               {offer.command_bytes, offer.bulk_bytes}, epoch);
}

}  // namespace

Outcome serve_far(const TlsContext& tls, worker::Message& message) {
  worker::FarPayload assigned;
  if (message.payload.size() != sizeof assigned || message.fds.empty()) {
    return {true, "the broker sent something else than an assignment"};
  }
  memcpy(&assigned, message.payload.data(), sizeof assigned);
  carriers::SpinGate* gate =
      message.fds.size() > 1 ? worker::open_gate(message.fds[1], assigned.spinners) : nullptr;
  Fd socket(message.fds[0]);
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  std::string why;
  const int64_t deadline = Patience::now_ns() + kHalfOpenNs;
  auto connection = tls.connect(std::move(socket), {}, deadline, &why);
  if (connection == nullptr) return {true, why};
  FarRenewal renewal(tls);
  if (!renewal.expect(*connection)) return {true, "OpenSSL gives no secret"};
  worker::send_message(kChannelFd, MessageKind::kFarPeer, 0, lines_of(connection->peer_names()));

  LinkLimits limits;
  limits.interruption_ns = assigned.interruption_ms * int64_t{1'000'000};
  Link link(renewal, limits, gate);
  renewal.link = &link;
  Handshaken control, device;
  if (!link.begin(std::move(connection), deadline, &why) ||
      !hand_through(link, renewal, &control, &why) || !hand_through(link, renewal, &device, &why)) {
    link.say_goodbye(why);
    return {true, why};
  }
  wire::WelcomeBody welcome{};
  memcpy(&welcome, control.body.data(), std::min(sizeof welcome, control.body.size()));
  auto carrier = carrier_of(device, welcome.epoch, gate);
  PairEvents events;
  events.last_word = [&control] {
    const std::string reason = reason_of(control.fd.get());
    return reason.empty() ? std::string("the worker on the GPU's host has ended") : reason;
  };
  events.on_link_end = [](const PairEnd&) {};
  const PairEnd end = run_pair(*carrier, welcome.epoch, link, welcome.epoch, events);
  return {end.by_link && !link.ended_by_peer(), end.sentence};
}

}  // namespace gpupool::relay
