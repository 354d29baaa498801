// The machine that decoded code runs on: instructions, register windows, frames, paths, warps and
// blocks. Plain data, shared by the scheduler (compiled once) and the handlers (compiled per ISA).
//
// A register is a row of 32 lanes; immediates, symbol addresses and special registers are rows too,
// so a handler never asks what kind an operand is. Predicates are rows of 0 / -1 words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simgpu/exec/engine.h"

namespace gpupool::simgpu::exec {

struct Warp;
struct Instruction;
struct Code;
struct Frame;
struct Cta;
struct Worker;
struct LaunchState;
struct CallSite;

// Runs one instruction for the active lanes and returns the next one. To end the warp's run a
// handler sets Warp::limit to nullptr.
using Handler = const Instruction* (*)(Warp&, const Instruction*);

struct alignas(64) Instruction {
  Handler run = nullptr;
  Handler inner = nullptr;  // what a guarded instruction does for the lanes of its guard
  uint32_t d = 0;           // rows: byte offsets in the window (row numbers while decoding)
  uint32_t a = 0, b = 0, c = 0, e = 0;
  uint32_t guard = 0;
  int64_t immediate = 0;  // address offset, selector ...
  int32_t target = 0;     // branch distance in instructions, or an index into a side table
  // Places (see Code::stops) where a waiting lane may still want what row `d` holds: while none of
  // Warp::waiting is among them, the instruction may write all lanes.
  uint32_t conflicts = ~uint32_t{0};
  uint8_t slot = 0;     // of Warp::ranges
  uint8_t kind = 0;     // of FastSet::straight; 0: not for it
  uint16_t count = 1;   // vector elements
  uint32_t source = 0;  // index of the PTX instruction in the function's body
};
static_assert(sizeof(Instruction) == 64);

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Generic addresses of the windows. Not canonical on x86-64, so never an allocation's address.
constexpr uint64_t kWindows = 0x0000'8000'0000'0000;
constexpr uint64_t kSharedWindow = 0x0000'8200'0000'0000;
constexpr uint64_t kLocalWindow = 0x0000'8300'0000'0000;
constexpr uint64_t kParamWindow = 0x0000'8400'0000'0000;
constexpr uint64_t kWindowBytes = uint64_t{1} << 32;

// Local memory of a warp: 16-byte granules, the lanes of one granule side by side.
constexpr uint32_t kGranule = 16;
inline uint8_t* local_host(uint8_t* local, uint32_t lane, uint32_t offset) {
  return local + uint64_t{offset / kGranule} * (kGranule * kLanes) + lane * kGranule +
         offset % kGranule;
}

struct CachedRange {
  uint64_t begin = 1, end = 0;
  bool writable = false;
};
constexpr int kRangeSlots = 64;

// A function's registers and place in local memory for the lanes that are inside one call of it.
struct Frame {
  const Code* code = nullptr;
  std::byte* rows = nullptr;
  Frame* parent = nullptr;
  const CallSite* site = nullptr;
  const Instruction* return_ip = nullptr;
  uint32_t lanes = 0;  // lanes that haven't returned
  uint32_t depth = 0;
  uint32_t local_base = 0;  // of this frame in each lane's local memory
};

enum class PathState : uint8_t {
  kRun,
  kSync,         // at a *.sync instruction that waits for lanes of `need`
  kWarpBarrier,  // at bar.warp.sync
  kBarrier,      // at a barrier of the block
  kSleep,        // nanosleep
};

struct Path {
  Frame* frame = nullptr;
  const Instruction* ip = nullptr;
  uint32_t mask = 0;
  PathState state = PathState::kRun;
  uint8_t barrier = 0;
  uint32_t need = 0;
  uint64_t stamp = 0;  // when it last ran
  uint64_t wake_ns = 0;
};

enum class Event : uint8_t {
  kNone,   // the run reached its limit
  kPaths,  // a handler changed the paths and left the current one in order
  kSlice,  // the budget is used up
  kFault,
};

struct alignas(64) Warp {
  // Masks as words for blending; made when first needed after a change of `mask`.
  int64_t lanes64[kLanes];
  int32_t lanes32[kLanes];
  int16_t lanes16[kLanes];
  uint32_t expanded64 = 0, expanded32 = 0, expanded16 = 0;

  uint32_t mask = 0;  // active lanes
  // Places where the frame's other lanes wait, a bit each; 0: all living lanes are active.
  uint32_t waiting = 0;
  Event event = Event::kNone;
  std::byte* rows = nullptr;
  const Instruction* limit = nullptr;
  const Instruction* run_start = nullptr;  // since when instructions aren't counted yet
  int64_t budget = 0;
  int32_t backward_left = 0;
  uint32_t spin = 0;  // polls of memory or clocks without a store between

  uint8_t* shared = nullptr;
  uint32_t shared_bytes = 0;
  uint8_t* local = nullptr;
  uint32_t local_bytes = 0;  // per lane
  CachedRange* ranges = nullptr;
  const uint8_t* parameters = nullptr;
  uint32_t parameter_bytes = 0;
  Frame* frame = nullptr;
  Frame* root = nullptr;  // kept from block to block
  Cta* cta = nullptr;
  Worker* worker = nullptr;

  uint32_t index = 0;     // in the block
  uint32_t existing = 0;  // lanes that are threads
  uint32_t alive = 0;     // lanes that haven't exited
  bool runnable = true;
  bool by_quantum = false;  // the running path was chosen for fairness, not for its place
  std::vector<Path> paths;
  size_t current = 0;
  uint64_t clock = 0;  // stamps
  uint64_t warp_instructions = 0, thread_instructions = 0;
};

// Adds what ran since the last count up to and including `last`.
inline void count_run(Warp& w, const Instruction* last) {
  const int64_t n = last + 1 - w.run_start;
  w.warp_instructions += static_cast<uint64_t>(n);
  w.thread_instructions += static_cast<uint64_t>(n) * __builtin_popcount(w.mask);
  w.budget -= n;
  w.run_start = last + 1;
}

// ---- what handlers ask of the scheduler (control.cc) ----

// Lanes of `taken` go to the branch's target, the others on; returns where the current path goes.
const Instruction* split_branch(Warp& w, const Instruction* i, uint32_t taken);
// Branch with a target per lane: `targets` are instruction distances from `i`.
const Instruction* split_targets(Warp& w, const Instruction* i, const int32_t* targets);
// The path waits at `i` until all living lanes of `need` are there.
const Instruction* park_sync(Warp& w, const Instruction* i, uint32_t need);
// Lanes of `ready` go on at `i` alone; the others of the path wait there, for lanes of `need`.
const Instruction* park_part(Warp& w, const Instruction* i, uint32_t ready, uint32_t need);
const Instruction* park_warp_barrier(Warp& w, const Instruction* i, uint32_t need);
const Instruction* end_slice(Warp& w, const Instruction* next);
const Instruction* exit_lanes(Warp& w, const Instruction* i);
const Instruction* return_lanes(Warp& w, const Instruction* i);
const Instruction* sleep_lanes(Warp& w, const Instruction* i, uint64_t nanoseconds);
const Instruction* call_function(Warp& w, const Instruction* i);

enum class BarrierKind : uint8_t { kSync, kArrive, kPopc, kAnd, kOr };
const Instruction* block_barrier(Warp& w, const Instruction* i, BarrierKind kind, uint32_t id,
                                 uint32_t threads, uint32_t predicate);

// Records the launch's fault and ends the run. The lane is that of the first failing thread.
const Instruction* fault_at(Warp& w, const Instruction* i, FaultKind kind, int lane,
                            uint64_t address, uint32_t bytes, bool store, const char* what);
inline const Instruction* fault_at(Warp& w, const Instruction* i, FaultKind kind,
                                   const char* what) {
  return fault_at(w, i, kind, __builtin_ctz(w.mask), 0, 0, false, what);
}

// Looks the address up in the MemorySpace; false: not covered, or not writable.
bool refill_range(Warp& w, CachedRange& range, uint64_t begin, uint64_t end, bool store);

enum class Clock : uint8_t { kClock32, kClockHi, kClock64, kTimer, kTimerLo, kTimerHi };
uint64_t read_clock(Warp& w, Clock which);

// A poll (volatile or acquiring load, clock, failed lock): many in a row mean that the warp waits.
constexpr uint32_t kSpinLimit = 48;
inline const Instruction* poll(Warp& w, const Instruction* next) {
  w.backward_left -= 128;
  if (++w.spin < kSpinLimit) return next;
  return end_slice(w, next);
}

}  // namespace gpupool::simgpu::exec
