/* Vector addition from PTX text in a context of its own, launched once with an array of parameters
   and once with a parameter buffer. */
#include "common.h"

enum { kCount = 10007 };

int main(void) {
  CUdevice device;
  CUcontext context, current = NULL;
  CUmodule module;
  CUfunction function;
  CUdeviceptr a, b, c;
  int count = 0, major = 0;
  char name[100];
  size_t total = 0;
  static float host_a[kCount], host_b[kCount], host_c[kCount];

  CHECK(cuInit(0));
  CHECK(cuDeviceGetCount(&count));
  EXPECT(count >= 1);
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDeviceGetName(name, sizeof name, device));
  CHECK(cuDeviceTotalMem(&total, device));
  CHECK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  EXPECT(name[0] != 0 && total > 0 && major >= 5);
  CHECK(cuCtxCreate(&context, NULL, 0, device));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == context);
  CHECK(cuModuleLoadData(&module, kernels_ptx));
  CHECK(cuModuleGetFunction(&function, module, "vector_add"));
  CHECK(cuMemAlloc(&a, sizeof host_a));
  CHECK(cuMemAlloc(&b, sizeof host_b));
  CHECK(cuMemAlloc(&c, sizeof host_c));
  for (int i = 0; i < kCount; ++i) {
    host_a[i] = (float)i * 0.5f;
    host_b[i] = (float)(kCount - i) * 0.25f;
  }
  CHECK(cuMemcpyHtoD(a, host_a, sizeof host_a));
  CHECK(cuMemcpyHtoD(b, host_b, sizeof host_b));

  unsigned n = kCount;
  for (int way = 0; way < 2; ++way) {
    CHECK(cuMemsetD8(c, 0xff, sizeof host_c));
    if (way == 0) {
      void* parameters[] = {&a, &b, &c, &n};
      CHECK(cuLaunchKernel(function, (n + 127) / 128, 1, 1, 128, 1, 1, 0, NULL, parameters, NULL));
    } else {
      struct {
        CUdeviceptr a, b, c;
        unsigned n;
      } buffer = {a, b, c, n};
      size_t size = 28;
      void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                       CU_LAUNCH_PARAM_END};
      CHECK(cuLaunchKernel(function, (n + 63) / 64, 1, 1, 64, 1, 1, 0, NULL, NULL, extra));
    }
    CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoH(host_c, c, sizeof host_c));
    for (int i = 0; i < kCount; ++i) EXPECT(host_c[i] == host_a[i] + host_b[i]);
  }

  CUdeviceptr scale;
  size_t scale_bytes = 0;
  unsigned scale_value = 0;
  CHECK(cuModuleGetGlobal(&scale, &scale_bytes, module, "scale"));
  EXPECT(scale_bytes == 4);
  CHECK(cuMemcpyDtoH(&scale_value, scale, 4));
  EXPECT(scale_value == 3);

  CHECK(cuMemFree(a));
  CHECK(cuMemFree(b));
  CHECK(cuMemFree(c));
  CHECK(cuModuleUnload(module));
  CHECK(cuCtxDestroy(context));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == NULL);
  return verdict_ok();
}
