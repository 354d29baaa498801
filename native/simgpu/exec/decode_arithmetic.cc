// Arithmetic, logic, comparisons, moves and conversions.
#include <algorithm>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Type;

namespace {

bool is_half(Type t) {
  return t == Type::kF16 || t == Type::kBf16 || t == Type::kF16x2 || t == Type::kBf16x2;
}
bool is_plain_float(Type t) { return t == Type::kF32 || t == Type::kF64; }
uint32_t width(Type t) { return std::max<uint32_t>(2, ptx::bytes_of(t)); }
Type wide_of(Type t) {
  switch (t) {
    case Type::kU16:
      return Type::kU32;
    case Type::kS16:
      return Type::kS32;
    case Type::kU32:
      return Type::kU64;
    case Type::kS32:
      return Type::kS64;
    default:
      return Type::kNone;
  }
}
// As half.cc reads them.
int64_t half_flags(const FloatMode& m) { return m.ftz | m.sat << 1 | m.nan << 2; }
Round take_round(Modifiers& m, bool* given = nullptr) {
  const Mod r = m.take_any({Mod::kRn, Mod::kRz, Mod::kRm, Mod::kRp});
  if (given) *given = r != Mod::kUnknown;
  switch (r) {
    case Mod::kRz:
      return Round::kZero;
    case Mod::kRm:
      return Round::kDown;
    case Mod::kRp:
      return Round::kUp;
    default:
      return Round::kNearest;
  }
}

}  // namespace

void Decoder::arithmetic(Modifiers& m) {
  const Op o = current_->op;
  const size_t n = o == Op::kMad || o == Op::kFma ? 4 : 3;
  count(n, n);
  if (m.take(Mod::kCc)) {
    const Mod mode = m.take_any({Mod::kLo, Mod::kHi});
    const Type t = m.take_type();
    if (t == Type::kNone) refuse("the type is missing");
    if (!carry_) carry_ = add_row(4);
    const uint32_t a = source(op(1), t), b = source(op(2), t), c = n == 4 ? source(op(3), t) : 0;
    emit(set_.carry(o, t, mode, false, true), target(op(0), width(t)), a, b, c, carry_);
    return;
  }
  FloatMode mode;
  bool rounded;
  mode.round = take_round(m, &rounded);
  mode.ftz = m.take(Mod::kFtz);
  mode.sat = m.take(Mod::kSat);
  const Mod part = m.take_any({Mod::kLo, Mod::kHi, Mod::kWide});
  const Type t = m.take_type();
  if (is_plain_float(t) || is_half(t)) {
    if (part != Mod::kUnknown) refuse("a part of a float product");
    const uint32_t a = source(op(1), t), b = source(op(2), t), c = n == 4 ? source(op(3), t) : 0;
    const Handler h = is_half(t) ? set_.half(o, t, mode) : set_.floating(o, t, mode);
    emit(h, target(op(0), width(t)), a, b, c).immediate = half_flags(mode);
    return;
  }
  if (mode.ftz || rounded) refuse("a float modifier with an integer type");
  integer_arithmetic(m, t, part, mode.sat);
}

void Decoder::integer_arithmetic(Modifiers&, Type t, Mod part, bool sat) {
  const Op o = current_->op;
  if (o == Op::kFma || t == Type::kNone) refuse("the type isn't known here");
  const bool wide = part == Mod::kWide;
  const Type result = wide ? wide_of(t) : t;
  if (result == Type::kNone) refuse("no wider type");
  if ((o == Op::kMul || o == Op::kMad) && part == Mod::kUnknown)
    refuse(".lo, .hi or .wide is missing");
  const uint32_t a = source(op(1), t), b = source(op(2), t);
  const uint32_t c = o == Op::kMad ? source(op(3), result) : 0;
  emit(set_.integer(o, t, part, sat), target(op(0), width(result)), a, b, c);
}

void Decoder::carry(Modifiers& m) {
  const Op o = current_->op == Op::kAddc   ? Op::kAdd
               : current_->op == Op::kSubc ? Op::kSub
                                           : Op::kMad;
  const size_t n = o == Op::kMad ? 4 : 3;
  count(n, n);
  const bool out = m.take(Mod::kCc);
  const Mod mode = m.take_any({Mod::kLo, Mod::kHi});
  const Type t = m.take_type();
  if (t == Type::kNone) refuse("the type is missing");
  if (!carry_) carry_ = add_row(4);
  const uint32_t a = source(op(1), t), b = source(op(2), t), c = n == 4 ? source(op(3), t) : 0;
  emit(set_.carry(o, t, mode, true, out), target(op(0), width(t)), a, b, c, carry_);
}

void Decoder::divide(Modifiers& m) {
  count(3, 3);
  bool rounded;
  FloatMode mode;
  mode.round = take_round(m, &rounded);
  const bool approx = m.take_any({Mod::kApprox, Mod::kFull}) != Mod::kUnknown;
  mode.ftz = m.take(Mod::kFtz);
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t), b = source(op(2), t);
  Handler h;
  if (is_plain_float(t)) {
    if (current_->op == Op::kRem) refuse("no remainder of floats");
    h = set_.math(Op::kDiv, t, mode, approx);
  } else {
    if (mode.ftz || approx || rounded) refuse("a float modifier with an integer type");
    h = set_.integer(current_->op, t, Mod::kUnknown, false);
  }
  emit(h, target(op(0), width(t)), a, b);
}

void Decoder::math(Modifiers& m) {
  count(2, 2);
  FloatMode mode;
  mode.round = take_round(m);
  const bool approx = m.take(Mod::kApprox);
  mode.ftz = m.take(Mod::kFtz);
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t);
  const Handler h = is_half(t) ? (approx ? set_.half(current_->op, t, mode) : nullptr)
                               : set_.math(current_->op, t, mode, approx);
  emit(h, target(op(0), width(t)), a).immediate = half_flags(mode);
}

void Decoder::min_max(Modifiers& m) {
  count(3, 4);
  FloatMode mode;
  mode.ftz = m.take(Mod::kFtz);
  mode.nan = m.take(Mod::kPropagateNan);
  mode.xorsign = m.take(Mod::kXorsign);
  if (mode.xorsign && !m.take(Mod::kAbs)) refuse(".xorsign without .abs");
  const bool relu = m.take(Mod::kRelu);
  const Type t = m.take_type();
  uint32_t a = source(op(1), t);
  const uint32_t b = source(op(2), t);
  Handler h;
  if (is_half(t))
    h = relu ? nullptr : set_.half(current_->op, t, mode);
  else if (is_plain_float(t))
    h = relu ? nullptr : set_.floating(current_->op, t, mode);
  else if (mode.ftz || mode.nan || mode.xorsign)
    refuse("a float modifier with an integer type");
  else
    h = set_.integer(current_->op, t, Mod::kUnknown, false);
  if (current_->operand_count == 4) {  // three inputs, f32
    const uint32_t c = source(op(3), t);
    if (t != Type::kF32) refuse("three operands of this type");
    const uint32_t first = temp(4);
    emit(h, first, a, b);
    emit(h, target(op(0), 4), first, c);
    return;
  }
  const uint32_t d = target(op(0), width(t));
  if (relu && t == Type::kS32) {  // max(op(a, b), 0)
    const uint32_t first = temp(4);
    emit(set_.integer(current_->op, t, Mod::kUnknown, false), first, a, b);
    emit(set_.integer(Op::kMax, t, Mod::kUnknown, false), d, first, constant(4, 0));
    return;
  }
  emit(h, d, a, b).immediate = half_flags(mode);
}

void Decoder::neg_abs(Modifiers& m) {
  count(2, 2);
  FloatMode mode;
  mode.ftz = m.take(Mod::kFtz);
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t);
  Handler h;
  if (is_half(t))
    h = set_.half(current_->op, t, mode);
  else if (is_plain_float(t))
    h = set_.floating(current_->op, t, mode);
  else if (mode.ftz)
    refuse("a float modifier with an integer type");
  else
    h = set_.integer(current_->op, t, Mod::kUnknown, false);
  emit(h, target(op(0), width(t)), a).immediate = half_flags(mode);
}

void Decoder::logic(Modifiers& m) {
  const bool one = current_->op == Op::kNot || current_->op == Op::kCnot;
  count(one ? 2 : 3, one ? 2 : 3);
  const Type t = m.take_type();
  if (t == Type::kPred) {
    if (current_->op == Op::kCnot) refuse("cnot of a predicate");
    const uint32_t a = predicate(op(1)), b = one ? 0 : predicate(op(2));
    emit(set_.predicate(current_->op), target_predicate(op(0)), a, b);
    return;
  }
  if (!ptx::is_untyped_bits(t)) refuse("a .b type is wanted");
  const uint32_t a = source(op(1), t), b = one ? 0 : source(op(2), t);
  emit(set_.integer(current_->op, t, Mod::kUnknown, false), target(op(0), width(t)), a, b);
}

void Decoder::shift(Modifiers& m) {
  count(3, 3);
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t), n = source(op(2), Type::kB32);
  emit(set_.integer(current_->op, t, Mod::kUnknown, false), target(op(0), width(t)), a, n);
}

void Decoder::bit_field(Modifiers& m) {
  const Op o = current_->op;
  Mod mode = Mod::kUnknown;
  if (o == Op::kBfind && m.take(Mod::kShiftamt)) mode = Mod::kShiftamt;
  if (o == Op::kBmsk || o == Op::kSzext) {
    mode = m.take_any({Mod::kClamp, Mod::kWrap});
    if (mode == Mod::kUnknown) refuse(".clamp or .wrap is missing");
  }
  const Type t = m.take_type();
  if (width(t) < 4) refuse("the type isn't known here");
  const bool bits = ptx::is_untyped_bits(t);
  uint32_t b = 0, c = 0, e = 0, result = width(t);
  const uint32_t a = source(op(1), t);
  switch (o) {
    case Op::kPopc:
    case Op::kClz:
      if (!bits) refuse("a .b type is wanted");
      count(2, 2);
      result = 4;
      break;
    case Op::kBrev:
      if (!bits) refuse("a .b type is wanted");
      count(2, 2);
      break;
    case Op::kBfind:
      count(2, 2);
      result = 4;
      break;
    case Op::kBfe:
      count(4, 4);
      b = source(op(2), Type::kU32);
      c = source(op(3), Type::kU32);
      break;
    case Op::kBfi:
      if (!bits) refuse("a .b type is wanted");
      count(5, 5);
      b = source(op(2), t);
      c = source(op(3), Type::kU32);
      e = source(op(4), Type::kU32);
      break;
    default:
      count(3, 3);
      if (result != 4) refuse("the type isn't known here");
      b = source(op(2), Type::kU32);
  }
  emit(set_.bits(o, t, mode, Mod::kUnknown, Type::kNone), target(op(0), result), a, b, c, e);
}

void Decoder::three_words(Modifiers& m) {
  const Op o = current_->op;
  Mod mode = Mod::kUnknown, mode2 = Mod::kUnknown;
  bool sat = false;
  switch (o) {
    case Op::kShf:
      mode = m.take_any({Mod::kL, Mod::kR});
      mode2 = m.take_any({Mod::kClamp, Mod::kWrap});
      if (mode == Mod::kUnknown || mode2 == Mod::kUnknown)
        refuse("the direction or mode is missing");
      break;
    case Op::kDp2a:
    case Op::kMul24:
    case Op::kMad24:
      mode = m.take_any({Mod::kLo, Mod::kHi});
      if (mode == Mod::kUnknown) refuse(".lo or .hi is missing");
      if (o == Op::kMad24) sat = m.take(Mod::kSat);
      break;
    default:
      break;
  }
  auto fits = [](Type x) { return x == Type::kU32 || x == Type::kS32; };
  if (o == Op::kVabsdiff2 || o == Op::kVabsdiff4) {
    mode = m.take_any({Mod::kAdd});
    if (!fits(m.take_type())) refuse("the result type isn't known here");
  }
  const Type t = m.take_type();
  Type t2 = Type::kNone;
  if (o == Op::kDp4a || o == Op::kDp2a || o == Op::kVabsdiff2 || o == Op::kVabsdiff4) {
    t2 = m.take_type();
    if (!fits(t) || !fits(t2)) refuse("the type isn't known here");
  }
  if (o == Op::kPrmt)
    mode = m.take_any({Mod::kF4e, Mod::kB4e, Mod::kRc8, Mod::kEcl, Mod::kEcr, Mod::kRc16});
  if (o == Op::kSad || o == Op::kMul24 || o == Op::kMad24) {
    const size_t n = o == Op::kMul24 ? 3 : 4;
    count(n, n);
    const uint32_t a = source(op(1), t), b = source(op(2), t), c = n == 4 ? source(op(3), t) : 0;
    emit(set_.integer(o, t, mode, sat), target(op(0), width(t)), a, b, c);
    return;
  }
  if (width(t) != 4) refuse("the type isn't known here");
  if (o == Op::kLop3) {
    count(5, 5);
    const ptx::Operand& table = op(4);
    if (table.kind != OperandKind::kImmediate || table.bits > 255) refuse("the table isn't a byte");
    const uint32_t a = source(op(1), t), b = source(op(2), t), c = source(op(3), t);
    emit(set_.bits(o, t, mode, mode2, t2), target(op(0), 4), a, b, c).immediate =
        static_cast<int64_t>(table.bits);
    return;
  }
  count(4, 4);
  const uint32_t a = source(op(1), t), b = source(op(2), t), c = source(op(3), t);
  emit(set_.bits(o, t, mode, mode2, t2), target(op(0), 4), a, b, c);
}

// compare(a, b), combined with a predicate if the form has one; returns a predicate row, and the
// opposite comparison's in `complement`.
uint32_t Decoder::comparison(Modifiers& m, Type* type, uint32_t* complement, bool want_complement,
                             Type result_type, size_t boolean_operand, bool*) {
  const Mod compare =
      m.take_any({Mod::kEq, Mod::kNe, Mod::kLt, Mod::kLe, Mod::kGt, Mod::kGe, Mod::kLs, Mod::kHs,
                  Mod::kLo, Mod::kHi, Mod::kEqu, Mod::kNeu, Mod::kLtu, Mod::kLeu, Mod::kGtu,
                  Mod::kGeu, Mod::kNum, Mod::kCompareNan});
  if (compare == Mod::kUnknown) refuse("the comparison is missing");
  const Mod boolean = m.take_any({Mod::kAnd, Mod::kOr, Mod::kXor});
  const bool ftz = m.take(Mod::kFtz);
  if (result_type != Type::kNone && m.take_type() != result_type)
    refuse("the result type isn't known here");
  Type t = m.take_type();
  *type = t;
  uint32_t a, b;
  if (t == Type::kF16 || t == Type::kBf16) {  // every half is a float
    const uint32_t ha = source(op(1), t), hb = source(op(2), t);
    a = temp(4);
    b = temp(4);
    emit(set_.convert(Type::kF32, t, Mod::kUnknown, false, false), a, ha);
    emit(set_.convert(Type::kF32, t, Mod::kUnknown, false, false), b, hb);
    if (ftz) refuse(".ftz of halves");
    t = Type::kF32;
  } else {
    a = source(op(1), t);
    b = source(op(2), t);
  }
  uint32_t r = temp(4);
  emit(set_.setp(t, compare, ftz), r, a, b);
  uint32_t opposite = 0;
  if (want_complement) {
    opposite = temp(4);
    emit(set_.predicate(Op::kNot), opposite, r);
  }
  if (boolean != Mod::kUnknown) {
    count(boolean_operand + 1, boolean_operand + 1);
    const uint32_t c = predicate(op(boolean_operand));
    const Op o = boolean == Mod::kAnd ? Op::kAnd : boolean == Mod::kOr ? Op::kOr : Op::kXor;
    const uint32_t combined = temp(4);
    emit(set_.predicate(o), combined, r, c);
    r = combined;
    if (want_complement) {
      const uint32_t other = temp(4);
      emit(set_.predicate(o), other, opposite, c);
      opposite = other;
    }
  } else {
    count(boolean_operand, boolean_operand);
  }
  *complement = opposite;
  return r;
}

void Decoder::setp(Modifiers& m) {
  const ptx::Operand& d = op(0);
  // The plain form writes its predicate at once.
  const bool plain = d.kind == OperandKind::kRegister && !current_->has(Mod::kAnd) &&
                     !current_->has(Mod::kOr) && !current_->has(Mod::kXor);
  Type t;
  uint32_t opposite;
  const bool pair = d.kind == OperandKind::kPair;
  const uint32_t r = comparison(m, &t, &opposite, pair, Type::kNone, 3, nullptr);
  if (plain) {
    const uint32_t row = target_predicate(d);
    code_->instructions.back().d = row;
    return;
  }
  if (pair) {
    const auto two = body_.elements_of(d);
    const uint32_t p = target_predicate(two[0]), q = target_predicate(two[1]);
    emit(set_.predicate(Op::kMov), p, r);
    emit(set_.predicate(Op::kMov), q, opposite);
  } else {
    emit(set_.predicate(Op::kMov), target_predicate(d), r);
  }
}

void Decoder::set(Modifiers& m) {
  // set.cmp{.bool}{.ftz}.dtype.stype d, a, b{, {!}c}
  Type result = Type::kNone;
  for (Mod mod : current_->mods())
    if (result == Type::kNone) result = ptx::type_of(mod);
  if (result != Type::kU32 && result != Type::kS32 && result != Type::kF32)
    refuse("the result type isn't known here");
  Type t;
  uint32_t opposite;
  const uint32_t r = comparison(m, &t, &opposite, false, result, 3, nullptr);
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

void Decoder::copysign(Modifiers& m) {
  count(3, 3);
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t), b = source(op(2), t);
  emit(set_.floating(Op::kCopysign, t, {}), target(op(0), width(t)), a, b);
}

// ---------------------------------------------------------------- moves

void Decoder::move_parts(const ptx::Operand& d, const ptx::Operand& s, Type type) {
  const uint32_t whole = width(type);
  if (d.kind == OperandKind::kVector) {  // {a, b, ...} = s
    const auto parts = body_.elements_of(d);
    const uint32_t bytes = whole / static_cast<uint32_t>(parts.size());
    const uint32_t from = source_width(s, whole, type);
    for (uint32_t k = 0; k < parts.size(); ++k) {
      if (parts[k].kind == OperandKind::kSink) continue;
      const Handler h = set_.unpack(whole, bytes, k);
      if (bytes == 1) {  // bytes live in 16-bit registers
        const uint32_t wide = temp(4), to = target(parts[k], 2);
        const uint32_t shifted = temp(4);
        uint32_t src = from;
        if (whole == 2) {
          src = wide;
          emit(set_.extend(2, Type::kU16, 4), wide, from);
        }
        emit(set_.integer(Op::kShr, Type::kU32, Mod::kUnknown, false), shifted, src,
             constant(4, 8 * k));
        emit(set_.extend(4, Type::kU8, 2), to, shifted);
        continue;
      }
      emit(h, target(parts[k], bytes), from);
    }
    return;
  }
  const auto parts = body_.elements_of(s);  // d = {a, b, ...}
  const uint32_t bytes = whole / static_cast<uint32_t>(parts.size());
  const Type part_type = bytes == 1   ? Type::kB8
                         : bytes == 2 ? Type::kB16
                         : bytes == 4 ? Type::kB32
                                      : Type::kB64;
  std::vector<uint32_t> sources;
  for (const ptx::Operand& p : parts) sources.push_back(source(p, part_type));
  const uint32_t t = temp(whole);
  if (bytes == 1) {
    const uint32_t sum = whole == 4 ? t : temp(4);
    for (uint32_t k = 0; k < sources.size(); ++k) {
      const uint32_t wide = temp(4), shifted = temp(4);
      emit(set_.extend(2, Type::kU8, 4), k ? wide : sum, sources[k]);
      if (!k) continue;
      emit(set_.integer(Op::kShl, Type::kB32, Mod::kUnknown, false), shifted, wide,
           constant(4, 8 * k));
      emit(set_.integer(Op::kOr, Type::kB32, Mod::kUnknown, false), sum, sum, shifted);
    }
    if (whole == 2) emit(set_.extend(4, Type::kU16, 2), t, sum);
  } else {
    for (uint32_t k = 0; k < sources.size(); ++k) emit(set_.pack(bytes, whole, k), t, sources[k]);
  }
  emit(set_.move(whole), target(d, whole), t);
}

void Decoder::mov(Modifiers& m) {
  count(2, 2);
  const ptx::Operand& d = op(0);
  const ptx::Operand& s = op(1);
  const Mod vector = m.take_any({Mod::kV2, Mod::kV4});
  const Type t = m.take_type();
  if (vector != Mod::kUnknown) {  // element by element
    if (d.kind != OperandKind::kVector || s.kind != OperandKind::kVector || d.count != s.count)
      refuse("this vector move isn't known");
    const auto to = body_.elements_of(d), from = body_.elements_of(s);
    std::vector<uint32_t> values;
    for (const ptx::Operand& o : from) values.push_back(source(o, t));
    std::vector<uint32_t> copies;
    for (uint32_t v : values) {
      copies.push_back(temp(width(t)));
      emit(set_.move(width(t)), copies.back(), v);
    }
    for (size_t k = 0; k < to.size(); ++k)
      emit(set_.move(width(t)), target(to[k], width(t)), copies[k]);
    return;
  }
  if (t == Type::kPred) {
    const uint32_t a = predicate(s);
    emit(set_.predicate(Op::kMov), target_predicate(d), a);
    return;
  }
  if (d.kind == OperandKind::kVector || s.kind == OperandKind::kVector) {
    if (d.kind == s.kind) refuse("this vector move isn't known");
    move_parts(d, s, t);
    return;
  }
  if (s.kind == OperandKind::kSymbol) {
    bool in_frame;
    ptx::Space space;
    const uint64_t at = symbol_address(s, false, &in_frame, &space);
    const uint32_t w = width(t);
    if (w != 4 && w != 8) refuse("an address doesn't fit the type");
    if (w == 4 &&
        (space == ptx::Space::kGlobal || space == ptx::Space::kConst || space == ptx::Space::kNone))
      refuse("an address doesn't fit the type");
    if (!in_frame) {
      emit(set_.move(w), target(d, w), constant(w, at));
      return;
    }
    const uint32_t sum = w == 8 ? target(d, 8) : temp(8);
    emit(set_.integer(Op::kAdd, Type::kU64, Mod::kUnknown, false), sum, frame_base(),
         constant(8, at));
    if (w == 4) emit(set_.extend(8, Type::kU32, 4), target(d, 4), sum);
    return;
  }
  const uint32_t a = source(s, t);
  emit(set_.move(width(t)), target(d, width(t)), a);
}

// ---------------------------------------------------------------- conversions

void Decoder::cvt(Modifiers& m) {
  const Mod rounding = m.take_any({Mod::kRn, Mod::kRz, Mod::kRm, Mod::kRp, Mod::kRna, Mod::kRni,
                                   Mod::kRzi, Mod::kRmi, Mod::kRpi});
  const bool relu = m.take(Mod::kRelu);
  const bool ftz = m.take(Mod::kFtz);
  const bool sat = m.take(Mod::kSat);
  const bool satfinite = m.take(Mod::kSatfinite);
  const Type to = m.take_type(), from = m.take_type();
  if (to == Type::kF16x2 || to == Type::kBf16x2) {
    if (ftz || sat) refuse("this conversion isn't known");
    cvt_packed(m, to, from, rounding, relu, satfinite);
    return;
  }
  count(2, 2);
  if (relu || satfinite) refuse("this conversion isn't known");
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
  const bool half_from = is_half(from), half_to = is_half(to);
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
  if (half_to && !float_from) {  // integers are exact in f64 or overflow the half anyway
    const uint32_t t = temp(8);
    emit(set_.convert(Type::kF64, from, Mod::kRn, false, false), t, a);
    if (sat) emit(set_.convert(Type::kF64, Type::kF64, Mod::kUnknown, false, true), t, t);
    emit(set_.convert(to, Type::kF64, rounding, ftz, false), target(d, 2), t);
    return;
  }
  if (half_to && sat) {
    if (from != Type::kF32) refuse("this conversion isn't known");
    const uint32_t t = temp(4);
    emit(set_.convert(Type::kF32, Type::kF32, Mod::kUnknown, ftz, true), t, a);
    emit(set_.convert(to, Type::kF32, rounding, false, false), target(d, 2), t);
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

// cvt.rn.f16x2.f32 d, a, b: a becomes the upper half.
void Decoder::cvt_packed(Modifiers&, Type to, Type from, Mod rounding, bool relu, bool satfinite) {
  count(3, 3);
  if (from != Type::kF32 || relu || satfinite) refuse("this conversion isn't known");
  const Type half = to == Type::kF16x2 ? Type::kF16 : Type::kBf16;
  const uint32_t a = source(op(1), from), b = source(op(2), from);
  const uint32_t hi = temp(2), lo = temp(2);
  emit(set_.convert(half, from, rounding, false, false), hi, a);
  emit(set_.convert(half, from, rounding, false, false), lo, b);
  const uint32_t d = target(op(0), 4);
  emit(set_.pack(2, 4, 0), d, lo);
  emit(set_.pack(2, 4, 1), d, hi);
}

}  // namespace gpupool::simgpu::exec
