#include "broker/events.h"

#include <gtest/gtest.h>

#include <vector>

namespace gpupool::broker {
namespace {

struct Reader {
  bool reads = true;
  std::vector<uint64_t> seen;

  EventLog::Sink sink() {
    return [this](const Event& event) {
      if (reads) seen.push_back(event.sequence());
      return reads;
    };
  }
};

TEST(EventLog, KeepsTheOrderWhenAReaderFallsBehind) {
  EventLog log;
  Reader reader;
  log.connect(reader.sink());
  log.add({});
  reader.reads = false;
  log.add({});
  log.add({});
  reader.reads = true;
  log.add({});  // behind those that wait
  EXPECT_EQ(reader.seen, (std::vector<uint64_t>{1}));
  log.flush();
  EXPECT_EQ(reader.seen, (std::vector<uint64_t>{1, 2, 3, 4}));
  EXPECT_EQ(log.lost(), 0u);
}

// The newest stays, so that whoever reads on sees the gap.
TEST(EventLog, DropsTheOldestOfASlowReader) {
  constexpr uint64_t kAdded = 10000;
  EventLog log;
  Reader reader;
  log.connect(reader.sink());
  log.add({});
  reader.reads = false;
  for (uint64_t i = 1; i < kAdded; i++) log.add({});
  EXPECT_GT(log.lost(), 0u);
  reader.reads = true;
  log.flush();
  ASSERT_GT(reader.seen.size(), 2u);
  EXPECT_EQ(reader.seen.back(), kAdded);
  EXPECT_EQ(reader.seen[1], 2 + log.lost());
  EXPECT_EQ(reader.seen.size() + log.lost(), kAdded);
}

}  // namespace
}  // namespace gpupool::broker
