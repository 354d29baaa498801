// The devices, from the machine's description and the state that its processes share.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "simgpu/nvml/nvml.h"

namespace gpupool::nvml {

nvmlReturn_t SimulatedDevice::memory(MemoryUse* use) {
  *use = {gpu.memory_bytes, std::min<uint64_t>(card->used_bytes(), gpu.memory_bytes)};
  return kSuccess;
}

nvmlReturn_t SimulatedDevice::processes(std::vector<Process>* list) {
  for (const auto& process : card->processes()) {
    list->push_back({unsigned(process.pid), process.used_bytes});
  }
  return kSuccess;
}

nvmlReturn_t SimulatedDevice::utilization(Utilization* percent) {
  const unsigned load = card->utilization_percent();
  *percent = {load, load / 2};
  return kSuccess;
}

nvmlReturn_t SimulatedDevice::process_utilization(std::vector<ProcessUse>* list) {
  for (const auto& process : card->processes()) {
    list->push_back({unsigned(process.pid), process.utilization_percent});
  }
  return kSuccess;
}

nvmlReturn_t start(Library& library) {
  if (!library.devices.empty()) return kSuccess;
  auto result = simgpu::load_machine(simgpu::library_directory(reinterpret_cast<void*>(&start)));
  std::string error = result.error;
  std::vector<std::unique_ptr<Device>> devices;
  if (result.machine) {
    for (const auto& gpu : result.machine->gpus) {
      auto device = std::make_unique<SimulatedDevice>();
      device->index = unsigned(devices.size());
      device->name = gpu.name;
      device->uuid = gpu.uuid_text();
      device->pci_domain = gpu.pci_domain;
      device->pci_bus = gpu.pci_bus;
      device->pci_device = gpu.pci_device;
      device->pci_device_id = gpu.pci_device_id;
      device->cc_major = gpu.model.cc_major;
      device->cc_minor = gpu.model.cc_minor;
      device->ecc = gpu.ecc;
      device->memory_bus_bits = gpu.memory_bus_bits;
      device->core_clock_mhz = gpu.model.clock_khz / 1000;
      device->memory_clock_mhz = gpu.memory_clock_khz / 1000;
      device->gpu = gpu;
      device->card = simgpu::CardState::open(simgpu::state_directory(), device->uuid,
                                             gpu.memory_bytes, &error);
      if (!device->card) break;
      devices.push_back(std::move(device));
    }
  }
  if (!error.empty()) {
    fprintf(stderr, "gpupool simulated GPU: %s\n", error.c_str());
    return kDriverNotLoaded;
  }
  library.driver_version = result.machine->driver_version;
  library.cuda_version = result.machine->cuda_version;
  library.devices = std::move(devices);
  return kSuccess;
}

std::optional<std::string> process_name(unsigned pid) { return command_of(pid); }

}  // namespace gpupool::nvml
