/* Works until something fails or the number of rounds (argument, 0: for ever) is reached: each
   round fills, synchronises and checks. Prints "ready" after the first round and, at a CUDA error,
   what failed and that it stays so: "error CODE, again CODE". Exit status 9 then. */
#include <time.h>

#include "common.h"

int main(int argc, char** argv) {
  long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
  enum { kCount = 2048 };
  unsigned host[kCount], n = kCount;
  Session session = open_session();
  CUfunction fill = kernel_of(&session, "fill");
  CUdeviceptr out;
  struct timespec pause = {0, 2000000};
  CHECK(cuMemAlloc(&out, sizeof host));
  for (long round = 0; rounds == 0 || round < rounds; ++round) {
    unsigned value = (unsigned)round;
    void* parameters[] = {&out, &value, &n};
    TRY(cuLaunchKernel(fill, kCount / 256, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
    TRY(cuCtxSynchronize());
    TRY(cuMemcpyDtoH(host, out, sizeof host));
    for (unsigned i = 0; i < n; ++i) EXPECT(host[i] == value + i);
    if (round == 0) {
      printf("ready\n");
      fflush(stdout);
    }
    nanosleep(&pause, NULL);
  }
  CHECK(cuMemFree(out));
  close_session(&session);
  return verdict_ok();
}
