#include "broker/rings.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "carriers/ring.h"

namespace gpupool::broker {

std::unique_ptr<Ring> Ring::make(uint32_t epoch, std::string* why) {
  std::unique_ptr<Ring> ring(new Ring);
  ring->fd_.reset(carriers::make_ring_memfd(ring->layout_, epoch, why));
  if (!ring->fd_) return nullptr;
  void* page =
      mmap(nullptr, carriers::kRingControlBytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd(), 0);
  if (page == MAP_FAILED) {
    *why = std::string("the ring's memory: mmap: ") + strerror(errno);
    return nullptr;
  }
  ring->control_ = static_cast<carriers::RingControl*>(page);
  return ring;
}

Ring::~Ring() {
  if (control_ != nullptr) munmap(control_, carriers::kRingControlBytes);
}

wire::CarrierOffer Ring::offer() const {
  return {static_cast<uint32_t>(wire::OfferKind::kRing), carriers::kRingVersion,
          layout_.command_bytes, layout_.bulk_bytes};
}

void Ring::mark_worker_dead() { control_->worker_dead.store(1); }

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
