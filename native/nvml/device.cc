// What every device of ours can tell.
#include <stdio.h>
#include <string.h>

#include <chrono>
#include <vector>

#include "nvml/library.h"

using namespace gpupool::nvml;

namespace {

template <class Info, class Fill>
nvmlReturn_t processes(Handle device, unsigned* count, Info* out, Fill fill) {
  GPUPOOL_NVML_TRY(check(device));
  if (!count) return kInvalidArgument;
  std::vector<Process> list;
  GPUPOOL_NVML_TRY(device->processes(&list));
  const unsigned room = *count;
  *count = unsigned(list.size());
  if (list.empty()) return kSuccess;
  if (list.size() > room || !out) return kInsufficientSize;
  for (size_t i = 0; i < list.size(); ++i) fill(out[i], list[i]);
  return kSuccess;
}

void fill_v1(ProcessInfoV1& out, const Process& process) {
  out = {process.pid, process.used_bytes};
}
void fill_v2(ProcessInfoV2& out, const Process& process) {
  out = {process.pid, process.used_bytes, 0xFFFFFFFF, 0xFFFFFFFF};
}

nvmlReturn_t none(Handle device, unsigned* count) { return set(device, count, 0u); }

// NVML_DEVICE_ARCH_*
unsigned architecture(int major, int minor) {
  switch (major) {
    case 7:
      return minor < 5 ? 5 : 6;  // Volta, Turing
    case 8:
      return minor < 9 ? 7 : 8;  // Ampere, Ada
    case 9:
      return 9;  // Hopper
    case 10:
    case 11:
    case 12:
      return 10;  // Blackwell
    default:
      return 0xFFFFFFFF;
  }
}

}  // namespace

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetIndex(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, d->index);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetName(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give(d->name, out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetUUID(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give(d->uuid, out, length);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetArchitecture(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, architecture(d->cc_major, d->cc_minor));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCudaComputeCapability(Handle d, int* major, int* minor) {
  GPUPOOL_NVML_TRY(check(d));
  if (!major || !minor) return kInvalidArgument;
  *major = d->cc_major;
  *minor = d->cc_minor;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryBusWidth(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set_known(d, out, d->memory_bus_bits);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMaxClockInfo(Handle d, unsigned type, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (type > 3) return kInvalidArgument;
  return set_known(d, out, type == 2 ? d->memory_clock_mhz : d->core_clock_mhz);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPciInfo_v3(Handle d, PciInfoV3* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = {};
  snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", d->pci_domain, d->pci_bus,
           d->pci_device);
  snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0",
           d->pci_domain & 0xFFFF, d->pci_bus & 0xFF, d->pci_device & 0x1F);
  out->domain = d->pci_domain;
  out->bus = d->pci_bus;
  out->device = d->pci_device;
  out->pci_device_id = d->pci_device_id;
  out->pci_subsystem_id = d->pci_device_id;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPciInfo_v2(Handle d, PciInfoV2* out) {
  if (!out) return kInvalidArgument;
  PciInfoV3 info;
  GPUPOOL_NVML_TRY(nvmlDeviceGetPciInfo_v3(d, &info));
  *out = {};
  memcpy(out->bus_id, info.bus_id_legacy, sizeof out->bus_id);
  out->domain = info.domain;
  out->bus = info.bus;
  out->device = info.device;
  out->pci_device_id = info.pci_device_id;
  out->pci_subsystem_id = info.pci_subsystem_id;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPciInfo(Handle d, PciInfoV2* out) {
  return nvmlDeviceGetPciInfo_v2(d, out);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryInfo(Handle d, Memory* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  MemoryUse use;
  GPUPOOL_NVML_TRY(d->memory(&use));
  *out = {use.total_bytes, use.total_bytes - use.used_bytes, use.used_bytes};
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(Handle d, MemoryV2* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  if (out->version != version_of<MemoryV2>(2)) return kArgumentVersionMismatch;
  MemoryUse use;
  GPUPOOL_NVML_TRY(d->memory(&use));
  out->total = use.total_bytes;
  out->reserved = 0;
  out->free = use.total_bytes - use.used_bytes;
  out->used = use.used_bytes;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetUtilizationRates(Handle d, Utilization* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  return d->utilization(out);
}
// How the processes do now; nobody keeps what was before. Those that did nothing have no sample.
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetProcessUtilization(Handle d, ProcessSample* out,
                                                          unsigned* count,
                                                          unsigned long long last_seen_us) {
  GPUPOOL_NVML_TRY(check(d));
  if (!count) return kInvalidArgument;
  std::vector<ProcessUse> list;
  GPUPOOL_NVML_TRY(d->process_utilization(&list));
  std::erase_if(list, [](const ProcessUse& use) { return use.percent == 0; });
  const auto room = *count;
  *count = static_cast<unsigned>(list.size());
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  const auto now = static_cast<unsigned long long>(
      std::chrono::duration_cast<std::chrono::microseconds>(since_epoch).count());
  if (list.empty() || now <= last_seen_us) return *count = 0, kNotFound;
  if (!out || room < list.size()) return kInsufficientSize;
  for (const ProcessUse& use : list) *out++ = {use.pid, now, use.percent, 0, 0, 0};
  return kSuccess;
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(Handle d, unsigned* count,
                                                               ProcessInfoV1* out) {
  return processes(d, count, out, fill_v1);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(Handle d, unsigned* count,
                                                                  ProcessInfoV2* out) {
  return processes(d, count, out, fill_v2);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(Handle d, unsigned* count,
                                                                  ProcessInfoV2* out) {
  return processes(d, count, out, fill_v2);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(Handle d, unsigned* count, void*) {
  return none(d, count);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(Handle d, unsigned* count,
                                                                   void*) {
  return none(d, count);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(Handle d, unsigned* count,
                                                                   void*) {
  return none(d, count);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses(Handle d, unsigned* count,
                                                                  void*) {
  return none(d, count);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(Handle d, unsigned* count,
                                                                     void*) {
  return none(d, count);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(Handle d, unsigned* count,
                                                                     void*) {
  return none(d, count);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetComputeMode(Handle d, unsigned* out) {
  return set(d, out, 0u);  // any number of processes
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDisplayMode(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDisplayActive(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetAccountingMode(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetEccMode(Handle d, unsigned* current, unsigned* pending) {
  GPUPOOL_NVML_TRY(check(d));
  GPUPOOL_NVML_TRY(set(d, current, unsigned(d->ecc)));
  return set(d, pending, unsigned(d->ecc));
}

// Cards that could be divided say that they are not; the others can't be asked.
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMigMode(Handle d, unsigned* current, unsigned* pending) {
  GPUPOOL_NVML_TRY(check(d));
  const bool divisible = (d->cc_major == 8 && d->cc_minor == 0) || d->cc_major == 9 ||
                         (d->cc_major == 10 && d->cc_minor == 0);
  if (!divisible) return kNotSupported;
  GPUPOOL_NVML_TRY(set(d, current, 0u));
  return set(d, pending, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceIsMigDeviceHandle(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(Handle d, unsigned, Handle*) {
  GPUPOOL_NVML_TRY(check(d));
  return kNotFound;
}

// The call succeeds; each value says for itself that it is not there.
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetFieldValues(Handle d, int count, FieldValue* values) {
  GPUPOOL_NVML_TRY(check(d));
  if (count <= 0 || !values) return kInvalidArgument;
  for (int i = 0; i < count; ++i) values[i].status = kNotSupported;
  return kSuccess;
}
