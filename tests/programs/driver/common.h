/* What the driver-API programs share: checks, kernels as PTX text, and opening device 0. */
#pragma once

#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline const char* error_name(CUresult status) {
  const char* name = NULL;
  cuGetErrorName(status, &name);
  return name != NULL ? name : "?";
}

#define CHECK(call)                                                                  \
  do {                                                                               \
    CUresult status_ = (call);                                                       \
    if (status_ != CUDA_SUCCESS) {                                                   \
      printf("%s:%d: %s: %s (%d)\n", __FILE__, __LINE__, #call, error_name(status_), \
             (int)status_);                                                          \
      fflush(stdout);                                                                \
      exit(2);                                                                       \
    }                                                                                \
  } while (0)

#define EXPECT(condition)                                            \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      fflush(stdout);                                                \
      exit(1);                                                       \
    }                                                                \
  } while (0)

/* vector_add(float* a, float* b, float* c, unsigned n); fill(unsigned* out, unsigned value,
   unsigned n); overrun(unsigned* out, unsigned long offset): thread 5 of block 1 writes at out +
   offset. */
static const char kernels_ptx[] =
    "//\n"
    ".version 6.5\n"
    ".target sm_75\n"
    ".address_size 64\n"
    ".visible .global .align 4 .u32 scale = 3;\n"
    ".visible .entry vector_add(\n"
    "  .param .u64 vector_add_a, .param .u64 vector_add_b, .param .u64 vector_add_c,\n"
    "  .param .u32 vector_add_n)\n"
    "{\n"
    "  .reg .pred %p<2>;\n"
    "  .reg .b32 %r<6>;\n"
    "  .reg .f32 %f<4>;\n"
    "  .reg .b64 %rd<11>;\n"
    "  ld.param.u64 %rd1, [vector_add_a];\n"
    "  ld.param.u64 %rd2, [vector_add_b];\n"
    "  ld.param.u64 %rd3, [vector_add_c];\n"
    "  ld.param.u32 %r1, [vector_add_n];\n"
    "  mov.u32 %r2, %ctaid.x;\n"
    "  mov.u32 %r3, %ntid.x;\n"
    "  mov.u32 %r4, %tid.x;\n"
    "  mad.lo.s32 %r5, %r2, %r3, %r4;\n"
    "  setp.ge.u32 %p1, %r5, %r1;\n"
    "  @%p1 bra done;\n"
    "  cvta.to.global.u64 %rd4, %rd1;\n"
    "  cvta.to.global.u64 %rd5, %rd2;\n"
    "  cvta.to.global.u64 %rd6, %rd3;\n"
    "  mul.wide.u32 %rd7, %r5, 4;\n"
    "  add.s64 %rd8, %rd4, %rd7;\n"
    "  add.s64 %rd9, %rd5, %rd7;\n"
    "  add.s64 %rd10, %rd6, %rd7;\n"
    "  ld.global.f32 %f1, [%rd8];\n"
    "  ld.global.f32 %f2, [%rd9];\n"
    "  add.f32 %f3, %f1, %f2;\n"
    "  st.global.f32 [%rd10], %f3;\n"
    "done:\n"
    "  ret;\n"
    "}\n"
    ".visible .entry fill(.param .u64 fill_out, .param .u32 fill_value, .param .u32 fill_n)\n"
    "{\n"
    "  .reg .pred %p<2>;\n"
    "  .reg .b32 %r<8>;\n"
    "  .reg .b64 %rd<5>;\n"
    "  ld.param.u64 %rd1, [fill_out];\n"
    "  ld.param.u32 %r1, [fill_value];\n"
    "  ld.param.u32 %r2, [fill_n];\n"
    "  mov.u32 %r3, %ctaid.x;\n"
    "  mov.u32 %r4, %ntid.x;\n"
    "  mov.u32 %r5, %tid.x;\n"
    "  mad.lo.s32 %r6, %r3, %r4, %r5;\n"
    "  setp.ge.u32 %p1, %r6, %r2;\n"
    "  @%p1 bra done;\n"
    "  add.s32 %r7, %r1, %r6;\n"
    "  cvta.to.global.u64 %rd2, %rd1;\n"
    "  mul.wide.u32 %rd3, %r6, 4;\n"
    "  add.s64 %rd4, %rd2, %rd3;\n"
    "  st.global.u32 [%rd4], %r7;\n"
    "done:\n"
    "  ret;\n"
    "}\n"
    ".visible .entry overrun(.param .u64 overrun_out, .param .u64 overrun_offset)\n"
    "{\n"
    "  .reg .pred %p<3>;\n"
    "  .reg .b32 %r<4>;\n"
    "  .reg .b64 %rd<5>;\n"
    "  ld.param.u64 %rd1, [overrun_out];\n"
    "  ld.param.u64 %rd2, [overrun_offset];\n"
    "  mov.u32 %r1, %ctaid.x;\n"
    "  mov.u32 %r2, %tid.x;\n"
    "  setp.ne.u32 %p1, %r1, 1;\n"
    "  setp.ne.or.u32 %p2, %r2, 5, %p1;\n"
    "  @%p2 bra done;\n"
    "  cvta.to.global.u64 %rd3, %rd1;\n"
    "  add.s64 %rd4, %rd3, %rd2;\n"
    "  st.global.u32 [%rd4], %r2;\n"
    "done:\n"
    "  ret;\n"
    "}\n";

typedef struct {
  CUdevice device;
  CUcontext context;
  CUmodule module;
} Session;

/* Device 0 with its primary context current, and the kernels above. */
static inline Session open_session(void) {
  Session session;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&session.device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&session.context, session.device));
  CHECK(cuCtxSetCurrent(session.context));
  CHECK(cuModuleLoadData(&session.module, kernels_ptx));
  return session;
}

static inline void close_session(Session* session) {
  CHECK(cuModuleUnload(session->module));
  CHECK(cuDevicePrimaryCtxRelease(session->device));
}

static inline CUfunction kernel_of(const Session* session, const char* name) {
  CUfunction function;
  CHECK(cuModuleGetFunction(&function, session->module, name));
  return function;
}

/* For programs that are told of a fault: they say what failed and that it stays so, and end with 9.
 */
#define TRY(call)                                               \
  do {                                                          \
    CUresult status_ = (call);                                  \
    if (status_ != CUDA_SUCCESS) return report(#call, status_); \
  } while (0)

static inline int report(const char* call, CUresult status) {
  printf("%s: error %d, again %d\n", call, (int)status, (int)cuCtxSynchronize());
  return 9;
}

static inline int verdict_ok(void) {
  printf("ok\n");
  return 0;
}
