// The decoder's last pass: faster forms of frequent instructions. Every instruction keeps its place
// and its general handler, so the fast forms can leave whatever is unusual to those, and faults are
// reported as ever.
#include <algorithm>
#include <span>

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
  std::vector<std::pair<uint32_t, uint32_t>> copies;  // from, to
  for (uint32_t k = 0; k < liveness_.n; ++k) {
    const bool end = k + 1 == liveness_.n;
    if (!end && ignores_nan_bits(body_.instructions[k])) continue;
    const bool copy =
        !end && (body_.instructions[k].op == Op::kMov || body_.instructions[k].op == Op::kSelp);
    for (const uint32_t r : uses_[k]) {
      if (!copy) seen[r] = true;
      for (const uint32_t d : defines_[k])
        if (copy) copies.emplace_back(r, d);
      if (copy && defines_[k].empty()) seen[r] = true;
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& [from, to] : copies)
      if (seen[to] && !seen[from]) changed = seen[from] = true;
  }
  return seen;
}

void Decoder::use_lighter_forms() {
  const FastSet& fast = fast_handlers();
  std::vector<Instruction>& code = code_->instructions;
  const std::vector<bool> local = block_local_registers(), seen = nan_bits_seen();
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  written_whole_.assign(registers, false);
  auto is_local = [&](uint32_t row) { return row >= 1 && row <= registers && local[row - 1]; };
  // Code index k + 1 is the next PTX instruction, in the same basic block, and each of the two is
  // one instruction of the machine.
  auto adjacent = [&](size_t k) {
    if (k + 1 >= code.size()) return false;
    const uint32_t s = code[k].source;
    return s + 2 < starts_.size() && code[k + 1].source == s + 1 && starts_[s] == k &&
           starts_[s + 1] == k + 1 && starts_[s + 2] == k + 2 && !liveness_.leader[s + 1];
  };
  const Handler bra[2] = {set_.control(Op::kBra, Mod::kUnknown, false),
                          set_.control(Op::kBra, Mod::kUnknown, true)};
  const Handler logic[2] = {set_.predicate(Op::kAnd), set_.predicate(Op::kOr)};
  const Op float_ops[] = {Op::kAdd, Op::kSub, Op::kMul, Op::kFma};
  auto float_op = [&](Handler h) {
    for (const Op o : float_ops)
      if (set_.floating(o, Type::kF32, {}) == h) return o;
    return Op::kRet;
  };
  // The branch on predicate `p` after code index k, with nothing but arithmetic between.
  auto branch_after = [&](size_t k, uint32_t p, uint32_t* between, int* negated) {
    for (size_t j = k + 1; j <= k + 4 && adjacent(j - 1); ++j) {
      const Instruction& x = code[j];
      for (int n = 0; n < 2; ++n)
        if (x.run == bra[n] && x.a == p) {
          *between = static_cast<uint32_t>(j - k - 1);
          *negated = n;
          return dead_after(p - 1, x.source);
        }
      if (!fast.forms(x.run).whole || x.d == p || x.a == p || x.b == p || x.c == p) return false;
    }
    return false;
  };
  for (size_t k = 0; k < code.size(); ++k) {
    Instruction& i = code[k];
    Handler& h = i.run == fast.forget ? i.inner : i.run;
    const FastForms forms = fast.forms(h);
    if (forms.branch[0] && i.d >= 1 && i.d <= registers && i.run == h) {
      uint32_t between = 0;
      int n = 0;
      if (branch_after(k, i.d, &between, &n)) {
        i.run = forms.branch[n];
        i.count = static_cast<uint16_t>(1 + between);
        continue;
      }
      if (adjacent(k) && dead_after(i.d - 1, i.source + 1)) {
        const Instruction& next = code[k + 1];
        const int o = next.run == logic[0] ? 0 : next.run == logic[1] ? 1 : -1;
        if (o >= 0 && next.d != i.d && next.d >= 1 && next.d <= registers &&
            (next.a == i.d) != (next.b == i.d)) {
          i.e = next.a == i.d ? next.b : next.a;
          if (branch_after(k + 1, next.d, &between, &n)) {
            i.run = forms.logic_branch[o][n];
            i.count = static_cast<uint16_t>(1 + between);
          } else {
            i.run = is_local(next.d) ? forms.logic_whole[o] : forms.logic[o];
            if (is_local(next.d)) written_whole_[next.d - 1] = true;
          }
          ++k;
          continue;
        }
      }
    }
    const Op first = i.run == h && i.d >= 1 && i.d <= registers ? float_op(h) : Op::kRet;
    if (first != Op::kRet && adjacent(k) && !seen[i.d - 1]) {
      Instruction& next = code[k + 1];
      const Op o = float_op(next.run);
      const uint32_t x = i.d;
      const int uses = (next.a == x) + (next.b == x) + (o == Op::kFma && next.c == x);
      if (o != Op::kRet && uses == 1 && next.d >= 1 && next.d <= registers &&
          (next.d == x || dead_after(x - 1, next.source))) {
        Second second = Second::kNone;
        uint32_t p = next.a == x ? next.b : next.a, q = next.c;
        if (o == Op::kAdd) second = Second::kAdd;
        if (o == Op::kSub) second = next.a == x ? Second::kSubtract : Second::kSubtractFrom;
        if (o == Op::kMul) second = Second::kMultiply;
        if (o == Op::kFma && next.c != x) second = Second::kFactor;
        if (o == Op::kFma && next.c == x) {
          second = Second::kAddend;
          p = next.a;
          q = next.b;
        }
        i.run = fast.pair(first, second, !seen[next.d - 1]);
        i.e = p;
        i.guard = o == Op::kFma ? q : 0;
        i.target = is_local(next.d);
        if (is_local(next.d)) written_whole_[next.d - 1] = true;
        ++k;
        continue;
      }
    }
    if (i.d < 1 || i.d > registers) continue;
    const bool whole = is_local(i.d), raw = !seen[i.d - 1];
    if (whole && forms.whole) written_whole_[i.d - 1] = true;
    if (whole && raw && forms.whole_raw)
      h = forms.whole_raw;
    else if (whole && forms.whole)
      h = forms.whole;
    else if (raw && forms.raw)
      h = forms.raw;
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
