// The channels of a multiplexer, and what it sends; the rest of mux.h is in mux.cc.
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>

#include "carriers/descriptors.h"
#include "carriers/mux.h"

namespace gpupool::carriers {
namespace {

constexpr int kSourcesAtOnce = 4;
constexpr size_t kKeptCapacity = 256 * 1024;
// Sockets are read while less than this waits for the port: what waits delays everybody.
constexpr size_t kOutEnough = 128 * 1024;
// What the windows of all channels are cut from; beyond it each has only the first credit.
constexpr uint64_t kWindows = 16ull << 20;
constexpr uint64_t kWindow = 1 << 20;

}  // namespace

bool Mux::watch(int epoll, int operation, int fd, uint32_t events, uint64_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  return epoll_ctl(epoll, operation, fd, &event) == 0;
}

// ---- Queue --------------------------------------------------------------------------------------

uint8_t* Mux::Queue::room(size_t bytes) {
  if (capacity_ - end_ < bytes) {
    const size_t used = size();
    if (begin_ != 0 && capacity_ - used >= bytes) {
      memmove(data_.get(), data_.get() + begin_, used);
    } else {
      const size_t capacity = std::max(used + bytes, capacity_ * 2);
      auto data = std::make_unique_for_overwrite<uint8_t[]>(capacity);
      if (used != 0) memcpy(data.get(), data_.get() + begin_, used);
      data_ = std::move(data);
      capacity_ = capacity;
    }
    begin_ = 0;
    end_ = used;
  }
  return data_.get() + end_;
}

void Mux::Queue::append(const void* data, size_t bytes) {
  if (bytes == 0) return;
  memcpy(room(bytes), data, bytes);
  added(bytes);
}

void Mux::Queue::take(size_t bytes) {
  begin_ += bytes;
  if (begin_ != end_) return;
  begin_ = end_ = 0;
  if (capacity_ > kKeptCapacity) {
    data_.reset();
    capacity_ = 0;
  }
}

// ---- Frames out ---------------------------------------------------------------------------------

void Mux::send(MuxKind kind, uint32_t channel, const void* body, size_t bytes) {
  const MuxHeader header{frame_epoch_, channel, static_cast<uint16_t>(kind), 0,
                         static_cast<uint32_t>(bytes)};
  out_.append(&header, sizeof header);
  out_.append(body, bytes);
}

void Mux::send_hello(uint64_t echo, uint16_t version, std::string_view text) {
  const MuxHeader header{kMuxHelloEpoch, 0, static_cast<uint16_t>(MuxKind::kHello), 0,
                         sizeof(MuxHello)};
  MuxHello hello{};
  memcpy(hello.magic, kMuxMagic, sizeof hello.magic);
  hello.epoch = own_epoch_;
  hello.echo = echo;
  hello.version_min = kMuxVersionMin;
  hello.version_max = kMuxVersion;
  hello.version = version;
  hello.text_bytes = static_cast<uint16_t>(text.copy(hello.text, sizeof hello.text));
  out_.append(&header, sizeof header);
  out_.append(&hello, sizeof hello);
}

void Mux::send_close(uint32_t channel, std::string_view why) {
  why = why.substr(0, kMuxMaxText);
  send(MuxKind::kClose, channel, why.data(), why.size());
}

void Mux::send_filler() {
  memset(out_.room(kMuxFillerBytes), 0, kMuxFillerBytes);
  out_.added(kMuxFillerBytes);
}

void Mux::set_info(std::string json) {
  if (json.size() > kMuxMaxInfo || json == info_) return;
  info_ = std::move(json);
  if (!up_) return;
  send(MuxKind::kInfo, 0, info_.data(), info_.size());
  flush();
}

void Mux::flush() {
  send_credits();
  while (!out_.empty() && !hung_up_) {
    const ssize_t sent = write(port_, out_.front(), out_.size());
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) hung_up_ = true;
    if (sent <= 0) break;
    out_.take(static_cast<size_t>(sent));
  }
  watch_port();
}

void Mux::watch_port() {
  const uint32_t wanted = (out_.size() <= kOutMost ? static_cast<uint32_t>(EPOLLIN) : 0u) |
                          (out_.empty() ? 0u : static_cast<uint32_t>(EPOLLOUT));
  if (wanted != port_events_ && watch(main_, EPOLL_CTL_MOD, port_, wanted, kPortTag)) {
    port_events_ = wanted;
  }
  const bool sources = out_.size() < kOutEnough;
  if (sources != watching_sources_ &&
      watch(main_, sources ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, sources_, EPOLLIN, kSourcesTag)) {
    watching_sources_ = sources;
  }
}

// ---- Channels -----------------------------------------------------------------------------------

Mux::Channel* Mux::find(uint32_t id) {
  auto found = channels_.find(id);
  return found == channels_.end() ? nullptr : found->second.get();
}

bool Mux::open(int fd, std::string* why) {
  if (!up_) return *why = "the host does not answer at the port", false;
  if (channels_.size() >= max_channels_) {
    return *why = "too many programs of this machine use the port", false;
  }
  if (highest_ == UINT32_MAX) return *why = "the port has no channel numbers left", false;
  const uint32_t id = ++highest_;
  send(MuxKind::kOpen, id, nullptr, 0);
  add(id, fd);
  flush();
  return true;
}

void Mux::add(uint32_t id, int fd) {
  auto channel = std::make_unique<Channel>();
  channel->id = id;
  channel->fd = fd;
  outstanding_ += channel->granted;
  Channel& added = *channel;
  channels_[id] = std::move(channel);
  watch_source(added);
}

void Mux::erase(Channel& channel) {
  if (channel.watching_source) watch(sources_, EPOLL_CTL_DEL, channel.fd, 0, 0);
  if (channel.watching_sink) watch(main_, EPOLL_CTL_DEL, channel.fd, 0, 0);
  outstanding_ -= channel.granted - channel.delivered;
  close(channel.fd);
  channels_.erase(channel.id);
}

void Mux::abort(Channel& channel, const std::string& why) {
  if (!channel.closing) send_close(channel.id, why);
  erase(channel);
}

void Mux::drop_all(const std::string& why) {
  while (!channels_.empty()) {
    Channel& channel = *channels_.begin()->second;
    if (!channel.closing) owner_.on_close(channel.fd, channel.accepted, why);
    erase(channel);
  }
  credits_due_.clear();
}

void Mux::end_channels(const std::string& why) {
  while (!channels_.empty()) abort(*channels_.begin()->second, why);
  credits_due_.clear();
  flush();
}

// Writes what waits for a channel's socket; ends the channel when it is over. The channel may be
// gone afterwards.
// To the channel's socket; the first bytes take the owner's descriptor along.
ssize_t Mux::put(Channel& channel, const void* data, size_t bytes) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  DescriptorRoom room;
  const int descriptor = channel.greeted || side_ == Side::kHost ? -1 : owner_.descriptor();
  room.attach(&message, &descriptor, descriptor >= 0 ? 1 : 0);
  ssize_t sent;
  do {
    sent = sendmsg(channel.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == ETOOMANYREFS && message.msg_controllen != 0) {
      // Too many are under way: the program does without.
      message.msg_control = nullptr;
      message.msg_controllen = 0;
      errno = EINTR;
    }
  } while (sent < 0 && errno == EINTR);
  channel.greeted = channel.greeted || sent > 0;
  return sent;
}

void Mux::deliver(Channel& channel) {
  while (!channel.pending.empty()) {
    const ssize_t sent = put(channel, channel.pending.front(), channel.pending.size());
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) {
      return abort(channel, "its socket was closed");
    }
    if (sent <= 0) break;
    channel.pending.take(static_cast<size_t>(sent));
    channel.delivered += static_cast<size_t>(sent);
    outstanding_ -= static_cast<uint64_t>(sent);
  }
  if (channel.pending.empty()) {
    if (channel.closing || (channel.peer_ended && channel.ended)) return erase(channel);
    if (channel.peer_ended) shutdown(channel.fd, SHUT_WR);
  }
  if (channel.closing) watch_source(channel);
  consider_credit(channel);
  watch_sink(channel);
}

void Mux::consider_credit(Channel& channel) {
  if (channel.credit_due || channel.peer_ended || channel.closing) return;
  // New credit is worth a frame when half of the window is used up.
  const uint64_t left = channel.granted - channel.delivered;
  if (left > kMuxFirstCredit / 2) {
    const uint64_t most = std::clamp(kWindows / channels_.size(), kMuxFirstCredit, kWindow);
    if (left > most / 2 || outstanding_ > kWindows) return;
  }
  channel.credit_due = true;
  credits_due_.push_back(channel.id);
}

void Mux::send_credits() {
  while (!credits_due_.empty()) {
    Channel* channel = find(credits_due_.front());
    credits_due_.pop_front();
    if (channel == nullptr) continue;
    channel->credit_due = false;
    const uint64_t window = outstanding_ > kWindows
                                ? kMuxFirstCredit
                                : std::clamp(kWindows / channels_.size(), kMuxFirstCredit, kWindow);
    const uint64_t limit = channel->delivered + window;
    if (limit <= channel->granted) continue;
    outstanding_ += limit - channel->granted;
    channel->granted = limit;
    const MuxCredit credit{limit};
    send(MuxKind::kCredit, channel->id, &credit, sizeof credit);
  }
}

void Mux::watch_source(Channel& channel) {
  const bool wanted = !channel.ended && !channel.closing && channel.sent < channel.credit;
  if (wanted == channel.watching_source) return;
  if (watch(sources_, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, channel.fd, EPOLLIN | EPOLLRDHUP,
            tag_of(channel.id))) {
    channel.watching_source = wanted;
  }
}

void Mux::watch_sink(Channel& channel) {
  const bool wanted = !channel.pending.empty();
  if (wanted == channel.watching_sink) return;
  if (watch(main_, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, channel.fd, EPOLLOUT,
            tag_of(channel.id))) {
    channel.watching_sink = wanted;
  }
}

// Reads sockets in turn, as long as the port takes it.
void Mux::pull() {
  for (size_t before = SIZE_MAX; out_.size() < kOutEnough && out_.size() != before;) {
    before = out_.size();
    epoll_event events[kSourcesAtOnce];
    const int count = epoll_wait(sources_, events, kSourcesAtOnce, 0);
    for (int i = 0; i < count; i++) {
      if (Channel* channel = find(static_cast<uint32_t>(events[i].data.u64 - 1))) {
        pull_from(*channel);
      }
    }
  }
}

void Mux::pull_from(Channel& channel) {
  const size_t most =
      static_cast<size_t>(std::min<uint64_t>(kMuxMaxData, channel.credit - channel.sent));
  if (most == 0 || channel.ended) return watch_source(channel);
  uint8_t* room = out_.room(sizeof(MuxHeader) + most);
  const ssize_t got = recv(channel.fd, room + sizeof(MuxHeader), most, MSG_DONTWAIT);
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (got < 0) return abort(channel, "its socket failed");
  if (got == 0) {
    // The end of what it sends, or of all: nobody is there to take anything any more.
    pollfd state{channel.fd, 0, 0};
    if (poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLERR)) != 0) {
      return abort(channel, "its socket was closed");
    }
    channel.ended = true;
    send(MuxKind::kEnd, channel.id, nullptr, 0);
    if (channel.peer_ended && channel.pending.empty()) return erase(channel);
    return watch_source(channel);
  }
  const MuxHeader header{frame_epoch_, channel.id, static_cast<uint16_t>(MuxKind::kData), 0,
                         static_cast<uint32_t>(got)};
  memcpy(room, &header, sizeof header);
  out_.added(sizeof header + static_cast<size_t>(got));
  channel.sent += static_cast<uint64_t>(got);
  watch_source(channel);
}

}  // namespace gpupool::carriers
