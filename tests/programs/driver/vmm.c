/* Virtual memory: reserve, create, map, set access, copy, unmap; the same physical memory under two
   addresses. */
#include "common.h"

int main(void) {
  Session session = open_session();
  CUmemAllocationProp properties;
  CUmemAccessDesc access;
  size_t granularity = 0;
  CUdeviceptr first, second;
  CUmemGenericAllocationHandle memory;
  CUfunction fill = kernel_of(&session, "fill");
  unsigned value = 40, n = 1024, host[1024];
  memset(&properties, 0, sizeof properties);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = session.device;
  CHECK(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  EXPECT(granularity > 0 && (granularity & (granularity - 1)) == 0);
  CHECK(cuMemAddressReserve(&first, granularity, 0, 0, 0));
  CHECK(cuMemAddressReserve(&second, granularity, 0, 0, 0));
  EXPECT(first != second && first % granularity == 0 && second % granularity == 0);
  CHECK(cuMemCreate(&memory, granularity, &properties, 0));
  CHECK(cuMemMap(first, granularity, 0, memory, 0));
  CHECK(cuMemMap(second, granularity, 0, memory, 0));
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CHECK(cuMemSetAccess(first, granularity, &access, 1));
  CHECK(cuMemSetAccess(second, granularity, &access, 1));
  void* parameters[] = {&first, &value, &n};
  CHECK(cuLaunchKernel(fill, 4, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(host, second, sizeof host));
  for (unsigned i = 0; i < n; ++i) EXPECT(host[i] == value + i);
  CHECK(cuMemUnmap(first, granularity));
  CHECK(cuMemUnmap(second, granularity));
  CHECK(cuMemRelease(memory));
  CHECK(cuMemAddressFree(first, granularity));
  CHECK(cuMemAddressFree(second, granularity));
  close_session(&session);
  return verdict_ok();
}
