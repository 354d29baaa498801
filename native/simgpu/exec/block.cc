// Blocks: their warps' state, and running them until they end or wait.
#include "simgpu/exec/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>

#include "simgpu/exec/fast_set.h"

namespace gpupool::simgpu::exec {

// Of the frames of a launch, all together.
constexpr uint64_t kMaxWindowBytes = uint64_t{8} << 30;

// ---------------------------------------------------------------- workers

Worker::~Worker() {
  idle.clear();
  for (auto& [code, list] : windows)
    for (std::byte* w : list) code->give_window(w);
  for (Frame* f : free_frames) delete f;
}

Frame* Worker::take_frame(const Code* code) {
  auto& list = windows[code];
  if (list.empty()) {
    // Deep recursion of a function with many registers, in many blocks.
    if (state.window_bytes.fetch_add(code->window_bytes) + code->window_bytes > kMaxWindowBytes)
      throw std::bad_alloc();
    list.push_back(code->take_window());
  }
  if (free_frames.empty()) free_frames.push_back(new Frame);
  Frame* f = free_frames.back();
  free_frames.pop_back();
  *f = Frame{};
  f->code = code;
  f->rows = list.back();
  list.pop_back();
  return f;
}

void Worker::give_frame(Frame* f) {
  windows[f->code].push_back(f->rows);
  free_frames.push_back(f);
}

// ---------------------------------------------------------------- rows that the launch knows

namespace {

template <class T, class Fn>
void fill(std::byte* row, Fn fn) {
  T* p = reinterpret_cast<T*>(row);
  for (uint32_t l = 0; l < kLanes; ++l) p[l] = static_cast<T>(fn(l));
}

template <class Fn>
void fill_width(std::byte* row, uint8_t width, Fn fn) {
  switch (width) {
    case 2:
      fill<uint16_t>(row, fn);
      break;
    case 4:
      fill<uint32_t>(row, fn);
      break;
    default:
      fill<uint64_t>(row, fn);
      break;
  }
}

}  // namespace

void fill_specials(Warp& w, const Frame& frame, bool all) {
  using S = ptx::SpecialRegister;
  Cta& cta = *w.cta;
  const LaunchState& state = cta.state;
  const Launch& launch = state.launch;
  for (const SpecialRow& s : frame.code->specials) {
    const bool by_block =
        s.special == S::kCtaid || s.special == S::kClusterid || s.special == S::kSmid;
    if (!all && !by_block) continue;
    std::byte* row = frame.rows + s.offset;
    const uint32_t c = s.component;
    auto same = [&](uint64_t v) { fill_width(row, s.width, [v](uint32_t) { return v; }); };
    switch (s.special) {
      case S::kCount:
        same(frame.local_base);  // the frame's place in local memory
        if (s.pattern) reinterpret_cast<AddressPattern*>(frame.rows + s.pattern)->known = 0;
        break;
      case S::kTid:
        fill_width(row, s.width, [&](uint32_t l) -> uint64_t {
          const uint32_t t = w.index * kLanes + l;
          if (c == 0) return t % launch.block[0];
          if (c == 1) return t / launch.block[0] % launch.block[1];
          if (c == 2) return t / launch.block[0] / launch.block[1];
          return 0;
        });
        break;
      case S::kNtid:
        same(c < 3 ? launch.block[c] : 0);
        break;
      case S::kCtaid:
        same(c < 3 ? cta.block[c] : 0);
        break;
      case S::kNctaid:
        same(c < 3 ? launch.grid[c] : 0);
        break;
      case S::kClusterid:
        same(c < 3 ? cta.block[c] : 0);
        break;
      case S::kNclusterid:
        same(c < 3 ? launch.grid[c] : 0);
        break;
      case S::kClusterCtaid:
        same(0);
        break;
      case S::kClusterNctaid:
        same(c < 3 ? 1 : 0);
        break;
      case S::kClusterCtarank:
        same(0);
        break;
      case S::kClusterNctarank:
        same(1);
        break;
      case S::kIsExplicitCluster:
        same(0);
        break;
      case S::kLaneid:
        fill_width(row, s.width, [](uint32_t l) { return uint64_t{l}; });
        break;
      case S::kWarpid:
        same(w.index);
        break;
      case S::kNwarpid:
        same(state.warps_per_block);
        break;
      case S::kSmid: {
        const uint64_t n =
            cta.block[0] +
            uint64_t{launch.grid[0]} * (cta.block[1] + uint64_t{launch.grid[1]} * cta.block[2]);
        same(n % static_cast<uint64_t>(std::max(1, state.device.multiprocessors)));
        break;
      }
      case S::kNsmid:
        same(static_cast<uint64_t>(state.device.multiprocessors));
        break;
      case S::kGridid:
        same(1);
        break;
      case S::kLanemaskEq:
        fill_width(row, s.width, [](uint32_t l) { return uint64_t{1} << l; });
        break;
      case S::kLanemaskLe:
        fill_width(row, s.width, [](uint32_t l) { return (uint64_t{2} << l) - 1; });
        break;
      case S::kLanemaskLt:
        fill_width(row, s.width, [](uint32_t l) { return (uint64_t{1} << l) - 1; });
        break;
      case S::kLanemaskGe:
        fill_width(row, s.width,
                   [](uint32_t l) { return 0xffffffffull & ~((uint64_t{1} << l) - 1); });
        break;
      case S::kLanemaskGt:
        fill_width(row, s.width,
                   [](uint32_t l) { return 0xffffffffull & ~((uint64_t{2} << l) - 1); });
        break;
      case S::kTotalSmemSize:
      case S::kAggrSmemSize:
        same(state.shared_bytes);
        break;
      case S::kDynamicSmemSize:
        same(launch.dynamic_shared_bytes);
        break;
      default: {
        const auto k = static_cast<uint32_t>(s.special);
        const auto first = static_cast<uint32_t>(S::kEnvreg0);
        // The workspace of grid synchronisation: address in %envreg1 (high) and %envreg2 (low).
        if (k == first + 1)
          same(state.grid_workspace >> 32);
        else if (k == first + 2)
          same(state.grid_workspace & 0xffffffffu);
        else
          same(0);
      }
    }
  }
}

// ---------------------------------------------------------------- blocks

Cta::Cta(LaunchState& s, Worker&) : state(s) {
  warps.resize(state.warps_per_block);
  shared_storage.resize(state.shared_bytes + 1024);
  const auto at = reinterpret_cast<uintptr_t>(shared_storage.data());
  shared = shared_storage.data() + ((at + 1023) / 1024 * 1024 - at);
  const uint64_t per_warp = uint64_t{state.local_bytes} * kLanes;
  if (per_warp) {
    local_mapped = per_warp * state.warps_per_block;
    void* p = mmap(nullptr, local_mapped, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    local = static_cast<uint8_t*>(p);
  }
  for (uint32_t k = 0; k < state.warps_per_block; ++k) {
    Warp& w = warps[k];
    w.cta = this;
    w.index = k;
    w.shared = shared;
    w.shared_bytes = state.shared_bytes;
    w.local = local ? local + per_warp * k : nullptr;
    w.local_bytes = local ? state.local_bytes : 0;
    w.parameters = state.launch.parameters.data();
    w.parameter_bytes = static_cast<uint32_t>(state.launch.parameters.size());
    const uint32_t left = state.threads_per_block - k * kLanes;
    w.existing = left >= kLanes ? kAllLanes : (1u << left) - 1;
  }
}

Cta::~Cta() {
  std::set<Frame*> frames;
  for (Warp& w : warps) {
    if (w.root) frames.insert(w.root);
    for (Path& p : w.paths)
      for (Frame* f = p.frame; f; f = f->parent) frames.insert(f);
  }
  for (Frame* f : frames) {
    f->code->give_window(f->rows);
    delete f;
  }
  if (local) munmap(local, local_mapped);
}

void Cta::start(uint64_t number, Worker& worker) {
  const Launch& launch = state.launch;
  block[0] = static_cast<uint32_t>(number % launch.grid[0]);
  block[1] = static_cast<uint32_t>(number / launch.grid[0] % launch.grid[1]);
  block[2] = static_cast<uint32_t>(number / launch.grid[0] / launch.grid[1]);
  threads = state.threads_per_block;
  exited = 0;
  random = state.shuffle ? (state.shuffle + number) * 0x9e3779b97f4a7c15ull | 1 : 0;
  live_warps = state.warps_per_block;
  for (Barrier& b : barriers) b = Barrier{};
  if (state.kernel->strict) shared_written.assign(state.shared_bytes, 0);
  const Code* code = state.kernel->entry.get();
  for (Warp& w : warps) {
    w.worker = &worker;
    w.ranges = worker.ranges;
    w.alive = w.existing;
    w.runnable = true;
    w.spin = 0;
    w.paths.clear();
    const bool fresh = !w.root;
    if (fresh) w.root = worker.take_frame(code);
    w.root->lanes = w.existing;
    Path p;
    p.frame = w.root;
    p.ip = code->instructions.data();
    p.mask = w.existing;
    w.paths.push_back(p);
    fill_specials(w, *p.frame, fresh);
  }
}

CtaStatus run_cta(Cta& cta, Worker& worker, uint64_t* wake_ns) {
  LaunchState& state = cta.state;
  constexpr int kRounds = 64;
  constexpr uint64_t kProgress = 1500;  // instructions of a slice that did more than wait
  constexpr uint64_t kBetweenLooks = 10000;
  for (Warp& w : cta.warps) {
    w.worker = &worker;
    w.ranges = worker.ranges;
  }
  bool progress = false;
  for (int round = 0;; ++round) {
    bool ran = false, all_spin = true;
    uint64_t earliest = UINT64_MAX;
    const size_t warps = cta.warps.size();
    const size_t first = cta.random ? draw(cta.random, static_cast<uint32_t>(warps)) : 0;
    const bool down = cta.random && draw(cta.random, 2);
    for (size_t k = 0; k < warps; ++k) {
      Warp& w = cta.warps[(down ? first + warps - k : first + k) % warps];
      if (!w.alive) continue;
      if (!w.runnable) {
        const uint64_t t = wake_time(w);
        if (t == UINT64_MAX || static_cast<uint64_t>(now_ns()) < t) {
          earliest = std::min(earliest, t);
          continue;
        }
        w.runnable = true;
      }
      const uint64_t generation = state.memory.generation();
      if (generation != worker.generation) {
        worker.generation = generation;
        for (CachedRange& r : worker.ranges) r = CachedRange{};
      }
      const uint64_t before = w.warp_instructions, threads_before = w.thread_instructions;
      if (w.spin >= kSpinLimit) w.spin = kSpinLimit - 8;
      const WarpStatus status = run_warp(w);
      const uint64_t n = w.warp_instructions - before;
      worker.warp_instructions += n;
      worker.thread_instructions += w.thread_instructions - threads_before;
      ran = true;
      switch (status) {
        case WarpStatus::kDone:
          all_spin = false;
          break;
        case WarpStatus::kBlocked:
          w.runnable = false;
          for (const Path& p : w.paths)
            if (p.state == PathState::kRun) w.runnable = true;
          if (n > kProgress || wake_time(w) == UINT64_MAX) all_spin = false;
          earliest = std::min(earliest, wake_time(w));
          break;
        case WarpStatus::kSlice:
          if (w.spin < kSpinLimit || n > kProgress) all_spin = false;
          break;
        case WarpStatus::kFault:
          return CtaStatus::kFault;
      }
      if (worker.warp_instructions >= worker.next_look) {
        worker.next_look = worker.warp_instructions + kBetweenLooks;
        worker.report();
        state.checkpoint();
      }
      if (state.stop.load(std::memory_order_relaxed)) return CtaStatus::kFault;
    }
    if (cta.live_warps == 0) return CtaStatus::kDone;
    if (!ran) {
      if (earliest != UINT64_MAX) {
        *wake_ns = earliest;
        return progress ? CtaStatus::kYield : CtaStatus::kIdle;
      }
      for (Warp& w : cta.warps) {
        if (!w.alive) continue;
        const Path& p = w.paths.front();
        w.frame = p.frame;
        w.mask = p.mask;
        fault_at(w, p.ip, FaultKind::kLaunchFailed,
                 "deadlock: threads wait at a barrier for threads that never arrive");
        break;
      }
      return CtaStatus::kFault;
    }
    if (all_spin) {
      *wake_ns = earliest == UINT64_MAX ? 0 : earliest;
      return progress ? CtaStatus::kYield : CtaStatus::kIdle;
    }
    progress = true;
    if (round >= kRounds) return CtaStatus::kYield;
  }
}

}  // namespace gpupool::simgpu::exec
