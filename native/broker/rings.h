// The rings that local sessions are offered (doc/rings.md), and the limit on spinning of this host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "broker/fd.h"
#include "carriers/ring_layout.h"
#include "wire/control.h"

namespace gpupool::broker {

// One session's. The broker keeps the control page to have the last word in it.
class Ring {
 public:
  // Null: `why`.
  static std::unique_ptr<Ring> make(uint32_t epoch, std::string* why);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int fd() const { return fd_.get(); }
  const carriers::RingLayout& layout() const { return layout_; }
  wire::CarrierOffer offer() const;
  void handed_over() { fd_.reset(); }
  void mark_worker_dead();

 private:
  Ring() = default;
  carriers::RingLayout layout_;
  Fd fd_;
  carriers::RingControl* control_ = nullptr;
};

// The page of tokens that all workers share (carriers/spin_gate.h). No descriptor: `why`.
Fd make_spin_page(std::string* why);

}  // namespace gpupool::broker
