/* What NVML tells of each device, the first one's memory being taken as in the argument (MiB, 0:
   none): "device UUID total N used N" (bytes), and for each process on it "process PID used N".
   Then prints "waiting" and ends with its standard input. */
#include <dlfcn.h>

#include "common.h"

/* As in nvml.h, which not every toolkit has. */
typedef struct {
  unsigned long long total, free, used;
} Memory;
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} Process;

static void* library;

static int (*function(const char* name))() {
  int (*found)() = (int (*)())dlsym(library, name);
  if (found == NULL) printf("%s: %s\n", name, dlerror()), exit(2);
  return found;
}

#define NVML(name, ...) EXPECT(function("nvml" #name)(__VA_ARGS__) == 0)

int main(int argc, char** argv) {
  size_t mib = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
  Session session;
  CUdeviceptr memory = 0;
  unsigned devices = 0;
  char line[16];
  if (mib > 0) {
    session = open_session();
    CHECK(cuMemAlloc(&memory, mib << 20));
  }
  library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == NULL) printf("%s\n", dlerror()), exit(2);
  NVML(Init_v2);
  NVML(DeviceGetCount_v2, &devices);
  for (unsigned i = 0; i < devices; ++i) {
    void* device = NULL;
    char uuid[96];
    Memory info;
    Process processes[64];
    unsigned count = 64;
    NVML(DeviceGetHandleByIndex_v2, i, &device);
    NVML(DeviceGetUUID, device, uuid, (unsigned)sizeof uuid);
    NVML(DeviceGetMemoryInfo, device, &info);
    printf("device %s total %llu used %llu\n", uuid, info.total, info.used);
    NVML(DeviceGetComputeRunningProcesses_v3, device, &count, processes);
    for (unsigned j = 0; j < count; ++j) {
      printf("process %u used %llu\n", processes[j].pid, processes[j].used);
    }
  }
  NVML(Shutdown);
  printf("waiting\n");
  fflush(stdout);
  while (fgets(line, sizeof line, stdin) != NULL) continue;
  if (mib > 0) {
    CHECK(cuMemFree(memory));
    close_session(&session);
  }
  return 0;
}
