// Programs that rely on independent thread scheduling, under random orders of blocks, warps and
// paths: right and without hanging in every one. GPUPOOL_TEST_SHUFFLES is the number of orders.
#include <cstdlib>

#include "fixture.h"

namespace gpupool::simgpu {
namespace {

class Shuffle : public EngineTest {
 protected:
  void SetUp() override { load(GPUPOOL_KERNELS "/flow.ptx"); }
  void TearDown() override { unsetenv("GPUPOOL_SIMGPU_SHUFFLE"); }
  template <class Fn>
  void each_order(Fn fn) {
    const char* text = std::getenv("GPUPOOL_TEST_SHUFFLES");
    const int orders = text ? std::atoi(text) : 1000;
    for (int seed = 1; seed <= orders && !HasFatalFailure(); ++seed) {
      SCOPED_TRACE(seed);
      setenv("GPUPOOL_SIMGPU_SHUFFLE", std::to_string(seed).c_str(), 1);
      fn();
    }
  }
};

int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

TEST_F(Shuffle, SpinLockInsideAWarp) {
  int* counter = array<int>(1);
  each_order([&] {
    *counter = 0;
    run("spin_lock", {.gx = 3, .bx = 64}, counter);
    ASSERT_EQ(*counter, 192);
  });
}
TEST_F(Shuffle, SpinLockThroughCalls) {
  int* counter = array<int>(1);
  each_order([&] {
    *counter = 0;
    run("spin_lock_by_calls", {.gx = 2, .bx = 32}, counter);
    ASSERT_EQ(*counter, 64);
  });
}
TEST_F(Shuffle, SyncwarpFromTwoBranches) {
  int* out = array<int>(32);
  each_order([&] {
    for (int i = 0; i < 32; ++i) out[i] = 0;
    run("syncwarp_branches", {.bx = 32}, out);
    for (int i = 0; i < 32; ++i) ASSERT_EQ(out[i], i < 16 ? i + 16 + 200 : i - 16 + 100) << i;
  });
}
TEST_F(Shuffle, ProducerAndConsumerInOneWarp) {
  int* out = array<int>(1);
  each_order([&] {
    *out = 0;
    run("producer_consumer", {.bx = 32}, out);
    ASSERT_EQ(*out, 42);
  });
}
TEST_F(Shuffle, DivergentRecursion) {
  int* out = array<int>(32);
  each_order([&] {
    for (int i = 0; i < 32; ++i) out[i] = 0;
    run("recursion", {.bx = 32}, out);
    for (int i = 0; i < 32; ++i) ASSERT_EQ(out[i], fib(i % 16)) << i;
  });
}
TEST_F(Shuffle, ThreadsThatExitDontHoldABarrier) {
  int* out = array<int>(96);
  each_order([&] {
    for (int t = 0; t < 96; ++t) out[t] = 0;
    run("early_exit", {.bx = 96}, out);
    // How many lanes are together after the barrier depends on the order.
    for (int t = 0; t < 96; ++t) ASSERT_EQ(out[t] > 0, t % 3 != 0) << t;
  });
}
TEST_F(Shuffle, DivergentLoops) {
  const int n = 500;
  int* out = array<int>(n + 12);
  run("divergent_loops", {.gx = 4, .bx = 128}, out);
  const std::vector<int> usual(out, out + n);
  each_order([&] {
    for (int i = 0; i < n; ++i) out[i] = 0;
    run("divergent_loops", {.gx = 4, .bx = 128}, out);
    for (int i = 0; i < n; ++i) ASSERT_EQ(out[i], usual[i]) << i;
  });
}

}  // namespace
}  // namespace gpupool::simgpu
