// cuPointerGetAttribute(s). The widths are those that the real driver writes; unknown pointers are
// an error to the one and zeros to the other.
#include <string.h>

#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

namespace {

template <class T>
void store(void* data, T value) {
  memcpy(data, &value, sizeof value);
}

bool known_attribute(int attribute) {
  return attribute >= CU_POINTER_ATTRIBUTE_CONTEXT &&
         attribute <= CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID;
}

CUresult describe(void* data, int attribute, const Allocation& a, uint64_t address) {
  const bool host = a.kind == RangeKind::kHost || a.kind == RangeKind::kRegistered;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      store(data, handle_of(a.context));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      store<uint32_t>(data, host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      store<uint64_t>(data, address);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (a.on_device()) {
        store<uint64_t>(data, 0);
        return CUDA_ERROR_INVALID_VALUE;
      }
      store<uint64_t>(data, address);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      store<uint32_t>(data, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      store<uint64_t>(data, a.id);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      store<uint32_t>(data, a.kind == RangeKind::kManaged);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      store<int32_t>(data, host && a.context ? a.context->device->ordinal : a.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      store<uint32_t>(data, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      store<uint64_t>(data, a.begin);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      store<uint64_t>(data, a.end - a.begin);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      store<uint32_t>(data, 1);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      store<uint64_t>(data, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      store<uint32_t>(data, a.writers ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                      : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      store<uint64_t>(data, a.pool);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;  // P2P tokens
  }
}

// What the plural function writes for a pointer that CUDA knows nothing of.
void describe_unknown(void* data, int attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      store<uint64_t>(data, 0);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      store<int32_t>(data, -2);
      break;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      break;
    default:
      store<uint32_t>(data, 0);
  }
}

}  // namespace

GPUPOOL_API cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  GPUPOOL_CURRENT(context);
  if (!data || !known_attribute(int(attribute))) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(pointer);
  if (!allocation) {
    if (int(attribute) == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
        int(attribute) == CU_POINTER_ATTRIBUTE_RANGE_SIZE ||
        int(attribute) == CU_POINTER_ATTRIBUTE_MAPPED) {
      // A reserved range without memory has these, too.
      auto reserved = virtual_memory().reservation(pointer);
      if (!reserved) return CUDA_ERROR_INVALID_VALUE;
      if (int(attribute) == CU_POINTER_ATTRIBUTE_MAPPED) {
        store<uint32_t>(data, 0);
      } else {
        store<uint64_t>(data, int(attribute) == CU_POINTER_ATTRIBUTE_RANGE_SIZE ? reserved->second
                                                                                : reserved->first);
      }
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  }
  return describe(data, int(attribute), *allocation, pointer);
}

GPUPOOL_API cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                   CUdeviceptr pointer) {
  GPUPOOL_CURRENT(context);
  if (!count || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    if (!data[i] || !known_attribute(int(attributes[i]))) return CUDA_ERROR_INVALID_VALUE;
  }
  auto allocation = addresses().find(pointer);
  for (unsigned i = 0; i < count; ++i) {
    if (!allocation) {
      describe_unknown(data[i], int(attributes[i]));
    } else {
      describe(data[i], int(attributes[i]), *allocation, pointer);
    }
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                                  CUdeviceptr pointer) {
  GPUPOOL_CURRENT(context);
  if (!value || int(attribute) != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !addresses().find(pointer)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;  // copies that CUDA calls synchronous are so already
}
