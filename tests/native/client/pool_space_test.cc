// The bookkeeping of memory pools against a plain model: nothing is handed out twice, and nothing
// to a stream for which it is not free.
#include "client/pool_space.h"

#include <gtest/gtest.h>

#include <random>

namespace gpupool::client {
namespace {

constexpr uint64_t kMib = 1 << 20;
const int kOwners[2] = {};

TEST(PoolSpace, AStreamReusesWhatItFreedOthersAfterASynchronisation) {
  PoolSpace space;
  const PoolSpace::Owner owner = &kOwners[0];
  uint64_t first = 0, again = 0;
  EXPECT_FALSE(space.take(owner, 16, 100, &first)) << "an empty pool";
  space.add({16 * kMib, 2 * kMib, owner});
  ASSERT_TRUE(space.take(owner, 16, 2 * kMib, &first));
  EXPECT_EQ(first, 16 * kMib);
  ASSERT_TRUE(space.give(first, 16, 5));
  EXPECT_FALSE(space.give(first, 16, 5)) << "given twice";
  EXPECT_FALSE(space.give(first + 512, 16, 5)) << "no piece begins there";
  EXPECT_FALSE(space.take(owner, 32, 512, &again)) << "another stream";
  EXPECT_FALSE(space.take(&kOwners[1], 16, 512, &again)) << "another context";
  space.observed(owner, 16, 4);
  EXPECT_FALSE(space.take(owner, 32, 512, &again)) << "seen before it was freed";
  ASSERT_TRUE(space.take(owner, 16, 512, &again));
  EXPECT_EQ(again, first);
  ASSERT_TRUE(space.give(again, 16, 6));
  space.observed(owner, 48, 9);
  EXPECT_FALSE(space.take(owner, 32, 512, &again)) << "another stream was waited for";
  space.observed(owner, 16, 6);
  ASSERT_TRUE(space.take(owner, 32, 2 * kMib, &again)) << "in one piece again";
  ASSERT_TRUE(space.give(again, 32, 7));
  space.observed(owner, PoolSpace::kAnyStream, 7);
  EXPECT_TRUE(space.take(owner, 48, 512, &again)) << "all streams were waited for";
}

TEST(PoolSpace, ChunksGoWhenNothingOfThemIsInUse) {
  PoolSpace space;
  const PoolSpace::Owner owner = &kOwners[0];
  for (uint64_t i = 0; i < 4; i++) space.add({(16 + 2 * i) * kMib, 2 * kMib, owner});
  EXPECT_EQ(space.reserved(), 8 * kMib);
  uint64_t one = 0, other = 0;
  ASSERT_TRUE(space.take(owner, 16, 1, &one));
  ASSERT_TRUE(space.take(owner, 16, 2 * kMib, &other));
  ASSERT_TRUE(space.give(other, 16, 1));
  EXPECT_EQ(space.release(6 * kMib, false).size(), 1u);
  EXPECT_EQ(space.release(0, false).size(), 1u) << "not what is in use or was only freed";
  EXPECT_EQ(space.reserved(), 4 * kMib);
  EXPECT_EQ(space.release(0, true).size(), 1u);
  ASSERT_TRUE(space.give(one, PoolSpace::kAnyStream, 0));
  const auto last = space.release(0, false);
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].base, one);
  EXPECT_TRUE(space.empty());
  EXPECT_EQ(space.reserved(), 0u);
}

TEST(PoolSpace, AContextTakesItsChunksWithIt) {
  PoolSpace space;
  space.add({16 * kMib, 2 * kMib, &kOwners[0]});
  space.add({18 * kMib, 2 * kMib, &kOwners[1]});
  uint64_t a = 0, b = 0;
  ASSERT_TRUE(space.take(&kOwners[0], 16, 600, &a));
  ASSERT_TRUE(space.take(&kOwners[1], 16, 600, &b));
  EXPECT_EQ(space.drop(&kOwners[0]), 1024u);
  EXPECT_EQ(space.reserved(), 2 * kMib);
  EXPECT_FALSE(space.give(a, 16, 1));
  EXPECT_TRUE(space.give(b, 16, 1));
}

// The model: each piece in use, and for each byte that was freed, by which stream and when.
TEST(PoolSpace, RandomUseAgreesWithAModel) {
  constexpr uint64_t kStreams[] = {16, 32, 48};
  std::mt19937 random(20261130);
  for (int round = 0; round < 4; round++) {
    PoolSpace space;
    struct Unit {  // 512 bytes
      bool used = false;
      uint64_t stream = 0, time = 0;
    };
    std::map<uint64_t, Unit> units;
    std::map<uint64_t, uint64_t> in_use;  // address, bytes
    uint64_t time = 1, next = 64 * kMib;
    for (int step = 0; step < 1500; step++) {
      const uint64_t stream = kStreams[random() % 3];
      const unsigned what = random() % 16;
      if (what < 8) {
        const uint64_t bytes = 1 + random() % (random() % 8 == 0 ? kMib : 20000);
        uint64_t address = 0;
        if (!space.take(&kOwners[0], stream, bytes, &address)) {
          space.add({next, 2 * kMib, &kOwners[0]});
          for (uint64_t at = next; at < next + 2 * kMib; at += 512) units[at] = {};
          next += 2 * kMib + 2 * kMib * (random() % 2);
          ASSERT_TRUE(space.take(&kOwners[0], stream, bytes, &address));
        }
        for (uint64_t at = address; at < address + bytes; at += 512) {
          const auto unit = units.find(at);
          ASSERT_NE(unit, units.end()) << "outside every chunk";
          ASSERT_FALSE(unit->second.used) << "handed out twice";
          ASSERT_TRUE(unit->second.stream == 0 || unit->second.stream == stream);
          unit->second.used = true;
        }
        in_use[address] = bytes;
      } else if (what < 14 && !in_use.empty()) {
        const auto victim = std::next(in_use.begin(), static_cast<long>(random() % in_use.size()));
        for (uint64_t at = victim->first; at < victim->first + victim->second; at += 512) {
          units[at] = {false, stream, time};
        }
        ASSERT_TRUE(space.give(victim->first, stream, time++));
        in_use.erase(victim);
      } else if (what == 14) {
        const uint64_t until = time - random() % 10;
        const bool all = random() % 4 == 0;
        space.observed(&kOwners[0], all ? PoolSpace::kAnyStream : stream, until);
        for (auto& [at, unit] : units) {
          if (!unit.used && (all || unit.stream == stream) && unit.time <= until) unit.stream = 0;
        }
      } else {
        for (const auto& chunk : space.release(random() % 4 * 4 * kMib, false)) {
          for (uint64_t at = chunk.base; at < chunk.base + chunk.bytes; at += 512) {
            ASSERT_FALSE(units.at(at).used);
            ASSERT_EQ(units.at(at).stream, 0u);
            units.erase(at);
          }
        }
      }
      ASSERT_EQ(space.reserved(), units.size() * 512);
    }
    for (const auto& [address, bytes] : in_use) ASSERT_TRUE(space.give(address, 16, time));
    space.release(0, true);
    EXPECT_TRUE(space.empty());
  }
}

}  // namespace
}  // namespace gpupool::client
