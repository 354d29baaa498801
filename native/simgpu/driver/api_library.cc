// Libraries: programs without a context, whose kernels come to life in each context that uses them.
#include "simgpu/driver/function.h"

using namespace gpupool::simgpu;

namespace {

CUresult find_library(CUlibrary handle, std::shared_ptr<Library>* library) {
  GPUPOOL_TRY(driver_status());
  *library = libraries().get(handle);
  return *library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult find_kernel(CUkernel handle, std::shared_ptr<Kernel>* kernel) {
  GPUPOOL_TRY(driver_status());
  *kernel = kernel_handles().get(handle);
  return *kernel ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult load_library(CUlibrary* out, const void* image, JitOptions& options) {
  GPUPOOL_TRY(driver_status());
  if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
  auto library = std::make_shared<Library>();
  CUresult status = CUDA_ERROR_NO_BINARY_FOR_GPU;
  for (const auto& device : driver().devices) {
    const DeviceModel& model = device->gpu.model;
    const int capability = 10 * model.cc_major + model.cc_minor;
    if (library->sources.count(capability)) continue;
    std::vector<SourceText> sources;
    CUresult read = read_image(image, model, options, &sources);
    if (read == CUDA_SUCCESS) {
      library->sources[capability] = std::move(sources);
      status = CUDA_SUCCESS;
    } else if (status != CUDA_SUCCESS) {
      status = read;
    }
  }
  GPUPOOL_TRY(status);
  // With a context at hand, what is wrong with the program is told now.
  if (Context* context = current_or_null(); context && context->active) {
    std::string log;
    library->instance(context, &status, &log);
    options.write("", status == CUDA_SUCCESS ? "" : log);
    GPUPOOL_TRY(status);
  }
  *out = libraries().add<CUlibrary>(std::move(library));
  return CUDA_SUCCESS;
}

// The kernel's program and index, to ask for its properties; no context is needed.
CUresult kernel_info(Kernel& kernel, const KernelInfo** info, std::shared_ptr<Program>* program) {
  CUresult status;
  *program = kernel.library->any_program(&status);
  if (!*program) return status;
  int index = (*program)->kernel_index(kernel.name);
  if (index < 0) return CUDA_ERROR_NOT_FOUND;
  std::string why;
  *info = (*program)->kernel(index, &why);
  if (*info) return CUDA_SUCCESS;
  if (!kernel.said_refused.exchange(true)) say_refused(kernel.name, why);
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

GPUPOOL_API cuLibraryLoadData(CUlibrary* out, const void* code, CUjit_option* options,
                              void** values, unsigned int count, CUlibraryOption*, void**,
                              unsigned int) {
  JitOptions jit;
  GPUPOOL_TRY(jit.read(count, options, values));
  return load_library(out, code, jit);
}

GPUPOOL_API cuLibraryLoadFromFile(CUlibrary* out, const char* path, CUjit_option* options,
                                  void** values, unsigned int count, CUlibraryOption*, void**,
                                  unsigned int) {
  GPUPOOL_TRY(driver_status());
  std::vector<char> bytes;
  GPUPOOL_TRY(read_file(path, &bytes));
  JitOptions jit;
  GPUPOOL_TRY(jit.read(count, options, values));
  return load_library(out, bytes.data(), jit);
}

GPUPOOL_API cuLibraryUnload(CUlibrary handle) {
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  libraries().take(handle);
  for (auto& module : library->drop_all()) {
    module->context->wait_idle();
    module->context->flush_output();
    modules().take(module.get());
    module->forget_functions();
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryGetKernel(CUkernel* out, CUlibrary handle, const char* name) {
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
  CUresult status;
  auto program = library->any_program(&status);
  if (!program) return status;
  if (program->kernel_index(name) < 0) return CUDA_ERROR_NOT_FOUND;
  *out = reinterpret_cast<CUkernel>(library->kernel(name).get());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryGetKernelCount(unsigned int* count, CUlibrary handle) {
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  CUresult status;
  auto program = library->any_program(&status);
  if (!program) return status;
  *count = unsigned(program->kernel_count());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryEnumerateKernels(CUkernel* out, unsigned int count, CUlibrary handle) {
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  CUresult status;
  auto list = library->kernels(&status);
  GPUPOOL_TRY(status);
  for (size_t i = 0; i < list.size() && i < count; ++i) {
    out[i] = reinterpret_cast<CUkernel>(list[i].get());
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryGetModule(CUmodule* out, CUlibrary handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  CUresult status;
  auto module = library->instance(context, &status);
  if (!module) return status;
  *out = reinterpret_cast<CUmodule>(module.get());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary handle,
                               const char* name) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  CUresult status;
  auto module = library->instance(context, &status);
  if (!module) return status;
  auto global = module->program->global(name);
  if (!global) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = global->address;
  if (bytes) *bytes = global->bytes;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary handle,
                                const char* name) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Library> library;
  GPUPOOL_TRY(find_library(handle, &library));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  CUresult status;
  auto module = library->instance(context, &status);
  if (!module) return status;
  auto global = module->program->global(name);
  if (!global || !global->managed) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = global->address;
  if (bytes) *bytes = global->bytes;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelGetFunction(CUfunction* out, CUkernel handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = CUDA_SUCCESS;
  auto function = kernel->function(context, &status);
  if (!function) return status;
  *out = reinterpret_cast<CUfunction>(function.get());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelGetLibrary(CUlibrary* out, CUkernel handle) {
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUlibrary>(kernel->library);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelGetName(const char** name, CUkernel handle) {
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = kernel->name.c_str();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* size) {
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  const KernelInfo* info;
  std::shared_ptr<Program> program;
  GPUPOOL_TRY(kernel_info(*kernel, &info, &program));
  return parameter_info(*info, index, offset, size);
}

GPUPOOL_API cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle,
                                 CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  const KernelInfo* info;
  std::shared_ptr<Program> program;
  GPUPOOL_TRY(kernel_info(*kernel, &info, &program));
  int dynamic = -1, carveout = -1;
  {
    std::lock_guard lock(kernel->mutex);
    auto set = kernel->attributes.find(dev);
    if (set != kernel->attributes.end()) {
      auto find = [&](int id) {
        auto at = set->second.find(id);
        return at == set->second.end() ? -1 : at->second;
      };
      dynamic = find(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
      carveout = find(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
    }
  }
  return function_attribute(value, int(attribute), *info, device->gpu.model, dynamic, carveout);
}

GPUPOOL_API cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle,
                                 CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  const KernelInfo* info;
  std::shared_ptr<Program> program;
  GPUPOOL_TRY(kernel_info(*kernel, &info, &program));
  GPUPOOL_TRY(check_function_attribute(int(attribute), value, *info, device->gpu.model));
  std::lock_guard lock(kernel->mutex);
  kernel->attributes[dev][int(attribute)] = value;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache config, CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  std::shared_ptr<Kernel> kernel;
  GPUPOOL_TRY(find_kernel(handle, &kernel));
  return unsigned(config) <= 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
