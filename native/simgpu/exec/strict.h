// Strict mode: what CUDA leaves undefined and a card does not report is a fault. The decoder puts
// these checks, as instructions of their own, before those that they are about.
#pragma once

#include <cstdint>
#include <cstring>

#include "simgpu/exec/block.h"
#include "simgpu/exec/written.h"

namespace gpupool::simgpu::exec {

// ---- memory that nothing has written ----

// In Instruction::target.
constexpr int32_t kReads = 1, kWrites = 2, kNarrowAddress = 4, kGenericAddress = 8, kGlobal = 16;

// The memory at row a + immediate, `count` bytes: shared memory, which belongs to the block, or the
// device's. What lies elsewhere, or nowhere, is for the access itself.
inline const Instruction* check_memory(Warp& w, const Instruction* i) {
  Cta& cta = *w.cta;
  const std::byte* row = w.rows + i->a;
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int lane = __builtin_ctz(m);
    uint64_t address;
    if (i->target & kNarrowAddress) {
      address = static_cast<uint32_t>(reinterpret_cast<const uint32_t*>(row)[lane] +
                                      static_cast<uint32_t>(i->immediate));
    } else {
      address = reinterpret_cast<const uint64_t*>(row)[lane] + static_cast<uint64_t>(i->immediate);
    }
    const char* wrong = nullptr;
    if ((i->target & kGlobal) || ((i->target & kGenericAddress) && address < kWindows)) {
      WrittenMemory& memory = written_memory();
      if ((i->target & kReads) && !memory.written(address, i->count))
        wrong = "strict mode: a read of device memory that nothing has written";
      if (i->target & kWrites) memory.mark(address, i->count);
    } else {
      const uint64_t at = i->target & kGenericAddress ? address - kSharedWindow : address;
      if (at >= w.shared_bytes || i->count > w.shared_bytes - at) continue;
      uint8_t* written = cta.shared_written.data() + at;
      if ((i->target & kReads) && std::memchr(written, 0, i->count))
        wrong = "strict mode: a read of shared memory that the block has not written";
      if (i->target & kWrites) std::memset(written, 1, i->count);
    }
    if (wrong)
      return fault_at(w, i, FaultKind::kLaunchFailed, lane, address, i->count, false, wrong);
  }
  return i + 1;
}

// ---- lanes that see each other ----

// Row a: the member mask.
inline const Instruction* check_members(Warp& w, const Instruction* i) {
  const auto* members = reinterpret_cast<const uint32_t*>(w.rows + i->a);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int lane = __builtin_ctz(m);
    if (!(members[lane] >> lane & 1))
      return fault_at(w, i, FaultKind::kLaunchFailed, lane, 0, 0, false,
                      "strict mode: the thread is not in its own member mask");
  }
  return i + 1;
}

enum class ShuffleMode : int32_t { kUp, kDown, kButterfly, kIndex };

// Rows a: the lane or distance, b: clamp and segment, c: the member mask. In `target` the mode.
inline const Instruction* check_shuffle(Warp& w, const Instruction* i) {
  const auto* by = reinterpret_cast<const uint32_t*>(w.rows + i->a);
  const auto* limits = reinterpret_cast<const uint32_t*>(w.rows + i->b);
  const auto* members = reinterpret_cast<const uint32_t*>(w.rows + i->c);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int lane = __builtin_ctz(m);
    const int segment = static_cast<int>(limits[lane] >> 8 & 31);
    const int clamp = static_cast<int>(limits[lane] & 31), n = static_cast<int>(by[lane] & 31);
    const int least = lane & segment, most = least | (clamp & ~segment);
    int from = lane;
    switch (static_cast<ShuffleMode>(i->target)) {
      case ShuffleMode::kUp:
        if (lane - n >= most) from = lane - n;
        break;
      case ShuffleMode::kDown:
        if (lane + n <= most) from = lane + n;
        break;
      case ShuffleMode::kButterfly:
        if ((lane ^ n) <= most) from = lane ^ n;
        break;
      case ShuffleMode::kIndex:
        if ((least | (n & ~segment)) <= most) from = least | (n & ~segment);
        break;
    }
    if (!(members[lane] & w.alive & uint32_t{1} << from))
      return fault_at(w, i, FaultKind::kLaunchFailed, lane, 0, 0, false,
                      "strict mode: the thread takes the value of one that does not take part");
  }
  return i + 1;
}

}  // namespace gpupool::simgpu::exec
