#include "broker/regions.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include <cstddef>

namespace gpupool::broker {

class Region::Slot final : public Ring {
 public:
  Slot(std::shared_ptr<Region> region, size_t index)
      : Ring(region->cut_.layout), region_(std::move(region)), index_(index) {}
  ~Slot() override {
    region_->reset(index_, 0);
    region_->free_.push_back(index_);
  }

  int fd() const override { return region_->fd_.get(); }
  carriers::RingPlace place() const override {
    return {region_->cut_.offset(index_), region_->spec_.bytes};
  }
  wire::CarrierOffer offer() const override { return offer_of(wire::OfferKind::kRegion); }
  wire::RegionOffer region_offer() const override {
    return {region_->cut_.offset(index_), region_->spec_.bytes};
  }
  bool fd_is_offered() const override { return false; }
  void mark_worker_dead() override {
    const uint32_t dead = 1;
    std::string why;
    if (!region_->whole(&why)) return;
    region_->write(&dead, sizeof dead,
                   region_->cut_.offset(index_) + offsetof(carriers::RingControl, worker_dead));
  }
  void revoke() override { region_->reset(index_, 0); }
  const char* carrier() const override { return "ivshmem"; }

 private:
  const std::shared_ptr<Region> region_;
  const size_t index_;
};

Region::Region(const RegionSpec& spec, Fd fd, const carriers::RegionCut& cut)
    : spec_(spec), fd_(std::move(fd)), cut_(cut) {
  for (size_t i = 0; i < cut_.count; i++) free_.push_back(i);
}

std::shared_ptr<Region> Region::open(const RegionSpec& spec, std::string* why) {
  const carriers::RegionCut cut = carriers::cut_region(spec.bytes);
  if (cut.count == 0) return *why = "it is too small for a ring", nullptr;
  // O_NONBLOCK: something else of that name must not keep the broker waiting.
  Fd fd(::open(spec.path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!fd) return *why = strerror(errno), nullptr;
  std::shared_ptr<Region> region(new Region(spec, std::move(fd), cut));
  if (!region->whole(why)) return nullptr;
  return region;
}

bool Region::whole(std::string* why) const {
  struct stat status;
  if (fstat(fd_.get(), &status) != 0) return *why = strerror(errno), false;
  if (!S_ISREG(status.st_mode)) return *why = "it is no regular file", false;
  if (status.st_ino != spec_.inode) return *why = "it is not the file that was made", false;
  if (static_cast<uint64_t>(status.st_size) != spec_.bytes) {
    *why = "it has " + std::to_string(status.st_size) + " bytes and not " +
           std::to_string(spec_.bytes);
    return false;
  }
  return true;
}

bool Region::write(const void* data, size_t bytes, uint64_t at) {
  ssize_t written;
  do {
    written = pwrite(fd_.get(), data, bytes, static_cast<off_t>(at));
  } while (written < 0 && errno == EINTR);
  return written == static_cast<ssize_t>(bytes);
}

bool Region::reset(size_t slot, uint32_t epoch) {
  alignas(carriers::RingControl) uint8_t page[carriers::kRingControlBytes] = {};
  if (epoch != 0) carriers::prepare_ring(page, cut_.layout, epoch);
  std::string why;
  return whole(&why) && write(page, sizeof page, cut_.offset(slot));
}

std::shared_ptr<Ring> Region::take(uint32_t epoch, std::string* why) {
  if (free_.empty()) return *why = "all its slots are in use", nullptr;
  if (!whole(why)) return nullptr;
  const size_t slot = free_.front();
  if (!reset(slot, epoch)) return *why = strerror(errno), nullptr;
  free_.pop_front();
  return std::make_shared<Slot>(shared_from_this(), slot);
}

}  // namespace gpupool::broker
