// The warp scheduler: paths of a warp run at the lowest instruction of the deepest frame, merge
// where they meet, and take turns when one of them spins (independent thread scheduling).
#include <cstring>

#include "simgpu/exec/block.h"

namespace gpupool::simgpu::exec {
namespace {

constexpr int64_t kSliceInstructions = 20000;
constexpr int32_t kBackwardBranches = 4096;  // while other paths could run
constexpr int32_t kFairQuantum = 512;
constexpr int32_t kUnlimited = 1 << 30;  // the path is alone

bool mergeable(const Path& p) { return p.state == PathState::kRun || p.state == PathState::kSync; }

void wake_sleepers(Warp& w) {
  int64_t now = 0;
  for (Path& p : w.paths) {
    if (p.state != PathState::kSleep) continue;
    if (!now) now = now_ns();
    if (static_cast<uint64_t>(now) >= p.wake_ns) p.state = PathState::kRun;
  }
}

void release_warp_barriers(Warp& w) {
  for (size_t k = 0; k < w.paths.size(); ++k) {
    if (w.paths[k].state != PathState::kWarpBarrier) continue;
    const uint32_t need = w.paths[k].need;
    uint32_t here = 0;
    for (const Path& p : w.paths)
      if (p.state == PathState::kWarpBarrier && p.need == need) here |= p.mask;
    if (need & w.alive & ~here) continue;
    for (Path& p : w.paths) {
      if (p.state != PathState::kWarpBarrier || p.need != need) continue;
      p.state = PathState::kRun;
      ++p.ip;
    }
  }
}

void merge_paths(Warp& w) {
  for (size_t a = 0; a < w.paths.size(); ++a) {
    if (!mergeable(w.paths[a])) continue;
    for (size_t b = a + 1; b < w.paths.size();) {
      Path& p = w.paths[a];
      Path& q = w.paths[b];
      if (mergeable(q) && q.ip == p.ip && q.frame == p.frame) {
        p.mask |= q.mask;
        p.state = PathState::kRun;
        p.stamp = p.stamp > q.stamp ? p.stamp : q.stamp;
        q = w.paths.back();
        w.paths.pop_back();
      } else {
        ++b;
      }
    }
    Path& p = w.paths[a];
    if (p.state == PathState::kSync && (p.need & w.alive & ~p.mask) == 0) p.state = PathState::kRun;
  }
}

// ---- .sync instructions reached at different places ----

// All lanes of the path wait for the lanes `need`.
bool waits_for(const Path& p, uint32_t need) {
  const auto* members = reinterpret_cast<const uint32_t*>(p.frame->rows + p.ip->guard);
  for (uint32_t m = p.mask; m; m &= m - 1)
    if (members[__builtin_ctz(m)] != need) return false;
  return true;
}

void copy_lanes(uint32_t mask, std::byte* to, const std::byte* from, size_t width) {
  for (uint32_t m = mask; m; m &= m - 1) {
    const size_t at = static_cast<size_t>(__builtin_ctz(m)) * width;
    memcpy(to + at, from + at, width);
  }
}

// Lanes that wait in the same operation with the same member mask carry it out together, also
// where they came to it by different instructions or through different calls: in a window of its
// own, as each of them has its registers elsewhere.
void join_syncs(Warp& w) {
  constexpr uint32_t kRow = 8 * kLanes, kA = kRow, kB = 2 * kRow, kC = 3 * kRow, kD = 4 * kRow,
                     kE = 5 * kRow, kMembers = 6 * kRow;
  for (size_t k = 0; k < w.paths.size(); ++k) {
    if (w.paths[k].state != PathState::kSync) continue;
    const Instruction first = *w.paths[k].ip;
    const uint32_t need = w.paths[k].need;
    const auto meets = [&](const Path& p) {
      return p.state == PathState::kSync && p.need == need && p.ip->run == first.run &&
             waits_for(p, need);
    };
    uint32_t here = 0;
    int places = 0;
    for (const Path& p : w.paths)
      if (meets(p)) here |= p.mask, ++places;
    if (places < 2 || (need & w.alive & ~here)) continue;
    alignas(64) std::byte window[7 * kRow] = {};
    Instruction joint = first;
    joint.a = kA, joint.b = kB, joint.c = kC, joint.d = kD, joint.e = kE, joint.guard = kMembers;
    for (const Path& p : w.paths) {
      if (!meets(p)) continue;
      const std::byte* rows = p.frame->rows;
      copy_lanes(p.mask, window + kA, rows + p.ip->a, 4u * p.ip->count);
      if (p.ip->b) copy_lanes(p.mask, window + kB, rows + p.ip->b, 4);
      if (p.ip->c) copy_lanes(p.mask, window + kC, rows + p.ip->c, 4);
      copy_lanes(p.mask, window + kMembers, rows + p.ip->guard, 4);
    }
    w.frame = w.paths[k].frame;
    w.rows = window;
    w.mask = here;
    w.waiting = ~uint32_t{0};
    joint.run(w, &joint);
    w.warp_instructions += 1;
    w.thread_instructions += static_cast<uint64_t>(__builtin_popcount(here));
    for (Path& p : w.paths) {
      if (!(p.mask & here)) continue;
      if (p.ip->d) copy_lanes(p.mask, p.frame->rows + p.ip->d, window + kD, 4);
      if (p.ip->e) copy_lanes(p.mask, p.frame->rows + p.ip->e, window + kE, 4);
      p.state = PathState::kRun;
      ++p.ip;
    }
  }
}

// Chooses the path to run and its limit; false: none can run. Usually that is the lowest
// instruction of the deepest frame. When that has branched backwards too often (it may spin for
// another path), the path that waited longest has the turn for a quantum, wherever calls and
// branches lead it.
bool pick(Warp& w) {
  if (w.paths.size() == 1 && w.paths[0].state == PathState::kRun) {
    w.current = 0;
    w.by_quantum = false;
    const Code& code = *w.paths[0].frame->code;
    w.limit = code.instructions.data() + code.instructions.size();
    w.backward_left = kUnlimited;
    return true;
  }
  wake_sleepers(w);
  release_warp_barriers(w);
  merge_paths(w);
  join_syncs(w);
  size_t lowest = SIZE_MAX, oldest = SIZE_MAX, latest = SIZE_MAX, count = 0;
  auto before = [&](const Path& p, const Path& q) {
    return p.frame->depth != q.frame->depth ? p.frame->depth > q.frame->depth : p.ip < q.ip;
  };
  for (size_t k = 0; k < w.paths.size(); ++k) {
    const Path& p = w.paths[k];
    if (p.state != PathState::kRun) continue;
    ++count;
    if (lowest == SIZE_MAX || before(p, w.paths[lowest])) lowest = k;
    if (oldest == SIZE_MAX || p.stamp < w.paths[oldest].stamp) oldest = k;
    if (p.stamp == w.clock && (latest == SIZE_MAX || before(p, w.paths[latest]))) latest = k;
  }
  if (count == 0) return false;
  const bool expired = w.backward_left <= 0;
  size_t best = lowest;
  uint64_t& random = w.cta->random;
  if (random && count > 1) {
    // Any path, for a while: what is right must not depend on the order.
    uint32_t skip = draw(random, static_cast<uint32_t>(count));
    for (size_t k = 0; k < w.paths.size(); ++k)
      if (w.paths[k].state == PathState::kRun && skip-- == 0) {
        best = k;
        break;
      }
    w.by_quantum = draw(random, 2) == 0;
    w.backward_left = 1 + static_cast<int32_t>(draw(random, 64));
  } else if (count == 1) {
    w.by_quantum = false;
    w.backward_left = kUnlimited;
  } else if (w.by_quantum && !expired && latest != SIZE_MAX) {
    best = latest;  // the quantum goes on
  } else if (!w.by_quantum && expired) {
    best = oldest;
    w.by_quantum = true;
    w.backward_left = kFairQuantum;
  } else {
    if (w.by_quantum || w.backward_left > kBackwardBranches) w.backward_left = kBackwardBranches;
    w.by_quantum = false;
  }
  w.current = best;
  const Path& chosen = w.paths[best];
  const Code& code = *chosen.frame->code;
  w.limit = code.instructions.data() + code.instructions.size();
  if (!w.by_quantum)
    for (const Path& p : w.paths)
      if (mergeable(p) && p.frame == chosen.frame && p.ip > chosen.ip && p.ip < w.limit)
        w.limit = p.ip;
  return true;
}

void enter(Warp& w) {
  Path& p = w.paths[w.current];
  p.stamp = ++w.clock;
  w.frame = p.frame;
  w.rows = p.frame->rows;
  w.mask = p.mask;
  w.waiting = places_of_waiting(w);
  w.run_start = p.ip;
  w.event = Event::kNone;
}

bool only_syncs(const Warp& w) {
  for (const Path& p : w.paths)
    if (p.state == PathState::kBarrier || p.state == PathState::kSleep) return false;
  return true;
}

}  // namespace

WarpStatus run_warp(Warp& w) {
  uint64_t& random = w.cta->random;
  w.budget = random ? 1 + draw(random, 2000) : kSliceInstructions;
  for (;;) {
    if (w.alive == 0) return WarpStatus::kDone;
    if (!pick(w)) {
      if (!only_syncs(w)) return WarpStatus::kBlocked;
      const Path& p = w.paths.front();
      w.frame = p.frame;
      w.mask = p.mask;
      fault_at(w, p.ip, FaultKind::kLaunchFailed,
               "deadlock: threads wait at a .sync instruction for threads that never arrive");
      return WarpStatus::kFault;
    }
    enter(w);
    const Instruction* ip = w.paths[w.current].ip;
    while (ip < w.limit) ip = ip->run(w, ip);
    switch (w.event) {
      case Event::kNone:
      case Event::kSlice: {
        const int64_t n = ip - w.run_start;
        if (n > 0) {
          w.warp_instructions += static_cast<uint64_t>(n);
          w.thread_instructions += static_cast<uint64_t>(n) * __builtin_popcount(w.mask);
          w.budget -= n;
        }
        w.paths[w.current].ip = ip;
        w.paths[w.current].mask = w.mask;
        break;
      }
      case Event::kPaths:
        break;
      case Event::kFault:
        return WarpStatus::kFault;
    }
    if (w.budget <= 0) return WarpStatus::kSlice;
    if (w.event == Event::kSlice && w.spin >= kSpinLimit) {
      // Before the warp counts as waiting, its other paths have a turn.
      if (w.paths.size() == 1 || w.backward_left > 0) return WarpStatus::kSlice;
      w.spin = 0;
    }
  }
}

uint32_t places_of_waiting(const Warp& w) {
  uint32_t left = w.frame->lanes & ~w.mask, places = 0;
  if (!left) return 0;
  const Code& code = *w.frame->code;
  for (const Path& p : w.paths) {
    if (p.frame != w.frame || !(p.mask & left)) continue;
    places |= uint32_t{1} << code.stops[static_cast<size_t>(p.ip - code.instructions.data())];
    left &= ~p.mask;
  }
  // The others are inside calls.
  return left ? places | uint32_t{1} << kElsewhere : places;
}

uint64_t wake_time(const Warp& w) {
  uint64_t t = UINT64_MAX;
  for (const Path& p : w.paths)
    if (p.state == PathState::kSleep && p.wake_ns < t) t = p.wake_ns;
  return t;
}

}  // namespace gpupool::simgpu::exec
