/* A hostile process of a virtual machine, with the rights of its root:

   noise PORT SECONDS     random bytes to the control port
   mute PORT SECONDS      holds the port open, reads nothing and answers nothing
   scribble MEMORY BYTES FIRST SECONDS  writes into the shared memory from byte FIRST on: anything,
                          words near to those that are there, and places that cannot be
   positions MEMORY BYTES FIRST SECONDS  writes what only the host reads: how far the programs in
   the slots from there on say they have come

   Prints how much it wrote. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static uint64_t state = 88172645463325252u;

static uint64_t any(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static int open_or_end(const char* path, int flags) {
  int fd = open(path, O_RDWR | O_CLOEXEC | flags);
  if (fd >= 0) return fd;
  fprintf(stderr, "%s: %s\n", path, strerror(errno));
  exit(2);
}

static uint64_t noise(int port, double end) {
  uint64_t words[512], sent = 0;
  char answer[4096];
  while (now() < end) {
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) words[i] = any();
    struct pollfd ready = {port, POLLOUT, 0};
    if (poll(&ready, 1, 100) <= 0) continue;
    ssize_t n = write(port, words, 1 + any() % sizeof words);
    if (n > 0) sent += (uint64_t)n;
    while (read(port, answer, sizeof answer) > 0) {
    }
  }
  return sent;
}

/* Positions lie at the beginning of each slot, in cache lines of their own, so these are hit more
   often than what lies behind them. */
static uint64_t scribble(volatile uint64_t* memory, uint64_t bytes, uint64_t first, double end) {
  uint64_t written = 0;
  while (now() < end) {
    for (int i = 0; i < 512; i++, written++) {
      uint64_t page = (first + any() % (bytes - first)) & ~UINT64_C(65535);
      if (page < first) page = first;
      uint64_t at = any() % 4 ? page + any() % 32 * 128 : first + any() % (bytes - first);
      if (at + 8 > bytes) continue;
      volatile uint64_t* word = &memory[at / 8];
      switch (any() % 4) {
        case 0:
          *word = any();
          break;
        case 1:
          *word += any() % 4096;
          break;
        case 2:
          *word -= any() % 4096;
          break;
        default:
          *word = UINT64_MAX - any() % 65536;
      }
    }
  }
  return written;
}

/* The tails of the rings to the worker and the heads of those to the client (ring_layout.h). */
static uint64_t positions(volatile uint64_t* memory, uint64_t bytes, uint64_t first, double end) {
  static const uint64_t kPlaces[] = {384, 512, 1408, 1536};
  uint64_t written = 0;
  while (now() < end) {
    for (uint64_t page = first; page + 4096 <= bytes; page += 4096) {
      if (memory[page / 8] != 0x152505047) continue;
      volatile uint64_t* word = &memory[(page + kPlaces[any() % 4]) / 8];
      *word = any() % 2 ? any() : *word + any() % (1 << 20);
      written++;
    }
  }
  return written;
}

int main(int argc, char** argv) {
  if (argc == 4 && strcmp(argv[1], "noise") == 0) {
    int port = open_or_end(argv[2], O_NONBLOCK);
    printf("wrote %llu\n", (unsigned long long)noise(port, now() + atof(argv[3])));
  } else if (argc == 4 && strcmp(argv[1], "mute") == 0) {
    open_or_end(argv[2], O_NONBLOCK);
    struct timespec pause = {atoi(argv[3]), 0};
    nanosleep(&pause, NULL);
    printf("wrote 0\n");
  } else if (argc == 6 && (!strcmp(argv[1], "scribble") || !strcmp(argv[1], "positions"))) {
    int file = open_or_end(argv[2], 0);
    uint64_t bytes = strtoull(argv[3], NULL, 10), first = strtoull(argv[4], NULL, 10);
    void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED || first + 4096 > bytes) {
      fprintf(stderr, "%s: it cannot be mapped\n", argv[2]);
      return 2;
    }
    double end = now() + atof(argv[5]);
    uint64_t written = *argv[1] == 's' ? scribble(memory, bytes, first, end)
                                       : positions(memory, bytes, first, end);
    printf("wrote %llu\n", (unsigned long long)written);
  } else {
    return 2;
  }
  return 0;
}
