// Functions of the device runtime that every program may call: printf, malloc, free, assert, and
// the old form of grid synchronisation.
#include "simgpu/ptx/builtins.h"

#include <algorithm>
#include <cstring>

#include "simgpu/exec/block.h"

namespace gpupool::simgpu::exec {
namespace {

// Copies from a lane's generic address.
bool read_lane(Warp& w, uint32_t lane, uint64_t address, void* to, uint64_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  if (bytes > (1u << 30)) return false;
  if (address < kWindows) {
    const std::optional<MemoryRange> r = w.cta->state.memory.find(address);
    if (!r || address + bytes > r->end || address + bytes < address) return false;
    std::memcpy(out, reinterpret_cast<const void*>(address), bytes);
    return true;
  }
  if (address - kSharedWindow < kWindowBytes) {
    const uint64_t at = address - kSharedWindow;
    if (at + bytes > w.shared_bytes) return false;
    std::memcpy(out, w.shared + at, bytes);
    return true;
  }
  if (address - kLocalWindow < kWindowBytes) {
    const uint64_t at = address - kLocalWindow;
    if (at + bytes > w.local_bytes) return false;
    for (uint64_t k = 0; k < bytes; ++k)
      out[k] = *local_host(w.local, lane, static_cast<uint32_t>(at + k));
    return true;
  }
  if (address - kParamWindow < kWindowBytes) {
    const uint64_t at = address - kParamWindow;
    if (at + bytes > w.parameter_bytes) return false;
    std::memcpy(out, w.parameters + at, bytes);
    return true;
  }
  return false;
}

// The k-th argument or result of a call, in the caller's frame.
template <class T>
T argument(Warp& w, uint32_t lane, const CallSite& site, size_t k) {
  T v{};
  if (k >= site.arguments.size()) return v;
  const ParameterCopy& c = site.arguments[k];
  for (uint32_t b = 0; b < sizeof(T) && b < c.bytes; ++b)
    reinterpret_cast<uint8_t*>(&v)[b] =
        *local_host(w.local, lane, w.frame->local_base + c.caller + b);
  return v;
}
template <class T>
void result(Warp& w, uint32_t lane, const CallSite& site, T v) {
  if (site.results.empty()) return;
  const ParameterCopy& c = site.results[0];
  for (uint32_t b = 0; b < sizeof(T) && b < c.bytes; ++b)
    *local_host(w.local, lane, w.frame->local_base + c.caller + b) =
        reinterpret_cast<uint8_t*>(&v)[b];
}

void position(Warp& w, uint32_t lane, uint32_t thread[3]) {
  const Launch& launch = w.cta->state.launch;
  const uint32_t t = w.index * kLanes + lane;
  thread[0] = t % launch.block[0];
  thread[1] = t / launch.block[0] % launch.block[1];
  thread[2] = t / launch.block[0] / launch.block[1];
}

void print(LaunchState& state, std::string_view text) {
  if (!state.hooks.print) return;
  std::lock_guard lock(state.print_mutex);
  state.hooks.print(text);
}

}  // namespace

const Instruction* call_builtin(Warp& w, const Instruction* i, const CallSite& site) {
  LaunchState& state = w.cta->state;
  w.spin = 0;
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const auto lane = static_cast<uint32_t>(__builtin_ctz(m));
    const int l = static_cast<int>(lane);
    auto read = [&](uint64_t address, void* to, uint64_t bytes) {
      return read_lane(w, lane, address, to, bytes);
    };
    switch (site.builtin) {
      case ptx::Builtin::kVprintf: {
        const auto format = argument<uint64_t>(w, lane, site, 0),
                   args = argument<uint64_t>(w, lane, site, 1);
        const ptx::PrintfResult r = ptx::format_printf(format, args, read);
        if (r.fault)
          return fault_at(w, i, FaultKind::kIllegalAddress, l, r.fault_address, 1, false,
                          "printf reads memory that isn't there");
        print(state, r.text);
        result<int32_t>(w, lane, site, r.arguments);
        break;
      }
      case ptx::Builtin::kMalloc:
        result<uint64_t>(
            w, lane, site,
            state.heap ? state.heap->allocate(argument<uint64_t>(w, lane, site, 0)) : 0);
        break;
      case ptx::Builtin::kFree: {
        const auto address = argument<uint64_t>(w, lane, site, 0);
        if (state.heap ? !state.heap->free(address) : address != 0)
          return fault_at(w, i, FaultKind::kLaunchFailed, l, address, 0, false,
                          "free of an address that malloc didn't return");
        break;
      }
      case ptx::Builtin::kAssertFail: {
        uint32_t thread[3];
        position(w, lane, thread);
        return assertion_failed(
            w, i, l,
            ptx::assert_message(read, argument<uint64_t>(w, lane, site, 0),
                                argument<uint64_t>(w, lane, site, 1),
                                argument<uint32_t>(w, lane, site, 2),
                                argument<uint64_t>(w, lane, site, 3), w.cta->block, thread));
      }
      case ptx::Builtin::kCgGetIntrinsicHandle:
        // Scope 1 is the grid; without a cooperative launch there is none.
        result<uint64_t>(w, lane, site, state.grid_workspace);
        break;
      default:
        return fault_at(w, i, FaultKind::kNotSupported, l, 0, 0, false,
                        "this function of the device runtime isn't simulated");
    }
  }
  return i + 1;
}

}  // namespace gpupool::simgpu::exec
