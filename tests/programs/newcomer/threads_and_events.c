/* driver API in C, two host threads with a stream each: one uploads and computes CRC-32s, the other
 * folds them; they hand over by events. The argument names the PTX of threads_and_events.cu. */
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "require_driver.h"

enum { ROUNDS = 8, SLOTS = 2, PIECE = 200, PIECES = 300, BYTES = PIECE * PIECES, FOLDERS = 128 };

static CUcontext ctx;
static CUfunction crc_pieces, fold;
static CUdeviceptr dev_data[SLOTS], dev_crc[SLOTS], dev_out[SLOTS];
static CUevent ready[SLOTS], done[SLOTS];
static unsigned char* host_data;     /* pinned, ROUNDS * BYTES */
static unsigned long long* host_out; /* pinned, ROUNDS * 2 */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int produced, consumed;

static void* produce(void* unused) {
  CUstream stream;
  CK(cuCtxSetCurrent(ctx));
  CK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int r = 0; r < ROUNDS; ++r) {
    int slot = r % SLOTS;
    pthread_mutex_lock(&mutex);
    while (r - consumed >= SLOTS) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    if (r >= SLOTS) CK(cuStreamWaitEvent(stream, done[slot], 0));
    CK(cuMemcpyHtoDAsync(dev_data[slot], host_data + (size_t)r * BYTES, BYTES, stream));
    unsigned piece = PIECE, pieces = PIECES;
    void* params[] = {&dev_data[slot], &piece, &pieces, &dev_crc[slot]};
    CK(cuLaunchKernel(crc_pieces, (PIECES + 63) / 64, 1, 1, 64, 1, 1, 0, stream, params, NULL));
    CK(cuEventRecord(ready[slot], stream));
    pthread_mutex_lock(&mutex);
    produced = r + 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
  }
  CK(cuStreamSynchronize(stream));
  CK(cuStreamQuery(stream));
  CK(cuStreamDestroy(stream));
  return unused;
}

static void* consume(void* unused) {
  CUstream stream;
  CK(cuCtxPushCurrent(ctx));
  CK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  for (int r = 0; r < ROUNDS; ++r) {
    int slot = r % SLOTS;
    pthread_mutex_lock(&mutex);
    while (produced <= r) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    CK(cuStreamWaitEvent(stream, ready[slot], 0));
    struct {
      CUdeviceptr crc;
      unsigned pieces;
      char tag;
      CUdeviceptr out;
    } args = {dev_crc[slot], PIECES, (char)(r - 4), dev_out[slot]};
    size_t size = sizeof args;
    void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &args, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    CK(cuLaunchKernel(fold, 1, 1, 1, FOLDERS, 1, 1, 2 * FOLDERS * 8, stream, NULL, extra));
    CK(cuMemcpyDtoHAsync(host_out + 2 * r, dev_out[slot], 16, stream));
    CK(cuEventRecord(done[slot], stream));
    pthread_mutex_lock(&mutex);
    consumed = r + 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
  }
  CK(cuStreamSynchronize(stream));
  CK(cuStreamDestroy(stream));
  CUcontext popped;
  CK(cuCtxPopCurrent(&popped));
  REQUIRE(popped == ctx, "another context was popped");
  CK(cuCtxGetCurrent(&popped));
  REQUIRE(popped == NULL, "a context is left in the thread");
  return unused;
}

static char* read_file(const char* path) {
  FILE* f = fopen(path, "rb");
  REQUIRE(f, "cannot open %s", path);
  char* text = calloc(1, 1 << 20);
  size_t n = fread(text, 1, (1 << 20) - 1, f);
  REQUIRE(n > 0, "%s is empty", path);
  fclose(f);
  return text;
}

int main(int argc, char** argv) {
  REQUIRE(argc == 2, "usage: %s PTX", argv[0]);
  CUdevice dev;
  CUmodule mod, bad;
  CUfunction none;
  CK(cuInit(0));
  CK(cuDeviceGet(&dev, 0));
  CK(cuDevicePrimaryCtxRetain(&ctx, dev));
  CK(cuCtxSetCurrent(ctx));

  char log[4096] = "", errors[4096] = "";
  CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
                            CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
                            CU_JIT_OPTIMIZATION_LEVEL};
  void* values[] = {log, (void*)sizeof log, errors, (void*)sizeof errors, (void*)(uintptr_t)4};
  CK(cuModuleLoadDataEx(&mod, read_file(argv[1]), 5, options, values));
  void* values2[] = {log, (void*)sizeof log, errors, (void*)sizeof errors, (void*)(uintptr_t)4};
  CUresult r = cuModuleLoadDataEx(
      &bad,
      ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { nonsense.u32 %r1; }\n",
      5, options, values2);
  REQUIRE(r == CUDA_ERROR_INVALID_PTX, "bad PTX: %d, expected CUDA_ERROR_INVALID_PTX", (int)r);
  REQUIRE(errors[0], "bad PTX: the error log is empty");
  r = cuModuleGetFunction(&none, mod, "absent");
  REQUIRE(r == CUDA_ERROR_NOT_FOUND, "absent function: %d", (int)r);
  CK(cuModuleGetFunction(&crc_pieces, mod, "crc_pieces"));
  CK(cuModuleGetFunction(&fold, mod, "fold"));

  unsigned table[256], salt = 0x5a5aa5a5u;
  for (unsigned i = 0; i < 256; ++i) {
    unsigned c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  CUdeviceptr g;
  size_t size;
  CK(cuModuleGetGlobal(&g, &size, mod, "crc_table"));
  REQUIRE(size == sizeof table, "size of crc_table: %zu", size);
  CK(cuMemcpyHtoD(g, table, sizeof table));
  CK(cuModuleGetGlobal(&g, &size, mod, "salt"));
  REQUIRE(size == 4, "size of salt: %zu", size);
  CK(cuMemcpyHtoD(g, &salt, 4));

  CK(cuMemHostAlloc((void**)&host_data, (size_t)ROUNDS * BYTES, 0));
  CK(cuMemAllocHost((void**)&host_out, ROUNDS * 16));
  unsigned s = 17;
  for (size_t i = 0; i < (size_t)ROUNDS * BYTES; ++i) {
    s = s * 1664525u + 1013904223u;
    host_data[i] = s >> 24;
  }
  for (int i = 0; i < SLOTS; ++i) {
    CK(cuMemAlloc(&dev_data[i], BYTES));
    CK(cuMemAlloc(&dev_crc[i], PIECES * 4));
    CK(cuMemAlloc(&dev_out[i], 16));
    CK(cuEventCreate(&ready[i], CU_EVENT_DISABLE_TIMING));
    CK(cuEventCreate(&done[i], CU_EVENT_DISABLE_TIMING));
  }
  CUevent begin, end;
  CK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
  CK(cuEventCreate(&end, CU_EVENT_DEFAULT));
  CK(cuEventRecord(begin, 0));
  CK(cuCtxSynchronize()); /* the tables are in place before the non-blocking streams start */
  pthread_t a, b;
  pthread_create(&a, NULL, produce, NULL);
  pthread_create(&b, NULL, consume, NULL);
  pthread_join(a, NULL);
  pthread_join(b, NULL);
  CK(cuEventRecord(end, 0));
  CK(cuEventSynchronize(end));
  CK(cuEventQuery(end));
  float ms = -1;
  CK(cuEventElapsedTime(&ms, begin, end));
  REQUIRE(ms > 0 && ms < 120000, "elapsed %g ms", ms);
  r = cuEventElapsedTime(&ms, begin, done[0]);
  REQUIRE(r == CUDA_ERROR_INVALID_HANDLE,
          "elapsed time of an event without timing: %d, expected CUDA_ERROR_INVALID_HANDLE",
          (int)r);

  for (int round = 0; round < ROUNDS; ++round) {
    unsigned long long sum = 0, x = 0;
    for (unsigned i = 0; i < PIECES; ++i) {
      unsigned c = 0xffffffffu;
      for (int j = 0; j < PIECE; ++j)
        c = table[(c ^ host_data[(size_t)round * BYTES + i * PIECE + j]) & 255] ^ (c >> 8);
      c = ~c ^ salt;
      sum += c;
      x ^= (unsigned long long)c << (i & 31);
    }
    sum += (unsigned long long)(long long)(round - 4);
    REQUIRE(host_out[2 * round] == sum && host_out[2 * round + 1] == x,
            "round %d: %llx %llx, expected %llx %llx", round, host_out[2 * round],
            host_out[2 * round + 1], sum, x);
  }

  /* A pitched copy: rows of 300 bytes up, a window of it down. */
  CUdeviceptr pitched;
  size_t pitch;
  CK(cuMemAllocPitch(&pitched, &pitch, 300, 40, 4));
  REQUIRE(pitch >= 300, "pitch %zu", pitch);
  CUDA_MEMCPY2D up = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                      .srcHost = host_data,
                      .srcPitch = 300,
                      .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                      .dstDevice = pitched,
                      .dstPitch = pitch,
                      .WidthInBytes = 300,
                      .Height = 40};
  CK(cuMemcpy2D(&up));
  unsigned char window[10][64];
  memset(window, 0xee, sizeof window);
  CUDA_MEMCPY2D down = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                        .srcDevice = pitched,
                        .srcPitch = pitch,
                        .srcXInBytes = 33,
                        .srcY = 7,
                        .dstMemoryType = CU_MEMORYTYPE_HOST,
                        .dstHost = window,
                        .dstPitch = 64,
                        .dstXInBytes = 2,
                        .dstY = 1,
                        .WidthInBytes = 50,
                        .Height = 8};
  CK(cuMemcpy2D(&down));
  for (int y = 0; y < 10; ++y)
    for (int x = 0; x < 64; ++x) {
      unsigned char want =
          y >= 1 && y < 9 && x >= 2 && x < 52 ? host_data[(y - 1 + 7) * 300 + x - 2 + 33] : 0xee;
      REQUIRE(window[y][x] == want, "window[%d][%d] = %d, expected %d", y, x, window[y][x], want);
    }
  for (int i = 0; i < SLOTS; ++i) {
    CK(cuMemFree(dev_data[i]));
    CK(cuMemFree(dev_crc[i]));
    CK(cuMemFree(dev_out[i]));
    CK(cuEventDestroy(ready[i]));
    CK(cuEventDestroy(done[i]));
  }
  CK(cuMemFree(pitched));
  CK(cuMemFreeHost(host_data));
  CK(cuMemFreeHost(host_out));
  CK(cuEventDestroy(begin));
  CK(cuEventDestroy(end));
  CK(cuModuleUnload(mod));
  CK(cuDevicePrimaryCtxRelease(dev));
  printf("%d rounds\nok\n", ROUNDS);
  return 0;
}
