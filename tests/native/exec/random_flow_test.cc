// Random programs with branches to anywhere, in which each lane goes its own way, against an
// interpreter for one thread: what a lane holds must survive whatever the others do meanwhile.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

constexpr int kWords = 14, kLongs = 5, kPredicates = 4;

struct State {
  std::array<uint32_t, kWords> r;
  std::array<uint64_t, kLongs> d;
  std::array<bool, kPredicates> p;
  uint32_t slot;  // what the thread finds in memory
};

// An instruction: its text and what it does to a thread.
struct Step {
  std::string text;
  std::function<void(State&)> run;
};
struct Block {
  std::vector<Step> steps;
  int condition = -1;  // predicate of the branch at the end; -1: none
  bool negated = false;
  size_t target = 0;
};

class Generator {
 public:
  explicit Generator(uint32_t seed) : random_(seed) {}

  std::vector<Block> blocks() {
    std::vector<Block> all(4 + pick(40));
    for (Block& b : all) {
      for (size_t n = 1 + pick(6); n; --n) b.steps.push_back(step());
      if (pick(8) == 0) b.steps.push_back(through_temporaries());
      if (pick(6) == 0) continue;
      b.condition = pick(5) ? static_cast<int>(pick(kPredicates)) : -2;  // -2: always
      b.negated = pick(2);
      b.target = pick(all.size());
    }
    return all;
  }

 private:
  size_t pick(size_t n) { return random_() % n; }
  static std::string r(size_t k) { return "r" + std::to_string(k); }
  static std::string d(size_t k) { return "d" + std::to_string(k); }
  static std::string p(size_t k) { return "p" + std::to_string(k); }

  // Some run under a guard.
  Step guarded(Step s) {
    if (pick(5)) return s;
    const size_t g = pick(kPredicates);
    const bool negated = pick(2);
    auto run = s.run;
    return {(negated ? "@!" : "@") + p(g) + " " + s.text, [=](State& x) {
              if (x.p[g] != negated) run(x);
            }};
  }

  Step step() {
    const size_t o = pick(kWords), a = pick(kWords), b = pick(kWords), c = pick(kWords);
    const size_t e = pick(kLongs), f = pick(kLongs), g = pick(kLongs);
    const size_t q = pick(kPredicates), s = pick(kPredicates), t = pick(kPredicates);
    const std::string two = " " + r(o) + ", " + r(a) + ", " + r(b) + ";";
    switch (pick(17)) {
      case 0:
        return guarded({"add.u32" + two, [=](State& x) { x.r[o] = x.r[a] + x.r[b]; }});
      case 1:
        return guarded({"sub.s32" + two, [=](State& x) { x.r[o] = x.r[a] - x.r[b]; }});
      case 2:
        return guarded({"xor.b32" + two, [=](State& x) { x.r[o] = x.r[a] ^ x.r[b]; }});
      case 3:
        return guarded({"mul.lo.u32" + two, [=](State& x) { x.r[o] = x.r[a] * x.r[b]; }});
      case 4:
        return guarded({"mad.lo.s32 " + r(o) + ", " + r(a) + ", " + r(b) + ", " + r(c) + ";",
                        [=](State& x) { x.r[o] = x.r[a] * x.r[b] + x.r[c]; }});
      case 5:
        return guarded({"min.s32" + two, [=](State& x) {
                          const auto y = static_cast<int32_t>(x.r[a]);
                          const auto z = static_cast<int32_t>(x.r[b]);
                          x.r[o] = static_cast<uint32_t>(y < z ? y : z);
                        }});
      case 6:
        return guarded({"selp.b32 " + r(o) + ", " + r(a) + ", " + r(b) + ", " + p(q) + ";",
                        [=](State& x) { x.r[o] = x.p[q] ? x.r[a] : x.r[b]; }});
      case 7:
        return guarded({"popc.b32 " + r(o) + ", " + r(a) + ";",
                        [=](State& x) { x.r[o] = static_cast<uint32_t>(std::popcount(x.r[a])); }});
      case 8:
        return guarded({"mov.u32 " + r(o) + ", " + r(a) + ";", [=](State& x) { x.r[o] = x.r[a]; }});
      case 9:
        return guarded({"add.u64 " + d(e) + ", " + d(f) + ", " + d(g) + ";",
                        [=](State& x) { x.d[e] = x.d[f] + x.d[g]; }});
      case 10:
        return guarded({"mul.wide.u32 " + d(e) + ", " + r(a) + ", " + r(b) + ";",
                        [=](State& x) { x.d[e] = uint64_t{x.r[a]} * x.r[b]; }});
      case 11:
        return guarded({"cvt.u32.u64 " + r(o) + ", " + d(e) + ";",
                        [=](State& x) { x.r[o] = static_cast<uint32_t>(x.d[e]); }});
      case 12:
        // Lanes may wait here.
        return guarded(
            {"ld.volatile.global.u32 " + r(o) + ", [own];", [=](State& x) { x.r[o] = x.slot; }});
      case 13:
        return guarded({"and.pred " + p(q) + ", " + p(s) + ", " + p(t) + ";",
                        [=](State& x) { x.p[q] = x.p[s] && x.p[t]; }});
      case 14:
        return {"call (" + r(o) + "), spread, (" + r(a) + ");", [=](State& x) {
                  uint32_t v = x.r[a];
                  for (uint32_t n = v & 7; n; --n) v = v * 5 + n;
                  x.r[o] = v;
                }};
      case 15:
        return guarded({"setp.gt.s32 " + p(q) + ", " + r(a) + ", " + r(b) + ";", [=](State& x) {
                          x.p[q] = static_cast<int32_t>(x.r[a]) > static_cast<int32_t>(x.r[b]);
                        }});
      default:
        return guarded({"setp.lt.u64 " + p(q) + ", " + d(e) + ", " + d(f) + ";",
                        [=](State& x) { x.p[q] = x.d[e] < x.d[f]; }});
    }
  }

  // By way of registers that nobody wants afterwards.
  Step through_temporaries() {
    const size_t o = pick(kWords), a = pick(kWords), b = pick(kWords);
    return {"add.u32 t0, " + r(a) + ", 77; shl.b32 t1, " + r(b) + ", 3; sub.u32 t2, t0, t1; " +
                "xor.b32 " + r(o) + ", t2, " + r(a) + ";",
            [=](State& x) { x.r[o] = (x.r[a] + 77 - (x.r[b] << 3)) ^ x.r[a]; }};
  }

  std::mt19937 random_;
};

State start_of(uint32_t thread) {
  State x;
  uint32_t v = thread * 2654435761u + 12345;
  for (uint32_t& w : x.r) w = v = v * 1664525 + 1013904223;
  for (size_t k = 0; k < kLongs; ++k) x.d[k] = uint64_t{x.r[k]} * x.r[k + 1];
  for (size_t k = 0; k < kPredicates; ++k) x.p[k] = (x.r[k] >> 16) & 1;
  x.slot = thread * 17 + 3;
  return x;
}

constexpr uint32_t kFuel = 60;

std::string text_of(const std::vector<Block>& blocks) {
  std::string s =
      ".func (.reg .b32 o) spread(.reg .b32 v)\n{\n.reg .b32 n; .reg .pred p;\n"
      "mov.u32 o, v; and.b32 n, v, 7;\n"
      "LOOP: setp.eq.u32 p, n, 0; @p bra OUT; mad.lo.u32 o, o, 5, n; sub.u32 n, n, 1; bra LOOP;\n"
      "OUT: ret;\n}\n"
      ".visible .entry k(.param .u64 out, .param .u64 slots)\n{\n"
      ".reg .b32 r<14>, t<3>, v, fuel, tid; .reg .b64 d<5>, own, at; .reg .pred p<4>, empty;\n"
      "mov.u32 tid, %tid.x; mov.u32 fuel, " +
      std::to_string(kFuel) +
      ";\n"
      "mad.lo.u32 v, tid, 2654435761, 12345;\n"
      "ld.param.u64 own, [slots]; mul.wide.u32 at, tid, 4; add.u64 own, own, at;\n";
  for (int k = 0; k < kWords; ++k)
    s += "mad.lo.u32 v, v, 1664525, 1013904223; mov.u32 r" + std::to_string(k) + ", v;\n";
  for (int k = 0; k < kLongs; ++k)
    s += "mul.wide.u32 d" + std::to_string(k) + ", r" + std::to_string(k) + ", r" +
         std::to_string(k + 1) + ";\n";
  for (int k = 0; k < kPredicates; ++k)
    s += "shr.u32 v, r" + std::to_string(k) + ", 16; and.b32 v, v, 1; setp.ne.u32 p" +
         std::to_string(k) + ", v, 0;\n";
  for (size_t b = 0; b < blocks.size(); ++b) {
    s += "B" + std::to_string(b) + ":\n";
    s += "sub.u32 fuel, fuel, 1; setp.eq.u32 empty, fuel, 0; @empty bra DONE;\n";
    for (const Step& x : blocks[b].steps) s += x.text + "\n";
    if (blocks[b].condition != -1) {
      const std::string p = "p" + std::to_string(blocks[b].condition);
      if (blocks[b].condition >= 0) s += (blocks[b].negated ? "@!" : "@") + p + " ";
      s += "bra B" + std::to_string(blocks[b].target) + ";\n";
    }
  }
  s += "DONE:\nld.param.u64 at, [out]; mul.wide.u32 own, tid, 4; add.u64 at, at, own;\n"
       "mov.u32 v, fuel;\n";
  for (int k = 0; k < kWords; ++k) s += "mad.lo.u32 v, v, 31, r" + std::to_string(k) + ";\n";
  for (int k = 0; k < kLongs; ++k)
    s += "cvt.u32.u64 t0, d" + std::to_string(k) + "; mad.lo.u32 v, v, 31, t0;\n";
  for (int k = 0; k < kPredicates; ++k)
    s += "selp.u32 t0, 1, 0, p" + std::to_string(k) + "; mad.lo.u32 v, v, 31, t0;\n";
  return s + "st.global.u32 [at], v; ret;\n}\n";
}

uint32_t result_of(const std::vector<Block>& blocks, uint32_t thread) {
  State x = start_of(thread);
  uint32_t fuel = kFuel;
  for (size_t b = 0; b < blocks.size();) {
    if (--fuel == 0) break;
    for (const Step& s : blocks[b].steps) s.run(x);
    const Block& block = blocks[b];
    const bool jumps =
        block.condition == -2 ||
        (block.condition >= 0 && x.p[static_cast<size_t>(block.condition)] != block.negated);
    b = jumps ? block.target : b + 1;
  }
  uint32_t v = fuel;
  for (const uint32_t w : x.r) v = v * 31 + w;
  for (const uint64_t w : x.d) v = v * 31 + static_cast<uint32_t>(w);
  for (const bool w : x.p) v = v * 31 + w;
  return v;
}

// GPUPOOL_TEST_SHUFFLES is the number of programs.
TEST(ExecRandomFlow, LanesKeepWhatTheyHold) {
  const char* text = std::getenv("GPUPOOL_TEST_SHUFFLES");
  const uint32_t programs = text ? static_cast<uint32_t>(std::atoi(text)) : 60;
  constexpr uint32_t kThreads = 83;
  for (uint32_t seed = 1; seed <= programs; ++seed) {
    const std::vector<Block> blocks = Generator(seed).blocks();
    const std::string ptx = text_of(blocks);
    Device device(ptx);
    ASSERT_TRUE(device.program) << device.why;
    device.instruction_limit = 10'000'000;  // a lane that loses its fuel may run for ever
    auto* out = device.array<uint32_t>(kThreads);
    auto* slots = device.array<uint32_t>(kThreads);
    for (uint32_t t = 0; t < kThreads; ++t) slots[t] = start_of(t).slot;
    // In the usual order, then in random ones.
    for (uint32_t order = 0; order < 4; ++order) {
      if (order) setenv("GPUPOOL_SIMGPU_SHUFFLE", std::to_string(seed * 4 + order).c_str(), 1);
      std::fill(out, out + kThreads, 0);
      const auto fault = device.launch("k", 1, kThreads, Device::Arguments().add(out).add(slots));
      unsetenv("GPUPOOL_SIMGPU_SHUFFLE");
      ASSERT_FALSE(fault) << fault->what << "\n" << ptx;
      for (uint32_t t = 0; t < kThreads; ++t)
        ASSERT_EQ(out[t], result_of(blocks, t))
            << "program " << seed << ", order " << order << ", thread " << t << "\n"
            << ptx;
    }
  }
}

}  // namespace
}  // namespace gpupool::simgpu
