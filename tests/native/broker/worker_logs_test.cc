// How much room the workers' logs take: each limit by what lies in the directory, as stat(2) says.
#include "broker/worker_logs.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "broker/loop.h"
#include "broker/worker_log.h"

namespace gpupool::broker {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kKib = 1024;
constexpr uint64_t kNote = 128;  // kept for the last line of each log
constexpr WorkerLogs::Limits kSmall = {.lease_finished = 32 * kKib,
                                       .lease = 64 * kKib,
                                       .all = 128 * kKib,
                                       .lease_files = 4,
                                       .files = 8};

wire::Uuid lease(uint8_t number) {
  wire::Uuid id{};
  id[0] = number;
  return id;
}

class WorkerLogsTest : public testing::Test {
 protected:
  WorkerLogsTest() {
    char name[] = "/tmp/gpupool-logs-XXXXXX";
    root_ = mkdtemp(name);
    directory_ = root_ + "/log";
  }
  ~WorkerLogsTest() override { fs::remove_all(root_); }

  void open(const WorkerLogs::Limits& limits) {
    logs_ = std::make_unique<WorkerLogs>(directory_, limits);
  }

  // A worker that writes so much and ends, through a pipe as a worker does.
  void run(const std::string& session, uint8_t of, uint64_t bytes) { start(session, of, bytes); }

  std::unique_ptr<WorkerLog> start(const std::string& session, uint8_t of, uint64_t bytes) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    const Fd out(ends[1]);
    auto log = std::make_unique<WorkerLog>(loop_, Fd(ends[0]), *logs_, 1 << 20);
    log->begin(session, lease(of));
    const std::string text(8 * kKib, 'x');
    while (bytes > 0) {
      const ssize_t written = write(out.get(), text.data(), std::min(bytes, text.size()));
      EXPECT_GT(written, 0);
      bytes -= static_cast<uint64_t>(written);
      log->drain();
    }
    return log;
  }

  bool has(const std::string& session) const {
    return fs::exists(directory_ + "/worker-" + session + ".log");
  }
  std::string text(const std::string& session) const {
    std::ifstream file(directory_ + "/worker-" + session + ".log");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Of the disk, with 4 KiB as the least that a file takes.
  uint64_t room() const {
    uint64_t sum = 0;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      sum += (entry.file_size() + 4095) / 4096 * 4096;
    }
    return sum;
  }
  size_t files() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }

  EventLoop loop_;
  std::string root_, directory_;
  std::unique_ptr<WorkerLogs> logs_;
};

TEST_F(WorkerLogsTest, ALogIsWhatTheWorkerWrote) {
  open({});
  run("a", 1, 20000);
  EXPECT_EQ(text("a"), std::string(20000, 'x'));
  struct stat status;
  ASSERT_EQ(stat(directory_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  run("silent", 1, 0);
  EXPECT_FALSE(has("silent"));
}

TEST_F(WorkerLogsTest, TheOldestOfEndedWorkersGoFirst) {
  open(kSmall);
  run("other", 2, 16 * kKib - kNote);
  for (const char* name : {"a", "b", "c"}) run(name, 1, 16 * kKib - kNote);
  EXPECT_FALSE(has("a"));  // 48 KiB are more than 32
  EXPECT_TRUE(has("b") && has("c"));
  EXPECT_TRUE(has("other"));  // that is another lease's
}

TEST_F(WorkerLogsTest, RunningOnesGetTheRoomOfEndedOnesAndNoMore) {
  open(kSmall);
  run("ended", 1, 16 * kKib - kNote);
  const auto first = start("first", 1, 40 * kKib - kNote);
  EXPECT_TRUE(has("ended"));  // 56 of 64 KiB
  const auto second = start("second", 1, 20 * kKib - kNote);
  EXPECT_FALSE(has("ended"));
  EXPECT_EQ(text("second"), std::string(20 * kKib - kNote, 'x'));
  const auto third = start("third", 1, 500 * kKib - kNote);  // 4 KiB are left
  EXPECT_TRUE(
      text("third").starts_with(std::string(4 * kKib - kNote, 'x') + "\n[the log ends here: "));
  EXPECT_LE(text("third").size(), 4 * kKib);
  const auto none = start("none", 1, 500 * kKib - kNote);
  EXPECT_FALSE(has("none"));
  run("other", 2, 16 * kKib - kNote);
  EXPECT_EQ(text("other"), std::string(16 * kKib - kNote, 'x'));
}

TEST_F(WorkerLogsTest, AnEndedOneMakesRoomForTheNext) {
  open(kSmall);
  for (int i = 0; i < 100; i++) {
    run("s" + std::to_string(i), 1, 200 * kKib - kNote);
    EXPECT_LE(room(), 64 * kKib) << i;
  }
  run("last", 1, 8 * kKib - kNote);
  EXPECT_EQ(text("last"), std::string(8 * kKib - kNote, 'x'));
}

TEST_F(WorkerLogsTest, AllTogether) {
  open(kSmall);
  for (uint8_t number = 1; number <= 20; number++) {
    run("s" + std::to_string(number), number, 30 * kKib - kNote);
    EXPECT_LE(room(), 128 * kKib);
  }
  EXPECT_TRUE(has("s20") && has("s19") && has("s18") && has("s17"));
  EXPECT_FALSE(has("s16"));
  // What runs keeps its log, and takes the room of all that ended.
  const auto one = start("one", 21, 64 * kKib - kNote), two = start("two", 22, 60 * kKib - kNote);
  EXPECT_EQ(files(), 2u);
  const auto three = start("three", 23, 64 * kKib - kNote);
  EXPECT_TRUE(
      text("three").starts_with(std::string(4 * kKib - kNote, 'x') + "\n[the log ends here: "));
}

TEST_F(WorkerLogsTest, ManyShortOnes) {
  open(kSmall);
  for (int i = 0; i < 20; i++) run("a" + std::to_string(i), 1, 1);
  EXPECT_EQ(files(), 4u);
  EXPECT_TRUE(has("a19") && has("a16"));
  for (uint8_t number = 2; number < 20; number++) run("b" + std::to_string(number), number, 1);
  EXPECT_EQ(files(), 8u);
  EXPECT_TRUE(has("b19") && has("b12"));
}

TEST_F(WorkerLogsTest, WhatAnEarlierBrokerLeftIsCounted) {
  fs::create_directory(directory_);
  const auto now = fs::file_time_type::clock::now();
  for (int i = 0; i < 10; i++) {
    const std::string path = directory_ + "/worker-old" + std::to_string(i) + ".log";
    std::ofstream(path) << std::string(20 * kKib, 'y');
    fs::last_write_time(path, now - std::chrono::hours(i));
  }
  std::ofstream(directory_ + "/notes") << "not a log";
  std::ofstream(root_ + "/elsewhere") << std::string(500 * kKib, 'z');
  fs::create_symlink(root_ + "/elsewhere", directory_ + "/worker-link.log");
  open(kSmall);
  EXPECT_TRUE(has("old0") && has("old5"));  // 6 of 20 KiB; the seventh is too much
  EXPECT_FALSE(has("old6"));
  run("new", 1, 30 * kKib - kNote);
  EXPECT_FALSE(has("old5"));
  EXPECT_TRUE(has("old0") && has("new"));
  EXPECT_TRUE(fs::exists(directory_ + "/notes") && fs::exists(root_ + "/elsewhere"));
}

}  // namespace
}  // namespace gpupool::broker
