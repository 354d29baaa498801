// Comparisons, and what is chosen by them: setp, set, selp, slct, testp.
#include <algorithm>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Type;

// The comparison of an instruction: what, how it is combined with a predicate, of which type.
Decoder::Comparison Decoder::take_comparison(Modifiers& m, Type result) {
  Comparison c;
  c.compare = m.take_any({Mod::kEq, Mod::kNe, Mod::kLt, Mod::kLe, Mod::kGt, Mod::kGe, Mod::kLs,
                          Mod::kHs, Mod::kLo, Mod::kHi, Mod::kEqu, Mod::kNeu, Mod::kLtu, Mod::kLeu,
                          Mod::kGtu, Mod::kGeu, Mod::kNum, Mod::kCompareNan});
  if (c.compare == Mod::kUnknown) refuse("the comparison is missing");
  const Mod boolean = m.take_any({Mod::kAnd, Mod::kOr, Mod::kXor});
  c.boolean = boolean == Mod::kAnd   ? Op::kAnd
              : boolean == Mod::kOr  ? Op::kOr
              : boolean == Mod::kXor ? Op::kXor
                                     : Op::kMov;
  c.ftz = m.take(Mod::kFtz);
  if (result != Type::kNone && m.take_type() != result) refuse("the result type isn't known here");
  c.type = m.take_type();
  const size_t n = boolean == Mod::kUnknown ? 3 : 4;
  count(n, n);
  if (n == 4) c.third = predicate(op(3));
  return c;
}

// compare(a, b) as a predicate row. Halves are compared as floats, which hold every one of them.
uint32_t Decoder::compared(const Comparison& c, Type type, uint32_t a, uint32_t b) {
  const uint32_t r = temp(4);
  if (is_half(type)) {
    if (c.ftz && type != Type::kF16) refuse(".ftz of this type");
    for (uint32_t* row : {&a, &b}) {
      uint32_t from = *row;
      if (c.ftz) {  // from + -0, flushed
        FloatMode flush;
        flush.ftz = true;
        const uint32_t flushed = temp(2);
        emit(set_.half(Op::kAdd, type, flush), flushed, from, constant(2, 0x8000)).immediate =
            half_flags(flush);
        from = flushed;
      }
      *row = temp(4);
      emit(set_.convert(Type::kF32, type, Mod::kUnknown, false, false), *row, from);
    }
    emit(set_.setp(Type::kF32, c.compare, false), r, a, b);
    return r;
  }
  emit(set_.setp(type, c.compare, c.ftz), r, a, b);
  return r;
}

uint32_t Decoder::combined(const Comparison& c, uint32_t row) {
  if (c.boolean == Op::kMov) return row;
  const uint32_t r = temp(4);
  emit(set_.predicate(c.boolean), r, row, c.third);
  return r;
}

void Decoder::setp(Modifiers& m) {
  const ptx::Operand& d = op(0);
  const bool pair = d.kind == OperandKind::kPair;
  const Comparison c = take_comparison(m, Type::kNone);
  const uint32_t a = source(op(1), c.type), b = source(op(2), c.type);
  uint32_t p, q = 0;
  if (c.type == Type::kF16x2 || c.type == Type::kBf16x2) {  // one predicate for each half
    if (!pair) refuse("two predicates are wanted");
    const Type half = c.type == Type::kF16x2 ? Type::kF16 : Type::kBf16;
    uint32_t both[2];
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t x = temp(2), y = temp(2);
      emit(set_.unpack(4, 2, k), x, a);
      emit(set_.unpack(4, 2, k), y, b);
      both[k] = combined(c, compared(c, half, x, y));
    }
    p = both[0];
    q = both[1];
  } else {
    p = compared(c, c.type, a, b);
    if (!pair && c.boolean == Op::kMov) {  // the plain form writes its predicate at once
      const uint32_t row = target_predicate(d);
      code_->instructions.back().d = row;
      return;
    }
    if (pair) {
      const uint32_t opposite = temp(4);
      emit(set_.predicate(Op::kNot), opposite, p);
      q = combined(c, opposite);
    }
    p = combined(c, p);
  }
  if (pair) {
    const auto two = body_.elements_of(d);
    const uint32_t first = target_predicate(two[0]), second = target_predicate(two[1]);
    emit(set_.predicate(Op::kMov), first, p);
    emit(set_.predicate(Op::kMov), second, q);
  } else {
    emit(set_.predicate(Op::kMov), target_predicate(d), p);
  }
}

void Decoder::set(Modifiers& m) {
  // set.cmp{.bool}{.ftz}.dtype.stype d, a, b{, {!}c}
  Type result = Type::kNone;
  for (Mod mod : current_->mods())
    if (result == Type::kNone) result = ptx::type_of(mod);
  uint64_t one = 0;
  switch (result) {
    case Type::kU32:
    case Type::kS32:
    case Type::kF32:
      break;
    case Type::kU16:
    case Type::kS16:
      one = 0xffff;
      break;
    case Type::kF16:
      one = 0x3c00;
      break;
    case Type::kBf16:
      one = 0x3f80;
      break;
    default:
      refuse("the result type isn't known here");
  }
  const Comparison c = take_comparison(m, result);
  if (one && !is_half(c.type)) refuse("the result type isn't known here");
  const uint32_t a = source(op(1), c.type), b = source(op(2), c.type);
  const uint32_t r = combined(c, compared(c, c.type, a, b));
  if (one)
    emit(set_.selp(2), target(op(0), 2), constant(2, one), constant(2, 0), r);
  else
    emit(result == Type::kF32 ? set_.set_float : set_.sign_mask, target(op(0), 4), r);
}

void Decoder::select(Modifiers& m) {
  count(4, 4);
  if (current_->op == Op::kSelp) {
    const Type t = m.take_type();
    const uint32_t a = source(op(1), t), b = source(op(2), t), p = predicate(op(3));
    emit(set_.selp(width(t)), target(op(0), width(t)), a, b, p);
    return;
  }
  const bool ftz = m.take(Mod::kFtz);
  const Type t = m.take_type(), by = m.take_type();
  if (by != Type::kS32 && by != Type::kF32) refuse("the selecting type isn't known here");
  const uint32_t a = source(op(1), t), b = source(op(2), t), c = source(op(3), by);
  emit(set_.slct(width(t), by == Type::kF32, ftz), target(op(0), width(t)), a, b, c);
}

void Decoder::testp(Modifiers& m) {
  count(2, 2);
  const Mod what = m.take_any({Mod::kFinite, Mod::kInfinite, Mod::kNumber, Mod::kNotanumber,
                               Mod::kNormal, Mod::kSubnormal});
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t);
  emit(set_.testp(t, what), target_predicate(op(0)), a);
}

}  // namespace gpupool::simgpu::exec
