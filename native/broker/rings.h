// The rings that sessions are offered (doc/rings.md), and the limit on spinning of this host. Those
// of local sessions lie in a memfd each, those of virtual machines in their region
// (broker/regions.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "broker/account.h"
#include "broker/fd.h"
#include "carriers/ring.h"
#include "wire/control.h"

namespace gpupool::broker {

// One session's, with which the broker has the last word in its control page.
class Ring {
 public:
  virtual ~Ring() = default;
  virtual int fd() const = 0;  // for the worker
  virtual carriers::RingPlace place() const { return {}; }
  virtual wire::CarrierOffer offer() const = 0;
  virtual wire::RegionOffer region_offer() const { return {}; }
  // Whether the client gets fd() with the offer.
  virtual bool fd_is_offered() const { return true; }
  virtual void handed_over() {}
  virtual void mark_worker_dead() = 0;
  virtual void revoke() {}                  // both sides are to stop at once
  virtual const char* carrier() const = 0;  // as people are told

  const carriers::RingLayout& layout() const { return layout_; }

 protected:
  explicit Ring(const carriers::RingLayout& layout) : layout_(layout) {}
  wire::CarrierOffer offer_of(wire::OfferKind kind) const;

  const carriers::RingLayout layout_;
};

// Its memory counts as the host's that the slice's sessions have, and is given back to the host
// when the last one lets the ring go, whoever still has the file: what workers wrote is not a
// client's own memory, with limits of its own. Null: `why`.
std::shared_ptr<Ring> make_memfd_ring(uint32_t epoch, std::shared_ptr<SliceAccount> account,
                                      std::string* why);

// The page of tokens that all workers share (carriers/spin_gate.h). No descriptor: `why`.
Fd make_spin_page(std::string* why);

}  // namespace gpupool::broker
