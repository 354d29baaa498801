/* Memory pools by the driver API: attributes, errors at the call, use and reuse in stream order.
   Without arguments a test of itself; with "quota": commands as in memory.c, from a pool:
     alloc N  allocates N MiB, prints "alloc N: CODE"      free  frees the last allocation
     sync     waits for the stream                         keep  the pool keeps what is freed
     plain N  cuMemAlloc and cuMemFree of N MiB, prints "plain N: CODE" */
#include "common.h"

enum { kMany = 200 };

static uint64_t number(CUmemoryPool pool, CUmemPool_attribute attribute) {
  cuuint64_t value = ~0ull;
  CHECK(cuMemPoolGetAttribute(pool, attribute, &value));
  return value;
}

static CUmemoryPool new_pool(void) {
  CUmemPoolProps properties;
  memset(&properties, 0, sizeof properties);
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  CUmemoryPool pool = NULL;
  CHECK(cuMemPoolCreate(&pool, &properties));
  return pool;
}

static void attributes(CUdevice device) {
  int supported = 0;
  CHECK(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, device));
  EXPECT(supported == 1);
  CUmemoryPool standard = NULL, current = NULL;
  CHECK(cuDeviceGetDefaultMemPool(&standard, device));
  CHECK(cuDeviceGetMemPool(&current, device));
  EXPECT(standard != NULL && standard == current);
  EXPECT(number(standard, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) == 0);
  int reuse = 0;
  CHECK(cuMemPoolGetAttribute(standard, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse));
  EXPECT(reuse == 1);
  reuse = 0;
  CHECK(cuMemPoolSetAttribute(standard, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse));
  reuse = 1;
  CHECK(cuMemPoolGetAttribute(standard, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse));
  EXPECT(reuse == 0);

  CUmemoryPool own = new_pool();
  CHECK(cuDeviceSetMemPool(device, own));
  CHECK(cuDeviceGetMemPool(&current, device));
  EXPECT(current == own && own != standard);
  CUdeviceptr memory;
  CHECK(cuMemAllocAsync(&memory, 1000, NULL));
  CUmemoryPool of_memory = NULL;
  CHECK(cuPointerGetAttribute(&of_memory, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, memory));
  EXPECT(of_memory == own);
  EXPECT(number(own, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) >= 1000);
  EXPECT(number(own, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) >= 1000);
  EXPECT(number(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
  CHECK(cuMemFreeAsync(memory, NULL));
  CHECK(cuCtxSynchronize());
  EXPECT(number(own, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
  EXPECT(number(own, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0); /* the threshold is 0 */
  EXPECT(number(own, CU_MEMPOOL_ATTR_USED_MEM_HIGH) >= 1000);
  cuuint64_t zero = 0, one = 1;
  EXPECT(cuMemPoolSetAttribute(own, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &one) ==
         CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemPoolSetAttribute(own, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero));
  EXPECT(number(own, CU_MEMPOOL_ATTR_USED_MEM_HIGH) == 0);
  EXPECT(cuMemPoolSetAttribute(own, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &zero) ==
         CUDA_ERROR_INVALID_VALUE);

  CUmemLocation where = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  CHECK(cuMemPoolGetAccess(&access, own, &where));
  EXPECT(access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  /* The current pool goes: the default pool is current again. */
  CHECK(cuMemPoolDestroy(own));
  CHECK(cuDeviceGetMemPool(&current, device));
  EXPECT(current == standard);
  EXPECT(cuMemPoolDestroy(own) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemPoolDestroy(standard) == CUDA_ERROR_INVALID_VALUE);
}

/* Handles of other kinds, of destroyed pools and numbers that are none. */
static void wrong_handles(CUdevice device) {
  CUstream stream;
  CUevent event;
  CUdeviceptr plain, memory;
  cuuint64_t value = 0;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&event, 0));
  CHECK(cuMemAlloc(&plain, 4096));
  CUmemoryPool gone = new_pool();
  CHECK(cuMemPoolDestroy(gone));
  const CUmemoryPool wrong[] = {
      NULL, (CUmemoryPool)stream, (CUmemoryPool)event,
      gone, (CUmemoryPool)plain,  (CUmemoryPool)(uintptr_t)0x1234567890f0ull};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    EXPECT(cuMemAllocFromPoolAsync(&memory, 64, wrong[i], stream) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemPoolTrimTo(wrong[i], 0) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemPoolDestroy(wrong[i]) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuDeviceSetMemPool(device, wrong[i]) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemPoolGetAttribute(wrong[i], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value) ==
           CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemPoolSetAttribute(wrong[i], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value) ==
           CUDA_ERROR_INVALID_VALUE);
  }
  CHECK(cuMemAllocAsync(&memory, 4096, stream));
  EXPECT(cuMemAllocAsync(NULL, 64, stream) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemAllocAsync(&plain, 0, stream) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemAllocAsync(&plain, 64, (CUstream)event) == CUDA_ERROR_INVALID_HANDLE);
  EXPECT(cuMemFreeAsync(memory + 512, stream) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemFreeAsync(memory, (CUstream)event) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuMemFreeAsync(memory, stream));
  CHECK(cuStreamSynchronize(stream));
  EXPECT(cuMemFreeAsync(memory, stream) == CUDA_ERROR_INVALID_VALUE); /* twice */
  EXPECT(cuMemsetD8(memory, 1, 64) == CUDA_ERROR_INVALID_VALUE);      /* after it was freed */
  /* Either kind of memory may be freed by the other kind of function. */
  CHECK(cuMemFreeAsync(plain, stream));
  CHECK(cuMemAllocAsync(&memory, 4096, stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuMemFree(memory));
  EXPECT(cuMemFree(memory) == CUDA_ERROR_INVALID_VALUE);
  CUmemPoolProps properties;
  memset(&properties, 0, sizeof properties);
  CUmemoryPool pool;
  EXPECT(cuMemPoolCreate(&pool, &properties) == CUDA_ERROR_INVALID_VALUE);
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 77;
  EXPECT(cuMemPoolCreate(&pool, &properties) == CUDA_ERROR_INVALID_DEVICE);
  CHECK(cuStreamDestroy(stream));
  CHECK(cuEventDestroy(event));
}

/* Many allocations of many sizes alive at once, each with its own contents. */
static void contents(void) {
  CUmemoryPool pool = new_pool();
  CUstream streams[3];
  CUdeviceptr memory[kMany];
  size_t bytes[kMany];
  unsigned seed = 12345;
  for (int i = 0; i < 3; ++i) CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kMany; ++i) {
      seed = seed * 1664525u + 1013904223u;
      bytes[i] = 4 + (seed >> 8) % (i % 20 == 0 ? 3000000 : 9000) / 4 * 4;
      CHECK(cuMemAllocFromPoolAsync(&memory[i], bytes[i], pool, streams[i % 3]));
      EXPECT(memory[i] % 256 == 0);
      CHECK(cuMemsetD32Async(memory[i], 1000u * (unsigned)round + (unsigned)i, bytes[i] / 4,
                             streams[i % 3]));
      if (i % 7 == 6) { /* freed in the middle, used again by the same stream */
        CHECK(cuMemFreeAsync(memory[i - 3], streams[(i - 3) % 3]));
        memory[i - 3] = 0;
      }
    }
    for (int i = 0; i < kMany; ++i) {
      if (memory[i] == 0) continue;
      unsigned ends[2];
      CHECK(cuMemcpyDtoHAsync(&ends[0], memory[i], 4, streams[i % 3]));
      CHECK(cuMemcpyDtoHAsync(&ends[1], memory[i] + bytes[i] - 4, 4, streams[i % 3]));
      CHECK(cuStreamSynchronize(streams[i % 3]));
      EXPECT(ends[0] == 1000u * (unsigned)round + (unsigned)i && ends[1] == ends[0]);
      CHECK(cuMemFreeAsync(memory[i], streams[(i + round) % 3]));
    }
  }
  CHECK(cuCtxSynchronize());
  EXPECT(number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
  /* A pool with memory in use goes when that is freed. */
  CHECK(cuMemAllocFromPoolAsync(&memory[0], 4096, pool, streams[0]));
  CHECK(cuMemPoolDestroy(pool));
  CHECK(cuMemsetD32Async(memory[0], 7, 1024, streams[0]));
  unsigned last;
  CHECK(cuMemcpyDtoHAsync(&last, memory[0] + 4092, 4, streams[0]));
  CHECK(cuStreamSynchronize(streams[0]));
  EXPECT(last == 7);
  CHECK(cuMemFreeAsync(memory[0], streams[0]));
  for (int i = 0; i < 3; ++i) CHECK(cuStreamDestroy(streams[i]));
}

static int quota(int count, char** words) {
  CUstream stream;
  CUmemoryPool pool;
  CUdeviceptr memory[64];
  int live = 0;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
  for (int i = 0; i < count; ++i) {
    const size_t mib = i + 1 < count ? strtoull(words[i + 1], NULL, 10) : 0;
    if (strcmp(words[i], "alloc") == 0 && live < 64) {
      const CUresult status = cuMemAllocAsync(&memory[live], mib << 20, stream);
      if (status == CUDA_SUCCESS) {
        CHECK(cuMemsetD8Async(memory[live] + (mib << 20) - 512, 1, 512, stream));
        ++live;
      }
      printf("alloc %zu: %d\n", mib, (int)status);
      ++i;
    } else if (strcmp(words[i], "plain") == 0) {
      CUdeviceptr plain;
      const CUresult status = cuMemAlloc(&plain, mib << 20);
      if (status == CUDA_SUCCESS) CHECK(cuMemFree(plain));
      printf("plain %zu: %d\n", mib, (int)status);
      ++i;
    } else if (strcmp(words[i], "free") == 0) {
      EXPECT(live > 0);
      CHECK(cuMemFreeAsync(memory[--live], stream));
    } else if (strcmp(words[i], "sync") == 0) {
      CHECK(cuStreamSynchronize(stream));
    } else if (strcmp(words[i], "keep") == 0) {
      cuuint64_t all = ~0ull;
      CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
    } else {
      fprintf(stderr, "pools: unknown command '%s'\n", words[i]);
      return 4;
    }
  }
  CHECK(cuStreamSynchronize(stream));
  return verdict_ok();
}

int main(int argc, char** argv) {
  Session session = open_session();
  if (argc > 1) return quota(argc - 2, argv + 2);
  attributes(session.device);
  wrong_handles(session.device);
  contents();
  close_session(&session);
  return verdict_ok();
}
