// Instructions that look across a warp.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

Inputs random_inputs(size_t warps, uint64_t b_mask, uint64_t c_mask) {
  std::mt19937_64 r(17);
  Inputs in;
  for (size_t i = 0; i < warps * 32; ++i) in.push_back({r(), r() & b_mask, r() & c_mask});
  return in;
}

std::vector<uint64_t> run(const std::string& text, const Inputs& in, int out = 32) {
  std::string error;
  auto got = run_instruction(text, {out, 32, 32, 32}, in, false, &error);
  EXPECT_EQ(got.size(), in.size()) << text << ": " << error;
  got.resize(in.size());
  return got;
}

TEST(ExecWarp, Shuffle) {
  for (std::string mode : {"up", "down", "bfly", "idx"}) {
    // c: clamp in bits 0-4, segment mask in bits 8-12.
    const Inputs in = random_inputs(40, 0x3f, 0x1f1f);
    auto got = run("shfl.sync." + mode + ".b32 ro|po, ra, rb, rc, -1;", in);
    auto valid = run(
        "{ shfl.sync." + mode + ".b32 t0|p0, ra, rb, rc, 0xffffffff; selp.u32 ro, 1, 0, p0; }", in);
    for (size_t i = 0; i < in.size(); ++i) {
      const int lane = i % 32, b = in[i][1] & 31, c = in[i][2] & 31, seg = in[i][2] >> 8 & 31;
      const int max = (lane & seg) | (c & ~seg & 31), min = lane & seg;
      int j = mode == "up"     ? lane - b
              : mode == "down" ? lane + b
              : mode == "bfly" ? lane ^ b
                               : min | (b & ~seg & 31);
      const bool ok = mode == "up" ? j >= max : j <= max;
      if (!ok) j = lane;
      ASSERT_EQ(got[i], in[i - lane + j][0] & 0xffffffff)
          << mode << " lane " << lane << " b " << b << " c " << in[i][2];
      ASSERT_EQ(valid[i], uint64_t(ok)) << mode << " lane " << lane;
    }
  }
}

TEST(ExecWarp, Vote) {
  Inputs in = random_inputs(40, 3, 0);
  for (size_t w = 0; w < 6; ++w)
    for (int l = 0; l < 32; ++l) in[w * 32 + l][1] = w % 3 == 0 ? 1 : w % 3 == 1 ? 0 : l == 5;
  const std::string pred = "setp.ne.u32 p0, rb, 0; ";
  auto ballot = run("{ " + pred + "vote.sync.ballot.b32 ro, p0, -1; }", in);
  auto negated = run("{ " + pred + "vote.sync.ballot.b32 ro, !p0, -1; }", in);
  auto all = run("{ " + pred + "vote.sync.all.pred p1, p0, -1; selp.u32 ro, 1, 0, p1; }", in);
  auto any = run("{ " + pred + "vote.sync.any.pred p1, p0, -1; selp.u32 ro, 1, 0, p1; }", in);
  auto uni = run("{ " + pred + "vote.sync.uni.pred p1, p0, -1; selp.u32 ro, 1, 0, p1; }", in);
  for (size_t i = 0; i < in.size(); ++i) {
    uint32_t mask = 0;
    for (int l = 0; l < 32; ++l) mask |= uint32_t(in[i - i % 32 + l][1] != 0) << l;
    ASSERT_EQ(ballot[i], mask);
    ASSERT_EQ(negated[i], ~mask);
    ASSERT_EQ(all[i], uint64_t(mask == ~0u));
    ASSERT_EQ(any[i], uint64_t(mask != 0));
    ASSERT_EQ(uni[i], uint64_t(mask == 0 || mask == ~0u));
  }
}

TEST(ExecWarp, MatchAndRedux) {
  Inputs in = random_inputs(20, 3, 0);
  for (int l = 0; l < 32; ++l) in[l][1] = 7;
  auto any = run("match.any.sync.b32 ro, rb, -1;", in);
  auto all =
      run("{ match.all.sync.b32 t0|p0, rb, -1; selp.u32 t1, 1, 0, p0; xor.b32 ro, t0, t1; }", in);
  for (size_t i = 0; i < in.size(); ++i) {
    uint32_t mask = 0;
    for (int l = 0; l < 32; ++l) mask |= uint32_t(in[i - i % 32 + l][1] == in[i][1]) << l;
    ASSERT_EQ(any[i], mask);
    ASSERT_EQ(all[i], mask == ~0u ? (~0u ^ 1u) : 0u);
  }
  struct Op {
    const char* name;
    std::function<uint32_t(uint32_t, uint32_t)> f;
  };
  const Op ops[] = {
      {"add.u32", [](uint32_t a, uint32_t b) { return a + b; }},
      {"add.s32", [](uint32_t a, uint32_t b) { return a + b; }},
      {"min.u32", [](uint32_t a, uint32_t b) { return std::min(a, b); }},
      {"max.u32", [](uint32_t a, uint32_t b) { return std::max(a, b); }},
      {"min.s32",
       [](uint32_t a, uint32_t b) { return uint32_t(std::min(int32_t(a), int32_t(b))); }},
      {"max.s32",
       [](uint32_t a, uint32_t b) { return uint32_t(std::max(int32_t(a), int32_t(b))); }},
      {"and.b32", [](uint32_t a, uint32_t b) { return a & b; }},
      {"or.b32", [](uint32_t a, uint32_t b) { return a | b; }},
      {"xor.b32", [](uint32_t a, uint32_t b) { return a ^ b; }}};
  for (const Op& op : ops) {
    auto got = run(std::string("redux.sync.") + op.name + " ro, ra, -1;", in);
    for (size_t i = 0; i < in.size(); ++i) {
      uint32_t v = uint32_t(in[i - i % 32][0]);
      for (int l = 1; l < 32; ++l) v = op.f(v, uint32_t(in[i - i % 32 + l][0]));
      ASSERT_EQ(got[i], v) << op.name;
    }
  }
}

TEST(ExecWarp, PartialMasksInDivergedCode) {
  const Inputs in = random_inputs(4, 0, 0);
  // Even and odd lanes each run their own side with a mask of their own.
  const std::string text =
      "{ mov.u32 t0, %laneid; and.b32 t1, t0, 1; setp.eq.u32 p0, t1, 0; @p0 bra EVEN;\n"
      "activemask.b32 t2; redux.sync.add.u32 t3, t0, 0xaaaaaaaa; shfl.sync.down.b32 t4, t0, 2, 31, "
      "0xaaaaaaaa; bra JOIN;\n"
      "EVEN: activemask.b32 t2; redux.sync.add.u32 t3, t0, 0x55555555; shfl.sync.down.b32 t4, t0, "
      "2, 31, 0x55555555;\n"
      "JOIN: bar.warp.sync -1; shl.b32 t4, t4, 16; add.u32 ro, t3, t4; }";
  auto got = run(text, in);
  auto active =
      run("{ mov.u32 t0, %laneid; setp.lt.u32 p0, t0, 9; mov.u32 ro, 0; @p0 bra A; bra B; A: "
          "activemask.b32 ro; B: }",
          in);
  for (size_t i = 0; i < in.size(); ++i) {
    const uint32_t lane = i % 32;
    const uint32_t sum = lane & 1 ? 16 * 16 : 15 * 16, neighbour = lane + 2 < 32 ? lane + 2 : lane;
    ASSERT_EQ(got[i], sum + (neighbour << 16)) << lane;
    ASSERT_EQ(active[i], lane < 9 ? 0x1ffu : 0u);
  }
}

// A group meets in an operation with a member mask, not at an instruction.
TEST(ExecWarp, GroupsMeetAtDifferentInstructions) {
  const Inputs in = random_inputs(4, 0, 0);
  const std::string split = "{ mov.u32 t0, %laneid; and.b32 t1, t0, 1; setp.eq.u32 p0, t1, 0; ";
  auto shuffled = run(split +
                          "@p0 bra EVEN; shfl.sync.bfly.b32 t2|p1, ra, 1, 31, -1; add.u32 ro, t2, "
                          "1; bra JOIN;\n"
                          "EVEN: mov.b32 t5, ra; shfl.sync.bfly.b32 t3, t5, 1, 31, -1; add.u32 ro, "
                          "t3, 2; JOIN: }",
                      in);
  auto voted = run(split +
                       "setp.gt.u32 p1, t0, 9; @p0 bra EVEN; vote.sync.ballot.b32 ro, p1, -1; bra "
                       "JOIN;\n"
                       "EVEN: vote.sync.ballot.b32 ro, !p1, -1; JOIN: }",
                   in);
  auto reduced = run(split +
                         "@p0 bra EVEN; redux.sync.add.u32 ro, t0, -1; bra JOIN;\n"
                         "EVEN: redux.sync.add.u32 ro, 100, -1; JOIN: }",
                     in);
  auto matched = run(split +
                         "cvt.u64.u32 u0, t1; shl.b64 u0, u0, 40; mov.u64 u1, 0; setp.lt.u32 p2, "
                         "t0, 4; @p2 bra LOW;\n"
                         "match.any.sync.b64 ro, u0, -1; bra JOIN;\n"
                         "LOW: match.any.sync.b64 ro, u1, -1; JOIN: }",
                     in);
  for (size_t i = 0; i < in.size(); ++i) {
    const uint32_t lane = i % 32;
    ASSERT_EQ(shuffled[i], (in[i ^ 1][0] + (lane & 1 ? 1 : 2)) & 0xffffffff) << lane;
    // Odd lanes above 9, even ones up to 9 (laneid > 9 fails).
    uint32_t ballot = 0, even = 0;
    for (uint32_t l = 0; l < 32; ++l) {
      ballot |= uint32_t{l & 1 ? l > 9 : l <= 9} << l;
      even |= uint32_t{l < 4 || !(l & 1)} << l;
    }
    ASSERT_EQ(voted[i], ballot) << lane;
    ASSERT_EQ(reduced[i], 256u + 1600u) << lane;
    ASSERT_EQ(matched[i], lane < 4 || !(lane & 1) ? even : ~even) << lane;
  }
}

TEST(ExecWarp, GroupsMeetInDifferentCalls) {
  Device d(
      ".func (.reg .b32 o) deeper(.reg .b32 v, .reg .b32 n)\n{\n.reg .b32 m; .reg .pred p;\n"
      "setp.ne.u32 p, n, 0; @p bra DEEPER; shfl.sync.bfly.b32 o, v, 1, 31, -1; ret;\n"
      "DEEPER: sub.u32 m, n, 1; call (o), deeper, (v, m); add.u32 o, o, 1000; ret;\n}\n"
      ".visible .entry k(.param .u64 o)\n{\n.reg .b32 r<6>; .reg .b64 d<3>;\n"
      "mov.u32 r0, %tid.x; and.b32 r1, r0, 3; call (r2), deeper, (r0, r1);\n"
      "ld.param.u64 d0, [o]; mul.wide.u32 d1, r0, 4; add.u64 d0, d0, d1; st.global.u32 [d0], r2; "
      "ret;\n}\n");
  ASSERT_TRUE(d.program) << d.why;
  auto* out = d.array<uint32_t>(64);
  for (int order = 0; order < 8; ++order) {
    if (order) setenv("GPUPOOL_SIMGPU_SHUFFLE", std::to_string(order).c_str(), 1);
    std::fill(out, out + 64, 0);
    auto fault = d.launch("k", 1, 64, Device::Arguments().add(out));
    unsetenv("GPUPOOL_SIMGPU_SHUFFLE");
    ASSERT_FALSE(fault) << fault->what;
    for (uint32_t t = 0; t < 64; ++t) ASSERT_EQ(out[t], (t ^ 1) + 1000 * (t & 3)) << t;
  }
}

// Another mask or another operation is no meeting.
TEST(ExecWarp, WhoNeverMeetsIsADeadlock) {
  for (const char* other :
       {"shfl.sync.bfly.b32 r2, r0, 1, 31, 0xfffffffe;", "shfl.sync.down.b32 r2, r0, 1, 31, -1;"}) {
    Device d(std::string(".visible .entry k()\n{\n.reg .b32 r<6>; .reg .pred p;\n"
                         "mov.u32 r0, %tid.x; setp.lt.u32 p, r0, 16; @p bra LOW;\n"
                         "shfl.sync.bfly.b32 r2, r0, 1, 31, -1; ret;\nLOW: ") +
             other + " ret;\n}\n");
    ASSERT_TRUE(d.program) << d.why;
    auto fault = d.launch("k", 1, 32, {});
    ASSERT_TRUE(fault);
    EXPECT_NE(fault->what.find("deadlock"), std::string::npos) << fault->what;
  }
}

TEST(ExecWarp, SpecialRegisters) {
  const Inputs in = random_inputs(9, 0, 0);
  auto get = [&](const std::string& name) { return run("mov.u32 ro, " + name + ";", in); };
  auto lane = get("%laneid"), warp = get("%warpid"), eq = get("%lanemask_eq"),
       lt = get("%lanemask_lt"), le = get("%lanemask_le"), gt = get("%lanemask_gt"),
       ge = get("%lanemask_ge"), tid = get("%tid.x"), cta = get("%ctaid.x"), ntid = get("%ntid.x"),
       nctaid = get("%nctaid.x"), y = get("%tid.y"), nz = get("%ntid.z");
  for (size_t i = 0; i < in.size(); ++i) {
    const uint32_t l = i % 32, bit = 1u << l;
    ASSERT_EQ(lane[i], l);
    ASSERT_EQ(warp[i], i % 128 / 32);
    ASSERT_EQ(eq[i], bit);
    ASSERT_EQ(lt[i], bit - 1);
    ASSERT_EQ(le[i], (bit - 1) | bit);
    ASSERT_EQ(gt[i], ~((bit - 1) | bit));
    ASSERT_EQ(ge[i], ~(bit - 1));
    ASSERT_EQ(tid[i], i % 128);
    ASSERT_EQ(cta[i], i / 128);
    ASSERT_EQ(ntid[i], 128u);
    ASSERT_EQ(nctaid[i], 3u);
    ASSERT_EQ(y[i], 0u);
    ASSERT_EQ(nz[i], 1u);
  }
}

}  // namespace
}  // namespace gpupool::simgpu
