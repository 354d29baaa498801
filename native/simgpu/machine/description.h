// The simulated machine: which cards it has and what they can do, read from a TOML file that lies
// beside the driver (or that GPUPOOL_SIMGPU_MACHINE names). Used by the driver and by NVML alike.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "simgpu/exec/engine.h"

namespace gpupool::simgpu {

struct GpuDescription {
  std::string name;
  std::string serial;
  std::array<uint8_t, 16> uuid{};
  uint64_t memory_bytes = 0;
  uint64_t context_bytes = 0;  // what a context takes from the card by itself
  DeviceModel model;
  uint32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
  uint32_t pci_device_id = 0;  // vendor in the low half, as NVML gives it
  int numa_node = -1;
  uint32_t memory_clock_khz = 1593000;
  uint32_t memory_bus_bits = 5120;
  uint32_t l2_cache_bytes = 40u << 20;
  uint32_t power_limit_mw = 400000;
  uint32_t idle_power_mw = 45000;
  uint32_t idle_temperature_c = 32;
  bool ecc = true;

  std::string uuid_text() const;   // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  std::string pci_bus_id() const;  // "0000:01:00.0"
};

struct MachineDescription {
  std::string path;                        // the file that was read
  std::string driver_version = "580.0.0";  // as NVML says it
  int cuda_version = 13000;                // as cuDriverGetVersion says it
  uint64_t kernel_instruction_limit = 0;   // thread instructions of one launch; 0: none
  uint64_t kernel_time_limit_ms = 0;       // of one launch, while it has the card; 0: none
  // GPUPOOL_SIMGPU_EMPTY_KERNELS: kernels that come as machine code only do nothing; the cards'
  // names say so.
  bool empty_kernels = false;
  std::vector<GpuDescription> gpus;
};

struct MachineResult {
  std::optional<MachineDescription> machine;
  std::string error;  // one sentence that names the file and what is wrong; empty when it was read
};

// Reads the machine file. `beside` is the directory of the calling library.
MachineResult load_machine(const std::string& beside);

// The directory that holds the library in which `symbol` lies; empty when that can't be told.
std::string library_directory(const void* symbol);

// Where the processes of this machine share the state of its cards: GPUPOOL_SIMGPU_STATE_DIR or
// /dev/shm/gpupool-simgpu-shared.
std::string state_directory();

}  // namespace gpupool::simgpu
