#include "broker/account.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace gpupool::broker {
namespace {

TEST(SliceAccount, ChargesUpToTheLimit) {
  SliceAccount account(100);
  Charge one, two;
  EXPECT_TRUE(account.charge(one, 60));
  EXPECT_FALSE(account.charge(two, 41));
  EXPECT_EQ(two.bytes, 0u);
  EXPECT_TRUE(account.charge(two, 40));
  EXPECT_FALSE(account.charge(one, 1));
  EXPECT_EQ(account.used(), 100u);
}

TEST(SliceAccount, DoesNotOverflow) {
  SliceAccount account(UINT64_MAX);
  Charge worker;
  EXPECT_TRUE(account.charge(worker, UINT64_MAX));
  EXPECT_FALSE(account.charge(worker, 1));
  EXPECT_FALSE(account.charge(worker, UINT64_MAX));
  EXPECT_EQ(account.close(worker), UINT64_MAX);
  EXPECT_EQ(account.used(), 0u);
}

TEST(SliceAccount, RefundsOnlyWhatTheWorkerHas) {
  SliceAccount account(100);
  Charge one, two;
  ASSERT_TRUE(account.charge(one, 30));
  ASSERT_TRUE(account.charge(two, 5));
  EXPECT_EQ(account.refund(two, 30), 5u);
  EXPECT_EQ(account.used(), 30u);
  EXPECT_EQ(account.refund(two, 1), 0u);
  EXPECT_EQ(account.close(one), 30u);
  EXPECT_EQ(account.close(one), 0u);
  EXPECT_EQ(account.used(), 0u);
}

TEST(SliceAccount, ShrinksOnlyToWhatIsUsed) {
  SliceAccount account(100);
  Charge worker;
  ASSERT_TRUE(account.charge(worker, 50));
  EXPECT_FALSE(account.resize(49));
  EXPECT_EQ(account.limit(), 100u);
  EXPECT_TRUE(account.resize(50));
  EXPECT_FALSE(account.charge(worker, 1));
  EXPECT_TRUE(account.resize(60));
  EXPECT_TRUE(account.charge(worker, 10));
}

// The sum of what the workers hold is what is used, and never over the limit, whatever they do.
TEST(SliceAccount, StaysConsistentUnderAnySequence) {
  std::mt19937_64 random(7);
  SliceAccount account(1000);
  std::vector<Charge> workers(5);
  for (int step = 0; step < 100000; step++) {
    Charge& worker = workers[random() % workers.size()];
    const uint64_t bytes = random() % 8 == 0 ? random() : random() % 700;
    switch (random() % 8) {
      case 0:
        account.close(worker);
        ASSERT_EQ(worker.bytes, 0u);
        break;
      case 1:
        account.resize(random() % 2000);
        break;
      case 2:
      case 3:
      case 4:
        account.refund(worker, bytes);
        break;
      default:
        account.charge(worker, bytes);
    }
    uint64_t sum = 0;
    for (const Charge& each : workers) sum += each.bytes;
    ASSERT_EQ(sum, account.used());
    ASSERT_LE(account.used(), account.limit());
  }
}

TEST(SliceAccount, HostMemoryIsAccountedApart) {
  SliceAccount account(100);
  account.host.resize(50);
  Charge device, host;
  EXPECT_TRUE(account.charge(device, 100));
  EXPECT_TRUE(account.host.charge(host, 50));
  EXPECT_FALSE(account.host.charge(host, 1));
  EXPECT_EQ(account.host.close(host), 50u);
  EXPECT_EQ(account.used(), 100u);
  EXPECT_EQ(account.host.used(), 0u);
}

// 16 MiB for all of a slice's sessions together, which come back with each of them.
TEST(SliceAccount, WhatIsBorneIsTheSlicesNotTheSessions) {
  SliceAccount account(0);
  Charge one, two;
  EXPECT_TRUE(account.borne.charge(one, 10ull << 20));
  EXPECT_FALSE(account.borne.charge(two, 7ull << 20));
  EXPECT_TRUE(account.borne.charge(two, 6ull << 20));
  EXPECT_EQ(account.used(), 0u);
  EXPECT_EQ(account.borne.close(one), 10ull << 20);
  EXPECT_TRUE(account.borne.charge(two, 10ull << 20));
}

}  // namespace
}  // namespace gpupool::broker
