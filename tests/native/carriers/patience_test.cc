#include "carriers/patience.h"

#include <gtest/gtest.h>

#include <thread>

namespace gpupool::test {
namespace {

using carriers::Patience;

TEST(Patience, IsLostAfterLongWaitsAndComesBack) {
  Patience patience(50'000, 100'000);
  EXPECT_TRUE(patience.worthwhile());
  for (int i = 0; i < 20; i++) patience.waited(10'000'000);
  EXPECT_FALSE(patience.worthwhile());
  for (int i = 0; i < 20; i++) patience.waited(5'000);
  EXPECT_TRUE(patience.worthwhile());
}

TEST(Patience, OnOneProcessorOnlyForAPeerThatIsElsewhere) {
  // In a thread of its own, whose affinity nobody else has.
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    Patience patience;
    EXPECT_FALSE(patience.worthwhile());
    patience.peer_is_elsewhere();
    EXPECT_TRUE(patience.worthwhile());
    patience.forbid(true);  // CU_CTX_SCHED_BLOCKING_SYNC
    EXPECT_FALSE(patience.worthwhile());
  }).join();
}

}  // namespace
}  // namespace gpupool::test
