// Sessions and what a hostile client sends.
#include <random>

#include "session_fixture.h"

namespace gpupool::test {
namespace {

using wire::Encoder;
using wire::Operation;

TEST(Session, MalformedCommandsEndItWithASentence) {
  struct Case {
    const char* name;
    Operation operation;
    size_t bytes;
    bool reply;
    int bulk;
  };
  for (const Case& it : {Case{"too short", Operation::kMemAllocV2, 0, true, 0},
                         Case{"too long", Operation::kMemAllocV2, 16, true, 0},
                         Case{"no reply wanted", Operation::kMemAllocV2, 8, false, 0},
                         Case{"bulk that is not there", Operation::kMemFreeV2, 8, false, 3}}) {
    Served served;
    ASSERT_EQ(served.create_context(), CUDA_SUCCESS) << it.name;
    served.add(
        it.operation, it.bytes, it.reply,
        [&](Encoder& e) {
          for (size_t i = 0; i < it.bytes / 8; i++) e.scalar(8);
        },
        it.bulk);
    served.send();
    while (served.refusal.empty() && served.read_frame()) {
    }
    EXPECT_FALSE(served.refusal.empty()) << it.name;
    EXPECT_EQ(served.end().end, worker::SessionEnd::kProtocolError) << it.name;
    EXPECT_EQ(served.account.used.load(), 0u) << it.name;
  }
}

TEST(Session, CreditIsEnforced) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  wire::FrameHeader header{};
  header.magic = wire::kFrameMagic;
  header.kind = static_cast<uint16_t>(wire::FrameKind::kCommands);
  header.epoch = kEpoch;
  header.sequence = served.writer->sequence() + 1;
  header.bulk_count = wire::kMaxBulkSegments;
  header.bulk_bytes = uint64_t{wire::kMaxBulkSegments} * wire::kMaxBulkSegment;
  uint32_t sizes[wire::kMaxBulkSegments];
  for (uint32_t& size : sizes) size = wire::kMaxBulkSegment;
  ASSERT_TRUE(carriers::write_all(*served.carrier, &header, sizeof header, 1000000));
  ASSERT_TRUE(carriers::write_all(*served.carrier, sizes, sizeof sizes, 1000000));
  while (served.refusal.empty() && served.read_frame()) {
  }
  EXPECT_FALSE(served.refusal.empty());
}

// Random frames, and right frames with a few bytes changed: the session may end, never crash, and
// gives everything back; one beside it goes on.
TEST(Session, RandomBytesEndOneSessionOnly) {
  Served beside(kArenaBase);
  ASSERT_EQ(beside.create_context(), CUDA_SUCCESS);
  std::mt19937_64 random(20261130);
  for (int round = 0; round < 150; round++) {
    Served served(kArenaBase + kArenaBytes);
    const wire::ContextCreate create{{1, 1}, 0, 1, kArenaBase + kArenaBytes, kArenaBytes};
    served.add(Operation::kCtxCreateV4, sizeof create, true, [&](Encoder& e) { e.put(create); });
    std::vector<uint8_t> body = std::move(served.batch);
    served.batch.clear();
    for (int i = 0; i < 20; i++) {
      served.add(static_cast<uint16_t>(random() % (wire::kOperationLimit + 2)), random() % 12 * 8,
                 random() % 2 != 0, [&](Encoder&) {});
      std::vector<uint8_t> command = std::move(served.batch);
      served.batch.clear();
      for (size_t k = sizeof(wire::CommandHeader); k < command.size(); k++) {
        command[k] =
            random() % 3 != 0 ? static_cast<uint8_t>(random() % 3) : static_cast<uint8_t>(random());
      }
      if (random() % 8 == 0) command[random() % command.size()] ^= static_cast<uint8_t>(random());
      body.insert(body.end(), command.begin(), command.end());
    }
    served.batch = std::move(body);
    served.send();
    if (random() % 2 != 0) {
      uint8_t noise[64];
      for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
      carriers::write_all(*served.carrier, noise, sizeof noise, 1000);
    }
    served.end();
    ASSERT_EQ(served.account.used.load(), 0u) << "round " << round;
    if (round % 50 == 0) {
      ASSERT_EQ(beside.synchronize(), CUDA_SUCCESS);
    }
  }
  EXPECT_EQ(beside.synchronize(), CUDA_SUCCESS);
}

}  // namespace
}  // namespace gpupool::test
