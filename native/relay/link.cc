#include "relay/link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace gpupool::relay {
namespace {

using carriers::Moved;
using carriers::Part;
using carriers::Patience;
using carriers::Status;

constexpr uint64_t kGreeting = 0x31304b4e494c5047;  // "GPLINK01"
constexpr uint32_t kData = 1, kConfirm = 2, kGoodbye = 3, kUsage = 4;
constexpr size_t kMostData = 64 * 1024;  // of one record
constexpr size_t kMostGoodbye = 1024;
constexpr size_t kReserve = 64 * 1024;    // of the window, for records without data
constexpr size_t kAhead = 64 * 1024;      // read at once where somebody takes it
constexpr size_t kTlsRecord = 16 * 1024;  // as much as one read gives
constexpr int64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr int64_t kRetryNs = 100 * kMillisecond;

struct Record {
  uint32_t bytes;  // that follow
  uint32_t kind;
  uint64_t confirmed;  // of the other direction's stream
};
static_assert(sizeof(Record) == 16);

struct Usage {
  uint64_t bytes;
  uint32_t busy_permille;
  uint32_t reserved;  // 0
};

struct Greeting {
  uint64_t magic;
  uint64_t received;  // of the stream, until now
};

}  // namespace

Link::Link(Renewal& renewal, const LinkLimits& limits, carriers::SpinGate* gate)
    : limits_(limits),
      renewal_(renewal),
      gate_(gate),
      out_(new uint8_t[limits.window]),
      in_(new uint8_t[limits.window + kAhead]) {}

Link::~Link() = default;

bool Link::begin(std::unique_ptr<TlsConnection> connection, int64_t deadline_ns, std::string* why) {
  uint64_t received = 0;
  if (!exchange(*connection, deadline_ns, &received, why)) return false;
  if (received != 0) return *why = "the other relay is in the middle of something", false;
  std::lock_guard guard(lock_);
  connection_ = std::move(connection);
  heard_ns_ = spoke_ns_ = Patience::now_ns();
  return true;
}

int64_t Link::silence_ns() const {
  return std::clamp(limits_.interruption_ns / 3, 300 * kMillisecond, 3 * kSecond);
}

std::string Link::ending() const {
  std::lock_guard guard(lock_);
  return ending_;
}

bool Link::ended_by_peer() const {
  std::lock_guard guard(lock_);
  return by_peer_;
}

void Link::close(const std::string& why, bool by_peer) {
  {
    std::lock_guard guard(lock_);
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    ending_ = why;
    by_peer_ = by_peer;
    if (connection_) ::shutdown(connection_->fd(), SHUT_RDWR);
  }
  changed_.notify_all();
}

void Link::shutdown() { close("it was ended here"); }

void Link::break_locked(const std::string& why) {
  if (state_ != State::kUp) return;
  state_ = State::kBroken;
  broken_why_ = why;
  // Wakes whoever waits for the socket.
  ::shutdown(connection_->fd(), SHUT_RDWR);
  changed_.notify_all();
}

// ---- What goes out ------------------------------------------------------------------------------

size_t Link::room_locked() const {
  return limits_.window - static_cast<size_t>(appended_ - confirmed_);
}

void Link::put_locked(const void* data, size_t bytes) {
  const size_t at = static_cast<size_t>(appended_) & (limits_.window - 1);
  const size_t first = std::min(bytes, limits_.window - at);
  memcpy(out_.get() + at, data, first);
  memcpy(out_.get(), static_cast<const uint8_t*>(data) + first, bytes - first);
  appended_ += bytes;
}

void Link::append_locked(uint32_t kind, const Part* parts, int count, size_t bytes) {
  const Record record{static_cast<uint32_t>(bytes), kind, delivered_told_.load()};
  put_locked(&record, sizeof record);
  for (int i = 0; i < count && bytes > 0; i++) {
    const size_t piece = std::min(bytes, parts[i].bytes);
    put_locked(parts[i].data, piece);
    bytes -= piece;
  }
}

// False: the connection takes no more now, or is none.
bool Link::flush_locked() {
  while (state_ == State::kUp && written_ < appended_) {
    const size_t at = static_cast<size_t>(written_) & (limits_.window - 1);
    const size_t bytes =
        std::min({static_cast<size_t>(appended_ - written_), limits_.window - at, kMostData});
    size_t done = 0;
    switch (connection_->write(out_.get() + at, bytes, &done)) {
      case TlsConnection::Result::kOk:
        written_ += done;
        continue;
      case TlsConnection::Result::kClosed:
        break_locked(connection_->problem());
        return false;
      default:
        return false;
    }
  }
  return state_ == State::kUp;
}

// All of it, unless the connection is broken: then that is for whoever reads.
void Link::flush() {
  for (;;) {
    Shared connection;
    {
      std::lock_guard guard(lock_);
      spoke_ns_ = Patience::now_ns();
      if (flush_locked() || state_ != State::kUp) return;
      connection = connection_;
    }
    pollfd entry{connection->fd(), POLLOUT, 0};
    poll(&entry, 1, 20);
  }
}

Moved Link::write(const Part* parts, int count, bool may_wait) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += parts[i].bytes;
  bytes = std::min(bytes, kMostData);
  {
    std::unique_lock guard(lock_);
    const auto has_room = [&] {
      return state_ == State::kClosed || room_locked() > kReserve + sizeof(Record);
    };
    if (!has_room() && may_wait) changed_.wait_for(guard, std::chrono::milliseconds(10), has_room);
    if (state_ == State::kClosed) return {Status::kClosed, 0};
    if (!has_room()) return {Status::kBlocked, 0};
    bytes = std::min(bytes, room_locked() - kReserve - sizeof(Record));
    append_locked(kData, parts, count, bytes);
  }
  flush();
  return {Status::kOk, bytes};
}

void Link::say_goodbye(const std::string& sentence) {
  Shared connection;
  {
    std::lock_guard guard(lock_);
    if (state_ == State::kClosed) return;
    const size_t bytes = std::min(sentence.size(), kMostGoodbye);
    if (room_locked() < bytes + sizeof(Record)) return;
    Part part{const_cast<char*>(sentence.data()), bytes};
    append_locked(kGoodbye, &part, 1, bytes);
    connection = connection_;
  }
  // What lies unread at a close would take with it what the other side has not read either.
  const int64_t deadline = Patience::now_ns() + kSecond;
  for (bool out = false; connection && Patience::now_ns() < deadline;) {
    if (!out) {
      std::lock_guard guard(lock_);
      out = flush_locked();
      if (state_ != State::kUp) return;
    }
    if (out) ::shutdown(connection->fd(), SHUT_WR);
    pollfd entry{connection->fd(), static_cast<short>(out ? POLLIN : POLLOUT), 0};
    if (poll(&entry, 1, 100) <= 0 || !out) continue;
    char rest[4096];
    const ssize_t got = recv(connection->fd(), rest, sizeof rest, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return;
  }
}

// ---- What comes in ------------------------------------------------------------------------------

size_t Link::fill(void* to, size_t bytes) {
  std::lock_guard guard(lock_);
  if (state_ != State::kUp || bytes == 0) return 0;
  size_t got = 0;
  if (connection_->read(to, bytes, &got) == TlsConnection::Result::kClosed) {
    break_locked(connection_->problem());
    return 0;
  }
  if (got > 0) heard_ns_ = Patience::now_ns();
  received_ += got;
  return got;
}

// Some of what is there, into the buffer. False: nothing is.
bool Link::take_in() {
  const size_t capacity = limits_.window + kAhead;
  if (in_begin_ == in_end_) {
    in_scanned_ -= in_end_;
    in_begin_ = in_end_ = 0;
  }
  if (capacity - in_end_ < kTlsRecord && in_begin_ > 0) {
    memmove(in_.get(), in_.get() + in_begin_, in_end_ - in_begin_);
    in_end_ -= in_begin_;
    in_scanned_ -= in_begin_;
    in_begin_ = 0;
  }
  const size_t room = std::min(capacity - in_end_, kAhead);
  if (room == 0) return close("the other relay sends more than it may", false), false;
  const size_t got = fill(in_.get() + in_end_, room);
  in_end_ += got;
  return got > 0 && scan();
}

// Looks at the records that have come, long before their data are delivered: what they confirm
// makes room for what goes out.
bool Link::scan() {
  Record record;
  uint64_t confirmed = 0;
  while (in_scanned_ + sizeof record <= in_end_) {
    memcpy(&record, in_.get() + in_scanned_, sizeof record);
    const bool known = (record.kind == kData && record.bytes > 0 && record.bytes <= kMostData) ||
                       (record.kind == kConfirm && record.bytes == 0) ||
                       (record.kind == kUsage && record.bytes == sizeof(Usage)) ||
                       (record.kind == kGoodbye && record.bytes <= kMostGoodbye);
    if (!known) return close("the other relay sent something unknown"), false;
    confirmed = std::max(confirmed, record.confirmed);
    in_scanned_ += sizeof record + record.bytes;
  }
  if (confirmed == 0) return true;
  bool wrong;
  {
    std::lock_guard guard(lock_);
    wrong = confirmed > written_;
    if (!wrong) confirmed_ = std::max(confirmed_, confirmed);
  }
  if (wrong) return close("the other relay has read what was not sent"), false;
  changed_.notify_all();
  return true;
}

size_t Link::deliver(const Part* parts, int count) {
  size_t done = 0, offset = 0;
  for (int i = 0; i < count;) {
    if (record_left_ == 0) {
      Record record;
      if (in_end_ - in_begin_ < sizeof record) break;
      memcpy(&record, in_.get() + in_begin_, sizeof record);
      if (record.kind == kGoodbye) {
        if (in_end_ - in_begin_ < sizeof record + record.bytes || done > 0) break;
        const auto* text = reinterpret_cast<const char*>(in_.get() + in_begin_ + sizeof record);
        close(std::string(text, record.bytes), true);
        break;
      }
      if (record.kind == kUsage) {
        if (in_end_ - in_begin_ < sizeof record + record.bytes) break;
        Usage usage;
        memcpy(&usage, in_.get() + in_begin_ + sizeof record, sizeof usage);
        in_begin_ += sizeof record + sizeof usage;
        delivered_ += sizeof record + sizeof usage;
        if (on_usage) on_usage(usage.bytes, usage.busy_permille);
        continue;
      }
      in_begin_ += sizeof record;
      delivered_ += sizeof record;
      record_left_ = record.bytes;
      continue;
    }
    const size_t piece = std::min({parts[i].bytes - offset, record_left_, in_end_ - in_begin_});
    if (piece == 0) {
      if (in_begin_ == in_end_) break;
      i++, offset = 0;
      continue;
    }
    memcpy(static_cast<uint8_t*>(parts[i].data) + offset, in_.get() + in_begin_, piece);
    in_begin_ += piece;
    record_left_ -= piece;
    delivered_ += piece;
    done += piece;
    offset += piece;
    if (offset == parts[i].bytes) i++, offset = 0;
  }
  return done;
}

// What was delivered makes room at the other side, which is told before it runs out.
void Link::confirm() {
  delivered_told_ = delivered_;
  if (delivered_ - told_ < limits_.window / 4) return;
  {
    std::lock_guard guard(lock_);
    if (state_ != State::kUp || room_locked() < sizeof(Record)) return;
    append_locked(kConfirm, nullptr, 0, 0);
    flush_locked();  // the rest goes with what follows
    spoke_ns_ = Patience::now_ns();
  }
  told_ = delivered_;
}

// Says something when nothing else does, and notices when the other side does not.
void Link::keep_alive() {
  const int64_t now = Patience::now_ns();
  std::lock_guard guard(lock_);
  if (state_ != State::kUp) return;
  if (now - heard_ns_ > silence_ns()) return break_locked("the other host is not heard any more");
  if (now - spoke_ns_ < silence_ns() / 3) return;
  spoke_ns_ = now;
  if (written_ == appended_ && room_locked() >= sizeof(Record)) {
    append_locked(kConfirm, nullptr, 0, 0);
  }
  flush_locked();
}

void Link::tell_usage(uint64_t bytes, uint32_t busy_permille) {
  Usage usage{bytes, busy_permille, 0};
  const Part part{&usage, sizeof usage};
  std::lock_guard guard(lock_);
  if (state_ == State::kClosed || room_locked() < sizeof(Record) + sizeof usage) return;
  append_locked(kUsage, &part, 1, sizeof usage);
  flush_locked();
}

void Link::pump() {
  if (in_end_ - in_begin_ < limits_.window) take_in();
  pollfd news{renewal_.news(), POLLIN, 0};
  if (news.fd >= 0 && poll(&news, 1, 0) > 0 && renewal_.take_news()) {
    std::lock_guard guard(lock_);
    break_locked("the other host has connected anew");
  }
  keep_alive();
  std::unique_lock guard(lock_);
  if (state_ != State::kBroken) return;
  guard.unlock();
  mend();
}

void Link::await_data(int64_t timeout_ns) {
  Shared connection;
  bool unsent;
  {
    std::lock_guard guard(lock_);
    if (state_ != State::kUp) return;
    connection = connection_;
    unsent = written_ < appended_;
  }
  const int64_t start = Patience::now_ns();
  if (!unsent && gate_ != nullptr && patience_.worthwhile() &&
      gate_->enter(start, patience_.spin_ns())) {
    bool there = false;
    char byte;
    while (!there && Patience::now_ns() - start < patience_.spin_ns()) {
      const ssize_t got = recv(connection->fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      there = got >= 0 || errno != EAGAIN;
    }
    gate_->leave();
    if (there) return patience_.waited(Patience::now_ns() - start);
  }
  // What confirms may not have gone out as a whole, and whoever writes may wait for room.
  const auto wanted = static_cast<short>(unsent ? POLLIN | POLLOUT : POLLIN);
  pollfd entries[] = {{connection->fd(), wanted, 0}, {renewal_.news(), POLLIN, 0}};
  const int64_t limit = std::min(timeout_ns, silence_ns() / 4);
  const timespec left{limit / kSecond, limit % kSecond};
  ppoll(entries, entries[1].fd >= 0 ? 2 : 1, &left, nullptr);
  patience_.waited(Patience::now_ns() - start);
  if ((entries[0].revents & POLLOUT) != 0) {
    std::lock_guard guard(lock_);
    flush_locked();
  }
  if ((entries[1].revents & POLLIN) != 0 && renewal_.take_news()) {
    std::lock_guard guard(lock_);
    break_locked("the other host has connected anew");
  }
}

Moved Link::read(const Part* parts, int count, bool may_wait) {
  for (;;) {
    if (const size_t done = deliver(parts, count)) {
      confirm();
      return {Status::kOk, done};
    }
    // Large data go where they belong at once.
    if (in_begin_ == in_end_ && record_left_ > 0 && parts[0].bytes >= kTlsRecord) {
      const size_t got = fill(parts[0].data, std::min(parts[0].bytes, record_left_));
      if (got > 0) {
        record_left_ -= got;
        delivered_ += got;
        in_scanned_ -= got;  // which lies so much behind the end
        confirm();
        return {Status::kOk, got};
      }
    } else if (take_in()) {
      continue;
    }
    State state;
    {
      std::lock_guard guard(lock_);
      state = state_;
    }
    if (state == State::kClosed) return {Status::kClosed, 0};
    if (state == State::kBroken) {
      if (!mend()) return {Status::kClosed, 0};
      continue;
    }
    confirm();
    if (!may_wait) return {Status::kBlocked, 0};
    await_data(kSecond);
    keep_alive();
  }
}

int Link::wait(int what, int64_t timeout_us) {
  if ((what & carriers::kReadable) != 0) {
    await_data(timeout_us < 0 ? kSecond : timeout_us * 1000);
    return carriers::kReadable;
  }
  std::unique_lock guard(lock_);
  const auto has_room = [&] {
    return state_ == State::kClosed || room_locked() > kReserve + sizeof(Record);
  };
  changed_.wait_for(guard, std::chrono::microseconds(timeout_us < 0 ? 1'000'000 : timeout_us),
                    has_room);
  return has_room() ? carriers::kWritable : 0;
}

// ---- Interruptions ------------------------------------------------------------------------------

bool Link::exchange(TlsConnection& connection, int64_t deadline_ns, uint64_t* received,
                    std::string* why) const {
  const Greeting own{kGreeting, received_};
  Greeting other{};
  size_t sent = 0, got = 0;
  while (sent < sizeof own || got < sizeof other) {
    size_t done = 0;
    const auto result =
        sent < sizeof own
            ? connection.write(reinterpret_cast<const uint8_t*>(&own) + sent, sizeof own - sent,
                               &done)
            : connection.read(reinterpret_cast<uint8_t*>(&other) + got, sizeof other - got, &done);
    (sent < sizeof own ? sent : got) += done;
    if (result == TlsConnection::Result::kOk) continue;
    if (result == TlsConnection::Result::kClosed) return *why = connection.problem(), false;
    const int64_t left = (deadline_ns - Patience::now_ns()) / kMillisecond;
    const bool reads = result == TlsConnection::Result::kWantsRead;
    pollfd entry{connection.fd(), static_cast<short>(reads ? POLLIN : POLLOUT), 0};
    if (left <= 0 || poll(&entry, 1, static_cast<int>(left)) <= 0) {
      return *why = "the other relay does not answer", false;
    }
  }
  *received = other.received;
  return other.magic == kGreeting || (*why = "the other relay speaks another protocol", false);
}

bool Link::mend() {
  const int64_t deadline = heard_ns_ + limits_.interruption_ns;
  std::string why;
  {
    std::lock_guard guard(lock_);
    if (state_ == State::kUp) return true;
    if (state_ == State::kClosed) return false;
    why = broken_why_;
  }
  for (bool hopeless = false; !hopeless && Patience::now_ns() < deadline;) {
    {
      std::lock_guard guard(lock_);
      if (state_ == State::kClosed) return false;
    }
    std::string problem;
    auto connection = renewal_.renew(deadline, &hopeless, &problem);
    uint64_t received = 0;
    if (connection && exchange(*connection, deadline, &received, &problem)) {
      std::unique_lock guard(lock_);
      if (state_ == State::kClosed) return false;
      if (received < confirmed_ || received > appended_) {
        guard.unlock();
        close("the other relay has lost what was sent to it");
        return false;
      }
      connection_ = std::move(connection);
      written_ = received;
      state_ = State::kUp;
      heard_ns_ = Patience::now_ns();
      flush_locked();
      guard.unlock();
      changed_.notify_all();
      return true;
    }
    if (!problem.empty()) why = problem;
    if (!hopeless) std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
  }
  close("the connection to the other host is lost: " + why);
  return false;
}

}  // namespace gpupool::relay
