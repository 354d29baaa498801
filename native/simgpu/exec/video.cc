// Video instructions (PTX ISA 9.7.18 and 9.7.19): decoding, and their pseudo-code for one thread.
#include "simgpu/exec/video.h"

#include <algorithm>
#include <span>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Selector;
using ptx::Type;

namespace {

int64_t part(uint64_t value, uint32_t width, uint32_t index, bool is_signed) {
  const uint64_t bits = value >> (width * index) & ((uint64_t{1} << width) - 1);
  if (!is_signed) return static_cast<int64_t>(bits);
  return static_cast<int64_t>(bits << (64 - width)) >> (64 - width);
}

template <class T>
T clamped(T x, uint32_t width, bool is_signed) {
  const int64_t top = is_signed ? (int64_t{1} << (width - 1)) - 1 : (int64_t{1} << width) - 1;
  const int64_t bottom = is_signed ? -top - 1 : 0;
  return std::clamp<T>(x, bottom, top);
}

bool compare(Mod how, int64_t x, int64_t y) {
  switch (how) {
    case Mod::kEq:
      return x == y;
    case Mod::kNe:
      return x != y;
    case Mod::kLt:
      return x < y;
    case Mod::kLe:
      return x <= y;
    case Mod::kGt:
      return x > y;
    default:
      return x >= y;
  }
}

int64_t primary(const VideoWork& v, int64_t x, int64_t y) {
  switch (v.operation) {
    case Op::kVadd:
      return x + y;
    case Op::kVsub:
      return x - y;
    case Op::kVabsdiff:
      return x > y ? x - y : y - x;
    case Op::kVmin:
      return std::min(x, y);
    case Op::kVmax:
      return std::max(x, y);
    case Op::kVavrg2:
      return x + y >= 0 ? (x + y + 1) >> 1 : (x + y) >> 1;
    case Op::kVset:
      return compare(v.compare, x, y);
    case Op::kVshl:
    case Op::kVshr: {
      const int64_t n = v.wrap ? y & 31 : std::min<int64_t>(y, 32);
      return v.operation == Op::kVshl ? static_cast<int64_t>(static_cast<uint64_t>(x) << n)
                                      : x >> n;
    }
    default:
      return 0;
  }
}

uint32_t multiply_add(const VideoWork& v, int64_t x, int64_t y, uint32_t c) {
  const bool is_signed = v.signed_a || v.signed_b || v.negate_product || v.negate_c;
  __int128 t = static_cast<__int128>(x) * y;
  if (v.negate_product) t = -t;
  const int64_t addend = is_signed ? static_cast<int32_t>(c) : static_cast<int64_t>(c);
  t += v.negate_c ? -addend : addend;
  if (v.plus_one) t += 1;
  int64_t r = static_cast<int64_t>(t >> v.scale);
  if (v.saturate) r = clamped(r, 32, is_signed);
  return static_cast<uint32_t>(r);
}

const Instruction* video_lanes(Warp& w, const Instruction* i) {
  const VideoWork& v = w.frame->code->videos[static_cast<size_t>(i->target)];
  auto row = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(w.rows + offset); };
  const uint32_t *a = row(i->a), *b = row(i->b), *c = row(i->c);
  uint32_t* d = row(i->d);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    d[l] = run_video(v, a[l], b[l], c[l]);
  }
  return i + 1;
}

struct Opcode {
  Op operation;
  uint8_t lanes;
};
Opcode opcode_of(Op op) {
  switch (op) {
    case Op::kVadd2:
      return {Op::kVadd, 2};
    case Op::kVadd4:
      return {Op::kVadd, 4};
    case Op::kVsub2:
      return {Op::kVsub, 2};
    case Op::kVsub4:
      return {Op::kVsub, 4};
    case Op::kVavrg2:
      return {Op::kVavrg2, 2};
    case Op::kVavrg4:
      return {Op::kVavrg2, 4};
    case Op::kVabsdiff2:
      return {Op::kVabsdiff, 2};
    case Op::kVabsdiff4:
      return {Op::kVabsdiff, 4};
    case Op::kVmin2:
      return {Op::kVmin, 2};
    case Op::kVmin4:
      return {Op::kVmin, 4};
    case Op::kVmax2:
      return {Op::kVmax, 2};
    case Op::kVmax4:
      return {Op::kVmax, 4};
    case Op::kVset2:
      return {Op::kVset, 2};
    case Op::kVset4:
      return {Op::kVset, 4};
    default:
      return {op, 1};
  }
}

}  // namespace

uint32_t run_video(const VideoWork& v, uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t both = uint64_t{b} << 32 | a;
  auto left = [&](uint32_t k) { return part(both, v.width_a, v.index_a[k], v.signed_a); };
  auto right = [&](uint32_t k) { return part(both, v.width_b, v.index_b[k], v.signed_b); };
  if (v.operation == Op::kVmad) return multiply_add(v, left(0), right(0), c);
  if (v.lanes == 1) {
    int64_t t = primary(v, left(0), right(0));
    if (v.saturate) t = clamped(t, v.merge_width ? v.merge_width : 32, v.signed_d);
    if (v.merge_width) {
      const uint32_t shift = uint32_t{v.merge_width} * v.merge_index;
      const uint32_t mask = ((1u << v.merge_width) - 1) << shift;
      return (c & ~mask) | (static_cast<uint32_t>(t) << shift & mask);
    }
    if (v.second == Mod::kUnknown) return static_cast<uint32_t>(t);
    if (v.second == Mod::kAdd) return static_cast<uint32_t>(t) + c;
    const int64_t x = part(static_cast<uint64_t>(t), 32, 0, v.signed_d);
    const int64_t y = part(c, 32, 0, v.signed_d);
    return static_cast<uint32_t>(v.second == Mod::kMin ? std::min(x, y) : std::max(x, y));
  }
  const uint32_t width = 32u / v.lanes, ones = (1u << width) - 1;
  uint32_t d = v.second == Mod::kAdd ? c : 0;
  for (uint32_t k = 0; k < v.lanes; ++k) {
    const bool wanted = v.mask >> k & 1;
    int64_t t = primary(v, left(k), right(k));
    if (v.saturate) t = clamped(t, width, v.signed_d);
    if (v.second == Mod::kAdd) {
      if (wanted) d += static_cast<uint32_t>(t);
    } else {
      d |= wanted ? (static_cast<uint32_t>(t) & ones) << width * k : c & ones << width * k;
    }
  }
  return d;
}

// A source: register with an optional selector and sign, or an immediate.
uint32_t Decoder::video_source(const ptx::Operand& o, bool may_select, bool may_negate) {
  if (o.kind != OperandKind::kRegister) return source(o, Type::kB32);
  if (o.selector != Selector::kNone && !may_select) refuse("a selector isn't known here");
  if (o.negated && !may_negate) refuse("a negated operand isn't known here");
  if (body_.registers[o.index] == Type::kPred || register_width(o.index) != 4)
    refuse("a 32-bit register is wanted");
  return use(o.index);
}

// The parts that an operand's selector names: digits, each below `limit`.
std::vector<uint8_t> Decoder::selected(const ptx::Operand& o, char letter, uint32_t most,
                                       uint32_t limit) const {
  std::vector<uint8_t> parts;
  const uint32_t n = static_cast<uint32_t>(o.bits >> 32 & 0xff);
  if (ptx::selector_letter(o) != letter || n == 0 || n > most)
    refuse("this selector isn't known here");
  for (uint32_t k = 0; k < n; ++k) {
    const uint8_t digit = o.bits >> 4 * k & 15;
    if (digit >= limit) refuse("this selector isn't known here");
    parts.push_back(digit);
  }
  return parts;
}

void Decoder::video(Modifiers& m) {
  const Opcode opcode = opcode_of(current_->op);
  VideoWork v;
  v.operation = opcode.operation;
  v.lanes = opcode.lanes;
  const bool set = v.operation == Op::kVset, mad = v.operation == Op::kVmad;
  auto take_sign = [&] {
    const Type t = m.take_type();
    if (t != Type::kU32 && t != Type::kS32) refuse("the type isn't known here");
    return t == Type::kS32;
  };
  if (!set) v.signed_d = take_sign();
  v.signed_a = take_sign();
  v.signed_b = take_sign();
  if (set) {
    v.compare = m.take_any({Mod::kEq, Mod::kNe, Mod::kLt, Mod::kLe, Mod::kGt, Mod::kGe});
    if (v.compare == Mod::kUnknown) refuse("the comparison is missing");
  } else {
    v.saturate = m.take(Mod::kSat);
  }
  if (v.operation == Op::kVshl || v.operation == Op::kVshr) {
    const Mod mode = m.take_any({Mod::kClamp, Mod::kWrap});
    if (mode == Mod::kUnknown) refuse(".clamp or .wrap is missing");
    if (v.signed_b) refuse("the type isn't known here");
    v.wrap = mode == Mod::kWrap;
  }
  if (mad) {
    v.plus_one = m.take(Mod::kPo);
    const Mod scale = m.take_any({Mod::kShr7, Mod::kShr15});
    v.scale = scale == Mod::kShr7 ? 7 : scale == Mod::kShr15 ? 15 : 0;
  } else {
    v.second =
        v.lanes == 1 ? m.take_any({Mod::kAdd, Mod::kMin, Mod::kMax}) : m.take_any({Mod::kAdd});
  }
  if (v.lanes > 1 && v.saturate && v.second != Mod::kUnknown) refuse(".sat and .add don't fit");

  const ptx::Operand& d = op(0);
  const bool part_of_c = d.kind == OperandKind::kRegister && d.selector != Selector::kNone;
  const bool third = v.lanes > 1 || mad || part_of_c || v.second != Mod::kUnknown;
  count(third ? 4 : 3, third ? 4 : 3);
  if (part_of_c && (mad || (v.lanes == 1 && v.second != Mod::kUnknown)))
    refuse("a part of the result isn't known here");
  const ptx::Operand &x = op(1), &y = op(2);
  auto has_selector = [](const ptx::Operand& o) {
    return o.kind == OperandKind::kRegister && o.selector != Selector::kNone;
  };
  if (v.lanes == 1) {
    auto select = [&](const ptx::Operand& o, uint8_t& width, uint8_t& index, uint32_t first) {
      if (!has_selector(o)) return;
      const bool half = ptx::selector_letter(o) == 'h';
      width = half ? 16 : 8;
      index = selected(o, half ? 'h' : 'b', 1, half ? 2 : 4)[0];
      index = static_cast<uint8_t>(index + first / width);
    };
    select(x, v.width_a, v.index_a[0], 0);
    select(y, v.width_b, v.index_b[0], 32);
    if (part_of_c) select(d, v.merge_width, v.merge_index, 0);
  } else {
    const char letter = v.lanes == 2 ? 'h' : 'b';
    v.width_a = v.width_b = 32 / v.lanes;
    for (uint8_t k = 0; k < v.lanes; ++k) {
      v.index_a[k] = k;
      v.index_b[k] = k + v.lanes;
    }
    auto select = [&](const ptx::Operand& o, uint8_t* index) {
      if (!has_selector(o)) return;
      const std::vector<uint8_t> parts = selected(o, letter, v.lanes, 2u * v.lanes);
      if (parts.size() != v.lanes) refuse("this selector isn't known here");
      std::copy(parts.begin(), parts.end(), index);
    };
    select(x, v.index_a);
    select(y, v.index_b);
    if (part_of_c) {
      v.mask = 0;
      for (const uint8_t k : selected(d, letter, v.lanes, v.lanes)) v.mask |= 1u << k;
    }
  }
  const uint32_t a = video_source(x, true, mad), b = video_source(y, true, mad);
  const uint32_t c = third ? video_source(op(3), false, mad) : a;
  if (mad) {
    v.negate_product = (x.kind == OperandKind::kRegister && x.negated) !=
                       (y.kind == OperandKind::kRegister && y.negated);
    v.negate_c = op(3).kind == OperandKind::kRegister && op(3).negated;
    if (v.negate_c + v.negate_product + v.plus_one > 1) refuse("two of sign, sign and .po");
  }
  ptx::Operand result = d;
  result.selector = Selector::kNone;
  const int32_t index = static_cast<int32_t>(code_->videos.size());
  code_->videos.push_back(v);
  emit(video_lanes, target(result, 4), a, b, c).target = index;
}

}  // namespace gpupool::simgpu::exec
