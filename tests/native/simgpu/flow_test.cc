// The kernels of kernels/flow.cu: control flow, faults, output.
#include <set>

#include "fixture.h"

namespace gpupool::simgpu {
namespace {

class Flow : public EngineTest {
 protected:
  void SetUp() override { load(GPUPOOL_KERNELS "/flow.ptx"); }
};

int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

TEST_F(Flow, Recursion) {
  int* out = array<int>(64);
  run("recursion", {.bx = 64}, out);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], fib(i % 16)) << i;
}
TEST_F(Flow, PointersToFunctions) {
  int* out = array<int>(50);
  run("pointers", {.bx = 50}, out, 4);
  for (int i = 0; i < 50; ++i) {
    const int want[3] = {i + 7, i - 7, i * 7};
    EXPECT_EQ(out[i], want[(i + 4) % 3]) << i;
  }
}
TEST_F(Flow, VirtualCalls) {
  float* out = array<float>(48);
  run("virtual_calls", {.bx = 48}, out);
  for (int i = 0; i < 48; ++i)
    EXPECT_EQ(out[i], i & 1 ? static_cast<float>(i * i) : 3.0f * i * i) << i;
}
TEST_F(Flow, Printf) {
  run("print", {.bx = 40}, 3);
  EXPECT_EQ(
      printed,
      "thread 0 of block: 0.000 -5\nthread 1 of block: 0.500 -5\nthread 2 of block: 1.000 -5\n");
}
TEST_F(Flow, SpinLockInsideAWarp) {
  int* counter = array<int>(1);
  run("spin_lock", {.gx = 3, .bx = 64}, counter);
  EXPECT_EQ(*counter, 192);
}
TEST_F(Flow, SpinLockThroughCalls) {
  int* counter = array<int>(1);
  run("spin_lock_by_calls", {.gx = 2, .bx = 96}, counter);
  EXPECT_EQ(*counter, 192);
}
TEST_F(Flow, SyncwarpFromTwoBranches) {
  int* out = array<int>(32);
  run("syncwarp_branches", {.bx = 32}, out);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(out[i], i < 16 ? i + 16 + 200 : i - 16 + 100) << i;
}
TEST_F(Flow, ProducerAndConsumerInOneWarp) {
  int* out = array<int>(1);
  run("producer_consumer", {.bx = 32}, out);
  EXPECT_EQ(*out, 42);
}
TEST_F(Flow, DivergentLoops) {
  const int n = 500;
  int* out = array<int>(n + 12);
  run("divergent_loops", {.gx = 4, .bx = 128}, out);
  for (int i = 0; i < n; ++i) {
    int x = i % 97 + 1, steps = 0;
    while (x != 1) {
      x = (x & 1) ? 3 * x + 1 : x / 2;
      ++steps;
    }
    switch (i % 7) {
      case 0:
        steps += 10;
        break;
      case 1:
        steps *= 2;
        break;
      case 2:
        steps -= 3;
        break;
      case 3:
        steps ^= 5;
        break;
      case 5:
        steps = -steps;
        break;
    }
    ASSERT_EQ(out[i], steps) << i;
  }
}
TEST_F(Flow, LocalArray) {
  int* out = array<int>(64);
  run("local_array", {.bx = 64}, out, 20);
  for (int t = 0; t < 64; ++t) {
    int s = 0;
    for (int k = 0; k < 20; ++k) s += ((k * 7 + t) & 31) * t;
    EXPECT_EQ(out[t], s);
  }
}
struct Big {
  int v[20];
};
TEST_F(Flow, LargeParametersAndResults) {
  Big b;
  for (int k = 0; k < 20; ++k) b.v[k] = k * k;
  int* out = array<int>(64);
  run("big_parameter", {.bx = 64}, b, out);
  for (int t = 0; t < 64; ++t) EXPECT_EQ(out[t], b.v[t % 20]);
  run("big_result", {.bx = 64}, b, out);
  for (int t = 0; t < 64; ++t) EXPECT_EQ(out[t], 2470 + 20 * t);
}
TEST_F(Flow, Votes) {
  unsigned* out = array<unsigned>(64 * 8);
  run("votes", {.bx = 64}, out);
  for (unsigned t = 0; t < 64; ++t) {
    const unsigned* o = out + t * 8;
    EXPECT_EQ(o[0], 0xaaaaaaaau);
    EXPECT_EQ(o[1], t >= 32 ? 1u : 0u);
    EXPECT_EQ(o[2], 1u);
    unsigned same = 0;
    for (unsigned l = 0; l < 32; ++l)
      if ((l + (t & ~31u)) % 3 == t % 3) same |= 1u << l;
    EXPECT_EQ(o[3], same);
    EXPECT_EQ(o[4], (t & 7) >= 3 ? t - 3 : t);
    EXPECT_EQ(o[5], (t & ~15u) + 5);
    EXPECT_EQ(o[6], t & 1 ? 0xaaaaaaaau : 0u);
    EXPECT_EQ(o[7], 13u);
  }
}
TEST_F(Flow, ThreadsThatExitDontHoldABarrier) {
  int* out = array<int>(96);
  run("early_exit", {.bx = 96}, out);
  for (int t = 0; t < 96; ++t) {
    int alive = 0;
    for (int l = 0; l < 32; ++l) alive += ((t & ~31) + l) % 3 != 0;
    EXPECT_EQ(out[t], t % 3 ? alive : 0);
  }
}
TEST_F(Flow, OutOfBounds) {
  int* out = array<int>(100);
  run("out_of_bounds", {.bx = 64}, out, 36);
  const auto f = launch("out_of_bounds", {.gx = 1, .bx = 64}, out, 37);
  ASSERT_TRUE(f);
  EXPECT_EQ(f->kind, FaultKind::kIllegalAddress);
  EXPECT_EQ(f->thread[0], 63u);
  EXPECT_EQ(f->address, reinterpret_cast<uint64_t>(out) + 400);
  EXPECT_TRUE(f->is_store);
  EXPECT_EQ(f->kernel, "out_of_bounds");
  EXPECT_NE(f->what.find("st.global"), std::string::npos) << f->what;
}
TEST_F(Flow, Misaligned) {
  char* out = array<char>(1000);
  const auto f = launch("misaligned", {.bx = 32}, out);
  ASSERT_TRUE(f);
  EXPECT_EQ(f->kind, FaultKind::kMisalignedAddress);
  EXPECT_EQ(f->thread[0], 0u);
}
TEST_F(Flow, Trap) {
  const auto f = launch("trapping", {.bx = 32});
  ASSERT_TRUE(f);
  EXPECT_EQ(f->kind, FaultKind::kLaunchFailed);
  EXPECT_EQ(f->thread[0], 5u);
}
TEST_F(Flow, BlocksThatWaitForLaterBlocks) {
  int* flag = array<int>(1);
  int* out = array<int>(1);
  run("wait_for_flag", {.gx = 40, .bx = 32}, flag, out);
  EXPECT_EQ(*out, 1);
}
TEST_F(Flow, Cancel) {
  int* flag = array<int>(1);
  int* out = array<int>(1);
  cancel = true;
  const auto f = launch("wait_for_flag", {.gx = 1, .bx = 32}, flag, out);
  ASSERT_TRUE(f);
  EXPECT_EQ(f->kind, FaultKind::kCancelled);
}

}  // namespace
}  // namespace gpupool::simgpu
