#include "wire/status.h"

#include <gtest/gtest.h>
#include <string.h>

namespace gpupool::wire {
namespace {

Status a_status() {
  Status status;
  status.driver_version = "580.95.05";
  status.slices = {{4096, 100, kNotMeasured, 0}, {8192, 0, 250, 0}};
  ProcessStatus process{77, 1, 4000, "train", 125, 0};
  status.processes = {process, {78, 0, 1, "", kNotMeasured, 0}};
  return status;
}

std::string body_of(const Status& status) {
  return status_frame(status).substr(sizeof(FrameHeader));
}

std::optional<Status> parse(const std::string& body) {
  return parse_status(reinterpret_cast<const uint8_t*>(body.data()), body.size());
}

void poke(std::string& body, size_t at, uint32_t value) { memcpy(&body[at], &value, 4); }

TEST(Status, ComesBackAsItWas) {
  const std::string frame = status_frame(a_status());
  FrameHeader header;
  memcpy(&header, frame.data(), sizeof header);
  EXPECT_EQ(header.magic, kFrameMagic);
  EXPECT_EQ(header.kind, 6);
  EXPECT_EQ(header.body_bytes, frame.size() - sizeof header);
  EXPECT_EQ(header.body_bytes % 8, 0u);
  const auto got = parse(body_of(a_status()));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->driver_version, "580.95.05");
  ASSERT_EQ(got->slices.size(), 2u);
  EXPECT_EQ(got->slices[0].memory_bytes, 4096u);
  EXPECT_EQ(got->slices[0].used_bytes, 100u);
  EXPECT_EQ(got->slices[0].busy_permille, kNotMeasured);
  EXPECT_EQ(got->slices[1].busy_permille, 250u);
  ASSERT_EQ(got->processes.size(), 2u);
  EXPECT_EQ(got->processes[0].pid, 77u);
  EXPECT_EQ(got->processes[0].device, 1u);
  EXPECT_EQ(got->processes[0].used_bytes, 4000u);
  EXPECT_STREQ(got->processes[0].program, "train");
  EXPECT_EQ(got->processes[0].busy_permille, 125u);
  EXPECT_EQ(got->processes[1].busy_permille, kNotMeasured);
}

// The first version's processes said nothing of their time.
TEST(Status, OlderProcessesAreRead) {
  const std::string body = body_of(a_status());
  const size_t first = sizeof(StatusBody) + 2 * sizeof(SliceStatus);
  std::string older = body.substr(0, first);
  for (int i = 0; i < 2; i++) older += body.substr(first + i * sizeof(ProcessStatus), 48);
  poke(older, 12, 48);
  const auto got = parse(older);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->processes[0].pid, 77u);
  EXPECT_STREQ(got->processes[0].program, "train");
  EXPECT_EQ(got->processes[0].busy_permille, kNotMeasured);
}

TEST(Status, FitsAFrameHoweverManyProcessesThereAre) {
  Status status = a_status();
  status.processes.resize(100000);
  const std::string body = body_of(status);
  EXPECT_LE(body.size(), kMaxFrameBody);
  EXPECT_EQ(parse(body)->processes.size(), kMaxStatusProcesses);
}

TEST(Status, ALongVersionIsCut) {
  Status status = a_status();
  status.driver_version.assign(100, '5');
  EXPECT_EQ(parse(body_of(status))->driver_version, std::string(31, '5'));
}

// A later version appends to the structures: what this one knows is read.
TEST(Status, LongerStructuresAreRead) {
  const std::string body = body_of(a_status());
  std::string longer;
  size_t at = 0;
  const auto copy = [&](size_t bytes, size_t more) {
    longer += body.substr(at, bytes) + std::string(more, '\x55');
    at += bytes;
  };
  copy(sizeof(StatusBody), 8);
  for (int i = 0; i < 2; i++) copy(sizeof(SliceStatus), 16);
  for (int i = 0; i < 2; i++) copy(sizeof(ProcessStatus), 24);
  poke(longer, 0, sizeof(StatusBody) + 8);
  poke(longer, 4, sizeof(SliceStatus) + 16);
  poke(longer, 12, sizeof(ProcessStatus) + 24);
  const auto got = parse(longer);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->slices[1].memory_bytes, 8192u);
  EXPECT_EQ(got->processes[1].pid, 78u);
}

TEST(Status, WhatIsWrongIsRefused) {
  const std::string body = body_of(a_status());
  for (size_t length = 0; length < body.size(); length++) {
    EXPECT_FALSE(parse(body.substr(0, length))) << length;
  }
  EXPECT_FALSE(parse(body + std::string(8, '\0')));
  struct Poke {
    size_t at;
    uint32_t value;
  };
  for (const Poke& wrong : {Poke{0, 0}, Poke{0, 48}, Poke{0, 0xfffffff8}, Poke{4, 0}, Poke{4, 28},
                            Poke{8, 0}, Poke{8, 3}, Poke{8, 0xffffffff}, Poke{12, 8},
                            Poke{16, 0xffffffff}, Poke{16, kMaxStatusProcesses + 1}}) {
    std::string changed = body;
    poke(changed, wrong.at, wrong.value);
    EXPECT_FALSE(parse(changed)) << wrong.at << " " << wrong.value;
  }
  std::string no_such_slice = body;
  poke(no_such_slice, sizeof(StatusBody) + 2 * sizeof(SliceStatus) + 4, 2);
  EXPECT_FALSE(parse(no_such_slice));
  // A name that does not end is cut, not read on.
  std::string endless = body;
  memset(&endless[endless.size() - sizeof(ProcessStatus) + offsetof(ProcessStatus, program)], 'x',
         32);
  EXPECT_EQ(strlen(parse(endless)->processes[1].program), 31u);
}

}  // namespace
}  // namespace gpupool::wire
