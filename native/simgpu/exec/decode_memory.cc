// Loads, stores, atomics, asynchronous copies, address conversions.
#include <algorithm>

#include "simgpu/exec/decoder.h"
#include "simgpu/exec/strict.h"

namespace gpupool::simgpu::exec {

using ptx::kNoIndex;
using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Space;
using ptx::SymbolKind;
using ptx::Type;

// The address that a symbol stands for, in its own space or generic. `in_frame`: relative to the
// frame in local memory.
uint64_t Decoder::symbol_address(const ptx::Operand& o, bool generic, bool* in_frame,
                                 ptx::Space* space) {
  *in_frame = false;
  const uint64_t offset = static_cast<uint64_t>(o.offset);
  switch (o.symbol) {
    case SymbolKind::kVariable: {
      const ptx::Variable& v = program_.variable(o.index);
      *space = v.space;
      if (v.space == ptx::Space::kGlobal || v.space == ptx::Space::kConst) {
        if (!v.address) refuse("the variable " + v.name + " has no address");
        return v.address + offset;
      }
      if (v.space == ptx::Space::kShared) {
        const uint32_t place = kernel_.shared.offset_of(o.index);
        if (place == kNoIndex) refuse("the shared variable " + v.name + " isn't placed");
        return place + offset + (generic ? kSharedWindow : 0);
      }
      refuse("variables of this space aren't known: " + v.name);
    }
    case SymbolKind::kLocal: {
      const ptx::LocalVariable& v = body_.locals[o.index];
      *in_frame = true;
      *space = ptx::Space::kLocal;
      return (v.space == ptx::Space::kLocal ? local_place_ : param_place_) + v.offset + offset +
             (generic ? kLocalWindow : 0);
    }
    case SymbolKind::kParameter:
      if (function_.entry) {
        *space = ptx::Space::kParam;
        return function_.parameters[o.index].offset + offset + (generic ? kParamWindow : 0);
      }
      if (function_.parameters[o.index].space == ptx::Space::kReg)
        refuse("a register has no address");
      *in_frame = true;
      *space = ptx::Space::kLocal;
      return places_.parameters[o.index] + offset + (generic ? kLocalWindow : 0);
    case SymbolKind::kReturn:
      *in_frame = true;
      *space = ptx::Space::kLocal;
      return places_.returns[o.index] + offset + (generic ? kLocalWindow : 0);
    case SymbolKind::kFunction:
      *space = ptx::Space::kNone;
      return ptx::function_address(o.index);
    default:
      refuse("this name has no address");
  }
}

Decoder::Address Decoder::address(const ptx::Operand& o, ptx::Space space) {
  if (o.kind != OperandKind::kAddress) refuse("an address in brackets is wanted");
  Address a;
  if (o.register_base) {
    const Type t = body_.registers[o.index];
    const uint32_t width = register_width(o.index);
    if (t == Type::kPred || (width != 4 && width != 8))
      refuse("the address register isn't 32 or 64 bits wide");
    uint32_t row = use(o.index);
    a.offset = o.offset;
    switch (space) {
      case ptx::Space::kShared:
        a.access = width == 4 ? Access::kShared32 : Access::kShared64;
        a.row = row;
        return a;
      case ptx::Space::kGlobal:
      case ptx::Space::kConst:
        a.access = Access::kGlobal;
        break;
      case ptx::Space::kLocal:
        a.access = Access::kLocal;
        break;
      case ptx::Space::kParam:
        a.access = function_.entry ? Access::kParam : Access::kLocal;
        break;
      case ptx::Space::kNone:
        a.access = Access::kGeneric;
        break;
      default:
        refuse("this state space isn't known");
    }
    a.row = widened(row);
    return a;
  }
  if (o.symbol == SymbolKind::kNone) {  // [offset]
    a.row = constant(8, 0);
    a.offset = o.offset;
    a.access = space == ptx::Space::kShared  ? Access::kShared64
               : space == ptx::Space::kLocal ? Access::kLocal
               : space == ptx::Space::kParam ? (function_.entry ? Access::kParam : Access::kLocal)
               : space == ptx::Space::kNone  ? Access::kGeneric
                                             : Access::kGlobal;
    return a;
  }
  bool in_frame;
  ptx::Space of;
  const uint64_t at = symbol_address(o, false, &in_frame, &of);
  if (space != ptx::Space::kNone && space != of) {
    const bool parameter =
        space == ptx::Space::kParam && of == ptx::Space::kLocal &&
        (o.symbol != SymbolKind::kLocal || body_.locals[o.index].space == ptx::Space::kParam);
    const bool constant_data = (space == ptx::Space::kGlobal && of == ptx::Space::kConst);
    if (!parameter && !constant_data) refuse("the variable lies in another state space");
  }
  switch (of) {
    case ptx::Space::kGlobal:
    case ptx::Space::kConst:
      a.access = Access::kGlobal;
      a.row = constant(8, at);
      break;
    case ptx::Space::kShared:
      a.access = Access::kShared32;
      a.row = constant(4, at);
      break;
    case ptx::Space::kParam:
      a.access = Access::kParam;
      a.row = constant(8, at);
      break;
    case ptx::Space::kLocal:
      a.access = Access::kLocal;
      a.row = frame_base();
      a.offset = static_cast<int64_t>(at);
      break;
    default:
      refuse("nothing can be loaded from this name");
  }
  return a;
}

// Words that say how caches treat the access, or which order it takes: x86's order is stronger than
// every one of them except .sc, and that only matters for fences. `polls`: it may be a spin loop's.
void Decoder::cache_modifiers(Modifiers& m, bool* polls, bool is_load) {
  m.take(Mod::kWeak);
  const Mod order =
      m.take_any({Mod::kVolatile, Mod::kRelaxed, is_load ? Mod::kAcquire : Mod::kRelease});
  m.take(Mod::kMmio);
  m.take_any({Mod::kCta, Mod::kCluster, Mod::kGpu, Mod::kSys});
  if (is_load) {
    m.take_any({Mod::kCa, Mod::kCg, Mod::kCs, Mod::kLu, Mod::kCv});
    m.take(Mod::kNc);
  } else {
    m.take_any({Mod::kWb, Mod::kCg, Mod::kCs, Mod::kWt});
  }
  m.take_any({Mod::kL1EvictNormal, Mod::kL1EvictUnchanged, Mod::kL1EvictFirst, Mod::kL1EvictLast,
              Mod::kL1NoAllocate});
  m.take_any({Mod::kL2EvictLast, Mod::kL2EvictNormal, Mod::kL2EvictFirst, Mod::kL2EvictUnchanged});
  m.take(Mod::kL2CacheHint);
  m.take_any({Mod::kL264B, Mod::kL2128B, Mod::kL2256B});
  m.take(Mod::kUnified);
  *polls = order != Mod::kUnknown;
}

void Decoder::check_access(const Address& a, uint64_t bytes, bool reads, bool writes) {
  if (!kernel_.strict) return;
  int32_t how = (reads ? kReads : 0) | (writes ? kWrites : 0);
  if (a.access == Access::kShared32) {
    how |= kNarrowAddress;
  } else if (a.access == Access::kGeneric) {
    how |= kGenericAddress;
  } else if (a.access == Access::kGlobal) {
    how |= kGlobal;
  } else if (a.access != Access::kShared64) {
    return;
  }
  Instruction& i = emit(check_memory, 0, a.row);
  i.immediate = a.offset;
  i.count = static_cast<uint16_t>(bytes);
  i.target = how;
}

void Decoder::load(Modifiers& m) {
  bool polls;
  cache_modifiers(m, &polls, true);
  const Space space = m.take_space();
  const Mod vector = m.take_any({Mod::kV2, Mod::kV4, Mod::kV8});
  const Type t = m.take_type();
  count(2, 3);  // the third: a cache policy
  const ptx::Operand& d = op(0);
  const Address a = address(op(1), space);
  if (vector == Mod::kUnknown) {
    uint32_t w;
    if (d.kind == OperandKind::kSink) {
      w = std::max<uint32_t>(2, ptx::bytes_of(t));
    } else {
      if (d.kind != OperandKind::kRegister || body_.registers[d.index] == Type::kPred)
        refuse("a register is wanted as the result");
      w = register_width(d.index);
    }
    check_access(a, ptx::bytes_of(t), true, false);
    const bool poll = polls && (a.access == Access::kGlobal || a.access == Access::kGeneric);
    Instruction& i = emit(set_.load(a.access, t, w, false, poll), target(d, w), a.row);
    i.immediate = a.offset;
    if (!poll) note_memory(a.access, t, w, false);
    return;
  }
  const uint32_t n = vector == Mod::kV2 ? 2 : vector == Mod::kV4 ? 4 : 8;
  const auto elements = body_.elements_of(d);
  if (d.kind != OperandKind::kVector || elements.size() != n || n > 4)
    refuse("the vector isn't known here");
  uint32_t rows[4] = {0, 0, 0, 0}, w = 0;
  for (uint32_t k = 0; k < n; ++k) {
    if (elements[k].kind == OperandKind::kSink) continue;
    if (elements[k].kind != OperandKind::kRegister) refuse("a register is wanted as the result");
    const uint32_t have = register_width(elements[k].index);
    if (w && have != w) refuse("registers of different sizes");
    w = have;
    rows[k] = target(elements[k], w);
  }
  if (!w) w = std::max<uint32_t>(2, ptx::bytes_of(t));
  check_access(a, uint64_t{n} * ptx::bytes_of(t), true, false);
  Instruction& i =
      emit(set_.load(a.access, t, w, true, false), rows[0], a.row, rows[1], rows[2], rows[3]);
  i.immediate = a.offset;
  i.count = static_cast<uint16_t>(n);
}

void Decoder::store(Modifiers& m) {
  bool polls;
  if (m.take(Mod::kAsync) || m.take(Mod::kBulk)) refuse("asynchronous stores aren't known");
  cache_modifiers(m, &polls, false);
  const Space space = m.take_space();
  const Mod vector = m.take_any({Mod::kV2, Mod::kV4, Mod::kV8});
  const Type t = m.take_type();
  count(2, 3);
  const Address a = address(op(0), space);
  if (a.access == Access::kParam) refuse("kernel parameters can't be written");
  const ptx::Operand& s = op(1);
  auto value = [&](const ptx::Operand& o) -> uint32_t {
    if (o.kind == OperandKind::kRegister && body_.registers[o.index] != Type::kPred && !o.negated &&
        o.selector == ptx::Selector::kNone)
      return use(o.index);
    return source(o, t);
  };
  if (vector == Mod::kUnknown) {
    const uint32_t row = value(s);
    check_access(a, ptx::bytes_of(t), false, true);
    Instruction& i = emit(set_.store(a.access, t, width_of_row(row), false), 0, a.row, row);
    i.immediate = a.offset;
    note_memory(a.access, t, width_of_row(row), true);
    return;
  }
  const uint32_t n = vector == Mod::kV2 ? 2 : vector == Mod::kV4 ? 4 : 8;
  const auto elements = body_.elements_of(s);
  if (s.kind != OperandKind::kVector || elements.size() != n || n > 4)
    refuse("the vector isn't known here");
  uint32_t rows[4] = {0, 0, 0, 0}, w = 0;
  for (uint32_t k = 0; k < n; ++k)
    if (elements[k].kind == OperandKind::kRegister) w = register_width(elements[k].index);
  for (uint32_t k = 0; k < n; ++k) {
    if (elements[k].kind == OperandKind::kRegister)
      rows[k] = value(elements[k]);
    else
      rows[k] = source_width(elements[k], w ? w : std::max<uint32_t>(2, ptx::bytes_of(t)), t);
    if (w && width_of_row(rows[k]) != w) refuse("registers of different sizes");
  }
  check_access(a, uint64_t{n} * ptx::bytes_of(t), false, true);
  Instruction& i = emit(set_.store(a.access, t, width_of_row(rows[0]), true), rows[2], a.row,
                        rows[0], rows[1], rows[3]);
  i.immediate = a.offset;
  i.count = static_cast<uint16_t>(n);
}

void Decoder::atom(Modifiers& m, bool result) {
  if (m.take(Mod::kAsync)) refuse("asynchronous reductions aren't known");
  m.take_any({Mod::kRelaxed, Mod::kAcquire, Mod::kRelease, Mod::kAcqRel, Mod::kSc});
  m.take_any({Mod::kCta, Mod::kCluster, Mod::kGpu, Mod::kSys});
  m.take(Mod::kNoftz);
  m.take(Mod::kL2CacheHint);
  const Space space = m.take_space();
  const Mod o = m.take_any({Mod::kAnd, Mod::kOr, Mod::kXor, Mod::kCas, Mod::kExch, Mod::kAdd,
                            Mod::kInc, Mod::kDec, Mod::kMin, Mod::kMax});
  if (m.take_any({Mod::kV2, Mod::kV4, Mod::kV8}) != Mod::kUnknown) {
    needs(90);
    refuse("vector atomics aren't known");
  }
  const Type t = m.take_type();
  const size_t first = result ? 1 : 0;
  const bool cas = o == Mod::kCas;
  count(first + (cas ? 3 : 2), first + (cas ? 4 : 3));
  Address a = address(op(first), space);
  if (a.access == Access::kShared32) {
    a.row = widened(a.row);
    a.access = Access::kShared64;
  }
  const uint32_t b = source(op(first + 1), t);
  const uint32_t c = cas ? source(op(first + 2), t) : 0;
  const bool want = result && op(0).kind != OperandKind::kSink;
  const uint32_t d = want ? target(op(0), std::max<uint32_t>(2, ptx::bytes_of(t))) : 0;
  check_access(a, ptx::bytes_of(t), true, true);
  emit(set_.atomic(a.access, o, t, want), d, a.row, b, c).immediate = a.offset;
}

// cp.async copies at once; groups and waits have nothing left to do.
void Decoder::cp_async(Modifiers& m) {
  if (!m.take(Mod::kAsync)) refuse("this copy isn't known");
  if (m.take(Mod::kMbarrier)) return copies_arrive(m);
  if (m.take_any({Mod::kCommitGroup, Mod::kWaitGroup, Mod::kWaitAll}) != Mod::kUnknown) {
    emit(set_.control(Op::kPrefetch, Mod::kUnknown, false));
    return;
  }
  if (m.take_any({Mod::kCa, Mod::kCg}) == Mod::kUnknown) refuse("this copy isn't known");
  if (m.take_space() != Space::kShared || m.take_space() != Space::kGlobal)
    refuse("this copy isn't known");
  m.take(Mod::kL2CacheHint);
  m.take_any({Mod::kL264B, Mod::kL2128B, Mod::kL2256B});
  count(3, 5);
  const ptx::Operand& size = op(2);
  if (size.kind != OperandKind::kImmediate || (size.bits != 4 && size.bits != 8 && size.bits != 16))
    refuse("the size isn't 4, 8 or 16 bytes");
  const uint32_t n = static_cast<uint32_t>(size.bits);
  const Address to = address(op(0), Space::kShared), from = address(op(1), Space::kGlobal);
  const uint32_t words = n / 4;
  uint32_t rows[4] = {0, 0, 0, 0};
  for (uint32_t k = 0; k < words; ++k) rows[k] = temp(4);
  const uint32_t zero = constant(4, 0);
  // What follows the source's size (or all of it where ignore-src holds) becomes zero.
  uint32_t pass = 0;
  uint32_t size_row = 0;
  if (current_->operand_count >= 4 && op(3).kind != OperandKind::kNone) {
    const ptx::Operand& x = op(3);
    if (x.kind == OperandKind::kRegister && body_.registers[x.index] == Type::kPred) {
      const uint32_t p = predicate(x);
      pass = temp(4);
      emit(set_.predicate(Op::kNot), pass, p);
    } else if (current_->operand_count == 4 && x.kind == OperandKind::kRegister &&
               register_width(x.index) == 8 && current_->has(Mod::kL2CacheHint)) {
      // a cache policy
    } else {
      size_row = source(x, Type::kU32);
    }
  }
  if (!pass && !size_row) {
    check_access(from, n, true, false);
    Instruction& l =
        words == 1 ? emit(set_.load(from.access, Type::kB32, 4, false, false), rows[0], from.row)
                   : emit(set_.load(from.access, Type::kB32, 4, true, false), rows[0], from.row,
                          rows[1], rows[2], rows[3]);
    l.immediate = from.offset;
    l.count = static_cast<uint16_t>(words);
  } else {
    // Word by word, each under the predicate that it is wanted: those that lie whole in the source.
    // Of the word in which it ends, byte by byte.
    if (current_->guard != ptx::kNoIndex) branch_around();
    const auto integer = [&](Op o, Type t, uint32_t d, uint32_t a, uint32_t b) {
      emit(set_.integer(o, t, Mod::kUnknown, false), d, a, b);
    };
    const auto compare = [&](Mod how, uint32_t a, uint32_t b) {
      const uint32_t p = temp(4);
      emit(set_.setp(Type::kU32, how, false), p, a, b);
      return p;
    };
    const auto load_where = [&](uint32_t p, Type t, uint32_t d, uint32_t at, int64_t offset) {
      Instruction& l = emit(set_.guarded[0], d, at);
      l.inner = set_.load(from.access, t, 4, false, false);
      l.guard = p;
      l.immediate = offset;
    };
    uint32_t whole = 0, tail = 0;  // bytes in whole words; the last word's other bytes
    if (size_row) {
      whole = temp(4), tail = temp(4);
      const uint32_t left = temp(4), byte = temp(4), wide = temp(8), at = temp(8);
      integer(Op::kAnd, Type::kB32, whole, size_row, constant(4, ~uint32_t{3}));
      integer(Op::kAnd, Type::kB32, left, size_row, constant(4, 3));
      emit(set_.extend(4, Type::kU32, 8), wide, whole);
      integer(Op::kAdd, Type::kU64, at, from.row, wide);
      emit(set_.move(4), tail, zero);
      for (uint32_t k = 0; k < 3; ++k) {
        emit(set_.move(4), byte, zero);
        load_where(compare(Mod::kGt, left, constant(4, k)), Type::kU8, byte, at, from.offset + k);
        integer(Op::kShl, Type::kB32, byte, byte, constant(4, 8 * k));
        integer(Op::kOr, Type::kB32, tail, tail, byte);
      }
    }
    for (uint32_t k = 0; k < words; ++k) {
      uint32_t p = pass;
      if (size_row) {
        emit(set_.selp(4), rows[k], tail, zero, compare(Mod::kEq, whole, constant(4, 4 * k)));
        p = compare(Mod::kGt, whole, constant(4, 4 * k));
      } else {
        emit(set_.move(4), rows[k], zero);
      }
      load_where(p, Type::kB32, rows[k], from.row, from.offset + 4 * k);
    }
  }
  check_access(to, n, false, true);
  Instruction& s = words == 1
                       ? emit(set_.store(to.access, Type::kB32, 4, false), 0, to.row, rows[0])
                       : emit(set_.store(to.access, Type::kB32, 4, true), rows[2], to.row, rows[0],
                              rows[1], rows[3]);
  s.immediate = to.offset;
  s.count = static_cast<uint16_t>(words);
}

void Decoder::prefetch(Modifiers& m) {
  m.take_any({Mod::kL1, Mod::kL2});
  m.take_any({Mod::kL2EvictLast, Mod::kL2EvictNormal});
  m.take(Mod::kL2128B);
  m.take_space();
  if (current_->op == Op::kPrefetch && m.take(Mod::kTensormap)) refuse("tensor maps aren't known");
  emit(set_.control(Op::kPrefetch, Mod::kUnknown, false));
}

void Decoder::cvta(Modifiers& m) {
  count(2, 2);
  const bool to = m.take(Mod::kTo);
  const Space space = m.take_space();
  const Type t = m.take_type();
  if (t != Type::kU64 && t != Type::kB64) refuse("only 64-bit addresses are known");
  uint64_t window = 0;
  switch (space) {
    case Space::kGlobal:
    case Space::kConst:
      break;
    case Space::kShared:
      window = kSharedWindow;
      break;
    case Space::kLocal:
      window = kLocalWindow;
      break;
    case Space::kParam:
      window = function_.entry ? kParamWindow : kLocalWindow;
      break;
    default:
      refuse("this state space isn't known");
  }
  const ptx::Operand& s = op(1);
  uint32_t a;
  if (s.kind == OperandKind::kSymbol || s.kind == OperandKind::kAddress) {
    bool in_frame;
    Space of;
    const uint64_t at = symbol_address(s, false, &in_frame, &of);
    a = constant(8, at);
    if (in_frame) {
      const uint32_t sum = temp(8);
      emit(set_.integer(Op::kAdd, Type::kU64, Mod::kUnknown, false), sum, frame_base(), a);
      a = sum;
    }
  } else {
    a = source(s, t);
  }
  const uint32_t d = target(op(0), 8);
  if (!window) {
    emit(set_.move(8), d, a);
  } else {
    emit(set_.integer(to ? Op::kSub : Op::kAdd, Type::kU64, Mod::kUnknown, false), d, a,
         constant(8, window));
  }
}

void Decoder::isspacep(Modifiers& m) {
  count(2, 2);
  const Space space = m.take_space();
  const uint32_t a = widened(source_width(op(1), 8, Type::kU64));
  const uint32_t d = target_predicate(op(0));
  switch (space) {
    case Space::kGlobal:
      emit(set_.setp(Type::kU64, Mod::kLt, false), d, a, constant(8, kWindows));
      return;
    case Space::kConst:  // constants lie in global memory here
      emit(set_.predicate(Op::kMov), d, constant(4, 0));
      return;
    case Space::kShared:
    case Space::kLocal:
    case Space::kParam: {
      const uint64_t window = space == Space::kShared  ? kSharedWindow
                              : space == Space::kLocal ? kLocalWindow
                                                       : kParamWindow;
      const uint32_t t = temp(8);
      emit(set_.integer(Op::kSub, Type::kU64, Mod::kUnknown, false), t, a, constant(8, window));
      emit(set_.setp(Type::kU64, Mod::kLt, false), d, t, constant(8, kWindowBytes));
      return;
    }
    default:
      refuse("this state space isn't known");
  }
}

}  // namespace gpupool::simgpu::exec
