#include "carriers/mux.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace gpupool::carriers {
namespace {

constexpr size_t kReadAtOnce = 64 * 1024;
// Then the owner looks after others. Opening is dear: it makes sockets.
constexpr size_t kReadPerRun = 256 * 1024;
constexpr int kOpensPerRun = 32;

// How every hello begins.
struct HelloStart {
  MuxHeader header{kMuxHelloEpoch, 0, static_cast<uint16_t>(MuxKind::kHello), 0, sizeof(MuxHello)};
  uint8_t magic[sizeof kMuxMagic];
  HelloStart() { memcpy(magic, kMuxMagic, sizeof magic); }
};
static_assert(sizeof(HelloStart) == sizeof(MuxHeader) + sizeof kMuxMagic);

uint64_t random_epoch() {
  uint64_t epoch;
  do {
    if (getrandom(&epoch, sizeof epoch, 0) != sizeof epoch) continue;
    const auto low = static_cast<uint32_t>(epoch);
    if (low != 0 && low != kMuxHelloEpoch) return epoch;
  } while (true);
}

std::string printable(const char* text, size_t bytes) {
  std::string result(text, bytes);
  for (char& c : result) c = c >= 0x20 && c < 0x7f ? c : '?';
  return result;
}

}  // namespace

// ---- Life ---------------------------------------------------------------------------------------

Mux::Mux(Side side, int port, MuxOwner& owner, size_t max_channels)
    : side_(side), port_(port), owner_(owner), max_channels_(max_channels) {
  const auto fail = [this](const char* what) {
    const int error = errno;
    if (main_ >= 0) close(main_);
    if (sources_ >= 0) close(sources_);
    if (again_ >= 0) close(again_);
    throw std::system_error(error, std::generic_category(), what);
  };
  if ((main_ = epoll_create1(EPOLL_CLOEXEC)) < 0 || (sources_ = epoll_create1(EPOLL_CLOEXEC)) < 0) {
    fail("epoll_create1");
  }
  if ((again_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0 ||
      !watch(main_, EPOLL_CTL_ADD, again_, EPOLLIN, kAgainTag)) {
    fail("eventfd");
  }
  fcntl(port, F_SETFL, fcntl(port, F_GETFL) | O_NONBLOCK);
  port_events_ = EPOLLIN;
  if (!watch(main_, EPOLL_CTL_ADD, port, port_events_, kPortTag))
    fail("the port cannot be watched");
  begin_epoch();
  send_filler();
  send_hello(0, 0, {});
  flush();
}

Mux::~Mux() {
  for (auto& [id, channel] : channels_) close(channel->fd);
  close(again_);
  close(sources_);
  close(main_);
}

void Mux::begin_epoch() {
  own_epoch_ = random_epoch();
  scanning_ = true;
  up_ = false;
}

size_t Mux::buffered() const {
  size_t bytes = in_.size() + out_.size();
  for (const auto& [id, channel] : channels_) bytes += channel->pending.size();
  return bytes;
}

bool Mux::run() {
  epoll_event events[64];
  const int count = epoll_wait(main_, events, 64, 0);
  bool port = false;
  opens_ = 0;
  for (int i = 0; i < count; i++) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kPortTag) {
      port = port || (events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0;
    } else if (tag == kAgainTag) {
      eventfd_t ignored;
      eventfd_read(again_, &ignored);
      port = true;
      parse();
    } else if (tag != kSourcesTag) {
      if (Channel* channel = find(static_cast<uint32_t>(tag - 1))) deliver(*channel);
    }
  }
  if (port) read_port();
  pull();
  flush();
  if (hung_up_) drop_all("the port hung up");
  return !hung_up_;
}

void Mux::go_down(const std::string& why, bool fault) {
  const bool was_up = up_;
  drop_all(why);
  begin_epoch();
  if (was_up || fault) owner_.on_down(why, fault);
}

bool Mux::bad(const std::string& what) {
  go_down(what, true);
  send_hello(0, 0, {});
  return false;
}

void Mux::ask_again() {
  if (up_ || refused_ || side_ == Side::kHost || !out_.empty()) return;
  send_filler();
  send_hello(0, 0, {});
  flush();
}

// ---- Frames in ----------------------------------------------------------------------------------

void Mux::read_port() {
  size_t total = 0;
  if (out_.size() > kOutMost) {
    hung_up_ = hung_up_ || is_gone();
    return;
  }
  while (total < kReadPerRun && out_.size() <= kOutMost && opens_ < kOpensPerRun) {
    const ssize_t got = read(port_, in_.room(kReadAtOnce), kReadAtOnce);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      hung_up_ = is_gone();
      return;
    }
    if (got <= 0) {
      hung_up_ = true;
      return;
    }
    in_.added(static_cast<size_t>(got));
    total += static_cast<size_t>(got);
    parse();
  }
}

bool Mux::is_gone() const {
  pollfd state{port_, POLLIN, 0};
  return poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLERR)) != 0;
}

void Mux::come_again() { eventfd_write(again_, 1); }

void Mux::parse() {
  for (;;) {
    if (opens_ >= kOpensPerRun) return come_again();
    if (scanning_ && !find_hello()) return;
    if (in_.size() < sizeof(MuxHeader)) return;
    MuxHeader header;
    memcpy(&header, in_.front(), sizeof header);
    const auto kind = static_cast<MuxKind>(header.kind);
    const bool hello = header.epoch == kMuxHelloEpoch;
    std::string wrong;
    if (hello) {
      const HelloStart start;
      if (memcmp(&header, &start.header, sizeof header) != 0) wrong = "a hello with a wrong header";
    } else if (header.epoch != frame_epoch_) {
      const MuxHeader filler{};
      if (memcmp(&header, &filler, sizeof header) == 0) {
        go_down("the other side began anew", false);  // its hello follows
        continue;
      }
      wrong = "a frame of another epoch";
    } else if (header.reserved != 0) {
      wrong = "a frame whose reserved field is not zero";
    } else {
      const uint32_t length = header.length;
      bool right = false;
      switch (kind) {
        case MuxKind::kOpen:
        case MuxKind::kAccept:
        case MuxKind::kEnd:
          right = length == 0 && header.channel != 0;
          break;
        case MuxKind::kData:
          right = length > 0 && length <= kMuxMaxData && header.channel != 0;
          break;
        case MuxKind::kCredit:
          right = length == sizeof(MuxCredit) && header.channel != 0;
          break;
        case MuxKind::kClose:
          right = length <= kMuxMaxText && header.channel != 0;
          break;
        case MuxKind::kInfo:
          right = length <= kMuxMaxInfo && header.channel == 0;
          break;
        case MuxKind::kHello:
          break;
      }
      if (!right) {
        wrong = "a frame of kind " + std::to_string(header.kind) + " for channel " +
                std::to_string(header.channel) + " with " + std::to_string(length) + " bytes";
      }
    }
    if (!wrong.empty()) {
      in_.take(1);  // a hello may begin right behind
      bad(wrong);
      continue;
    }
    const size_t whole = sizeof header + header.length;
    if (in_.size() < whole) return;
    const uint8_t* body = in_.front() + sizeof header;
    if (hello) {
      MuxHello what;
      memcpy(&what, body, sizeof what);
      in_.take(whole);
      if (memcmp(what.magic, kMuxMagic, sizeof kMuxMagic) == 0) {
        take_hello(what);
      } else {
        bad("a hello with a wrong magic number");
      }
      continue;
    }
    take_frame(header, body);
    in_.take(whole);
  }
}

bool Mux::find_hello() {
  const HelloStart start;
  const auto* at =
      static_cast<const uint8_t*>(memmem(in_.front(), in_.size(), &start, sizeof start));
  if (at != nullptr) {
    in_.take(static_cast<size_t>(at - in_.front()));
    if (in_.size() < sizeof(MuxHeader) + sizeof(MuxHello)) return false;
    return true;
  }
  if (in_.size() >= sizeof start) in_.take(in_.size() - (sizeof start - 1));
  return false;
}

bool Mux::take_frame(const MuxHeader& header, const uint8_t* body) {
  const auto kind = static_cast<MuxKind>(header.kind);
  const auto from = [&](Side side) {
    return side_ != side ||
           bad("a frame of kind " + std::to_string(header.kind) + " from the side that sends none");
  };
  if (kind == MuxKind::kInfo) {
    if (!from(Side::kHost)) return false;
    owner_.on_info({reinterpret_cast<const char*>(body), header.length});
    return true;
  }
  if (kind == MuxKind::kOpen) return from(Side::kGuest) && take_open(header.channel);
  if (header.channel > highest_) {
    return bad("a frame for channel " + std::to_string(header.channel) +
               ", which was never opened");
  }
  Channel* channel = find(header.channel);
  // It ended on this side a moment ago, which the other side did not know when it sent this.
  if (channel == nullptr) return true;
  if (channel->closing) return bad("a frame for a channel that its sender had closed");
  switch (kind) {
    case MuxKind::kAccept:
      if (!from(Side::kHost)) return false;
      if (channel->accepted) return bad("a channel was accepted twice");
      channel->accepted = true;
      return true;
    case MuxKind::kData:
      return take_data(*channel, body, header.length);
    case MuxKind::kCredit:
      return take_credit(*channel, body);
    case MuxKind::kEnd:
      if (channel->peer_ended) return bad("a channel was ended twice");
      channel->peer_ended = true;
      deliver(*channel);
      return true;
    case MuxKind::kClose:
      channel->closing = true;
      if (!channel->accepted) {
        owner_.on_close(channel->fd, false,
                        printable(reinterpret_cast<const char*>(body), header.length));
      }
      deliver(*channel);
      return true;
    default:
      return true;
  }
}

bool Mux::take_open(uint32_t id) {
  if (id <= highest_) return bad("channel " + std::to_string(id) + " was opened twice");
  highest_ = id;
  opens_++;
  std::string why;
  if (channels_.size() >= max_channels_) {
    send_close(id, "the virtual machine already has " + std::to_string(max_channels_) +
                       " connections, the most that are allowed");
    return true;
  }
  const int fd = owner_.on_open(&why);
  if (fd < 0) {
    send_close(id, why);
    return true;
  }
  add(id, fd);
  if (Channel* channel = find(id)) {
    channel->accepted = true;
    send(MuxKind::kAccept, id, nullptr, 0);
  }
  return true;
}

bool Mux::take_data(Channel& channel, const uint8_t* data, size_t bytes) {
  if (channel.peer_ended) return bad("data on a channel that its sender had ended");
  channel.received += bytes;
  if (channel.received > channel.granted) {
    return bad("more data on channel " + std::to_string(channel.id) + " than were granted");
  }
  if (channel.pending.empty()) {
    const ssize_t sent = put(channel, data, bytes);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) {
      abort(channel, "its socket was closed");
      return true;
    }
    const size_t done = sent > 0 ? static_cast<size_t>(sent) : 0;
    channel.delivered += done;
    outstanding_ -= done;
    data += done;
    bytes -= done;
    if (bytes == 0) {
      consider_credit(channel);
      return true;
    }
  }
  channel.pending.append(data, bytes);
  deliver(channel);
  return true;
}

bool Mux::take_credit(Channel& channel, const uint8_t* body) {
  MuxCredit credit;
  memcpy(&credit, body, sizeof credit);
  if (credit.limit < channel.credit || credit.limit - channel.sent > kMuxMaxWindow) {
    return bad("a credit that is below the one before, or too large");
  }
  channel.credit = credit.limit;
  watch_source(channel);
  return true;
}

// ---- Hello --------------------------------------------------------------------------------------

void Mux::take_hello(const MuxHello& hello) {
  const auto low = static_cast<uint32_t>(hello.epoch);
  if (low == 0 || low == kMuxHelloEpoch) {
    bad("a hello without an epoch");
  } else if (side_ == Side::kHost) {
    take_hello_at_host(hello);
  } else {
    take_hello_at_guest(hello);
  }
}

void Mux::take_hello_at_host(const MuxHello& hello) {
  if (hello.echo != 0) return;                    // of no use here
  if (up_ && hello.epoch == peer_epoch_) return;  // the same once more
  go_down("the guest's end began anew", false);
  peer_epoch_ = hello.epoch;
  const uint16_t version = std::min(hello.version_max, kMuxVersion);
  if (version < std::max(hello.version_min, kMuxVersionMin)) {
    send_hello(
        peer_epoch_, 0,
        "the guest's package and this host have no version of the port's protocol in common");
    owner_.on_refused("the guest speaks versions " + std::to_string(hello.version_min) + " to " +
                      std::to_string(hello.version_max) + " of the port's protocol");
    return;
  }
  up_ = true;
  scanning_ = false;
  frame_epoch_ = static_cast<uint32_t>(peer_epoch_);
  highest_ = 0;
  send_hello(peer_epoch_, version, {});
  if (!info_.empty()) send(MuxKind::kInfo, 0, info_.data(), info_.size());
  owner_.on_up();
}

void Mux::take_hello_at_guest(const MuxHello& hello) {
  if (hello.echo == own_epoch_) {
    if (up_) return;
    if (hello.version == 0) {
      refused_ = true;
      owner_.on_refused(
          printable(hello.text, std::min<size_t>(hello.text_bytes, sizeof hello.text)));
      return;
    }
    if (hello.version < kMuxVersionMin || hello.version > kMuxVersion) {
      bad("the host chose a version that was not offered");
      return;
    }
    up_ = true;
    scanning_ = refused_ = false;
    peer_epoch_ = hello.epoch;
    frame_epoch_ = static_cast<uint32_t>(own_epoch_);
    highest_ = 0;
    owner_.on_up();
    return;
  }
  if (hello.echo != 0) return;  // an answer to an earlier one
  if (up_) go_down("the host's end began anew", false);
  refused_ = false;
  send_hello(0, 0, {});
}

}  // namespace gpupool::carriers
