#include <gtest/gtest.h>
#include <sys/mman.h>

#include <functional>
#include <random>
#include <thread>
#include <utility>

#include "ring_fixture.h"
#include "wire/frame_io.h"

namespace gpupool::test {
namespace {

// Pieces of every size, many times around the small rings.
void stream(Carrier& from, uint64_t total, uint64_t seed, bool bulk) {
  std::mt19937_64 random(seed);
  for (uint64_t done = 0; done < total;) {
    const size_t bytes = std::min<uint64_t>(total - done, 1 + random() % (random() % 9000 + 1));
    const auto data = piece_of(done, bytes, seed);
    ASSERT_TRUE(write_whole(from, data.data(), bytes, bulk));
    done += bytes;
  }
}

void expect_stream(Carrier& to, uint64_t total, uint64_t seed, bool bulk) {
  std::mt19937_64 random(seed + 1);
  std::vector<uint8_t> data;
  for (uint64_t done = 0; done < total;) {
    const size_t bytes = std::min<uint64_t>(total - done, 1 + random() % 12000);
    data.assign(bytes, 0);
    ASSERT_TRUE(read_whole(to, data.data(), bytes, bulk));
    ASSERT_EQ(data, piece_of(done, bytes, seed)) << "after " << done;
    done += bytes;
  }
}

TEST(Ring, MovesBytesInOrderAroundTheRing) {
  for (const bool bulk : {false, true}) {
    RingPair ring;
    std::thread writer([&] { stream(*ring.client, 3'000'000, 7, bulk); });
    expect_stream(*ring.worker, 3'000'000, 7, bulk);
    writer.join();
  }
}

// Both sides write more than fits and read at the same time: on each side one thread sleeps for
// room while another one sleeps for data.
TEST(Ring, SleepersForRoomAndForDataShareTheBell) {
  RingPair ring;
  std::thread a([&] { stream(*ring.client, 1'500'000, 1, false); });
  std::thread b([&] { stream(*ring.worker, 1'500'000, 2, true); });
  std::thread c([&] { expect_stream(*ring.worker, 1'500'000, 1, false); });
  expect_stream(*ring.client, 1'500'000, 2, true);
  a.join();
  b.join();
  c.join();
}

void pause_up_to(uint32_t rounds) {
  for (uint32_t i = 0; i < rounds; i++) asm volatile("");
}

// Nobody may spin here, so every step is a sleep and a wake-up that must not get lost. The pauses
// are about as long as a wake-up takes, so that data often come just when a reader goes to sleep.
TEST(Ring, LosesNoWakeUp) {
  RingPair ring;
  constexpr int kRounds = 40'000;
  std::thread echo([&] {
    std::mt19937 random(3);
    uint8_t byte;
    for (int i = 0; i < kRounds; i++) {
      ASSERT_TRUE(read_whole(*ring.worker, &byte, 1, false));
      pause_up_to(random() % 30'000);
      ASSERT_TRUE(write_whole(*ring.worker, &byte, 1, false));
    }
  });
  std::mt19937 random(4);
  for (int i = 0; i < kRounds; i++) {
    uint8_t byte = static_cast<uint8_t>(i), back = 0;
    ASSERT_TRUE(write_whole(*ring.client, &byte, 1, false));
    pause_up_to(random() % 30'000);
    ASSERT_TRUE(read_whole(*ring.client, &back, 1, false));
    ASSERT_EQ(back, byte);
  }
  echo.join();
}

// The other side does what is waited for just when the sleeper has looked in vain: between its two
// steps, whichever comes first.
class LateBell final : public Bell {
 public:
  explicit LateBell(int fd) : bell_(make_socket_bell(fd)) {}
  void ring() override { bell_->ring(); }
  void arm() override {
    if (at_that_moment) std::exchange(at_that_moment, nullptr)();
  }
  Heard wait(int64_t) override {
    const Heard heard = bell_->wait(3'000'000);
    missed = missed || heard == Heard::kNothing;
    return heard == Heard::kNothing ? Heard::kGone : heard;
  }
  bool gone() override { return bell_->gone(); }
  void shutdown() override { bell_->shutdown(); }
  void abandon() override { bell_->abandon(); }

  std::function<void()> at_that_moment;
  bool missed = false;

 private:
  const std::unique_ptr<Bell> bell_;
};

TEST(Ring, WhatComesWhileGoingToSleepIsSeen) {
  RingPair ring;
  std::string why;
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  auto owned = std::make_unique<LateBell>(ends[1]);
  LateBell& bell = *owned;
  auto client = make_ring_carrier(map_ring(ring.memfd, kSmall, &why), kSmall, RingSide::kClient,
                                  kRingEpoch, make_socket_bell(ends[0]));
  auto worker = make_ring_carrier(map_ring(ring.memfd, kSmall, &why), kSmall, RingSide::kWorker,
                                  kRingEpoch, std::move(owned));
  std::vector<uint8_t> data(kSmall.bulk_bytes, 1);
  // Data, commands and bulk.
  for (const bool bulk : {false, true}) {
    bell.at_that_moment = [&] { ASSERT_EQ(write_one(*client, "x", 1, bulk).bytes, 1u); };
    EXPECT_TRUE(read_whole(*worker, data.data(), 1, bulk));
    EXPECT_FALSE(bell.missed) << bulk;
  }
  // Room.
  for (const bool bulk : {false, true}) {
    const size_t capacity = bulk ? kSmall.bulk_bytes : kSmall.command_bytes;
    ASSERT_TRUE(write_whole(*worker, data.data(), capacity, bulk));
    ASSERT_EQ(write_one(*worker, data.data(), 1, bulk).status, Status::kBlocked);
    bell.at_that_moment = [&] { ASSERT_TRUE(read_whole(*client, data.data(), capacity, bulk)); };
    EXPECT_EQ(worker->wait(kWritable, -1), kWritable);
    EXPECT_FALSE(bell.missed) << bulk;
  }
}

// As LosesNoWakeUp, where the producer sleeps for room: each piece fills the ring.
TEST(Ring, LosesNoWakeUpForRoom) {
  RingPair ring;
  const auto full = piece_of(0, ring.layout.command_bytes, 9);
  constexpr int kRounds = 3'000;
  std::thread writer([&] {
    for (int i = 0; i < kRounds; i++) {
      ASSERT_TRUE(write_whole(*ring.client, full.data(), full.size(), false));
    }
  });
  std::vector<uint8_t> got(full.size());
  for (int i = 0; i < kRounds; i++) {
    ASSERT_TRUE(read_whole(*ring.worker, got.data(), got.size(), false));
    ASSERT_EQ(got, full);
  }
  writer.join();
}

TEST(Ring, CarriesFramesWithBulk) {
  RingPair ring({4096, 65536});
  std::thread sender([&] {
    wire::FrameWriter writer(*ring.client, 3);
    for (uint64_t i = 1; i <= 200; i++) {
      const auto body = piece_of(i, 8 * (i % 700 + 1), i);
      auto bulk = piece_of(i, 1 + (i * 977) % 200'000, i + 1);
      const Part parts[] = {{bulk.data(), bulk.size() / 2 + 1},
                            {bulk.data() + bulk.size() / 2 + 1, bulk.size() - bulk.size() / 2 - 1}};
      const int count = parts[1].bytes == 0 ? 1 : 2;
      ASSERT_TRUE(writer.send(wire::FrameKind::kCommands, body.data(),
                              static_cast<uint32_t>(body.size()), parts, i % 3 == 0 ? 0 : count, 0,
                              0, [&] {
                                ring.client->wait(kWritable, -1);
                                return true;
                              }));
    }
  });
  wire::FrameReader reader(*ring.worker, 3);
  for (uint64_t i = 1; i <= 200; i++) {
    ASSERT_EQ(reader.next(true), wire::FrameReader::Result::kFrame) << reader.reason();
    const auto body = piece_of(i, 8 * (i % 700 + 1), i);
    ASSERT_EQ(reader.header().body_bytes, body.size());
    ASSERT_EQ(memcmp(reader.body(), body.data(), body.size()), 0);
    std::vector<uint8_t> bulk(reader.bulk_left());
    for (size_t done = 0; done < bulk.size();) {
      const Moved moved = reader.read_bulk(bulk.data() + done, bulk.size() - done, true);
      ASSERT_EQ(moved.status, Status::kOk);
      done += moved.bytes;
    }
    if (i % 3 != 0) {
      ASSERT_EQ(bulk, piece_of(i, 1 + (i * 977) % 200'000, i + 1));
    }
  }
  sender.join();
}

TEST(Ring, LendsBulkDataUntilTheyAreGivenBack) {
  RingPair ring;
  const auto data = piece_of(0, 65536, 1);
  ring.client->begin_bulk_out();
  ASSERT_EQ(write_one(*ring.client, data.data(), 65536, true).bytes, 65536u);
  uint64_t first_end, second_end;
  const uint8_t* first = ring.worker->lend_bulk(16384, &first_end);
  const uint8_t* second = ring.worker->lend_bulk(16384, &second_end);
  ASSERT_NE(first, nullptr);
  ASSERT_EQ(second, first + 16384);
  EXPECT_EQ(memcmp(first, data.data(), 32768), 0);
  // Reading on does not give back what is lent.
  std::vector<uint8_t> rest(32768);
  ASSERT_TRUE(read_whole(*ring.worker, rest.data(), rest.size(), true));
  EXPECT_EQ(memcmp(rest.data(), data.data() + 32768, 32768), 0);
  EXPECT_EQ(write_one(*ring.client, data.data(), 1, true).status, Status::kBlocked);
  ring.worker->release_bulk(first_end, false);
  EXPECT_EQ(write_one(*ring.client, data.data(), 65536, true).bytes, 16384u);
  ring.worker->release_bulk(second_end, true);
  EXPECT_EQ(write_one(*ring.client, data.data(), 65536, true).bytes, 49152u);
  // Not as one piece: around the end of the ring, or more than there is.
  ASSERT_TRUE(read_whole(*ring.worker, rest.data(), 16384, true));
  uint64_t end;
  EXPECT_EQ(ring.worker->lend_bulk(65536, &end), nullptr);
}

TEST(Ring, DataThatLieWhereTheyBelongAreNotCopied) {
  RingPair ring;
  uint8_t* room = ring.worker->bulk_room(4096);
  ASSERT_NE(room, nullptr);
  memset(room, 0x77, 4096);
  ASSERT_EQ(write_one(*ring.worker, room, 4096, true).bytes, 4096u);
  std::vector<uint8_t> got(4096);
  ASSERT_TRUE(read_whole(*ring.client, got.data(), got.size(), true));
  EXPECT_EQ(got, std::vector<uint8_t>(4096, 0x77));
  EXPECT_EQ(ring.worker->bulk_room(ring.layout.bulk_bytes), nullptr);
  EXPECT_EQ(ring.worker->bulk_run_out(), ring.layout.bulk_bytes - 4096);
}

// ---- The end of the other side ----------------------------------------------------------------

TEST(Ring, WhatWasWrittenIsReadBeforeTheEnd) {
  RingPair ring;
  ASSERT_EQ(write_one(*ring.client, "last", 4).bytes, 4u);
  ring.client.reset();
  uint8_t got[4];
  ASSERT_TRUE(read_whole(*ring.worker, got, 4, false));
  EXPECT_EQ(memcmp(got, "last", 4), 0);
  const Part part{got, 4};
  EXPECT_EQ(ring.worker->read(&part, 1, true).status, Status::kClosed);
  EXPECT_EQ(write_one(*ring.worker, "x", 1).status, Status::kClosed);
  EXPECT_EQ(ring.worker->broken(), nullptr);
}

TEST(Ring, ASleeperIsWokenByTheEnd) {
  for (const bool own : {false, true}) {
    RingPair ring;
    std::thread ender([&] {
      usleep(20'000);
      (own ? ring.worker : ring.client)->shutdown();
    });
    uint8_t byte;
    EXPECT_FALSE(read_whole(*ring.worker, &byte, 1, false));
    ender.join();
  }
}

TEST(Ring, TheHostsWordEndsIt) {
  {
    RingPair ring;
    ring.control().worker_dead.store(1);
    EXPECT_EQ(write_one(*ring.client, "x", 1).status, Status::kClosed);
  }
  {
    RingPair ring;
    ring.control().epoch.store(kRingEpoch + 1);
    const Part part{nullptr, 0};
    EXPECT_EQ(ring.client->read(&part, 1, false).status, Status::kClosed);
    EXPECT_EQ(write_one(*ring.worker, "x", 1).status, Status::kClosed);
  }
}

// ---- A hostile other side ---------------------------------------------------------------------

struct Hostile {
  const char* what;
  std::atomic<uint64_t>& (*word)(RingControl&);
  uint64_t value;
};

TEST(Ring, ImpossibleWordsEndReadingAndLeaveAWayToSaySo) {
  const uint64_t capacities[] = {kSmall.command_bytes, kSmall.bulk_bytes};
  for (const bool bulk : {false, true}) {
    for (const uint64_t far :
         {capacities[bulk] + 1, uint64_t{1} << 40, ~uint64_t{0}, uint64_t{3}}) {
      RingPair ring;
      std::atomic<uint64_t>& tail = bulk ? ring.control().to_worker.bulk_tail.value
                                         : ring.control().to_worker.command_tail.value;
      std::vector<uint8_t> data(8);
      ASSERT_EQ(write_one(*ring.client, data.data(), 8, bulk).bytes, 8u);
      ASSERT_TRUE(read_whole(*ring.worker, data.data(), 8, bulk));
      // 3: back from 8. The others: more than the ring holds.
      tail.store(far == 3 ? 3 : far + (far == ~uint64_t{0} ? 0 : 8));
      EXPECT_FALSE(read_whole(*ring.worker, data.data(), 1, bulk)) << far;
      ASSERT_NE(ring.worker->broken(), nullptr);
      EXPECT_NE(std::string(ring.worker->broken()).find("written"), std::string::npos);
      EXPECT_EQ(ring.worker->wait(kReadable | kWritable, -1), kReadable | kWritable);
      uint64_t end;
      EXPECT_EQ(ring.worker->lend_bulk(1, &end), nullptr);
      ASSERT_EQ(write_one(*ring.worker, "why", 3).bytes, 3u);
      uint8_t got[3];
      ASSERT_TRUE(read_whole(*ring.client, got, 3, false));
      EXPECT_EQ(memcmp(got, "why", 3), 0);
    }
  }
}

TEST(Ring, ImpossibleRoomIsNotBelieved) {
  for (const bool bulk : {false, true}) {
    for (const uint64_t head : {uint64_t{65537}, uint64_t{1} << 63, ~uint64_t{0}}) {
      RingPair ring;
      std::vector<uint8_t> data(65536);
      const size_t capacity = bulk ? kSmall.bulk_bytes : kSmall.command_bytes;
      (bulk ? ring.control().to_client.bulk_head : ring.control().to_client.command_head)
          .value.store(head);
      // What is known to be free can be used; then it is over, without waiting.
      EXPECT_EQ(write_one(*ring.worker, data.data(), capacity, bulk).bytes, capacity);
      EXPECT_EQ(write_one(*ring.worker, data.data(), 1, bulk, true).status, Status::kClosed);
      ASSERT_NE(ring.worker->broken(), nullptr);
      EXPECT_NE(std::string(ring.worker->broken()).find("read"), std::string::npos);
      const Part part{data.data(), 1};
      EXPECT_EQ(ring.worker->read(&part, 1, true).status, Status::kClosed);
    }
  }
}

// Random words everywhere, again and again: nothing but an end, or bytes, may come of it.
TEST(Ring, SurvivesAnyWords) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; round++) {
    RingPair ring;
    auto* words = reinterpret_cast<std::atomic<uint64_t>*>(&ring.control().to_worker);
    constexpr size_t kWords = 2 * sizeof(RingDirection) / 8;
    std::vector<uint8_t> data(5000);
    for (int step = 0; step < 50; step++) {
      words[random() % kWords].store(random() % 3 == 0 ? random() : random() % 9000);
      const Part part{data.data(), data.size()};
      (void)ring.worker->read(&part, 1, false);
      (void)ring.worker->read_bulk(data.data(), random() % data.size(), false);
      uint64_t end = 0;
      if (ring.worker->lend_bulk(random() % 5000, &end) != nullptr) {
        ring.worker->release_bulk(end, random() % 2 == 0);
      }
      (void)write_one(*ring.worker, data.data(), random() % data.size(), random() % 2 == 0);
      (void)ring.worker->wait(kReadable | kWritable, 0);
    }
  }
}

// ---- The region and the agreement -------------------------------------------------------------

TEST(Ring, TheMemfdKeepsItsSize) {
  RingPair ring;
  EXPECT_NE(ftruncate(ring.memfd, 0), 0);
  EXPECT_NE(ftruncate(ring.memfd, 1 << 30), 0);
  std::string why;
  const int open = memfd_create("unsealed", MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(open, static_cast<off_t>(kSmall.region_bytes())), 0);
  EXPECT_EQ(map_ring(open, kSmall, &why), nullptr);
  EXPECT_EQ(why, "the ring's memory is not sealed");
  EXPECT_EQ(map_ring(ring.memfd, {8192, 65536}, &why), nullptr);
  EXPECT_EQ(why, "the ring's memory is smaller than it should be");
  EXPECT_EQ(map_ring(ring.memfd, {5000, 65536}, &why), nullptr);
  close(open);
}

struct Agreement {
  Agreement() {
    std::string why;
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    memfd = make_ring_memfd(kSmall, kRingEpoch, &why);
  }
  int ends[2], memfd = -1;
};

TEST(Ring, BothSidesAgree) {
  Agreement with;
  auto client = choose_ring(make_socket_carrier(with.ends[0]), dup(with.memfd), kRingVersion,
                            kSmall, kRingEpoch);
  auto worker = await_choice(with.ends[1], with.memfd, kSmall, kRingEpoch, nullptr, 1'000'000);
  ASSERT_NE(worker, nullptr);
  EXPECT_STREQ(client->kind(), "ring");
  EXPECT_STREQ(worker->kind(), "ring");
  ASSERT_EQ(write_one(*client, "ab", 2).bytes, 2u);
  uint8_t got[2];
  ASSERT_TRUE(read_whole(*worker, got, 2, false));
}

TEST(Ring, AClientWithoutTheMemoryStaysOnTheSocket) {
  for (const uint32_t epoch : {kRingEpoch, kRingEpoch + 1}) {
    Agreement with;
    const int memfd = epoch == kRingEpoch ? -1 : dup(with.memfd);
    auto client =
        choose_ring(make_socket_carrier(with.ends[0]), memfd, kRingVersion, kSmall, epoch);
    auto worker = await_choice(with.ends[1], with.memfd, kSmall, kRingEpoch, nullptr, 1'000'000);
    ASSERT_NE(worker, nullptr);
    EXPECT_STREQ(client->kind(), "unix");
    EXPECT_STREQ(worker->kind(), "unix");
  }
}

TEST(Ring, AWrongChoiceOrNoneEndsIt) {
  for (const uint64_t choice : {uint64_t{0}, uint64_t{3}, ~uint64_t{0}}) {
    Agreement with;
    if (choice != 0) {
      ASSERT_EQ(write(with.ends[0], &choice, 8), 8);
    }
    EXPECT_EQ(await_choice(with.ends[1], with.memfd, kSmall, kRingEpoch, nullptr, 50'000), nullptr);
    close(with.ends[0]);
  }
}

// ---- Spinning ---------------------------------------------------------------------------------

TEST(SpinGate, HandsOutSoManyTokensAndNoMore) {
  alignas(64) static uint8_t page[SpinGate::kBytes];
  memset(page, 0, sizeof page);
  SpinGate a(page, 2), b(page, 2), c(page, 2), none(page, 0);
  EXPECT_FALSE(none.enter(1000, 100));
  EXPECT_TRUE(a.enter(1000, 100));
  EXPECT_TRUE(b.enter(1000, 100));
  EXPECT_FALSE(c.enter(1000, 100));
  a.leave();
  EXPECT_TRUE(c.enter(1000, 100));
  EXPECT_FALSE(a.enter(1099, 100));
  // Whoever dies with a token does not keep it.
  EXPECT_TRUE(a.enter(1100, 100));
  b.leave();  // too late: it is a's now
  EXPECT_TRUE(b.enter(1100, 100));
  EXPECT_FALSE(c.enter(1100, 100));
}

TEST(SpinGate, NobodyHoldsATokenForEver) {
  alignas(64) static uint8_t page[SpinGate::kBytes];
  memset(page, 0x7f, sizeof page);  // a worker that was taken over
  SpinGate gate(page, 1);
  EXPECT_TRUE(gate.enter(1000, 100));
}

TEST(Ring, TheGateDecidesWhetherBothSidesSpin) {
  for (const uint32_t tokens : {1u, 0u}) {
    alignas(64) static uint8_t page[SpinGate::kBytes];
    memset(page, 0, sizeof page);
    SpinGate gate(page, tokens);
    RingPair ring(kSmall, &gate);
    EXPECT_FALSE(ring.client->may_spin());
    const bool expected = tokens == 1 && sysconf(_SC_NPROCESSORS_ONLN) > 1;
    // On a busy machine a reader may find all there when it looks first, and need not spin.
    for (int round = 0; round < 50 && (round == 0 || ring.client->may_spin() != expected);
         round++) {
      std::thread reader([&] {
        uint8_t bytes[2];
        ASSERT_TRUE(read_whole(*ring.worker, bytes, 2, false));
      });
      for (int i = 0; i < 2; i++) {
        usleep(2000);
        ASSERT_EQ(write_one(*ring.client, "x", 1).bytes, 1u);
      }
      reader.join();
    }
    EXPECT_EQ(ring.client->may_spin(), expected);
  }
}

}  // namespace
}  // namespace gpupool::test
