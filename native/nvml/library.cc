// Initialisation, the system's versions, error texts, and how a device is found.
#include "nvml/library.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

namespace gpupool::nvml {

Library& library() {
  static auto& instance = *new Library;
  return instance;
}

nvmlReturn_t ready() { return library().references > 0 ? kSuccess : kUninitialized; }

nvmlReturn_t check(Handle handle) {
  GPUPOOL_NVML_TRY(ready());
  for (const auto& device : library().devices) {
    if (device.get() == handle) return kSuccess;
  }
  return kInvalidArgument;
}

nvmlReturn_t give(const std::string& text, char* out, unsigned length) {
  if (!out) return kInvalidArgument;
  if (text.size() + 1 > length) return kInsufficientSize;
  memcpy(out, text.c_str(), text.size() + 1);
  return kSuccess;
}

nvmlReturn_t set(Handle device, unsigned* out, unsigned value) {
  GPUPOOL_NVML_TRY(check(device));
  if (!out) return kInvalidArgument;
  *out = value;
  return kSuccess;
}

nvmlReturn_t set(Handle device, int* out, int value) {
  GPUPOOL_NVML_TRY(check(device));
  if (!out) return kInvalidArgument;
  *out = value;
  return kSuccess;
}

nvmlReturn_t set_known(Handle device, unsigned* out, unsigned value) {
  GPUPOOL_NVML_TRY(check(device));
  return value == 0 ? nvmlReturn_t(kNotSupported) : set(device, out, value);
}

nvmlReturn_t refuse(Handle device) {
  GPUPOOL_NVML_TRY(check(device));
  return kNotSupported;
}

std::optional<std::string> command_of(unsigned pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  FILE* file = fopen(path, "rbe");
  if (!file) return std::nullopt;
  char name[4096];
  const size_t n = fread(name, 1, sizeof name - 1, file);
  fclose(file);
  name[n] = 0;  // the first argument ends at its own NUL
  return std::string(name);
}

namespace {

nvmlReturn_t initialise() {
  Library& lib = library();
  std::lock_guard lock(lib.mutex);
  if (lib.references == 0) GPUPOOL_NVML_TRY(start(lib));
  ++lib.references;
  return kSuccess;
}

template <class Condition>
nvmlReturn_t find(Handle* out, Condition condition) {
  GPUPOOL_NVML_TRY(ready());
  if (!out) return kInvalidArgument;
  for (const auto& device : library().devices) {
    if (condition(*device)) {
      *out = device.get();
      return kSuccess;
    }
  }
  return kNotFound;
}

}  // namespace
}  // namespace gpupool::nvml

using namespace gpupool::nvml;

GPUPOOL_NVML nvmlReturn_t nvmlInit_v2() { return initialise(); }
GPUPOOL_NVML nvmlReturn_t nvmlInit() { return initialise(); }
GPUPOOL_NVML nvmlReturn_t nvmlInitWithFlags(unsigned) { return initialise(); }

GPUPOOL_NVML nvmlReturn_t nvmlShutdown() {
  std::lock_guard lock(library().mutex);
  if (library().references == 0) return kUninitialized;
  --library().references;
  return kSuccess;
}

GPUPOOL_NVML const char* nvmlErrorString(nvmlReturn_t code) {
  switch (code) {
    case 0:
      return "Success";
    case 1:
      return "Uninitialized";
    case 2:
      return "Invalid Argument";
    case 3:
      return "Not Supported";
    case 4:
      return "Insufficient Permissions";
    case 5:
      return "Already Initialized";
    case 6:
      return "Not Found";
    case 7:
      return "Insufficient Size";
    case 8:
      return "Insufficient External Power";
    case 9:
      return "Driver Not Loaded";
    case 10:
      return "Timeout";
    case 11:
      return "Interrupt Request Issue";
    case 12:
      return "NVML Shared Library Not Found";
    case 13:
      return "Function Not Found";
    case 14:
      return "Corrupted infoROM";
    case 15:
      return "GPU is lost";
    case 16:
      return "GPU requires restart";
    case 17:
      return "The operating system has blocked the request.";
    case 18:
      return "RM has detected an NVML/RM version mismatch.";
    case 19:
      return "The GPU is in use";
    case 20:
      return "Insufficient memory";
    case 21:
      return "No data";
    case 23:
      return "Insufficient resources";
    case 25:
      return "Argument version mismatch";
    default:
      return "Unknown Error";
  }
}

GPUPOOL_NVML nvmlReturn_t nvmlSystemGetDriverVersion(char* out, unsigned length) {
  GPUPOOL_NVML_TRY(ready());
  if (library().driver_version.empty()) return kNotSupported;
  return give(library().driver_version, out, length);
}

// As NVIDIA's: CUDA's major version, then the driver's.
GPUPOOL_NVML nvmlReturn_t nvmlSystemGetNVMLVersion(char* out, unsigned length) {
  GPUPOOL_NVML_TRY(ready());
  if (library().driver_version.empty()) return kNotSupported;
  return give(std::to_string(library().cuda_version / 1000) + "." + library().driver_version, out,
              length);
}

GPUPOOL_NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) {
  GPUPOOL_NVML_TRY(ready());
  if (!version) return kInvalidArgument;
  *version = library().cuda_version;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return nvmlSystemGetCudaDriverVersion(version);
}

GPUPOOL_NVML nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(ready());
  if (!out || !length) return kInvalidArgument;
  const auto name = process_name(pid);
  if (!name) return kNotFound;
  snprintf(out, length, "%s", name->c_str());
  return kSuccess;
}

GPUPOOL_NVML nvmlReturn_t nvmlUnitGetCount(unsigned* count) {
  GPUPOOL_NVML_TRY(ready());
  if (!count) return kInvalidArgument;
  *count = 0;
  return kSuccess;
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  GPUPOOL_NVML_TRY(ready());
  if (!count) return kInvalidArgument;
  *count = unsigned(library().devices.size());
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCount(unsigned* count) {
  return nvmlDeviceGetCount_v2(count);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* out) {
  nvmlReturn_t code = find(out, [&](const Device& d) { return d.index == index; });
  return code == kNotFound ? nvmlReturn_t(kInvalidArgument) : code;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, Handle* out) {
  return nvmlDeviceGetHandleByIndex_v2(index, out);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, Handle* out) {
  if (!uuid) return kInvalidArgument;
  return find(out, [&](const Device& d) { return !strcasecmp(d.uuid.c_str(), uuid); });
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* id, Handle* out) {
  if (!id) return kInvalidArgument;
  unsigned domain, bus, device, function = 0;
  if (sscanf(id, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3) {
    domain = 0;
    if (sscanf(id, "%x:%x.%x", &bus, &device, &function) < 2) return kInvalidArgument;
  }
  return find(out, [&](const Device& d) {
    return d.pci_domain == domain && d.pci_bus == bus && d.pci_device == device && !function;
  });
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char* id, Handle* out) {
  return nvmlDeviceGetHandleByPciBusId_v2(id, out);
}
