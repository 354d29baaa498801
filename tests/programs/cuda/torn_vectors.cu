// A pair or a quadruple that one block writes is never seen half old, half new by another: programs
// that look back at what other blocks have done (CUB) keep a state and its value in one vector.
#include "check.h"

__global__ void write_and_read(uint2* pair, uint4* four, int rounds, unsigned* torn) {
  if (blockIdx.x == 0) {
    if (threadIdx.x != 0) return;
    for (unsigned i = 1; i <= (unsigned)rounds; ++i) {
      asm volatile("st.volatile.global.v2.u32 [%0], {%1, %1};" ::"l"(pair), "r"(i) : "memory");
      asm volatile("st.volatile.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(four), "r"(i)
                   : "memory");
    }
    return;
  }
  for (int i = 0; i < rounds; ++i) {
    unsigned a, b, c, d;
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(pair));
    if (a != b) atomicAdd(torn, 1u);
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(four));
    if (a != b || a != c || a != d) atomicAdd(torn + 1, 1u);
  }
}

int main() {
  uint2* pair;
  uint4* four;
  unsigned *torn, seen[2];
  CHECK(cudaMalloc(&pair, sizeof *pair));
  CHECK(cudaMalloc(&four, sizeof *four));
  CHECK(cudaMalloc(&torn, sizeof seen));
  CHECK(cudaMemset(pair, 0, sizeof *pair));
  CHECK(cudaMemset(four, 0, sizeof *four));
  CHECK(cudaMemset(torn, 0, sizeof seen));
  write_and_read<<<2, 32>>>(pair, four, 300000, torn);
  CHECK(cudaMemcpy(seen, torn, sizeof seen, cudaMemcpyDeviceToHost));
  if (seen[0] != 0 || seen[1] != 0) {
    printf("%u pairs and %u quadruples were torn\n", seen[0], seen[1]);
    return 1;
  }
  puts("ok");
}
