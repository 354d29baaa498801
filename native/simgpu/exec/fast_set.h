// Faster forms of frequent instructions, put in place by the decoder's last pass (fuse.cc). Each
// deals with a whole warp and the usual kinds of addresses, and leaves everything else, faults
// among it, to the general handlers.
#pragma once

#include "simgpu/exec/handler_set.h"

namespace gpupool::simgpu::exec {

// What is known of the addresses in a row: found out when a load or store first uses them, and
// forgotten when the register is written. Lies in the window, as a row of its own.
struct alignas(64) AddressPattern {
  uint32_t known = 0;
  uint32_t mixed = 0;  // low bits in which the addresses differ
  int64_t step[2];     // from lane to lane in each half of the warp, or kIrregular
  uint64_t first[2];   // address of each half's first lane
  uint64_t lowest, highest;
};
static_assert(sizeof(AddressPattern) == 64);
constexpr int64_t kIrregular = INT64_MIN;

// Forms of one general handler; nullptr: there is none.
struct FastForms {
  Handler whole = nullptr;      // writes all lanes
  Handler raw = nullptr;        // any NaN instead of the canonical one
  Handler whole_raw = nullptr;  // both
  // A comparison, then `count` - 1 instructions of arithmetic, then bra on its result / its
  // negation.
  Handler branch[2] = {};
  Handler logic[2] = {};  // a comparison, then and / or of its result with row `e`
  Handler logic_whole[2] = {};
  Handler logic_branch[2][2] = {};  // and / or, then as `branch`
};

// How the second of two instructions uses the first one's result x, and rows p and q.
enum class Second : uint8_t {
  kNone,
  kAdd,           // x + p
  kSubtract,      // x - p
  kSubtractFrom,  // p - x
  kMultiply,      // x * p
  kFactor,        // x * p + q
  kAddend,        // p * q + x
};

// Fields that these handlers use beside their original's: `inner` is the original handler, `e` the
// pattern (offset in the window) that ends when the instruction writes its result; loads and stores
// keep the pattern of their addresses in `guard`.
struct FastSet {
  // nullptr: the general handler stays.
  Handler (*load)(Access access, ptx::Type type, uint32_t width);
  Handler (*store)(Access access, ptx::Type type, uint32_t width);
  // A chain of `count` times (load, load, fma) of which only the last sum is wanted.
  Handler (*multiply_chain)(Access first, Access second, ptx::Type type, bool ftz);
  FastForms (*forms)(Handler general);
  // Two f32 instructions as one, `first` without the canonical NaN; p and q are rows `e` and
  // `guard`; `target` other than 0: writes all lanes.
  Handler (*pair)(ptx::Op first, Second second, bool raw);
  Handler forget;             // runs `inner`, ends the pattern
  Handler forget_guarded[2];  // the same for an instruction under a guard
};

const FastSet& baseline_fast();
const FastSet& v3_fast();

}  // namespace gpupool::simgpu::exec
