// cuMemAddressReserve, cuMemCreate, cuMemMap and relatives.
#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

namespace {

HandleTable<PhysicalMemory>& pieces() {
  static auto& table = *new HandleTable<PhysicalMemory>;
  return table;
}

const void* key(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<const void*>(handle);
}

CUresult check_properties(const CUmemAllocationProp* prop, Device** device) {
  if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  return find_device(prop->location.id, device);
}

// Work that may still use a range comes before the range changes.
void wait_for_all() {
  std::vector<Context*> all;
  {
    std::lock_guard lock(driver().contexts_mutex);
    for (const Context* context : driver().contexts) {
      if (context->active) all.push_back(const_cast<Context*>(context));
    }
  }
  for (Context* context : all) context->wait_idle();
}

CUresult result_of(VirtualMemory::Result result) {
  switch (result) {
    case VirtualMemory::Result::kOk:
      return CUDA_SUCCESS;
    case VirtualMemory::Result::kFailed:
      return CUDA_ERROR_OUT_OF_MEMORY;
    case VirtualMemory::Result::kAlreadyMapped:
      return CUDA_ERROR_ALREADY_MAPPED;
    case VirtualMemory::Result::kInvalid:
      break;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

GPUPOOL_API cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t alignment, CUdeviceptr hint,
                                unsigned long long flags) {
  GPUPOOL_TRY(driver_status());
  if (!out || !size || size % kGranule || flags || (alignment & (alignment - 1)) || size >> 47) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint64_t address = virtual_memory().reserve(size, alignment, hint);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = address;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemAddressFree(CUdeviceptr address, size_t size) {
  GPUPOOL_TRY(driver_status());
  return virtual_memory().unreserve(address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_API cuMemCreate(CUmemGenericAllocationHandle* out, size_t size,
                        const CUmemAllocationProp* prop, unsigned long long flags) {
  GPUPOOL_TRY(driver_status());
  Device* device;
  GPUPOOL_TRY(check_properties(prop, &device));
  if (!out || !size || size % kGranule || flags) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_TRY(device->join());
  uint64_t offset;
  if (!device->physical->allocate(size, &offset)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto piece = std::make_shared<PhysicalMemory>();
  piece->device = device->ordinal;
  piece->bytes = size;
  piece->offset = offset;
  piece->store = device->physical.get();
  *out = reinterpret_cast<uint64_t>(pieces().add<void*>(std::move(piece)));
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  GPUPOOL_TRY(driver_status());
  auto piece = pieces().get(key(handle));
  if (!piece) return CUDA_ERROR_INVALID_VALUE;
  if (piece->references.fetch_sub(1) == 1) pieces().take(key(handle));
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                     CUmemGenericAllocationHandle handle, unsigned long long flags) {
  GPUPOOL_TRY(driver_status());
  auto piece = pieces().get(key(handle));
  if (!piece || flags) return CUDA_ERROR_INVALID_VALUE;
  return result_of(virtual_memory().map(address, size, offset, std::move(piece)));
}

GPUPOOL_API cuMemUnmap(CUdeviceptr address, size_t size) {
  GPUPOOL_TRY(driver_status());
  wait_for_all();
  return result_of(virtual_memory().unmap(address, size));
}

GPUPOOL_API cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* desc,
                           size_t count) {
  GPUPOOL_TRY(driver_status());
  if (!desc || !count || !size) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Device* device;
    GPUPOOL_TRY(find_device(desc[i].location.id, &device));
  }
  for (size_t i = 0; i < count; ++i) {
    if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) wait_for_all();
    GPUPOOL_TRY(result_of(
        virtual_memory().set_access(address, size, desc[i].location.id, unsigned(desc[i].flags))));
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                           CUdeviceptr address) {
  GPUPOOL_TRY(driver_status());
  if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(location->id, &device));
  auto access = virtual_memory().access(address, location->id);
  if (!access) return CUDA_ERROR_INVALID_VALUE;
  *flags = *access;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                          CUmemAllocationGranularity_flags option) {
  GPUPOOL_TRY(driver_status());
  if (!granularity || unsigned(option) > 1) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(check_properties(prop, &device));
  *granularity = kGranule;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                   CUmemGenericAllocationHandle handle) {
  GPUPOOL_TRY(driver_status());
  auto piece = pieces().get(key(handle));
  if (!prop || !piece) return CUDA_ERROR_INVALID_VALUE;
  *prop = {};
  prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop->location.id = piece->device;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* address) {
  GPUPOOL_TRY(driver_status());
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  auto piece = virtual_memory().physical(reinterpret_cast<uint64_t>(address));
  if (!piece) return CUDA_ERROR_INVALID_VALUE;
  // The handle may have been released while the mapping kept the memory: it is valid again.
  if (piece->references.fetch_add(1) == 0 || !pieces().get(piece.get())) {
    piece->references = 1;
    pieces().add<void*>(piece);
  }
  *out = reinterpret_cast<uint64_t>(piece.get());
  return CUDA_SUCCESS;
}
