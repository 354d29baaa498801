// From address rows to host memory: checked, and classified by pattern for each half of the warp.
#pragma once

#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {

enum class Pattern : uint8_t { kNone, kUniform, kContiguous, kGeneral };

struct Resolved {
  Pattern pattern[2];
  uint8_t* base[2];
  alignas(64) uint8_t* host[kLanes];

  uint8_t* of(int lane, uint32_t bytes) const {
    const int h = lane >> 4;
    switch (pattern[h]) {
      case Pattern::kUniform: return base[h];
      case Pattern::kContiguous: return base[h] + uint64_t(lane & 15) * bytes;
      default: return host[lane];
    }
  }
};

// Fills `out` for the active lanes; false: a fault was recorded. `bytes` is a power of two <= 32.
using Resolver = bool (*)(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
bool resolve_global(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
bool resolve_shared32(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
bool resolve_shared64(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
bool resolve_local(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
bool resolve_param(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
bool resolve_generic(Warp& w, Ins i, uint32_t bytes, bool store, Resolved& out);
Resolver resolver_of(Access access);

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
