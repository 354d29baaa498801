/* The driver API from two threads, each with two streams: random walks with a 64-bit generator, in
 * several launches that continue each other, alternately on the one and the other stream, ordered
 * by events; results copied asynchronously into page-locked memory. Both threads share one module,
 * and add to one of its variables. The PTX is written by hand and compiled with JIT options. */
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kThreads = 2, kWalkers = 640, kRounds = 6, kSteps = 50, kBlock = 96 };

#define CUDA(call)                                                                    \
  do {                                                                                \
    CUresult status_ = (call);                                                        \
    if (status_ != CUDA_SUCCESS) {                                                    \
      const char *name_ = "?";                                                        \
      cuGetErrorName(status_, &name_);                                                \
      printf("%s:%d: %s: %s (%d)\n", __FILE__, __LINE__, #call, name_, (int)status_); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

#define EXPECT(condition)                                            \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                       \
    }                                                                \
  } while (0)

struct walker {
  uint64_t state;
  int32_t x, y;
};

static const char ptx[] =
    ".version 7.0\n"
    ".target sm_70\n"
    ".address_size 64\n"
    ".global .align 8 .u64 total_steps = 0;\n"
    ".const .align 8 .u64 multipliers[2] = {6364136223846793005, 1442695040888963407};\n"
    "\n"
    "// walkers, count, steps\n"
    ".visible .entry walk(.param .u64 walkers, .param .u32 count, .param .u32 steps)\n"
    "{\n"
    "  .reg .pred %p<5>;\n"
    "  .reg .b32 %r<12>;\n"
    "  .reg .b64 %d<12>;\n"
    "  ld.param.u64 %d1, [walkers];\n"
    "  ld.param.u32 %r1, [count];\n"
    "  ld.param.u32 %r2, [steps];\n"
    "  mov.u32 %r3, %tid.x;\n"
    "  mov.u32 %r4, %ctaid.x;\n"
    "  mov.u32 %r5, %ntid.x;\n"
    "  mad.lo.u32 %r3, %r4, %r5, %r3;\n"
    "  setp.ge.u32 %p1, %r3, %r1;\n"
    "  @%p1 bra done;\n"
    "  cvta.to.global.u64 %d1, %d1;\n"
    "  mul.wide.u32 %d2, %r3, 16;\n"
    "  add.s64 %d1, %d1, %d2;\n"
    "  ld.global.u64 %d3, [%d1];\n"
    "  ld.global.v2.s32 {%r6, %r7}, [%d1+8];\n"
    "  ld.const.u64 %d4, [multipliers];\n"
    "  ld.const.u64 %d5, [multipliers+8];\n"
    "  mov.u32 %r8, 0;\n"
    "step:\n"
    "  setp.ge.u32 %p2, %r8, %r2;\n"
    "  @%p2 bra walked;\n"
    "  mad.lo.u64 %d3, %d3, %d4, %d5;\n"
    "  shr.u64 %d6, %d3, 62;\n"
    "  cvt.u32.u64 %r9, %d6;\n"
    "  and.b32 %r10, %r9, 1;\n"
    "  shl.b32 %r10, %r10, 1;\n"
    "  sub.s32 %r10, %r10, 1;\n" /* -1 or 1 */
    "  setp.lt.u32 %p3, %r9, 2;\n"
    "  @%p3 add.s32 %r6, %r6, %r10;\n"
    "  @!%p3 add.s32 %r7, %r7, %r10;\n"
    "  add.u32 %r8, %r8, 1;\n"
    "  bra step;\n"
    "walked:\n"
    "  st.global.u64 [%d1], %d3;\n"
    "  st.global.v2.s32 [%d1+8], {%r6, %r7};\n"
    "  cvt.u64.u32 %d7, %r2;\n"
    "  red.global.add.u64 [total_steps], %d7;\n"
    "done:\n"
    "  ret;\n"
    "}\n"
    "\n"
    "// out[i] = |x| + |y| of walker i, and the largest in *far\n"
    ".visible .entry distances(.param .u64 walkers, .param .u64 out, .param .u64 far,\n"
    "                          .param .u32 count)\n"
    "{\n"
    "  .reg .pred %p<3>;\n"
    "  .reg .b32 %r<9>;\n"
    "  .reg .b64 %d<8>;\n"
    "  ld.param.u64 %d1, [walkers];\n"
    "  ld.param.u64 %d2, [out];\n"
    "  ld.param.u64 %d3, [far];\n"
    "  ld.param.u32 %r1, [count];\n"
    "  mov.u32 %r2, %tid.x;\n"
    "  mov.u32 %r3, %ctaid.x;\n"
    "  mov.u32 %r4, %ntid.x;\n"
    "  mad.lo.u32 %r2, %r3, %r4, %r2;\n"
    "  setp.ge.u32 %p1, %r2, %r1;\n"
    "  @%p1 bra done;\n"
    "  mad.wide.u32 %d4, %r2, 16, %d1;\n"
    "  ld.global.s32 %r5, [%d4+8];\n"
    "  ld.global.s32 %r6, [%d4+12];\n"
    "  abs.s32 %r5, %r5;\n"
    "  abs.s32 %r6, %r6;\n"
    "  add.s32 %r7, %r5, %r6;\n"
    "  mad.wide.u32 %d5, %r2, 4, %d2;\n"
    "  st.global.s32 [%d5], %r7;\n"
    "  atom.global.max.s32 %r8, [%d3], %r7;\n"
    "done:\n"
    "  ret;\n"
    "}\n";

static CUcontext context;
static CUfunction walk, distances;
static pthread_barrier_t both_ready;

static uint64_t seed(int thread, int walker) {
  return (uint64_t)thread << 40 ^ (uint64_t)walker * 0x9e3779b97f4a7c15u;
}

static void *work(void *argument) {
  const int thread = *(const int *)argument;
  CUstream streams[2];
  CUevent turn[kRounds], begin, end;
  CUdeviceptr walkers, out, far;
  struct walker *host_walkers;
  int32_t *host_out, *host_far;
  int i, round;
  CUcontext current;

  CUDA(cuCtxGetCurrent(&current));
  EXPECT(current == NULL); /* a new thread has no context */
  EXPECT(cuMemAlloc(&walkers, 16) == CUDA_ERROR_INVALID_CONTEXT);
  CUDA(cuCtxSetCurrent(context));
  CUDA(cuStreamCreate(&streams[0], CU_STREAM_NON_BLOCKING));
  CUDA(cuStreamCreate(&streams[1], CU_STREAM_NON_BLOCKING));
  CUDA(cuMemAlloc(&walkers, kWalkers * sizeof(struct walker)));
  CUDA(cuMemAlloc(&out, kWalkers * sizeof(int32_t)));
  CUDA(cuMemAlloc(&far, sizeof(int32_t)));
  CUDA(cuMemAllocHost((void **)&host_walkers, kWalkers * sizeof(struct walker)));
  CUDA(cuMemAllocHost((void **)&host_out, kWalkers * sizeof(int32_t)));
  CUDA(cuMemHostAlloc((void **)&host_far, sizeof(int32_t), 0));
  CUDA(cuEventCreate(&begin, CU_EVENT_DEFAULT));
  CUDA(cuEventCreate(&end, CU_EVENT_BLOCKING_SYNC));
  for (i = 0; i < kWalkers; i++) {
    host_walkers[i].state = seed(thread, i);
    host_walkers[i].x = host_walkers[i].y = 0;
  }

  pthread_barrier_wait(&both_ready);
  CUDA(cuEventRecord(begin, streams[0]));
  CUDA(cuMemcpyHtoDAsync(walkers, host_walkers, kWalkers * sizeof(struct walker), streams[0]));
  CUDA(cuMemsetD32Async(far, 0, 1, streams[0]));
  for (round = 0; round < kRounds; round++) {
    CUstream stream = streams[round % 2];
    uint32_t count = kWalkers, steps = kSteps + thread;
    void *parameters[] = {&walkers, &count, &steps};
    CUDA(cuEventCreate(&turn[round], CU_EVENT_DISABLE_TIMING));
    CUDA(cuLaunchKernel(walk, (kWalkers + kBlock - 1) / kBlock, 1, 1, kBlock, 1, 1, 0, stream,
                        parameters, NULL));
    CUDA(cuEventRecord(turn[round], stream));
    CUDA(cuStreamWaitEvent(streams[1 - round % 2], turn[round], 0));
  }
  {
    /* The last launch gets its arguments as one buffer. */
    struct {
      CUdeviceptr walkers, out, far;
      uint32_t count;
    } packed = {walkers, out, far, kWalkers};
    size_t size = 3 * sizeof(CUdeviceptr) + sizeof(uint32_t);
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    CUDA(cuLaunchKernel(distances, (kWalkers + kBlock - 1) / kBlock, 1, 1, kBlock, 1, 1, 0,
                        streams[kRounds % 2], NULL, extra));
  }
  CUDA(cuMemcpyDtoHAsync(host_walkers, walkers, kWalkers * sizeof(struct walker),
                         streams[kRounds % 2]));
  CUDA(cuMemcpyDtoHAsync(host_out, out, kWalkers * sizeof(int32_t), streams[kRounds % 2]));
  CUDA(cuMemcpyDtoHAsync(host_far, far, sizeof(int32_t), streams[kRounds % 2]));
  CUDA(cuEventRecord(end, streams[kRounds % 2]));
  CUDA(cuEventSynchronize(end));
  {
    float milliseconds = -1;
    CUDA(cuEventElapsedTime(&milliseconds, begin, end));
    EXPECT(milliseconds >= 0);
  }

  {
    int32_t farthest = 0;
    for (i = 0; i < kWalkers; i++) {
      uint64_t state = seed(thread, i);
      int32_t x = 0, y = 0, step;
      for (step = 0; step < kRounds * (kSteps + thread); step++) {
        unsigned direction;
        state = state * 6364136223846793005u + 1442695040888963407u;
        direction = (unsigned)(state >> 62);
        if (direction < 2)
          x += direction & 1 ? 1 : -1;
        else
          y += direction & 1 ? 1 : -1;
      }
      EXPECT(host_walkers[i].state == state);
      EXPECT(host_walkers[i].x == x && host_walkers[i].y == y);
      EXPECT(host_out[i] == abs(x) + abs(y));
      if (host_out[i] > farthest) farthest = host_out[i];
    }
    EXPECT(*host_far == farthest && farthest > 0);
  }

  for (round = 0; round < kRounds; round++) CUDA(cuEventDestroy(turn[round]));
  CUDA(cuEventDestroy(begin));
  CUDA(cuEventDestroy(end));
  CUDA(cuStreamDestroy(streams[0]));
  CUDA(cuStreamDestroy(streams[1]));
  CUDA(cuMemFree(walkers));
  CUDA(cuMemFree(out));
  CUDA(cuMemFree(far));
  CUDA(cuMemFreeHost(host_walkers));
  CUDA(cuMemFreeHost(host_out));
  CUDA(cuMemFreeHost(host_far));
  return NULL;
}

int main(void) {
  CUdevice device;
  CUmodule module;
  CUfunction missing;
  CUdeviceptr total;
  size_t bytes = 0;
  uint64_t steps = 0, expected = 0;
  pthread_t threads[kThreads];
  int numbers[kThreads], i, blocks = 0, most = 0;
  char info[2048] = "", error[2048] = "";
  CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER,  CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
                            CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
                            CU_JIT_MAX_REGISTERS,    CU_JIT_LOG_VERBOSE};
  void *values[] = {info, (void *)sizeof info, error, (void *)sizeof error, (void *)32, (void *)1};

  CUDA(cuInit(0));
  CUDA(cuDeviceGet(&device, 0));
  CUDA(cuDevicePrimaryCtxRetain(&context, device));
  CUDA(cuCtxSetCurrent(context));
  if (cuModuleLoadDataEx(&module, ptx, 6, options, values) != CUDA_SUCCESS) {
    printf("the PTX was refused: %s\n", error);
    return 1;
  }
  CUDA(cuModuleGetFunction(&walk, module, "walk"));
  CUDA(cuModuleGetFunction(&distances, module, "distances"));
  EXPECT(cuModuleGetFunction(&missing, module, "run") == CUDA_ERROR_NOT_FOUND);
  CUDA(cuModuleGetGlobal(&total, &bytes, module, "total_steps"));
  EXPECT(bytes == sizeof total);
  CUDA(cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, walk));
  EXPECT(most >= kBlock);
  CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, walk, kBlock, 0));
  EXPECT(blocks > 0);

  /* A module with a mistake says where, and spoils nothing. */
  {
    CUmodule broken;
    CUresult status;
    memset(error, 0, sizeof error);
    values[1] = (void *)sizeof info; /* the driver wrote the lengths here */
    values[3] = (void *)sizeof error;
    status = cuModuleLoadDataEx(&broken,
                                ".version 7.0\n.target sm_70\n.address_size 64\n"
                                ".visible .entry wrong() { add.s32 %nowhere, 1, 2; ret; }\n",
                                4, options, values);
    EXPECT(status == CUDA_ERROR_INVALID_PTX);
    EXPECT(strlen(error) > 0);
  }

  EXPECT(pthread_barrier_init(&both_ready, NULL, kThreads) == 0);
  for (i = 0; i < kThreads; i++) {
    numbers[i] = i;
    EXPECT(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
  }
  for (i = 0; i < kThreads; i++) {
    EXPECT(pthread_join(threads[i], NULL) == 0);
    expected += (uint64_t)kWalkers * kRounds * (kSteps + i);
  }
  CUDA(cuMemcpyDtoH(&steps, total, sizeof steps));
  EXPECT(steps == expected);
  CUDA(cuModuleUnload(module));
  CUDA(cuDevicePrimaryCtxRelease(device));
  printf("ok\n");
  return 0;
}
