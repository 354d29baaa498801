// The decoder's last pass: faster forms of frequent instructions. Every instruction keeps its place
// and its general handler, so the fast forms can leave whatever is unusual to those, and faults are
// reported as ever.
#include <algorithm>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::kNoIndex;
using ptx::Mod;
using ptx::Op;
using ptx::Type;

namespace {

enum class Writes { kNothing, kResult, kAnything };

// Which of an instruction's rows d, b, c, e it may write; a is never written.
Writes writes_of(Op op) {
  switch (op) {
    case Op::kSt:
    case Op::kRed:
    case Op::kBra:
    case Op::kRet:
    case Op::kExit:
    case Op::kTrap:
    case Op::kMembar:
    case Op::kFence:
    case Op::kNanosleep:
      return Writes::kNothing;
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kMad:
    case Op::kFma:
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
    case Op::kNot:
    case Op::kShl:
    case Op::kShr:
    case Op::kMov:
    case Op::kCvt:
    case Op::kCvta:
    case Op::kSelp:
    case Op::kMin:
    case Op::kMax:
    case Op::kDiv:
    case Op::kRem:
    case Op::kSetp:
    case Op::kMul24:
    case Op::kMad24:
    case Op::kLd:
    case Op::kLdu:
    case Op::kAtom:
      return Writes::kResult;
    default:
      return Writes::kAnything;
  }
}

// Instructions at which lanes never wait for others: paths stop only at the start of a basic block
// or at an instruction that isn't one of these.
bool is_straight(const ptx::Instruction& i, std::span<const ptx::Operand> operands) {
  for (const ptx::Operand& o : operands)
    if (o.kind == ptx::OperandKind::kSpecial) return false;  // clocks end slices
  switch (i.op) {
    case Op::kLd:
    case Op::kLdu:
    case Op::kSt:
      return !i.has(Mod::kVolatile) && !i.has(Mod::kRelaxed) && !i.has(Mod::kAcquire);
    case Op::kRet:
    case Op::kExit:
      return i.guard == kNoIndex;
    case Op::kBra:
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kMad:
    case Op::kFma:
    case Op::kAddc:
    case Op::kSubc:
    case Op::kMadc:
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
    case Op::kNot:
    case Op::kShl:
    case Op::kShr:
    case Op::kMov:
    case Op::kCvt:
    case Op::kCvta:
    case Op::kSelp:
    case Op::kMin:
    case Op::kMax:
    case Op::kNeg:
    case Op::kAbs:
    case Op::kDiv:
    case Op::kRem:
    case Op::kSetp:
    case Op::kSet:
    case Op::kMul24:
    case Op::kMad24:
    case Op::kRcp:
    case Op::kSqrt:
    case Op::kRsqrt:
    case Op::kEx2:
    case Op::kLg2:
    case Op::kSin:
    case Op::kCos:
    case Op::kTanh:
    case Op::kPopc:
    case Op::kClz:
    case Op::kBrev:
    case Op::kBfind:
    case Op::kBfe:
    case Op::kBfi:
    case Op::kPrmt:
    case Op::kLop3:
    case Op::kShf:
    case Op::kTestp:
    case Op::kCopysign:
      return true;
    default:
      return false;
  }
}

// Arithmetic whose result doesn't depend on a NaN's bits.
bool ignores_nan_bits(const ptx::Instruction& i) {
  for (const Mod m : i.mods()) {
    const Type t = ptx::type_of(m);
    if (t != Type::kNone && t != Type::kF32) return false;
  }
  switch (i.op) {
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kFma:
    case Op::kMad:
    case Op::kSetp:
    case Op::kMin:
    case Op::kMax:
      return true;
    default:
      return false;
  }
}

const FastSet& fast_handlers() {
  return &handlers() == &v3_handlers() ? v3_fast() : baseline_fast();
}

}  // namespace

void Decoder::note_memory(Access access, Type type, uint32_t width, bool store) {
  if (current_->guard != kNoIndex) return;
  memory_forms_.push_back(
      {static_cast<uint32_t>(code_->instructions.size() - 1), access, type, width, store});
}

void Decoder::use_patterns() {
  const FastSet& fast = fast_handlers();
  std::vector<Instruction>& code = code_->instructions;
  std::map<uint32_t, uint32_t> patterns;  // address row -> row of its pattern
  for (const MemoryForm& m : memory_forms_) {
    const Handler h =
        m.store ? fast.store(m.access, m.type, m.width) : fast.load(m.access, m.type, m.width);
    if (h) patterns.emplace(code[m.at].a, 0);
  }
  // A pattern must end whenever its row is written: rows whose writers can't be made to do so have
  // none.
  std::vector<bool> prologue(code.size(), false);
  for (size_t k = 0; k < starts_[0] && k < code.size(); ++k) prologue[k] = true;
  auto writer = [&](size_t k) {
    if (prologue[k]) return Writes::kResult;
    if (body_.instructions.empty()) return Writes::kNothing;  // the return at the end
    return writes_of(body_.instructions[code[k].source].op);
  };
  auto drop = [&](uint32_t row) {
    if (row) patterns.erase(row);
  };
  for (size_t k = 0; k < code.size(); ++k) {
    const Instruction& i = code[k];
    const Writes w = writer(k);
    if (w == Writes::kNothing) continue;
    // Vectors and carries have results in the other rows.
    if (w == Writes::kResult && i.count == 1 && i.e == 0) continue;
    drop(i.d), drop(i.b), drop(i.c), drop(i.e);
  }
  if (patterns.empty()) return;
  for (auto& [row, pattern] : patterns) {
    pattern = add_row(2);
    if (row == frame_base_) frame_pattern_ = pattern;
  }
  for (size_t k = 0; k < code.size(); ++k) {
    Instruction& i = code[k];
    if (writer(k) == Writes::kNothing || i.d == 0) continue;
    const auto p = patterns.find(i.d);
    if (p == patterns.end()) continue;
    i.e = p->second;
    if (i.run == set_.guarded[0] || i.run == set_.guarded[1]) {
      i.run = fast.forget_guarded[i.run == set_.guarded[1]];
    } else {
      i.inner = i.run;
      i.run = fast.forget;
    }
  }
  for (MemoryForm& m : memory_forms_) {
    Instruction& i = code[m.at];
    const auto p = patterns.find(i.a);
    const Handler h =
        m.store ? fast.store(m.access, m.type, m.width) : fast.load(m.access, m.type, m.width);
    if (!h || p == patterns.end()) {
      m.type = Type::kNone;  // no fast form
      continue;
    }
    if (i.run != fast.forget) i.inner = i.run;
    i.run = h;
    i.guard = p->second;
  }
}

void Decoder::find_chains() {
  const FastSet& fast = fast_handlers();
  std::vector<Instruction>& code = code_->instructions;
  std::vector<const MemoryForm*> form(code.size(), nullptr);
  for (const MemoryForm& m : memory_forms_)
    if (!m.store && m.type != Type::kNone && code[m.at].e == 0) form[m.at] = &m;
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  auto is_register = [&](uint32_t row) { return row >= 1 && row <= registers; };
  struct Kind {
    Handler fma;
    Type type;
    bool ftz;
  };
  FloatMode ftz_mode;
  ftz_mode.ftz = true;
  const Kind kinds[] = {{set_.floating(Op::kFma, Type::kF32, {}), Type::kF32, false},
                        {set_.floating(Op::kFma, Type::kF32, ftz_mode), Type::kF32, true},
                        {set_.floating(Op::kFma, Type::kF64, {}), Type::kF64, false}};
  // (load, load, fma) at code index k, each a PTX instruction of its own, the products' factors
  // wanted by nobody else.
  auto link_at = [&](size_t k) -> const Kind* {
    if (k + 2 >= code.size() || !form[k] || !form[k + 1]) return nullptr;
    const uint32_t s = code[k].source;
    if (code[k + 1].source != s + 1 || code[k + 2].source != s + 2) return nullptr;
    if (s + 3 >= starts_.size() || starts_[s] != k || starts_[s + 1] != k + 1 ||
        starts_[s + 2] != k + 2 || starts_[s + 3] != k + 3)
      return nullptr;
    if (liveness_.leader[s + 1] || liveness_.leader[s + 2]) return nullptr;
    const Instruction &x = code[k], &y = code[k + 1], &f = code[k + 2];
    const Kind* kind = nullptr;
    for (const Kind& c : kinds)
      if (c.fma && f.run == c.fma) kind = &c;
    const uint32_t bytes = kind && kind->type == Type::kF64 ? 8 : 4;
    if (!kind || form[k]->width != bytes || form[k + 1]->width != bytes ||
        ptx::bytes_of(form[k]->type) != bytes || ptx::bytes_of(form[k + 1]->type) != bytes)
      return nullptr;
    if (!((f.a == x.d && f.b == y.d) || (f.a == y.d && f.b == x.d)) || x.d == y.d) return nullptr;
    if (f.c == x.d || f.c == y.d || !is_register(x.d) || !is_register(y.d)) return nullptr;
    for (const uint32_t d : {x.d, y.d})
      if (f.d != d && !dead_after(d - 1, s + 2)) return nullptr;
    return kind;
  };
  constexpr int64_t kMost = 1 << 30;
  for (size_t k = 0; k < code.size(); ++k) {
    const Kind* kind = link_at(k);
    if (!kind) continue;
    const Handler h =
        fast.multiply_chain(form[k]->access, form[k + 1]->access, kind->type, kind->ftz);
    if (!h) continue;
    const auto small = [&](size_t j) {
      return std::abs(code[j].immediate) < kMost && std::abs(code[j + 1].immediate) < kMost;
    };
    if (!small(k)) continue;
    const uint32_t bytes = kind->type == Type::kF64 ? 8 : 4;
    size_t count = 1;
    for (; count < 1000; ++count) {
      const size_t j = k + 3 * count;
      const Instruction& before = code[j - 1];
      if (link_at(j) != kind || !small(j)) break;
      if (code[j].a != code[k].a || code[j + 1].a != code[k + 1].a) break;
      if (form[j]->access != form[k]->access || form[j + 1]->access != form[k + 1]->access) break;
      if ((code[j].immediate - code[k].immediate) % bytes ||
          (code[j + 1].immediate - code[k + 1].immediate) % bytes)
        break;
      if (liveness_.leader[code[j].source] || code[j + 2].c != before.d) break;
      // The sum so far must be wanted by the next product alone.
      if (!is_register(before.d) ||
          (code[j + 2].d != before.d && !dead_after(before.d - 1, code[j + 2].source)))
        break;
      if (before.d == code[j].d || before.d == code[j + 1].d) break;
    }
    code[k + 2].inner = code[k].run;  // where the chain can't run as one
    code[k].run = h;
    code[k].count = static_cast<uint16_t>(count);
    chains_.push_back(static_cast<uint32_t>(k));
    k += 3 * count - 1;
  }
}

std::vector<bool> Decoder::block_local_registers() const {
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  const Liveness& live = liveness_;
  // Of a huge function none is found, so that looking does not take for ever.
  constexpr uint64_t kMaxWork = uint64_t{1} << 32;
  if (uint64_t{live.n} * live.words > kMaxWork) return std::vector<bool>(registers, false);
  std::vector<uint64_t> shared(live.words, 0), now(live.words);
  for (uint32_t b = 0; b < live.first.size(); ++b) {
    for (size_t q = 0; q < live.words; ++q) {
      shared[q] |= live.in[b * live.words + q] | live.out[b * live.words + q];
      now[q] = live.out[b * live.words + q];
    }
    const uint32_t end = b + 1 < live.first.size() ? live.first[b + 1] : live.n;
    for (uint32_t k = end; k-- > live.first[b];) {
      const bool waits = k + 1 < live.n && !is_straight(body_.instructions[k],
                                                        body_.operands_of(body_.instructions[k]));
      if (waits)
        for (size_t q = 0; q < live.words; ++q) shared[q] |= now[q];
      for (const uint32_t r : defines_[k]) now[r / 64] &= ~(uint64_t{1} << (r % 64));
      for (const uint32_t r : uses_[k]) now[r / 64] |= uint64_t{1} << (r % 64);
      if (waits)
        for (size_t q = 0; q < live.words; ++q) shared[q] |= now[q];
    }
  }
  std::vector<bool> local(registers);
  for (uint32_t r = 0; r < registers; ++r) local[r] = !((shared[r / 64] >> (r % 64)) & 1);
  return local;
}

std::vector<bool> Decoder::nan_bits_seen() const {
  std::vector<bool> seen(body_.registers.size(), false);
  std::vector<std::vector<uint32_t>> copied_to(body_.registers.size());  // to -> from
  for (uint32_t k = 0; k < liveness_.n; ++k) {
    const bool end = k + 1 == liveness_.n;
    if (!end && ignores_nan_bits(body_.instructions[k])) continue;
    const bool copy =
        !end && (body_.instructions[k].op == Op::kMov || body_.instructions[k].op == Op::kSelp);
    for (const uint32_t r : uses_[k]) {
      if (!copy) seen[r] = true;
      for (const uint32_t d : defines_[k])
        if (copy) copied_to[d].push_back(r);
      if (copy && defines_[k].empty()) seen[r] = true;
    }
  }
  std::vector<uint32_t> pending;
  for (uint32_t r = 0; r < seen.size(); ++r)
    if (seen[r]) pending.push_back(r);
  while (!pending.empty()) {
    const uint32_t to = pending.back();
    pending.pop_back();
    for (const uint32_t from : copied_to[to]) {
      if (!seen[from]) pending.push_back(from);
      seen[from] = true;
    }
  }
  return seen;
}

void Decoder::find_straight() {
  const FastSet& fast = fast_handlers();
  std::vector<Instruction>& code = code_->instructions;
  const std::vector<bool> seen = nan_bits_seen();
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  // Where paths may stop, other than after instructions that aren't among these.
  std::vector<bool> edge(code.size() + 1, false);
  for (uint32_t k = 0; k < liveness_.n; ++k)
    if (liveness_.leader[k]) edge[starts_[k]] = true;
  for (const auto& [from, to] : fixups_) edge[from + 1] = edge[starts_[to]] = true;
  block_local_ = block_local_registers();
  std::unordered_set<uint32_t> constants;
  for (const auto& [key, row] : constants_) constants.insert(row);
  uint32_t held = 0;                // row of the accumulator; 0: nothing known
  Instruction* producer = nullptr;  // of `held`; nullptr: its result must be stored
  size_t chain = 0;
  for (uint32_t k = 0; k < code.size(); ++k) {
    Instruction& i = code[k];
    const bool in_chain = chain < chains_.size() && chains_[chain] == k;
    const bool forgets = i.run == fast.forget;
    const bool raw = i.d >= 1 && i.d <= registers && !seen[i.d - 1];
    const Handler general = forgets ? i.inner : i.run;
    const StraightForms forms = in_chain ? StraightForms{} : fast.forms(general, raw);
    if (!forms.memory || edge[k]) held = 0;
    if (in_chain) {  // its parts have fields of their own meaning
      k += 3u * i.count - 1;
      ++chain;
    }
    if (!forms.memory) continue;
    if (forms.commutative && i.a != held && (i.b == held || constants.contains(i.a)))
      std::swap(i.a, i.b);
    uint8_t kind = forms.memory;
    bool from_held = true;
    const uint32_t uses = (i.a == held) + (i.b == held) + (i.c == held);
    if (held && i.a == held && forms.first_constant && constants.contains(i.b))
      kind = forms.first_constant;
    else if (held && i.a == held && forms.first)
      kind = forms.first;
    else if (held && i.b == held && forms.second)
      kind = forms.second;
    else if (held && i.c == held && forms.third)
      kind = forms.third;
    else
      from_held = false;
    if (!from_held && forms.same && i.a == i.b) kind = forms.same;
    if (!from_held && forms.constant && constants.contains(i.b)) kind = forms.constant;
    if (held && uses) {
      const uint32_t s = i.source;
      const bool last = from_held && uses == 1 && held <= registers && s + 1 < starts_.size() &&
                        starts_[s] == k && starts_[s + 1] == k + 1 &&
                        (i.d == held || dead_after(held - 1, s));
      if (last && producer) producer->immediate = 1;
      producer = nullptr;
    }
    i.inner = general;
    i.run = fast.straight;
    i.kind = edge[k] || forgets ? kStraightEdge : kind;
    i.count = kind;
    if (forms.accumulates) {
      held = i.d;
      producer = &i;
    } else if (i.d == held) {
      held = 0;
    }
  }
}

void Decoder::find_conflicts() {
  const Liveness& live = liveness_;
  std::vector<Instruction>& code = code_->instructions;
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  const uint32_t blocks = static_cast<uint32_t>(live.first.size());
  code_->stops.assign(code.size(), kElsewhere);
  std::unordered_map<uint32_t, uint32_t> wanted;  // row -> places at which it is
  for (uint32_t r = 0; r < registers; ++r)
    wanted[rows_[r + 1].offset] |= block_local_[r] ? 0 : uint32_t{1} << kElsewhere;
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint8_t stop = static_cast<uint8_t>(b * uint64_t{kElsewhere} / blocks);
    code_->stops[starts_[live.first[b]]] = stop;
    for (size_t q = 0; q < live.words; ++q)
      for (uint64_t m = live.in [b * live.words + q]; m; m &= m - 1) {
        const size_t r = 64 * q + static_cast<size_t>(__builtin_ctzll(m));
        wanted[rows_[r + 1].offset] |= uint32_t{1} << stop;
      }
  }
  std::unordered_set<uint32_t> temporary;  // wanted within one PTX instruction only
  for (const auto& [width, rows] : temps_free_)
    for (const uint32_t row : rows) temporary.insert(rows_[row].offset);
  for (Instruction& i : code) {
    if (i.kind && !i.d) i.conflicts = 0;  // branches
    if (!i.d || i.source >= body_.instructions.size()) continue;
    const ptx::Instruction& text = body_.instructions[i.source];
    if (text.guard != kNoIndex) continue;
    if (const auto w = wanted.find(i.d); w != wanted.end()) i.conflicts = w->second;
    if (temporary.contains(i.d) && is_straight(text, body_.operands_of(text))) i.conflicts = 0;
  }
}

void Decoder::finish_chains() {
  for (const uint32_t k : chains_) {
    Instruction* i = &code_->instructions[k];
    int64_t low[2] = {INT64_MAX, INT64_MAX}, high[2] = {INT64_MIN, INT64_MIN};
    for (uint32_t j = 0; j < i->count; ++j)
      for (int s = 0; s < 2; ++s) {
        low[s] = std::min(low[s], i[3 * j + static_cast<uint32_t>(s)].immediate);
        high[s] = std::max(high[s], i[3 * j + static_cast<uint32_t>(s)].immediate);
      }
    i[2].immediate =
        static_cast<int64_t>(static_cast<uint64_t>(high[0]) << 32 | static_cast<uint32_t>(low[0]));
    i[2].target = static_cast<int32_t>(low[1]);
    i[2].e = static_cast<uint32_t>(high[1]);
  }
}

}  // namespace gpupool::simgpu::exec
