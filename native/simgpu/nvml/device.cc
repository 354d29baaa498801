// What a device is and how it does. Temperature and power follow the simulated load.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "simgpu/nvml/nvml.h"

using namespace gpupool::nvml;

namespace {

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

nvmlReturn_t refuse(Handle device) {
  GPUPOOL_NVML_TRY(check(device));
  return kNotSupported;
}

unsigned load(Handle device) { return device->card->utilization_percent(); }

unsigned temperature(Handle device) {
  return device->gpu.idle_temperature_c + load(device) * 4 / 10;
}

unsigned power(Handle device) {
  return device->gpu.idle_power_mw +
         unsigned(
             uint64_t(device->gpu.power_limit_mw * 9 / 10 -
                      std::min(device->gpu.idle_power_mw, device->gpu.power_limit_mw * 9 / 10)) *
             load(device) / 100);
}

unsigned memory_mhz(Handle device) { return device->gpu.memory_clock_khz / 1000; }
unsigned core_mhz(Handle device) { return device->gpu.model.clock_khz / 1000; }

unsigned clock_mhz(Handle device, unsigned type, bool most) {
  if (type == 2) return memory_mhz(device);
  return most || load(device) ? core_mhz(device) : 210;  // idle cards clock down
}

uint64_t used_bytes(Handle device) {
  return std::min<uint64_t>(device->card->used_bytes(), device->gpu.memory_bytes);
}

template <class Info, class Fill>
nvmlReturn_t processes(Handle device, unsigned* count, Info* out, Fill fill) {
  GPUPOOL_NVML_TRY(check(device));
  if (!count) return kInvalidArgument;
  auto list = device->card->processes();
  const unsigned room = *count;
  *count = unsigned(list.size());
  if (list.empty()) return kSuccess;
  if (list.size() > room || !out) return kInsufficientSize;
  for (size_t i = 0; i < list.size(); ++i) fill(out[i], list[i]);
  return kSuccess;
}

void fill_v1(ProcessInfoV1& out, const gpupool::simgpu::CardProcess& process) {
  out = {unsigned(process.pid), process.used_bytes};
}
void fill_v2(ProcessInfoV2& out, const gpupool::simgpu::CardProcess& process) {
  out = {unsigned(process.pid), process.used_bytes, 0xFFFFFFFF, 0xFFFFFFFF};
}

nvmlReturn_t none(Handle device, unsigned* count) { return set(device, count, 0); }

}  // namespace

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetIndex(Handle d, unsigned* out) {
  return set(d, out, d ? d->index : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMinorNumber(Handle d, unsigned* out) {
  return set(d, out, d ? d->index : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetModuleId(Handle d, unsigned* out) {
  return set(d, out, d ? d->index : 0);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetName(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give(d->gpu.name, out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetUUID(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give(d->gpu.uuid_text(), out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetSerial(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give(d->gpu.serial, out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetVbiosVersion(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give("00.00.00.00.00", out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBoardPartNumber(Handle d, char*, unsigned) {
  return refuse(d);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetInforomImageVersion(Handle d, char*, unsigned) {
  return refuse(d);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBoardId(Handle d, unsigned* out) {
  return set(d, out, d ? d->gpu.pci_bus << 8 : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMultiGpuBoard(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBrand(Handle d, unsigned* out) { return set(d, out, 14u); }
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBusType(Handle d, unsigned* out) { return set(d, out, 2u); }

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetArchitecture(Handle d, unsigned* out) {
  return set(d, out, d && d->gpu.model.cc_major == 7 ? 6u : 7u);  // Turing, Ampere
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCudaComputeCapability(Handle d, int* major, int* minor) {
  GPUPOOL_NVML_TRY(check(d));
  if (!major || !minor) return kInvalidArgument;
  *major = d->gpu.model.cc_major;
  *minor = d->gpu.model.cc_minor;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNumGpuCores(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  const bool wide = d->gpu.model.cc_major == 8 && d->gpu.model.cc_minor == 6;
  return set(d, out, unsigned(d->gpu.model.multiprocessors) * (wide ? 128u : 64u));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryBusWidth(Handle d, unsigned* out) {
  return set(d, out, d ? d->gpu.memory_bus_bits : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNumaNodeId(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (d->gpu.numa_node < 0) return kNotSupported;
  return set(d, out, unsigned(d->gpu.numa_node));
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetAttributes_v2(Handle d, DeviceAttributes* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = {};
  out->multiprocessors = unsigned(d->gpu.model.multiprocessors);
  out->copy_engines = 3;
  out->memory_mib = d->gpu.memory_bytes >> 20;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetAttributes(Handle d, DeviceAttributes* out) {
  return nvmlDeviceGetAttributes_v2(d, out);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPciInfo_v3(Handle d, PciInfoV3* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = {};
  const auto& gpu = d->gpu;
  snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", gpu.pci_domain, gpu.pci_bus,
           gpu.pci_device);
  snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0",
           gpu.pci_domain & 0xFFFF, gpu.pci_bus & 0xFF, gpu.pci_device & 0x1F);
  out->domain = gpu.pci_domain;
  out->bus = gpu.pci_bus;
  out->device = gpu.pci_device;
  out->pci_device_id = gpu.pci_device_id;
  out->pci_subsystem_id = gpu.pci_device_id;
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
  const uint64_t used = used_bytes(d);
  *out = {d->gpu.memory_bytes, d->gpu.memory_bytes - used, used};
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(Handle d, MemoryV2* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  if (out->version != (sizeof(MemoryV2) | 2u << 24)) return kArgumentVersionMismatch;
  const uint64_t used = used_bytes(d);
  out->total = d->gpu.memory_bytes;
  out->reserved = 0;
  out->free = d->gpu.memory_bytes - used;
  out->used = used;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(Handle d, Memory* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  uint64_t total = 1;  // the next power of two, as cards with a large BAR have it
  while (total < d->gpu.memory_bytes) total <<= 1;
  *out = {total, total, 0};
  return kSuccess;
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetUtilizationRates(Handle d, Utilization* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = {load(d), load(d) / 2};
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetEncoderUtilization(Handle d, unsigned* out,
                                                          unsigned* period) {
  GPUPOOL_NVML_TRY(set(d, out, 0u));
  return set(d, period, 166667u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDecoderUtilization(Handle d, unsigned* out,
                                                          unsigned* period) {
  GPUPOOL_NVML_TRY(set(d, out, 0u));
  return set(d, period, 166667u);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTemperature(Handle d, unsigned sensor, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (sensor != 0) return kInvalidArgument;
  return set(d, out, temperature(d));
}
struct TemperatureV1 {
  unsigned version, sensor;
  int celsius;
};
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTemperatureV(Handle d, TemperatureV1* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out || out->sensor != 0) return kInvalidArgument;
  if (out->version != (sizeof(TemperatureV1) | 1u << 24)) return kArgumentVersionMismatch;
  out->celsius = int(temperature(d));
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTemperatureThreshold(Handle d, unsigned kind,
                                                            unsigned* out) {
  static constexpr unsigned kLimits[] = {92, 89, 95, 85};  // shutdown, slowdown, memory, GPU
  GPUPOOL_NVML_TRY(check(d));
  if (kind >= 8) return kInvalidArgument;
  if (kind >= 4) return kNotSupported;
  return set(d, out, kLimits[kind]);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetFanSpeed(Handle d, unsigned*) {
  return refuse(d);
}  // no fan
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetFanSpeed_v2(Handle d, unsigned, unsigned*) {
  return refuse(d);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNumFans(Handle d, unsigned* out) { return set(d, out, 0u); }

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerUsage(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, power(d));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementMode(Handle d, unsigned* out) {
  return set(d, out, 1u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementLimit(Handle d, unsigned* out) {
  return set(d, out, d ? d->gpu.power_limit_mw : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(Handle d, unsigned* out) {
  return set(d, out, d ? d->gpu.power_limit_mw : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(Handle d, unsigned* out) {
  return set(d, out, d ? d->gpu.power_limit_mw : 0);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(Handle d, unsigned* least,
                                                                       unsigned* most) {
  GPUPOOL_NVML_TRY(check(d));
  GPUPOOL_NVML_TRY(set(d, least, d->gpu.power_limit_mw / 4));
  return set(d, most, d->gpu.power_limit_mw);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPerformanceState(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerState(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(Handle d, unsigned long long*) {
  return refuse(d);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetClockInfo(Handle d, unsigned type, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (type > 3) return kInvalidArgument;
  return set(d, out, clock_mhz(d, type, false));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMaxClockInfo(Handle d, unsigned type, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (type > 3) return kInvalidArgument;
  return set(d, out, clock_mhz(d, type, true));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetApplicationsClock(Handle d, unsigned type, unsigned* out) {
  return nvmlDeviceGetMaxClockInfo(d, type, out);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(Handle d, unsigned type,
                                                                unsigned* out) {
  return nvmlDeviceGetMaxClockInfo(d, type, out);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetClock(Handle d, unsigned type, unsigned id, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (type > 3 || id > 3) return kInvalidArgument;
  return set(d, out, clock_mhz(d, type, id != 0));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(Handle d,
                                                                    unsigned long long* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = load(d) ? 0 : 1;  // idle
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(Handle d,
                                                                 unsigned long long* out) {
  return nvmlDeviceGetCurrentClocksThrottleReasons(d, out);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(Handle d,
                                                                      unsigned long long* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = 1;
  return kSuccess;
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(Handle d, unsigned* out) {
  return set(d, out, 4u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(Handle d, unsigned* out) {
  return set(d, out, 4u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetGpuMaxPcieLinkGeneration(Handle d, unsigned* out) {
  return set(d, out, 4u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(Handle d, unsigned* out) {
  return set(d, out, 16u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(Handle d, unsigned* out) {
  return set(d, out, 16u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPcieThroughput(Handle d, unsigned counter, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (counter > 1) return kInvalidArgument;
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPcieReplayCounter(Handle d, unsigned* out) {
  return set(d, out, 0u);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetComputeMode(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPersistenceMode(Handle d, unsigned* out) {
  return set(d, out, 1u);
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
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetVirtualizationMode(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDriverModel(Handle d, unsigned*, unsigned*) {
  return refuse(d);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetEccMode(Handle d, unsigned* current, unsigned* pending) {
  GPUPOOL_NVML_TRY(check(d));
  GPUPOOL_NVML_TRY(set(d, current, unsigned(d->gpu.ecc)));
  return set(d, pending, unsigned(d->gpu.ecc));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDefaultEccMode(Handle d, unsigned* out) {
  return set(d, out, unsigned(d && d->gpu.ecc));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTotalEccErrors(Handle d, unsigned kind, unsigned counter,
                                                      unsigned long long* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (kind > 1 || counter > 1 || !out) return kInvalidArgument;
  if (!d->gpu.ecc) return kNotSupported;
  *out = 0;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(Handle d, unsigned kind, unsigned counter,
                                                          unsigned, unsigned long long* out) {
  return nvmlDeviceGetTotalEccErrors(d, kind, counter, out);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetRemappedRows(Handle d, unsigned* corrected,
                                                    unsigned* uncorrected, unsigned* pending,
                                                    unsigned* failure) {
  GPUPOOL_NVML_TRY(check(d));
  if (d->gpu.model.cc_major < 8) return kNotSupported;
  for (unsigned* out : {corrected, uncorrected, pending, failure})
    GPUPOOL_NVML_TRY(set(d, out, 0u));
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(Handle d, unsigned*) {
  return refuse(d);
}

// Cards that can be divided say that they are not; the others can't be asked.
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMigMode(Handle d, unsigned* current, unsigned* pending) {
  GPUPOOL_NVML_TRY(check(d));
  if (d->gpu.model.cc_major != 8 || d->gpu.model.cc_minor != 0) return kNotSupported;
  GPUPOOL_NVML_TRY(set(d, current, 0u));
  return set(d, pending, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceSetMigMode(Handle d, unsigned, nvmlReturn_t*) {
  return refuse(d);
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
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetGpuInstanceId(Handle d, unsigned*) { return refuse(d); }
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetComputeInstanceId(Handle d, unsigned*) { return refuse(d); }

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

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(Handle a, Handle b, unsigned* out) {
  GPUPOOL_NVML_TRY(check(a));
  GPUPOOL_NVML_TRY(check(b));
  // One host bridge per NUMA node, so far as the machine file tells.
  return set(a, out, a == b ? 0u : a->gpu.numa_node == b->gpu.numa_node ? 40u : 50u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(Handle d, unsigned level,
                                                           unsigned* count, Handle* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!count) return kInvalidArgument;
  std::vector<Handle> found;
  for (const auto& other : library().devices) {
    unsigned distance = 0;
    nvmlDeviceGetTopologyCommonAncestor(d, other.get(), &distance);
    if (other.get() != d && distance == level) found.push_back(other.get());
  }
  const unsigned room = *count;
  *count = unsigned(found.size());
  if (!out) return kSuccess;
  for (size_t i = 0; i < found.size() && i < room; ++i) out[i] = found[i];
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetP2PStatus(Handle a, Handle b, unsigned index,
                                                 unsigned* out) {
  GPUPOOL_NVML_TRY(check(a));
  GPUPOOL_NVML_TRY(check(b));
  if (index > 5) return kInvalidArgument;
  return set(a, out, index == 2 ? 5u : 0u);  // over PCI, not over NVLink
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNvLinkState(Handle d, unsigned, unsigned*) {
  return refuse(d);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceOnSameBoard(Handle a, Handle b, int* out) {
  GPUPOOL_NVML_TRY(check(b));
  return set(a, out, int(a == b));
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryAffinity(Handle d, unsigned words,
                                                      unsigned long* nodes, unsigned) {
  GPUPOOL_NVML_TRY(check(d));
  if (!nodes || !words) return kInvalidArgument;
  if (d->gpu.numa_node < 0) return kNotSupported;
  memset(nodes, 0, words * sizeof *nodes);
  const unsigned node = unsigned(d->gpu.numa_node), bits = 8 * sizeof *nodes;
  if (node / bits >= words) return kInsufficientSize;
  nodes[node / bits] |= 1ul << node % bits;
  return kSuccess;
}
