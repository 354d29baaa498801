// What the decoder can ask an ISA level's handlers for. Each function returns nullptr for a
// combination that isn't implemented; the decoder then refuses the instruction.
#pragma once

#include "simgpu/exec/machine.h"
#include "simgpu/ptx/ast.h"

namespace gpupool::simgpu::exec {

enum class Round : uint8_t { kNearest, kZero, kDown, kUp };
struct FloatMode {
  Round round = Round::kNearest;
  bool ftz = false, sat = false, nan = false, xorsign = false;
};
enum class Access : uint8_t { kGlobal, kShared32, kShared64, kLocal, kParam, kGeneric };

struct HandlerSet {
  // d = op(a, b, c) on integers of the type's width; `mode` is lo, hi, wide, clamp ... or kUnknown.
  Handler (*integer)(ptx::Op op, ptx::Type type, ptx::Mod mode, bool sat);
  // add sub mad with carry in (addc) and out (.cc); e: carry row.
  Handler (*carry)(ptx::Op op, ptx::Type type, ptx::Mod mode, bool in, bool out);
  Handler (*bits)(ptx::Op op, ptx::Type type, ptx::Mod mode, ptx::Mod mode2, ptx::Type type2);
  Handler (*floating)(ptx::Op op, ptx::Type type, FloatMode mode);
  Handler (*math)(ptx::Op op, ptx::Type type, FloatMode mode, bool approx);
  Handler (*setp)(ptx::Type type, ptx::Mod compare, bool ftz);
  Handler (*selp)(uint32_t width);
  Handler (*slct)(uint32_t width, bool floating, bool ftz);
  Handler (*testp)(ptx::Type type, ptx::Mod what);
  // d = wide(narrow a): rows of `from` bytes, read as `type`, widened into rows of `to` bytes.
  Handler (*extend)(uint32_t from, ptx::Type type, uint32_t to);
  Handler (*saturate)(ptx::Type to);  // s64 row -> s64 row clamped to the type
  Handler (*saturate_unsigned)(ptx::Type to);
  // Between floats and integers, natural widths (8 and 16 bit integers as 32-bit rows).
  Handler (*convert)(ptx::Type to, ptx::Type from, ptx::Mod rounding, bool ftz, bool sat);
  Handler (*half)(ptx::Op op, ptx::Type type, FloatMode mode);  // see half.cc
  Handler (*move)(uint32_t width);
  Handler (*predicate)(ptx::Op op);  // and or xor not on predicate rows; mov
  Handler (*pack)(uint32_t from, uint32_t to, uint32_t part);    // part of d = a
  Handler (*unpack)(uint32_t from, uint32_t to, uint32_t part);  // d = part of a
  Handler (*load)(Access access, ptx::Type type, uint32_t width, bool vector, bool poll);
  Handler (*store)(Access access, ptx::Type type, uint32_t width, bool vector);
  Handler (*atomic)(Access access, ptx::Mod operation, ptx::Type type, bool result);
  Handler (*warp)(ptx::Op op, ptx::Mod mode, ptx::Type type);
  Handler (*control)(ptx::Op op, ptx::Mod mode, bool negated);
  Handler (*special)(Clock which);
  Handler guarded[2];  // by the guard, by its negation
  Handler sign_mask;   // d(32) = predicate a as 0 / 1
  Handler set_float;   // d(f32) = predicate a as 0 / 1.0
};

const HandlerSet& baseline_handlers();
const HandlerSet& v3_handlers();
const HandlerSet& handlers();  // the best that this processor runs

}  // namespace gpupool::simgpu::exec
