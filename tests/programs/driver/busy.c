/* Keeps the card busy until it is killed: one kernel after the other. Prints "ready" after the
   first. */
#include "common.h"

int main(void) {
  enum { kCount = 1 << 20 };
  unsigned n = kCount;
  Session session = open_session();
  CUfunction fill = kernel_of(&session, "fill");
  CUdeviceptr out;
  CHECK(cuMemAlloc(&out, kCount * sizeof(unsigned)));
  for (unsigned round = 0;; ++round) {
    void* parameters[] = {&out, &round, &n};
    CHECK(cuLaunchKernel(fill, kCount / 256, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
    CHECK(cuCtxSynchronize());
    if (round == 0) {
      printf("ready\n");
      fflush(stdout);
    }
  }
}
