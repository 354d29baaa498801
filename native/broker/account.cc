#include "broker/account.h"

#include <algorithm>

namespace gpupool::broker {

bool Ledger::charge(Charge& worker, uint64_t bytes) {
  if (bytes > limit_ - used_) return false;
  used_ += bytes;
  worker.bytes += bytes;
  return true;
}

uint64_t Ledger::refund(Charge& worker, uint64_t bytes) {
  bytes = std::min(bytes, worker.bytes);
  worker.bytes -= bytes;
  used_ -= bytes;
  return bytes;
}

uint64_t Ledger::close(Charge& worker) { return refund(worker, worker.bytes); }

bool Ledger::resize(uint64_t limit) {
  if (limit < used_) return false;
  limit_ = limit;
  return true;
}

}  // namespace gpupool::broker
