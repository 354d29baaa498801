// Loads and stores of whole warps, with the pattern of their addresses kept between uses.
#include "simgpu/exec/handlers/fast_memory.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

template <Kind kKind>
inline uint8_t* host_of(uint64_t base, uint64_t address, int lane) {
  if constexpr (kKind == Kind::kLocal)
    return local_host(reinterpret_cast<uint8_t*>(base), uint32_t(lane), uint32_t(address));
  return reinterpret_cast<uint8_t*>(base + address);
}

template <class T, class R, Kind kKind, class A>
Ins load_fast(Warp& w, Ins i) {
  if (w.mask != kAllLanes) {
    if (i->e) row<AddressPattern>(w, i->e)->known = 0;
    return i->inner(w, i);
  }
  const AddressPattern& p = pattern_of<A>(w, i);
  uint64_t base;
  if (!find_base<kKind, A>(w, i, p, i->immediate, i->immediate, sizeof(T), false, &base)) {
    if (i->e) row<AddressPattern>(w, i->e)->known = 0;
    return i->inner(w, i);
  }
  const A offset = A(i->immediate);
  for (int h = 0; h < 2; ++h) {
    R* to = row<R>(w, i->d) + 16 * h;
    const int64_t step = p.step[h];
    const A first = A(p.first[h] + uint64_t(offset));
    if (kKind == Kind::kLocal && step == 0) {
      const uint8_t* from = host_of<kKind>(base, first, 16 * h);
      for (int l = 0; l < 16; ++l) to[l] = R(*reinterpret_cast<const T*>(from + l * kGranule));
    } else if (kKind != Kind::kLocal && step == int64_t(sizeof(T))) {
      const T* from = reinterpret_cast<const T*>(base + first);
#pragma GCC ivdep
      for (int l = 0; l < 16; ++l) to[l] = R(from[l]);
    } else if (kKind != Kind::kLocal && step == 0) {
      const R v = R(*reinterpret_cast<const T*>(base + first));
      for (int l = 0; l < 16; ++l) to[l] = v;
    } else {
      const A* a = row<const A>(w, i->a) + 16 * h;
      for (int l = 0; l < 16; ++l)
        to[l] = R(*reinterpret_cast<const T*>(host_of<kKind>(base, A(a[l] + offset), 16 * h + l)));
    }
  }
  if (i->e) row<AddressPattern>(w, i->e)->known = 0;
  return i + 1;
}

template <class T, class R, Kind kKind, class A>
Ins store_fast(Warp& w, Ins i) {
  if (w.mask != kAllLanes) return i->inner(w, i);
  const AddressPattern& p = pattern_of<A>(w, i);
  uint64_t base;
  if (!find_base<kKind, A>(w, i, p, i->immediate, i->immediate, sizeof(T), true, &base))
    return i->inner(w, i);
  const A offset = A(i->immediate);
  w.spin = 0;
  for (int h = 0; h < 2; ++h) {
    const R* from = row<const R>(w, i->b) + 16 * h;
    const int64_t step = p.step[h];
    const A first = A(p.first[h] + uint64_t(offset));
    if (kKind == Kind::kLocal && step == 0) {
      uint8_t* to = host_of<kKind>(base, first, 16 * h);
      for (int l = 0; l < 16; ++l) *reinterpret_cast<T*>(to + l * kGranule) = T(from[l]);
    } else if (kKind != Kind::kLocal && step == int64_t(sizeof(T))) {
      T* to = reinterpret_cast<T*>(base + first);
#pragma GCC ivdep
      for (int l = 0; l < 16; ++l) to[l] = T(from[l]);
    } else {
      // In the order of the lanes: where addresses are equal the last one wins.
      const A* a = row<const A>(w, i->a) + 16 * h;
      for (int l = 0; l < 16; ++l)
        *reinterpret_cast<T*>(host_of<kKind>(base, A(a[l] + offset), 16 * h + l)) = T(from[l]);
    }
  }
  return i + 1;
}

template <class T, class R>
Handler load_access(Access access) {
  switch (access) {
    case Access::kGlobal:
      return load_fast<T, R, Kind::kGlobal, uint64_t>;
    case Access::kShared32:
      return load_fast<T, R, Kind::kShared, uint32_t>;
    case Access::kShared64:
      return load_fast<T, R, Kind::kShared, uint64_t>;
    case Access::kLocal:
      return load_fast<T, R, Kind::kLocal, uint64_t>;
    case Access::kGeneric:
      return load_fast<T, R, Kind::kGeneric, uint64_t>;
    default:
      return nullptr;
  }
}
template <class T, class R>
Handler store_access(Access access) {
  switch (access) {
    case Access::kGlobal:
      return store_fast<T, R, Kind::kGlobal, uint64_t>;
    case Access::kShared32:
      return store_fast<T, R, Kind::kShared, uint32_t>;
    case Access::kShared64:
      return store_fast<T, R, Kind::kShared, uint64_t>;
    case Access::kLocal:
      return store_fast<T, R, Kind::kLocal, uint64_t>;
    case Access::kGeneric:
      return store_fast<T, R, Kind::kGeneric, uint64_t>;
    default:
      return nullptr;
  }
}
template <class T>
Handler load_width(Access access, uint32_t width) {
  if (width == 4) return load_access<T, uint32_t>(access);
  if constexpr (sizeof(T) <= 2)
    if (width == 2) return load_access<T, uint16_t>(access);
  return nullptr;
}

Handler load_handler_of(Access access, Type type, uint32_t width) {
  const bool is_signed = ptx::is_signed_integer(type);
  switch (ptx::bytes_of(type)) {
    case 1:
      return is_signed ? load_width<int8_t>(access, width) : load_width<uint8_t>(access, width);
    case 2:
      return is_signed ? load_width<int16_t>(access, width) : load_width<uint16_t>(access, width);
    case 4:
      return width == 4 ? load_access<uint32_t, uint32_t>(access) : nullptr;
    case 8:
      return width == 8 ? load_access<uint64_t, uint64_t>(access) : nullptr;
    default:
      return nullptr;
  }
}
Handler store_handler_of(Access access, Type type, uint32_t width) {
  switch (ptx::bytes_of(type)) {
    case 1:
      return width == 4   ? store_access<uint8_t, uint32_t>(access)
             : width == 2 ? store_access<uint8_t, uint16_t>(access)
                          : nullptr;
    case 2:
      return width == 4   ? store_access<uint16_t, uint32_t>(access)
             : width == 2 ? store_access<uint16_t, uint16_t>(access)
                          : nullptr;
    case 4:
      return width == 4 ? store_access<uint32_t, uint32_t>(access) : nullptr;
    case 8:
      return width == 8 ? store_access<uint64_t, uint64_t>(access) : nullptr;
    default:
      return nullptr;
  }
}

Ins forget(Warp& w, Ins i) {
  row<AddressPattern>(w, i->e)->known = 0;
  return i->inner(w, i);
}
Ins forget_guarded(Warp& w, Ins i) {
  row<AddressPattern>(w, i->e)->known = 0;
  return run_guarded(w, i);
}
Ins forget_guarded_not(Warp& w, Ins i) {
  row<AddressPattern>(w, i->e)->known = 0;
  return run_guarded_not(w, i);
}

}  // namespace

Handler multiply_chain_handler(Access first, Access second, Type type, bool ftz);
Ins run_straight(Warp& w, Ins i);
StraightForms straight_forms(Handler general, bool raw);

const FastSet& fast() {
  static const FastSet set = {
      .load = load_handler_of,
      .store = store_handler_of,
      .multiply_chain = multiply_chain_handler,
      .straight = run_straight,
      .forms = straight_forms,
      .forget = forget,
      .forget_guarded = {forget_guarded, forget_guarded_not},
  };
  return set;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA

#define GPUPOOL_JOIN2(a, b) a##b
#define GPUPOOL_JOIN(a, b) GPUPOOL_JOIN2(a, b)
namespace gpupool::simgpu::exec {
const FastSet& GPUPOOL_JOIN(GPUPOOL_ISA, _fast)() { return GPUPOOL_ISA::fast(); }
}  // namespace gpupool::simgpu::exec
