// Launches: blocks are handed to the calling thread and the pool's; blocks that wait take turns.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>

#include "simgpu/exec/block.h"
#include "simgpu/exec/program.h"

namespace gpupool::simgpu {
namespace exec {

constexpr int64_t kCheckpointNs = 100'000;

LaunchState::LaunchState(const Launch& l, const DeviceModel& d, MemorySpace& m,
                         const LaunchHooks& h)
    : launch(l), device(d), memory(m), hooks(h) {}

void LaunchState::record(Fault&& f) {
  std::lock_guard lock(mutex);
  if (!fault) fault = std::move(f);
  stop = true;
  changed.notify_all();
}

void LaunchState::checkpoint() {
  if (!hooks.checkpoint) return;
  if (now_ns() < next_checkpoint_ns.load(std::memory_order_relaxed)) return;
  // While the hook holds the card for others, the other threads wait here.
  std::unique_lock lock(checkpoint_mutex);
  if (now_ns() < next_checkpoint_ns.load(std::memory_order_relaxed) || stop) return;
  const bool go_on = hooks.checkpoint();
  next_checkpoint_ns = now_ns() + kCheckpointNs;
  lock.unlock();
  if (!go_on) {
    Fault f{};
    f.kind = FaultKind::kCancelled;
    f.kernel = kernel_name;
    f.what = "the launch was cancelled";
    record(std::move(f));
  }
}

void Worker::report() {
  state.warp_instructions.fetch_add(warp_instructions - reported_warp, std::memory_order_relaxed);
  const uint64_t total = state.thread_instructions.fetch_add(thread_instructions - reported_thread,
                                                             std::memory_order_relaxed) +
                         (thread_instructions - reported_thread);
  reported_warp = warp_instructions;
  reported_thread = thread_instructions;
  if (state.launch.instruction_limit && total > state.launch.instruction_limit) {
    Fault f{};
    f.kind = FaultKind::kTimeout;
    f.kernel = state.kernel_name;
    f.what = "the kernel ran more instructions than the launch allows";
    state.record(std::move(f));
  }
}

namespace {

void run_blocks(LaunchState& state, Worker& worker, bool owner,
                const std::shared_ptr<LaunchState>& shared) {
  const int64_t begin = now_ns();
  bool offered = !owner || host_threads() < 2;
  std::unique_lock lock(state.mutex);
  while (!state.stop) {
    std::unique_ptr<Cta> cta;
    uint64_t number = UINT64_MAX;
    if (state.next_block < state.total_blocks &&
        state.started - state.finished < state.resident_limit) {
      number = state.next_block++;
      if (state.shuffle) number = (number * state.stride + state.shuffle) % state.total_blocks;
      ++state.started;
    } else if (!state.suspended.empty()) {
      cta = std::move(state.suspended.front());
      state.suspended.pop_front();
    } else if (state.finished == state.total_blocks || !owner) {
      break;
    } else {
      state.changed.wait_for(lock, std::chrono::microseconds(200));
      continue;
    }
    const bool more = state.next_block < state.total_blocks || !state.suspended.empty();
    lock.unlock();
    if (!offered && more && now_ns() - begin > 30'000) {
      offered = true;
      pool_offer(shared);
    }
    if (number != UINT64_MAX) {
      if (worker.idle.empty()) {
        cta = std::make_unique<Cta>(state, worker);
      } else {
        cta = std::move(worker.idle.back());
        worker.idle.pop_back();
      }
      cta->start(number, worker);
    }
    uint64_t wake = 0;
    const CtaStatus status = run_cta(*cta, worker, &wake);
    if (status == CtaStatus::kIdle) {
      // When nothing but waiting happens, the host's processor is left alone.
      const uint64_t idle = state.idle_yields.fetch_add(1) + 1;
      if (idle > 2 * (state.started - state.finished) + 2) {
        int64_t pause = 20'000;
        if (wake) pause = std::clamp<int64_t>(static_cast<int64_t>(wake) - now_ns(), 1'000, 50'000);
        usleep(static_cast<useconds_t>(pause / 1000));
        state.checkpoint();
      }
    } else {
      state.idle_yields = 0;
    }
    lock.lock();
    if (status == CtaStatus::kDone) {
      ++state.finished;
      worker.idle.push_back(std::move(cta));
      if (state.finished == state.total_blocks) state.changed.notify_all();
    } else if (status != CtaStatus::kFault) {
      state.suspended.push_back(std::move(cta));
      state.changed.notify_one();
    } else {
      worker.idle.push_back(std::move(cta));
    }
  }
  lock.unlock();
  worker.report();
}

// Waits until no thread of the pool works on the launch.
void close(LaunchState& state) {
  std::unique_lock lock(state.mutex);
  state.closed = true;
  state.changed.wait(lock, [&] { return state.workers == 0; });
}

// One line per launch, on standard error.
void print_counters(const LaunchState& state, int64_t ns) {
  const uint64_t warp = state.warp_instructions, thread = state.thread_instructions;
  const Launch& l = state.launch;
  std::fprintf(
      stderr,
      "gpupool-simgpu: %s grid (%u,%u,%u) block (%u,%u,%u): %llu blocks, %llu warp "
      "instructions, %llu thread instructions, lane use %.1f %%, %.3f ms\n",
      ptx::readable_name(state.kernel_name).c_str(), l.grid[0], l.grid[1], l.grid[2], l.block[0],
      l.block[1], l.block[2], static_cast<unsigned long long>(state.finished),
      static_cast<unsigned long long>(warp), static_cast<unsigned long long>(thread),
      warp ? 100.0 * static_cast<double>(thread) / (static_cast<double>(warp) * kLanes) : 0,
      static_cast<double>(ns) * 1e-6);
}

Fault refused(const std::string& kernel, FaultKind kind, std::string what) {
  Fault f{};
  f.kind = kind;
  f.kernel = kernel;
  f.what = std::move(what);
  return f;
}

}  // namespace

void work_on(LaunchState& state, bool owner, const std::shared_ptr<LaunchState>& shared) {
  Worker worker(state);
  try {
    run_blocks(state, worker, owner, shared);
  } catch (const std::bad_alloc&) {
    state.record(
        refused(state.kernel_name, FaultKind::kLaunchFailed,
                "the host's memory doesn't suffice for the kernel's registers and stacks"));
  }
}

}  // namespace exec

std::optional<Fault> run_launch(const Launch& launch, const DeviceModel& device,
                                MemorySpace& memory, const LaunchHooks& hooks,
                                LaunchCounters* counters) {
  using namespace exec;
  auto* program = dynamic_cast<EngineProgram*>(launch.program.get());
  if (!program) return refused("", FaultKind::kLaunchFailed, "this program isn't the engine's");
  std::string why;
  const KernelInfo* info = program->kernel(launch.kernel, &why);
  KernelCode* kernel = info ? program->code(launch.kernel) : nullptr;
  if (!kernel) return refused("", FaultKind::kNotSupported, why);
  for (int k = 0; k < 3; ++k)
    if (launch.grid[k] == 0 || launch.block[k] == 0)
      return refused(info->name, FaultKind::kLaunchFailed,
                     "a dimension of the grid or block is zero");
  const uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  if (threads > 1024)
    return refused(info->name, FaultKind::kLaunchFailed, "more than 1024 threads in a block");

  Launch checked = launch;
  if (checked.parameters.size() < info->parameter_bytes)
    checked.parameters.resize(info->parameter_bytes);
  auto state = std::make_shared<LaunchState>(checked, device, memory, hooks);
  state->kernel = kernel;
  state->kernel_name = info->name;
  state->heap = hooks.heap;
  state->total_blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  state->threads_per_block = static_cast<uint32_t>(threads);
  state->warps_per_block = static_cast<uint32_t>((threads + kLanes - 1) / kLanes);
  const ptx::SharedLayout& shared = kernel->shared;
  state->shared_bytes =
      std::max(shared.static_bytes, (launch.dynamic_shared_bytes || shared.uses_dynamic)
                                        ? shared.dynamic_offset + launch.dynamic_shared_bytes
                                        : 0);
  const Code& entry = *kernel->entry;
  const bool grows = entry.moves_stack || !entry.calls.empty();
  if (entry.frame_bytes || grows) {
    // Parameters of calls lie in local memory here, which hardware keeps in registers: some more.
    const uint64_t stack = launch.stack_bytes_per_thread + launch.stack_bytes_per_thread / 2 + 1024;
    state->local_bytes = static_cast<uint32_t>(
        (entry.frame_bytes + (grows ? std::min<uint64_t>(stack, 16u << 20) : 0) + kGranule - 1) /
        kGranule * kGranule);
  }
  const int per_sm = blocks_per_multiprocessor(*info, device, static_cast<int>(threads),
                                               launch.dynamic_shared_bytes);
  state->resident_limit = static_cast<uint64_t>(std::max(1, per_sm)) *
                          static_cast<uint64_t>(std::max(1, device.multiprocessors));
  if (launch.cooperative) {
    if (state->total_blocks > state->resident_limit)
      return refused(info->name, FaultKind::kLaunchFailed,
                     "a cooperative launch of more blocks than can be resident");
    state->grid_workspace = memory.allocate(256, 256);
    if (!state->grid_workspace)
      return refused(info->name, FaultKind::kLaunchFailed, "no memory for grid synchronisation");
  }
  if (const char* seed = std::getenv("GPUPOOL_SIMGPU_SHUFFLE")) {
    state->shuffle = std::strtoull(seed, nullptr, 10) % 1'000'000'007;
    // Another order of the blocks: every stride that has no divisor in common with their number.
    state->stride = 1 + state->shuffle % state->total_blocks;
    while (std::gcd(state->stride, state->total_blocks) != 1) ++state->stride;
  }
  const int64_t began = now_ns();
  work_on(*state, true, state);
  close(*state);
  if (std::getenv("GPUPOOL_SIMGPU_COUNTERS")) print_counters(*state, now_ns() - began);
  {
    std::lock_guard lock(state->mutex);
    state->suspended.clear();
  }
  if (state->grid_workspace) memory.release(state->grid_workspace);
  if (counters) {
    counters->thread_instructions += state->thread_instructions;
    counters->warp_instructions += state->warp_instructions;
    counters->blocks += state->finished;
  }
  return state->fault;
}

// Registers are given to warps in units of 256.
static uint64_t registers_of_warp(const KernelInfo& kernel) {
  return (std::max<uint64_t>(kernel.registers, 16) * 32 + 255) / 256 * 256;
}

int threads_for_registers(const KernelInfo& kernel, const DeviceModel& device) {
  return static_cast<int>(
      std::min<uint64_t>(static_cast<uint64_t>(device.max_threads_per_block),
                         device.registers_per_sm / registers_of_warp(kernel) * 32));
}

int blocks_per_multiprocessor(const KernelInfo& kernel, const DeviceModel& device,
                              int threads_per_block, uint64_t dynamic_shared_bytes) {
  if (threads_per_block <= 0 || threads_per_block > device.max_threads_per_block) return 0;
  const uint64_t warps = (static_cast<uint64_t>(threads_per_block) + 31) / 32;
  uint64_t blocks = static_cast<uint64_t>(device.max_threads_per_sm) / (warps * 32);
  blocks = std::min<uint64_t>(blocks, static_cast<uint64_t>(device.max_blocks_per_sm));
  blocks =
      std::min<uint64_t>(blocks, device.registers_per_sm / (registers_of_warp(kernel) * warps));
  // Shared memory is given in units of 128 bytes; the system keeps 1 KiB per block (compute
  // capability 8.0 and above).
  uint64_t shared = kernel.static_shared_bytes + dynamic_shared_bytes;
  if (shared > device.shared_per_block_optin) return 0;
  shared = (shared + (device.cc_major >= 8 ? 1024 : 0) + 127) / 128 * 128;
  if (shared) blocks = std::min<uint64_t>(blocks, device.shared_per_sm / shared);
  return static_cast<int>(blocks);
}

}  // namespace gpupool::simgpu
