#include "simgpu/driver/module.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace gpupool::simgpu {
namespace {

// Memory for a program that is only asked for names.
class PlainMemory : public MemorySpace {
 public:
  ~PlainMemory() override {
    for (const auto& [address, end] : blocks_) free(reinterpret_cast<void*>(address));
  }
  std::optional<MemoryRange> find(uint64_t) const override { return std::nullopt; }
  uint64_t generation() const override { return 1; }
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override {
    alignment = std::max<uint64_t>(alignment, 16);
    void* at = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!at) return 0;
    memset(at, 0, bytes);
    std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<uint64_t>(at)] = bytes;
    return reinterpret_cast<uint64_t>(at);
  }
  void release(uint64_t address) override {
    std::lock_guard lock(mutex_);
    if (blocks_.erase(address)) free(reinterpret_cast<void*>(address));
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> blocks_;
};

std::string name_of(Program& program, int index) {
  std::string name = program.kernel_name(index);
  if (!name.empty()) return name;
  std::string why;
  const KernelInfo* info = program.kernel(index, &why);
  return info ? info->name : "";
}

int capability(const DeviceModel& model) { return 10 * model.cc_major + model.cc_minor; }

template <class T>
HandleTable<T>& table() {
  static auto& instance = *new HandleTable<T>;
  return instance;
}

void apply_attributes(Kernel& kernel, Function& function) {
  std::lock_guard lock(kernel.mutex);
  auto set = kernel.attributes.find(function.context->device->ordinal);
  if (set == kernel.attributes.end()) return;
  for (auto [attribute, value] : set->second) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
      function.max_dynamic_shared = value;
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) function.carveout = value;
  }
}

}  // namespace

HandleTable<Module>& modules() { return table<Module>(); }
HandleTable<Function>& functions() { return table<Function>(); }
HandleTable<Library>& libraries() { return table<Library>(); }
HandleTable<Kernel>& kernel_handles() { return table<Kernel>(); }

void say_refused(const std::string& kernel, const std::string& why) {
  std::string line = "gpupool simulated GPU: kernel " + ptx::readable_name(kernel) +
                     " can't be executed: " + why + "\n";
  ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
  (void)ignored;
}

CUresult Function::info(const KernelInfo** info) {
  std::string why;
  *info = program->kernel(index, &why);
  if (*info) return CUDA_SUCCESS;
  if (!said_.exchange(true)) say_refused(name, why);
  return CUDA_ERROR_NOT_SUPPORTED;
}

int Function::dynamic_limit(const KernelInfo& info) const {
  int set = max_dynamic_shared;
  if (set >= 0) return set;
  const int without_opt_in = int(context->device->gpu.model.shared_per_block);
  return std::max(0, without_opt_in - int(info.static_shared_bytes));
}

std::shared_ptr<Function> Module::function(int index) {
  std::lock_guard lock(mutex_);
  auto& slot = functions_[index];
  if (!slot) {
    slot = std::make_shared<Function>();
    slot->context = context;
    slot->module = this;
    slot->program = program;
    slot->index = index;
    slot->name = name_of(*program, index);
    functions().add<void*>(slot);
  }
  return slot;
}

std::shared_ptr<Function> Module::function(const std::string& name) {
  int index = program->kernel_index(name);
  return index < 0 ? nullptr : function(index);
}

void Module::forget_functions() {
  std::lock_guard lock(mutex_);
  for (auto& [index, function] : functions_) functions().take(function.get());
  functions_.clear();
}

std::shared_ptr<Function> Kernel::function(Context* context, CUresult* status) {
  auto module = library->instance(context, status);
  if (!module) return nullptr;
  auto found = module->function(name);
  if (!found) {
    *status = CUDA_ERROR_NOT_FOUND;
    return nullptr;
  }
  apply_attributes(*this, *found);
  return found;
}

std::shared_ptr<Module> Library::instance_or_null(Context* context) {
  std::lock_guard lock(mutex_);
  auto at = instances_.find(context);
  return at == instances_.end() ? nullptr : at->second;
}

std::shared_ptr<Module> Library::instance(Context* context, CUresult* status, std::string* log) {
  *status = CUDA_SUCCESS;
  if (auto found = instance_or_null(context)) return found;
  auto texts = sources.find(capability(context->device->gpu.model));
  if (texts == sources.end()) {
    *status = CUDA_ERROR_NO_BINARY_FOR_GPU;
    return nullptr;
  }
  std::shared_ptr<Program> program;
  *status = load(texts->second, context->device->gpu.model, context->memory, &program, log);
  if (*status != CUDA_SUCCESS) return nullptr;
  auto module = std::make_shared<Module>(context, std::move(program), this);
  std::lock_guard lock(mutex_);
  auto [at, added] = instances_.emplace(context, module);
  if (added) modules().add<void*>(module);
  return at->second;
}

std::shared_ptr<Module> Library::drop(Context* context) {
  std::lock_guard lock(mutex_);
  auto at = instances_.find(context);
  if (at == instances_.end()) return nullptr;
  auto module = std::move(at->second);
  instances_.erase(at);
  return module;
}

std::vector<std::shared_ptr<Kernel>> Library::kernels(CUresult* status) {
  std::vector<std::shared_ptr<Kernel>> list;
  auto program = any_program(status);
  if (!program) return list;
  for (int i = 0; i < program->kernel_count(); ++i) list.push_back(kernel(name_of(*program, i)));
  return list;
}

std::vector<std::shared_ptr<Module>> Library::drop_all() {
  std::vector<std::shared_ptr<Module>> all;
  std::lock_guard lock(mutex_);
  for (auto& [context, module] : instances_) all.push_back(std::move(module));
  instances_.clear();
  for (auto& [name, kernel] : kernels_) kernel_handles().take(kernel.get());
  kernels_.clear();
  return all;
}

std::shared_ptr<Program> Library::any_program(CUresult* status) {
  *status = CUDA_SUCCESS;
  Context* context = current_or_null();
  if (context && context->active) {
    auto module = instance(context, status);
    return module ? module->program : nullptr;
  }
  {
    std::lock_guard lock(mutex_);
    if (!instances_.empty()) return instances_.begin()->second->program;
    if (contextless_) return contextless_;
  }
  for (const auto& device : driver().devices) {
    auto texts = sources.find(capability(device->gpu.model));
    if (texts == sources.end()) continue;
    std::shared_ptr<Program> program;
    *status =
        load(texts->second, device->gpu.model, std::make_shared<PlainMemory>(), &program, nullptr);
    if (*status != CUDA_SUCCESS) return nullptr;
    std::lock_guard lock(mutex_);
    if (!contextless_) contextless_ = std::move(program);
    return contextless_;
  }
  *status = CUDA_ERROR_NO_BINARY_FOR_GPU;
  return nullptr;
}

std::shared_ptr<Kernel> Library::kernel(const std::string& name) {
  std::lock_guard lock(mutex_);
  auto& slot = kernels_[name];
  if (!slot) {
    slot = std::make_shared<Kernel>();
    slot->library = this;
    slot->name = name;
    kernel_handles().add<void*>(slot);
  }
  return slot;
}

void unload_modules(Context* context) {
  libraries().for_each([&](Library& library) { library.drop(context); });
  auto ended = modules().take_if([&](Module& module) { return module.context == context; });
  for (auto& module : ended) module->forget_functions();
}

CUresult find_function(CUfunction handle, Context* context, std::shared_ptr<Function>* function) {
  if (!handle) return CUDA_ERROR_INVALID_HANDLE;
  *function = functions().get(handle);
  if (*function) return CUDA_SUCCESS;
  auto kernel = kernel_handles().get(handle);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = CUDA_SUCCESS;
  *function = kernel->function(context, &status);
  return status;
}

}  // namespace gpupool::simgpu
