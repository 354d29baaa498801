/* cuLink*: a kernel and a function from two PTX texts, and the library interface (cuLibrary*). */
#include "common.h"

static const char caller_ptx[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n"
    ".extern .func (.param .b32 result) triple(.param .b32 x);\n"
    ".visible .entry apply(.param .u64 apply_out)\n"
    "{\n"
    "  .reg .b32 %r<4>;\n"
    "  .reg .b64 %rd<5>;\n"
    "  ld.param.u64 %rd1, [apply_out];\n"
    "  cvta.to.global.u64 %rd2, %rd1;\n"
    "  mov.u32 %r1, %tid.x;\n"
    "  {\n"
    "    .param .b32 x0;\n"
    "    .param .b32 result0;\n"
    "    st.param.b32 [x0], %r1;\n"
    "    call.uni (result0), triple, (x0);\n"
    "    ld.param.b32 %r2, [result0];\n"
    "  }\n"
    "  mul.wide.u32 %rd3, %r1, 4;\n"
    "  add.s64 %rd4, %rd2, %rd3;\n"
    "  st.global.u32 [%rd4], %r2;\n"
    "  ret;\n"
    "}\n";
static const char callee_ptx[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n"
    ".visible .func (.param .b32 result) triple(.param .b32 x)\n"
    "{\n"
    "  .reg .b32 %r<3>;\n"
    "  ld.param.b32 %r1, [x];\n"
    "  mul.lo.s32 %r2, %r1, 3;\n"
    "  st.param.b32 [result], %r2;\n"
    "  ret;\n"
    "}\n";

int main(void) {
  Session session = open_session();
  CUlinkState link;
  void* image = NULL;
  size_t bytes = 0;
  CUmodule module;
  CUfunction function;
  CUlibrary library;
  CUkernel kernel;
  CUdeviceptr out;
  unsigned host[64];
  CHECK(cuLinkCreate(0, NULL, NULL, &link));
  CHECK(cuLinkAddData(link, CU_JIT_INPUT_PTX, (void*)caller_ptx, sizeof caller_ptx, "caller.ptx", 0,
                      NULL, NULL));
  CHECK(cuLinkAddData(link, CU_JIT_INPUT_PTX, (void*)callee_ptx, sizeof callee_ptx, "callee.ptx", 0,
                      NULL, NULL));
  CHECK(cuLinkComplete(link, &image, &bytes));
  EXPECT(image != NULL && bytes > 0);
  CHECK(cuModuleLoadData(&module, image));
  CHECK(cuLinkDestroy(link));
  CHECK(cuModuleGetFunction(&function, module, "apply"));
  CHECK(cuMemAlloc(&out, sizeof host));
  void* parameters[] = {&out};
  CHECK(cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, NULL, parameters, NULL));
  CHECK(cuMemcpyDtoH(host, out, sizeof host));
  for (unsigned i = 0; i < 64; ++i) EXPECT(host[i] == 3 * i);
  CHECK(cuModuleUnload(module));

  CHECK(cuLibraryLoadData(&library, kernels_ptx, NULL, NULL, 0, NULL, NULL, 0));
  CHECK(cuLibraryGetKernel(&kernel, library, "fill"));
  unsigned value = 77, n = 64;
  void* fill_parameters[] = {&out, &value, &n};
  CHECK(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 64, 1, 1, 0, NULL, fill_parameters, NULL));
  CHECK(cuMemcpyDtoH(host, out, sizeof host));
  for (unsigned i = 0; i < 64; ++i) EXPECT(host[i] == 77 + i);
  CHECK(cuLibraryUnload(library));
  CHECK(cuMemFree(out));
  close_session(&session);
  return verdict_ok();
}
