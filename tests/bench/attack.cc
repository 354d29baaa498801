#include "attack.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "measure.h"

namespace gpupool::bench {

int attack(const char* port, const char* region, int seconds) {
  const int serial = open(port, O_RDWR | O_NONBLOCK | O_CLOEXEC);
  const int file = open(region, O_RDWR | O_CLOEXEC);
  struct stat status{};
  if (serial < 0 || file < 0 || fstat(file, &status) != 0) {
    std::perror(serial < 0 ? port : region);
    return 2;
  }
  const auto bytes = static_cast<size_t>(status.st_size);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 2;
  }
  auto* words = static_cast<volatile uint64_t*>(memory);
  std::mt19937_64 random(7);
  uint64_t sent = 0, written = 0;
  for (const double end = now_seconds() + seconds; now_seconds() < end;) {
    // Positions and states more often than what lies behind them.
    for (int i = 0; i < 1000; i++, written++) {
      const size_t slot = random() % (bytes / 65536) * 65536;
      const size_t at = random() % 4 ? slot + random() % 4096 : random() % bytes;
      words[at / 8] = random();
    }
    uint64_t noise[512];
    for (uint64_t& word : noise) word = random();
    const ssize_t n = write(serial, noise, 1 + random() % sizeof noise);
    if (n > 0) sent += static_cast<uint64_t>(n);
    char answers[4096];
    while (read(serial, answers, sizeof answers) > 0) {
    }
  }
  std::printf("{\"words\": %llu, \"port_bytes\": %llu}\n", static_cast<unsigned long long>(written),
              static_cast<unsigned long long>(sent));
  return 0;
}

}  // namespace gpupool::bench
