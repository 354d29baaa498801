// The bulk data of a session's frames: read into memory, or used where a ring has them.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <algorithm>

#include "worker/session_state.h"

namespace gpupool::worker {

bool SessionState::read_bulk(void* to, uint64_t bytes) {
  lent_.collect(0);  // what is read behind what is lent could not be given back
  return reader_.read_bulk(to, bytes);
}

bool SessionState::may_lend(Context* context) {
  return carrier_->bulk_apart() && !host_functions_.outstanding() &&
         (submitted_ == submitted_when_lent_ || idle(context)) && lent_.usable(context->driver);
}

const uint8_t* SessionState::lend_bulk(uint64_t bytes, uint64_t* end) {
  lent_.collect(LentBulk::kAll);
  if (const uint8_t* at = reader_.lend_bulk(bytes, end)) return at;
  lent_.collect(0);  // so that there is room for what is waited for
  return reader_.wait_for_bulk(bytes) ? reader_.lend_bulk(bytes, end) : nullptr;
}

void SessionState::lent(uint64_t end, uint64_t bytes, Context* context, Stream* stream) {
  lent_.give_back_after(end, bytes, context->driver, stream->driver);
  submitted_when_lent_ = submitted_;
}

bool SessionState::skip_bulk(uint64_t bytes) {
  std::vector<uint8_t> nowhere(std::min<uint64_t>(bytes, 65536));
  while (bytes > 0) {
    const uint64_t piece = std::min<uint64_t>(bytes, nowhere.size());
    if (!read_bulk(nowhere.data(), piece)) return false;
    bytes -= piece;
  }
  return true;
}

}  // namespace gpupool::worker
