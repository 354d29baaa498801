/* Wrong on purpose: an access far outside every allocation. 700 at the next synchronising call and
   ever after in this context. Prints the address that was written. */
#include "common.h"

int main(void) {
  Session session = open_session();
  CUfunction overrun = kernel_of(&session, "overrun"), fill = kernel_of(&session, "fill");
  CUdeviceptr out, more;
  CUstream stream;
  unsigned value = 1, n = 32;
  unsigned long long offset = 1ull << 40;
  CHECK(cuMemAlloc(&out, 4096));
  void* good[] = {&out, &value, &n};
  void* bad[] = {&out, &offset};
  CHECK(cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, NULL, good, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuLaunchKernel(overrun, 2, 1, 1, 32, 1, 1, 0, NULL, bad, NULL));
  printf("address 0x%llx\n", (unsigned long long)out + offset);
  EXPECT(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuMemAlloc(&more, 4096) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, NULL, good, NULL) ==
         CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuMemcpyDtoH(&value, out, 4) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT(cuStreamCreate(&stream, 0) == CUDA_ERROR_ILLEGAL_ADDRESS);
  return verdict_ok();
}
