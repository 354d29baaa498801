#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "worker/driver_table.h"

namespace gpupool::worker {

namespace {

constexpr const char* kLibrary = "libcuda.so.1";

std::string error_name(const DriverTable& table, CUresult error) {
  const char* name = nullptr;
  if (table.cuGetErrorName != nullptr) table.cuGetErrorName(error, &name);
  return name != nullptr ? name : "error " + std::to_string(static_cast<int>(error));
}

}  // namespace

Driver::Driver() = default;
Driver::~Driver() = default;  // a driver is never unloaded: its threads would lose their code

std::unique_ptr<Driver> Driver::load(const std::string& directory, std::string* why) {
  const std::string path = directory.empty() ? kLibrary : directory + "/" + kLibrary;
  std::unique_ptr<Driver> driver(new Driver);
  driver->library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (driver->library_ == nullptr) {
    *why = std::string("cannot load the driver: ") + dlerror();
    return nullptr;
  }
  using GetProcAddress =
      CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(driver->library_, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    *why = path + " has no cuGetProcAddress_v2: a driver for CUDA 12 or later is needed";
    return nullptr;
  }
  driver->table_ = std::make_unique<DriverTable>();
  memset(static_cast<void*>(driver->table_.get()), 0, sizeof(DriverTable));
  for (const DriverFunction& function : kDriverFunctions) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status;
    if (get(function.base, &found, function.since, 0, &status) == CUDA_SUCCESS &&
        found != nullptr) {
      memcpy(reinterpret_cast<char*>(driver->table_.get()) + function.offset, &found, sizeof found);
    }
  }
  const DriverTable& table = *driver->table_;
  if (table.cuInit == nullptr || table.cuDeviceGetCount == nullptr ||
      table.cuDevicePrimaryCtxRetain == nullptr || table.cuMemAddressReserve == nullptr ||
      table.cuMemCreate == nullptr || table.cuMemMap == nullptr ||
      table.cuMemSetAccess == nullptr || table.cuLaunchKernel == nullptr ||
      table.cuStreamQuery == nullptr || table.cuMemcpyHtoDAsync_v2 == nullptr ||
      table.cuMemcpyDtoHAsync_v2 == nullptr) {
    *why = path + " lacks functions that a worker cannot do without";
    return nullptr;
  }
  CUresult result = table.cuInit(0);
  if (result == CUDA_SUCCESS) result = table.cuDeviceGetCount(&driver->device_count_);
  if (result != CUDA_SUCCESS) {
    *why = "the driver " + path + " does not start: " + error_name(table, result);
    return nullptr;
  }
  return driver;
}

int Driver::ordinal(const std::string& uuid) const {
  std::string digits;
  for (char c : uuid.substr(uuid.find('-') == 3 ? 4 : 0)) {
    if (c != '-') digits += c;
  }
  for (int i = 0; i < device_count_; i++) {
    CUuuid own;
    if (table_->cuDeviceGetUuid_v2 == nullptr ||
        table_->cuDeviceGetUuid_v2(&own, i) != CUDA_SUCCESS) {
      continue;
    }
    char text[33];
    for (int b = 0; b < 16; b++) {
      snprintf(text + 2 * b, 3, "%02x", static_cast<unsigned>(static_cast<uint8_t>(own.bytes[b])));
    }
    if (strcasecmp(text, digits.c_str()) == 0) return i;
  }
  return -1;
}

bool take_snapshot(const Driver& driver, int ordinal, wire::DeviceSnapshot* snapshot,
                   std::string* why) {
  const DriverTable& table = driver.table();
  *snapshot = wire::DeviceSnapshot{};
  CUdevice device;
  CUresult result = table.cuDeviceGet(&device, ordinal);
  if (result == CUDA_SUCCESS) {
    result = table.cuDeviceGetName(snapshot->name, sizeof snapshot->name - 1, device);
  }
  CUuuid uuid{};
  if (result == CUDA_SUCCESS) result = table.cuDeviceGetUuid_v2(&uuid, device);
  size_t bytes = 0;
  if (result == CUDA_SUCCESS) result = table.cuDeviceTotalMem_v2(&bytes, device);
  int version = 0;
  if (result == CUDA_SUCCESS) result = table.cuDriverGetVersion(&version);
  if (result != CUDA_SUCCESS) {
    *why = "device " + std::to_string(ordinal) + " does not answer: " + error_name(table, result);
    return false;
  }
  memcpy(snapshot->uuid, uuid.bytes, sizeof snapshot->uuid);
  snapshot->memory_bytes = bytes;
  snapshot->driver_version = static_cast<uint32_t>(version);
  for (uint32_t i = 1; i < wire::kAttributeCount; i++) {
    int value = 0;
    // What this driver does not know is 0, as of a device that cannot do it.
    if (i < CU_DEVICE_ATTRIBUTE_MAX &&
        table.cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(i), device) ==
            CUDA_SUCCESS) {
      snapshot->attributes[i] = value;
    }
  }
  // The range of priorities can only be asked in a context. The probe has none and makes none,
  // since that takes memory: every device since compute capability 7.0 has these.
  snapshot->stream_priority_least = 0;
  snapshot->stream_priority_greatest = -5;
  return true;
}

}  // namespace gpupool::worker
