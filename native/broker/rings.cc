#include "broker/rings.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

namespace gpupool::broker {
namespace {

class MemfdRing final : public Ring {
 public:
  MemfdRing() : Ring({}) {}
  ~MemfdRing() override {
    if (control_ != nullptr) munmap(control_, carriers::kRingControlBytes);
  }

  bool make(uint32_t epoch, std::string* why) {
    fd_.reset(carriers::make_ring_memfd(layout_, epoch, why));
    if (!fd_) return false;
    void* page =
        mmap(nullptr, carriers::kRingControlBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
    if (page == MAP_FAILED) {
      *why = std::string("the ring's memory: mmap: ") + strerror(errno);
      return false;
    }
    control_ = static_cast<carriers::RingControl*>(page);
    return true;
  }

  int fd() const override { return fd_.get(); }
  wire::CarrierOffer offer() const override { return offer_of(wire::OfferKind::kRing); }
  void handed_over() override { fd_.reset(); }
  void mark_worker_dead() override { control_->worker_dead.store(1); }
  const char* carrier() const override { return "ring"; }

 private:
  Fd fd_;
  carriers::RingControl* control_ = nullptr;
};

}  // namespace

wire::CarrierOffer Ring::offer_of(wire::OfferKind kind) const {
  return {static_cast<uint32_t>(kind), carriers::kRingVersion, layout_.command_bytes,
          layout_.bulk_bytes};
}

std::shared_ptr<Ring> make_memfd_ring(uint32_t epoch, std::string* why) {
  auto ring = std::make_shared<MemfdRing>();
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
