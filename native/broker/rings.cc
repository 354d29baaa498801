#include "broker/rings.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

namespace gpupool::broker {
namespace {

class MemfdRing final : public Ring {
 public:
  explicit MemfdRing(std::shared_ptr<SliceAccount> account)
      : Ring({}), account_(std::move(account)) {}
  ~MemfdRing() override {
    if (control_ != nullptr) {
      madvise(control_, bytes(), MADV_REMOVE);
      munmap(control_, bytes());
    }
    account_->host.close(charge_);
  }

  bool make(uint32_t epoch, std::string* why) {
    if (!account_->host.charge(charge_, bytes())) {
      return *why = "its slice has no more of the host's memory", false;
    }
    fd_.reset(carriers::make_ring_memfd(layout_, epoch, why));
    if (!fd_) return false;
    void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
    if (memory == MAP_FAILED) {
      *why = std::string("the ring's memory: mmap: ") + strerror(errno);
      return false;
    }
    madvise(memory, bytes(), MADV_DONTDUMP);
    control_ = static_cast<carriers::RingControl*>(memory);
    return true;
  }

  int fd() const override { return fd_.get(); }
  wire::CarrierOffer offer() const override { return offer_of(wire::OfferKind::kRing); }
  void handed_over() override { fd_.reset(); }
  void mark_worker_dead() override { control_->worker_dead.store(1); }
  const char* carrier() const override { return "ring"; }

 private:
  size_t bytes() const { return layout_.region_bytes(); }

  const std::shared_ptr<SliceAccount> account_;
  Charge charge_;
  Fd fd_;
  carriers::RingControl* control_ = nullptr;  // the whole, which begins with it
};

}  // namespace

wire::CarrierOffer Ring::offer_of(wire::OfferKind kind) const {
  return {static_cast<uint32_t>(kind), carriers::kRingVersion, layout_.command_bytes,
          layout_.bulk_bytes};
}

std::shared_ptr<Ring> make_memfd_ring(uint32_t epoch, std::shared_ptr<SliceAccount> account,
                                      std::string* why) {
  auto ring = std::make_shared<MemfdRing>(std::move(account));
  return ring->make(epoch, why) ? ring : nullptr;
}

Fd make_spin_page(std::string* why) {
  Fd page(memfd_create("gpupool-spinners", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!page || ftruncate(page.get(), carriers::SpinGate::kBytes) != 0 ||
      fcntl(page.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    *why = std::string("the page of spinners: ") + strerror(errno);
    return {};
  }
  return page;
}

}  // namespace gpupool::broker
