// What handlers ask of the scheduler: splitting paths, waiting, calls and returns, exits, faults.
#include <time.h>

#include <algorithm>
#include <new>

#include "simgpu/exec/block.h"

namespace gpupool::simgpu::exec {
namespace {

constexpr uint32_t kReturnBytes = 8;  // of the stack, at least, for each call

Path& current(Warp& w) { return w.paths[w.current]; }

// The handler has put the paths in order; the run ends.
const Instruction* paths_changed(Warp& w, const Instruction* i) {
  w.event = Event::kPaths;
  w.limit = nullptr;
  return i;
}

void drop_current(Warp& w) {
  current(w) = w.paths.back();
  w.paths.pop_back();
}

// Adds a path, or lanes to one that is at the same place.
void add_path(Warp& w, Frame* frame, const Instruction* ip, uint32_t mask) {
  for (size_t k = 0; k < w.paths.size(); ++k) {
    Path& p = w.paths[k];
    if (k == w.current || p.frame != frame || p.ip != ip) continue;
    if (p.state != PathState::kRun && p.state != PathState::kSync) continue;
    p.mask |= mask;
    p.state = PathState::kRun;
    return;
  }
  Path p;
  p.frame = frame;
  p.ip = ip;
  p.mask = mask;
  p.stamp = current(w).stamp;
  w.paths.push_back(p);
}

// The current path goes on with fewer lanes at `ip`; others of the frame may be ahead of it.
const Instruction* continue_with(Warp& w, const Instruction* ip, uint32_t mask) {
  Path& p = current(w);
  p.mask = mask;
  p.ip = ip;
  w.mask = mask;
  w.waiting = places_of_waiting(w);
  w.run_start = ip;
  if (w.backward_left > (1 << 20)) w.backward_left = 4096;  // it isn't alone any more
  if (!w.by_quantum)
    for (const Path& q : w.paths)
      if (&q != &p && q.frame == p.frame && q.ip >= ip && q.ip < w.limit &&
          (q.state == PathState::kRun || q.state == PathState::kSync))
        w.limit = q.ip;
  return ip;
}

const Instruction* park(Warp& w, const Instruction* i, PathState state, uint32_t need) {
  count_run(w, i);
  --w.warp_instructions;  // it will be counted when it runs
  w.thread_instructions -= static_cast<uint64_t>(__builtin_popcount(w.mask));
  Path& p = current(w);
  p.ip = i;
  p.mask = w.mask;
  p.state = state;
  p.need = need;
  return paths_changed(w, i);
}

void release_frames(Warp& w, Frame* f) {
  while (f && f->lanes == 0 && f != w.root) {
    Frame* parent = f->parent;
    w.worker->give_frame(f);
    f = parent;
  }
}

void copy_local(Warp& w, uint32_t mask, uint32_t from, uint32_t to, uint32_t bytes) {
  for (uint32_t done = 0; done < bytes;) {
    const uint32_t n = std::min(
        {bytes - done, kGranule - (from + done) % kGranule, kGranule - (to + done) % kGranule});
    for (uint32_t m = mask; m; m &= m - 1) {
      const uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
      __builtin_memcpy(local_host(w.local, l, to + done), local_host(w.local, l, from + done), n);
    }
    done += n;
  }
}

}  // namespace

const Instruction* split_branch(Warp& w, const Instruction* i, uint32_t taken) {
  count_run(w, i);
  const Instruction* target = i + i->target;
  const Instruction* next = i + 1;
  const uint32_t others = w.mask & ~taken;
  const bool target_first = target < next;
  add_path(w, w.frame, target_first ? next : target, target_first ? others : taken);
  const Instruction* ip =
      continue_with(w, target_first ? target : next, target_first ? taken : others);
  if (i->target <= 0 && (w.budget <= 0 || --w.backward_left <= 0)) return end_slice(w, ip);
  return ip;
}

const Instruction* split_targets(Warp& w, const Instruction* i, const int32_t* targets) {
  count_run(w, i);
  uint32_t left = w.mask;
  const int32_t lowest = [&] {
    int32_t t = INT32_MAX;
    for (uint32_t m = left; m; m &= m - 1) t = std::min(t, targets[__builtin_ctz(m)]);
    return t;
  }();
  uint32_t first = 0;
  while (left) {
    const int32_t t = targets[__builtin_ctz(left)];
    uint32_t mask = 0;
    for (uint32_t m = left; m; m &= m - 1)
      if (targets[__builtin_ctz(m)] == t) mask |= m & -m;
    left &= ~mask;
    if (t == lowest)
      first = mask;
    else
      add_path(w, w.frame, i + t, mask);
  }
  const Instruction* ip = continue_with(w, i + lowest, first);
  if (lowest <= 0 && (w.budget <= 0 || --w.backward_left <= 0)) return end_slice(w, ip);
  return ip;
}

const Instruction* park_sync(Warp& w, const Instruction* i, uint32_t need) {
  return park(w, i, PathState::kSync, need);
}
const Instruction* park_warp_barrier(Warp& w, const Instruction* i, uint32_t need) {
  return park(w, i, PathState::kWarpBarrier, need);
}
const Instruction* park_part(Warp& w, const Instruction* i, uint32_t ready, uint32_t need) {
  count_run(w, i - 1);
  Path waiting = current(w);
  waiting.ip = i;
  waiting.mask = w.mask & ~ready;
  waiting.state = PathState::kSync;
  waiting.need = need;
  current(w).ip = i;
  current(w).mask = ready;
  // The ready lanes run the instruction before anything merges with them again.
  w.mask = ready;
  w.waiting = ready == w.frame->lanes ? 0 : ~uint32_t{0};
  const Instruction* next = i->run(w, i);
  current(w).ip = next;
  w.paths.push_back(waiting);
  w.run_start = next;
  return paths_changed(w, next);
}

const Instruction* end_slice(Warp& w, const Instruction* next) {
  w.event = Event::kSlice;
  w.limit = nullptr;
  return next;
}

const Instruction* exit_lanes(Warp& w, const Instruction* i) {
  count_run(w, i);
  const uint32_t gone = w.mask;
  w.alive &= ~gone;
  for (Frame* f = w.frame; f; f = f->parent) f->lanes &= ~gone;
  release_frames(w, w.frame);
  drop_current(w);
  for (Path& p : w.paths)
    if (p.state == PathState::kSync) p.state = PathState::kRun;  // looks again who is missing
  Cta& cta = *w.cta;
  cta.exited += static_cast<uint32_t>(__builtin_popcount(gone));
  if (w.alive == 0) --cta.live_warps;
  check_barriers(cta);
  w.spin = 0;
  return paths_changed(w, i);
}

const Instruction* return_lanes(Warp& w, const Instruction* i) {
  Frame* f = w.frame;
  if (!f->parent) return exit_lanes(w, i);
  count_run(w, i);
  const uint32_t mask = w.mask;
  for (const ParameterCopy& c : f->site->results)
    // A function called through a pointer may return less than the prototype says.
    if (c.callee + c.bytes <= f->code->frame_bytes)
      copy_local(w, mask, f->local_base + c.callee, f->parent->local_base + c.caller, c.bytes);
  f->lanes &= ~mask;
  Frame* parent = f->parent;
  const Instruction* to = f->return_ip;
  Path p = current(w);
  drop_current(w);
  w.current = SIZE_MAX;
  bool merged = false;
  for (Path& q : w.paths)
    if (q.frame == parent && q.ip == to && q.state == PathState::kRun) {
      q.mask |= mask;
      merged = true;
      break;
    }
  if (!merged) {
    p.frame = parent;
    p.ip = to;
    p.mask = mask;
    w.paths.push_back(p);
  }
  if (f->lanes == 0) w.worker->give_frame(f);
  return paths_changed(w, i);
}

const Instruction* sleep_lanes(Warp& w, const Instruction* i, uint64_t nanoseconds) {
  count_run(w, i);
  Path& p = current(w);
  p.ip = i + 1;
  p.mask = w.mask;
  p.state = PathState::kSleep;
  p.wake_ns = static_cast<uint64_t>(now_ns()) + nanoseconds;
  return paths_changed(w, i);
}

const Instruction* call_function(Warp& w, const Instruction* i) {
  const CallSite& site = w.frame->code->calls[static_cast<size_t>(i->target)];
  if (site.builtin != ptx::Builtin::kNone) return call_builtin(w, i, site);
  count_run(w, i);
  --w.backward_left;  // a loop may spin through calls
  KernelCode& kernel = *w.cta->state.kernel;
  Frame* caller = w.frame;
  uint32_t base = caller->local_base + caller->code->frame_bytes;
  if (i->b) {  // the lanes' stacks end at different places
    const auto* end = reinterpret_cast<const uint64_t*>(w.rows + i->b);
    for (uint32_t m = w.mask; m; m &= m - 1)
      base = std::max(base, static_cast<uint32_t>(end[__builtin_ctz(m)]));
    base = (base + kGranule - 1) / kGranule * kGranule;
  }
  uint32_t left = w.mask;
  const uint64_t* pointers = nullptr;
  if (site.function == ptx::kNoIndex) pointers = reinterpret_cast<const uint64_t*>(w.rows + i->a);
  // One frame for the lanes of each target.
  std::vector<std::pair<const Code*, uint32_t>> targets;
  while (left) {
    uint32_t mask = left, function = site.function;
    if (pointers) {
      const uint64_t address = pointers[__builtin_ctz(left)];
      mask = 0;
      for (uint32_t m = left; m; m &= m - 1)
        if (pointers[__builtin_ctz(m)] == address) mask |= m & -m;
      function = kernel.program->function_of_address(address);
      if (function == ptx::kNoIndex)
        return fault_at(w, i, FaultKind::kInvalidPc, __builtin_ctz(left), address, 0, false,
                        "call of an address that isn't a function");
    }
    left &= ~mask;
    std::string why;
    const Code* code = kernel.callee(function, &why);
    if (!code) {
      w.mask = mask;
      return fault_at(w, i, FaultKind::kNotSupported, why.c_str());
    }
    // Also a call that needs no memory of its own keeps where to return to.
    if (uint64_t{base} + code->frame_bytes > w.local_bytes ||
        caller->depth >= w.local_bytes / kReturnBytes)
      return fault_at(w, i, FaultKind::kLaunchFailed, __builtin_ctz(mask), 0, 0, false,
                      "stack overflow (CU_LIMIT_STACK_SIZE)");
    targets.emplace_back(code, mask);
  }
  std::vector<Frame*> frames;
  try {
    for (const auto& target : targets) frames.push_back(w.worker->take_frame(target.first));
  } catch (const std::bad_alloc&) {
    for (Frame* f : frames) w.worker->give_frame(f);
    return fault_at(w, i, FaultKind::kLaunchFailed,
                    "the host's memory doesn't suffice for the registers of so many calls");
  }
  Path here = current(w);
  drop_current(w);
  for (size_t k = 0; k < targets.size(); ++k) {
    const auto& [code, mask] = targets[k];
    Frame* f = frames[k];
    f->parent = caller;
    f->site = &site;
    f->return_ip = i + 1;
    f->lanes = mask;
    f->depth = caller->depth + 1;
    f->local_base = base;
    fill_specials(w, *f, true);
    for (const ParameterCopy& c : site.arguments)
      if (c.callee + c.bytes <= code->frame_bytes)
        copy_local(w, mask, caller->local_base + c.caller, base + c.callee, c.bytes);
    Path p = here;
    p.frame = f;
    p.ip = code->instructions.data();
    p.mask = mask;
    p.state = PathState::kRun;
    w.paths.push_back(p);
  }
  return paths_changed(w, i);
}

const Instruction* block_barrier(Warp& w, const Instruction* i, BarrierKind kind, uint32_t id,
                                 uint32_t threads, uint32_t predicate) {
  if (id >= kBarriers)
    return fault_at(w, i, FaultKind::kIllegalInstruction, "barrier number above 15");
  count_run(w, i);
  Cta& cta = *w.cta;
  Barrier& b = cta.barriers[id];
  b.active = true;
  if (threads) b.expected = threads;
  // With a count, threads are counted in whole warps, as the hardware does.
  const bool whole = w.mask == w.alive;
  b.arrived +=
      threads && whole ? uint32_t{kLanes} : static_cast<uint32_t>(__builtin_popcount(w.mask));
  b.popc += static_cast<uint32_t>(__builtin_popcount(predicate));
  b.all = b.all && predicate == w.mask;
  b.any = b.any || predicate != 0;
  w.spin = 0;
  Path& p = current(w);
  p.ip = i;
  p.mask = w.mask;
  if (kind == BarrierKind::kArrive) {
    p.ip = i + 1;
  } else {
    p.state = PathState::kBarrier;
    p.barrier = static_cast<uint8_t>(id);
    p.need = static_cast<uint32_t>(kind);
  }
  check_barriers(cta);
  return paths_changed(w, i);
}

namespace {

// Strict mode: the threads of a warp wait at one and the same instruction if it is an aligned one.
bool aligned(Cta& cta, uint32_t id) {
  for (Warp& w : cta.warps) {
    const Path* first = nullptr;
    for (const Path& p : w.paths) {
      if (p.state != PathState::kBarrier || p.barrier != id) continue;
      if (!first) first = &p;
      const ptx::Instruction& text = p.frame->code->body->instructions[p.ip->source];
      if (p.ip == first->ip || (text.op == ptx::Op::kBarrier && !text.has(ptx::Mod::kAligned)))
        continue;
      w.frame = p.frame;
      w.mask = p.mask;
      fault_at(w, p.ip, FaultKind::kLaunchFailed,
               "strict mode: threads of one warp are at different barrier instructions");
      return false;
    }
  }
  return true;
}

}  // namespace

void check_barriers(Cta& cta) {
  for (uint32_t id = 0; id < kBarriers; ++id) {
    Barrier& b = cta.barriers[id];
    if (!b.active) continue;
    const uint32_t expected = b.expected ? b.expected : cta.threads - cta.exited;
    if (b.arrived < expected || b.arrived == 0) continue;
    if (cta.state.kernel->strict && !aligned(cta, id)) return;
    for (Warp& w : cta.warps) {
      for (Path& p : w.paths) {
        if (p.state != PathState::kBarrier || p.barrier != id) continue;
        const auto kind = static_cast<BarrierKind>(p.need);
        if (kind != BarrierKind::kSync) {
          uint32_t value = b.popc;
          if (kind == BarrierKind::kAnd) value = b.all ? kAllLanes : 0;
          if (kind == BarrierKind::kOr) value = b.any ? kAllLanes : 0;
          auto* d = reinterpret_cast<uint32_t*>(p.frame->rows + p.ip->d);
          for (uint32_t m = p.mask; m; m &= m - 1) d[__builtin_ctz(m)] = value;
        }
        p.state = PathState::kRun;
        ++p.ip;
        w.runnable = true;
      }
    }
    b = Barrier{};
  }
}

namespace {

// The place of a fault: kernel, block, thread, and the statement in `what`.
Fault fault_of(Warp& w, const Instruction* i, FaultKind kind, int lane, const char* what) {
  Cta& cta = *w.cta;
  const LaunchState& state = cta.state;
  const Launch& launch = state.launch;
  Fault f{};
  f.kind = kind;
  f.kernel = state.kernel_name;
  const uint32_t thread = w.index * kLanes + static_cast<uint32_t>(lane);
  f.thread[0] = thread % launch.block[0];
  f.thread[1] = thread / launch.block[0] % launch.block[1];
  f.thread[2] = thread / launch.block[0] / launch.block[1];
  for (int k = 0; k < 3; ++k) f.block[k] = cta.block[k];
  const Code* code = w.frame ? w.frame->code : nullptr;
  f.what = what;
  if (code && code->body) {
    const uint32_t line = code->body->instructions[i->source].line;
    f.what += ": " + code->body->statement(code->body->instructions[i->source]) + " in " +
              ptx::readable_name(code->name) + ", " +
              state.kernel->program->place(code->function, line);
  }
  return f;
}

const Instruction* end_with(Warp& w, const Instruction* i, Fault&& f) {
  w.cta->state.record(std::move(f));
  w.event = Event::kFault;
  w.limit = nullptr;
  return i;
}

}  // namespace

const Instruction* fault_at(Warp& w, const Instruction* i, FaultKind kind, int lane,
                            uint64_t address, uint32_t bytes, bool store, const char* what) {
  Fault f = fault_of(w, i, kind, lane, what);
  f.address = address;
  f.access_bytes = bytes;
  f.is_store = store;
  return end_with(w, i, std::move(f));
}

const Instruction* assertion_failed(Warp& w, const Instruction* i, int lane, std::string message) {
  Fault f = fault_of(w, i, FaultKind::kAssert, lane, "the assertion failed");
  f.message = std::move(message);
  return end_with(w, i, std::move(f));
}

bool refill_range(Warp& w, CachedRange& range, uint64_t begin, uint64_t end, bool store) {
  const std::optional<MemoryRange> found = w.cta->state.memory.find(begin);
  if (!found || end < begin || end > found->end || begin < found->begin) return false;
  range.begin = found->begin;
  range.end = found->end;
  range.writable = found->writable;
  return found->writable || !store;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

uint64_t read_clock(Warp& w, Clock which) {
  if (which >= Clock::kTimer) {
    timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    const uint64_t ns =
        static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
    return which == Clock::kTimerHi ? ns >> 32 : ns;
  }
  const LaunchState& state = w.cta->state;
  const uint64_t cycles = static_cast<uint64_t>(now_ns()) * (state.device.clock_khz / 1000) / 1000;
  return which == Clock::kClockHi ? cycles >> 32 : cycles;
}

}  // namespace gpupool::simgpu::exec
