// Control flow: divergence, calls, barriers, faults, the device's printf, assert and malloc.
#include <numeric>

#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

// One result of 32 bits per thread.
struct OutKernel {
  Device device;
  std::vector<uint32_t> out;
  std::optional<Fault> fault;

  OutKernel(const std::string& before, const std::string& body, uint32_t grid = 1,
            uint32_t block = 64, uint32_t dynamic = 0, uint64_t limit = 0)
      : device(
            before +
            ".visible .entry k(.param .u64 o)\n{\n.reg .pred p<4>; .reg .b32 r<16>; .reg .b64 "
            "d<8>; .reg .b32 result;\n"
            "mov.u32 r0, %tid.x;\n" +
            body +
            "\nDONE: ld.param.u64 d6, [o]; mov.u32 r14, %ctaid.x; mov.u32 r15, %ntid.x; mad.lo.u32 "
            "r15, r14, r15, r0;\n"
            "mul.wide.u32 d7, r15, 4; add.u64 d6, d6, d7; st.global.u32 [d6], result; ret;\n}\n") {
    device.instruction_limit = limit;
    uint32_t* p = device.array<uint32_t>(grid * block);
    fault = device.launch("k", grid, block, Device::Arguments().add(p), dynamic);
    out.assign(p, p + grid * block);
  }
};

TEST(ExecFlow, DivergentLoop) {
  // Steps of the Collatz sequence from tid + 1.
  OutKernel k("",
              "add.u32 r1, r0, 1; mov.u32 result, 0;\n"
              "LOOP: setp.eq.u32 p0, r1, 1; @p0 bra DONE; and.b32 r2, r1, 1; setp.eq.u32 p1, r2, "
              "0; @p1 bra EVEN;\n"
              "mad.lo.u32 r1, r1, 3, 1; bra NEXT; EVEN: shr.u32 r1, r1, 1; NEXT: add.u32 result, "
              "result, 1; bra LOOP;",
              3, 96);
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 96 * 3; ++i) {
    uint32_t n = i % 96 + 1, steps = 0;
    for (; n != 1; ++steps) n = n & 1 ? 3 * n + 1 : n / 2;
    ASSERT_EQ(k.out[i], steps) << i;
  }
}

TEST(ExecFlow, Recursion) {
  OutKernel k(
      ".func (.param .b32 o) fib(.param .b32 n)\n{\n.reg .b32 r<6>; .reg .pred p;\n"
      "ld.param.u32 r0, [n]; setp.lt.u32 p, r0, 2; mov.u32 r5, r0; @p bra OUT;\n"
      "sub.u32 r1, r0, 1; sub.u32 r2, r0, 2;\n"
      "{ .param .b32 a; .param .b32 v; st.param.b32 [a], r1; call.uni (v), fib, (a); ld.param.b32 "
      "r3, [v]; }\n"
      "{ .param .b32 a; .param .b32 v; st.param.b32 [a], r2; call.uni (v), fib, (a); ld.param.b32 "
      "r4, [v]; }\n"
      "add.u32 r5, r3, r4; OUT: st.param.b32 [o], r5; ret;\n}\n",
      "and.b32 r1, r0, 15; { .param .b32 a; .param .b32 v; st.param.b32 [a], r1; call (v), fib, "
      "(a); ld.param.b32 result, [v]; }");
  ASSERT_FALSE(k.fault) << k.fault->what;
  const uint32_t fib[16] = {0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610};
  for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(k.out[i], fib[i % 16]) << i;
}

TEST(ExecFlow, CallsWithRegisterAndStructureParameters) {
  OutKernel k(
      ".func (.reg .b32 o) add(.reg .b32 a, .reg .b32 b) { add.u32 o, a, b; ret; }\n"
      ".func (.param .align 8 .b8 o[16]) swap(.param .align 8 .b8 s[16])\n{\n.reg .b64 x<2>;\n"
      "ld.param.v2.u64 {x0, x1}, [s]; st.param.v2.u64 [o], {x1, x0}; ret;\n}\n",
      "call (r1), add, (r0, 1000);\n"
      "{ .param .align 8 .b8 s[16]; .param .align 8 .b8 t[16]; cvt.u64.u32 d0, r1; st.param.u64 "
      "[s], d0; st.param.u64 [s+8], 7;\n"
      "call (t), swap, (s); ld.param.u32 r2, [t]; ld.param.u32 r3, [t+8]; }\n"
      "mad.lo.u32 result, r2, 100000, r3;");
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(k.out[i], 700000 + i + 1000);
}

const char kThree[] =
    ".func (.param .b32 o) f0(.param .b32 n) { .reg .b32 r; ld.param.u32 r, [n]; add.u32 r, r, 1; "
    "st.param.b32 [o], r; ret; }\n"
    ".func (.param .b32 o) f1(.param .b32 n) { .reg .b32 r; ld.param.u32 r, [n]; mul.lo.u32 r, r, "
    "2; st.param.b32 [o], r; ret; }\n"
    ".func (.param .b32 o) f2(.param .b32 n) { .reg .b32 r; ld.param.u32 r, [n]; sub.u32 r, r, 3; "
    "st.param.b32 [o], r; ret; }\n"
    ".global .align 8 .u64 table[3] = {f0, f1, f2};\n";
const char kIndirect[] =
    "{ .param .b32 a; .param .b32 v; pr: .callprototype (.param .b32 _) _ (.param .b32 _);\n"
    "st.param.b32 [a], r0; call (v), d2, (a), pr; ld.param.b32 result, [v]; }";

TEST(ExecFlow, IndirectCallsDiverge) {
  OutKernel k(kThree, std::string("rem.u32 r1, r0, 3; mul.wide.u32 d0, r1, 8; mov.u64 d1, table; "
                                  "add.u64 d1, d1, d0; ld.global.u64 d2, [d1];\n") +
                          kIndirect);
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 64; ++i)
    ASSERT_EQ(k.out[i], i % 3 == 0 ? i + 1 : i % 3 == 1 ? 2 * i : i - 3) << i;
}

TEST(ExecFlow, WrongFunctionPointer) {
  for (const char* pointer :
       {"mov.u64 d2, 0;", "mov.u64 d2, table;", "mov.u64 d2, f0; add.u64 d2, d2, 1;"}) {
    OutKernel k(kThree, std::string(pointer) + kIndirect);
    ASSERT_TRUE(k.fault) << pointer;
    EXPECT_EQ(k.fault->kind, FaultKind::kInvalidPc) << pointer << k.fault->what;
  }
}

TEST(ExecFlow, BranchTable) {
  OutKernel k("",
              "and.b32 r1, r0, 3; ts: .branchtargets A, B, C, D; brx.idx r1, ts;\n"
              "A: mov.u32 result, 10; bra DONE; B: mov.u32 result, 20; bra DONE; C: mov.u32 "
              "result, 30; bra DONE; D: mov.u32 result, 40;");
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(k.out[i], 10 * (i % 4 + 1));
}

TEST(ExecFlow, BarriersAndSharedMemory) {
  // Inclusive scan of tid by doubling, in dynamic shared memory.
  OutKernel k(".extern .shared .align 4 .b8 dyn[];\n",
              "mov.u32 r1, dyn; shl.b32 r2, r0, 2; add.u32 r1, r1, r2; st.shared.u32 [r1], r0; "
              "mov.u32 r3, 1;\n"
              "LOOP: bar.sync 0; setp.ge.u32 p0, r0, r3; shl.b32 r4, r3, 2; sub.u32 r5, r1, r4; "
              "mov.u32 r6, 0; @p0 ld.shared.u32 r6, [r5];\n"
              "bar.sync 0; ld.shared.u32 r7, [r1]; add.u32 r7, r7, r6; st.shared.u32 [r1], r7; "
              "shl.b32 r3, r3, 1; setp.lt.u32 p1, r3, 256; @p1 bra LOOP;\n"
              "bar.sync 0; ld.shared.u32 result, [r1];",
              2, 256, 1024);
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 512; ++i) ASSERT_EQ(k.out[i], (i % 256) * (i % 256 + 1) / 2) << i;
}

TEST(ExecFlow, BarrierReductionsAndNamedBarriers) {
  OutKernel k("",
              "and.b32 r1, r0, 1; setp.ne.u32 p0, r1, 0; bar.red.popc.u32 r2, 0, p0; "
              "bar.red.and.pred p1, 0, p0; bar.red.or.pred p2, 0, p0;\n"
              "selp.u32 r3, 1, 0, p1; selp.u32 r4, 1, 0, p2; mad.lo.u32 result, r4, 1000, r2; "
              "mad.lo.u32 result, r3, 100000, result;",
              1, 96);
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t v : k.out) ASSERT_EQ(v, 1000u + 48);
  // Warp 0 produces, warp 1 consumes: arrive and sync on barrier 3 with 64 threads.
  OutKernel n("",
              ".shared .align 4 .b32 s[32]; and.b32 r1, r0, 31; shl.b32 r2, r1, 2; mov.u32 r3, s; "
              "add.u32 r3, r3, r2; setp.ge.u32 p0, r0, 32;\n"
              "mov.u32 result, 0; @p0 bra CONSUME; mul.lo.u32 r4, r0, 7; st.shared.u32 [r3], r4; "
              "bar.arrive 3, 64; bra DONE;\n"
              "CONSUME: bar.sync 3, 64; ld.shared.u32 result, [r3];");
  ASSERT_FALSE(n.fault) << n.fault->what;
  for (uint32_t i = 0; i < 32; ++i) ASSERT_EQ(n.out[32 + i], 7 * i);
}

TEST(ExecFlow, ExitedThreadsDoNotHoldTheBarrier) {
  OutKernel k("",
              "mov.u32 result, 5; setp.lt.u32 p0, r0, 40; @p0 exit; bar.sync 0; mov.u32 result, 9;",
              1, 128);
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 128; ++i) ASSERT_EQ(k.out[i], i < 40 ? 0u : 9u);
}

TEST(ExecFlow, SpinLockWithinAWarp) {
  OutKernel k(".global .u32 lock; .global .u32 counter;\n",
              "mov.u64 d0, lock; mov.u64 d1, counter; TRY: atom.global.cas.b32 r1, [d0], 0, 1; "
              "setp.ne.u32 p0, r1, 0; @p0 bra TRY;\n"
              "membar.gl; ld.volatile.global.u32 result, [d1]; add.u32 r2, result, 1; "
              "st.volatile.global.u32 [d1], r2; membar.gl;\n"
              "atom.global.exch.b32 r3, [d0], 0;",
              2, 64);
  ASSERT_FALSE(k.fault) << k.fault->what;
  std::sort(k.out.begin(), k.out.end());
  for (uint32_t i = 0; i < 128; ++i) ASSERT_EQ(k.out[i], i);
}

TEST(ExecFlow, WarpSyncFromTwoBranches) {
  OutKernel k(
      "",
      ".shared .align 4 .b32 s[64]; shl.b32 r1, r0, 2; mov.u32 r2, s; add.u32 r2, r2, r1; and.b32 "
      "r3, r0, 1; setp.eq.u32 p0, r3, 0;\n"
      "@p0 bra EVEN; st.shared.u32 [r2], r0; bar.warp.sync -1; bra JOIN; EVEN: mul.lo.u32 r4, r0, "
      "10; st.shared.u32 [r2], r4; bar.warp.sync -1;\n"
      "JOIN: xor.b32 r5, r1, 4; mov.u32 r2, s; add.u32 r2, r2, r5; ld.shared.u32 result, [r2];");
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(k.out[i], i % 2 ? (i ^ 1) * 10 : i ^ 1);
}

// ---------------------------------------------------------------- faults

TEST(ExecFault, OutOfBoundsNamesThreadAndAddress) {
  Device d(
      ".visible .entry k(.param .u64 p)\n{ .reg .b64 d<3>; .reg .b32 r<2>;\nld.param.u64 d0, [p]; "
      "mov.u32 r0, %tid.x;\n"
      "mul.wide.u32 d1, r0, 4; add.u64 d0, d0, d1;\nst.global.u32 [d0], r0; ret; }\n");
  ASSERT_TRUE(d.program) << d.why;
  auto* p = d.array<uint32_t>(70);  // threads 70.. are outside
  auto fault = d.launch("k", 1, 128, Device::Arguments().add(p));
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, FaultKind::kIllegalAddress) << fault->what;
  EXPECT_EQ(fault->thread[0], 70u);
  EXPECT_EQ(fault->address, reinterpret_cast<uint64_t>(p + 70));
  EXPECT_EQ(fault->access_bytes, 4u);
  EXPECT_TRUE(fault->is_store);
  EXPECT_EQ(fault->kernel, "k");
}

TEST(ExecFault, Kinds) {
  struct Case {
    const char* body;
    FaultKind kind;
  };
  for (const Case& c :
       {Case{"ld.global.u32 result, [0];", FaultKind::kIllegalAddress},
        Case{"ld.param.u64 d0, [o]; ld.global.u32 result, [d0+2];", FaultKind::kMisalignedAddress},
        Case{"ld.param.u64 d0, [o]; ld.global.v2.u64 {d1, d2}, [d0+8];",
             FaultKind::kMisalignedAddress},
        Case{"trap;", FaultKind::kLaunchFailed},
        Case{".shared .b32 s[4]; mov.u32 r1, s; ld.shared.u32 result, [r1+0x100000];",
             FaultKind::kIllegalAddress},
        Case{"ld.param.u64 d0, [o]; atom.global.add.u32 result, [d0+0x10000000], 1;",
             FaultKind::kIllegalAddress}}) {
    OutKernel k("", std::string("mov.u32 result, 0; ") + c.body);
    ASSERT_TRUE(k.fault) << c.body;
    EXPECT_EQ(k.fault->kind, c.kind) << c.body << " " << k.fault->what;
  }
}

TEST(ExecFault, EndlessLoopRunsIntoTheLimit) {
  OutKernel k("", "mov.u32 result, 0; L: bra L;", 1, 64, 0, 1000000);
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kTimeout) << k.fault->what;
}

TEST(ExecFault, EndlessRecursion) {
  OutKernel k(
      ".func f() { .local .b8 x[64]; .reg .b64 d; mov.u64 d, x; st.local.u32 [d], 1; call f; ret; "
      "}\n",
      "mov.u32 result, 0; call f;");
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kLaunchFailed) << k.fault->what;
}

TEST(ExecFault, EndlessRecursionWithoutVariables) {
  OutKernel k(".func f() { call.uni f; ret; }\n", "mov.u32 result, 0; call.uni f;");
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kLaunchFailed) << k.fault->what;
}

TEST(ExecFault, MoreLocalMemoryThanAThreadMayHaveIsRefused) {
  OutKernel k("", ".local .b8 x[1048576]; mov.u64 d0, x; st.local.u32 [d0], 1; mov.u32 result, 0;");
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kNotSupported) << k.fault->what;
}

TEST(ExecFault, UnknownModifierIsRefusedNotIgnored) {
  for (const char* body : {"add.rn.s32 result, r0, r0;", "add.ftz.u32 result, r0, r0;",
                           "mul.lo.sat.s32 result, r0, r0;"}) {
    OutKernel k("", body);
    ASSERT_TRUE(k.fault) << body;
    EXPECT_EQ(k.fault->kind, FaultKind::kNotSupported) << body;
    EXPECT_NE(k.fault->what.find("test.ptx(8)"), std::string::npos) << k.fault->what;
  }
}

// ---------------------------------------------------------------- built-in functions

TEST(ExecBuiltin, PrintfInOrderOfThreads) {
  OutKernel k(
      ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n"
      ".global .align 1 .b8 $str[16] = {116, 32, 37, 100, 32, 37, 46, 49, 102, 32, 37, 115, 10, "
      "0};\n"  // "t %d %.1f %s\n"
      ".global .align 1 .b8 $abc[4] = {97, 98, 99, 0};\n",
      ".local .align 8 .b8 buf[24]; .reg .f64 e; cvt.rn.f64.u32 e, r0; mov.u64 d0, buf; "
      "st.local.u32 [d0], r0; st.local.f64 [d0+8], e;\n"
      "mov.u64 d3, $abc; st.local.u64 [d0+16], d3; cvta.local.u64 d1, d0; mov.u64 d2, $str;\n"
      "{ .param .b64 f; .param .b64 a; .param .b32 v; st.param.b64 [f], d2; st.param.b64 [a], d1; "
      "call.uni (v), vprintf, (f, a); ld.param.b32 result, [v]; }",
      1, 40);
  ASSERT_FALSE(k.fault) << k.fault->what;
  std::string want;
  for (int i = 0; i < 40; ++i)
    want += "t " + std::to_string(i) + " " + std::to_string(i) + ".0 abc\n";
  EXPECT_EQ(k.device.output, want);
  for (uint32_t v : k.out) EXPECT_EQ(v, 3u);
}

TEST(ExecBuiltin, AssertFails) {
  OutKernel k(
      ".extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, "
      ".param .b64 c);\n"
      ".global .align 1 .b8 $m[2] = {120, 0}; .global .align 1 .b8 $f[5] = {97, 46, 99, 117, 0};\n",
      "mov.u32 result, 0; mov.u64 d0, $m; mov.u64 d1, $f; setp.eq.u32 p0, r0, 5; @!p0 bra DONE;\n"
      "{ .param .b64 m; .param .b64 f; .param .b32 l; .param .b64 n; .param .b64 c; st.param.b64 "
      "[m], d0; st.param.b64 [f], d1; st.param.b32 [l], 12;\n"
      "st.param.b64 [n], d0; st.param.b64 [c], 1; call.uni __assertfail, (m, f, l, n, c); }");
  ASSERT_TRUE(k.fault);
  EXPECT_EQ(k.fault->kind, FaultKind::kAssert) << k.fault->what;
  EXPECT_EQ(k.fault->message, "a.cu:12: x: block: [0,0,0], thread: [5,0,0] Assertion `x` failed.");
  EXPECT_EQ(k.device.output, "");
}

TEST(ExecBuiltin, MallocAndFree) {
  OutKernel k(
      ".extern .func (.param .b64 r) malloc(.param .b64 n);\n.extern .func free(.param .b64 p);\n",
      "{ .param .b64 n; .param .b64 v; st.param.b64 [n], 64; call.uni (v), malloc, (n); "
      "ld.param.b64 d0, [v]; }\n"
      "setp.eq.u64 p0, d0, 0; mov.u32 result, 77; @p0 bra DONE; mul.lo.u32 r1, r0, 3; st.u32 "
      "[d0+60], r1; bar.sync 0; ld.u32 result, [d0+60];\n"
      "{ .param .b64 p; st.param.b64 [p], d0; call.uni free, (p); }",
      2, 128);
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 256; ++i) ASSERT_EQ(k.out[i], i % 128 * 3);
}

TEST(ExecProgram, KernelInformation) {
  Device d(
      ".global .u32 g = 5;\n.const .u32 c[4];\n.extern .shared .b8 dyn[];\n"
      ".visible .entry a(.param .u32 x, .param .align 8 .b8 s[24]) .maxntid 64 { .shared .b8 "
      "q[100]; .local .b8 l[40]; .reg .b64 d; mov.u64 d, q; mov.u64 d, l; ret; }\n"
      ".visible .entry b() .reqntid 8, 4 { ret; }\n");
  ASSERT_TRUE(d.program) << d.why;
  EXPECT_EQ(d.program->kernel_count(), 2);
  EXPECT_EQ(d.program->kernel_index("b"), 1);
  EXPECT_EQ(d.program->kernel_index("nope"), -1);
  std::string why;
  const KernelInfo* a = d.program->kernel(0, &why);
  ASSERT_TRUE(a) << why;
  EXPECT_EQ(a->name, "a");
  ASSERT_EQ(a->parameters.size(), 2u);
  EXPECT_EQ(a->parameters[1].offset, 8u);
  EXPECT_EQ(a->parameters[1].bytes, 24u);
  EXPECT_EQ(a->parameter_bytes, 32u);
  EXPECT_EQ(a->static_shared_bytes, 100u);
  EXPECT_GE(a->local_bytes, 40u);
  EXPECT_EQ(a->max_threads_per_block, 64u);
  EXPECT_GE(a->registers, 1u);
  const KernelInfo* b = d.program->kernel(1, &why);
  ASSERT_TRUE(b) << why;
  EXPECT_EQ(b->required_block[0], 8u);
  EXPECT_EQ(b->required_block[1], 4u);
  EXPECT_EQ(b->required_block[2], 1u);
}

// Linkers go by names: a unit may think that a function has a result, and another one defines it
// without.
TEST(ExecProgram, ADeclaredResultThatTheDefinitionDoesNotHave) {
  const std::string header = ".version 8.0\n.target sm_80\n.address_size 64\n";
  const std::string definition = header + R"(
.visible .func consume(.param .b64 where, .param .b32 value)
{ .reg .b64 %a; .reg .b32 %v; ld.param.u64 %a, [where]; ld.param.u32 %v, [value];
  st.u32 [%a], %v; ret; })";
  const std::string caller = header + R"(
.extern .func (.param .b64 r) consume(.param .b64 where, .param .b32 value);
.visible .entry k(.param .u64 out)
{
  .reg .b64 %out, %r; .reg .b32 %v;
  ld.param.u64 %out, [out];
  mov.u32 %v, 42;
  { .param .b64 a; .param .b32 b; .param .b64 c; st.param.b64 [a], %out; st.param.b32 [b], %v;
    call.uni (c), consume, (a, b); ld.param.b64 %r, [c]; }
  st.global.u32 [%out+4], %v;
  ret;
})";
  Device d("");
  d.program =
      load_program({{"caller.ptx", caller}, {"definition.ptx", definition}}, d.model, d.memory)
          .program;
  ASSERT_TRUE(d.program);
  auto* out = d.array<uint32_t>(2);
  const auto fault = d.launch("k", 1, 1, Device::Arguments().add(out));
  ASSERT_FALSE(fault) << fault->what;
  EXPECT_EQ(out[0], 42u);
  EXPECT_EQ(out[1], 42u);
}

TEST(ExecFlow, AFunctionThatReturnsLessThanThePrototypeSays) {
  OutKernel k(
      ".func g(.param .b32 x) { ret; }\n",
      "{ .param .align 4 .b8 r[1000000]; .param .b32 a; st.param.b32 [a], r0; mov.u64 d0, g;\n"
      "proto: .callprototype (.param .align 4 .b8 _[1000000]) _ (.param .b32 _);\n"
      "call (r), d0, (a), proto; } mov.u32 result, 7;");
  ASSERT_FALSE(k.fault) << k.fault->what;
  for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(k.out[i], 7u);
}

TEST(ExecFlow, AKernelWithoutAnInstruction) {
  Device d(".visible .entry k(.param .u64 o) { }\n");
  EXPECT_FALSE(d.launch("k", 1, 32, Device::Arguments().add(d.array<uint32_t>(1))));
}

TEST(ExecProgram, ALimitOfRegistersIsKept) {
  std::string body = ".visible .entry k(.param .u64 out)\n{ .reg .b64 %o; .reg .b32 %r<64>;\n";
  for (int i = 0; i < 64; ++i) body += "mov.u32 %r" + std::to_string(i) + ", %tid.x;\n";
  body += "ld.param.u64 %o, [out];\n";
  for (int i = 0; i < 64; ++i)
    body += "st.global.u32 [%o+" + std::to_string(4 * i) + "], %r" + std::to_string(i) + ";\n";
  body = ".version 8.0\n.target sm_80\n.address_size 64\n" + body + "ret; }\n";
  Device d("");
  std::string why;
  auto registers = [&](uint32_t limit) {
    d.program = load_program({{"k.ptx", body, limit}}, d.model, d.memory).program;
    const KernelInfo* info = d.program->kernel(0, &why);
    return info ? info->registers : 0;
  };
  EXPECT_GT(registers(0), 38u) << why;
  EXPECT_LE(registers(38), 38u) << why;
  EXPECT_GE(registers(38), 1u) << why;
}

// ---- strict mode: what is undefined, and a card does not report, is a fault ----

class ExecStrict : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv("GPUPOOL_SIMGPU_STRICT"); }
  // What is found; "": nothing. Without strict mode it has to run.
  static std::string found(const std::string& before, const std::string& body,
                           uint32_t block = 64) {
    unsetenv("GPUPOOL_SIMGPU_STRICT");
    const OutKernel usual(before, body, 2, block);
    EXPECT_FALSE(usual.fault) << usual.fault->what;
    setenv("GPUPOOL_SIMGPU_STRICT", "1", 1);
    const OutKernel strict(before, body, 2, block);
    if (!strict.fault) {
      EXPECT_EQ(strict.out, usual.out);
      return "";
    }
    EXPECT_EQ(strict.fault->kind, FaultKind::kLaunchFailed);
    return strict.fault->what.substr(0, strict.fault->what.find(": ", 13)) + " by " +
           std::to_string(strict.fault->thread[0]);
  }
};

TEST_F(ExecStrict, SharedMemoryThatTheBlockHasNotWritten) {
  const std::string memory = ".shared .align 16 .b8 s[1024];\n";
  const std::string address =
      "mov.u32 result, 0; mov.u32 r1, s; mad.lo.u32 r2, r0, 4, r1; mov.u64 d0, s; "
      "cvta.shared.u64 d0, d0; mul.wide.u32 d1, r0, 4; add.u64 d0, d0, d1;\n";
  const std::string unwritten =
      "strict mode: a read of shared memory that the block has not written by ";
  EXPECT_EQ(
      found(memory, address + "st.shared.u32 [r2], r0; bar.sync 0; ld.shared.u32 result, [r2];"),
      "");
  EXPECT_EQ(found(memory, address + "ld.shared.u32 result, [r2];"), unwritten + "0");
  EXPECT_EQ(found(memory, address + "ld.u32 result, [d0];"), unwritten + "0");
  EXPECT_EQ(found(memory, address + "atom.shared.add.u32 result, [r2], 1;"), unwritten + "0");
  // Of each thread's 4 bytes 3 are written; thread 40 writes nothing.
  EXPECT_EQ(found(memory, address + "st.shared.u16 [r2], 1; st.shared.u8 [r2+2], 2; "
                                    "ld.shared.u16 result, [r2];"),
            "");
  EXPECT_EQ(found(memory, address + "st.shared.u16 [r2], 1; st.shared.u8 [r2+2], 2; "
                                    "ld.shared.u32 result, [r2];"),
            unwritten + "0");
  EXPECT_EQ(found(memory, address + "setp.ne.u32 p0, r0, 40; @p0 st.u32 [d0], r0; bar.sync 0; "
                                    "@p0 ld.shared.u32 result, [r2];"),
            "");
  EXPECT_EQ(found(memory, address + "setp.ne.u32 p0, r0, 40; @p0 st.u32 [d0], r0; bar.sync 0; "
                                    "ld.u32 result, [d0];"),
            unwritten + "40");
  EXPECT_EQ(
      found(memory, address + "mad.lo.u32 r2, r0, 16, r1; st.shared.v4.u32 [r2], {r0, r0, r0, "
                              "r0}; ld.shared.v2.u32 {result, r5}, [r2+8];"),
      "");
  // What the block before wrote is not this block's.
  EXPECT_EQ(
      found(memory, address + "mov.u32 r3, %ctaid.x; setp.eq.u32 p0, r3, 0; @p0 st.shared.u32 "
                              "[r2], r0; @!p0 ld.shared.u32 result, [r2];"),
      unwritten + "0");
}

TEST_F(ExecStrict, ThreadsOutsideOfTheirOwnMemberMask) {
  const std::string outside = "strict mode: the thread is not in its own member mask by ";
  EXPECT_EQ(found("", "vote.sync.ballot.b32 result, 1, -1;"), "");
  EXPECT_EQ(found("",
                  "setp.lt.u32 p0, r0, 8; mov.u32 result, 0; @!p0 bra DONE; "
                  "vote.sync.ballot.b32 result, 1, 255;"),
            "");
  EXPECT_EQ(found("", "vote.sync.ballot.b32 result, 1, 0xfffffffb;"), outside + "2");
  EXPECT_EQ(found("", "mov.u32 result, 0; bar.warp.sync 0xfffffff7;"), outside + "3");
  EXPECT_EQ(found("", "shfl.sync.idx.b32 result, r0, 1, 31, 0xffffffef;"), outside + "4");
  EXPECT_EQ(found("", "match.any.sync.b32 result, r0, 0xffffffdf;"), outside + "5");
  EXPECT_EQ(found("", "redux.sync.add.u32 result, r0, 0xffffffbf;"), outside + "6");
}

TEST_F(ExecStrict, ShufflesFromThreadsThatDoNotTakePart) {
  const std::string absent =
      "strict mode: the thread takes the value of one that does not take part by ";
  for (const char* mode : {"up", "down", "bfly", "idx"})
    EXPECT_EQ(found("", std::string("shfl.sync.") + mode + ".b32 result, r0, 3, " +
                            (mode == std::string("up") ? "0" : "31") + ", -1;"),
              "")
        << mode;
  const std::string half =
      "and.b32 r2, r0, 31; setp.lt.u32 p0, r2, 16; mov.u32 result, 0; @!p0 bra DONE; ";
  EXPECT_EQ(found("", half + "shfl.sync.down.b32 result, r0, 8, 0x100f, 0xffff;"), "");
  EXPECT_EQ(found("", half + "shfl.sync.down.b32 result, r0, 8, 31, 0xffff;"), absent + "8");
  EXPECT_EQ(found("", half + "shfl.sync.bfly.b32 result, r0, 16, 31, 0xffff;"), absent + "0");
  EXPECT_EQ(found("", half + "shfl.sync.idx.b32 result, r0, 20, 31, 0xffff;"), absent + "0");
  // Of a warp with 8 threads.
  EXPECT_EQ(found("", "shfl.sync.down.b32 result, r0, 1, 31, -1;", 40), absent + "39");
}

TEST_F(ExecStrict, OneWarpAtTwoBarriers) {
  const std::string two =
      "setp.lt.u32 p0, r0, 7; mov.u32 result, 1; @p0 bra LOW; %1 bra.uni DONE; LOW: %2";
  const auto text = [&](const std::string& barrier) {
    std::string s = two;
    s.replace(s.find("%1"), 2, barrier);
    return s.replace(s.find("%2"), 2, barrier);
  };
  const std::string apart =
      "strict mode: threads of one warp are at different barrier instructions";
  EXPECT_EQ(found("", text("bar.sync 0;")).substr(0, apart.size()), apart);
  EXPECT_EQ(found("", text("barrier.sync.aligned 0;")).substr(0, apart.size()), apart);
  EXPECT_EQ(found("", text("barrier.sync 0;")), "");
  // Whole warps at two places, and threads that come to one place at different times.
  EXPECT_EQ(found("",
                  "setp.lt.u32 p0, r0, 32; mov.u32 result, 1; @p0 bra LOW; bar.sync 0; bra.uni "
                  "DONE; LOW: bar.sync 0;"),
            "");
  EXPECT_EQ(found("",
                  "setp.lt.u32 p0, r0, 7; mov.u32 result, 1; @p0 bra LOW; add.u32 result, "
                  "result, 1; LOW: bar.sync 0;"),
            "");
}

}  // namespace
}  // namespace gpupool::simgpu
