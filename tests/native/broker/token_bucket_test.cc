#include "broker/token_bucket.h"

#include <gtest/gtest.h>

#include <limits>

namespace gpupool::broker {
namespace {

int taken(TokenBucket& bucket, int64_t now_ms) {
  int count = 0;
  while (bucket.take(now_ms)) count++;
  return count;
}

TEST(TokenBucket, GivesItsBurstAndThenItsRate) {
  TokenBucket bucket(5, 100);
  EXPECT_EQ(taken(bucket, 1000), 5);
  EXPECT_EQ(taken(bucket, 1009), 0);
  EXPECT_EQ(taken(bucket, 1010), 1);
  EXPECT_EQ(taken(bucket, 1030), 2);
}

TEST(TokenBucket, HoldsNoMoreThanItsBurst) {
  TokenBucket bucket(5, 100);
  EXPECT_EQ(taken(bucket, 1), 5);
  EXPECT_EQ(taken(bucket, std::numeric_limits<int64_t>::max()), 5);
}

TEST(TokenBucket, ATimeBeforeGivesNothing) {
  TokenBucket bucket(2, 1000);
  EXPECT_EQ(taken(bucket, 1000), 2);
  EXPECT_EQ(taken(bucket, 500), 0);
  EXPECT_EQ(taken(bucket, 1000), 0);
  EXPECT_EQ(taken(bucket, 1001), 1);
}

}  // namespace
}  // namespace gpupool::broker
