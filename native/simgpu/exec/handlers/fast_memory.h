// Addresses of a whole warp by pattern: one check for all lanes.
#pragma once

#include "simgpu/exec/fast_set.h"
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {

enum class Kind { kGlobal, kShared, kLocal, kGeneric };

template <class A>
void find_pattern(const A* rows, AddressPattern& p) {
  p.known = 1;
  A mixed = 0;
  for (int l = 0; l < kLanes; ++l) mixed |= A(rows[l] ^ rows[0]);
  p.lowest = UINT64_MAX;
  p.highest = 0;
  for (int h = 0; h < 2; ++h) {
    const A* a = rows + 16 * h;
    const A step = A(a[1] - a[0]);
    A diff = 0;
    for (int l = 0; l < 15; ++l) diff |= A(a[l + 1] - a[l]) ^ step;
    const int64_t signed_step = int64_t(std::make_signed_t<A>(step));
    const uint64_t first = a[0], last = a[15];
    p.first[h] = first;
    // The ends are the extremes only where nothing wraps around.
    if (diff == 0 && signed_step <= 65536 && signed_step >= -65536 &&
        first + uint64_t(15 * signed_step) == last && (last >= first) == (signed_step >= 0)) {
      p.step[h] = signed_step;
      const uint64_t low = first < last ? first : last, high = first < last ? last : first;
      p.lowest = low < p.lowest ? low : p.lowest;
      p.highest = high > p.highest ? high : p.highest;
    } else {
      p.step[h] = kIrregular;
      uint64_t low = UINT64_MAX, high = 0;
      for (int l = 0; l < 16; ++l) {
        low = a[l] < low ? a[l] : low;
        high = a[l] > high ? a[l] : high;
      }
      p.lowest = low < p.lowest ? low : p.lowest;
      p.highest = high > p.highest ? high : p.highest;
    }
  }
  p.mixed = uint32_t(mixed) & 63;
}

template <class A>
inline const AddressPattern& pattern_of(Warp& w, Ins i) {
  AddressPattern& p = *row<AddressPattern>(w, i->guard);
  if (!p.known) find_pattern<A>(row<const A>(w, i->a), p);
  return p;
}

// What to add to an address (offset included) to reach host memory; false: not all lanes' pieces
// of `bytes` from `low` to `high` are addressable in one way, or some are misaligned.
template <Kind kKind, class A>
inline bool find_base(Warp& w, Ins i, const AddressPattern& p, int64_t low, int64_t high,
                      uint32_t bytes, bool store, uint64_t* base) {
  const A first = A(p.lowest + uint64_t(low)), last = A(p.highest + uint64_t(high));
  if (first > last || ((uint32_t(first) | p.mixed) & (bytes - 1))) return false;
  if constexpr (kKind == Kind::kShared) {
    *base = reinterpret_cast<uint64_t>(w.shared);
    return last < w.shared_bytes && uint64_t{last} + bytes <= w.shared_bytes;
  } else if constexpr (kKind == Kind::kLocal) {
    *base = reinterpret_cast<uint64_t>(w.local);
    return last < w.local_bytes && uint64_t{last} + bytes <= w.local_bytes;
  } else {
    if (kKind == Kind::kGeneric && first >= kSharedWindow) {
      *base = reinterpret_cast<uint64_t>(w.shared) - kSharedWindow;
      return last - kSharedWindow < w.shared_bytes &&
             last - kSharedWindow + bytes <= w.shared_bytes;
    }
    const CachedRange& r = w.ranges[i->slot];
    *base = 0;
    return first >= r.begin && last < r.end && last + bytes <= r.end && (r.writable || !store);
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
