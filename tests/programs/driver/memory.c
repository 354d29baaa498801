/* Memory and its limit, as commands in order of the arguments:
     info        prints "free N total N" (bytes)
     alloc N     allocates N MiB, prints "alloc N: CODE"
     heap N      sets the limit of the device's heap to N MiB, prints "heap N: CODE"
     output N    the same for printf's buffer, "output N: CODE"
     touch       writes and checks both ends of the last allocation
     free        frees the last allocation
     wait        prints "waiting" and reads one line from standard input
     end         ends without freeing anything
   Exit status 0 unless something other than cuMemAlloc fails. */
#include <unistd.h>

#include "common.h"

int main(int argc, char** argv) {
  Session session = open_session();
  CUdeviceptr allocations[1024];
  size_t sizes[1024];
  int count = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "info") == 0) {
      size_t free_bytes = 0, total = 0;
      CHECK(cuMemGetInfo(&free_bytes, &total));
      printf("free %zu total %zu\n", free_bytes, total);
    } else if (strcmp(argv[i], "alloc") == 0 && i + 1 < argc && count < 1024) {
      size_t mib = strtoull(argv[++i], NULL, 10);
      sizes[count] = mib << 20;
      CUresult status = cuMemAlloc(&allocations[count], mib << 20);
      if (status == CUDA_SUCCESS) ++count;
      printf("alloc %zu: %d\n", mib, (int)status);
    } else if ((strcmp(argv[i], "heap") == 0 || strcmp(argv[i], "output") == 0) && i + 1 < argc) {
      const int heap = strcmp(argv[i], "heap") == 0;
      size_t mib = strtoull(argv[++i], NULL, 10);
      CUresult status =
          cuCtxSetLimit(heap ? CU_LIMIT_MALLOC_HEAP_SIZE : CU_LIMIT_PRINTF_FIFO_SIZE, mib << 20);
      printf("%s %zu: %d\n", heap ? "heap" : "output", mib, (int)status);
    } else if (strcmp(argv[i], "touch") == 0) {
      EXPECT(count > 0);
      unsigned pattern[4] = {1, 2, 3, 0xdeadbeef}, back[4];
      CUdeviceptr ends[2] = {allocations[count - 1],
                             allocations[count - 1] + sizes[count - 1] - sizeof pattern};
      for (int end = 0; end < 2; ++end) {
        CHECK(cuMemcpyHtoD(ends[end], pattern, sizeof pattern));
        CHECK(cuMemcpyDtoH(back, ends[end], sizeof back));
        EXPECT(memcmp(pattern, back, sizeof back) == 0);
      }
      printf("touched\n");
    } else if (strcmp(argv[i], "free") == 0) {
      EXPECT(count > 0);
      CHECK(cuMemFree(allocations[--count]));
    } else if (strcmp(argv[i], "wait") == 0) {
      char line[16];
      printf("waiting\n");
      if (fgets(line, sizeof line, stdin) == NULL) return 3;
    } else if (strcmp(argv[i], "end") == 0) {
      fflush(stdout);
      _exit(0);
    } else {
      fprintf(stderr, "memory: unknown command '%s'\n", argv[i]);
      return 4;
    }
  }
  while (count > 0) CHECK(cuMemFree(allocations[--count]));
  close_session(&session);
  return verdict_ok();
}
