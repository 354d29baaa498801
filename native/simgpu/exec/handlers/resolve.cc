// The address side of memory instructions: the general case, and patterns for vectors and atomics.
#include "simgpu/exec/handlers/memory.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

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
inline bool is_linear_by(const A* p, uint32_t shift, A keep) {
  const A first = p[0];
  A diff = 0;
  for (int l = 0; l < 16; ++l) diff |= p[l] ^ A(first + ((A(l) << shift) & keep));
  return diff == 0;
}

}  // namespace

template <Kind kKind, class A>
bool resolve_half(Warp& w, Ins i, int h, uint32_t bytes, bool store, uint8_t** host) {
  const A* rows = row<const A>(w, i->a);
  const A offset = A(i->immediate);
  for (uint32_t m = (w.mask >> (16 * h)) & 0xffff; m; m &= m - 1) {
    const int k = __builtin_ctz(m), l = k + 16 * h;
    const uint64_t address = A(rows[l] + offset);
    uint8_t* at = translate_lane<kKind>(w, i, l, address, bytes, store);
    if (!at || (address & (bytes - 1))) {
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
    host[k] = at;
  }
  return true;
}

template <Kind kKind, class A>
bool resolve(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out) {
  const A* rows = row<const A>(w, i->a);
  const A offset = A(i->immediate);
  for (int h = 0; h < 2; ++h) {
    const uint32_t hm = (w.mask >> (16 * h)) & 0xffff;
    const A* p = rows + 16 * h;
    if (hm == 0xffff && kKind != Kind::kLocal) {
      const A step = A(p[1] - p[0]);
      if (step == 0 || step == bytes) {
        const A first = A(p[0] + offset);
        if (is_linear_by<A>(p, uint32_t(__builtin_ctz(bytes)), step ? A(~A(0)) : A(0)) &&
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
    out.pattern[h] = hm ? Pattern::kGeneral : Pattern::kNone;
    if (hm && !resolve_half<kKind, A>(w, i, h, bytes, store, out.host + 16 * h)) return false;
  }
  return true;
}

#define GPUPOOL_RESOLVE(kind, address)                                                   \
  template bool resolve_half<kind, address>(Warp&, Ins, int, uint32_t, bool, uint8_t**); \
  template bool resolve<kind, address>(Warp&, Ins, uint32_t, bool, Resolved&);
GPUPOOL_RESOLVE(Kind::kGlobal, uint64_t)
GPUPOOL_RESOLVE(Kind::kShared, uint32_t)
GPUPOOL_RESOLVE(Kind::kShared, uint64_t)
GPUPOOL_RESOLVE(Kind::kLocal, uint64_t)
GPUPOOL_RESOLVE(Kind::kParam, uint64_t)
GPUPOOL_RESOLVE(Kind::kGeneric, uint64_t)

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
