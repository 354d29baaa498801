// Blocks (CTAs), the host threads that run them, and a launch in progress.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "simgpu/exec/code.h"
#include "simgpu/exec/machine.h"
#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu::exec {

struct Barrier {
  uint32_t arrived = 0;   // threads
  uint32_t expected = 0;  // threads; 0: all living threads of the block
  uint32_t popc = 0;
  bool all = true, any = false;
  bool active = false;
};
constexpr uint32_t kBarriers = 16;

struct Cta {
  Cta(LaunchState& state, Worker& worker);
  ~Cta();
  void start(uint64_t number, Worker& worker);  // of the grid, x fastest

  LaunchState& state;
  uint32_t block[3] = {0, 0, 0};
  std::vector<Warp> warps;
  std::vector<uint8_t> shared_storage;
  std::vector<uint8_t> shared_written;  // in strict mode, by byte: 1 if the block has written it
  uint8_t* shared = nullptr;
  uint8_t* local = nullptr;  // of all warps; reserved when first needed
  uint64_t local_mapped = 0;
  Barrier barriers[kBarriers];
  uint32_t threads = 0, exited = 0, live_warps = 0;
  uint64_t random = 0;  // state of the shuffled order; 0: not shuffled
};

// The next of a sequence of random numbers; below `n`.
inline uint32_t draw(uint64_t& state, uint32_t n) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<uint32_t>((state >> 32) * n >> 32);
}

// Per host thread and launch: caches that need no lock.
struct Worker {
  explicit Worker(LaunchState& state) : state(state) {}
  ~Worker();
  Frame* take_frame(const Code* code);
  void give_frame(Frame* frame);

  LaunchState& state;
  CachedRange ranges[kRangeSlots];
  uint64_t generation = 0;
  std::map<const Code*, std::vector<std::byte*>> windows;
  std::vector<Frame*> free_frames;
  std::vector<std::unique_ptr<Cta>> idle;
  uint64_t warp_instructions = 0, thread_instructions = 0;  // not reported yet: since `reported`
  uint64_t reported_warp = 0, reported_thread = 0, next_look = 0;
  void report();  // adds the counts to the launch's and looks at the limit
};

// Warp::waiting for the frame and mask that the warp runs with.
uint32_t places_of_waiting(const Warp& w);

// Fills the rows that only the launch knows; not `all`: those that differ between blocks.
void fill_specials(Warp& w, const Frame& frame, bool all);

struct LaunchState {
  LaunchState(const Launch& launch, const DeviceModel& device, MemorySpace& memory,
              const LaunchHooks& hooks);

  const Launch& launch;
  const DeviceModel& device;
  MemorySpace& memory;
  const LaunchHooks& hooks;
  KernelCode* kernel = nullptr;
  ptx::DeviceHeap* heap = nullptr;
  std::string kernel_name;
  uint64_t total_blocks = 0;
  uint32_t threads_per_block = 0, warps_per_block = 0;
  uint32_t shared_bytes = 0;
  uint32_t local_bytes = 0;  // per thread
  uint64_t resident_limit = 1;
  uint64_t grid_workspace = 0;  // of a cooperative launch

  std::atomic<uint64_t> next_block{0};
  std::atomic<uint64_t> started{0}, finished{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;  // what follows
  std::condition_variable changed;
  std::deque<std::unique_ptr<Cta>> suspended;
  std::optional<Fault> fault;
  int workers = 0;
  bool closed = false;                   // nobody may join any more
  std::atomic<uint64_t> idle_yields{0};  // yields of blocks that only waited, in a row
  std::atomic<int64_t> next_checkpoint_ns{0};
  std::mutex checkpoint_mutex, print_mutex;
  std::atomic<uint64_t> warp_instructions{0}, thread_instructions{0};
  std::atomic<uint64_t> window_bytes{0};  // made so far
  uint64_t shuffle = 0;  // seed of a random order of blocks, warps and paths; 0: the usual order
  uint64_t stride = 1;   // between blocks in the shuffled order

  void record(Fault&& f);
  void checkpoint();  // calls the hook if it is due
};

enum class WarpStatus : uint8_t { kDone, kBlocked, kSlice, kFault };
WarpStatus run_warp(Warp& w);
// The earliest time at which a sleeping path of the warp goes on; UINT64_MAX: none sleeps.
uint64_t wake_time(const Warp& w);

enum class CtaStatus : uint8_t { kDone, kYield, kIdle, kFault };
CtaStatus run_cta(Cta& cta, Worker& worker, uint64_t* wake_ns);

// Ends the wait of paths at barriers that became complete, e.g. because threads exited.
void check_barriers(Cta& cta);

// Runs blocks of the launch until none is left for this thread.
void work_on(LaunchState& state, bool owner, const std::shared_ptr<LaunchState>& shared);

// How many host threads may work on a launch; one: blocks run one after the other.
unsigned host_threads();
// A pool of host threads that help with launches.
void pool_offer(const std::shared_ptr<LaunchState>& state);

int64_t now_ns();

// Records the fault of a failed assertion, with the line that CUDA prints for it.
const Instruction* assertion_failed(Warp& w, const Instruction* i, int lane, std::string message);

// Built-in functions of the device runtime.
const Instruction* call_builtin(Warp& w, const Instruction* i, const CallSite& site);

}  // namespace gpupool::simgpu::exec
