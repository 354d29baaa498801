// The decoder's last pass: faster forms of frequent instructions. Every instruction keeps its place
// and its general handler, so the fast forms can leave whatever is unusual to those, and faults are
// reported as ever.
#include <algorithm>

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
