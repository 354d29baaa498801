// wrong on purpose. Children of the process write out of bounds, misaligned, after free, fail an
// assertion; each checks the documented error and that it sticks; a bystander process computes on
// meanwhile.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cassert>
#include <cstring>
#include <vector>

#include "require.h"

__global__ void store(int* p, long long at, int v) { p[at + threadIdx.x] = v; }
__global__ void store_unaligned(char* p) { *(int*)(p + 2) = 1; }
__global__ void claims(int v) { assert(v == 1 && "wrong on purpose"); }
__global__ void twice(int* p, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] = 2 * p[i] + 1;
}
__global__ void uses_shared(int* out) {
  extern __shared__ int s[];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

static void expect(cudaError_t got, cudaError_t want, const char* what) {
  REQUIRE(got == want, "%s: %d %s, expected %d %s", what, (int)got, cudaGetErrorName(got),
          (int)want, cudaGetErrorName(want));
}
#define EXPECT(x, want) expect((x), (want), #x)

static void compute(int rounds) {
  const int n = 1000;
  std::vector<int> h(n);
  for (int r = 0; r < rounds; ++r) {
    int* d;
    for (int i = 0; i < n; ++i) h[i] = i + r;
    CK(cudaMalloc(&d, n * 4));
    CK(cudaMemcpy(d, h.data(), n * 4, cudaMemcpyHostToDevice));
    twice<<<8, 128>>>(d, n);
    CK(cudaGetLastError());
    CK(cudaMemcpy(h.data(), d, n * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; ++i) REQUIRE(h[i] == 2 * (i + r) + 1, "compute: [%d] = %d", i, h[i]);
    CK(cudaFree(d));
  }
}

static void sticky(cudaError_t want, int* before) {
  int *p = nullptr, v = 0;
  cudaStream_t s;
  EXPECT(cudaDeviceSynchronize(), want);
  EXPECT(cudaMalloc(&p, 64), want);
  EXPECT(cudaMemcpy(&v, before, 4, cudaMemcpyDeviceToHost), want);
  EXPECT(cudaMemset(before, 0, 4), want);
  EXPECT(cudaStreamCreate(&s), want);
  store<<<1, 1>>>(before, 0, 1);
  EXPECT(cudaPeekAtLastError(), want);
  EXPECT(cudaGetLastError(), want);
  EXPECT(cudaDeviceSynchronize(), want);
}

static int child(const char* mode) {
  if (!strcmp(mode, "bystander")) {
    compute(1);
    fcntl(0, F_SETFL, O_NONBLOCK);
    REQUIRE(write(1, "R", 1) == 1, "write");
    char c;
    int rounds = 0;
    while (read(0, &c, 1) != 0) {
      compute(1);
      ++rounds;
      usleep(2000);
    }  // until the parent closes the pipe
    compute(3);
    fprintf(stderr, "bystander: %d rounds\n", rounds);
    return 0;
  }
  int *p, *q;
  CK(cudaMalloc(&p, 4096));
  CK(cudaMalloc(&q, 256 << 20));
  compute(1);
  if (!strcmp(mode, "oob")) {
    store<<<1, 32>>>(p, 1LL << 33, 1);
    EXPECT(cudaGetLastError(), cudaSuccess);  // errors during execution come later
    EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    REQUIRE(!strcmp(cudaGetErrorString(cudaErrorIllegalAddress),
                    "an illegal memory access was encountered"),
            "text");
    sticky(cudaErrorIllegalAddress, p);
  } else if (!strcmp(mode, "null")) {
    cudaStream_t s;
    CK(cudaStreamCreate(&s));
    store<<<1, 1, 0, s>>>(nullptr, 0, 1);
    EXPECT(cudaGetLastError(), cudaSuccess);
    EXPECT(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
    sticky(cudaErrorIllegalAddress, p);
  } else if (!strcmp(mode, "misaligned")) {
    store_unaligned<<<1, 1>>>((char*)p);
    EXPECT(cudaGetLastError(), cudaSuccess);
    EXPECT(cudaDeviceSynchronize(), cudaErrorMisalignedAddress);
    sticky(cudaErrorMisalignedAddress, p);
  } else if (!strcmp(mode, "freed")) {
    CK(cudaFree(q));
    store<<<1, 1>>>(q, 1000, 1);
    EXPECT(cudaGetLastError(), cudaSuccess);
    int v;
    EXPECT(cudaMemcpy(&v, p, 4, cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
    sticky(cudaErrorIllegalAddress, p);
  } else if (!strcmp(mode, "assert")) {
    claims<<<1, 1>>>(1);
    EXPECT(cudaDeviceSynchronize(), cudaSuccess);
    claims<<<1, 1>>>(2);
    EXPECT(cudaDeviceSynchronize(), cudaErrorAssert);
    sticky(cudaErrorAssert, p);
  } else if (!strcmp(mode, "calls")) {  // errors that do not stick
    twice<<<1, 2048>>>(p, 1);
    EXPECT(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
    EXPECT(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT(cudaGetLastError(), cudaSuccess);
    twice<<<0, 32>>>(p, 1);
    EXPECT(cudaGetLastError(), cudaErrorInvalidConfiguration);
    twice<<<dim3(1, 70000), 32>>>(p, 1);
    EXPECT(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT(cudaDeviceSynchronize(), cudaSuccess);
    int optin = 0;
    CK(cudaDeviceGetAttribute(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    uses_shared<<<1, 64, 49153>>>(p);
    cudaError_t e = cudaGetLastError();  // "invalid argument" is what drivers say, the
                                         // documentation's text allows 9 too
    if (optin > 49152)
      REQUIRE(e == cudaErrorInvalidValue || e == cudaErrorInvalidConfiguration, "48 KiB + 1: %d",
              (int)e);
    EXPECT(
        cudaFuncSetAttribute(uses_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, optin + 1),
        cudaErrorInvalidValue);
    cudaGetLastError();
    CK(cudaFuncSetAttribute(uses_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, optin));
    uses_shared<<<1, 64, optin>>>(p);
    CK(cudaGetLastError());
    int v[64];
    CK(cudaMemcpy(v, p, sizeof v, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 64; ++i) REQUIRE(v[i] == 63 - i, "shared [%d] = %d", i, v[i]);
    void* big;
    EXPECT(cudaMalloc(&big, (size_t)1 << 46), cudaErrorMemoryAllocation);
    EXPECT(cudaSetDevice(99), cudaErrorInvalidDevice);
    EXPECT(cudaMemcpy(p, v, 4, (cudaMemcpyKind)77), cudaErrorInvalidMemcpyDirection);
    EXPECT(cudaFree((char*)q + 16), cudaErrorInvalidValue);
    CK(cudaFree(q));
    EXPECT(cudaFree(q), cudaErrorInvalidValue);
    cudaGetLastError();
    compute(2);
  } else {
    REQUIRE(0, "unknown mode %s", mode);
  }
  return 0;
}

static pid_t start(const char* self, const char* mode, int in, int out) {
  pid_t pid = fork();
  REQUIRE(pid >= 0, "fork");
  if (pid == 0) {
    if (in >= 0) dup2(in, 0);
    if (out >= 0) dup2(out, 1);
    execl("/proc/self/exe", self, mode, (char*)nullptr);
    _exit(127);
  }
  return pid;
}

int main(int argc, char** argv) {
  if (argc > 1) return child(argv[1]);
  int in[2], out[2], status;
  REQUIRE(!pipe2(in, O_CLOEXEC) && !pipe2(out, O_CLOEXEC), "pipe");
  pid_t by = start(argv[0], "bystander", in[0], out[1]);
  close(in[0]);
  close(out[1]);
  char c = 0;
  REQUIRE(read(out[0], &c, 1) == 1 && c == 'R', "the bystander did not start");
  int wrong = 0;
  for (const char* mode : {"calls", "oob", "null", "misaligned", "freed", "assert"}) {
    pid_t pid = start(argv[0], mode, -1, -1);
    REQUIRE(waitpid(pid, &status, 0) == pid, "waitpid");
    printf("%s: status %d\n", mode, status);
    fflush(stdout);
    wrong += status != 0;
  }
  REQUIRE(waitpid(by, &status, WNOHANG) == 0, "the bystander ended early, status %d", status);
  close(in[1]);
  REQUIRE(waitpid(by, &status, 0) == by && status == 0, "bystander: status %d", status);
  compute(2);  // and a process that starts afterwards
  REQUIRE(wrong == 0, "%d of the faulty children saw something else than is documented", wrong);
  printf("ok\n");
}
