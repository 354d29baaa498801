// ld and st: moves between rows and resolved memory.
#include "simgpu/exec/handlers/memory.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

struct Wide {
  uint64_t lo, hi;
};

template <class R, class T>
inline R widened(T v) {
  if constexpr (std::is_same_v<T, Wide>)
    return v;
  else
    return R(v);
}

// Element at `skip` bytes of each lane's piece of `stride` bytes.
template <class T, class R>
__attribute__((noinline)) void load_rows(Warp& w, const Resolved& x, uint32_t d, uint32_t stride,
                                         uint32_t skip) {
  R* rows = row<R>(w, d);
  for (int h = 0; h < 2; ++h) {
    R* to = rows + 16 * h;
    switch (x.pattern[h]) {
      case Pattern::kNone:
        break;
      case Pattern::kUniform: {
        const R v = widened<R>(*reinterpret_cast<const T*>(x.base[h] + skip));
        for (int l = 0; l < 16; ++l) to[l] = v;
        break;
      }
      case Pattern::kContiguous: {
        const uint8_t* from = x.base[h] + skip;
        if (stride == sizeof(T)) {
          const T* p = reinterpret_cast<const T*>(from);
#pragma GCC ivdep
          for (int l = 0; l < 16; ++l) to[l] = widened<R>(p[l]);
        } else {
          for (int l = 0; l < 16; ++l)
            to[l] = widened<R>(*reinterpret_cast<const T*>(from + uint64_t(l) * stride));
        }
        break;
      }
      case Pattern::kGeneral:
        for (uint32_t m = (w.mask >> (16 * h)) & 0xffff; m; m &= m - 1) {
          const int l = __builtin_ctz(m);
          to[l] = widened<R>(*reinterpret_cast<const T*>(x.host[16 * h + l] + skip));
        }
        break;
    }
  }
}
template <class T, class R>
__attribute__((noinline)) void store_rows(Warp& w, const Resolved& x, uint32_t a, uint32_t stride,
                                          uint32_t skip) {
  const R* rows = row<const R>(w, a);
  for (int h = 0; h < 2; ++h) {
    const R* from = rows + 16 * h;
    switch (x.pattern[h]) {
      case Pattern::kNone:
        break;
      case Pattern::kUniform:  // one of the lanes wins
        *reinterpret_cast<T*>(x.base[h] + skip) = widened<T>(from[15]);
        break;
      case Pattern::kContiguous: {
        uint8_t* to = x.base[h] + skip;
        if (stride == sizeof(T)) {
          T* p = reinterpret_cast<T*>(to);
#pragma GCC ivdep
          for (int l = 0; l < 16; ++l) p[l] = widened<T>(from[l]);
        } else {
          for (int l = 0; l < 16; ++l)
            *reinterpret_cast<T*>(to + uint64_t(l) * stride) = widened<T>(from[l]);
        }
        break;
      }
      case Pattern::kGeneral:
        for (uint32_t m = (w.mask >> (16 * h)) & 0xffff; m; m &= m - 1) {
          const int l = __builtin_ctz(m);
          *reinterpret_cast<T*>(x.host[16 * h + l] + skip) = widened<T>(from[l]);
        }
        break;
    }
  }
}

// A lane's vector moves as one, as on a card: programs keep a state and its value in one (CUB's
// look-back does), and another block may write it meanwhile. More than 16 bytes are two pieces.
inline void move_piece(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  const auto places = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  // (A thread's own memory, which nobody else writes to, begins anywhere.)
  switch ((places & (bytes < 16 ? bytes - 1 : 15)) == 0 ? bytes : 0) {
    case 4:
      __atomic_store_n(reinterpret_cast<uint32_t*>(to),
                       __atomic_load_n(reinterpret_cast<const uint32_t*>(from), __ATOMIC_RELAXED),
                       __ATOMIC_RELAXED);
      break;
    case 8:
      __atomic_store_n(reinterpret_cast<uint64_t*>(to),
                       __atomic_load_n(reinterpret_cast<const uint64_t*>(from), __ATOMIC_RELAXED),
                       __ATOMIC_RELAXED);
      break;
    case 16:
    case 32:
      for (uint32_t at = 0; at < bytes; at += 16) {
        const __m128i piece = *reinterpret_cast<const volatile __m128i*>(from + at);
        *reinterpret_cast<volatile __m128i*>(to + at) = piece;
      }
      break;
    default:
      memcpy(to, from, bytes);
  }
}

// Where a warp's vectors lie before they are written, or after they were read.
struct Pieces {
  alignas(64) uint8_t bytes[kLanes * 32];
  Resolved where;

  Pieces(const Resolved& x, uint32_t mask, uint32_t size) {
    for (int h = 0; h < 2; ++h) {
      where.pattern[h] = x.pattern[h];
      where.base[h] = bytes + 16 * h * size;
      if (x.pattern[h] != Pattern::kGeneral) continue;
      for (uint32_t m = (mask >> (16 * h)) & 0xffff; m; m &= m - 1) {
        const int l = 16 * h + __builtin_ctz(m);
        where.host[l] = bytes + l * size;
      }
    }
  }
};

inline void move_pieces(const Resolved& to, const Resolved& from, uint32_t mask, uint32_t size) {
  for (int h = 0; h < 2; ++h) {
    switch (from.pattern[h]) {
      case Pattern::kNone:
        break;
      case Pattern::kUniform:
        move_piece(to.base[h], from.base[h], size);
        break;
      case Pattern::kContiguous:
        for (uint32_t at = 0; at < 16 * size; at += size) {
          move_piece(to.base[h] + at, from.base[h] + at, size);
        }
        break;
      case Pattern::kGeneral:
        for (uint32_t m = (mask >> (16 * h)) & 0xffff; m; m &= m - 1) {
          const int l = 16 * h + __builtin_ctz(m);
          move_piece(to.host[l], from.host[l], size);
        }
        break;
    }
  }
}

template <class T, class R, Kind kKind, class A, bool kPoll>
Ins load_one(Warp& w, Ins i) {
  constexpr uint32_t kBytes = sizeof(T);
  const A* rows = row<const A>(w, i->a);
  R* d = row<R>(w, i->d);
  const A offset = A(i->immediate);
  for (int h = 0; h < 2; ++h) {
    const A* p = rows + 16 * h;
    R* to = d + 16 * h;
    const uint32_t hm = (w.mask >> (16 * h)) & 0xffff;
    if (hm == 0xffff && kKind != Kind::kLocal) {
      const A step = A(p[1] - p[0]), first = A(p[0] + offset);
      if ((first & (kBytes - 1)) == 0) {
        if (step == kBytes) {
          if (is_linear<A, kBytes>(p)) {
            if (const uint8_t* base = translate<kKind>(w, i, first, 16 * kBytes, false)) {
              const T* from = reinterpret_cast<const T*>(base);
#pragma GCC ivdep
              for (int l = 0; l < 16; ++l) to[l] = widened<R>(from[l]);
              continue;
            }
          }
        } else if (step == 0 && is_linear<A, 0>(p)) {
          if (const uint8_t* base = translate<kKind>(w, i, first, kBytes, false)) {
            const R v = widened<R>(*reinterpret_cast<const T*>(base));
            for (int l = 0; l < 16; ++l) to[l] = v;
            continue;
          }
        }
      }
    }
    uint8_t* host[16];
    if (!resolve_half<kKind, A>(w, i, h, kBytes, false, host)) return i;
    for (uint32_t m = hm; m; m &= m - 1) {
      const int l = __builtin_ctz(m);
      to[l] = widened<R>(*reinterpret_cast<const T*>(host[l]));
    }
  }
  if constexpr (kPoll) return poll(w, i + 1);
  return i + 1;
}
template <class T, class R, Kind kKind, class A>
Ins load_vector(Warp& w, Ins i) {
  Resolved x;
  const uint32_t n = i->count, bytes = n * sizeof(T);
  if (!resolve<kKind, A>(w, i, bytes, false, x)) return i;
  const uint32_t d[4] = {i->d, i->b, i->c, i->e};
  const auto take = [&](const Resolved& from) {
    for (uint32_t k = 0; k < n; ++k)
      if (d[k]) load_rows<T, R>(w, from, d[k], bytes, k * sizeof(T));
  };
  if constexpr (kKind == Kind::kLocal || kKind == Kind::kParam) {  // nobody else writes there
    take(x);
  } else {
    const Pieces pieces(x, w.mask, bytes);
    move_pieces(pieces.where, x, w.mask, bytes);
    take(pieces.where);
  }
  return i + 1;
}
template <class T, class R, Kind kKind, class A>
Ins store_one(Warp& w, Ins i) {
  constexpr uint32_t kBytes = sizeof(T);
  const A* rows = row<const A>(w, i->a);
  const R* s = row<const R>(w, i->b);
  const A offset = A(i->immediate);
  w.spin = 0;
  for (int h = 0; h < 2; ++h) {
    const A* p = rows + 16 * h;
    const R* from = s + 16 * h;
    const uint32_t hm = (w.mask >> (16 * h)) & 0xffff;
    if (hm == 0xffff && kKind != Kind::kLocal) {
      const A first = A(p[0] + offset);
      if (A(p[1] - p[0]) == kBytes && (first & (kBytes - 1)) == 0 && is_linear<A, kBytes>(p)) {
        if (uint8_t* base = translate<kKind>(w, i, first, 16 * kBytes, true)) {
          T* to = reinterpret_cast<T*>(base);
#pragma GCC ivdep
          for (int l = 0; l < 16; ++l) to[l] = widened<T>(from[l]);
          continue;
        }
      }
    }
    uint8_t* host[16];
    if (!resolve_half<kKind, A>(w, i, h, kBytes, true, host)) return i;
    for (uint32_t m = hm; m; m &= m - 1) {
      const int l = __builtin_ctz(m);
      *reinterpret_cast<T*>(host[l]) = widened<T>(from[l]);
    }
  }
  return i + 1;
}
template <class T, class R, Kind kKind, class A>
Ins store_vector(Warp& w, Ins i) {
  Resolved x;
  const uint32_t n = i->count, bytes = n * sizeof(T);
  if (!resolve<kKind, A>(w, i, bytes, true, x)) return i;
  const uint32_t s[4] = {i->b, i->c, i->d, i->e};
  const auto put = [&](const Resolved& to) {
    for (uint32_t k = 0; k < n; ++k) store_rows<T, R>(w, to, s[k], bytes, k * sizeof(T));
  };
  if constexpr (kKind == Kind::kLocal) {
    put(x);
  } else {
    const Pieces pieces(x, w.mask, bytes);
    put(pieces.where);
    move_pieces(x, pieces.where, w.mask, bytes);
  }
  w.spin = 0;
  return i + 1;
}

template <class T, class R, Kind kKind, class A>
Handler load_form(bool vector, bool polls) {
  if (vector) return load_vector<T, R, kKind, A>;
  if constexpr (kKind == Kind::kGlobal || kKind == Kind::kGeneric)
    if (polls) return load_one<T, R, kKind, A, true>;
  return load_one<T, R, kKind, A, false>;
}
template <class T, class R>
Handler load_access(Access access, bool vector, bool polls) {
  switch (access) {
    case Access::kGlobal:
      return load_form<T, R, Kind::kGlobal, uint64_t>(vector, polls);
    case Access::kShared32:
      return load_form<T, R, Kind::kShared, uint32_t>(vector, polls);
    case Access::kShared64:
      return load_form<T, R, Kind::kShared, uint64_t>(vector, polls);
    case Access::kLocal:
      return load_form<T, R, Kind::kLocal, uint64_t>(vector, false);
    case Access::kParam:
      return load_form<T, R, Kind::kParam, uint64_t>(vector, false);
    case Access::kGeneric:
      return load_form<T, R, Kind::kGeneric, uint64_t>(vector, polls);
  }
  return nullptr;
}
template <class T>
Handler load_width(Access access, uint32_t width, bool vector, bool polls) {
  switch (width) {
    case 2:
      if constexpr (sizeof(T) <= 2) return load_access<T, uint16_t>(access, vector, polls);
      return nullptr;
    case 4:
      if constexpr (sizeof(T) <= 4) return load_access<T, uint32_t>(access, vector, polls);
      return nullptr;
    case 8:
      return load_access<T, uint64_t>(access, vector, polls);
    default:
      return nullptr;
  }
}
template <class T, class R, Kind kKind, class A>
Handler store_form(bool vector) {
  return vector ? store_vector<T, R, kKind, A> : store_one<T, R, kKind, A>;
}
template <class T, class R>
Handler store_access(Access access, bool vector) {
  switch (access) {
    case Access::kGlobal:
      return store_form<T, R, Kind::kGlobal, uint64_t>(vector);
    case Access::kShared32:
      return store_form<T, R, Kind::kShared, uint32_t>(vector);
    case Access::kShared64:
      return store_form<T, R, Kind::kShared, uint64_t>(vector);
    case Access::kLocal:
      return store_form<T, R, Kind::kLocal, uint64_t>(vector);
    case Access::kGeneric:
      return store_form<T, R, Kind::kGeneric, uint64_t>(vector);
    case Access::kParam:
      return nullptr;
  }
  return nullptr;
}
template <class T>
Handler store_width(Access access, uint32_t width, bool vector) {
  switch (width) {
    case 2:
      if constexpr (sizeof(T) <= 2) return store_access<T, uint16_t>(access, vector);
      return nullptr;
    case 4:
      if constexpr (sizeof(T) <= 4) return store_access<T, uint32_t>(access, vector);
      return nullptr;
    case 8:
      return store_access<T, uint64_t>(access, vector);
    default:
      return nullptr;
  }
}

}  // namespace

#ifdef GPUPOOL_LOADS  // this file is compiled twice per ISA level: loads, stores
Handler load_handler(Access access, Type type, uint32_t width, bool vector, bool polls) {
  const uint32_t bytes = ptx::bytes_of(type);
  const bool is_signed = ptx::is_signed_integer(type);
  switch (bytes) {
    case 1:
      return is_signed ? load_width<int8_t>(access, width, vector, polls)
                       : load_width<uint8_t>(access, width, vector, polls);
    case 2:
      return is_signed ? load_width<int16_t>(access, width, vector, polls)
                       : load_width<uint16_t>(access, width, vector, polls);
    case 4:
      return is_signed ? load_width<int32_t>(access, width, vector, polls)
                       : load_width<uint32_t>(access, width, vector, polls);
    case 8:
      return width == 8 ? load_width<uint64_t>(access, width, vector, polls) : nullptr;
    case 16:
      return width == 16 ? load_access<Wide, Wide>(access, vector, polls) : nullptr;
    default:
      return nullptr;
  }
}
#else
Handler store_handler(Access access, Type type, uint32_t width, bool vector) {
  switch (ptx::bytes_of(type)) {
    case 1:
      return store_width<uint8_t>(access, width, vector);
    case 2:
      return store_width<uint16_t>(access, width, vector);
    case 4:
      return store_width<uint32_t>(access, width, vector);
    case 8:
      return width == 8 ? store_width<uint64_t>(access, width, vector) : nullptr;
    case 16:
      return width == 16 ? store_access<Wide, Wide>(access, vector) : nullptr;
    default:
      return nullptr;
  }
}
#endif

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
