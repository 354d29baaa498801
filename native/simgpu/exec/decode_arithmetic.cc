// Arithmetic, logic and moves.
#include <algorithm>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Type;

namespace {

bool is_plain_float(Type t) { return t == Type::kF32 || t == Type::kF64; }
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
  const bool relu = m.take(Mod::kRelu);
  const Mod part = m.take_any({Mod::kLo, Mod::kHi, Mod::kWide});
  const Type t = m.take_type();
  if (is_plain_float(t) || is_half(t)) {
    if (part != Mod::kUnknown) refuse("a part of a float product");
    if (relu && (!is_half(t) || o != Op::kFma)) refuse(".relu of this type");
    const uint32_t a = source(op(1), t), b = source(op(2), t), c = n == 4 ? source(op(3), t) : 0;
    const Handler h = is_half(t) ? set_.half(o, t, mode) : set_.floating(o, t, mode);
    emit(h, target(op(0), width(t)), a, b, c).immediate = half_flags(mode, relu);
    return;
  }
  if (mode.ftz || relu || rounded) refuse("a float modifier with an integer type");
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
  const Mod how = m.take_any({Mod::kApprox, Mod::kFull});
  mode.ftz = m.take(Mod::kFtz);
  const Type t = m.take_type();
  const uint32_t a = source(op(1), t), b = source(op(2), t);
  Handler h;
  if (is_plain_float(t)) {
    if (current_->op == Op::kRem) refuse("no remainder of floats");
    if (how != Mod::kUnknown && (rounded || t != Type::kF32)) refuse("this division isn't known");
    h = set_.math(Op::kDiv, t, mode, how == Mod::kApprox);
  } else {
    if (mode.ftz || how != Mod::kUnknown || rounded)
      refuse("a float modifier with an integer type");
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
  const bool absolute = m.take(Mod::kAbs), relu = m.take(Mod::kRelu);
  const Type t = m.take_type();
  const bool three = current_->operand_count == 4;
  if (three ? mode.xorsign : mode.xorsign != absolute) refuse(".xorsign and .abs don't fit");
  if (relu && t != Type::kS32 && t != Type::kS16x2) refuse(".relu of this type");
  uint32_t a = source(op(1), t), b = source(op(2), t);
  Handler h;
  if (is_half(t))
    h = set_.half(current_->op, t, mode);
  else if (is_plain_float(t))
    h = set_.floating(current_->op, t, mode);
  else if (mode.ftz || mode.nan || absolute)
    refuse("a float modifier with an integer type");
  else
    h = set_.integer(current_->op, t, Mod::kUnknown, false);
  if (three) {
    uint32_t c = source(op(3), t);
    if (t != Type::kF32) refuse("three operands of this type");
    if (absolute) {
      for (uint32_t* row : {&a, &b, &c}) {
        const uint32_t magnitude = temp(4);
        emit(set_.floating(Op::kAbs, t, {}), magnitude, *row);
        *row = magnitude;
      }
    }
    const uint32_t first = temp(4);
    emit(h, first, a, b);
    emit(h, target(op(0), 4), first, c);
    return;
  }
  const uint32_t d = target(op(0), width(t));
  if (relu) {  // max(op(a, b), 0)
    const uint32_t first = temp(4);
    emit(h, first, a, b);
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
  const Type t = m.take_type();
  Type t2 = Type::kNone;
  if (o == Op::kDp4a || o == Op::kDp2a) {
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

}  // namespace gpupool::simgpu::exec
