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

// Instruction::kind of an instruction at which other lanes may wait, or whose result ends a
// pattern; its own kind is its `count` then.
constexpr uint8_t kStraightEdge = 1;

// The kinds of one general handler for FastSet::straight, by where the operands are; 0: none.
struct StraightForms {
  uint8_t memory = 0;                        // all in their rows
  uint8_t first = 0, second = 0, third = 0;  // a, b or c is the accumulator
  uint8_t constant = 0;                      // b is a constant
  uint8_t first_constant = 0;                // a is the accumulator and b a constant
  uint8_t same = 0;                          // a and b are the same row
  bool commutative = false;                  // a and b may change places
  bool accumulates = true;                   // the result is the new accumulator
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
  // Runs instructions that have a kind, one after the other. `inner` is their general handler;
  // `immediate` other than 0: nobody but the next user of the accumulator wants the result.
  Handler straight;
  StraightForms (*forms)(Handler general, bool raw);  // raw: nobody sees the bits of a NaN
  Handler forget;                                     // runs `inner`, ends the pattern
  Handler forget_guarded[2];                          // the same for an instruction under a guard
};

const FastSet& baseline_fast();
const FastSet& v3_fast();

}  // namespace gpupool::simgpu::exec
