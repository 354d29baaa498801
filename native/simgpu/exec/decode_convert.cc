// Conversions between types.
#include <algorithm>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Type;

namespace {

bool is_single_half(Type t) { return t == Type::kF16 || t == Type::kBf16; }

}  // namespace

void Decoder::cvt(Modifiers& m) {
  // The word belongs to this one instruction, so it isn't in the table of modifiers.
  if (body_.spelling(*current_).starts_with("cvt.pack.") && m.take(Mod::kUnknown)) {
    cvt_pack(m);
    return;
  }
  Mod rounding = m.take_any({Mod::kRn, Mod::kRz, Mod::kRm, Mod::kRp, Mod::kRna, Mod::kRni,
                             Mod::kRzi, Mod::kRmi, Mod::kRpi});
  const bool relu = m.take(Mod::kRelu);
  bool ftz = m.take(Mod::kFtz);
  const bool sat = m.take(Mod::kSat);
  const bool satfinite = m.take(Mod::kSatfinite);
  const Type to = m.take_type(), from = m.take_type();
  if (to == Type::kF16x2 || to == Type::kBf16x2) {
    if (ftz || sat) refuse("this conversion isn't known");
    cvt_packed(to, from, rounding, relu, satfinite);
    return;
  }
  // What has no effect: an integer is never subnormal, and f32 holds every bf16.
  if (to == Type::kF32 && !ptx::is_float(from)) ftz = false;
  if (to == Type::kF32 && from == Type::kBf16 &&
      (rounding == Mod::kRn || rounding == Mod::kRz || rounding == Mod::kRm ||
       rounding == Mod::kRp))
    rounding = Mod::kUnknown;
  count(2, 2);
  const bool limits = relu || satfinite;
  if (limits && (from != Type::kF32 || ftz || sat || (!is_single_half(to) && to != Type::kTf32)))
    refuse("this conversion isn't known");
  const ptx::Operand& d = op(0);
  const ptx::Operand& s = op(1);
  auto natural = [](Type t) -> uint32_t {  // of the conversion's rows
    return ptx::is_float(t) || t == Type::kTf32 ? ptx::bytes_of(t) : ptx::bytes_of(t) == 8 ? 8 : 4;
  };
  const bool float_from = ptx::is_float(from), float_to = ptx::is_float(to) || to == Type::kTf32;
  // The source, in a row of its natural width. Wider registers are read in part.
  uint32_t a;
  if (s.kind == OperandKind::kRegister && body_.registers[s.index] != Type::kPred &&
      s.selector == ptx::Selector::kNone && !s.negated) {
    const uint32_t have = register_width(s.index);
    if (have < ptx::bytes_of(from) || (float_from && have != ptx::bytes_of(from)))
      refuse("a register's size differs from the type's");
    a = use(s.index);
    if (!float_from && !float_to && !sat) {
      // The narrower of the two types decides; then the result is widened by its own type.
      const uint32_t into = d.kind == OperandKind::kRegister ? register_width(d.index) : 4;
      const uint32_t row = target(d, into);
      if (into < ptx::bytes_of(to)) refuse("the result doesn't fit the register");
      if (rounding != Mod::kUnknown || ftz) refuse("rounding between integers");
      if (ptx::bytes_of(to) <= ptx::bytes_of(from)) {
        emit(set_.extend(have, to, into), row, a);
      } else if (into == ptx::bytes_of(to) ||
                 ptx::is_signed_integer(from) == ptx::is_signed_integer(to) ||
                 !ptx::is_signed_integer(from)) {
        emit(set_.extend(have, from, into), row, a);
      } else {
        const uint32_t t = temp(8), t2 = temp(8);
        emit(set_.extend(have, from, 8), t, a);
        emit(set_.extend(8, to, 8), t2, t);
        emit(set_.extend(8, Type::kU64, into), row, t2);
      }
      return;
    }
    if (!float_from && (have != natural(from) || ptx::bytes_of(from) < have)) {
      const uint32_t t = temp(natural(from));
      emit(set_.extend(have, from, natural(from)), t, a);
      a = t;
    }
  } else {
    const uint32_t w = natural(from);
    a = source_width(s, w, from);
    if (!float_from) {
      const uint32_t t = temp(w);
      emit(set_.extend(w, from, w), t, a);
      a = t;
    }
  }
  const uint32_t into = d.kind == OperandKind::kRegister ? register_width(d.index) : natural(to);
  if (into < ptx::bytes_of(to) || (float_to && into != ptx::bytes_of(to)))
    refuse("the result register's size differs from the type's");
  uint32_t r;
  if (!float_from && !float_to) {  // .sat, or a literal
    if (rounding != Mod::kUnknown || ftz) refuse("rounding between integers");
    const uint32_t wide = temp(8);
    emit(set_.extend(natural(from),
                     ptx::is_signed_integer(from) && natural(from) == 4 ? Type::kS32
                     : natural(from) == 4                               ? Type::kU32
                                                                        : Type::kU64,
                     8),
         wide, a);
    r = wide;
    if (sat) {
      r = temp(8);
      emit(ptx::is_signed_integer(from) ? set_.saturate(to) : set_.saturate_unsigned(to), r, wide);
    }
    emit(set_.extend(8, to, into), target(d, into), r);
    return;
  }
  const bool half_from = is_single_half(from), half_to = is_single_half(to);
  if (limits) {
    const uint32_t w = width(to), t = temp(w);
    emit(set_.convert(to, from, rounding, false, false), t, a);
    emit(set_.move(w), target(d, w), limited(t, to, relu, satfinite));
    return;
  }
  if (half_from && (to == Type::kF32 || (to == Type::kF64 && from == Type::kF16)) && (ftz || sat)) {
    if (ftz && to == Type::kF64) refuse("this conversion isn't known");
    const uint32_t w = width(to), t = temp(w);
    emit(set_.convert(to, from, rounding, false, false), t, a);
    emit(set_.convert(to, to, Mod::kUnknown, ftz, sat), target(d, w), t);
    return;
  }
  // To integers: rounded in the float's own type first, then cut.
  auto rounded = [&](Type type, uint32_t row) {
    if (rounding == Mod::kRzi) return row;
    if (rounding != Mod::kRni && rounding != Mod::kRmi && rounding != Mod::kRpi)
      refuse("the rounding is missing");
    const uint32_t t = temp(width(type));
    emit(set_.convert(type, type, rounding, ftz, false), t, row);
    return t;
  };
  if (half_from && !(to == Type::kF32 || (to == Type::kF64 && from == Type::kF16))) {
    // By way of f32, which holds every half.
    const uint32_t t = temp(4);
    emit(set_.convert(Type::kF32, from, Mod::kUnknown, false, false), t, a);
    a = t;
    if (half_to) {
      const bool integral = rounding == Mod::kRni || rounding == Mod::kRzi ||
                            rounding == Mod::kRmi || rounding == Mod::kRpi;
      if (integral || sat) {
        const uint32_t t2 = temp(4);
        emit(set_.convert(Type::kF32, Type::kF32, integral ? rounding : Mod::kUnknown, false, sat),
             t2, a);
        a = t2;
      }
      if (ftz) refuse(".ftz of halves");
      emit(set_.convert(to, Type::kF32, integral ? Mod::kRn : rounding, false, false), target(d, 2),
           a);
      return;
    }
    if (!float_to) a = rounded(Type::kF32, a);
    const Handler h = set_.convert(to, Type::kF32, float_to ? rounding : Mod::kRzi, ftz, sat);
    if (float_to || natural(to) == into) {
      emit(h, target(d, into), a);
    } else {
      const uint32_t t3 = temp(natural(to));
      emit(h, t3, a);
      emit(set_.extend(natural(to), to, into), target(d, into), t3);
    }
    return;
  }
  if (to == Type::kBf16 && !float_from && ptx::bytes_of(from) == 8) {
    if (ftz || sat) refuse("this conversion isn't known");
    emit(set_.convert(to, from, rounding, false, false), target(d, 2), a);
    return;
  }
  if (half_to && !float_from) {  // integers are exact in f64 or overflow the half anyway
    const uint32_t t = temp(8);
    emit(set_.convert(Type::kF64, from, Mod::kRn, false, false), t, a);
    if (sat) emit(set_.convert(Type::kF64, Type::kF64, Mod::kUnknown, false, true), t, t);
    emit(set_.convert(to, Type::kF64, rounding, ftz, false), target(d, 2), t);
    return;
  }
  if (half_to && (ftz || sat)) {  // flushed and clamped as the wider type
    const uint32_t t = temp(width(from));
    emit(set_.convert(from, from, Mod::kUnknown, ftz, sat), t, a);
    emit(set_.convert(to, from, rounding, false, false), target(d, 2), t);
    return;
  }
  if (!float_from && sat) {
    const uint32_t t = temp(width(to));
    emit(set_.convert(to, from, rounding, ftz, false), t, a);
    emit(set_.convert(to, to, Mod::kUnknown, false, true), target(d, into), t);
    return;
  }
  if (!float_to) a = rounded(from, a);
  const Handler h = set_.convert(to, from, float_to ? rounding : Mod::kRzi, ftz, sat);
  if (float_to || (natural(to) == into && ptx::bytes_of(to) >= 4)) {
    emit(h, target(d, into), a);
    return;
  }
  r = temp(natural(to));
  emit(h, r, a);
  emit(set_.extend(natural(to), to, into), target(d, into), r);
}

// A half or tf32 made finite, then negative numbers made 0; NaN stays one.
uint32_t Decoder::limited(uint32_t row, Type type, bool relu, bool satfinite) {
  const uint32_t w = width(type);
  FloatMode mode;
  mode.nan = true;
  auto extreme = [&](Op o, uint64_t bound) {
    const uint32_t r = temp(w);
    const Handler h = w == 2 ? set_.half(o, type, mode) : set_.floating(o, Type::kF32, mode);
    emit(h, r, row, constant(w, bound)).immediate = 4;  // .NaN, as half.cc reads it
    row = r;
  };
  if (satfinite) {
    const uint64_t largest = type == Type::kF16    ? 0x7bff
                             : type == Type::kBf16 ? 0x7f7f
                                                   : 0x7f7fe000;
    extreme(Op::kMin, largest);
    extreme(Op::kMax, largest | uint64_t{1} << (8 * w - 1));
  }
  if (relu) extreme(Op::kMax, 0);
  return row;
}

// cvt.rn.f16x2.f32 d, a, b: a becomes the upper half.
void Decoder::cvt_packed(Type to, Type from, Mod rounding, bool relu, bool satfinite) {
  count(3, 3);
  if (from != Type::kF32) refuse("this conversion isn't known");
  const Type half = to == Type::kF16x2 ? Type::kF16 : Type::kBf16;
  uint32_t parts[2] = {source(op(2), from), source(op(1), from)};
  for (uint32_t& part : parts) {
    const uint32_t t = temp(2);
    emit(set_.convert(half, from, rounding, false, false), t, part);
    part = limited(t, half, relu, satfinite);
  }
  const uint32_t d = target(op(0), 4);
  emit(set_.pack(2, 4, 0), d, parts[0]);
  emit(set_.pack(2, 4, 1), d, parts[1]);
}

// cvt.pack.sat.u16.s32 d, a, b; cvt.pack.sat.u8.s32.b32 d, a, b, c: b lowest, then a, then c.
void Decoder::cvt_pack(Modifiers& m) {
  if (!m.take(Mod::kSat)) refuse(".sat is missing");
  const Type to = m.take_type(), from = m.take_type();
  const bool bytes = to == Type::kU8 || to == Type::kS8;
  if ((!bytes && to != Type::kU16 && to != Type::kS16) || from != Type::kS32 ||
      (bytes && m.take_type() != Type::kB32))
    refuse("this conversion isn't known");
  count(bytes ? 4 : 3, bytes ? 4 : 3);
  const uint32_t bits = bytes ? 8 : 16;
  auto join = [&](uint32_t high, uint32_t amount, uint32_t low) {
    const uint32_t shifted = temp(4), r = temp(4);
    emit(set_.integer(Op::kShl, Type::kB32, Mod::kUnknown, false), shifted, high,
         constant(4, amount));
    emit(set_.integer(Op::kOr, Type::kB32, Mod::kUnknown, false), r, shifted, low);
    return r;
  };
  uint32_t parts[2] = {source(op(1), from), source(op(2), from)};
  for (uint32_t& part : parts) {
    const uint32_t wide = temp(8), clamped = temp(8), low = temp(4);
    emit(set_.extend(4, Type::kS32, 8), wide, part);
    emit(set_.saturate(to), clamped, wide);
    emit(set_.extend(8, bytes ? Type::kU8 : Type::kU16, 4), low, clamped);
    part = low;
  }
  uint32_t r = join(parts[0], bits, parts[1]);
  if (bytes) r = join(source(op(3), Type::kB32), 2 * bits, r);
  emit(set_.move(4), target(op(0), 4), r);
}

}  // namespace gpupool::simgpu::exec
