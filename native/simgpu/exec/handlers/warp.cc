// Instructions in which lanes see each other: shfl, vote, match, redux, activemask.
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

// The member mask is in the row `guard` (such instructions are guarded by a branch around them).
// True: every lane's group is complete, and the instruction may run now.
bool arrived(Warp& w, Ins i, const uint32_t* members, Ins* next) {
  const uint32_t first = members[__builtin_ctz(w.mask)];
  uint32_t waiting = 0, need = 0, differ = 0;
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    differ |= members[l] ^ first;
    if (members[l] & w.alive & ~w.mask) {
      if (!waiting) need = members[l];
      waiting |= 1u << l;
    }
  }
  if (!waiting) return true;
  *next = waiting == w.mask ? park_sync(w, i, need) : park_part(w, i, w.mask & ~waiting, need);
  return false;
}

enum class Shuffle { kUp, kDown, kBfly, kIdx };

template <Shuffle kMode, bool kSync>
Ins shfl(Warp& w, Ins i) {
  Ins next;
  if (kSync && !arrived(w, i, row<const uint32_t>(w, i->guard), &next)) return next;
  const uint32_t* a = row<const uint32_t>(w, i->a);
  const uint32_t* b = row<const uint32_t>(w, i->b);
  const uint32_t* c = row<const uint32_t>(w, i->c);
  alignas(64) uint32_t from[kLanes], value[kLanes];
  alignas(64) int32_t valid[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int32_t segment = int32_t(c[l] >> 8) & 31, clamp = int32_t(c[l]) & 31;
    const int32_t bval = int32_t(b[l]) & 31;
    const int32_t max_lane = (l & segment) | (clamp & ~segment);
    const int32_t min_lane = l & segment;
    int32_t j;
    bool ok;
    if constexpr (kMode == Shuffle::kUp) {
      j = l - bval;
      ok = j >= max_lane;
    } else {
      if constexpr (kMode == Shuffle::kDown) j = l + bval;
      if constexpr (kMode == Shuffle::kBfly) j = l ^ bval;
      if constexpr (kMode == Shuffle::kIdx) j = min_lane | (bval & ~segment & 31);
      ok = j <= max_lane;
    }
    from[l] = uint32_t(ok ? j : l) & 31;
    valid[l] = -int32_t(ok);
  }
  for (int l = 0; l < kLanes; ++l) value[l] = a[from[l]];
  map_lanes<uint32_t>(w, i->d, [](uint32_t v) { return v; }, static_cast<const uint32_t*>(value));
  if (i->e)
    map_lanes<int32_t>(w, i->e, [](int32_t v) { return v; }, static_cast<const int32_t*>(valid));
  return i + 1;
}

// d = predicate (all, any, uni) or word (ballot) of predicate a over each lane's group.
template <Mod kMode, bool kSync>
Ins vote(Warp& w, Ins i) {
  Ins next;
  const uint32_t* members = row<const uint32_t>(w, i->guard);
  if (kSync && !arrived(w, i, members, &next)) return next;
  const uint32_t p = bits_of(row<const int32_t>(w, i->a));
  uint32_t* d = row<uint32_t>(w, i->d);
  auto result = [&](uint32_t group) -> uint32_t {
    group &= w.mask;
    const uint32_t set = p & group;
    if constexpr (kMode == Mod::kBallot) return set;
    bool r = false;
    if constexpr (kMode == Mod::kAll) r = set == group;
    if constexpr (kMode == Mod::kAny) r = set != 0;
    if constexpr (kMode == Mod::kUni) r = set == 0 || set == group;
    return 0u - uint32_t(r);
  };
  uint32_t last = kSync ? members[__builtin_ctz(w.mask)] : kAllLanes;
  uint32_t r = result(last);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (kSync && members[l] != last) r = result(last = members[l]);
    d[l] = r;
  }
  return i + 1;
}

template <class T, bool kAll>
Ins match(Warp& w, Ins i) {
  Ins next;
  const uint32_t* members = row<const uint32_t>(w, i->guard);
  if (!arrived(w, i, members, &next)) return next;
  const T* a = row<const T>(w, i->a);
  uint32_t result[kLanes];
  int32_t same[kLanes];
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const uint32_t group = members[l] & w.mask;
    uint32_t equal = 0;
    for (uint32_t g = group; g; g &= g - 1) {
      const int k = __builtin_ctz(g);
      equal |= uint32_t(a[k] == a[l]) << k;
    }
    if constexpr (kAll) {
      same[l] = -int32_t(equal == group);
      result[l] = equal == group ? group : 0;
    } else {
      same[l] = 0;
      result[l] = equal;
    }
  }
  uint32_t* d = row<uint32_t>(w, i->d);
  int32_t* p = row<int32_t>(w, i->e);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (i->d) d[l] = result[l];
    if (kAll && i->e) p[l] = same[l];
  }
  return i + 1;
}

template <class T, Mod kOp>
Ins redux(Warp& w, Ins i) {
  Ins next;
  const uint32_t* members = row<const uint32_t>(w, i->guard);
  if (!arrived(w, i, members, &next)) return next;
  const T* a = row<const T>(w, i->a);
  T* d = row<T>(w, i->d);
  auto reduce = [&](uint32_t group) {
    group &= w.mask;
    T r = a[__builtin_ctz(group)];
    for (uint32_t g = group & (group - 1); g; g &= g - 1) {
      const T v = a[__builtin_ctz(g)];
      if constexpr (kOp == Mod::kAdd) r = T(uint32_t(r) + uint32_t(v));
      if constexpr (kOp == Mod::kMin) r = v < r ? v : r;
      if constexpr (kOp == Mod::kMax) r = v > r ? v : r;
      if constexpr (kOp == Mod::kAnd) r = r & v;
      if constexpr (kOp == Mod::kOr) r = r | v;
      if constexpr (kOp == Mod::kXor) r = r ^ v;
    }
    return r;
  };
  T result[kLanes];
  uint32_t last = 0;
  T r = 0;
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const uint32_t group = members[l] | 1u << l;
    if (group != last) r = reduce(last = group);
    result[l] = r;
  }
  for (uint32_t m = w.mask; m; m &= m - 1) d[__builtin_ctz(m)] = result[__builtin_ctz(m)];
  return i + 1;
}
template <class T>
Handler redux_form(Mod op) {
  switch (op) {
    case Mod::kAdd:
      return redux<T, Mod::kAdd>;
    case Mod::kMin:
      return redux<T, Mod::kMin>;
    case Mod::kMax:
      return redux<T, Mod::kMax>;
    default:
      return nullptr;
  }
}
Handler redux_bits(Mod op) {
  switch (op) {
    case Mod::kAnd:
      return redux<uint32_t, Mod::kAnd>;
    case Mod::kOr:
      return redux<uint32_t, Mod::kOr>;
    case Mod::kXor:
      return redux<uint32_t, Mod::kXor>;
    default:
      return nullptr;
  }
}

Ins activemask(Warp& w, Ins i) {
  const uint32_t v = w.mask;
  uint32_t* d = row<uint32_t>(w, i->d);
  for (uint32_t m = v; m; m &= m - 1) d[__builtin_ctz(m)] = v;
  return i + 1;
}

template <bool kSync>
Handler shuffle_form(Mod mode) {
  switch (mode) {
    case Mod::kUp:
      return shfl<Shuffle::kUp, kSync>;
    case Mod::kDown:
      return shfl<Shuffle::kDown, kSync>;
    case Mod::kBfly:
      return shfl<Shuffle::kBfly, kSync>;
    case Mod::kIdx:
      return shfl<Shuffle::kIdx, kSync>;
    default:
      return nullptr;
  }
}
template <bool kSync>
Handler vote_form(Mod mode) {
  switch (mode) {
    case Mod::kAll:
      return vote<Mod::kAll, kSync>;
    case Mod::kAny:
      return vote<Mod::kAny, kSync>;
    case Mod::kUni:
      return vote<Mod::kUni, kSync>;
    case Mod::kBallot:
      return vote<Mod::kBallot, kSync>;
    default:
      return nullptr;
  }
}

}  // namespace

// Type::kNone: the old forms without .sync.
Handler warp_handler(Op op, Mod mode, Type type) {
  switch (op) {
    case Op::kShfl:
      return type == Type::kNone ? shuffle_form<false>(mode) : shuffle_form<true>(mode);
    case Op::kVote:
      return type == Type::kNone ? vote_form<false>(mode) : vote_form<true>(mode);
    case Op::kMatch:
      if (type == Type::kB32)
        return mode == Mod::kAll ? match<uint32_t, true> : match<uint32_t, false>;
      if (type == Type::kB64)
        return mode == Mod::kAll ? match<uint64_t, true> : match<uint64_t, false>;
      return nullptr;
    case Op::kRedux:
      if (type == Type::kU32) return redux_form<uint32_t>(mode);
      if (type == Type::kS32) return redux_form<int32_t>(mode);
      if (type == Type::kB32) return redux_bits(mode);
      return nullptr;
    case Op::kActivemask:
      return activemask;
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
