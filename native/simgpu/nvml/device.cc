// What a device is and how it does. Temperature and power follow the simulated load.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "simgpu/nvml/nvml.h"

using namespace gpupool::nvml;

namespace {

SimulatedDevice& of(Handle device) { return *static_cast<SimulatedDevice*>(device); }

unsigned load(Handle device) { return of(device).card->utilization_percent(); }

unsigned temperature(Handle device) {
  return of(device).gpu.idle_temperature_c + load(device) * 4 / 10;
}

unsigned power(Handle device) {
  const unsigned idle = of(device).gpu.idle_power_mw;
  const unsigned busy = std::max(idle, of(device).gpu.power_limit_mw * 9 / 10);
  return idle + unsigned(uint64_t(busy - idle) * load(device) / 100);
}

unsigned clock_mhz(Handle device, unsigned type, bool most) {
  if (type == 2) return device->memory_clock_mhz;
  return most || load(device) ? device->core_clock_mhz : 210;  // idle cards clock down
}

}  // namespace

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMinorNumber(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, d->index);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetModuleId(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, d->index);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetSerial(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give(of(d).gpu.serial, out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetHandleBySerial(const char* serial, Handle* out) {
  GPUPOOL_NVML_TRY(ready());
  if (!serial || !out) return kInvalidArgument;
  for (const auto& device : library().devices) {
    if (of(device.get()).gpu.serial != serial) continue;
    *out = device.get();
    return kSuccess;
  }
  return kNotFound;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetVbiosVersion(Handle d, char* out, unsigned length) {
  GPUPOOL_NVML_TRY(check(d));
  return give("00.00.00.00.00", out, length);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBoardId(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, of(d).gpu.pci_bus << 8);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMultiGpuBoard(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBrand(Handle d, unsigned* out) { return set(d, out, 14u); }
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBusType(Handle d, unsigned* out) { return set(d, out, 2u); }

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNumGpuCores(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  const bool wide = of(d).gpu.model.cc_major == 8 && of(d).gpu.model.cc_minor == 6;
  return set(d, out, unsigned(of(d).gpu.model.multiprocessors) * (wide ? 128u : 64u));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNumaNodeId(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (of(d).gpu.numa_node < 0) return kNotSupported;
  return set(d, out, unsigned(of(d).gpu.numa_node));
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetAttributes_v2(Handle d, DeviceAttributes* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  *out = {};
  out->multiprocessors = unsigned(of(d).gpu.model.multiprocessors);
  out->copy_engines = 3;
  out->memory_mib = of(d).gpu.memory_bytes >> 20;
  return kSuccess;
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetAttributes(Handle d, DeviceAttributes* out) {
  return nvmlDeviceGetAttributes_v2(d, out);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(Handle d, Memory* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (!out) return kInvalidArgument;
  uint64_t total = 1;  // the next power of two, as cards with a large BAR have it
  while (total < of(d).gpu.memory_bytes) total <<= 1;
  *out = {total, total, 0};
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
  if (out->version != version_of<TemperatureV1>(1)) return kArgumentVersionMismatch;
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
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetNumFans(Handle d, unsigned* out) { return set(d, out, 0u); }

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerUsage(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, power(d));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementMode(Handle d, unsigned* out) {
  return set(d, out, 1u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementLimit(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, of(d).gpu.power_limit_mw);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, of(d).gpu.power_limit_mw);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, of(d).gpu.power_limit_mw);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(Handle d, unsigned* least,
                                                                       unsigned* most) {
  GPUPOOL_NVML_TRY(check(d));
  GPUPOOL_NVML_TRY(set(d, least, of(d).gpu.power_limit_mw / 4));
  return set(d, most, of(d).gpu.power_limit_mw);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPerformanceState(Handle d, unsigned* out) {
  return set(d, out, 0u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPowerState(Handle d, unsigned* out) {
  return set(d, out, 0u);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetClockInfo(Handle d, unsigned type, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (type > 3) return kInvalidArgument;
  return set(d, out, clock_mhz(d, type, false));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetApplicationsClock(Handle d, unsigned type, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (type > 3) return kInvalidArgument;
  return set(d, out, clock_mhz(d, type, true));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(Handle d, unsigned type,
                                                                unsigned* out) {
  return nvmlDeviceGetApplicationsClock(d, type, out);
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

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetPersistenceMode(Handle d, unsigned* out) {
  return set(d, out, 1u);
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetVirtualizationMode(Handle d, unsigned* out) {
  return set(d, out, 0u);
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetDefaultEccMode(Handle d, unsigned* out) {
  GPUPOOL_NVML_TRY(check(d));
  return set(d, out, unsigned(d->ecc));
}
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTotalEccErrors(Handle d, unsigned kind, unsigned counter,
                                                      unsigned long long* out) {
  GPUPOOL_NVML_TRY(check(d));
  if (kind > 1 || counter > 1 || !out) return kInvalidArgument;
  if (!d->ecc) return kNotSupported;
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
  if (of(d).gpu.model.cc_major < 8) return kNotSupported;
  for (unsigned* out : {corrected, uncorrected, pending, failure})
    GPUPOOL_NVML_TRY(set(d, out, 0u));
  return kSuccess;
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(Handle a, Handle b, unsigned* out) {
  GPUPOOL_NVML_TRY(check(a));
  GPUPOOL_NVML_TRY(check(b));
  // One host bridge per NUMA node, so far as the machine file tells.
  return set(a, out, a == b ? 0u : of(a).gpu.numa_node == of(b).gpu.numa_node ? 40u : 50u);
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
GPUPOOL_NVML nvmlReturn_t nvmlDeviceOnSameBoard(Handle a, Handle b, int* out) {
  GPUPOOL_NVML_TRY(check(b));
  return set(a, out, int(a == b));
}

GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetMemoryAffinity(Handle d, unsigned words,
                                                      unsigned long* nodes, unsigned) {
  GPUPOOL_NVML_TRY(check(d));
  if (!nodes || !words) return kInvalidArgument;
  if (of(d).gpu.numa_node < 0) return kNotSupported;
  memset(nodes, 0, words * sizeof *nodes);
  const unsigned node = unsigned(of(d).gpu.numa_node), bits = 8 * sizeof *nodes;
  if (node / bits >= words) return kInsufficientSize;
  nodes[node / bits] |= 1ul << node % bits;
  return kSuccess;
}
