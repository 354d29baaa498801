#include "guest/region.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "carriers/patience.h"
#include "carriers/region_layout.h"

namespace gpupool::guest {
namespace {

constexpr int64_t kLookNs = 1'000'000'000;
constexpr int64_t kAgainNs = 10'000'000'000;  // one that was slow may have had a bad moment
// In one direction: so many copies, fewer if that takes too long, but always some.
constexpr int kMostCopies = 32, kLeastCopies = 4;
constexpr int64_t kMeasureNs = 50'000'000;
constexpr size_t kScratchBytes = carriers::kRegionFirstSlot - carriers::kRegionScratch;

using carriers::Patience;

uint64_t mib_per_second(size_t bytes, int64_t ns) {
  return static_cast<uint64_t>(static_cast<double>(bytes) * 1e9 /
                               static_cast<double>(std::max<int64_t>(ns, 1)) / (1 << 20));
}

// Of the fastest copy: a program that gets in between makes one slower, nothing makes one faster.
uint64_t best_speed(void* to, const void* from) {
  int64_t best = INT64_MAX;
  const int64_t start = Patience::now_ns();
  int64_t before = start;
  for (int i = 0; i < kMostCopies && (i < kLeastCopies || before - start < kMeasureNs); i++) {
    memcpy(to, from, kScratchBytes);
    asm volatile("" : : "r"(to) : "memory");
    const int64_t now = Patience::now_ns();
    best = std::min(best, now - before);
    before = now;
  }
  return mib_per_second(kScratchBytes, best);
}

}  // namespace

void Region::look(bool now) {
  const int64_t time = Patience::now_ns();
  if (!now && looked_ns_ != 0 && time - looked_ns_ < kLookNs) return;
  looked_ns_ = time;
  const bool again = state_ == State::kSlow && time - measured_ns_ > kAgainNs;
  if (fd_ && still_there() && !again) return;
  fd_.reset();
  path_.clear();
  problem_.clear();
  state_ = State::kAbsent;
  if (!wanted_.empty()) {
    open(wanted_);
    return;
  }
  const std::vector<SharedMemoryDevice> devices = devices_.find();
  for (const SharedMemoryDevice& device : devices) {
    if (device.has_address && open(device.path + "/resource2")) return;
  }
  for (const SharedMemoryDevice& device : devices) {
    if (device.has_address) continue;
    state_ = State::kFailed;
    path_ = device.path;
    problem_ =
        "the guest's PCI bridge has no room for it ([libvirt] region_size = 2 on the host needs "
        "none)";
  }
}

// One that was unplugged and plugged in again is another file of the same name.
bool Region::still_there() const {
  struct stat now, open;
  return stat(path_.c_str(), &now) == 0 && fstat(fd_.get(), &open) == 0 &&
         now.st_dev == open.st_dev && now.st_ino == open.st_ino;
}

// False: this one is none of ours, or cannot be used.
bool Region::open(const std::string& path) {
  const auto failed = [&](const std::string& what) {
    state_ = State::kFailed;
    path_ = path;
    problem_ = what;
    return false;
  };
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!fd && errno == ENOENT) return false;
  if (!fd || fstat(fd.get(), &status) != 0) return failed(strerror(errno));
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes < carriers::kRegionFirstSlot) return false;
  void* base =
      mmap(nullptr, carriers::kRegionFirstSlot, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return failed(std::string("it cannot be mapped: ") + strerror(errno));
  carriers::RegionHeader header;
  memcpy(&header, base, sizeof header);
  const bool ours = memcmp(header.magic, carriers::kRegionMagic, sizeof header.magic) == 0 &&
                    header.state == carriers::kRegionLive && header.bytes == bytes;
  if (ours) {
    path_ = path;
    bytes_ = bytes;
    measure(static_cast<uint8_t*>(base) + carriers::kRegionScratch);
    state_ = std::min(read_speed_, write_speed_) < least_ ? State::kSlow : State::kUsable;
    fd_ = std::move(fd);
  }
  munmap(base, carriers::kRegionFirstSlot);
  return ours;
}

void Region::measure(uint8_t* scratch) {
  const auto own = std::make_unique<uint8_t[]>(kScratchBytes);
  measured_ns_ = Patience::now_ns();
  write_speed_ = best_speed(scratch, own.get());
  read_speed_ = best_speed(own.get(), scratch);
}

}  // namespace gpupool::guest
