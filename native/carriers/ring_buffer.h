// The two ends of one ring of bytes in shared memory, for one producer and one consumer. Each end
// keeps its own position to itself and only ever believes the other's word if it is possible.
#pragma once

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpupool::carriers {

class RingProducer {
 public:
  RingProducer(uint8_t* data, uint32_t capacity, std::atomic<uint64_t>* tail,
               const std::atomic<uint64_t>* head)
      : data_(data), capacity_(capacity), tail_(tail), head_(head) {}

  // Bytes that can be put in; looks at the consumer's word if it is less than `wanted`.
  size_t room(size_t wanted) {
    if (free_now() < wanted) look();
    return free_now();
  }
  bool wrong() const { return wrong_; }  // the consumer's word was impossible; it is not read again

  // At most room(). A source that lies where it belongs is not copied.
  void put(const void* from, size_t bytes) {
    const auto* source = static_cast<const uint8_t*>(from);
    while (bytes > 0) {
      uint8_t* to = data_ + (position_ & (capacity_ - 1));
      const size_t piece = std::min<size_t>(bytes, static_cast<size_t>(data_ + capacity_ - to));
      if (to != source) memcpy(to, source, piece);
      position_ += piece;
      unpublished_ = true;
      source += piece;
      bytes -= piece;
    }
  }
  // Makes what was put in visible; false: there is nothing new.
  bool publish() {
    if (!unpublished_) return false;
    unpublished_ = false;
    published_ = position_;
    tail_->store(position_, std::memory_order_release);
    return true;
  }
  void align(uint32_t to) { position_ = (position_ + to - 1) & ~uint64_t{to - 1}; }
  // Bytes from the position to the end of the memory.
  size_t run() const { return capacity_ - (position_ & (capacity_ - 1)); }
  // Where the next bytes go, if there is room for so many as one piece.
  uint8_t* span(size_t bytes) {
    const uint64_t at = position_ & (capacity_ - 1);
    return at + bytes <= capacity_ && room(bytes) >= bytes ? data_ + at : nullptr;
  }

 private:
  size_t free_now() const {
    const uint64_t used = position_ - taken_;
    return used < capacity_ ? capacity_ - used : 0;
  }
  void look() {
    if (wrong_) return;
    const uint64_t head = head_->load(std::memory_order_acquire);
    if (head - taken_ > published_ - taken_) {
      wrong_ = true;
    } else {
      taken_ = head;
    }
  }

  uint8_t* const data_;
  const uint64_t capacity_;
  std::atomic<uint64_t>* const tail_;
  const std::atomic<uint64_t>* const head_;
  uint64_t position_ = 0, published_ = 0;
  uint64_t taken_ = 0;  // the last possible word of the consumer
  bool unpublished_ = false;
  bool wrong_ = false;
};

class RingConsumer {
 public:
  RingConsumer(const uint8_t* data, uint32_t capacity, const std::atomic<uint64_t>* tail,
               std::atomic<uint64_t>* head)
      : data_(data), capacity_(capacity), tail_(tail), head_(head) {}

  // Bytes that are there; looks at the producer's word if there are none.
  size_t available(size_t wanted = 1) {
    if (there_now() < wanted) look();
    return there_now();
  }
  bool wrong() const { return wrong_; }

  // At most available().
  void take(void* to, size_t bytes) {
    auto* target = static_cast<uint8_t*>(to);
    while (bytes > 0) {
      const uint64_t at = position_ & (capacity_ - 1);
      const size_t piece = std::min<size_t>(bytes, capacity_ - at);
      memcpy(target, data_ + at, piece);
      position_ += piece;
      target += piece;
      bytes -= piece;
    }
  }
  // The next bytes where they lie, and as taken; null: not there, or not as one piece.
  const uint8_t* lend(size_t bytes) {
    const uint64_t at = position_ & (capacity_ - 1);
    if (at + bytes > capacity_ || available(bytes) < bytes) return nullptr;
    position_ += bytes;
    return data_ + at;
  }
  void align(uint32_t to) { position_ = (position_ + to - 1) & ~uint64_t{to - 1}; }
  uint64_t position() const { return position_; }
  size_t run() const { return capacity_ - (position_ & (capacity_ - 1)); }

  // Lets the producer overwrite everything up to there, which was taken.
  void release(uint64_t position) {
    if (position <= released_) return;
    released_ = position;
    head_->store(position, std::memory_order_release);
  }
  // What the producer cannot use now.
  uint64_t held() const { return produced_ - std::min(released_, produced_); }

 private:
  size_t there_now() const { return produced_ > position_ ? produced_ - position_ : 0; }
  void look() {
    if (wrong_) return;
    const uint64_t tail = tail_->load(std::memory_order_acquire);
    if (tail < produced_ || tail - released_ > capacity_) {
      wrong_ = true;
    } else {
      produced_ = tail;
    }
  }

  const uint8_t* const data_;
  const uint64_t capacity_;
  const std::atomic<uint64_t>* const tail_;
  std::atomic<uint64_t>* const head_;
  uint64_t position_ = 0, released_ = 0;
  uint64_t produced_ = 0;  // the last possible word of the producer
  bool wrong_ = false;
};

}  // namespace gpupool::carriers
