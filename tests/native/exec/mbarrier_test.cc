// mbarrier objects, alloca, and what needs a newer compute capability. Each expected value is
// written out, or computed by a loop over the threads.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

// One result of 32 bits per thread; mbarriers named `bar` and `other` in shared memory.
struct BarrierKernel {
  Device device{"", false};
  std::vector<uint32_t> out;
  std::optional<Fault> fault;

  explicit BarrierKernel(const std::string& body, uint32_t block = 64, int target = 80,
                         const std::string& before = "", uint64_t limit = 5'000'000) {
    const std::string text =
        ".version 8.3\n.target sm_" + std::to_string(target) + "\n.address_size 64\n" + before +
        ".visible .entry k(.param .u64 o)\n{\n"
        ".reg .pred p<4>; .reg .b32 r<16>; .reg .b64 d<16>; .reg .b32 result;\n"
        ".shared .align 8 .b64 bar; .shared .align 8 .b64 other; .shared .align 4 .b32 words[64];\n"
        "mov.u32 r0, %tid.x; mov.u32 r1, bar; mov.u64 d0, bar; cvta.shared.u64 d1, d0;\n"
        "mov.u32 result, 0; setp.eq.u32 p0, r0, 0; mov.u32 r15, words; mov.u32 r14, other;\n" +
        body +
        "\nDONE: ld.param.u64 d6, [o]; mul.wide.u32 d7, r0, 4; add.u64 d6, d6, d7;\n"
        "st.global.u32 [d6], result; ret;\n}\n";
    if (target >= 90) device.model.cc_major = 9;
    LoadResult r = load_program({{"test.ptx", text}}, device.model, device.memory);
    device.program = r.program;
    device.why = r.log;
    device.instruction_limit = limit;
    uint32_t* p = device.array<uint32_t>(block);
    fault = device.launch("k", 1, block, Device::Arguments().add(p));
    out.assign(p, p + block);
  }
};

// Each thread writes a word, arrives, waits for the phase and reads the word of another warp.
TEST(ExecMbarrier, PhasesByTokenAndByParity) {
  for (const std::string wait :
       {"mbarrier.test_wait.shared.b64 p1, [r1], d2;", "mbarrier.test_wait.b64 p1, [d1], d2;",
        "mbarrier.test_wait.acquire.cta.shared::cta.b64 p1, [bar], d2;",
        "and.b32 r9, r8, 1; mbarrier.test_wait.parity.shared.b64 p1, [r1], r9;"}) {
    BarrierKernel k(
        "@p0 mbarrier.init.shared.b64 [r1], 128; bar.sync 0;\n"
        "mov.u32 r2, words; and.b32 r3, r0, 63; shl.b32 r3, r3, 2; add.u32 r2, r2, r3;\n"
        "mov.u32 r3, words; xor.b32 r4, r0, 32; and.b32 r4, r4, 63; shl.b32 r4, r4, 2; add.u32 "
        "r3, r3, r4;\n"
        "mov.u32 r8, 0; setp.lt.u32 p2, r0, 64;\n"
        "ROUND: mad.lo.u32 r5, r0, 100, r8; @p2 st.shared.u32 [r2], r5;\n"
        "mbarrier.arrive.shared.b64 d2, [r1];\nSPIN: " +
            wait +
            " @!p1 bra SPIN;\n"
            "ld.shared.u32 r6, [r3]; add.u32 result, result, r6; bar.sync 0;\n"
            "add.u32 r8, r8, 1; setp.lt.u32 p3, r8, 5; @p3 bra ROUND;",
        128);
    ASSERT_FALSE(k.fault) << wait << k.fault->what;
    for (uint32_t i = 0; i < 128; ++i)
      ASSERT_EQ(k.out[i], 5 * 100 * ((i ^ 32) & 63) + 0 + 1 + 2 + 3 + 4) << wait << i;
  }
}

TEST(ExecMbarrier, CountsWithinAPhase) {
  // Threads arrive one after the other: the k-th sees 32 - k arrivals to come.
  BarrierKernel k(
      "@p0 mbarrier.init.shared.b64 [bar], 32; bar.sync 0;\n"
      "mbarrier.arrive.shared.b64 d2, [r1]; mbarrier.pending_count.b64 result, d2;",
      32);
  ASSERT_FALSE(k.fault) << k.fault->what;
  std::sort(k.out.begin(), k.out.end());
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(k.out[i], i + 1);
  // 7 at once leave 3 of 10; dropping 2 and 1 ends the phase, and 7 are expected from then on.
  BarrierKernel n(
      "mbarrier.init.shared.b64 [r1], 10; mov.u32 r3, 7;\n"
      "mbarrier.arrive.noComplete.shared.b64 d2, [r1], r3;\n"
      "mbarrier.arrive_drop.noComplete.shared.b64 d3, [r1], 2;\n"
      "mbarrier.pending_count.b64 r4, d3; mbarrier.arrive_drop.shared.b64 d4, [r1];\n"
      "mbarrier.test_wait.shared.b64 p1, [r1], d2; selp.u32 r5, 1, 0, p1;\n"
      "mbarrier.arrive.shared.b64 d5, [r1]; mbarrier.pending_count.b64 r6, d5;\n"
      "mbarrier.test_wait.shared.b64 p1, [r1], d5; selp.u32 r7, 1, 0, p1;\n"
      "mad.lo.u32 result, r4, 10, r5; mad.lo.u32 result, result, 10, r6; mad.lo.u32 result, "
      "result, 10, r7;",
      1);
  ASSERT_FALSE(n.fault) << n.fault->what;
  EXPECT_EQ(n.out[0], 3170u);
}

TEST(ExecMbarrier, AsynchronousCopiesArrive) {
  // 64 arrivals of copies that were counted, 64 of threads; those not counted change nothing.
  BarrierKernel k(
      "@p0 mbarrier.init.shared.b64 [r1], 128; bar.sync 0;\n"
      "mov.u32 r2, words; shl.b32 r3, r0, 2; add.u32 r2, r2, r3; ld.param.u64 d2, [o];\n"
      "mul.wide.u32 d3, r0, 4; add.u64 d2, d2, d3; mad.lo.u32 r4, r0, 3, 5; st.global.u32 [d2], "
      "r4;\n"
      "cp.async.ca.shared.global [r2], [d2], 4;\n"
      "cp.async.mbarrier.arrive.shared.b64 [r1]; cp.async.mbarrier.arrive.noinc.b64 [d1];\n"
      "mbarrier.arrive.shared.b64 d4, [r1];\n"
      "SPIN: mbarrier.test_wait.shared.b64 p1, [r1], d4; @!p1 bra SPIN;\n"
      "xor.b32 r3, r3, 252; mov.u32 r2, words; add.u32 r2, r2, r3; ld.shared.u32 result, [r2];");
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(k.out[i], (63 - i) * 3 + 5);
}

TEST(ExecMbarrier, BytesOfComputeCapability90) {
  BarrierKernel k(
      "mbarrier.init.shared.b64 [r1], 1; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [r1], 40;\n"
      "mbarrier.arrive.expect_tx.shared.b64 d2, [r1], 24;\n"
      "mbarrier.try_wait.shared.b64 p1, [r1], d2, 100; selp.u32 r3, 1, 0, p1;\n"
      "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [r1], 60;\n"
      "mbarrier.try_wait.parity.shared.b64 p1, [r1], 0; selp.u32 r4, 1, 0, p1;\n"
      "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [r1], 4;\n"
      "mbarrier.try_wait.parity.shared.b64 p1, [r1], 0; selp.u32 r5, 1, 0, p1;\n"
      "mad.lo.u32 result, r3, 10, r4; mad.lo.u32 result, result, 10, r5;",
      1, 90);
  ASSERT_FALSE(k.fault) << k.fault->what;
  EXPECT_EQ(k.out[0], 1u);
}

TEST(ExecMbarrier, MistakesAreFaults) {
  struct Mistake {
    const char* body;
    FaultKind kind;
    const char* what;
  };
  for (const Mistake& c : {
           Mistake{"mbarrier.init.shared.b64 [r1+4], 1;", FaultKind::kMisalignedAddress, "mis"},
           Mistake{"mbarrier.init.shared.b64 [r1+1048576], 1;", FaultKind::kIllegalAddress,
                   "shared memory"},
           Mistake{"ld.param.u64 d2, [o]; mbarrier.init.b64 [d2], 1;", FaultKind::kIllegalAddress,
                   "shared memory"},
           Mistake{"mbarrier.init.shared.b64 [r1], 0;", FaultKind::kIllegalInstruction, "between"},
           Mistake{"mbarrier.init.shared.b64 [r1], 5; mbarrier.inval.shared.b64 [r1];"
                   "mbarrier.arrive.shared.b64 d2, [r1];",
                   FaultKind::kIllegalInstruction, "more arrivals"},
           Mistake{"mbarrier.init.shared.b64 [r1], 5;"
                   "mbarrier.arrive.noComplete.shared.b64 d2, [r1], 5;",
                   FaultKind::kIllegalInstruction, "noComplete"},
       }) {
    BarrierKernel k(c.body, 1);
    ASSERT_TRUE(k.fault) << c.body;
    EXPECT_EQ(k.fault->kind, c.kind) << k.fault->what;
    EXPECT_NE(k.fault->what.find(c.what), std::string::npos) << k.fault->what;
  }
  // Nobody arrives: the wait is a loop, which the limit ends.
  BarrierKernel k(
      "mbarrier.init.shared.b64 [r1], 5; mbarrier.arrive.shared.b64 d2, [r1];\n"
      "SPIN: mbarrier.test_wait.shared.b64 p1, [r1], d2; @!p1 bra SPIN;",
      1, 80, "", 20'000);
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kTimeout) << k.fault->what;
}

TEST(ExecTarget, WhatNeedsANewerOneIsRefused) {
  for (const char* body :
       {"mbarrier.try_wait.shared.b64 p1, [r1], d2;", "mbarrier.arrive.shared.b64 d2, [r1], 3;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [r1], 4;", "fence.proxy.async;",
        "red.global.add.v2.f32 [d2], {r3, r4};",
        "atom.global.add.noftz.v2.f16x2 {r2, r3}, [d2], {r4, r5};"}) {
    BarrierKernel k(body, 1);
    ASSERT_TRUE(k.fault) << body;
    EXPECT_EQ(k.fault->kind, FaultKind::kNotSupported);
    EXPECT_NE(k.fault->what.find("sm_90"), std::string::npos) << k.fault->what;
  }
  BarrierKernel old("mbarrier.init.shared.b64 [r1], 1;", 1, 75);
  ASSERT_TRUE(old.fault);
  EXPECT_NE(old.fault->what.find("sm_80"), std::string::npos) << old.fault->what;
  BarrierKernel fence("membar.proxy.alias; fence.proxy.alias; mov.u32 result, 4;", 1);
  ASSERT_FALSE(fence.fault) << fence.fault->what;
  EXPECT_EQ(fence.out[0], 4u);
}

// ---------------------------------------------------------------- the stack

// Thread t takes 4 (t + 1) bytes, fills them with its numbers, calls a function that takes and
// overwrites others, and adds up what it finds.
TEST(ExecStack, AllocationsOfDifferentSizesSurviveCalls) {
  BarrierKernel k(
      "add.u32 r2, r0, 1; mul.wide.u32 d2, r2, 4; alloca.u64 d3, d2, 64; mov.u32 r3, 0; "
      "and.b64 d8, d3, 63;\n"
      "FILL: mul.wide.u32 d4, r3, 4; add.u64 d4, d3, d4; mad.lo.u32 r4, r3, 7, r0; st.local.u32 "
      "[d4], r4; add.u32 r3, r3, 1; setp.lt.u32 p1, r3, r2; @p1 bra FILL;\n"
      "setp.gt.u32 p2, r0, 20; @p2 bra OTHER; call scribble, (r0); bra SUM;\n"
      "OTHER: stacksave.u64 d9; alloca.u64 d10, 32; st.local.u32 [d10+28], r0; stackrestore.u64 "
      "d9; alloca.u64 d11, 32; sub.u64 d10, d11, d10; cvt.u32.u64 result, d10; call scribble, "
      "(r0);\n"
      "SUM: mov.u32 r3, 0;\n"
      "ADD: mul.wide.u32 d4, r3, 4; add.u64 d4, d3, d4; ld.local.u32 r4, [d4]; add.u32 result, "
      "result, r4; add.u32 r3, r3, 1; setp.lt.u32 p1, r3, r2; @p1 bra ADD;\n"
      "cvt.u32.u64 r4, d8; mad.lo.u32 result, r4, 1000000, result;",
      64, 80,
      ".func scribble(.reg .b32 n)\n{ .reg .b32 r<4>; .reg .b64 d<3>; .reg .pred p;\n"
      "add.u32 r0, n, 8; alloca.u32 r1, 400; cvt.u64.u32 d0, r1; mov.u32 r2, 0;\n"
      "L: st.local.u32 [d0], 0xdeadbeef; add.u64 d0, d0, 4; add.u32 r2, r2, 4; setp.lt.u32 p, r2, "
      "400; @p bra L; ret; }\n");
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t t = 0; t < 64; ++t) {
    uint32_t sum = 0;
    for (uint32_t j = 0; j <= t; ++j) sum += 7 * j + t;
    ASSERT_EQ(k.out[t], sum) << t;
  }
}

TEST(ExecStack, OverflowIsAFault) {
  for (const char* body : {"L: alloca.u64 d2, 64; bra L;", "mov.u64 d3, -8; alloca.u64 d2, d3;",
                           "mov.u64 d3, 0x4000000000; alloca.u64 d2, d3;"}) {
    BarrierKernel k(body, 32);
    ASSERT_TRUE(k.fault) << body;
    EXPECT_EQ(k.fault->kind, FaultKind::kLaunchFailed) << k.fault->what;
    EXPECT_NE(k.fault->what.find("stack overflow"), std::string::npos) << k.fault->what;
  }
  BarrierKernel k("mov.u64 d3, 0x4000000000; stackrestore.u64 d3;", 32);
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kIllegalAddress) << k.fault->what;
}

}  // namespace
}  // namespace gpupool::simgpu
