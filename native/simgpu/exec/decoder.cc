#include "simgpu/exec/decoder.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace gpupool::simgpu::exec {

using ptx::kNoIndex;
using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Type;

// clang 14, with which only the fuzz targets are built, doesn't know the level by its name.
bool processor_has_v3() {
#ifdef __clang__
  return false;
#else
  return __builtin_cpu_supports("x86-64-v3");
#endif
}

const HandlerSet& handlers() {
  // GPUPOOL_SIMGPU_ISA=baseline: for tests of the level that newer processors never choose.
  static const HandlerSet& set = []() -> const HandlerSet& {
    const char* level = std::getenv("GPUPOOL_SIMGPU_ISA");
    const bool baseline = level && std::string_view(level) == "baseline";
    return processor_has_v3() && !baseline ? v3_handlers() : baseline_handlers();
  }();
  return set;
}

// ---------------------------------------------------------------- modifiers

bool Modifiers::take(Mod mod) {
  for (size_t k = 0; k < mods_.size(); ++k) {
    if (mods_[k] == mod && !(taken_ >> k & 1)) {
      taken_ |= 1u << k;
      return true;
    }
  }
  return false;
}
Mod Modifiers::take_any(std::initializer_list<Mod> choices) {
  for (Mod m : choices)
    if (take(m)) return m;
  return Mod::kUnknown;
}
Type Modifiers::take_type() {
  for (size_t k = 0; k < mods_.size(); ++k) {
    const Type t = ptx::type_of(mods_[k]);
    if (t != Type::kNone && !(taken_ >> k & 1)) {
      taken_ |= 1u << k;
      return t;
    }
  }
  return Type::kNone;
}
ptx::Space Modifiers::take_space() {
  for (size_t k = 0; k < mods_.size(); ++k) {
    const ptx::Space s = ptx::space_of(mods_[k]);
    if (s != ptx::Space::kNone && !(taken_ >> k & 1)) {
      taken_ |= 1u << k;
      return s;
    }
  }
  return ptx::Space::kNone;
}
const char* Modifiers::left() const {
  for (size_t k = 0; k < mods_.size(); ++k)
    if (!(taken_ >> k & 1)) return ptx::text_of(mods_[k]);
  return nullptr;
}

// ---------------------------------------------------------------- the decoder

Decoder::Decoder(KernelCode& kernel, uint32_t function, const ptx::FunctionBody& body)
    : kernel_(kernel),
      program_(*kernel.program),
      function_(program_.function(function)),
      body_(body),
      set_(handlers()),
      code_(std::make_unique<Code>()) {
  code_->name = function_.name;
  code_->function = function;
  code_->body = &body;
  code_->kernel = &kernel;
}

void Decoder::refuse(const std::string& what) const {
  std::string s = what;
  if (current_) {
    s = program_.place(code_->function, current_->line) + ": " + what + ": `" +
        body_.statement(*current_) + "` in " + function_.name;
  } else {
    s += ": " + function_.name;
  }
  throw Refused{s};
}

void Decoder::finish_modifiers(const Modifiers& m) const {
  if (const char* left = m.left())
    refuse(std::string("the simulated GPU doesn't know .") + left + " here");
}

std::unique_ptr<Code> Decoder::decode() {
  const size_t n = body_.instructions.size();
  Row none;
  rows_.push_back(none);
  for (uint32_t r = 0; r < body_.registers.size(); ++r) add_row(register_width(r));
  uses_.resize(n + 1);
  defines_.resize(n + 1);
  starts_.resize(n + 1);

  auto up = [](uint32_t v, uint32_t a) { return (v + a - 1) / a * a; };
  uint32_t at = 0;
  if (!function_.entry) {
    places_ = place_parameters(function_.returns, function_.parameters);
    code_->parameter_bytes = at = places_.bytes;
  }
  local_place_ = up(at, std::max<uint32_t>(kGranule, body_.local_alignment));
  param_place_ =
      up(local_place_ + body_.local_bytes, std::max<uint32_t>(kGranule, body_.param_alignment));
  frame_end_ = up(param_place_ + body_.param_bytes, kGranule);
  constexpr uint64_t kMaxFrameBytes = 16 << 20;  // more than any stack; and no sum overflows
  const uint64_t alignments = uint64_t{body_.local_alignment} + body_.param_alignment;
  if (at + alignments + body_.local_bytes + body_.param_bytes > kMaxFrameBytes)
    refuse("its local memory is too large");
  code_->local_bytes = body_.local_bytes;

  code_->instructions.reserve(n + n / 4 + 8);
  prologue();
  for (index_ = 0; index_ < n; ++index_) {
    current_ = &body_.instructions[index_];
    starts_[index_] = static_cast<uint32_t>(code_->instructions.size());
    unguarded_ = false;
    one();
    for (uint32_t t : temps_used_) temps_free_[rows_[t].width].push_back(t);
    temps_used_.clear();
  }
  current_ = nullptr;
  starts_[n] = static_cast<uint32_t>(code_->instructions.size());
  index_ = static_cast<uint32_t>(n);
  // Running off the end is a return.
  static const ptx::Instruction kEnd{};
  current_ = &kEnd;
  Modifiers no_modifiers{{}};
  ret(no_modifiers);
  current_ = nullptr;
  for (Instruction& i : code_->instructions)
    if (i.source >= n) i.source = n ? static_cast<uint32_t>(n - 1) : 0;

  for (const auto& [from, to] : fixups_)
    code_->instructions[from].target =
        static_cast<int32_t>(starts_[to]) - static_cast<int32_t>(from);
  for (const auto& table : body_.branch_tables) {
    std::vector<int32_t> t;
    for (uint32_t x : table) t.push_back(static_cast<int32_t>(starts_[x]));
    code_->branch_tables.push_back(std::move(t));
  }
  code_->frame_bytes = up(frame_end_, kGranule);
  analyse();
  list_events();
  use_patterns();
  find_chains();
  find_straight();
  place_rows();
  finish_chains();
  find_conflicts();
  return std::move(code_);
}

Instruction& Decoder::emit(Handler handler, uint32_t d, uint32_t a, uint32_t b, uint32_t c,
                           uint32_t e) {
  if (!handler) refuse("the simulated GPU doesn't carry out this form");
  Instruction i;
  i.run = handler;
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.e = e;
  if (current_) {
    i.source = index_;
    if (current_->guard != kNoIndex && !unguarded_) {
      i.inner = handler;
      i.run = set_.guarded[current_->guard_negated];
      i.guard = use(current_->guard);
    }
  }
  i.slot = static_cast<uint8_t>(next_slot_++ % kRangeSlots);
  code_->instructions.push_back(i);
  return code_->instructions.back();
}

void Decoder::branch_around() {
  if (current_->guard == kNoIndex || unguarded_) return;
  unguarded_ = true;
  const uint32_t p = use(current_->guard);
  fixups_.emplace_back(static_cast<uint32_t>(code_->instructions.size()), index_ + 1);
  emit(set_.control(Op::kBra, Mod::kUnknown, !current_->guard_negated), 0, p);
}

Instruction& Decoder::emit_control(Handler handler, uint32_t a, uint32_t b, uint32_t c) {
  branch_around();
  return emit(handler, 0, a, b, c);
}

// ---------------------------------------------------------------- operands

const ptx::Operand& Decoder::op(size_t k) const {
  const auto operands = body_.operands_of(*current_);
  if (k >= operands.size()) refuse("too few operands");
  return operands[k];
}
void Decoder::count(size_t least, size_t most) const {
  const size_t n = current_->operand_count;
  if (n < least || n > most) refuse("the number of operands isn't right");
}

uint64_t Decoder::literal(const ptx::Operand& o, Type type, uint32_t width) const {
  switch (o.kind) {
    case OperandKind::kImmediate:
      if (type == Type::kF32 || type == Type::kF64) refuse("an integer where a float is wanted");
      return o.bits;
    case OperandKind::kFloat32: {
      if (type == Type::kF64 || (type == Type::kB64 && width == 8)) {
        float f;
        const uint32_t u = static_cast<uint32_t>(o.bits);
        __builtin_memcpy(&f, &u, 4);
        const double d = f;
        uint64_t bits;
        __builtin_memcpy(&bits, &d, 8);
        return bits;
      }
      if (width != 4) refuse("a float literal doesn't fit the type");
      return o.bits;
    }
    case OperandKind::kFloat64: {
      if (width == 8) return o.bits;
      if (width != 4) refuse("a float literal doesn't fit the type");
      double d;
      __builtin_memcpy(&d, &o.bits, 8);
      const float f = static_cast<float>(d);
      uint32_t u;
      __builtin_memcpy(&u, &f, 4);
      return u;
    }
    default:
      refuse("a literal is wanted");
  }
}

uint32_t Decoder::source(const ptx::Operand& o, Type type) {
  if (type == Type::kPred) return predicate(o);
  return source_width(o, std::max<uint32_t>(2, ptx::bytes_of(type)), type);
}

uint32_t Decoder::source_width(const ptx::Operand& o, uint32_t width, Type type) {
  switch (o.kind) {
    case OperandKind::kRegister: {
      if (o.selector != ptx::Selector::kNone) refuse("a byte selector isn't known here");
      if (o.negated) refuse("a negated operand isn't known here");
      if (body_.registers[o.index] == Type::kPred) refuse("a predicate where a number is wanted");
      const uint32_t have = register_width(o.index);
      if (have != width) refuse("a register's size differs from the type's");
      return use(o.index);
    }
    case OperandKind::kImmediate:
    case OperandKind::kFloat32:
    case OperandKind::kFloat64:
      return constant(width, literal(o, type, width));
    case OperandKind::kSpecial:
      return special(static_cast<ptx::SpecialRegister>(o.index), o.component, width);
    default:
      refuse("this kind of operand isn't known here");
  }
}

uint32_t Decoder::predicate(const ptx::Operand& o) {
  if (o.kind == OperandKind::kImmediate) {
    const bool set = (o.bits != 0) != o.negated;
    return constant(4, set ? 0xffffffffu : 0);
  }
  if (o.kind != OperandKind::kRegister || body_.registers[o.index] != Type::kPred)
    refuse("a predicate is wanted");
  const uint32_t row = use(o.index);
  if (!o.negated) return row;
  const uint32_t t = temp(4);
  emit(set_.predicate(Op::kNot), t, row);
  return t;
}

uint32_t Decoder::target(const ptx::Operand& o, uint32_t width) {
  if (o.kind == OperandKind::kSink) return temp(width);
  if (o.kind != OperandKind::kRegister) refuse("a register is wanted as the result");
  if (o.selector != ptx::Selector::kNone || o.negated) refuse("a selector isn't known here");
  if (body_.registers[o.index] == Type::kPred) refuse("a predicate can't take this result");
  if (register_width(o.index) != width)
    refuse("the result register's size differs from the type's");
  return define(o.index);
}
uint32_t Decoder::target_predicate(const ptx::Operand& o) {
  if (o.kind == OperandKind::kSink) return temp(4);
  if (o.kind != OperandKind::kRegister || body_.registers[o.index] != Type::kPred || o.negated)
    refuse("a predicate is wanted as the result");
  return define(o.index);
}

uint32_t Decoder::widened(uint32_t row) {
  if (width_of_row(row) == 8) return row;
  const uint32_t t = temp(8);
  emit(set_.extend(width_of_row(row), Type::kU32, 8), t, row);
  return t;
}

// ---------------------------------------------------------------- one instruction

void Decoder::one() {
  Modifiers m(current_->mods());
  switch (current_->op) {
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kMad:
    case Op::kFma:
      arithmetic(m);
      break;
    case Op::kAddc:
    case Op::kSubc:
    case Op::kMadc:
      carry(m);
      break;
    case Op::kDiv:
    case Op::kRem:
      divide(m);
      break;
    case Op::kRcp:
    case Op::kSqrt:
    case Op::kRsqrt:
    case Op::kEx2:
    case Op::kLg2:
    case Op::kSin:
    case Op::kCos:
    case Op::kTanh:
      math(m);
      break;
    case Op::kMin:
    case Op::kMax:
      min_max(m);
      break;
    case Op::kNeg:
    case Op::kAbs:
      neg_abs(m);
      break;
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
    case Op::kNot:
    case Op::kCnot:
      logic(m);
      break;
    case Op::kShl:
    case Op::kShr:
      shift(m);
      break;
    case Op::kPopc:
    case Op::kClz:
    case Op::kBrev:
    case Op::kBfind:
    case Op::kBfe:
    case Op::kBfi:
    case Op::kBmsk:
    case Op::kSzext:
      bit_field(m);
      break;
    case Op::kShf:
    case Op::kPrmt:
    case Op::kLop3:
    case Op::kDp4a:
    case Op::kDp2a:
    case Op::kSad:
    case Op::kMul24:
    case Op::kMad24:
    case Op::kFns:
      three_words(m);
      break;
    case Op::kVadd:
    case Op::kVadd2:
    case Op::kVadd4:
    case Op::kVsub:
    case Op::kVsub2:
    case Op::kVsub4:
    case Op::kVabsdiff:
    case Op::kVabsdiff2:
    case Op::kVabsdiff4:
    case Op::kVavrg2:
    case Op::kVavrg4:
    case Op::kVmin:
    case Op::kVmin2:
    case Op::kVmin4:
    case Op::kVmax:
    case Op::kVmax2:
    case Op::kVmax4:
    case Op::kVset:
    case Op::kVset2:
    case Op::kVset4:
    case Op::kVshl:
    case Op::kVshr:
    case Op::kVmad:
      video(m);
      break;
    case Op::kAlloca:
    case Op::kStacksave:
    case Op::kStackrestore:
      stack(m);
      break;
    case Op::kSetp:
      setp(m);
      break;
    case Op::kSet:
      set(m);
      break;
    case Op::kSelp:
    case Op::kSlct:
      select(m);
      break;
    case Op::kTestp:
      testp(m);
      break;
    case Op::kCopysign:
      copysign(m);
      break;
    case Op::kMov:
      mov(m);
      break;
    case Op::kCvt:
      cvt(m);
      break;
    case Op::kCvta:
      cvta(m);
      break;
    case Op::kIsspacep:
      isspacep(m);
      break;
    case Op::kLd:
    case Op::kLdu:
      load(m);
      break;
    case Op::kSt:
      store(m);
      break;
    case Op::kAtom:
      atom(m, true);
      break;
    case Op::kRed:
      atom(m, false);
      break;
    case Op::kCp:
      cp_async(m);
      break;
    case Op::kMbarrier:
      mbarrier(m);
      break;
    case Op::kPrefetch:
    case Op::kPrefetchu:
    case Op::kDiscard:
    case Op::kApplypriority:
    case Op::kPmevent:
      prefetch(m);
      break;
    case Op::kBra:
      bra(m);
      break;
    case Op::kBrx:
      brx(m);
      break;
    case Op::kCall:
      call(m);
      break;
    case Op::kRet:
      ret(m);
      break;
    case Op::kExit:
      emit_control(set_.control(Op::kExit, Mod::kUnknown, false));
      break;
    case Op::kTrap:
      emit_control(set_.control(Op::kTrap, Mod::kUnknown, false));
      break;
    case Op::kBrkpt:
      emit_control(set_.control(Op::kBrkpt, Mod::kUnknown, false));
      break;
    case Op::kBar:
    case Op::kBarrier:
      barrier(m);
      break;
    case Op::kShfl:
    case Op::kVote:
    case Op::kMatch:
    case Op::kRedux:
    case Op::kActivemask:
      warp(m);
      break;
    case Op::kMembar:
    case Op::kFence:
      fence(m);
      break;
    case Op::kNanosleep:
      nanosleep(m);
      break;
    default:
      refuse("the simulated GPU doesn't carry out this instruction");
  }
  finish_modifiers(m);
}

std::unique_ptr<Code> decode_function(KernelCode& kernel, uint32_t function, std::string* why) {
  const ptx::FunctionBody* body = kernel.program->body(function, why);
  if (!body) {
    if (why->empty())
      *why = "the function " + kernel.program->function(function).name + " has no body";
    return nullptr;
  }
  try {
    return Decoder(kernel, function, *body).decode();
  } catch (const Refused& r) {
    *why = r.why;
    return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec
