// Modules, and the functions and variables in them.
#include <stdlib.h>
#include <string.h>

#include "simgpu/driver/module.h"

using namespace gpupool::simgpu;

namespace {

CUresult load_module(CUmodule* out, const void* image, JitOptions& options) {
  GPUPOOL_CURRENT(context);
  if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
  std::vector<SourceText> sources;
  GPUPOOL_TRY(read_image(image, context->device->gpu.model, options, &sources));
  std::shared_ptr<Program> program;
  std::string log;
  CUresult status = load(sources, context->device->gpu.model, context->memory, &program, &log);
  options.write("", status == CUDA_SUCCESS ? "" : log);
  if (status != CUDA_SUCCESS) return status;
  *out = modules().add<CUmodule>(std::make_shared<Module>(context, std::move(program), nullptr));
  context->flush_output();
  return CUDA_SUCCESS;
}

CUresult find_module(CUmodule handle, std::shared_ptr<Module>* module) {
  GPUPOOL_CURRENT(context);
  *module = modules().get(handle);
  return *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

GPUPOOL_API cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  GPUPOOL_TRY(driver_status());
  if (!mode) return CUDA_ERROR_INVALID_VALUE;
  const char* wanted = getenv("CUDA_MODULE_LOADING");
  *mode = wanted && !strcmp(wanted, "EAGER") ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleLoadData(CUmodule* out, const void* image) {
  JitOptions none;
  return load_module(out, image, none);
}

GPUPOOL_API cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned int count,
                               CUjit_option* options, void** values) {
  JitOptions jit;
  GPUPOOL_TRY(jit.read(count, options, values));
  return load_module(out, image, jit);
}

GPUPOOL_API cuModuleLoadFatBinary(CUmodule* out, const void* image) {
  return cuModuleLoadData(out, image);
}

GPUPOOL_API cuModuleLoad(CUmodule* out, const char* path) {
  GPUPOOL_CURRENT(context);
  std::vector<char> bytes;
  GPUPOOL_TRY(read_file(path, &bytes));
  return cuModuleLoadData(out, bytes.data());
}

GPUPOOL_API cuModuleUnload(CUmodule handle) {
  std::shared_ptr<Module> module;
  GPUPOOL_TRY(find_module(handle, &module));
  if (module->library) return CUDA_ERROR_NOT_PERMITTED;  // it ends with its library
  module->context->wait_idle();
  module->context->flush_output();
  modules().take(handle);
  module->forget_functions();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  std::shared_ptr<Module> module;
  GPUPOOL_TRY(find_module(handle, &module));
  if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
  auto function = module->function(name);
  if (!function) return CUDA_ERROR_NOT_FOUND;
  *out = reinterpret_cast<CUfunction>(function.get());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleGetFunctionCount(unsigned int* count, CUmodule handle) {
  std::shared_ptr<Module> module;
  GPUPOOL_TRY(find_module(handle, &module));
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = unsigned(module->program->kernel_count());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleEnumerateFunctions(CUfunction* out, unsigned int count, CUmodule handle) {
  std::shared_ptr<Module> module;
  GPUPOOL_TRY(find_module(handle, &module));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < module->program->kernel_count() && unsigned(i) < count; ++i) {
    out[i] = reinterpret_cast<CUfunction>(module->function(i).get());
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule handle,
                                 const char* name) {
  std::shared_ptr<Module> module;
  GPUPOOL_TRY(find_module(handle, &module));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  auto global = module->program->global(name);
  if (!global) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = global->address;
  if (bytes) *bytes = global->bytes;
  return CUDA_SUCCESS;
}
