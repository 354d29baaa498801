// Handles that the client invents. A handle is a number that looks like a pointer and names a kind,
// an index and a generation; looking one up never follows it, so a garbage value is found out.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "wire/frame.h"

namespace gpupool::client {

enum class Kind : uint32_t {
  kContext = 1,
  kModule,
  kLibrary,
  kFunction,
  kStream,
  kEvent,
  kLink,
  kPhysical,
  kPool,
  kGraphExec,
};

// Bits of a handle: kind 40-46, generation 24-39, index 4-23. The lowest bits are zero, and no
// handle is a small number (those are special streams) or a non-canonical address.
inline uint64_t make_handle(Kind kind, uint32_t index, uint32_t generation) {
  return static_cast<uint64_t>(kind) << 40 | static_cast<uint64_t>(generation & 0xFFFF) << 24 |
         static_cast<uint64_t>(index) << 4;
}

// Objects of one kind. Slots are never given back to the system, so a lookup needs no lock; a
// program that uses a handle while it destroys it may see the old or the next object, never
// garbage.
template <typename T, Kind kKind>
class Table {
 public:
  Table() = default;
  ~Table() {
    for (auto& chunk : chunks_) delete[] chunk.load();
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // An object for `value` to be written to; it can be looked up after publish(). Null: too many.
  T* allocate() {
    std::lock_guard lock(mutex_);
    uint32_t index;
    if (free_.size() > kKeepFree || (used_ == wire::kMaxHandleIndex - 1 && !free_.empty())) {
      index = free_.front_index();
      free_.pop();
    } else {
      if (used_ == wire::kMaxHandleIndex - 1) return nullptr;
      index = ++used_;  // index 0 is the null handle
      auto& chunk = chunks_[index / kChunk];
      if (chunk.load(std::memory_order_relaxed) == nullptr) {
        chunk.store(new Slot[kChunk], std::memory_order_release);
      }
    }
    Slot& slot = *slot_at(index);
    slot.generation = (slot.generation + 1) & 0xFFFF;
    if (slot.generation == 0) slot.generation = 1;
    slot.object.wire = {index, slot.generation};
    slot.object.handle = make_handle(kKind, index, slot.generation);
    return &slot.object;
  }

  void publish(T* object) {
    slot_at(object->wire.index)->live.store(object->handle, std::memory_order_release);
  }

  // Ends an object; false if it has ended already.
  bool retire(T* object) {
    Slot* slot = slot_at(object->wire.index);
    std::lock_guard lock(mutex_);
    if (slot->live.load(std::memory_order_relaxed) != object->handle) return false;
    slot->live.store(0, std::memory_order_release);
    free_.push(object->wire.index);
    return true;
  }

  // For an object that was allocated, but never published.
  void discard(T* object) {
    std::lock_guard lock(mutex_);
    free_.push(object->wire.index);
  }

  T* find(uint64_t handle) {
    if (handle >> 40 != static_cast<uint64_t>(kKind) || (handle & 15) != 0) return nullptr;
    const auto index = static_cast<uint32_t>(handle >> 4) & (wire::kMaxHandleIndex - 1);
    Slot* chunk = chunks_[index / kChunk].load(std::memory_order_acquire);
    if (chunk == nullptr) return nullptr;
    Slot& slot = chunk[index % kChunk];
    return slot.live.load(std::memory_order_acquire) == handle ? &slot.object : nullptr;
  }

  template <typename F>
  void for_each(F&& f) {
    uint32_t used;
    {
      std::lock_guard lock(mutex_);
      used = used_;
    }
    for (uint32_t i = 1; i <= used; i++) {
      Slot* slot = slot_at(i);
      if (slot->live.load(std::memory_order_acquire) != 0) f(&slot->object);
    }
  }

 private:
  struct Slot {
    std::atomic<uint64_t> live{0};  // the handle under which the object is known; 0: none
    uint32_t generation = 0;
    T object;
  };
  // First in, first out, so that an index rests a while before it is used again.
  class Queue {
   public:
    size_t size() const { return items_.size() - head_; }
    bool empty() const { return size() == 0; }
    uint32_t front_index() const { return items_[head_]; }
    void pop() {
      if (++head_ > 4096 && head_ * 2 > items_.size()) {
        items_.erase(items_.begin(), items_.begin() + static_cast<long>(head_));
        head_ = 0;
      }
    }
    void push(uint32_t index) { items_.push_back(index); }

   private:
    std::vector<uint32_t> items_;
    size_t head_ = 0;
  };

  static constexpr uint32_t kChunk = 1024;
  static constexpr size_t kKeepFree = 16;

  Slot* slot_at(uint32_t index) {
    return chunks_[index / kChunk].load(std::memory_order_acquire) + index % kChunk;
  }

  std::mutex mutex_;
  std::atomic<Slot*> chunks_[wire::kMaxHandleIndex / kChunk] = {};
  uint32_t used_ = 0;
  Queue free_;
};

}  // namespace gpupool::client
