/* Copies 48 MiB to the device and back, in rounds (argument, 0: for ever), and compares: prints
   "ready" after the first round. At a CUDA error "error CODE, again CODE", and exit status 9. */
#include "common.h"

int main(int argc, char** argv) {
  long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
  enum { kCount = 12 << 20 };
  unsigned *out = malloc(kCount * sizeof *out), *in = malloc(kCount * sizeof *in);
  Session session = open_session();
  CUdeviceptr memory;
  EXPECT(out != NULL && in != NULL);
  CHECK(cuMemAlloc(&memory, kCount * sizeof *out));
  for (long round = 0; rounds == 0 || round < rounds; ++round) {
    for (unsigned i = 0; i < kCount; ++i) out[i] = i * 2654435761u + (unsigned)round;
    memset(in, 0, kCount * sizeof *in);
    TRY(cuMemcpyHtoD(memory, out, kCount * sizeof *out));
    TRY(cuMemcpyDtoH(in, memory, kCount * sizeof *in));
    EXPECT(memcmp(in, out, kCount * sizeof *out) == 0);
    if (round == 0) {
      printf("ready\n");
      fflush(stdout);
    }
  }
  CHECK(cuMemFree(memory));
  close_session(&session);
  return verdict_ok();
}
