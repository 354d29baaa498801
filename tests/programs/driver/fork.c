/* fork(): the child may not use what the parent opened and gets CUDA_ERROR_NOT_INITIALIZED; the
   parent works on as if nothing had happened. */
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

int main(void) {
  Session session = open_session();
  CUfunction fill = kernel_of(&session, "fill");
  CUdeviceptr out;
  unsigned value = 5, n = 256, host[256];
  CHECK(cuMemAlloc(&out, sizeof host));
  void* parameters[] = {&out, &value, &n};
  CHECK(cuLaunchKernel(fill, 1, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    CUdeviceptr other;
    if (cuMemAlloc(&other, 16) != CUDA_ERROR_NOT_INITIALIZED) _exit(11);
    if (cuCtxSynchronize() != CUDA_ERROR_NOT_INITIALIZED) _exit(12);
    if (cuMemcpyDtoH(host, out, 16) != CUDA_ERROR_NOT_INITIALIZED) _exit(13);
    _exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    printf("the child ended with status 0x%x\n", status);
    return 1;
  }
  CHECK(cuMemcpyDtoH(host, out, sizeof host));
  for (unsigned i = 0; i < n; ++i) EXPECT(host[i] == value + i);
  CHECK(cuMemFree(out));
  close_session(&session);
  return verdict_ok();
}
