// Memory that a program maps by itself. Addresses come from the arena of the current context's
// device; every change is one round trip.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <initializer_list>

#include "api/cuda_abi.h"
#include "client/pools.h"
#include "client/state.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()     \
  Context* context; \
  if (const CUresult e_ = enter(&context)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;

namespace {

constexpr uint64_t kGranularity = 2 * 1024 * 1024;

struct Physical : Object {
  Device* device = nullptr;
  uint64_t bytes = 0;
  std::atomic<int> references{0};  // cuMemRetainAllocationHandle counts
};

Table<Physical, Kind::kPhysical>& physical_table() {
  static auto* const table = new Table<Physical, Kind::kPhysical>;
  return *table;
}

struct Mapping {
  uint64_t bytes = 0;
  Physical* physical = nullptr;
  unsigned long long access = 0;
};

// What is mapped where, for the questions that are answered here.
struct Mappings {
  std::mutex lock;
  std::map<uint64_t, Mapping> at;
};
Mappings& mappings() {
  static auto* const all = new Mappings;
  return *all;
}

CUresult ask(Context* context, Operation operation, std::initializer_list<uint64_t> words,
             uint64_t* answer = nullptr) {
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(operation), context->wire_id(), words.size() * 8,
      [&](wire::Encoder& encoder) {
        for (uint64_t word : words) encoder.scalar(word);
      },
      &call);
  if (result == CUDA_SUCCESS && answer != nullptr) *answer = call.decoder().scalar();
  return settle(context, result);
}

uint64_t word_of(wire::Handle handle) {
  return handle.index | static_cast<uint64_t>(handle.generation) << 32;
}

// The device that a description of physical memory means; errors for what cannot be had.
CUresult device_of(const CUmemAllocationProp* properties, Device** device) {
  REQUIRE(properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED);
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  *device = Process::get().device(properties->location.id);
  return *device == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
  REQUIRE(granularity != nullptr && (option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ||
                                     option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  Device* device;
  if (const CUresult e = device_of(properties, &device)) return e;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  ENTER();
  REQUIRE(out != nullptr && bytes != 0 && flags == 0);
  uint64_t address = 0;
  const CUresult result =
      ask(context, Operation::kMemAddressReserve, {bytes, alignment, wanted}, &address);
  if (result == CUDA_SUCCESS) *out = address;
  return result;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  ENTER();
  return ask(context, Operation::kMemAddressFree, {address, bytes});
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  ENTER();
  REQUIRE(out != nullptr && bytes != 0 && bytes % kGranularity == 0 && flags == 0);
  Device* device;
  if (const CUresult e = device_of(properties, &device)) return e;
  if (properties->requestedHandleTypes != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (device != context->device) return CUDA_ERROR_NOT_SUPPORTED;
  if (bytes > device->arena_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical* physical = physical_table().allocate();
  if (physical == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = ask(context, Operation::kMemCreate, {word_of(physical->wire), bytes});
  if (result == CUDA_ERROR_OUT_OF_MEMORY && reclaim_pools(device)) {
    result = ask(context, Operation::kMemCreate, {word_of(physical->wire), bytes});
  }
  if (result != CUDA_SUCCESS) {
    physical_table().discard(physical);
    return result;
  }
  physical->context = context;
  physical->device = device;
  physical->bytes = bytes;
  physical->references = 1;
  physical_table().publish(physical);
  *out = physical->handle;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER();
  Physical* physical = physical_table().find(handle);
  REQUIRE(physical != nullptr);
  if (physical->references.fetch_sub(1) != 1) return CUDA_SUCCESS;
  const wire::Handle on_wire = physical->wire;
  physical_table().retire(physical);
  return ask(context, Operation::kMemRelease, {word_of(on_wire)});
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER();
  Physical* physical = physical_table().find(handle);
  REQUIRE(physical != nullptr && flags == 0 && bytes != 0);
  if (physical->device != context->device) return CUDA_ERROR_NOT_SUPPORTED;
  const CUresult result =
      ask(context, Operation::kMemMap, {address, bytes, offset, word_of(physical->wire)});
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard guard(mappings().lock);
  mappings().at[address] = {bytes, physical, 0};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  ENTER();
  const CUresult result = ask(context, Operation::kMemUnmap, {address, bytes});
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard guard(mappings().lock);
  auto& all = mappings().at;
  for (auto at = all.lower_bound(address); at != all.end() && at->first < address + bytes;) {
    Process::get().ranges.remove(at->first, Range::Type::kMapped);
    at = all.erase(at);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* descriptions,
                        size_t count) {
  ENTER();
  REQUIRE(descriptions != nullptr && count != 0 && bytes != 0);
  for (size_t i = 0; i < count; i++) {
    if (descriptions[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
      return CUDA_ERROR_NOT_SUPPORTED;
    const Device* device = Process::get().device(descriptions[i].location.id);
    if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (device != context->device) return CUDA_ERROR_NOT_SUPPORTED;
    const auto flags = static_cast<uint64_t>(descriptions[i].flags);
    const CUresult result = ask(context, Operation::kMemSetAccess, {address, bytes, flags});
    if (result != CUDA_SUCCESS) return result;
    std::lock_guard guard(mappings().lock);
    auto& all = mappings().at;
    for (auto at = all.lower_bound(address); at != all.end() && at->first < address + bytes; ++at) {
      at->second.access = flags;
      Process::get().ranges.remove(at->first, Range::Type::kMapped);
      if (flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) continue;
      Range range;
      range.base = at->first;
      range.bytes = at->second.bytes;
      range.type = Range::Type::kMapped;
      range.context = context;
      Process::get().ranges.add(range);
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr address) {
  ENTER();
  REQUIRE(flags != nullptr && location != nullptr);
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (Process::get().device(location->id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard guard(mappings().lock);
  auto at = mappings().at.upper_bound(address);
  REQUIRE(at != mappings().at.begin());
  --at;
  REQUIRE(address - at->first < at->second.bytes);
  *flags = location->id == at->second.physical->device->ordinal ? at->second.access : 0;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  ENTER();
  const Physical* physical = physical_table().find(handle);
  REQUIRE(properties != nullptr && physical != nullptr);
  *properties = CUmemAllocationProp{};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = physical->device->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* pointer) {
  ENTER();
  REQUIRE(out != nullptr);
  const auto address = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard guard(mappings().lock);
  auto at = mappings().at.upper_bound(address);
  REQUIRE(at != mappings().at.begin());
  --at;
  REQUIRE(address - at->first < at->second.bytes);
  Physical* physical = at->second.physical;
  // Memory that only its mappings hold has no handle any more.
  if (physical_table().find(physical->handle) != physical) return CUDA_ERROR_INVALID_VALUE;
  physical->references.fetch_add(1);
  *out = physical->handle;
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
