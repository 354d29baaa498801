/* The table of errors that CUDA reports at the call itself. Prints one line per row that is wrong.
   With "--all" also rows that CUDA's documentation leaves undefined (handles used after their end),
   which gpupool promises to detect. */
#include "common.h"

static int rows = 0, wrong = 0;

static void row(const char* what, CUresult got, CUresult expected) {
  ++rows;
  if (got != expected) {
    ++wrong;
    printf("%s: %s (%d) instead of %s (%d)\n", what, error_name(got), (int)got,
           error_name(expected), (int)expected);
  }
}

static const char bad_syntax_ptx[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n.visible .entry broken()\n{\n  mov.u32 "
    "%r1;\n}\n";
static const char future_ptx[] =
    ".version 99.0\n.target sm_75\n.address_size 64\n.visible .entry later()\n{\n  ret;\n}\n";
static const char big_shared_ptx[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n"
    ".visible .entry bounded() .maxntid 64, 1, 1\n{\n  ret;\n}\n";

static void before_init(void) {
  int value = 0;
  CUdevice device;
  CUcontext context;
  CUdeviceptr pointer;
  row("cuDeviceGetCount before cuInit", cuDeviceGetCount(&value), CUDA_ERROR_NOT_INITIALIZED);
  row("cuDeviceGet before cuInit", cuDeviceGet(&device, 0), CUDA_ERROR_NOT_INITIALIZED);
  row("cuCtxGetCurrent before cuInit", cuCtxGetCurrent(&context), CUDA_ERROR_NOT_INITIALIZED);
  row("cuMemAlloc before cuInit", cuMemAlloc(&pointer, 16), CUDA_ERROR_NOT_INITIALIZED);
  row("cuInit with flags", cuInit(1), CUDA_ERROR_INVALID_VALUE);
}

static void devices_and_contexts(void) {
  CUdevice device;
  CUcontext context;
  int value = 0;
  CUdeviceptr pointer;
  CUmodule module;
  void* entry = NULL;
  CHECK(cuInit(0));
  CHECK(cuDeviceGetCount(&value));
  row("cuDeviceGet beyond the last", cuDeviceGet(&device, value), CUDA_ERROR_INVALID_DEVICE);
  row("cuDeviceGet(-1)", cuDeviceGet(&device, -1), CUDA_ERROR_INVALID_DEVICE);
  row("cuDeviceGetCount(NULL)", cuDeviceGetCount(NULL), CUDA_ERROR_INVALID_VALUE);
  row("cuDeviceGetAttribute 5000", cuDeviceGetAttribute(&value, (CUdevice_attribute)5000, 0),
      CUDA_ERROR_INVALID_VALUE);
  row("cuDeviceGetAttribute of device 77",
      cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 77), CUDA_ERROR_INVALID_DEVICE);
  row("cuGetProcAddress of an unknown name",
      cuGetProcAddress("cuMakeCoffee", &entry, 13000, 0, NULL), CUDA_ERROR_NOT_FOUND);
  row("cuMemAlloc without a context", cuMemAlloc(&pointer, 16), CUDA_ERROR_INVALID_CONTEXT);
  row("cuCtxSynchronize without a context", cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
  row("cuModuleLoadData without a context", cuModuleLoadData(&module, kernels_ptx),
      CUDA_ERROR_INVALID_CONTEXT);
  row("cuCtxPopCurrent from an empty stack", cuCtxPopCurrent(&context), CUDA_ERROR_INVALID_CONTEXT);
  row("cuCtxCreate on device 77", cuCtxCreate(&context, NULL, 0, 77), CUDA_ERROR_INVALID_DEVICE);
  row("cuDevicePrimaryCtxRetain of device 77", cuDevicePrimaryCtxRetain(&context, 77),
      CUDA_ERROR_INVALID_DEVICE);
}

static CUresult made_in_host_function;

static void CUDA_CB calls_cuda(void* stream) {
  CUdeviceptr memory;
  (void)stream;
  made_in_host_function = cuMemAlloc(&memory, 16);
}

static void contexts(const Session* session) {
  row("cuCtxEnablePeerAccess to the current context", cuCtxEnablePeerAccess(session->context, 0),
      CUDA_ERROR_INVALID_CONTEXT);
  row("cuCtxEnablePeerAccess with flags", cuCtxEnablePeerAccess(session->context, 1),
      CUDA_ERROR_INVALID_VALUE);
  made_in_host_function = CUDA_SUCCESS;
  CHECK(cuLaunchHostFunc(NULL, calls_cuda, NULL));
  CHECK(cuStreamSynchronize(NULL));
  row("cuMemAlloc in a host function", made_in_host_function, CUDA_ERROR_NOT_PERMITTED);
}

static void modules(const Session* session) {
  CUmodule module;
  CUfunction function;
  CUdeviceptr pointer;
  CUlinkState link;
  size_t bytes;
  row("cuModuleLoadData of wrong PTX", cuModuleLoadData(&module, bad_syntax_ptx),
      CUDA_ERROR_INVALID_PTX);
  row("cuModuleLoadData of PTX 99.0", cuModuleLoadData(&module, future_ptx),
      CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  row("cuModuleLoadData(NULL)", cuModuleLoadData(&module, NULL), CUDA_ERROR_INVALID_VALUE);
  row("cuModuleGetFunction of a missing name",
      cuModuleGetFunction(&function, session->module, "missing"), CUDA_ERROR_NOT_FOUND);
  row("cuModuleGetFunction of a variable", cuModuleGetFunction(&function, session->module, "scale"),
      CUDA_ERROR_NOT_FOUND);
  row("cuModuleGetFunction(NULL name)", cuModuleGetFunction(&function, session->module, NULL),
      CUDA_ERROR_INVALID_VALUE);
  row("cuModuleGetGlobal of a missing name",
      cuModuleGetGlobal(&pointer, &bytes, session->module, "missing"), CUDA_ERROR_NOT_FOUND);
  row("cuModuleLoad of a missing file", cuModuleLoad(&module, "/nonexistent/kernel.ptx"),
      CUDA_ERROR_FILE_NOT_FOUND);
  CHECK(cuLinkCreate(0, NULL, NULL, &link));
  row("cuLinkAddData of wrong PTX",
      cuLinkAddData(link, CU_JIT_INPUT_PTX, (void*)bad_syntax_ptx, sizeof bad_syntax_ptx, "broken",
                    0, NULL, NULL),
      CUDA_ERROR_INVALID_PTX);
  CHECK(cuLinkDestroy(link));
}

static void launches(const Session* session) {
  CUfunction fill = kernel_of(session, "fill"), bounded;
  CUmodule module;
  CUdeviceptr out;
  unsigned value = 1, n = 32, maximum = 0;
  int optin = 0, threads = 0;
  CHECK(cuMemAlloc(&out, 4096));
  void* p[] = {&out, &value, &n};
  CHECK(cuDeviceGetAttribute((int*)&maximum, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 0));
  CHECK(cuDeviceGetAttribute(&optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0));
  CHECK(cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0));
#define LAUNCH(f, gx, gy, gz, bx, by, bz, shared) \
  cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, NULL, p, NULL)
  CUlaunchAttribute attribute = {0};
  CUlaunchConfig config = {0};
  int clusters = 0;
  config.gridDimX = 2, config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = 16, config.blockDimY = config.blockDimZ = 1;
  config.attrs = &attribute, config.numAttrs = 1;
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  CHECK(cuDeviceGetAttribute(&clusters, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 0));
  attribute.value.clusterDim.x = 2;
  row("clusters where a card has some, or has none", cuLaunchKernelEx(&config, fill, p, NULL),
      clusters ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
  attribute.value.clusterDim.x = 1;
  row("clusters of one block", cuLaunchKernelEx(&config, fill, p, NULL), CUDA_SUCCESS);
  attribute.id = (CUlaunchAttributeID)77;
  row("an attribute that there is not", cuLaunchKernelEx(&config, fill, p, NULL),
      CUDA_ERROR_INVALID_VALUE);
  row("grid of 0 blocks", LAUNCH(fill, 0, 1, 1, 32, 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  row("block of 0 threads", LAUNCH(fill, 1, 1, 1, 0, 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  row("block with too many threads", LAUNCH(fill, 1, 1, 1, (unsigned)threads + 1, 1, 1, 0),
      CUDA_ERROR_INVALID_VALUE);
  row("block with too many threads in all", LAUNCH(fill, 1, 1, 1, 64, 64, 1, 0),
      CUDA_ERROR_INVALID_VALUE);
  row("block too deep in z", LAUNCH(fill, 1, 1, 1, 1, 1, 65, 0), CUDA_ERROR_INVALID_VALUE);
  row("grid too high in y", LAUNCH(fill, 1, 65536, 1, 1, 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  row("grid too deep in z", LAUNCH(fill, 1, 1, 65536, 1, 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  row("too much dynamic shared memory", LAUNCH(fill, 1, 1, 1, 32, 1, 1, maximum + 1),
      CUDA_ERROR_INVALID_VALUE);
  row("no parameters for a kernel that has some",
      cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
  row("more shared memory allowed than there is",
      cuFuncSetAttribute(fill, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, optin + 1),
      CUDA_ERROR_INVALID_VALUE);
  CHECK(cuModuleLoadData(&module, big_shared_ptx));
  CHECK(cuModuleGetFunction(&bounded, module, "bounded"));
  row("block over the kernel's own .maxntid", LAUNCH(bounded, 1, 1, 1, 96, 1, 1, 0),
      CUDA_ERROR_INVALID_VALUE);
  CHECK(cuModuleUnload(module));
  CHECK(cuMemFree(out));
}

static void memory(int undefined) {
  CUdeviceptr a, b;
  size_t pitch = 0;
  static char host[1 << 16];
  unsigned type = 0;
  row("cuMemAlloc of 0 bytes", cuMemAlloc(&a, 0), CUDA_ERROR_INVALID_VALUE);
  row("cuMemAlloc(NULL)", cuMemAlloc(NULL, 16), CUDA_ERROR_INVALID_VALUE);
  row("cuMemAlloc of 64 TiB", cuMemAlloc(&a, (size_t)1 << 46), CUDA_ERROR_OUT_OF_MEMORY);
  row("cuMemAllocPitch with element size 3", cuMemAllocPitch(&a, &pitch, 100, 10, 3),
      CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemAlloc(&a, 4096));
  CHECK(cuMemAlloc(&b, 4096));
  row("cuMemFree inside an allocation", cuMemFree(a + 16), CUDA_ERROR_INVALID_VALUE);
  row("cuMemFree of an address never given", cuMemFree((CUdeviceptr)0x1000),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemcpyHtoD to an address never given", cuMemcpyHtoD((CUdeviceptr)0x1000, host, 16),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemcpyDtoH from an address never given", cuMemcpyDtoH(host, (CUdeviceptr)0x1000, 16),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemcpyHtoD behind the end", cuMemcpyHtoD(a, host, 1 << 16), CUDA_ERROR_INVALID_VALUE);
  row("cuMemcpyDtoH behind the end", cuMemcpyDtoH(host, a, 1 << 16), CUDA_ERROR_INVALID_VALUE);
  row("cuMemcpyDtoD to an address never given", cuMemcpyDtoD((CUdeviceptr)0x1000, a, 16),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD8 of an address never given", cuMemsetD8((CUdeviceptr)0x1000, 1, 16),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD8 behind the end", cuMemsetD8(a, 1, 1 << 16), CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD8 behind the end of all addresses", cuMemsetD8(a, 1, SIZE_MAX),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD16 of more bytes than a number holds", cuMemsetD16(a, 1, SIZE_MAX / 2 + 2),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD32 of more bytes than a number holds", cuMemsetD32(a, 1, SIZE_MAX / 4 + 2),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D8 with rows longer than the pitch", cuMemsetD2D8(a, 16, 1, 17, 2),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D16 with rows longer than the pitch", cuMemsetD2D16(a, 16, 1, 9, 2),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D32 with rows longer than the pitch", cuMemsetD2D32(a, 16, 1, 5, 2),
      CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D32Async with rows longer than the pitch",
      cuMemsetD2D32Async(a, 16, 1, 5, 2, NULL), CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D8 of one row longer than the pitch", cuMemsetD2D8(a, 16, 1, 17, 1), CUDA_SUCCESS);
  row("cuMemsetD2D8 of no rows", cuMemsetD2D8(a, 16, 1, 17, 0), CUDA_SUCCESS);
  row("cuMemsetD2D8 of more bytes than a number holds",
      cuMemsetD2D8(a, (size_t)1 << 32, 1, 16, ((size_t)1 << 32) + 1), CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D32 of rows of more bytes than a number holds",
      cuMemsetD2D32(a, 4096, 1, SIZE_MAX / 4 + 2, 1), CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD2D8 behind the end", cuMemsetD2D8(a, 1024, 1, 1024, 5), CUDA_ERROR_INVALID_VALUE);
  row("cuMemsetD32 of an odd address", cuMemsetD32(a + 2, 1, 4), CUDA_ERROR_INVALID_VALUE);
  row("cuPointerGetAttribute of a host variable",
      cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)host),
      CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(b));
  if (undefined) row("cuMemFree twice", cuMemFree(b), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(a));
  row("cuMemFreeHost of memory never given", cuMemFreeHost(host), CUDA_ERROR_INVALID_VALUE);
}

static void streams_and_events(int undefined) {
  CUstream stream;
  CUevent timed, untimed;
  float milliseconds = 0;
  row("cuStreamCreate with unknown flags", cuStreamCreate(&stream, 0x80), CUDA_ERROR_INVALID_VALUE);
  row("cuStreamCreate(NULL)", cuStreamCreate(NULL, 0), CUDA_ERROR_INVALID_VALUE);
  row("cuEventCreate with unknown flags", cuEventCreate(&timed, 0x80), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamCreate(&stream, 0));
  CHECK(cuEventCreate(&timed, 0));
  CHECK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  row("cuEventElapsedTime of events never recorded",
      cuEventElapsedTime(&milliseconds, timed, timed), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventRecord(timed, stream));
  CHECK(cuEventRecord(untimed, stream));
  CHECK(cuStreamSynchronize(stream));
  row("cuEventElapsedTime without timing", cuEventElapsedTime(&milliseconds, timed, untimed),
      CUDA_ERROR_INVALID_HANDLE);
  row("cuStreamWaitEvent with unknown flags", cuStreamWaitEvent(stream, timed, 0x80),
      CUDA_ERROR_INVALID_VALUE);
  row("cuEventQuery(NULL)", cuEventQuery(NULL), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventDestroy(timed));
  CHECK(cuEventDestroy(untimed));
  CHECK(cuStreamDestroy(stream));
  if (undefined) {
    row("cuStreamSynchronize of a destroyed stream", cuStreamSynchronize(stream),
        CUDA_ERROR_INVALID_HANDLE);
    row("cuStreamDestroy twice", cuStreamDestroy(stream), CUDA_ERROR_INVALID_HANDLE);
    row("cuEventRecord of a destroyed event", cuEventRecord(timed, NULL),
        CUDA_ERROR_INVALID_HANDLE);
    row("cuEventDestroy twice", cuEventDestroy(timed), CUDA_ERROR_INVALID_HANDLE);
  }
}

int main(int argc, char** argv) {
  int undefined = argc > 1 && strcmp(argv[1], "--all") == 0;
  before_init();
  devices_and_contexts();
  Session session = open_session();
  contexts(&session);
  modules(&session);
  launches(&session);
  memory(undefined);
  streams_and_events(undefined);
  if (undefined) {
    CUmodule module;
    CUfunction function;
    CHECK(cuModuleLoadData(&module, kernels_ptx));
    CHECK(cuModuleUnload(module));
    row("cuModuleGetFunction of an unloaded module", cuModuleGetFunction(&function, module, "fill"),
        CUDA_ERROR_INVALID_HANDLE);
    row("cuModuleUnload twice", cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
  }

  /* None of this did any harm. */
  CUfunction fill = kernel_of(&session, "fill");
  CUdeviceptr out;
  unsigned value = 9, n = 32, host[32];
  CHECK(cuMemAlloc(&out, sizeof host));
  void* parameters[] = {&out, &value, &n};
  CHECK(cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(host, out, sizeof host));
  for (unsigned i = 0; i < n; ++i) EXPECT(host[i] == 9 + i);
  CHECK(cuMemFree(out));
  close_session(&session);
  printf("%d rows, %d wrong\n", rows, wrong);
  if (wrong != 0) return 1;
  return verdict_ok();
}
