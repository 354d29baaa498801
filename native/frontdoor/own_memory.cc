#include "frontdoor/own_memory.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace gpupool::frontdoor {
namespace {

constexpr uintptr_t kPage = 4096;  // the smallest

// The kernel copies the set of signals, of 8 bytes, before it finds that the first argument is
// none, and changes nothing.
bool can_read_word(uintptr_t at) {
  const int before = errno;
  const long result = syscall(SYS_rt_sigprocmask, ~0, at & ~uintptr_t{7}, nullptr, 8);
  const bool fault = result == -1 && errno == EFAULT;
  errno = before;
  return !fault;
}

}  // namespace

bool can_read(const void* pointer, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (bytes == 0) return true;
  if (bytes - 1 > UINTPTR_MAX - begin) return false;
  const uintptr_t last = begin + (bytes - 1);
  for (uintptr_t at = begin;;) {
    if (!can_read_word(at)) return false;
    const uintptr_t next = (at & ~(kPage - 1)) + kPage;
    if (next == 0 || next > last) return true;
    at = next;
  }
}

size_t text_length(const char* text) {
  for (size_t length = 0;;) {
    const auto at = reinterpret_cast<uintptr_t>(text) + length;
    if (!can_read_word(at)) return SIZE_MAX;
    const size_t piece = kPage - at % kPage;
    const size_t found = strnlen(text + length, piece);
    length += found;
    if (found < piece) return length;
  }
}

}  // namespace gpupool::frontdoor
