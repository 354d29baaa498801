// Rows of a function: where registers, constants and temporaries lie in its window. Registers that
// are never alive together share a row.
#include <algorithm>
#include <bit>

#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::kNoIndex;

namespace {

// What a text of some kilobytes could ask for by many registers and branches.
constexpr uint64_t kMaxLivenessWords = uint64_t{1} << 25;  // of each of the four sets
constexpr uint64_t kMaxLivenessWork = uint64_t{1} << 33;   // words looked at
constexpr uint64_t kMaxWindowBytes = 64 << 20;             // of one warp

}  // namespace

uint32_t Decoder::add_row(uint32_t width) {
  Row r;
  r.width = static_cast<uint8_t>(width);
  rows_.push_back(r);
  return static_cast<uint32_t>(rows_.size() - 1);
}

uint32_t Decoder::temp(uint32_t width) {
  auto& free = temps_free_[width];
  uint32_t row;
  if (free.empty()) {
    row = add_row(width);
  } else {
    row = free.back();
    free.pop_back();
  }
  temps_used_.push_back(row);
  return row;
}

uint32_t Decoder::constant(uint32_t width, uint64_t bits) {
  if (width < 8) bits &= (uint64_t{1} << (8 * width)) - 1;
  const auto [it, fresh] = constants_.try_emplace({width, bits}, 0);
  if (fresh) it->second = add_row(width);
  return it->second;
}

uint32_t Decoder::frame_base() {
  if (!frame_base_) frame_base_ = add_row(8);
  return frame_base_;
}

uint32_t Decoder::special(ptx::SpecialRegister special, uint32_t component, uint32_t width) {
  using S = ptx::SpecialRegister;
  if (component == ptx::kWhole) component = 0;
  Clock clock{};
  bool changes = true;
  switch (special) {
    case S::kClock:
      clock = Clock::kClock32;
      break;
    case S::kClockHi:
      clock = Clock::kClockHi;
      break;
    case S::kClock64:
      clock = Clock::kClock64;
      break;
    case S::kGlobaltimer:
      clock = Clock::kTimer;
      break;
    case S::kGlobaltimerLo:
      clock = Clock::kTimerLo;
      break;
    case S::kGlobaltimerHi:
      clock = Clock::kTimerHi;
      break;
    default:
      changes = false;
  }
  if (changes) {
    const uint32_t natural = clock == Clock::kClock64 || clock == Clock::kTimer ? 8 : 4;
    const uint32_t row = temp(natural);
    emit(set_.special(clock), row);
    if (natural == width) return row;
    const uint32_t other = temp(width);
    emit(set_.extend(natural, natural == 8 ? ptx::Type::kU64 : ptx::Type::kU32, width), other, row);
    return other;
  }
  if (special >= S::kPm0) refuse("performance counters aren't simulated");
  const uint32_t key = static_cast<uint32_t>(special) * 4 + component;
  const auto [it, fresh] = specials_.try_emplace({key, width}, 0);
  if (fresh) it->second = add_row(width);
  return it->second;
}

uint32_t Decoder::register_width(uint32_t reg) const {
  const ptx::Type t = body_.registers[reg];
  if (t == ptx::Type::kPred) return 4;
  return std::max<uint32_t>(2, ptx::bytes_of(t));
}
uint32_t Decoder::use(uint32_t reg) {
  uses_[index_].push_back(reg);
  return reg + 1;
}
uint32_t Decoder::define(uint32_t reg) {
  // Under a guard the old value may live on.
  if (current_ && current_->guard != kNoIndex) uses_[index_].push_back(reg);
  defines_[index_].push_back(reg);
  return reg + 1;
}

void Decoder::analyse() {
  Liveness& live = liveness_;
  // One more than the text has: the return at the end.
  const uint32_t n = live.n = static_cast<uint32_t>(body_.instructions.size()) + 1;
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  // Basic blocks: leaders are targets of branches and what follows a branch.
  std::vector<std::vector<uint32_t>> targets(n);
  std::vector<bool>& leader = live.leader;
  leader.assign(n + 1, false);
  std::vector<bool> falls(n, true);
  leader[0] = true;
  falls[n - 1] = false;
  for (uint32_t k = 0; k + 1 < n; ++k) {
    const ptx::Instruction& i = body_.instructions[k];
    for (const ptx::Operand& o : body_.operands_of(i)) {
      if (o.kind == ptx::OperandKind::kLabel) targets[k].push_back(o.index);
      if (o.kind == ptx::OperandKind::kTable && i.op == ptx::Op::kBrx)
        for (uint32_t t : body_.branch_tables[o.index]) targets[k].push_back(t);
    }
    const bool guarded = i.guard != kNoIndex;
    if ((i.op == ptx::Op::kBra || i.op == ptx::Op::kBrx || i.op == ptx::Op::kRet ||
         i.op == ptx::Op::kExit || i.op == ptx::Op::kTrap) &&
        !guarded)
      falls[k] = false;
    if (!targets[k].empty() || !falls[k]) leader[k + 1] = true;
    for (uint32_t t : targets[k]) leader[std::min(t, n)] = true;
  }
  std::vector<uint32_t>& block_of = live.block_of;
  std::vector<uint32_t>& first = live.first;
  block_of.assign(n + 1, 0);
  for (uint32_t k = 0; k < n; ++k) {
    if (leader[k]) first.push_back(k);
    block_of[k] = static_cast<uint32_t>(first.size() - 1);
  }
  const uint32_t blocks = static_cast<uint32_t>(first.size());
  const size_t words = live.words = (registers + 63) / 64;
  if (blocks * uint64_t{words} > kMaxLivenessWords)
    refuse(std::to_string(registers) + " registers in " + std::to_string(blocks) +
           " basic blocks are more than the simulated GPU can compile");
  std::vector<uint64_t> gen(blocks * words), kill(blocks * words);
  std::vector<uint64_t>& in = live.in;
  std::vector<uint64_t>& out = live.out;
  in.assign(blocks * words, 0);
  out.assign(blocks * words, 0);
  auto bit = [&](std::vector<uint64_t>& v, uint32_t b, uint32_t r) -> bool {
    return (v[b * words + r / 64] >> (r % 64)) & 1;
  };
  auto put = [&](std::vector<uint64_t>& v, uint32_t b, uint32_t r) {
    v[b * words + r / 64] |= uint64_t{1} << (r % 64);
  };
  for (uint32_t k = 0; k < n; ++k) {
    const uint32_t b = block_of[k];
    for (uint32_t r : uses_[k])
      if (!bit(kill, b, r)) put(gen, b, r);
    for (uint32_t r : defines_[k]) put(kill, b, r);
  }
  uint64_t work = 0;
  for (bool changed = true; changed;) {
    changed = false;
    work += blocks * uint64_t{words};
    if (work > kMaxLivenessWork) refuse("its branches are more than the simulated GPU can compile");
    for (uint32_t b = blocks; b-- > 0;) {
      const uint32_t last = (b + 1 < blocks ? first[b + 1] : n) - 1;
      auto join = [&](uint32_t instruction) {
        if (instruction >= n) return;
        const uint32_t s = block_of[instruction];
        for (size_t q = 0; q < words; ++q) out[b * words + q] |= in[s * words + q];
      };
      for (uint32_t t : targets[last]) join(t);
      if (falls[last]) join(last + 1);
      for (size_t q = 0; q < words; ++q) {
        const uint64_t v = gen[b * words + q] | (out[b * words + q] & ~kill[b * words + q]);
        if (v != in[b * words + q]) {
          in[b * words + q] = v;
          changed = true;
        }
      }
    }
  }
}

// Where each register is named, in the order of the text; a use before a definition.
void Decoder::list_events() {
  const uint32_t registers = static_cast<uint32_t>(body_.registers.size());
  event_begin_.assign(registers + 1, 0);
  for (uint32_t k = 0; k < liveness_.n; ++k)
    for (const auto* list : {&uses_[k], &defines_[k]})
      for (uint32_t r : *list) ++event_begin_[r + 1];
  for (uint32_t r = 0; r < registers; ++r) event_begin_[r + 1] += event_begin_[r];
  events_.resize(event_begin_[registers]);
  std::vector<size_t> at(event_begin_.begin(), event_begin_.end() - 1);
  for (uint32_t k = 0; k < liveness_.n; ++k) {
    for (uint32_t r : uses_[k]) events_[at[r]++] = {k, false};
    for (uint32_t r : defines_[k]) events_[at[r]++] = {k, true};
  }
}

bool Decoder::dead_after(uint32_t reg, uint32_t k) const {
  const uint32_t b = liveness_.block_of[k];
  const uint32_t end = b + 1 < liveness_.first.size() ? liveness_.first[b + 1] : liveness_.n;
  const auto last = events_.begin() + static_cast<ptrdiff_t>(event_begin_[reg + 1]);
  const auto next =
      std::upper_bound(events_.begin() + static_cast<ptrdiff_t>(event_begin_[reg]), last, k,
                       [](uint32_t at, const Event& e) { return at < e.instruction; });
  if (next != last && next->instruction < end) return next->defines;
  return !((liveness_.out[b * liveness_.words + reg / 64] >> (reg % 64)) & 1);
}

void Decoder::place_rows() {
  const Liveness& live = liveness_;
  const uint32_t n = live.n, registers = static_cast<uint32_t>(body_.registers.size());
  const uint32_t blocks = static_cast<uint32_t>(live.first.size());
  auto each_bit = [&](const std::vector<uint64_t>& v, uint32_t b, auto function) {
    for (size_t q = 0; q < live.words; ++q)
      for (uint64_t m = v[b * live.words + q]; m != 0; m &= m - 1)
        function(static_cast<uint32_t>(64 * q + static_cast<uint32_t>(std::countr_zero(m))));
  };
  // Each register is given one interval of instructions that holds everything.
  std::vector<uint32_t> begin(registers, UINT32_MAX), end(registers, 0);
  auto touch = [&](uint32_t r, uint32_t k) {
    begin[r] = std::min(begin[r], k);
    end[r] = std::max(end[r], k);
  };
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t last = (b + 1 < blocks ? live.first[b + 1] : n) - 1;
    each_bit(live.in, b, [&](uint32_t r) { touch(r, live.first[b]); });
    each_bit(live.out, b, [&](uint32_t r) { touch(r, last); });
  }
  for (uint32_t k = 0; k < n; ++k) {
    for (uint32_t r : uses_[k]) touch(r, k);
    for (uint32_t r : defines_[k]) touch(r, k);
  }
  for (uint32_t r : body_.parameter_registers)
    if (r != kNoIndex) touch(r, 0);
  std::vector<uint32_t> order;
  for (uint32_t r = 0; r < registers; ++r)
    if (begin[r] != UINT32_MAX) order.push_back(r);
  std::sort(order.begin(), order.end(), [&](uint32_t x, uint32_t y) {
    return begin[x] != begin[y] ? begin[x] < begin[y] : x < y;
  });
  uint64_t bytes = 64;  // row 0 is nobody's
  auto take = [&](uint32_t width) {
    const uint64_t at = bytes;
    bytes += width * kLanes;
    if (bytes > kMaxWindowBytes)
      refuse("its registers and constants are more than the simulated GPU can hold");
    return static_cast<uint32_t>(at);
  };
  // Registers that no waiting lane wants share rows among themselves only, so that their rows can
  // be written whole.
  std::map<std::pair<uint32_t, bool>, std::vector<uint32_t>> free;  // width, local -> offsets
  std::multimap<uint32_t, uint32_t> alive;                          // end -> register
  uint32_t words_alive = 0, most = 0;
  for (uint32_t r : order) {
    // An instruction's operand and its result may not share a row: several micro-instructions can
    // make one PTX instruction.
    while (!alive.empty() && alive.begin()->first < begin[r]) {
      const uint32_t old = alive.begin()->second;
      const uint32_t w = register_width(old);
      free[{w, block_local_[old]}].push_back(rows_[old + 1].offset);
      words_alive -= w > 4 ? w / 4 : body_.registers[old] == ptx::Type::kPred ? 0 : 1;
      alive.erase(alive.begin());
    }
    const uint32_t width = register_width(r);
    auto& f = free[{width, block_local_[r]}];
    if (f.empty()) {
      rows_[r + 1].offset = take(width);
    } else {
      rows_[r + 1].offset = f.back();
      f.pop_back();
    }
    words_alive += width > 4 ? width / 4 : body_.registers[r] == ptx::Type::kPred ? 0 : 1;
    most = std::max(most, words_alive);
    alive.emplace(end[r], r);
  }
  for (uint32_t row = registers + 1; row < rows_.size(); ++row)
    rows_[row].offset = take(rows_[row].width);
  code_->window_bytes = static_cast<uint32_t>(bytes);
  code_->live_words = most;
  for (const auto& [key, row] : constants_)
    code_->constants.push_back({rows_[row].offset, key.first, key.second});
  for (const auto& [key, row] : specials_) {
    SpecialRow s;
    s.offset = rows_[row].offset;
    s.special = static_cast<ptx::SpecialRegister>(key.first / 4);
    s.component = static_cast<uint8_t>(key.first % 4);
    s.width = static_cast<uint8_t>(key.second);
    code_->specials.push_back(s);
  }
  if (frame_base_) {
    SpecialRow s;
    s.offset = rows_[frame_base_].offset;
    s.width = 8;
    if (frame_pattern_) s.pattern = rows_[frame_pattern_].offset;
    code_->specials.push_back(s);  // kCount: the frame's base
  }
  for (Instruction& i : code_->instructions) {
    for (uint32_t* field : {&i.d, &i.a, &i.b, &i.c, &i.e, &i.guard})
      if (*field) *field = rows_[*field].offset;
  }
}

}  // namespace gpupool::simgpu::exec
