#include "simgpu/exec/program.h"

#include <algorithm>

#include "simgpu/exec/strict.h"

namespace gpupool::simgpu {
namespace exec {

constexpr uint32_t kMaxLocalBytes = 512 * 1024;  // CUDA's limit for a thread's variables

EngineProgram::EngineProgram(std::shared_ptr<ptx::LinkedProgram> linked, const DeviceModel& device,
                             uint32_t max_registers)
    : linked_(std::move(linked)), device_(device), max_registers_(max_registers) {
  for (size_t k = 0; k < linked_->kernels().size(); ++k)
    kernels_.push_back(std::make_unique<Slot>());
}

int EngineProgram::kernel_index(std::string_view name) const {
  const auto& kernels = linked_->kernels();
  const uint32_t f = linked_->find_kernel(name);
  if (f == ptx::kNoIndex) return -1;
  const auto it = std::lower_bound(kernels.begin(), kernels.end(), f);  // in the order of functions
  return it == kernels.end() || *it != f ? -1 : static_cast<int>(it - kernels.begin());
}

int EngineProgram::kernel_count() const { return static_cast<int>(kernels_.size()); }

std::string EngineProgram::kernel_name(int index) const {
  if (index < 0 || index >= kernel_count()) return "";
  return linked_->function(linked_->kernels()[static_cast<size_t>(index)]).name;
}

void EngineProgram::decode(Slot& slot, uint32_t function) {
  auto code = std::make_unique<KernelCode>();
  code->program = linked_;
  code->function = function;
  code->strict = strict_mode();
  const std::optional<ptx::SharedLayout> shared = linked_->shared_layout(function, &slot.why);
  if (!shared) return;
  code->shared = *shared;
  code->entry = decode_function(*code, function, &slot.why);
  if (!code->entry) return;
  if (code->entry->local_bytes > kMaxLocalBytes) {
    slot.why = "its local memory of " + std::to_string(code->entry->local_bytes) +
               " bytes is more than the " + std::to_string(kMaxLocalBytes) + " of a thread";
    return;
  }
  const ptx::Function& f = linked_->function(function);
  KernelInfo& info = slot.info;
  info.name = f.name;
  for (const ptx::Parameter& p : f.parameters)
    info.parameters.push_back({p.offset, static_cast<uint32_t>(p.bytes), p.alignment});
  info.parameter_bytes = f.parameter_bytes;
  info.static_shared_bytes = shared->static_bytes;
  info.local_bytes = code->entry->local_bytes;
  info.constant_bytes = static_cast<uint32_t>(linked_->constant_bytes());
  uint32_t most = 1;
  for (int k = 0; k < 3; ++k) {
    info.required_block[k] = f.required_block[k];
    const uint32_t n = f.required_block[k] ? f.required_block[k] : f.max_block[k];
    most *= n ? n : 1;
  }
  info.max_threads_per_block = f.required_block[0] || f.max_block[0]
                                   ? most
                                   : static_cast<uint32_t>(device_.max_threads_per_block);
  uint32_t registers = f.max_registers ? f.max_registers : 255;
  if (max_registers_) registers = std::min(registers, std::max(16u, max_registers_));
  if (f.required_block[0] || f.max_block[0]) {
    // What a kernel declares must be able to run: the compiler keeps to fewer registers for it.
    const uint32_t lanes = std::max(1u, (most + 31) / 32 * 32) * std::max(1u, f.min_blocks);
    registers = std::min(registers, std::max(16u, device_.registers_per_sm / lanes / 8 * 8));
  }
  info.registers = std::clamp<uint32_t>(code->entry->live_words, 1, registers);
  info.ptx_version = f.unit >= 0 ? linked_->unit(f.unit).target : 0;
  info.binary_version = device_.cc_major * 10 + device_.cc_minor;
  for (uint32_t reached : linked_->reachable(function, nullptr)) {
    const ptx::Builtin builtin = linked_->function(reached).builtin;
    info.prints |= builtin == ptx::Builtin::kVprintf;
    info.allocates |= builtin == ptx::Builtin::kMalloc || builtin == ptx::Builtin::kFree;
  }
  slot.code = std::move(code);
}

const KernelInfo* EngineProgram::kernel(int index, std::string* why) {
  if (index < 0 || index >= kernel_count()) {
    if (why) *why = "no such kernel";
    return nullptr;
  }
  Slot& slot = *kernels_[static_cast<size_t>(index)];
  std::lock_guard lock(slot.mutex);
  if (!slot.decoded) {
    slot.decoded = true;
    decode(slot, linked_->kernels()[static_cast<size_t>(index)]);
  }
  if (!slot.code) {
    if (why) *why = slot.why;
    return nullptr;
  }
  return &slot.info;
}

KernelCode* EngineProgram::code(int index) {
  return kernels_[static_cast<size_t>(index)]->code.get();
}

std::optional<GlobalInfo> EngineProgram::global(std::string_view name) const {
  return linked_->global(name);
}
std::vector<std::string> EngineProgram::global_names() const { return linked_->global_names(); }

}  // namespace exec

LoadResult load_program(const std::vector<SourceText>& sources, const DeviceModel& device,
                        std::shared_ptr<MemorySpace> memory) {
  ptx::LinkResult linked = ptx::LinkedProgram::link(sources, device, memory);
  LoadResult r;
  r.status = linked.status;
  r.log = std::move(linked.log);
  uint32_t max_registers = 0;
  for (const SourceText& s : sources) {
    if (s.max_registers && (!max_registers || s.max_registers < max_registers))
      max_registers = s.max_registers;
  }
  if (linked.program)
    r.program =
        std::make_shared<exec::EngineProgram>(std::move(linked.program), device, max_registers);
  return r;
}

LoadStatus check_link(const std::vector<SourceText>& sources, const DeviceModel& device,
                      std::string* log) {
  ptx::LinkResult linked = ptx::LinkedProgram::link(sources, device, nullptr);
  if (log) *log = std::move(linked.log);
  return linked.status;
}

}  // namespace gpupool::simgpu
