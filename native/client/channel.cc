#include "client/channel.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "client/log.h"
#include "client/recorder.h"

namespace gpupool::client {

using carriers::Part;
using carriers::Patience;
using carriers::Status;
using wire::FrameKind;
using wire::FrameReader;

namespace {

constexpr long kFlushDelayNs = 30'000;        // age of a batch's first command before it is sent
constexpr long kMaxFlushDelayNs = 1'000'000;  // the same where batches were always sent by others
constexpr long kBackgroundNs = 200'000;       // at most between two looks for answers to nobody
constexpr long kIdleNs = 20'000'000;  // without traffic: the flusher sleeps until it is woken

}  // namespace

Channel::Channel(std::unique_ptr<carriers::Carrier> carrier, uint32_t epoch,
                 uint64_t initial_credit, ChannelEvents& events)
    : carrier_(std::move(carrier)),
      events_(events),
      writer_(*carrier_, epoch),
      batch_(new uint8_t[kBatchBytes + kMaxCommandBytes]),
      credit_(initial_credit),
      reader_(*carrier_, epoch) {
  if (carrier_->peer_elsewhere()) patience_.peer_is_elsewhere();
}

bool Channel::lose(const char* why) {
  if (!lost_.exchange(true)) {
    log(Level::kError, "the connection to the GPU's worker is lost: %s", why);
    carrier_->shutdown();
  }
  return false;
}

// ---- Sending ----------------------------------------------------------------------------------

uint8_t* Channel::begin_command(uint16_t operation, uint32_t context, size_t body_bytes,
                                uint8_t flags, uint8_t bulk_count, uint64_t call) {
  const size_t bytes = sizeof(wire::CommandHeader) + (flags ? 8 : 0) + body_bytes;
  if (batch_bytes_ + bytes > kBatchBytes && batch_bytes_ > 0) send_batch(nullptr, 0);
  uint8_t* at = batch_.get() + batch_bytes_;
  batch_bytes_ += bytes;
  const wire::CommandHeader header{
      static_cast<uint32_t>(bytes), operation, flags, bulk_count, thread_index(), context};
  memcpy(at, &header, sizeof header);
  at += sizeof header;
  if (flags) {
    memcpy(at, &call, 8);
    at += 8;
  }
  return at;
}

void Channel::finish_post() {
  const bool wake = !flusher_awake_.load(std::memory_order_relaxed);
  if (wake) flusher_awake_.store(true, std::memory_order_relaxed);
  const bool start = wake && !flusher_started_;
  if (start) flusher_started_ = true;
  lock_.unlock();
  if (start) {
    // Signals belong to the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { flusher_loop(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  } else if (wake) {
    wake_flusher();
  }
}

void Channel::flush() {
  std::lock_guard guard(lock_);
  if (batch_bytes_ > 0) send_batch(nullptr, 0);
}

bool Channel::send_batch(const Part* bulk, int bulk_count) {
  const auto bytes = static_cast<uint32_t>(batch_bytes_);
  batch_bytes_ = 0;
  flushes_++;
  if (lost()) return false;
  uint64_t bulk_bytes = 0;
  for (int i = 0; i < bulk_count; i++) bulk_bytes += bulk[i].bytes;
  const uint64_t own = wire::FrameWriter::frame_bytes(bytes, bulk_count, bulk_bytes);
  std::unique_lock writing(write_lock_);
  for (;;) {
    const uint64_t total = writer_.sent() + own + reserve_.load(std::memory_order_relaxed);
    if (total <= credit_.load(std::memory_order_relaxed)) break;
    writing.unlock();  // answers go first
    if (!wait_for_credit(total)) return false;
    writing.lock();
  }
  record_frame(batch_.get(), bytes, bulk, bulk_count);
  if (!writer_.send(FrameKind::kCommands, batch_.get(), bytes, bulk, bulk_count,
                    taken_sequence_.load(std::memory_order_relaxed), wire::kUnlimitedCredit,
                    [this] { return wait_for_room(); })) {
    return lose("the worker or the broker has ended");
  }
  return true;
}

void Channel::answer_call(uint32_t context, uint32_t number, const void* data, uint64_t bytes) {
  struct {
    wire::CommandHeader header;
    uint64_t number;
  } frame;
  frame.header = {sizeof frame,
                  static_cast<uint16_t>(wire::Operation::kHostFunctionDone),
                  0,
                  static_cast<uint8_t>(bytes != 0 ? 1 : 0),
                  thread_index(),
                  context};
  frame.number = number;
  const Part part{const_cast<void*>(data), bytes};
  const int parts = bytes != 0 ? 1 : 0;
  const uint64_t own = wire::FrameWriter::frame_bytes(sizeof frame, parts, bytes);
  std::unique_lock writing(write_lock_);
  for (;;) {
    if (lost()) return;
    const uint64_t total = writer_.sent() + own;
    if (total <= credit_.load(std::memory_order_relaxed)) break;
    writing.unlock();
    if (!wait_for_credit(total)) return;
    writing.lock();
  }
  if (!writer_.send(FrameKind::kCommands, &frame, sizeof frame, &part, parts,
                    taken_sequence_.load(std::memory_order_relaxed), wire::kUnlimitedCredit,
                    [this] { return wait_for_room(); })) {
    lose("the worker or the broker has ended");
  }
}

bool Channel::wait_for_credit(uint64_t total) {
  while (credit_.load(std::memory_order_relaxed) < total) {
    if (lost()) return false;
    if (become_reader()) {
      const bool ok = read_frames(nullptr);
      if (ok && credit_.load() < total) carrier_->wait(carriers::kReadable, 10'000);
      stop_reading();
      if (!ok) return false;
    } else {
      std::unique_lock guard(reply_lock_);
      if (reading_ && credit_.load() < total) {
        replies_.wait_for(guard, std::chrono::milliseconds(1));
      }
    }
  }
  return true;
}

// Whoever waits for room goes on reading: otherwise two sides that both have much to say would
// wait for each other.
bool Channel::wait_for_room() {
  if (lost()) return false;
  if (!become_reader()) {
    carrier_->wait(carriers::kWritable, 10'000);
    return true;
  }
  bool ok = true;
  if (carrier_->wait(carriers::kWritable | carriers::kReadable, 10'000) & carriers::kReadable) {
    ok = read_frames(nullptr);
  }
  stop_reading();
  return ok;
}

// ---- The flusher ------------------------------------------------------------------------------

void Channel::wake_flusher() {
  flusher_signal_.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &flusher_signal_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// Sends batches that nobody fills or waits for. While there is traffic it looks again and again, so
// that those who post commands need not wake it: soon after a batch that it had to send itself,
// ever more rarely as long as others do it.
void Channel::flusher_loop() {
  pthread_setname_np(pthread_self(), "gpupool-flush");
  prctl(PR_SET_TIMERSLACK, 1000ul);
  uint64_t seen = 0;
  long delay_ns = kFlushDelayNs, idle_ns = 0;
  while (!lost()) {
    const uint32_t signal = flusher_signal_.load(std::memory_order_acquire);
    const bool background = in_background_.load(std::memory_order_relaxed) != 0;
    const timespec delay{0, background ? std::min(delay_ns, kBackgroundNs) : delay_ns};
    nanosleep(&delay, nullptr);
    if (background) {
      idle_ns = 0;
      if (become_reader()) {
        read_frames(nullptr);
        stop_reading();
      }
    }
    if (!lock_.try_lock()) {
      idle_ns = 0;
      continue;
    }
    if (flushes_ != seen) {
      delay_ns = std::min(delay_ns * 2, kMaxFlushDelayNs);
      idle_ns = 0;
    } else if (batch_bytes_ > 0) {
      send_batch(nullptr, 0);
      delay_ns = kFlushDelayNs;
      idle_ns = 0;
    } else {
      idle_ns += delay_ns;
    }
    seen = flushes_;
    const bool sleep = idle_ns >= kIdleNs;
    if (sleep) flusher_awake_.store(false, std::memory_order_relaxed);
    lock_.unlock();
    if (sleep) {
      idle_ns = 0;
      delay_ns = kFlushDelayNs;
      syscall(SYS_futex, &flusher_signal_, FUTEX_WAIT_PRIVATE, signal, nullptr, nullptr, 0);
    }
  }
}

// ---- Receiving --------------------------------------------------------------------------------

void Channel::register_call(PendingCall* call) {
  std::lock_guard guard(reply_lock_);
  call->number = next_call_++;
  call->next = calls_;
  calls_ = call;
}

bool Channel::become_reader() {
  std::lock_guard guard(reply_lock_);
  if (reading_) return false;
  reading_ = true;
  return true;
}

void Channel::stop_reading() {
  {
    std::lock_guard guard(reply_lock_);
    reading_ = false;
    if (calls_ == nullptr && event_waiters_ == 0) return;
  }
  replies_.notify_all();
}

CUresult Channel::wait(PendingCall* call) {
  std::unique_lock guard(reply_lock_);
  while (!call->done.load(std::memory_order_acquire) && !lost()) {
    if (reading_) {
      // The reader wakes all when it stops; the limit only guards against a lost connection.
      replies_.wait_for(guard, std::chrono::milliseconds(100));
      continue;
    }
    reading_ = true;
    guard.unlock();
    read_frames(&call->done);
    guard.lock();
    reading_ = false;
    if (calls_ != nullptr || event_waiters_ != 0) replies_.notify_all();
  }
  for (PendingCall** at = &calls_; *at != nullptr; at = &(*at)->next) {
    if (*at == call) {
      // The connection was lost while another thread reads into this call: it must have finished.
      while (reading_ && !call->done.load()) replies_.wait_for(guard, std::chrono::milliseconds(1));
      break;
    }
  }
  for (PendingCall** at = &calls_; *at != nullptr; at = &(*at)->next) {
    if (*at == call) {
      *at = call->next;
      break;
    }
  }
  return call->done.load() ? call->status : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

bool Channel::wait_for_event(const std::atomic<bool>& until) {
  std::unique_lock guard(reply_lock_);
  event_waiters_++;
  while (!until.load(std::memory_order_acquire) && !lost()) {
    if (reading_) {
      replies_.wait_for(guard, std::chrono::milliseconds(100));
      continue;
    }
    reading_ = true;
    guard.unlock();
    read_frames(&until);
    guard.lock();
    reading_ = false;
    if (calls_ != nullptr) replies_.notify_all();
  }
  event_waiters_--;
  return !lost();
}

FrameReader::Result Channel::next_frame() {
  const int64_t start = Patience::now_ns();
  FrameReader::Result result = FrameReader::Result::kBlocked;
  const int64_t limit = patience_.worthwhile() && carrier_->may_spin() ? patience_.spin_ns()
                        : patience_.forbidden()                        ? 0
                                                                       : carrier_->glance_ns();
  if (limit > 0) {
    do {
      result = reader_.next(false);
    } while (result == FrameReader::Result::kBlocked && Patience::now_ns() - start < limit);
  }
  if (result == FrameReader::Result::kBlocked) result = reader_.next(true);
  patience_.waited(Patience::now_ns() - start);
  return result;
}

bool Channel::read_frames(const std::atomic<bool>* until) {
  while (until == nullptr || !until->load(std::memory_order_relaxed)) {
    if (lost()) return false;
    switch (until != nullptr ? next_frame() : reader_.next(false)) {
      case FrameReader::Result::kFrame:
        if (!take_frame()) return false;
        continue;
      case FrameReader::Result::kBad:
        return lose(reader_.reason().c_str());
      case FrameReader::Result::kClosed:
        return lose("the worker or the broker has ended");
      case FrameReader::Result::kBlocked:
        return true;
    }
  }
  return true;
}

bool Channel::take_frame() {
  const wire::FrameHeader& header = reader_.header();
  bool ok = true;
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::kReplies:
      ok = take_replies();
      break;
    case FrameKind::kEvents:
      ok = take_events();
      break;
    case FrameKind::kCredit:
      break;
    case FrameKind::kRefused: {
      wire::Decoder decoder(reader_.body(), header.body_bytes);
      const uint64_t head = decoder.scalar();  // RefusedBody
      const std::string text(decoder.raw(head >> 32));
      return lose(("the worker refused: " + text).c_str());
    }
    default:
      return lose("an unexpected kind of frame");
  }
  if (!ok) return lost() ? false : lose("a malformed frame from the worker");
  if (header.acknowledged > writer_.sequence() + 1) return lose("a wrong acknowledgement");
  taken_sequence_.store(reader_.sequence(), std::memory_order_relaxed);
  if (header.credit > credit_.load(std::memory_order_relaxed)) {
    credit_.store(header.credit, std::memory_order_relaxed);
    replies_.notify_all();
  }
  return true;
}

bool Channel::read_bulk(uint8_t* to, uint64_t bytes) {
  while (bytes > 0) {
    const carriers::Moved moved = reader_.read_bulk(to, bytes, true);
    if (moved.status != Status::kOk) return lose("the worker ended in the middle of a copy");
    to += moved.bytes;
    bytes -= moved.bytes;
  }
  return true;
}

bool Channel::take_replies() {
  const uint8_t* at = reader_.body();
  size_t left = reader_.header().body_bytes;
  int segment = 0;
  while (left > 0) {
    wire::ReplyHeader header;
    if (left < sizeof header) return false;
    memcpy(&header, at, sizeof header);
    if (header.bytes < sizeof header || header.bytes > left || header.bytes % 8 != 0) return false;
    if (segment + header.bulk_count > reader_.header().bulk_count) return false;
    uint64_t bulk_bytes = 0;
    for (int i = 0; i < header.bulk_count; i++) bulk_bytes += reader_.segments()[segment++];
    PendingCall* call = nullptr;
    {
      std::lock_guard guard(reply_lock_);
      for (call = calls_; call != nullptr && call->number != header.call; call = call->next) {
      }
    }
    if (call == nullptr || call->done.load()) return false;
    if (bulk_bytes > call->bulk_room - call->bulk_bytes) return false;
    call->body.insert(call->body.end(), at + sizeof header, at + header.bytes);
    if (bulk_bytes > 0) {
      uint8_t* to = call->bulk_to + call->bulk_bytes;
      if (call->bulk_to_vector) {
        call->bulk.resize(call->bulk_bytes + bulk_bytes);
        to = call->bulk.data() + call->bulk_bytes;
      }
      if (!read_bulk(to, bulk_bytes)) return false;
      call->bulk_bytes += bulk_bytes;
    }
    if ((header.flags & wire::kMoreFollows) == 0) {
      call->status = static_cast<CUresult>(header.status);
      const auto landed = call->landed;
      {
        // From here on the call belongs to its thread.
        std::lock_guard guard(reply_lock_);
        for (PendingCall** link = &calls_; *link != nullptr; link = &(*link)->next) {
          if (*link == call) {
            *link = call->next;
            break;
          }
        }
        if (landed == nullptr) call->done.store(true, std::memory_order_release);
      }
      if (landed != nullptr) {
        landed(call);
        in_background_.fetch_sub(1, std::memory_order_relaxed);
      } else {
        replies_.notify_all();
      }
    }
    at += header.bytes;
    left -= header.bytes;
  }
  return segment == reader_.header().bulk_count;
}

bool Channel::take_events() {
  const uint8_t* at = reader_.body();
  size_t left = reader_.header().body_bytes;
  while (left > 0) {
    wire::EventHeader header;
    if (left < sizeof header) return false;
    memcpy(&header, at, sizeof header);
    if (header.bytes < sizeof header || header.bytes > left || header.bytes % 8 != 0) return false;
    wire::Decoder decoder(at + sizeof header, header.bytes - sizeof header);
    switch (static_cast<wire::EventKind>(header.kind)) {
      case wire::EventKind::kStickyError:
        events_.sticky_error(header.context, static_cast<CUresult>(decoder.scalar() & 0xFFFFFFFF));
        break;
      case wire::EventKind::kAsyncError: {
        const uint64_t word = decoder.scalar();
        events_.refused_command(header.context, static_cast<CUresult>(word & 0xFFFFFFFF),
                                static_cast<uint16_t>(word >> 32));
        break;
      }
      case wire::EventKind::kPrintf: {
        const std::string_view text = decoder.bytes();
        if (!decoder.ok()) return false;
        events_.printf_output(text.data(), text.size());
        break;
      }
      case wire::EventKind::kStandardError: {
        const std::string_view text = decoder.bytes();
        if (!decoder.ok()) return false;
        events_.error_output(text.data(), text.size());
        break;
      }
      case wire::EventKind::kHostCallback: {
        const auto call = decoder.get<wire::HostFunctionCall>();
        if (!decoder.ok()) return false;
        events_.host_function_called(header.context, call);
        {
          std::lock_guard guard(reply_lock_);
        }
        replies_.notify_all();
        break;
      }
      default:
        break;  // of a later version: nothing that this client could do
    }
    at += header.bytes;
    left -= header.bytes;
  }
  return reader_.bulk_left() == 0;
}

}  // namespace gpupool::client
