// A program that is wrong on purpose, in every way that the runtime's documentation gives an error
// for. Mistakes in arguments are told by the call and spoil nothing. Faults of a kernel are told by
// the next call that waits, and then by every call until the process ends; each fault is therefore
// made in a process of its own, this program started again with the fault's name.
#include <sys/wait.h>
#include <unistd.h>

#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#include "expect.h"

#define FAILS(call, expected)                                                           \
  do {                                                                                  \
    const cudaError_t status_ = (call);                                                 \
    EXPECT(status_ == (expected), "it gave %s, expected %s", cudaGetErrorName(status_), \
           cudaGetErrorName(expected));                                                 \
  } while (0)

__global__ void nothing(int *) {}

__global__ void __launch_bounds__(64) small_blocks(int *out) { *out = 1; }

__global__ void increment(int *value) { *value += 1; }

__global__ void large_shared(int *out) {
  extern __shared__ int shared[];
  shared[threadIdx.x] = 1;
  *out = shared[0];
}

__global__ void misaligned(char *memory) { *reinterpret_cast<int *>(memory + 1) = 1; }

__global__ void null_read(const int *memory, int *out) { *out = memory[threadIdx.x]; }

__global__ void use(int *memory) { memory[threadIdx.x] = 1; }

__global__ void assertion(int *value) { assert(*value == 4); }

__global__ void trap(int *value) {
  if (*value == 0) __trap();
}

__global__ void call_nothing(void (**function)(int)) { (*function)(1); }

void arguments() {
  int *memory;
  CUDA(cudaMalloc(&memory, 1000 * sizeof(int)));
  CUDA(cudaMemset(memory, 0, 1000 * sizeof(int)));

  nothing<<<1, 1025>>>(memory);
  FAILS(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  FAILS(cudaGetLastError(), cudaErrorInvalidConfiguration);
  FAILS(cudaGetLastError(), cudaSuccess);
  nothing<<<dim3(1, 65536), 1>>>(memory);
  FAILS(cudaGetLastError(), cudaErrorInvalidConfiguration);
  nothing<<<0, 32>>>(memory);
  FAILS(cudaGetLastError(), cudaErrorInvalidConfiguration);
  nothing<<<1, dim3(1, 1, 65)>>>(memory);
  FAILS(cudaGetLastError(), cudaErrorInvalidConfiguration);
  large_shared<<<1, 32, 10 << 20>>>(memory);
  FAILS(cudaGetLastError(), cudaErrorInvalidValue);
  small_blocks<<<1, 128>>>(memory);
  EXPECT(cudaGetLastError() != cudaSuccess, "more threads than __launch_bounds__ promised");
  FAILS(cudaFuncSetAttribute(large_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 10 << 20),
        cudaErrorInvalidValue);
  cudaGetLastError();

  int values[8] = {};
  FAILS(cudaMemcpy(memory + 996, values, sizeof values, cudaMemcpyHostToDevice),
        cudaErrorInvalidValue);
  FAILS(cudaMemcpy(memory, values, sizeof values, static_cast<cudaMemcpyKind>(7)),
        cudaErrorInvalidMemcpyDirection);
  FAILS(cudaMemset(memory, 0, 4001 * sizeof(int)), cudaErrorInvalidValue);
  FAILS(cudaMalloc(&memory, size_t{1} << 50), cudaErrorMemoryAllocation);
  FAILS(cudaMalloc(nullptr, 16), cudaErrorInvalidValue);
  FAILS(cudaFree(values), cudaErrorInvalidValue);
  FAILS(cudaSetDevice(99), cudaErrorInvalidDevice);
  FAILS(cudaSetDevice(-1), cudaErrorInvalidDevice);
  cudaDeviceProp properties;
  FAILS(cudaGetDeviceProperties(&properties, 99), cudaErrorInvalidDevice);
  FAILS(cudaMemcpyToSymbol(values, values, sizeof values), cudaErrorInvalidSymbol);
  // What is not a kernel's function is taken for a cudaKernel_t, and that it isn't either.
  const cudaError_t not_a_kernel = cudaLaunchKernel(reinterpret_cast<const void *>(&arguments),
                                                    dim3(1), dim3(1), nullptr, 0, nullptr);
  EXPECT(not_a_kernel == cudaErrorInvalidDeviceFunction ||
             not_a_kernel == cudaErrorInvalidResourceHandle,
         "it gave %s", cudaGetErrorName(not_a_kernel));
  FAILS(cudaGetLastError(), not_a_kernel);

  cudaEvent_t one, two, without_time;
  float milliseconds;
  CUDA(cudaEventCreate(&one));
  CUDA(cudaEventCreate(&two));
  CUDA(cudaEventCreateWithFlags(&without_time, cudaEventDisableTiming));
  CUDA(cudaEventRecord(one));
  FAILS(cudaEventElapsedTime(&milliseconds, one, two), cudaErrorInvalidResourceHandle);
  CUDA(cudaEventRecord(without_time));
  CUDA(cudaDeviceSynchronize());
  FAILS(cudaEventElapsedTime(&milliseconds, one, without_time), cudaErrorInvalidResourceHandle);
  FAILS(cudaEventCreateWithFlags(&two, 0xffff), cudaErrorInvalidValue);
  cudaGetLastError();

  // After all that the memory is as it was and kernels run.
  increment<<<1, 1>>>(memory);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(values, memory, sizeof(int), cudaMemcpyDeviceToHost));
  EXPECT(values[0] == 1, "%d", values[0]);
  CUDA(cudaFree(memory));
  FAILS(cudaFree(memory), cudaErrorInvalidValue);
}

struct Fault {
  const char *name;
  cudaError_t expected;
};

const Fault faults[] = {
    {"misaligned", cudaErrorMisalignedAddress},
    {"null", cudaErrorIllegalAddress},
    {"freed", cudaErrorIllegalAddress},
    {"host", cudaErrorIllegalAddress},
    {"assertion", cudaErrorAssert},
    {"trap", cudaErrorLaunchFailure},
    {"function", cudaSuccess},  // which error is not said
};

int fault(const char *name) {
  int *memory, *freed;
  CUDA(cudaMalloc(&memory, 4096));
  CUDA(cudaMemset(memory, 0, 4096));
  static int on_host[32];
  if (std::strcmp(name, "misaligned") == 0) {
    misaligned<<<1, 1>>>(reinterpret_cast<char *>(memory));
  } else if (std::strcmp(name, "null") == 0) {
    null_read<<<1, 32>>>(nullptr, memory);
  } else if (std::strcmp(name, "freed") == 0) {
    CUDA(cudaMalloc(&freed, 64 << 20));
    CUDA(cudaFree(freed));
    use<<<1, 32>>>(freed);
  } else if (std::strcmp(name, "host") == 0) {
    use<<<1, 32>>>(on_host);
  } else if (std::strcmp(name, "assertion") == 0) {
    assertion<<<1, 32>>>(memory);
  } else if (std::strcmp(name, "trap") == 0) {
    trap<<<1, 32>>>(memory);
  } else if (std::strcmp(name, "function") == 0) {
    call_nothing<<<1, 1>>>(reinterpret_cast<void (**)(int)>(memory));
  }
  CUDA(cudaGetLastError());  // the launch itself is in order
  const cudaError_t error = cudaDeviceSynchronize();
  EXPECT(error != cudaSuccess, "the fault '%s' went unnoticed", name);
  for (const Fault &one : faults) {
    if (std::strcmp(name, one.name) == 0 && one.expected != cudaSuccess) FAILS(error, one.expected);
  }
  // It stays.
  int value;
  FAILS(cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost), error);
  FAILS(cudaMalloc(&freed, 16), error);
  FAILS(cudaDeviceSynchronize(), error);
  increment<<<1, 1>>>(memory);
  FAILS(cudaGetLastError(), error);
  EXPECT(on_host[0] == 0, "the host's memory was written");
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 1) return fault(argv[1]);
  for (const Fault &one : faults) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      execl("/proc/self/exe", argv[0], one.name, nullptr);
      _exit(127);
    }
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child, "waitpid");
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the fault '%s': status %#x", one.name,
           status);
  }
  arguments();
  std::printf("ok\n");
  return 0;
}
