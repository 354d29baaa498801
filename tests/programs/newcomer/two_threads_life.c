/* Life on a torus through the driver API: each of two host threads owns half of the rows, with a
 * stream for its cells and one that fetches the halo rows from the other half; events of one thread
 * are waited for in streams of the other. The PTX is written by hand. */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "require_driver.h"

enum { W = 101, H = 34, STEPS = 40 }; /* H rows in each half */

static const char ptx[] =
    ".version 7.0\n"
    ".target sm_70\n"
    ".address_size 64\n"
    ".visible .global .align 8 .u64 births;\n"
    ".func (.reg .u32 r) wrap(.reg .u32 v, .reg .u32 w) {\n"
    "  .reg .pred p; setp.ge.s32 p, v, w; @p mov.u32 v, 0;\n"
    "  setp.lt.s32 p, v, 0; @p sub.u32 v, w, 1; mov.u32 r, v; ret;\n"
    "}\n"
    ".visible .entry life(.param .u64 in_, .param .u64 out_, .param .u32 w_, .param .u32 h_) {\n"
    "  .reg .pred p, q; .reg .u32 x, y, w, h, t, s, c, xs<3>, n<8>;\n"
    "  .reg .u64 in, out, a, row, o, b;\n"
    "  ld.param.u64 in, [in_]; ld.param.u64 out, [out_]; ld.param.u32 w, [w_];\n"
    "  ld.param.u32 h, [h_];\n"
    "  mov.u32 x, %ctaid.x; mov.u32 t, %ntid.x; mov.u32 s, %tid.x; mad.lo.u32 x, x, t, s;\n"
    "  mov.u32 y, %ctaid.y; setp.ge.u32 p, x, w; @p bra done;\n"
    "  sub.u32 t, x, 1; call (xs0), wrap, (t, w); add.u32 t, x, 1;\n"
    "  call (xs2), wrap, (t, w); mov.u32 xs1, x;\n"
    "  mul.wide.u32 row, y, w; add.u64 row, row, in;\n"
    "  cvt.u64.u32 o, xs0; add.u64 a, row, o; ld.global.u8 n0, [a]; cvt.u64.u32 b, w;\n"
    "  add.u64 a, a, b;\n"
    "  ld.global.u8 n1, [a]; add.u64 a, a, b; ld.global.u8 n2, [a];\n"
    "  cvt.u64.u32 o, xs1; add.u64 a, row, o; ld.global.u8 n3, [a]; add.u64 a, a, b;\n"
    "  ld.global.u8 c, [a]; add.u64 a, a, b; ld.global.u8 n4, [a];\n"
    "  cvt.u64.u32 o, xs2; add.u64 a, row, o; ld.global.u8 n5, [a]; add.u64 a, a, b;\n"
    "  ld.global.u8 n6, [a]; add.u64 a, a, b; ld.global.u8 n7, [a];\n"
    "  add.u32 s, n0, n1; add.u32 s, s, n2; add.u32 s, s, n3; add.u32 s, s, n4;\n"
    "  add.u32 s, s, n5;\n"
    "  add.u32 s, s, n6; add.u32 s, s, n7; or.b32 t, s, c; setp.eq.u32 p, t, 3;\n"
    "  selp.u32 t, 1, 0, p;\n"
    "  setp.eq.and.u32 q, c, 0, p; mov.u64 o, 1; @q red.global.add.u64 [births], o;\n"
    "  add.u32 y, y, 1; mul.wide.u32 a, y, w; cvt.u64.u32 o, x; add.u64 a, a, o;\n"
    "  add.u64 a, a, out;\n"
    "  st.global.u8 [a], t;\n"
    "done: ret;\n"
    "}\n";

static CUcontext context;
static CUfunction life;
static CUdeviceptr board[2][2]; /* of half, of parity: H rows and a halo row above and below */
static CUevent ready[2][2];     /* cells of half, of parity */
static CUevent fetched[2];      /* both halo rows of a half */
static pthread_barrier_t barrier;
static unsigned char start[2 * H * W], result[2 * H * W];
static int called[2];

static void CUDA_CB count(void* p) { ++*(int*)p; }

static void* half(void* argument) {
  int me = argument != NULL, other = !me;
  CUstream cells, halo;
  CK(cuCtxSetCurrent(context));
  CK(cuStreamCreate(&cells, CU_STREAM_NON_BLOCKING));
  CK(cuStreamCreateWithPriority(&halo, CU_STREAM_NON_BLOCKING, -1));
  for (int p = 0; p < 2; ++p) {
    CK(cuMemAllocAsync(&board[me][p], (H + 2) * W, cells));
    CK(cuMemsetD8Async(board[me][p], 7, (H + 2) * W, cells));
    CK(cuEventCreate(&ready[me][p], CU_EVENT_DISABLE_TIMING));
  }
  CK(cuEventCreate(&fetched[me], CU_EVENT_DISABLE_TIMING));
  CK(cuMemcpyHtoDAsync(board[me][0] + W, start + me * H * W, H * W, cells));
  CK(cuEventRecord(ready[me][0], cells));
  for (int step = 0; step < STEPS; ++step) {
    int p = step & 1;
    pthread_barrier_wait(&barrier); /* the other has recorded its event of this step */
    CK(cuStreamWaitEvent(halo, ready[other][p], 0));
    CK(cuStreamWaitEvent(halo, ready[me][p], 0));
    CK(cuMemcpyDtoDAsync(board[me][p], board[other][p] + H * W, W, halo));
    CK(cuMemcpyDtoDAsync(board[me][p] + (H + 1) * W, board[other][p] + W, W, halo));
    CK(cuEventRecord(fetched[me], halo));
    pthread_barrier_wait(&barrier);
    CK(cuStreamWaitEvent(cells, fetched[me], 0));
    CK(cuStreamWaitEvent(cells, fetched[other],
                         0)); /* its reads of the board we write after the next step */
    unsigned w = W, h = H;
    void* args[] = {&board[me][p], &board[me][!p], &w, &h};
    CK(cuLaunchKernel(life, (W + 63) / 64, H, 1, 64, 1, 1, 0, cells, args, NULL));
    CK(cuEventRecord(ready[me][!p], cells));
    CK(cuLaunchHostFunc(cells, count, &called[me]));
  }
  CK(cuMemcpyDtoHAsync(result + me * H * W, board[me][STEPS & 1] + W, H * W, cells));
  CK(cuStreamSynchronize(cells));
  pthread_barrier_wait(&barrier); /* nobody reads the other's rows any more */
  for (int p = 0; p < 2; ++p) CK(cuMemFreeAsync(board[me][p], cells));
  CK(cuStreamDestroy(halo));
  CK(cuStreamDestroy(cells));
  return NULL;
}

int main(void) {
  CUdevice device;
  CUmodule module;
  CK(cuInit(0));
  CK(cuDeviceGet(&device, 0));
  CK(cuDevicePrimaryCtxRetain(&context, device));
  CK(cuCtxSetCurrent(context));
  char log[4096] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, (void*)sizeof log};
  CUresult e = cuModuleLoadDataEx(&module, ptx, 2, options, values);
  REQUIRE(e == CUDA_SUCCESS, "PTX: %d\n%s", e, log);
  CK(cuModuleGetFunction(&life, module, "life"));
  CUdeviceptr births;
  size_t size;
  CK(cuModuleGetGlobal(&births, &size, module, "births"));
  REQUIRE(size == 8, "size of births");
  unsigned state = 3;
  for (int i = 0; i < 2 * H * W; ++i)
    state = state * 1664525u + 1013904223u, start[i] = state >> 24 < 90;
  pthread_barrier_init(&barrier, NULL, 2);
  pthread_t threads[2];
  pthread_create(&threads[0], NULL, half, NULL);
  pthread_create(&threads[1], NULL, half, "");
  pthread_join(threads[0], NULL);
  pthread_join(threads[1], NULL);

  static unsigned char a[2 * H * W], b[2 * H * W];
  unsigned long long born = 0, device_born = 0;
  memcpy(a, start, sizeof a);
  for (int step = 0; step < STEPS; ++step) {
    for (int y = 0; y < 2 * H; ++y)
      for (int x = 0; x < W; ++x) {
        int n = 0;
        for (int dy = -1; dy <= 1; ++dy)
          for (int dx = -1; dx <= 1; ++dx)
            if (dx || dy) n += a[(y + dy + 2 * H) % (2 * H) * W + (x + dx + W) % W];
        b[y * W + x] = n == 3 || (n == 2 && a[y * W + x]);
        born += b[y * W + x] && !a[y * W + x];
      }
    memcpy(a, b, sizeof a);
  }
  CK(cuMemcpyDtoH(&device_born, births, 8));
  int alive = 0;
  for (int i = 0; i < 2 * H * W; ++i) {
    alive += a[i];
    REQUIRE(a[i] == result[i], "cell %d: %d, not %d", i, result[i], a[i]);
  }
  REQUIRE(born == device_born, "%llu births, not %llu", device_born, born);
  REQUIRE(called[0] == STEPS && called[1] == STEPS, "host functions: %d %d", called[0], called[1]);
  CK(cuModuleUnload(module));
  CK(cuDevicePrimaryCtxRelease(device));
  puts("ok");
  return 0;
}
