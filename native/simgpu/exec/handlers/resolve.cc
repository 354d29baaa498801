// The address side of every memory instruction.
#include "simgpu/exec/handlers/memory.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

enum class Kind { kGlobal, kShared, kLocal, kParam, kGeneric };

inline bool in_global(Warp& w, Ins i, uint64_t first, uint64_t bytes, bool store) {
  CachedRange& r = w.ranges[i->slot];
  if (first >= r.begin && first + bytes <= r.end && (r.writable || !store)) return true;
  return refill_range(w, r, first, first + bytes, store);
}

// Host address of [first, first + bytes), which is one piece; nullptr: not addressable.
template <Kind kKind>
inline uint8_t* translate(Warp& w, Ins i, uint64_t first, uint64_t bytes, bool store) {
  if constexpr (kKind == Kind::kGlobal) {
    return first < kWindows && in_global(w, i, first, bytes, store)
               ? reinterpret_cast<uint8_t*>(first)
               : nullptr;
  } else if constexpr (kKind == Kind::kShared) {
    return first < w.shared_bytes && first + bytes <= w.shared_bytes ? w.shared + first : nullptr;
  } else if constexpr (kKind == Kind::kParam) {
    return !store && first < w.parameter_bytes && first + bytes <= w.parameter_bytes
               ? const_cast<uint8_t*>(w.parameters) + first
               : nullptr;
  } else if constexpr (kKind == Kind::kGeneric) {
    if (first < kWindows) return translate<Kind::kGlobal>(w, i, first, bytes, store);
    if (first - kSharedWindow < kWindowBytes)
      return translate<Kind::kShared>(w, i, first - kSharedWindow, bytes, store);
    if (first - kParamWindow < kWindowBytes)
      return translate<Kind::kParam>(w, i, first - kParamWindow, bytes, store);
  }
  return nullptr;  // local memory is never one piece across lanes
}

template <Kind kKind>
inline uint8_t* translate_lane(Warp& w, Ins i, int lane, uint64_t address, uint32_t bytes,
                               bool store) {
  if constexpr (kKind == Kind::kLocal) {
    return address < w.local_bytes && address + bytes <= w.local_bytes
               ? local_host(w.local, uint32_t(lane), uint32_t(address))
               : nullptr;
  } else if constexpr (kKind == Kind::kGeneric) {
    if (address - kLocalWindow < kWindowBytes)
      return translate_lane<Kind::kLocal>(w, i, lane, address - kLocalWindow, bytes, store);
    return translate<Kind::kGeneric>(w, i, address, bytes, store);
  } else {
    return translate<kKind>(w, i, address, bytes, store);
  }
}

template <class A>
inline bool is_linear(const A* p, A first, uint32_t shift, A keep) {
  A diff = 0;
  for (int l = 0; l < 16; ++l) diff |= p[l] ^ A(first + ((A(l) << shift) & keep));
  return diff == 0;
}

template <Kind kKind, class A>
__attribute__((always_inline)) inline bool resolve(Warp& w, Ins i, uint32_t bytes, bool store,
                                                   Resolved& out) {
  const A* rows = row<const A>(w, i->a);
  const A offset = A(i->immediate);
  for (int h = 0; h < 2; ++h) {
    const uint32_t hm = (w.mask >> (16 * h)) & 0xffff;
    const A* p = rows + 16 * h;
    if (hm == 0xffff && kKind != Kind::kLocal) {
      const A step = A(p[1] - p[0]);
      if (step == 0 || step == bytes) {
        const A first = A(p[0] + offset);
        if (is_linear<A>(p, p[0], uint32_t(__builtin_ctz(bytes)), step ? A(~A(0)) : A(0)) &&
            (first & (bytes - 1)) == 0) {
          uint8_t* base = translate<kKind>(w, i, first, step ? 16 * bytes : bytes, store);
          if (base) {
            out.pattern[h] = step ? Pattern::kContiguous : Pattern::kUniform;
            out.base[h] = base;
            continue;
          }
        }
      }
    }
    if (hm == 0) {
      out.pattern[h] = Pattern::kNone;
      continue;
    }
    out.pattern[h] = Pattern::kGeneral;
    for (uint32_t m = hm; m; m &= m - 1) {
      const int l = __builtin_ctz(m) + 16 * h;
      const uint64_t address = A(rows[l] + offset);
      uint8_t* host = translate_lane<kKind>(w, i, l, address, bytes, store);
      if (!host || (address & (bytes - 1))) {
        if (address & (bytes - 1)) {
          fault_at(w, i, FaultKind::kMisalignedAddress, l, address, bytes, store,
                   "misaligned address");
        } else {
          const char* what = kKind == Kind::kShared  ? "out of the block's shared memory"
                             : kKind == Kind::kLocal ? "out of the thread's local memory"
                             : kKind == Kind::kParam ? "out of the kernel's parameters"
                                                     : "no allocation holds this address";
          fault_at(w, i, FaultKind::kIllegalAddress, l, address, bytes, store, what);
        }
        return false;
      }
      out.host[l] = host;
    }
  }
  return true;
}

}  // namespace

bool resolve_global(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  return resolve<Kind::kGlobal, uint64_t>(w, i, bytes, store, out);
}
bool resolve_shared32(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  return resolve<Kind::kShared, uint32_t>(w, i, bytes, store, out);
}
bool resolve_shared64(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  return resolve<Kind::kShared, uint64_t>(w, i, bytes, store, out);
}
bool resolve_local(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  return resolve<Kind::kLocal, uint64_t>(w, i, bytes, store, out);
}
bool resolve_param(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  return resolve<Kind::kParam, uint64_t>(w, i, bytes, store, out);
}
bool resolve_generic(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  return resolve<Kind::kGeneric, uint64_t>(w, i, bytes, store, out);
}
Resolver resolver_of(Access access) {
  switch (access) {
    case Access::kGlobal: return resolve_global;
    case Access::kShared32: return resolve_shared32;
    case Access::kShared64: return resolve_shared64;
    case Access::kLocal: return resolve_local;
    case Access::kParam: return resolve_param;
    case Access::kGeneric: return resolve_generic;
  }
  return nullptr;
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
