// Replays recordings of clients (golden/*.rec) against today's session: what a released client says
// must be understood for as long as its major version is served.
#include <filesystem>
#include <fstream>

#include "recorded.h"
#include "session_fixture.h"

namespace gpupool::test {
namespace {

struct Frame {
  std::vector<uint8_t> body;
  std::vector<std::vector<uint8_t>> bulk;
};

std::vector<Frame> read_recording(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic(12, '\0');
  file.read(magic.data(), 12);
  EXPECT_EQ(magic, "GPUPOOLREC1\n") << path;
  std::vector<Frame> frames;
  uint32_t head[2];
  while (file.read(reinterpret_cast<char*>(head), sizeof head)) {
    Frame frame;
    EXPECT_LE(head[1], wire::kMaxBulkSegments);
    std::vector<uint32_t> sizes(head[1]);
    file.read(reinterpret_cast<char*>(sizes.data()), static_cast<long>(sizes.size() * 4));
    frame.body.resize(head[0]);
    file.read(reinterpret_cast<char*>(frame.body.data()), head[0]);
    for (uint32_t size : sizes) {
      frame.bulk.emplace_back(size);
      file.read(reinterpret_cast<char*>(frame.bulk.back().data()), size);
    }
    EXPECT_TRUE(file.good()) << path << " is cut";
    frames.push_back(std::move(frame));
  }
  return frames;
}

TEST(Replay, RecordedSessionsAreServed) {
  int recordings = 0;
  for (const auto& entry : std::filesystem::directory_iterator(GPUPOOL_GOLDEN)) {
    if (entry.path().extension() != ".rec") continue;
    SCOPED_TRACE(entry.path().string());
    recordings++;
    Served served;
    int copies = 0, launches = 0, calls = 0;
    for (const Frame& frame : read_recording(entry.path())) {
      std::vector<carriers::Part> parts;
      for (const auto& bulk : frame.bulk) {
        parts.push_back({const_cast<uint8_t*>(bulk.data()), bulk.size()});
      }
      served.batch = frame.body;
      ASSERT_TRUE(served.send(parts));
      for (size_t at = 0; at < frame.body.size();) {
        wire::CommandHeader header;
        ASSERT_GE(frame.body.size() - at, sizeof header);
        memcpy(&header, frame.body.data() + at, sizeof header);
        const auto operation = static_cast<wire::Operation>(header.operation);
        launches += operation == wire::Operation::kLaunchKernel;
        if (header.flags & wire::kWantsReply) {
          uint64_t call;
          memcpy(&call, frame.body.data() + at + sizeof header, 8);
          Reply reply;
          ASSERT_TRUE(served.wait(call, &reply)) << served.refusal;
          EXPECT_EQ(reply.status, CUDA_SUCCESS) << wire::operation_name(header.operation);
          calls++;
          if (operation == wire::Operation::kMemcpyDtoHAsyncV2) {
            copies++;
            ASSERT_EQ(reply.bulk.size(), kRecordedBytes);
            for (uint32_t i = 0; i < kRecordedBytes / 4; i++) {
              uint32_t word;
              memcpy(&word, reply.bulk.data() + i * 4, 4);
              ASSERT_EQ(word, recorded_result(i)) << "word " << i;
            }
          } else if (operation == wire::Operation::kMemGetInfoV2) {
            uint64_t words[2];
            ASSERT_EQ(reply.body.size(), sizeof words);
            memcpy(words, reply.body.data(), sizeof words);
            EXPECT_EQ(words[1], kMemory);
            EXPECT_LT(words[0], kMemory);
          }
        }
        at += header.bytes;
      }
    }
    EXPECT_EQ(copies, 1);
    EXPECT_EQ(launches, 1);
    EXPECT_GE(calls, 9);
    EXPECT_TRUE(served.events.empty());
    EXPECT_EQ(served.end().end, worker::SessionEnd::kClientGone);
    EXPECT_EQ(served.account.used.load(), 0u);
  }
  EXPECT_GE(recordings, 1);
}

}  // namespace
}  // namespace gpupool::test
