// The simulated machine behind NVML's functions.
#pragma once

#include <memory>

#include "nvml/library.h"
#include "simgpu/machine/card_state.h"
#include "simgpu/machine/description.h"

namespace gpupool::nvml {

struct SimulatedDevice final : Device {
  nvmlReturn_t memory(MemoryUse* use) override;
  nvmlReturn_t processes(std::vector<Process>* list) override;
  nvmlReturn_t utilization(Utilization* percent) override;
  nvmlReturn_t process_utilization(std::vector<ProcessUse>* list) override;

  simgpu::GpuDescription gpu;
  std::unique_ptr<simgpu::CardState> card;
};

}  // namespace gpupool::nvml
