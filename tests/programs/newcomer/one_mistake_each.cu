// Mistakes of which CUDA's documentation tells the consequence, each in a process of its own: the
// exact error at the exact call, and whether the context can be used afterwards.
#include <spawn.h>
#include <sys/wait.h>

#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
extern char** environ;

static bool failed = false;
#define EXPECT(call, want)                                                           \
  do {                                                                               \
    cudaError_t got_ = (call), want_ = (want);                                       \
    if (got_ != want_) {                                                             \
      failed = true;                                                                 \
      printf("  line %d: %s: %s, not %s\n", __LINE__, #call, cudaGetErrorName(got_), \
             cudaGetErrorName(want_));                                               \
    }                                                                                \
  } while (0)
#define TRUE(x)                                                           \
  do {                                                                    \
    if (!(x)) failed = true, printf("  line %d: not %s\n", __LINE__, #x); \
  } while (0)

__global__ void nothing() {}
__global__ void store(int* p, int v) { *p = v; }
__global__ void check(int v) { assert(v == 1); }
__global__ void give_up() { __trap(); }
__global__ void dynamic(int* p) {
  extern __shared__ int s[];
  s[threadIdx.x] = 1;
  *p = s[0];
}
__global__ void hold(volatile int* flag) {
  while (!*flag) __nanosleep(1000);
}
static int plain;

// Not sticky: the error of a launch is reported once, and work goes on.
static void works() {
  int *p, v = 0;
  EXPECT(cudaMalloc(&p, 4), cudaSuccess);
  store<<<1, 1>>>(p, 42);
  EXPECT(cudaGetLastError(), cudaSuccess);
  EXPECT(cudaMemcpy(&v, p, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  TRUE(v == 42);
  EXPECT(cudaFree(p), cudaSuccess);
}
static void reported(cudaError_t e) {
  EXPECT(cudaPeekAtLastError(), e);
  EXPECT(cudaGetLastError(), e);
  EXPECT(cudaGetLastError(), cudaSuccess);
}
// Sticky: at the next synchronising call and at each call after it.
static void dead(cudaError_t e) {
  void* p;
  EXPECT(cudaDeviceSynchronize(), e);
  EXPECT(cudaMalloc(&p, 4), e);
  EXPECT(cudaGetLastError(), e);
  EXPECT(cudaStreamSynchronize(0), e);
  nothing<<<1, 1>>>();
  EXPECT(cudaGetLastError(), e);
  EXPECT(cudaDeviceSynchronize(), e);
}

struct Mistake {
  const char* name;
  void (*run)();
};
static Mistake mistakes[] = {
    {"too many threads",
     [] {
       nothing<<<1, 1025>>>();
       reported(cudaErrorInvalidConfiguration);
       works();
     }},
    {"empty grid",
     [] {
       nothing<<<0, 32>>>();
       reported(cudaErrorInvalidConfiguration);
       works();
     }},
    {"grid too high",
     [] {
       nothing<<<dim3(1, 65536), 1>>>();
       reported(cudaErrorInvalidConfiguration);
       works();
     }},
    {"dynamic shared memory without opting in",
     [] {
       int* p;
       EXPECT(cudaMalloc(&p, 4), cudaSuccess);
       dynamic<<<1, 32, 64 << 10>>>(p);
       reported(cudaErrorInvalidValue);
       EXPECT(cudaFuncSetAttribute(dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10),
              cudaSuccess);
       dynamic<<<1, 32, 64 << 10>>>(p);
       EXPECT(cudaGetLastError(), cudaSuccess);
       EXPECT(cudaDeviceSynchronize(), cudaSuccess);
       EXPECT(cudaFuncSetAttribute(dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20),
              cudaErrorInvalidValue);
       reported(cudaErrorInvalidValue);
       works();
     }},
    {"null pointer",
     [] {
       store<<<1, 1>>>(nullptr, 1);
       dead(cudaErrorIllegalAddress);
     }},
    {"far out of bounds",
     [] {
       int* p;
       EXPECT(cudaMalloc(&p, 4096), cudaSuccess);
       store<<<1, 1>>>(p + (1ull << 40), 1);
       dead(cudaErrorIllegalAddress);
     }},
    {"misaligned",
     [] {
       char* p;
       EXPECT(cudaMalloc(&p, 4096), cudaSuccess);
       store<<<1, 1>>>(reinterpret_cast<int*>(p + 2), 1);
       dead(cudaErrorMisalignedAddress);
     }},
    {"assertion",
     [] {
       check<<<1, 1>>>(2);
       dead(cudaErrorAssert);
     }},
    {"trap",
     [] {
       give_up<<<1, 1>>>();
       dead(cudaErrorLaunchFailure);
     }},
    {"freed twice, freed in the middle",
     [] {
       char* p;
       EXPECT(cudaMalloc(&p, 4096), cudaSuccess);
       EXPECT(cudaFree(p + 256), cudaErrorInvalidValue);
       reported(cudaErrorInvalidValue);
       EXPECT(cudaFree(p), cudaSuccess);
       EXPECT(cudaFree(p), cudaErrorInvalidValue);
       reported(cudaErrorInvalidValue);
       EXPECT(cudaFree(nullptr), cudaSuccess);
       works();
     }},
    {"more memory than there is",
     [] {
       size_t free, total;
       void* p = &p;
       EXPECT(cudaMemGetInfo(&free, &total), cudaSuccess);
       EXPECT(cudaMalloc(&p, total + 1), cudaErrorMemoryAllocation);
       reported(cudaErrorMemoryAllocation);
       EXPECT(cudaMallocAsync(&p, total + 1, 0), cudaErrorMemoryAllocation);
       reported(cudaErrorMemoryAllocation);
       works();
     }},
    {"arguments of copies",
     [] {
       char *p, host[64];
       EXPECT(cudaMalloc(&p, 64), cudaSuccess);
       EXPECT(cudaMemcpy(p, host, 64, static_cast<cudaMemcpyKind>(9)),
              cudaErrorInvalidMemcpyDirection);
       reported(cudaErrorInvalidMemcpyDirection);
       EXPECT(cudaMemcpy2D(p, 4, host, 8, 8, 2, cudaMemcpyHostToDevice),
              cudaErrorInvalidPitchValue);
       reported(cudaErrorInvalidPitchValue);
       EXPECT(cudaMemcpyToSymbol(&plain, host, 4), cudaErrorInvalidSymbol);
       reported(cudaErrorInvalidSymbol);
       EXPECT(cudaSetDevice(99), cudaErrorInvalidDevice);
       reported(cudaErrorInvalidDevice);
       works();
     }},
    {"not a kernel",
     [] {
       cudaFunction_t function;
       EXPECT(cudaGetFuncBySymbol(&function, reinterpret_cast<void*>(&works)),
              cudaErrorInvalidDeviceFunction);
       reported(cudaErrorInvalidDeviceFunction);
       works();
     }},
    {"page-locked memory",
     [] {
       static char buffer[1 << 16];
       EXPECT(cudaHostUnregister(buffer), cudaErrorHostMemoryNotRegistered);
       reported(cudaErrorHostMemoryNotRegistered);
       EXPECT(cudaHostRegister(buffer, sizeof buffer, 0), cudaSuccess);
       EXPECT(cudaHostRegister(buffer, sizeof buffer, 0), cudaErrorHostMemoryAlreadyRegistered);
       reported(cudaErrorHostMemoryAlreadyRegistered);
       EXPECT(cudaHostUnregister(buffer), cudaSuccess);
       works();
     }},
    {"events",
     [] {
       cudaEvent_t a, b, c;
       float ms;
       int* flag;
       cudaStream_t s, t;
       EXPECT(cudaEventCreate(&a), cudaSuccess);
       EXPECT(cudaEventCreate(&b), cudaSuccess);
       EXPECT(cudaEventCreateWithFlags(&c, cudaEventDisableTiming), cudaSuccess);
       EXPECT(cudaEventElapsedTime(&ms, a, b), cudaErrorInvalidResourceHandle);  // never recorded
       reported(cudaErrorInvalidResourceHandle);
       EXPECT(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
       EXPECT(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking), cudaSuccess);
       EXPECT(cudaMalloc(&flag, 4), cudaSuccess);
       EXPECT(cudaMemsetAsync(flag, 0, 4, s), cudaSuccess);
       EXPECT(cudaEventRecord(a, s), cudaSuccess);
       EXPECT(cudaStreamSynchronize(s), cudaSuccess);
       hold<<<1, 1, 0, s>>>(flag);
       EXPECT(cudaEventRecord(b, s), cudaSuccess);
       EXPECT(cudaEventRecord(c, s), cudaSuccess);
       EXPECT(cudaEventQuery(b), cudaErrorNotReady);
       EXPECT(cudaStreamQuery(s), cudaErrorNotReady);
       EXPECT(cudaPeekAtLastError(), cudaSuccess);  // not ready is no error
       EXPECT(cudaEventElapsedTime(&ms, a, b), cudaErrorNotReady);
       cudaGetLastError();
       EXPECT(cudaMemsetAsync(flag, 1, 4, t), cudaSuccess);
       EXPECT(cudaEventSynchronize(b), cudaSuccess);
       EXPECT(cudaEventElapsedTime(&ms, a, b), cudaSuccess);
       EXPECT(cudaEventElapsedTime(&ms, a, c), cudaErrorInvalidResourceHandle);  // has no time
       reported(cudaErrorInvalidResourceHandle);
       works();
     }},
    {"CUDA in a host function",
     [] {
       static cudaError_t inside = cudaSuccess;
       EXPECT(cudaLaunchHostFunc(
                  0,
                  [](void*) {
                    void* p;
                    inside = cudaMalloc(&p, 4);
                  },
                  nullptr),
              cudaSuccess);
       EXPECT(cudaDeviceSynchronize(), cudaSuccess);
       TRUE(inside == cudaErrorNotPermitted || inside == cudaSuccess);  // CUDA lets a driver choose
       works();
     }},
    {"captures",
     [] {
       cudaStream_t s, t;
       cudaGraph_t g = nullptr;
       cudaEvent_t e;
       void* p;
       EXPECT(cudaStreamCreate(&s), cudaSuccess);
       EXPECT(cudaStreamCreate(&t), cudaSuccess);
       EXPECT(cudaEventCreate(&e), cudaSuccess);
       EXPECT(cudaStreamEndCapture(s, &g), cudaErrorIllegalState);  // of no capture
       reported(cudaErrorIllegalState);
       EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
       EXPECT(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
       cudaGetLastError();
       EXPECT(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
       cudaGetLastError();
       EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
       EXPECT(cudaMalloc(&p, 4), cudaErrorStreamCaptureUnsupported);
       cudaGetLastError();
       EXPECT(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
       cudaGetLastError();
       EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed), cudaSuccess);
       nothing<<<1, 1>>>();  // in the legacy stream
       EXPECT(cudaGetLastError(), cudaErrorStreamCaptureImplicit);
       EXPECT(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
       cudaGetLastError();
       EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed), cudaSuccess);
       EXPECT(cudaEventRecord(e, s), cudaSuccess);
       EXPECT(cudaStreamWaitEvent(t, e, 0), cudaSuccess);
       nothing<<<1, 1, 0, t>>>();
       EXPECT(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureUnjoined);
       reported(cudaErrorStreamCaptureUnjoined);
       EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed), cudaSuccess);
       EXPECT(cudaEventRecord(e, s), cudaSuccess);
       EXPECT(cudaStreamWaitEvent(t, e, 0), cudaSuccess);
       EXPECT(cudaStreamEndCapture(t, &g), cudaErrorStreamCaptureUnmatched);  // begun in s
       reported(cudaErrorStreamCaptureUnmatched);
       cudaStreamEndCapture(s, &g);  // whether that ended it well is left open
       cudaGetLastError();
       cudaStreamDestroy(s);
       cudaStreamDestroy(t);
       works();
     }},
};

int main(int argc, char** argv) {
  if (argc == 2) {
    Mistake& m = mistakes[atoi(argv[1])];
    m.run();
    fflush(stdout);
    return failed;
  }
  int wrong = 0, n = sizeof mistakes / sizeof *mistakes;
  for (int i = 0; i < n; ++i) {
    pid_t pid;
    std::string number = std::to_string(i);
    char* args[] = {argv[0], number.data(), nullptr};
    int status = 0;
    fflush(stdout);
    if (posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, args, environ))
      return puts("spawn"), 1;
    waitpid(pid, &status, 0);
    if (status) ++wrong, printf("WRONG: %s (status %x)\n", mistakes[i].name, status);
  }
  if (wrong) return printf("%d of %d\n", wrong, n), 1;
  puts("ok");
}
