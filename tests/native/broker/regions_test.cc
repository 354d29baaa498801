// The slots of a virtual machine's region: who gets which, and when again.
#include "broker/regions.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

#include "carriers/carrier.h"

namespace gpupool::broker {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class Regions : public testing::Test {
 protected:
  Regions() {
    char name[] = "/tmp/gpupool-region-XXXXXX";
    file = mkostemp(name, O_CLOEXEC);
    path = name;
    size_to(4 * kMiB);
  }
  ~Regions() override {
    close(file);
    unlink(path.c_str());
  }

  void size_to(uint64_t bytes) { ASSERT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0); }
  RegionSpec spec(uint64_t bytes = 4 * kMiB) const {
    struct stat status;
    fstat(file, &status);
    return {path, status.st_ino, bytes};
  }
  std::shared_ptr<Region> open() {
    std::string why;
    auto region = Region::open(spec(), &why);
    EXPECT_NE(region, nullptr) << why;
    return region;
  }
  std::string refused(const RegionSpec& with) {
    std::string why;
    EXPECT_EQ(Region::open(with, &why), nullptr);
    return why;
  }
  uint32_t word(uint64_t at) const {
    uint32_t value = 0;
    EXPECT_EQ(pread(file, &value, sizeof value, static_cast<off_t>(at)), ssize_t{sizeof value});
    return value;
  }

  int file = -1;
  std::string path, why;
};

// Offsets as doc/rings.md gives them.
constexpr uint64_t kEpochAt = 128, kWorkerDeadAt = 132, kTailAt = 384;

TEST_F(Regions, OnlyTheFileThatWasMade) {
  EXPECT_EQ(refused({"/tmp/gpupool-no-such-region", 1, 4 * kMiB}), "No such file or directory");
  RegionSpec other = spec();
  other.inode++;
  EXPECT_EQ(refused(other), "it is not the file that was made");
  EXPECT_EQ(refused(spec(8 * kMiB)), "it has 4194304 bytes and not 8388608");
  EXPECT_EQ(refused(spec(4096)), "it is too small for a ring");
  RegionSpec link = spec();
  link.path = path + ".link";
  ASSERT_EQ(symlink(path.c_str(), link.path.c_str()), 0);
  EXPECT_EQ(refused(link), "Too many levels of symbolic links");
  unlink(link.path.c_str());
  // Opening a pipe would wait for ever.
  ASSERT_EQ(mkfifo(link.path.c_str(), 0600), 0);
  EXPECT_EQ(refused(link), "it is no regular file");
  unlink(link.path.c_str());
}

TEST(RegionCut, SlotsFillTheRegionAndDoNotOverlap) {
  for (uint64_t bytes = 2 * kMiB; bytes <= 1024 * kMiB; bytes *= 2) {
    const carriers::RegionCut cut = carriers::cut_region(bytes);
    ASSERT_TRUE(cut.layout.valid()) << bytes;
    ASSERT_GE(cut.count, 4u) << bytes;
    EXPECT_EQ(cut.offset(0), 65536u);  // behind the header and the guest's room
    EXPECT_EQ(cut.offset(1) - cut.offset(0), cut.layout.region_bytes());
    EXPECT_EQ(cut.offset(1) % 4096, 0u);
    EXPECT_LE(cut.offset(cut.count), bytes);
    EXPECT_GT(cut.offset(cut.count) + cut.layout.region_bytes(), bytes);
  }
  EXPECT_EQ(carriers::cut_region(64 * kMiB).layout.bulk_bytes, 4u << 20);
  EXPECT_EQ(carriers::cut_region(16 * kMiB).layout.bulk_bytes, 1u << 20);
  EXPECT_EQ(carriers::cut_region(16 * kMiB).count, 7u);
  EXPECT_EQ(carriers::cut_region(kMiB).count, 3u);  // with the smallest rings
  EXPECT_EQ(carriers::cut_region(0).count, 0u);
  EXPECT_EQ(carriers::cut_region(65536).count, 0u);
}

TEST_F(Regions, EachSlotOnceAndTheLongestUnusedFirst) {
  auto region = open();
  std::vector<std::shared_ptr<Ring>> slots;
  std::set<uint64_t> offsets;
  for (size_t i = 0; i < region->slots(); i++) {
    slots.push_back(region->take(7, &why));
    ASSERT_NE(slots.back(), nullptr) << why;
    EXPECT_TRUE(offsets.insert(slots.back()->place().offset).second);
    EXPECT_EQ(slots.back()->place().file_bytes, 4 * kMiB);
    EXPECT_EQ(slots.back()->region_offer().offset, slots.back()->place().offset);
    EXPECT_EQ(slots.back()->offer().kind, 2u);
  }
  EXPECT_EQ(region->take(8, &why), nullptr);
  EXPECT_EQ(why, "all its slots are in use");
  const uint64_t second = slots[1]->place().offset, first = slots[0]->place().offset;
  slots[1].reset();
  slots[0].reset();
  EXPECT_EQ(region->free_slots(), 2u);
  EXPECT_EQ((slots[1] = region->take(8, &why))->place().offset, second);
  EXPECT_EQ((slots[0] = region->take(8, &why))->place().offset, first);
}

TEST_F(Regions, ASlotIsKeptAsLongAsAnybodyHasIt) {
  auto region = open();
  auto session = region->take(7, &why), worker = session;
  const size_t left = region->free_slots();
  session.reset();
  EXPECT_EQ(region->free_slots(), left);
  worker.reset();
  EXPECT_EQ(region->free_slots(), left + 1);
}

TEST_F(Regions, NothingOfTheSessionBeforeIsLeftInTheControlPage) {
  auto region = open();
  auto slot = region->take(7, &why);
  const uint64_t at = slot->place().offset;
  EXPECT_EQ(word(at), carriers::kRingMagic);
  EXPECT_EQ(word(at + kEpochAt), 7u);
  std::string noise(4096, '\xee');
  ASSERT_EQ(pwrite(file, noise.data(), noise.size(), static_cast<off_t>(at)), 4096);
  slot->mark_worker_dead();
  EXPECT_EQ(word(at + kWorkerDeadAt), 1u);
  slot.reset();
  EXPECT_EQ(word(at + kEpochAt), 0u);  // whoever still looks at it ends
  EXPECT_EQ(word(at + kTailAt), 0u);
  // And once more what a guest wrote while it was nobody's.
  ASSERT_EQ(pwrite(file, noise.data(), noise.size(), static_cast<off_t>(at)), 4096);
  std::vector<std::shared_ptr<Ring>> all;
  while ((slot = region->take(9, &why)) != nullptr) all.push_back(slot);
  EXPECT_EQ(word(at + kEpochAt), 9u);
  EXPECT_EQ(word(at + kWorkerDeadAt), 0u);
  EXPECT_EQ(word(at + kTailAt), 0u);
}

TEST_F(Regions, AFileThatWasCutOffIsNotUsedAndNotMadeLarger) {
  auto region = open();
  auto slot = region->take(7, &why);
  size_to(8192);
  EXPECT_EQ(region->take(8, &why), nullptr);
  EXPECT_EQ(why, "it has 8192 bytes and not 4194304");
  slot.reset();
  struct stat status;
  fstat(file, &status);
  EXPECT_EQ(status.st_size, 8192);
  size_to(4 * kMiB);
  EXPECT_NE(region->take(8, &why), nullptr) << why;
}

TEST_F(Regions, SessionsKeepTheirSlotsWhenTheRegionIsLetGo) {
  auto region = open();
  auto slot = region->take(7, &why);
  const uint64_t at = slot->place().offset;
  region.reset();
  slot->mark_worker_dead();
  EXPECT_EQ(word(at + kWorkerDeadAt), 1u);
  slot.reset();
  EXPECT_EQ(word(at + kEpochAt), 0u);
}

// ---- Rings in slots
// ------------------------------------------------------------------------------

struct Ends {
  Ends(int file, const Ring& slot, uint32_t epoch) {
    int ends[2];
    std::string why;
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    client = carriers::choose_ring(carriers::make_socket_carrier(ends[0]), dup(file),
                                   carriers::kRingVersion, slot.layout(), epoch, slot.place());
    worker = carriers::await_choice(ends[1], dup(slot.fd()), slot.layout(), epoch, nullptr,
                                    1'000'000, slot.place());
    EXPECT_STREQ(client->kind(), "ring");
    EXPECT_NE(worker, nullptr);
  }
  bool says(const std::string& text) {
    if (!carriers::write_all(*client, text.data(), text.size(), 100'000)) return false;
    std::string got(text.size(), '\0');
    return carriers::read_all(*worker, got.data(), got.size(), 1'000'000) && got == text;
  }
  std::unique_ptr<carriers::Carrier> client, worker;
};

TEST_F(Regions, WhatIsWrittenIntoASlotReachesNoOther) {
  auto region = open();
  auto one = region->take(7, &why), other = region->take(8, &why);
  Ends first(file, *one, 7), second(file, *other, 8);
  EXPECT_TRUE(first.says("hello"));
  EXPECT_TRUE(second.says("there"));
  std::string noise(one->layout().region_bytes(), '\xa5');
  ASSERT_EQ(pwrite(file, noise.data(), noise.size(), static_cast<off_t>(one->place().offset)),
            static_cast<ssize_t>(noise.size()));
  uint8_t byte;
  EXPECT_FALSE(carriers::read_all(*first.worker, &byte, 1, 1'000'000));  // closed, not waiting
  EXPECT_FALSE(first.says("hello"));
  EXPECT_TRUE(second.says("again"));
}

TEST_F(Regions, WhoHoldsASlotThatWasGivenBackEnds) {
  auto region = open();
  auto slot = region->take(7, &why);
  Ends ends(file, *slot, 7);
  EXPECT_TRUE(ends.says("hello"));
  slot.reset();
  EXPECT_FALSE(ends.says("hello"));
}

TEST_F(Regions, BothSidesStopWhenASlotIsRevoked) {
  auto region = open();
  auto slot = region->take(7, &why);
  Ends ends(file, *slot, 7);
  EXPECT_TRUE(ends.says("hello"));
  slot->revoke();
  const carriers::Part part{const_cast<char*>("x"), 1};
  EXPECT_EQ(ends.client->write(&part, 1, false).status, carriers::Status::kClosed);
  EXPECT_EQ(ends.worker->write(&part, 1, false).status, carriers::Status::kClosed);
}

// As when a device is unplugged: what was mapped of it is not there any more. A program that has
// done nothing since then must not be ended by a signal, whatever it does first.
TEST_F(Regions, AnIdleClientDoesNotTouchWhatWasUnplugged) {
  using carriers::Status;
  for (int first = 0; first < 6; first++) {
    size_to(4 * kMiB);
    auto region = open();
    auto slot = region->take(7, &why);
    Ends ends(file, *slot, 7);
    EXPECT_TRUE(ends.says("hello"));
    ends.worker.reset();
    usleep(60'000);
    size_to(0);
    uint8_t byte = 0;
    const carriers::Part part{&byte, 1}, bulk{&byte, 1, true};
    switch (first) {
      case 0:
        EXPECT_EQ(ends.client->write(&part, 1, true).status, Status::kClosed);
        break;
      case 1:
        EXPECT_EQ(ends.client->write(&bulk, 1, false).status, Status::kClosed);
        break;
      case 2:
        EXPECT_EQ(ends.client->read(&part, 1, false).status, Status::kClosed);
        break;
      case 3:
        EXPECT_EQ(ends.client->read_bulk(&byte, 1, true).status, Status::kClosed);
        break;
      case 4:
        EXPECT_NE(ends.client->wait(carriers::kReadable, -1), 0);
        break;
      default:
        EXPECT_FALSE(ends.client->wait_for_bulk(1));
    }
    EXPECT_FALSE(ends.client->may_spin());
    EXPECT_NE(ends.client->wait(carriers::kReadable | carriers::kWritable, -1), 0);
    EXPECT_EQ(ends.client->write(&part, 1, true).status, Status::kClosed);
    EXPECT_EQ(ends.client->read(&part, 1, true).status, Status::kClosed);
  }
}

TEST_F(Regions, AClientLooksWhereItIsSent) {
  auto region = open();
  auto slot = region->take(7, &why);
  const auto maps = [&](carriers::RingPlace place) {
    return carriers::map_ring(file, slot->layout(), &why, place) != nullptr;
  };
  const uint64_t size = 4 * kMiB, ring = slot->layout().region_bytes();
  EXPECT_TRUE(maps({65536, size}));
  EXPECT_TRUE(maps({size - ring, size}));
  EXPECT_FALSE(maps({size - ring + 4096, size}));
  EXPECT_FALSE(maps({65537, size}));
  EXPECT_FALSE(maps({UINT64_MAX - 4095, size}));
  EXPECT_FALSE(maps({65536, 2 * size}));
  EXPECT_FALSE(maps({65536, 1}));
  EXPECT_FALSE(maps({0, 0}));  // that would be a memfd
}

}  // namespace
}  // namespace gpupool::broker
