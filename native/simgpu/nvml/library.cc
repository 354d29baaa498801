// Initialisation, the system's versions, error texts, and how a device is found.
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "simgpu/nvml/nvml.h"

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

namespace {

nvmlReturn_t initialise() {
  Library& lib = library();
  std::lock_guard lock(lib.mutex);
  if (!lib.loaded) {
    auto result =
        simgpu::load_machine(simgpu::library_directory(reinterpret_cast<void*>(&initialise)));
    std::string error = result.error;
    std::vector<std::unique_ptr<Device>> devices;
    if (result.machine) {
      for (const auto& gpu : result.machine->gpus) {
        auto device = std::make_unique<Device>();
        device->index = unsigned(devices.size());
        device->gpu = gpu;
        device->card = simgpu::CardState::open(simgpu::state_directory(), gpu.uuid_text(),
                                               gpu.memory_bytes, &error);
        if (!device->card) break;
        devices.push_back(std::move(device));
      }
    }
    if (!error.empty()) {
      fprintf(stderr, "gpupool simulated GPU: %s\n", error.c_str());
      return kDriverNotLoaded;
    }
    lib.machine = std::move(*result.machine);
    lib.devices = std::move(devices);
    lib.loaded = true;
  }
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
  return give(library().machine.driver_version, out, length);
}

GPUPOOL_NVML nvmlReturn_t nvmlSystemGetNVMLVersion(char* out, unsigned length) {
  GPUPOOL_NVML_TRY(ready());
  return give(std::to_string(library().machine.cuda_version / 1000) + "." +
                  library().machine.driver_version,
              out, length);
}

GPUPOOL_NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) {
  GPUPOOL_NVML_TRY(ready());
  if (!version) return kInvalidArgument;
  *version = library().machine.cuda_version;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return nvmlSystemGetCudaDriverVersion(version);
}

GPUPOOL_NVML nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(ready());
  if (!out || !length) return kInvalidArgument;
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  FILE* file = fopen(path, "rbe");
  if (!file) return kNotFound;
  char name[4096];
  size_t n = fread(name, 1, sizeof name - 1, file);
  fclose(file);
  name[n] = 0;  // the first argument ends at its own NUL
  snprintf(out, length, "%s", name);
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
  return find(out, [&](const Device& d) { return !strcasecmp(d.gpu.uuid_text().c_str(), uuid); });
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleBySerial(const char* serial, Handle* out) {
  if (!serial) return kInvalidArgument;
  return find(out, [&](const Device& d) { return d.gpu.serial == serial; });
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* id, Handle* out) {
  if (!id) return kInvalidArgument;
  unsigned domain, bus, device, function = 0;
  if (sscanf(id, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3) {
    domain = 0;
    if (sscanf(id, "%x:%x.%x", &bus, &device, &function) < 2) return kInvalidArgument;
  }
  return find(out, [&](const Device& d) {
    return d.gpu.pci_domain == domain && d.gpu.pci_bus == bus && d.gpu.pci_device == device &&
           !function;
  });
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char* id, Handle* out) {
  return nvmlDeviceGetHandleByPciBusId_v2(id, out);
}
