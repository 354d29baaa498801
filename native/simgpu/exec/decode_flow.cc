// Branches, calls, barriers and instructions between lanes.
#include <algorithm>

#include "simgpu/exec/decoder.h"
#include "simgpu/exec/strict.h"

namespace gpupool::simgpu::exec {

using ptx::kNoIndex;
using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::SymbolKind;
using ptx::Type;

namespace {

// How a value of this type lies in parameter memory and in its row.
struct Piece {
  Type type;
  uint32_t width;
};
Piece piece_of(Type t) {
  if (t == Type::kPred) return {Type::kB32, 4};
  const uint32_t w = std::max<uint32_t>(2, ptx::bytes_of(t));
  return {w == 2 ? Type::kB16 : w == 4 ? Type::kB32 : w == 8 ? Type::kB64 : Type::kB128, w};
}

}  // namespace

void Decoder::bra(Modifiers& m) {
  m.take(Mod::kUni);
  count(1, 1);
  const ptx::Operand& to = op(0);
  if (to.kind != OperandKind::kLabel) refuse("a label is wanted");
  const bool guarded = current_->guard != kNoIndex;
  const uint32_t p = guarded ? use(current_->guard) : 0;
  unguarded_ = true;
  fixups_.emplace_back(static_cast<uint32_t>(code_->instructions.size()), to.index);
  emit(set_.control(Op::kBra, guarded ? Mod::kUnknown : Mod::kUni, current_->guard_negated), 0, p);
}

void Decoder::brx(Modifiers& m) {
  if (!m.take(Mod::kIdx)) refuse("this branch isn't known");
  m.take(Mod::kUni);
  count(2, 2);
  if (op(1).kind != OperandKind::kTable) refuse("a branch table is wanted");
  const uint32_t a = source(op(0), Type::kU32);
  emit_control(set_.control(Op::kBrx, Mod::kUnknown, false), a).target =
      static_cast<int32_t>(op(1).index);
}

void Decoder::prologue() {
  index_ = 0;
  start_stack();
  if (function_.entry) return;
  for (size_t k = 0; k < function_.parameters.size(); ++k) {
    if (k >= body_.parameter_registers.size() || body_.parameter_registers[k] == kNoIndex) continue;
    const uint32_t reg = body_.parameter_registers[k];
    const Piece p = piece_of(body_.registers[reg]);
    Instruction& i =
        emit(set_.load(Access::kLocal, p.type, p.width, false, false), define(reg), frame_base());
    i.immediate = places_.parameters[k];
  }
}

void Decoder::ret(Modifiers& m) {
  m.take(Mod::kUni);
  branch_around();
  if (!function_.entry) {
    for (size_t k = 0; k < function_.returns.size(); ++k) {
      if (k >= body_.return_registers.size() || body_.return_registers[k] == kNoIndex) continue;
      const uint32_t reg = body_.return_registers[k];
      const Piece p = piece_of(body_.registers[reg]);
      Instruction& i =
          emit(set_.store(Access::kLocal, p.type, p.width, false), 0, frame_base(), use(reg));
      i.immediate = places_.returns[k];
    }
  }
  emit(set_.control(Op::kRet, Mod::kUnknown, false));
}

uint32_t Decoder::anonymous_slot(uint32_t bytes) {
  const uint32_t at = frame_end_;
  frame_end_ += (bytes + kGranule - 1) / kGranule * kGranule;
  return at;
}

uint32_t Decoder::frame_place(const ptx::Operand& o, uint32_t* bytes) {
  switch (o.symbol) {
    case SymbolKind::kLocal: {
      const ptx::LocalVariable& v = body_.locals[o.index];
      if (v.space != ptx::Space::kParam) refuse("only .param variables can be passed");
      *bytes = static_cast<uint32_t>(v.bytes);
      return param_place_ + v.offset;
    }
    case SymbolKind::kParameter:
      if (function_.entry) refuse("a kernel's parameter can't be passed on");
      *bytes = static_cast<uint32_t>(function_.parameters[o.index].bytes);
      return places_.parameters[o.index];
    case SymbolKind::kReturn:
      *bytes = static_cast<uint32_t>(function_.returns[o.index].bytes);
      return places_.returns[o.index];
    default:
      refuse("this can't be passed");
  }
}

void Decoder::call(Modifiers& m) {
  m.take(Mod::kUni);
  count(4, 4);
  branch_around();
  const ptx::Operand& results = op(0);
  const ptx::Operand& callee = op(1);
  const ptx::Operand& arguments = op(2);
  const ptx::Operand& how = op(3);
  CallSite site;
  const std::vector<ptx::Parameter>* returns = nullptr;
  const std::vector<ptx::Parameter>* parameters = nullptr;
  uint32_t pointer = 0;
  if (callee.kind == OperandKind::kSymbol && callee.symbol == SymbolKind::kFunction) {
    const ptx::Function& f = program_.function(callee.index);
    site.function = callee.index;
    site.builtin = f.builtin;
    if (f.builtin == ptx::Builtin::kOther)
      refuse("this function of the device runtime isn't known");
    returns = &f.returns;
    parameters = &f.parameters;
  } else if (callee.kind == OperandKind::kRegister) {
    pointer = widened(use(callee.index));
    if (how.kind == OperandKind::kPrototype) {
      returns = &body_.prototypes[how.index].returns;
      parameters = &body_.prototypes[how.index].parameters;
    } else if (how.kind == OperandKind::kTable && !body_.call_tables[how.index].empty()) {
      site.targets = body_.call_tables[how.index];
      const ptx::Function& f = program_.function(site.targets[0]);
      returns = &f.returns;
      parameters = &f.parameters;
    } else {
      refuse("an indirect call without a prototype");
    }
  } else {
    refuse("this can't be called");
  }
  const ParameterPlaces places = place_parameters(*returns, *parameters);
  site.parameter_bytes = places.bytes;
  const auto args = body_.elements_of(arguments), rets = body_.elements_of(results);
  if (args.size() != parameters->size())
    refuse("the number of arguments differs from the function's");
  // A unit may have declared the function with a result that its definition elsewhere doesn't have,
  // which linkers don't mind; the result is then undefined.
  const size_t result_count = std::min(rets.size(), returns->size());
  for (size_t k = 0; k < args.size(); ++k) {
    const ptx::Parameter& p = (*parameters)[k];
    ParameterCopy copy;
    copy.callee = places.parameters[k];
    if (args[k].kind == OperandKind::kSymbol) {
      copy.caller = frame_place(args[k], &copy.bytes);
      if (!p.unsized && copy.bytes > p.bytes) copy.bytes = static_cast<uint32_t>(p.bytes);
    } else {
      const Piece piece = piece_of(p.type);
      copy.bytes = piece.width;
      copy.caller = anonymous_slot(piece.width);
      uint32_t row;
      if (p.type == Type::kPred)
        row = predicate(args[k]);
      else
        row = source_width(args[k], piece.width, p.type);
      Instruction& i =
          emit(set_.store(Access::kLocal, piece.type, piece.width, false), 0, frame_base(), row);
      i.immediate = copy.caller;
    }
    site.arguments.push_back(copy);
  }
  std::vector<std::pair<size_t, uint32_t>> registers;  // results that go to registers: slot
  for (size_t k = 0; k < result_count; ++k) {
    const ptx::Parameter& p = (*returns)[k];
    ParameterCopy copy;
    copy.callee = places.returns[k];
    if (rets[k].kind == OperandKind::kSymbol) {
      copy.caller = frame_place(rets[k], &copy.bytes);
      if (copy.bytes > p.bytes) copy.bytes = static_cast<uint32_t>(p.bytes);
    } else if (rets[k].kind == OperandKind::kSink) {
      continue;
    } else {
      const Piece piece = piece_of(p.type);
      copy.bytes = piece.width;
      copy.caller = anonymous_slot(piece.width);
      registers.emplace_back(k, copy.caller);
    }
    site.results.push_back(copy);
  }
  const int32_t index = static_cast<int32_t>(code_->calls.size());
  code_->calls.push_back(std::move(site));
  emit(set_.control(Op::kCall, Mod::kUnknown, false), 0, pointer, stack_).target = index;
  for (const auto& [k, slot] : registers) {
    const ptx::Parameter& p = (*returns)[k];
    const Piece piece = piece_of(p.type);
    const uint32_t row =
        p.type == Type::kPred ? target_predicate(rets[k]) : target(rets[k], piece.width);
    Instruction& i =
        emit(set_.load(Access::kLocal, piece.type, piece.width, false, false), row, frame_base());
    i.immediate = slot;
  }
}

void Decoder::barrier(Modifiers& m) {
  m.take(Mod::kCta);
  if (m.take(Mod::kWarp)) {
    if (!m.take(Mod::kSync)) refuse("this barrier isn't known");
    count(1, 1);
    branch_around();
    const uint32_t members = source(op(0), Type::kB32);
    check_members(members);
    emit(set_.control(Op::kBar, Mod::kWarp, false), 0, members);
    return;
  }
  if (m.take(Mod::kCluster)) refuse("clusters aren't known");
  const Mod kind = m.take_any({Mod::kSync, Mod::kArrive, Mod::kRed});
  m.take(Mod::kAligned);
  const size_t n = current_->operand_count;
  branch_around();
  if (kind == Mod::kSync) {
    count(1, 2);
    const uint32_t id = source(op(0), Type::kU32), threads = n > 1 ? source(op(1), Type::kU32) : 0;
    emit(set_.control(Op::kBar, kind, false), 0, id, threads);
  } else if (kind == Mod::kArrive) {
    count(2, 2);
    const uint32_t id = source(op(0), Type::kU32), threads = source(op(1), Type::kU32);
    emit(set_.control(Op::kBar, kind, false), 0, id, threads);
  } else if (kind == Mod::kRed) {
    const Mod o = m.take_any({Mod::kPopc, Mod::kAnd, Mod::kOr});
    const Type t = m.take_type();
    count(3, 4);
    const uint32_t id = source(op(1), Type::kU32), threads = n > 3 ? source(op(2), Type::kU32) : 0;
    const uint32_t p = predicate(op(n - 1));
    if ((o == Mod::kPopc) != (t == Type::kU32) || (o != Mod::kPopc && t != Type::kPred))
      refuse("the type isn't known here");
    const uint32_t d = t == Type::kPred ? target_predicate(op(0)) : target(op(0), 4);
    emit(set_.control(Op::kBar, o, false), d, id, threads, p);
  } else {
    refuse("this barrier isn't known");
  }
}

void Decoder::check_members(uint32_t members) {
  if (kernel_.strict && members) emit(exec::check_members, 0, members);
}

void Decoder::warp(Modifiers& m) {
  const Op o = current_->op;
  if (o == Op::kActivemask) {
    count(1, 1);
    m.take_type();
    branch_around();
    emit(set_.warp(o, Mod::kUnknown, Type::kB32), target(op(0), 4));
    return;
  }
  const bool sync = m.take(Mod::kSync);
  branch_around();
  const Type none = Type::kNone;
  if (o == Op::kShfl) {
    const Mod mode = m.take_any({Mod::kUp, Mod::kDown, Mod::kBfly, Mod::kIdx});
    m.take_type();
    count(sync ? 5 : 4, sync ? 5 : 4);
    const uint32_t a = source(op(1), Type::kB32), b = source(op(2), Type::kB32),
                   c = source(op(3), Type::kB32);
    const uint32_t members = sync ? source(op(4), Type::kB32) : 0;
    uint32_t d, p = 0;
    if (op(0).kind == OperandKind::kPair) {
      const auto two = body_.elements_of(op(0));
      d = target(two[0], 4);
      p = target_predicate(two[1]);
    } else {
      d = target(op(0), 4);
    }
    check_members(members);
    if (kernel_.strict && members) {
      const ShuffleMode how = mode == Mod::kUp     ? ShuffleMode::kUp
                              : mode == Mod::kDown ? ShuffleMode::kDown
                              : mode == Mod::kBfly ? ShuffleMode::kButterfly
                                                   : ShuffleMode::kIndex;
      emit(check_shuffle, 0, b, c, members).target = static_cast<int32_t>(how);
    }
    emit(set_.warp(o, mode, sync ? Type::kB32 : none), d, a, b, c, p).guard = members;
    return;
  }
  if (o == Op::kVote) {
    const Mod mode = m.take_any({Mod::kAll, Mod::kAny, Mod::kUni, Mod::kBallot});
    const Type t = m.take_type();
    count(sync ? 3 : 2, sync ? 3 : 2);
    if ((mode == Mod::kBallot) != (t == Type::kB32)) refuse("the type isn't known here");
    const uint32_t a = predicate(op(1)), members = sync ? source(op(2), Type::kB32) : 0;
    const uint32_t d = mode == Mod::kBallot ? target(op(0), 4) : target_predicate(op(0));
    check_members(members);
    emit(set_.warp(o, mode, sync ? Type::kB32 : none), d, a).guard = members;
    return;
  }
  if (!sync) refuse(".sync is missing");
  if (o == Op::kMatch) {
    const Mod mode = m.take_any({Mod::kAny, Mod::kAll});
    const Type t = m.take_type();
    count(3, 3);
    const uint32_t a = source(op(1), t), members = source(op(2), Type::kB32);
    uint32_t d, p = 0;
    if (op(0).kind == OperandKind::kPair) {
      const auto two = body_.elements_of(op(0));
      d = target(two[0], 4);
      p = target_predicate(two[1]);
    } else {
      d = target(op(0), 4);
    }
    check_members(members);
    Instruction& i = emit(set_.warp(o, mode, t), d, a, 0, 0, p);
    i.guard = members;
    i.count = static_cast<uint16_t>(ptx::bytes_of(t) / 4);
    return;
  }
  const Mod mode = m.take_any({Mod::kAdd, Mod::kMin, Mod::kMax, Mod::kAnd, Mod::kOr, Mod::kXor});
  const Type t = m.take_type();
  count(3, 3);
  const uint32_t a = source(op(1), t), members = source(op(2), Type::kB32);
  check_members(members);
  emit(set_.warp(o, mode, t), target(op(0), 4), a).guard = members;
}

void Decoder::fence(Modifiers& m) {
  if (m.take(Mod::kProxy)) {  // memory has one way here
    if (m.take(Mod::kAsync)) {
      needs(90);
      m.take_space();
    } else if (!m.take(Mod::kAlias)) {
      refuse("this proxy isn't known");
    }
  } else if (current_->op == Op::kMembar) {
    m.take_any({Mod::kCta, Mod::kGl, Mod::kSys});
  } else {
    m.take_any({Mod::kSc, Mod::kAcqRel, Mod::kAcquire, Mod::kRelease});
    m.take_any({Mod::kCta, Mod::kCluster, Mod::kGpu, Mod::kSys});
  }
  count(0, 0);
  emit(set_.control(Op::kMembar, Mod::kUnknown, false));
}

void Decoder::nanosleep(Modifiers& m) {
  m.take_type();
  count(1, 1);
  branch_around();
  emit(set_.control(Op::kNanosleep, Mod::kUnknown, false), 0, source(op(0), Type::kU32));
}

}  // namespace gpupool::simgpu::exec
