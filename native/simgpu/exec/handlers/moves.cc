// mov between rows, packing and unpacking, reads of clocks.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <class T>
struct Same {
  T operator()(T a) const { return a; }
};
struct Wide {
  uint64_t lo, hi;
};
Ins move_wide(Warp& w, Ins i) {
  Wide* d = row<Wide>(w, i->d);
  const Wide* a = row<const Wide>(w, i->a);
  for (uint32_t m = w.mask; m; m &= m - 1) d[__builtin_ctz(m)] = a[__builtin_ctz(m)];
  return i + 1;
}

template <class From, class To, int kPart>
Ins pack(Warp& w, Ins i) {
  constexpr int kShift = kPart * 8 * int(sizeof(From));
  constexpr To kClear = To(~(To(From(~From(0))) << kShift));
  map_lanes<To>(
      w, i->d, [](To d, From a) { return To((d & kClear) | To(To(a) << kShift)); },
      static_cast<const To*>(row<To>(w, i->d)), row<const From>(w, i->a));
  return i + 1;
}
template <class From, class To, int kPart>
Ins unpack(Warp& w, Ins i) {
  map_lanes<To>(
      w, i->d, [](From a) { return To(a >> (kPart * 8 * int(sizeof(To)))); },
      row<const From>(w, i->a));
  return i + 1;
}
// 128-bit registers: parts of 64 bits (or 32).
template <class From, int kPart>
Ins pack_wide(Warp& w, Ins i) {
  constexpr int kPerRow = 16 / sizeof(From);
  From* d = row<From>(w, i->d);
  const From* a = row<const From>(w, i->a);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    d[l * kPerRow + kPart] = a[l];
  }
  return i + 1;
}
template <class To, int kPart>
Ins unpack_wide(Warp& w, Ins i) {
  constexpr int kPerRow = 16 / sizeof(To);
  To* d = row<To>(w, i->d);
  const To* a = row<const To>(w, i->a);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    d[l] = a[l * kPerRow + kPart];
  }
  return i + 1;
}
template <class From, class To>
Handler pack_part(uint32_t part) {
  switch (part) {
    case 0:
      return pack<From, To, 0>;
    case 1:
      return pack<From, To, 1>;
    case 2:
      if constexpr (sizeof(To) / sizeof(From) > 2) return pack<From, To, 2>;
      return nullptr;
    case 3:
      if constexpr (sizeof(To) / sizeof(From) > 2) return pack<From, To, 3>;
      return nullptr;
    default:
      return nullptr;
  }
}
template <class From, class To>
Handler unpack_part(uint32_t part) {
  switch (part) {
    case 0:
      return unpack<From, To, 0>;
    case 1:
      return unpack<From, To, 1>;
    case 2:
      if constexpr (sizeof(From) / sizeof(To) > 2) return unpack<From, To, 2>;
      return nullptr;
    case 3:
      if constexpr (sizeof(From) / sizeof(To) > 2) return unpack<From, To, 3>;
      return nullptr;
    default:
      return nullptr;
  }
}

template <class T, Clock kWhich>
Ins clock_read(Warp& w, Ins i) {
  const T v = T(read_clock(w, kWhich));
  map_lanes<T>(w, i->d, [v](T) { return v; }, static_cast<const T*>(row<T>(w, i->d)));
  return poll(w, i + 1);
}

}  // namespace

Handler move_handler(uint32_t width) {
  switch (width) {
    case 2:
      return unary<uint16_t, uint16_t, Same<uint16_t>>;
    case 4:
      return unary<uint32_t, uint32_t, Same<uint32_t>>;
    case 8:
      return unary<uint64_t, uint64_t, Same<uint64_t>>;
    case 16:
      return move_wide;
    default:
      return nullptr;
  }
}
Handler pack_handler(uint32_t from, uint32_t to, uint32_t part) {
  if (from == 1 && to == 2) return pack_part<uint8_t, uint16_t>(part);
  if (from == 1 && to == 4) return pack_part<uint8_t, uint32_t>(part);
  if (from == 2 && to == 4) return pack_part<uint16_t, uint32_t>(part);
  if (from == 2 && to == 8) return pack_part<uint16_t, uint64_t>(part);
  if (from == 4 && to == 8) return pack_part<uint32_t, uint64_t>(part);
  if (from == 8 && to == 16 && part == 0) return pack_wide<uint64_t, 0>;
  if (from == 8 && to == 16 && part == 1) return pack_wide<uint64_t, 1>;
  if (from == 4 && to == 16) {
    switch (part) {
      case 0:
        return pack_wide<uint32_t, 0>;
      case 1:
        return pack_wide<uint32_t, 1>;
      case 2:
        return pack_wide<uint32_t, 2>;
      case 3:
        return pack_wide<uint32_t, 3>;
    }
  }
  return nullptr;
}
Handler unpack_handler(uint32_t from, uint32_t to, uint32_t part) {
  if (from == 2 && to == 1) return unpack_part<uint16_t, uint8_t>(part);
  if (from == 4 && to == 1) return unpack_part<uint32_t, uint8_t>(part);
  if (from == 4 && to == 2) return unpack_part<uint32_t, uint16_t>(part);
  if (from == 8 && to == 2) return unpack_part<uint64_t, uint16_t>(part);
  if (from == 8 && to == 4) return unpack_part<uint64_t, uint32_t>(part);
  if (from == 16 && to == 8 && part == 0) return unpack_wide<uint64_t, 0>;
  if (from == 16 && to == 8 && part == 1) return unpack_wide<uint64_t, 1>;
  if (from == 16 && to == 4) {
    switch (part) {
      case 0:
        return unpack_wide<uint32_t, 0>;
      case 1:
        return unpack_wide<uint32_t, 1>;
      case 2:
        return unpack_wide<uint32_t, 2>;
      case 3:
        return unpack_wide<uint32_t, 3>;
    }
  }
  return nullptr;
}
Handler special_handler(Clock which) {
  switch (which) {
    case Clock::kClock32:
      return clock_read<uint32_t, Clock::kClock32>;
    case Clock::kClockHi:
      return clock_read<uint32_t, Clock::kClockHi>;
    case Clock::kClock64:
      return clock_read<uint64_t, Clock::kClock64>;
    case Clock::kTimer:
      return clock_read<uint64_t, Clock::kTimer>;
    case Clock::kTimerLo:
      return clock_read<uint32_t, Clock::kTimerLo>;
    case Clock::kTimerHi:
      return clock_read<uint32_t, Clock::kTimerHi>;
  }
  return nullptr;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
