// The device runtime's functions for the whole grid of a cooperative launch, as Numba calls them.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

const char* const kDeclarations = R"(
.extern .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 scope);
.extern .func (.param .b32 r) cudaCGSynchronize(.param .b64 handle, .param .b32 flags);
.extern .func (.param .b32 r) cudaCGGetSize(.param .b64 a, .param .b64 b, .param .b64 handle);
.extern .func (.param .b32 r) cudaCGGetRank(.param .b64 a, .param .b64 b, .param .b64 handle);
)";

const char* const kHandle = R"(
{ .param .b32 s; .param .b64 h; st.param.b32 [s], 1;
  call.uni (h), cudaCGGetIntrinsicHandle, (s); ld.param.b64 %handle, [h]; }
)";

// Rotates an array by one place in each round, with a barrier of the grid in between: %i is this
// thread's rank, %n the number of threads.
std::string rotation() {
  return std::string(kDeclarations) + R"(
.visible .entry rotate(.param .u64 a, .param .u64 b, .param .u32 rounds)
{
  .reg .pred %p; .reg .b32 %i, %n, %j, %r, %v, %status;
  .reg .b64 %a, %b, %t, %from, %to, %handle, %where, %none;
  .local .align 4 .b32 place[2];
  ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u32 %r, [rounds];)" +
         kHandle + R"(
  mov.u64 %where, place; cvta.local.u64 %where, %where; mov.u64 %none, 0;
  { .param .b64 x; .param .b64 y; .param .b64 z; .param .b32 s;
    st.param.b64 [x], %where; st.param.b64 [y], %none; st.param.b64 [z], %handle;
    call.uni (s), cudaCGGetRank, (x, y, z); ld.param.b32 %status, [s]; }
  ld.u32 %i, [%where];
  { .param .b64 x; .param .b64 y; .param .b64 z; .param .b32 s;
    st.param.b64 [x], %where; st.param.b64 [y], %none; st.param.b64 [z], %handle;
    call.uni (s), cudaCGGetSize, (x, y, z); ld.param.b32 %status, [s]; }
  ld.u32 %n, [%where];
ROUND:
  setp.eq.u32 %p, %r, 0;
  @%p ret;
  add.u32 %j, %i, 1; rem.u32 %j, %j, %n;
  mul.wide.u32 %from, %j, 4; add.u64 %from, %a, %from;
  mul.wide.u32 %to, %i, 4; add.u64 %to, %b, %to;
  ld.global.u32 %v, [%from]; st.global.u32 [%to], %v;
  { .param .b64 h; .param .b32 f; .param .b32 s; st.param.b64 [h], %handle; st.param.b32 [f], 0;
    call.uni (s), cudaCGSynchronize, (h, f); ld.param.b32 %status, [s]; }
  mov.u64 %t, %a; mov.u64 %a, %b; mov.u64 %b, %t;
  sub.u32 %r, %r, 1;
  bra ROUND;
})";
}

TEST(ExecGrid, SynchronizesAllBlocks) {
  Device device(rotation());
  ASSERT_TRUE(device.program) << device.why;
  device.cooperative = true;
  constexpr uint32_t kBlocks = 7, kThreads = 70, n = kBlocks * kThreads;
  for (const uint32_t rounds : {0u, 1u, 50u}) {
    auto* a = device.array<uint32_t>(n);
    auto* b = device.array<uint32_t>(n);
    for (uint32_t i = 0; i < n; ++i) a[i] = 1000 + i;
    const auto fault =
        device.launch("rotate", kBlocks, kThreads, Device::Arguments().add(a).add(b).add(rounds));
    ASSERT_FALSE(fault) << fault->what;
    const uint32_t* result = rounds % 2 ? b : a;
    for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(result[i], 1000 + (i + rounds) % n) << rounds;
  }
}

TEST(ExecGrid, WithoutACooperativeLaunchThereIsNoGrid) {
  const std::string text = std::string(kDeclarations) + R"(
.visible .entry ask(.param .u64 out)
{
  .reg .b32 %status; .reg .b64 %handle, %out;
  ld.param.u64 %out, [out];)" +
                           kHandle +
                           R"(
  { .param .b64 h; .param .b32 f; .param .b32 s; st.param.b64 [h], %handle; st.param.b32 [f], 0;
    call.uni (s), cudaCGSynchronize, (h, f); ld.param.b32 %status, [s]; }
  st.global.u32 [%out], %status;
  ret;
})";
  Device device(text);
  ASSERT_TRUE(device.program) << device.why;
  auto* out = device.array<uint32_t>(1);
  const auto fault = device.launch("ask", 1, 1, Device::Arguments().add(out));
  ASSERT_FALSE(fault) << fault->what;
  EXPECT_NE(*out, 0u);
}

TEST(ExecGrid, AProgramsOwnDefinitionCounts) {
  Device device(R"(
.visible .func (.param .b32 r) cudaCGSynchronize(.param .b64 handle, .param .b32 flags)
{ st.param.b32 [r], 77; ret; }
.visible .entry ask(.param .u64 out)
{
  .reg .b32 %status; .reg .b64 %zero, %out;
  ld.param.u64 %out, [out]; mov.u64 %zero, 0;
  { .param .b64 h; .param .b32 f; .param .b32 s; st.param.b64 [h], %zero; st.param.b32 [f], 0;
    call.uni (s), cudaCGSynchronize, (h, f); ld.param.b32 %status, [s]; }
  st.global.u32 [%out], %status;
  ret;
})");
  ASSERT_TRUE(device.program) << device.why;
  auto* out = device.array<uint32_t>(1);
  const auto fault = device.launch("ask", 1, 1, Device::Arguments().add(out));
  ASSERT_FALSE(fault) << fault->what;
  EXPECT_EQ(*out, 77u);
}

}  // namespace
}  // namespace gpupool::simgpu
