#include "carriers/ring.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "carriers/patience.h"
#include "carriers/ring_buffer.h"

namespace gpupool::carriers {
namespace {

constexpr int64_t kWriteWaitUs = 10'000;
constexpr size_t kPublishBytes = 128 * 1024;  // of bulk data: then the other side can start
// For how long a side looks before it sleeps. A bell for a virtual machine goes through its port
// and the broker, and costs hundreds of microseconds: who slept once would always be found asleep
// again.
struct Times {
  int64_t room_ns, glance_ns;        // for room or bulk data; for an answer of a spinning worker
  int64_t worker_ns, worthwhile_ns;  // Patience's, of the worker
};
constexpr Times kLocalTimes{25'000, 3'000, Patience::kWorkerSpinNs, Patience::kWorkerWorthwhileNs};
constexpr Times kMachineTimes{300'000, 20'000, 300'000, 1'000'000};
// Of a region that may vanish: how often the bell is looked at, and after which time without a look
// what was written last is not worth the risk of looking for it.
constexpr int64_t kBellNs = 1'000'000, kVanishNs = 20'000'000;
constexpr int kBulkReadable = 4;  // further to WaitFor

void relax() { __builtin_ia32_pause(); }

class RingCarrier final : public Carrier {
 public:
  RingCarrier(std::unique_ptr<RingRegion> region, const RingLayout& layout, RingSide side,
              uint32_t epoch, std::unique_ptr<Bell> bell, SpinGate* gate, bool of_machine)
      : region_(std::move(region)),
        layout_(layout),
        side_(side),
        epoch_(epoch),
        bell_(std::move(bell)),
        gate_(gate),
        may_vanish_(of_machine && side == RingSide::kClient),
        times_(of_machine ? kMachineTimes : kLocalTimes),
        control_(reinterpret_cast<RingControl*>(region_->base())),
        out_(side == RingSide::kClient ? control_->to_worker : control_->to_client),
        in_(side == RingSide::kClient ? control_->to_client : control_->to_worker),
        commands_out_(data(false, true), layout.command_bytes, &out_.command_tail.value,
                      &out_.command_head.value),
        bulk_out_(data(true, true), layout.bulk_bytes, &out_.bulk_tail.value,
                  &out_.bulk_head.value),
        commands_in_(data(false, false), layout.command_bytes, &in_.command_tail.value,
                     &in_.command_head.value),
        bulk_in_(data(true, false), layout.bulk_bytes, &in_.bulk_tail.value, &in_.bulk_head.value) {
  }

  // ---- Writing -----------------------------------------------------------------------------

  Moved write(const Part* parts, int count, bool may_wait) override {
    for (bool waited = false;; waited = true) {
      if (gone()) return {Status::kClosed, 0};
      size_t moved = 0;
      bool full = false;
      for (int i = 0; i < count && !full; i++) {
        RingProducer& ring = parts[i].bulk ? bulk_out_ : commands_out_;
        const auto* at = static_cast<const uint8_t*>(parts[i].data);
        for (size_t left = parts[i].bytes; left > 0;) {
          const size_t wanted = std::min(left, parts[i].bulk ? kPublishBytes : left);
          const size_t piece = std::min(wanted, ring.room(wanted));
          if (piece == 0) {
            full = true;
            bulk_blocks_.store(parts[i].bulk, std::memory_order_relaxed);
            break;
          }
          // What stands in front of bulk data is seen before the first of them.
          if (parts[i].bulk) publish(commands_out_);
          ring.put(at, piece);
          if (parts[i].bulk) publish(ring);
          at += piece;
          left -= piece;
          moved += piece;
        }
      }
      publish(commands_out_);
      note_wrong_out();
      if (moved > 0) return {Status::kOk, moved};
      if (broken() != nullptr) return {Status::kClosed, 0};
      if (!may_wait || waited) return {Status::kBlocked, 0};
      wait(kWritable, kWriteWaitUs);
    }
  }

  void begin_bulk_out() override { bulk_out_.align(kBulkAlignment); }
  uint8_t* bulk_room(size_t bytes) override {
    begin_bulk_out();
    if (bytes > bulk_out_.run() || bytes > layout_.bulk_bytes / 4) return nullptr;
    while (!gone() && broken() == nullptr) {
      if (uint8_t* at = bulk_out_.span(bytes)) return at;
      note_wrong_out();
      bulk_blocks_.store(true, std::memory_order_relaxed);
      wait(kWritable, -1);
    }
    return nullptr;
  }
  size_t bulk_run_out() override {
    begin_bulk_out();
    return bulk_out_.run();
  }
  size_t bulk_run_in() override {
    std::lock_guard guard(bulk_lock_);
    return bulk_in_.run();
  }

  // ---- Reading -----------------------------------------------------------------------------

  Moved read(const Part* parts, int count, bool may_wait) override {
    for (;;) {
      const bool closed = gone();  // before looking: what was written last is still read
      if (vanished()) return {Status::kClosed, 0};
      size_t there = broken() == nullptr ? commands_in_.available() : 0;
      note_wrong_in();
      if (broken() != nullptr) return {Status::kClosed, 0};
      if (there > 0) {
        size_t moved = 0;
        for (int i = 0; i < count && there > 0; i++) {
          const size_t piece = std::min(there, parts[i].bytes);
          commands_in_.take(parts[i].data, piece);
          moved += piece;
          there -= piece;
        }
        commands_in_.release(commands_in_.position());
        tell_producer(layout_.command_bytes - commands_in_.held(), layout_.command_bytes);
        return {Status::kOk, moved};
      }
      if (closed) return {Status::kClosed, 0};
      if (!may_wait) return {Status::kBlocked, 0};
      wait_for_commands();
    }
  }

  bool bulk_apart() const override { return true; }

  void begin_bulk_in() override {
    std::lock_guard guard(bulk_lock_);
    bulk_in_.align(kBulkAlignment);
  }

  Moved read_bulk(void* to, size_t bytes, bool may_wait) override {
    for (;;) {
      const bool closed = gone();
      if (vanished()) return {Status::kClosed, 0};
      size_t there = 0;
      if (broken() == nullptr) {
        std::lock_guard guard(bulk_lock_);
        bulk_wanted_ = 1;
        there = std::min(bulk_in_.available(), bytes);
      }
      note_wrong_in();
      if (broken() != nullptr) return {Status::kClosed, 0};
      if (there > 0) {
        // Only this thread takes; others only release.
        bulk_in_.take(to, there);
        std::unique_lock guard(bulk_lock_);
        taken_ = bulk_in_.position();
        if (lent_ == 0) bulk_in_.release(taken_);
        const uint64_t held = bulk_in_.held();
        guard.unlock();
        tell_producer(layout_.bulk_bytes - held, layout_.bulk_bytes);
        return {Status::kOk, there};
      }
      if (closed) return {Status::kClosed, 0};
      if (!may_wait) return {Status::kBlocked, 0};
      wait_spinning(kBulkReadable, -1);
    }
  }

  const uint8_t* lend_bulk(size_t bytes, uint64_t* end) override {
    if (broken() != nullptr) return nullptr;
    std::lock_guard guard(bulk_lock_);
    const uint8_t* at = bulk_in_.lend(bytes);
    if (at == nullptr) return nullptr;
    lent_++;
    *end = taken_ = bulk_in_.position();
    return at;
  }

  bool wait_for_bulk(size_t bytes) override {
    for (;;) {
      const bool closed = gone();
      if (vanished()) return false;
      size_t there = 0;
      {
        std::lock_guard guard(bulk_lock_);
        if (bytes > layout_.bulk_bytes) return false;
        bulk_wanted_ = bytes;
        there = bulk_in_.available(bytes);
      }
      note_wrong_in();
      if (broken() != nullptr) return false;
      if (there >= bytes) return true;
      if (closed) return false;
      wait_spinning(kBulkReadable, -1);
    }
  }

  void release_bulk(uint64_t end, bool all) override {
    std::unique_lock guard(bulk_lock_);
    if (all) {
      lent_ = 0;
      end = taken_;
    }
    bulk_in_.release(end);
    const uint64_t held = bulk_in_.held();
    guard.unlock();
    tell_producer(layout_.bulk_bytes - held, layout_.bulk_bytes);
  }

  int bulk_memory(Part pieces[2]) const override {
    pieces[0] = {data(true, false), layout_.bulk_bytes};
    pieces[1] = {data(true, true), layout_.bulk_bytes};
    return 2;
  }

  // ---- Waiting -----------------------------------------------------------------------------

  int wait(int what, int64_t timeout_us) override {
    // For room it spins a little: the consumer is at work. Whoever reads has spun already.
    if ((what & kWritable) != 0 && spin_is_allowed()) {
      const int64_t limit =
          timeout_us < 0 ? times_.room_ns : std::min(times_.room_ns, timeout_us * 1000);
      if (const int found = spin(what, limit)) return found;
    }
    return sleep(what, timeout_us);
  }

  void shutdown() override {
    closed_.store(true, std::memory_order_release);
    bell_->shutdown();
  }

  void abandon() override {
    closed_.store(true, std::memory_order_relaxed);
    abandoned_.store(true, std::memory_order_relaxed);
    bell_->abandon();
  }

  const char* kind() const override { return "ring"; }
  const char* broken() const override { return broken_.load(std::memory_order_relaxed); }

  bool may_spin() const override {
    return !abandoned_.load(std::memory_order_relaxed) && spin_is_allowed();
  }
  bool peer_elsewhere() const override { return may_vanish_; }  // a virtual machine's
  int64_t glance_ns() const override { return may_spin() ? times_.glance_ns : 0; }

 private:
  // Of the bulk ring or the command ring, of what goes out or comes in.
  uint8_t* data(bool bulk, bool out) const {
    const bool to_worker = (side_ == RingSide::kClient) == out;
    return region_->base() +
           (bulk ? layout_.bulk_offset(to_worker) : layout_.command_offset(to_worker));
  }

  // The peer has gone, or the host has said so, or this side shut down. (The region is not looked
  // at in the child of a fork, where it is not mapped.)
  bool gone() {
    if (closed_.load(std::memory_order_acquire)) return true;
    if (may_vanish_ && bell_is_gone()) return true;
    const auto& dead = side_ == RingSide::kClient ? control_->worker_dead : control_->client_dead;
    if (dead.load(std::memory_order_relaxed) == 0 &&
        control_->epoch.load(std::memory_order_relaxed) == epoch_) {
      return false;
    }
    closed_.store(true, std::memory_order_release);
    return true;
  }

  // Looks at the socket now and then, so that also a program that does nothing for a while finds
  // out before it touches what is not there any more.
  bool bell_is_gone() {
    const int64_t now = Patience::now_ns();
    const int64_t before = bell_seen_ns_.load(std::memory_order_relaxed);
    if (now - before < kBellNs) return false;
    bell_seen_ns_.store(now, std::memory_order_relaxed);
    if (!bell_->gone()) return false;
    if (now - before > kVanishNs) vanished_.store(true, std::memory_order_relaxed);
    closed_.store(true, std::memory_order_release);
    return true;
  }

  void note_wrong_in() {
    if (commands_in_.wrong() || bulk_in_.wrong()) [[unlikely]] {
      broken_.store("the other side of the ring claims to have written what it cannot have written",
                    std::memory_order_relaxed);
    }
  }
  bool vanished() const { return vanished_.load(std::memory_order_relaxed); }
  void note_wrong_out() {
    if (commands_out_.wrong() || bulk_out_.wrong()) [[unlikely]] {
      broken_.store("the other side of the ring claims to have read what was not written",
                    std::memory_order_relaxed);
    }
  }

  // The protocol against lost wake-ups: whoever wants to sleep says so, then looks once more;
  // whoever has written a position looks whether the other sleeps afterwards. The fences (here, and
  // the sequentially consistent store in sleep()) see to it that one of both sees the other.
  void publish(RingProducer& ring) {
    if (!ring.publish()) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    wake(out_.consumer_sleeps);
  }

  // Wakes a producer when a good part is free, so that it does not wake for every byte.
  void tell_producer(uint64_t free, uint64_t capacity) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (free >= capacity / 4) wake(in_.producer_sleeps);
  }

  void wake(RingWord& sleeps) {
    if (sleeps.value.load(std::memory_order_relaxed) != 0 && sleeps.value.exchange(0) != 0) {
      bell_->ring();
    }
  }

  // What of `what` is so; everything of it on a ring that is closed or broken.
  int ready(int what) {
    if (gone() || broken() != nullptr) return what;
    int result = 0;
    // Only what this thread is the one to use is looked at.
    if ((what & kReadable) != 0 && commands_in_.available() > 0) result |= kReadable;
    if ((what & kBulkReadable) != 0) {
      std::lock_guard guard(bulk_lock_);
      if (bulk_in_.available(bulk_wanted_) >= bulk_wanted_) result |= kBulkReadable;
    }
    if ((what & (kReadable | kBulkReadable)) != 0) note_wrong_in();
    if ((what & kWritable) != 0) {
      const bool bulk = bulk_blocks_.load(std::memory_order_relaxed);
      const size_t enough = (bulk ? layout_.bulk_bytes : layout_.command_bytes) / 4;
      if ((bulk ? bulk_out_ : commands_out_).room(enough) >= enough) result |= kWritable;
      note_wrong_out();
    }
    return broken() != nullptr ? what : result;
  }

  bool spin_is_allowed() const {
    if (closed_.load(std::memory_order_relaxed)) return false;
    return control_->may_spin.load(std::memory_order_relaxed) != 0 &&
           (side_ == RingSide::kClient || gate_ != nullptr);
  }

  int spin(int what, int64_t limit_ns) {
    const int64_t end = Patience::now_ns() + limit_ns;
    do {
      for (int i = 0; i < 32; i++) {
        if (const int found = ready(what)) return found;
        relax();
      }
    } while (Patience::now_ns() < end);
    return 0;
  }

  // The worker, between two frames.
  void wait_for_commands() {
    const int64_t start = Patience::now_ns();
    if (gate_ != nullptr && patience_.worthwhile()) {
      const bool entered = gate_->enter(start, patience_.spin_ns());
      control_->may_spin.store(entered ? 1 : 0, std::memory_order_relaxed);
      if (entered) {
        const int found = spin(kReadable, patience_.spin_ns());
        gate_->leave();
        if (found != 0) return patience_.waited(Patience::now_ns() - start);
      }
    }
    sleep(kReadable, -1);
    patience_.waited(Patience::now_ns() - start);
  }

  int wait_spinning(int what, int64_t timeout_us) {
    if (spin_is_allowed()) {
      if (const int found = spin(what, times_.room_ns)) return found;
    }
    return sleep(what, timeout_us);
  }

  // Several threads may sleep, for different things: one listens to the bell for all.
  int sleep(int what, int64_t timeout_us) {
    const int64_t deadline = timeout_us < 0 ? 0 : Patience::now_ns() + timeout_us * 1000;
    int found = 0;
    if (gone()) return what;
    for (;;) {
      uint64_t heard;
      {
        std::lock_guard guard(sleep_lock_);
        heard = heard_;
      }
      if (what & (kReadable | kBulkReadable)) in_.consumer_sleeps.value.store(1);
      if (what & kWritable) out_.producer_sleeps.value.store(1);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      bell_->arm();
      if ((found = ready(what)) != 0) break;
      int64_t left_us = -1;
      if (timeout_us >= 0 && (left_us = (deadline - Patience::now_ns()) / 1000) <= 0) break;
      std::unique_lock guard(sleep_lock_);
      if (heard != heard_) continue;
      if (listening_) {
        const auto limit = std::chrono::microseconds(left_us < 0 ? 100'000 : left_us);
        heard_by_other_.wait_for(guard, limit, [&] { return heard != heard_ || !listening_; });
        continue;
      }
      listening_ = true;
      guard.unlock();
      const Bell::Heard result = bell_->wait(left_us);
      if (result == Bell::Heard::kGone) closed_.store(true, std::memory_order_release);
      guard.lock();
      listening_ = false;
      if (result != Bell::Heard::kNothing) heard_++;
      guard.unlock();
      heard_by_other_.notify_all();
    }
    if (closed_.load(std::memory_order_relaxed)) return found;
    if (what & (kReadable | kBulkReadable)) {
      in_.consumer_sleeps.value.store(0, std::memory_order_relaxed);
    }
    if (what & kWritable) out_.producer_sleeps.value.store(0, std::memory_order_relaxed);
    return found;
  }

  const std::unique_ptr<RingRegion> region_;
  const RingLayout layout_;
  const RingSide side_;
  const uint32_t epoch_;
  const std::unique_ptr<Bell> bell_;
  SpinGate* const gate_;
  const bool may_vanish_;
  const Times& times_;
  RingControl* const control_;
  RingDirection& out_;
  RingDirection& in_;
  std::atomic<bool> closed_{false}, abandoned_{false};
  std::atomic<bool> vanished_{false};  // the region cannot be expected to be there
  std::atomic<int64_t> bell_seen_ns_{Patience::now_ns()};
  std::atomic<const char*> broken_{nullptr};

  // Of the thread that writes:
  RingProducer commands_out_, bulk_out_;
  std::atomic<bool> bulk_blocks_{false};  // what the last write() had no room for

  // Of the thread that reads; what concerns releasing under the lock:
  RingConsumer commands_in_;
  Patience patience_{times_.worker_ns, times_.worthwhile_ns};
  std::mutex bulk_lock_;
  RingConsumer bulk_in_;
  size_t bulk_wanted_ = 1;  // for so many whoever reads waits
  uint64_t taken_ = 0;      // bulk data up to there were read or lent
  int lent_ = 0;

  std::mutex sleep_lock_;
  std::condition_variable heard_by_other_;
  uint64_t heard_ = 0;
  bool listening_ = false;
};

}  // namespace

void prepare_ring(void* region, const RingLayout& layout, uint32_t epoch) {
  auto* control = static_cast<RingControl*>(region);
  control->magic = kRingMagic;
  control->version = kRingVersion;
  control->command_bytes = layout.command_bytes;
  control->bulk_bytes = layout.bulk_bytes;
  control->epoch.store(epoch);
}

std::unique_ptr<Carrier> make_ring_carrier(std::unique_ptr<RingRegion> region,
                                           const RingLayout& layout, RingSide side, uint32_t epoch,
                                           std::unique_ptr<Bell> bell, SpinGate* gate,
                                           bool of_machine) {
  return std::make_unique<RingCarrier>(std::move(region), layout, side, epoch, std::move(bell),
                                       gate, of_machine);
}

}  // namespace gpupool::carriers
