// The engine's Program: a linked program with the decoded kernels.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simgpu/exec/code.h"
#include "simgpu/exec/engine.h"
#include "simgpu/ptx/program.h"

namespace gpupool::simgpu::exec {

class EngineProgram : public Program {
 public:
  EngineProgram(std::shared_ptr<ptx::LinkedProgram> linked, const DeviceModel& device,
                uint32_t max_registers = 0);

  int kernel_index(std::string_view name) const override;
  int kernel_count() const override;
  std::string kernel_name(int index) const override;
  const KernelInfo* kernel(int index, std::string* why) override;
  std::optional<GlobalInfo> global(std::string_view name) const override;
  std::vector<std::string> global_names() const override;

  KernelCode* code(int index);  // after kernel() succeeded

 private:
  struct Slot {
    std::mutex mutex;
    bool decoded = false;
    std::string why;
    std::unique_ptr<KernelCode> code;
    KernelInfo info;
  };
  void decode(Slot& slot, uint32_t function);

  std::shared_ptr<ptx::LinkedProgram> linked_;
  DeviceModel device_;
  uint32_t max_registers_;  // 0: no limit
  std::vector<std::unique_ptr<Slot>> kernels_;
};

}  // namespace gpupool::simgpu::exec
