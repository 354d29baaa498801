#include "client/recorder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/log.h"

namespace gpupool::client {
namespace {

int open_recording() {
  const char* path = getenv("GPUPOOL_RECORD");
  if (path == nullptr || *path == '\0') return -1;
  const int fd = ::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  static constexpr char kMagic[] = "GPUPOOLREC1\n";
  if (fd < 0 || ::write(fd, kMagic, sizeof kMagic - 1) < 0) {
    log(Level::kError, "cannot record to %s", path);
    return -1;
  }
  return fd;
}

void write_fully(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd, at, bytes);
    if (n <= 0) return;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace

void record_frame(const void* body, uint32_t body_bytes, const carriers::Part* bulk,
                  int bulk_count) {
  static const int fd = open_recording();
  if (fd < 0) return;
  const uint32_t head[2] = {body_bytes, static_cast<uint32_t>(bulk_count)};
  write_fully(fd, head, sizeof head);
  for (int i = 0; i < bulk_count; i++) {
    const auto bytes = static_cast<uint32_t>(bulk[i].bytes);
    write_fully(fd, &bytes, sizeof bytes);
  }
  write_fully(fd, body, body_bytes);
  for (int i = 0; i < bulk_count; i++) write_fully(fd, bulk[i].data, bulk[i].bytes);
}

}  // namespace gpupool::client
