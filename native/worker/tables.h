// The worker's tables of objects: found by the client's handles, every one of which is checked.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "wire/frame.h"

namespace gpupool::worker {

template <typename T>
class Table {
 public:
  // Null: no such object.
  T* find(wire::Handle handle) {
    if (handle.index >= wire::kMaxHandleIndex) return nullptr;
    Chunk* chunk = chunks_[handle.index / kChunk].get();
    if (chunk == nullptr) return nullptr;
    Slot& slot = chunk->slots[handle.index % kChunk];
    return slot.live && slot.generation == handle.generation ? &slot.object : nullptr;
  }

  // Null: the handle cannot be used (index out of range, or still in use).
  T* create(wire::Handle handle) {
    if (handle.index == 0 || handle.index >= wire::kMaxHandleIndex || handle.generation == 0) {
      return nullptr;
    }
    auto& chunk = chunks_[handle.index / kChunk];
    if (chunk == nullptr) chunk = std::make_unique<Chunk>();
    Slot& slot = chunk->slots[handle.index % kChunk];
    if (slot.live) return nullptr;
    slot.live = true;
    slot.generation = handle.generation;
    slot.object = T{};
    return &slot.object;
  }

  void erase(wire::Handle handle) {
    if (find(handle) == nullptr) return;
    Slot& slot = chunks_[handle.index / kChunk]->slots[handle.index % kChunk];
    slot.live = false;
    slot.object = T{};
  }

  // `f(handle, object)`; may erase the object that it is given.
  template <typename F>
  void for_each(F&& f) {
    for (uint32_t c = 0; c < wire::kMaxHandleIndex / kChunk; c++) {
      if (chunks_[c] == nullptr) continue;
      for (uint32_t i = 0; i < kChunk; i++) {
        Slot& slot = chunks_[c]->slots[i];
        if (slot.live) f(wire::Handle{c * kChunk + i, slot.generation}, slot.object);
      }
    }
  }

 private:
  static constexpr uint32_t kChunk = 256;
  struct Slot {
    uint32_t generation = 0;
    bool live = false;
    T object{};
  };
  struct Chunk {
    Slot slots[kChunk];
  };
  std::unique_ptr<Chunk> chunks_[wire::kMaxHandleIndex / kChunk];
};

}  // namespace gpupool::worker
