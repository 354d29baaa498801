// Modules, libraries, kernels and functions.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <stdio.h>
#include <string.h>

#include "api/cuda_abi.h"
#include "client/log.h"
#include "client/modules.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()     \
  Context* context; \
  if (const CUresult e_ = enter(&context)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define INITIALIZED() \
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;

namespace {

Module* find_module(CUmodule handle) {
  return module_tables().modules.find(reinterpret_cast<uint64_t>(handle));
}
Library* find_library(CUlibrary handle) {
  return module_tables().libraries.find(reinterpret_cast<uint64_t>(handle));
}
Function* find_function(const void* handle) {
  return module_tables().functions.find(reinterpret_cast<uint64_t>(handle));
}
CUfunction handle_of(const Function* function) {
  return reinterpret_cast<CUfunction>(function->handle);
}

CUresult read_file(const char* path, std::vector<uint8_t>* data) {
  FILE* file = fopen(path, "rbe");
  if (file == nullptr) return CUDA_ERROR_FILE_NOT_FOUND;
  uint8_t piece[65536];
  size_t n;
  while ((n = fread(piece, 1, sizeof piece, file)) > 0 && data->size() < wire::kMaxImageBytes) {
    data->insert(data->end(), piece, piece + n);
  }
  fclose(file);
  data->resize(data->size() + 64, 0);  // text images end with a NUL
  return CUDA_SUCCESS;
}

CUresult load(Context* context, const frontdoor::Image& image, const JitOptions& options,
              CUmodule* out) {
  std::shared_ptr<Code> code;
  CUresult result = make_code(image, *context->device, &code);
  if (result != CUDA_SUCCESS) return result;
  Module* module;
  result = load_module(context, code, options, nullptr, &module);
  if (result == CUDA_ERROR_NO_BINARY_FOR_GPU && take_ptx_instead(context->device, *code)) {
    result = make_code(image, *context->device, &code);
    if (result == CUDA_SUCCESS) result = load_module(context, code, options, nullptr, &module);
  }
  if (result == CUDA_SUCCESS) *out = reinterpret_cast<CUmodule>(module->handle);
  return result;
}

// The function in the calling thread's context, or for kernel queries by device: in the context of
// that device which is current, or its primary context.
CUresult kernel_on(CUkernel kernel, CUdevice ordinal, Function** out, Context** in) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  Context* context = current_context();
  if (context == nullptr || context->device != device || check_context(context) != CUDA_SUCCESS) {
    std::lock_guard guard(device->lock);
    context = device->primary;
    if (context == nullptr || !context->active.load()) return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (const CUresult e = check_context(context)) return e;
  *in = context;
  return function_in(context, reinterpret_cast<CUfunction>(kernel), out);
}

CUresult attribute(Function* function, CUfunction_attribute which, int* value) {
  const int index = static_cast<int>(which);
  REQUIRE(value != nullptr && index >= 0 && index < static_cast<int>(wire::kFunctionAttributes));
  REQUIRE(function->attribute_mask & (1u << index));
  *value = function->attributes[index];
  return CUDA_SUCCESS;
}

CUresult set_attribute(Context* context, Function* function, CUfunction_attribute which,
                       int value) {
  const Device& device = *context->device;
  REQUIRE(which >= CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES &&
          which < CU_FUNC_ATTRIBUTE_MAX);
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    const int limit = device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) -
                      function->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES];
    REQUIRE(value >= 0 && value <= limit);
  } else if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
    REQUIRE(value >= -1 && value <= 100);
  } else if (which == CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET) {
    return CUDA_ERROR_INVALID_VALUE;  // read-only
  }
  {
    Channel::Post post(channel_of(context), op(Operation::kFuncSetAttribute), context->wire_id(),
                       24);
    wire::Encoder encoder = post.encoder();
    encoder.handle(function->wire);
    encoder.scalar(static_cast<uint64_t>(which));
    encoder.scalar(static_cast<uint64_t>(static_cast<int64_t>(value)));
  }
  function->attributes[which] = value;
  function->attribute_mask |= 1u << which;
  std::lock_guard guard(function->lock);
  function->occupancy.clear();
  return CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  REQUIRE(mode != nullptr);
  // CUDA_MODULE_LOADING is the driver's variable; lazy is also CUDA's default.
  const char* chosen = getenv("CUDA_MODULE_LOADING");
  *mode = chosen != nullptr && strcmp(chosen, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING
                                                            : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned int count,
                            CUjit_option* options, void** values) {
  ENTER();
  REQUIRE(out != nullptr && image != nullptr);
  JitOptions parsed;
  if (const CUresult e = parse_options(count, options, values, &parsed)) return e;
  frontdoor::Image opened;
  if (const CUresult e = frontdoor::open_trusted(image, &opened)) return e;
  return load(context, opened, parsed, out);
}

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return cuModuleLoadDataEx(out, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoadFatBinary(CUmodule* out, const void* image) {
  return cuModuleLoadDataEx(out, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoad(CUmodule* out, const char* path) {
  ENTER();
  REQUIRE(out != nullptr && path != nullptr);
  std::vector<uint8_t> data;
  if (const CUresult e = read_file(path, &data)) return e;
  frontdoor::Image opened;
  if (const CUresult e = frontdoor::open_bounded(data, &opened)) return e;
  return load(context, opened, JitOptions{}, out);
}

CUresult cuModuleUnload(CUmodule handle) {
  ENTER();
  Module* module = find_module(handle);
  if (module == nullptr || module->library != nullptr) return CUDA_ERROR_INVALID_HANDLE;
  unload_module(module, true);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  ENTER();
  REQUIRE(out != nullptr && name != nullptr);
  Module* module = find_module(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Function* function;
  const CUresult result = get_function(module, name, &function);
  if (result == CUDA_SUCCESS) *out = handle_of(function);
  return result;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule handle,
                              const char* name) {
  ENTER();
  REQUIRE(name != nullptr && (address != nullptr || bytes != nullptr));
  Module* module = find_module(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t at, size;
  const CUresult result = get_global(module, name, &at, &size);
  if (result != CUDA_SUCCESS) return result;
  if (address != nullptr) *address = at;
  if (bytes != nullptr) *bytes = size;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int* count, CUmodule handle) {
  ENTER();
  REQUIRE(count != nullptr);
  Module* module = find_module(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!module->code->info_known) return CUDA_ERROR_NOT_SUPPORTED;
  *count = static_cast<unsigned>(module->code->info.kernels.size());
  return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned int count, CUmodule handle) {
  ENTER();
  REQUIRE(functions != nullptr && count != 0);
  Module* module = find_module(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!module->code->info_known) return CUDA_ERROR_NOT_SUPPORTED;
  const auto code = module->code;
  for (unsigned i = 0; i < count && i < code->info.kernels.size(); i++) {
    Function* function;
    if (const CUresult e = get_function(module, code->info.kernels[i].name.c_str(), &function))
      return e;
    functions[i] = handle_of(function);
  }
  return CUDA_SUCCESS;
}

// ---- Libraries --------------------------------------------------------------------------------

static CUresult new_library(std::shared_ptr<frontdoor::Image> image, const JitOptions& options,
                            bool preserved, CUlibrary* out) {
  Library* library = module_tables().libraries.allocate();
  if (library == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  library->context = nullptr;
  library->image = std::move(image);
  library->preserved = preserved;
  library->options = options;
  // Their buffers belong to this call; the code may be compiled much later.
  library->options.info_log = library->options.error_log = nullptr;
  library->options.info_size = library->options.error_size = library->options.wall_time = nullptr;
  library->code.clear();
  library->modules.clear();
  library->kernels.clear();
  if (!preserved) {
    // The image may be gone after this call: take what fits the devices.
    std::lock_guard guard(library->lock);
    for (const auto& device : Process::get().devices()) {
      std::shared_ptr<Code> code;
      library_code(library, *device, &code);
    }
    library->image = nullptr;
  }
  module_tables().libraries.publish(library);
  *out = reinterpret_cast<CUlibrary>(library->handle);
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option* jit_options,
                           void** jit_values, unsigned int jit_count, CUlibraryOption* options,
                           void** values, unsigned int count) {
  INITIALIZED();
  REQUIRE(out != nullptr && image != nullptr);
  JitOptions parsed;
  if (const CUresult e = parse_options(jit_count, jit_options, jit_values, &parsed)) return e;
  bool preserved = false;
  REQUIRE(count == 0 || options != nullptr);
  for (unsigned i = 0; i < count; i++) {
    if (options[i] == CU_LIBRARY_BINARY_IS_PRESERVED) {
      preserved = values != nullptr && values[i] != nullptr;
    }
  }
  auto opened = std::make_shared<frontdoor::Image>();
  if (const CUresult e = frontdoor::open_trusted(image, opened.get())) return e;
  return new_library(std::move(opened), parsed, preserved, out);
}

CUresult cuLibraryLoadFromFile(CUlibrary* out, const char* path, CUjit_option* jit_options,
                               void** jit_values, unsigned int jit_count, CUlibraryOption*, void**,
                               unsigned int) {
  INITIALIZED();
  REQUIRE(out != nullptr && path != nullptr);
  JitOptions parsed;
  if (const CUresult e = parse_options(jit_count, jit_options, jit_values, &parsed)) return e;
  std::vector<uint8_t> data;
  if (const CUresult e = read_file(path, &data)) return e;
  auto opened = std::make_shared<frontdoor::Image>();
  if (const CUresult e = frontdoor::open_bounded(data, opened.get())) return e;
  return new_library(std::move(opened), parsed, false, out);
}

CUresult cuLibraryUnload(CUlibrary handle) {
  INITIALIZED();
  Library* library = find_library(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::map<Context*, Module*> modules;
  {
    std::lock_guard guard(library->lock);
    for (auto& [name, kernel] : library->kernels) {
      kernel->last = nullptr;
      module_tables().functions.retire(kernel);
    }
    library->kernels.clear();
    library->code.clear();
    library->image = nullptr;
    modules.swap(library->modules);
  }
  for (auto& [context, module] : modules) unload_module(module, context->active.load());
  module_tables().libraries.retire(library);
  return CUDA_SUCCESS;
}

static CUresult get_kernel(Library* library, const char* name, Function** out) {
  std::lock_guard guard(library->lock);
  const auto found = library->kernels.find(name);
  if (found != library->kernels.end()) {
    *out = found->second;
    return CUDA_SUCCESS;
  }
  Context* current = current_context();
  const Device& device = current != nullptr ? *current->device : *Process::get().devices()[0];
  std::shared_ptr<Code> code;
  if (const CUresult e = library_code(library, device, &code)) return e;
  if (code->info_known && code->info.kernel(name) == nullptr) return CUDA_ERROR_NOT_FOUND;
  Function* kernel = module_tables().functions.allocate();
  if (kernel == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  kernel->context = nullptr;
  kernel->name = name;
  kernel->module = nullptr;
  kernel->library = library;
  kernel->last = nullptr;
  kernel->set_attributes.clear();
  module_tables().functions.publish(kernel);
  library->kernels[name] = kernel;
  *out = kernel;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary handle, const char* name) {
  INITIALIZED();
  REQUIRE(out != nullptr && name != nullptr);
  Library* library = find_library(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Function* kernel;
  const CUresult result = get_kernel(library, name, &kernel);
  if (result == CUDA_SUCCESS) *out = reinterpret_cast<CUkernel>(kernel->handle);
  return result;
}

CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary handle) {
  INITIALIZED();
  REQUIRE(count != nullptr);
  Library* library = find_library(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard guard(library->lock);
  std::shared_ptr<Code> code;
  if (const CUresult e = library_code(library, *Process::get().devices()[0], &code)) return e;
  if (!code->info_known) return CUDA_ERROR_NOT_SUPPORTED;
  *count = static_cast<unsigned>(code->info.kernels.size());
  return CUDA_SUCCESS;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int count, CUlibrary handle) {
  INITIALIZED();
  REQUIRE(kernels != nullptr && count != 0);
  Library* library = find_library(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Code> code;
  {
    std::lock_guard guard(library->lock);
    if (const CUresult e = library_code(library, *Process::get().devices()[0], &code)) return e;
  }
  if (!code->info_known) return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned i = 0; i < count && i < code->info.kernels.size(); i++) {
    Function* kernel;
    if (const CUresult e = get_kernel(library, code->info.kernels[i].name.c_str(), &kernel))
      return e;
    kernels[i] = reinterpret_cast<CUkernel>(kernel->handle);
  }
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule* out, CUlibrary handle) {
  ENTER();
  REQUIRE(out != nullptr);
  Library* library = find_library(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Module* module;
  const CUresult result = library_module(library, context, &module);
  if (result == CUDA_SUCCESS) *out = reinterpret_cast<CUmodule>(module->handle);
  return result;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary handle,
                            const char* name) {
  ENTER();
  REQUIRE(name != nullptr && (address != nullptr || bytes != nullptr));
  Library* library = find_library(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Module* module;
  if (const CUresult e = library_module(library, context, &module)) return e;
  return cuModuleGetGlobal_v2(address, bytes, reinterpret_cast<CUmodule>(module->handle), name);
}

CUresult cuLibraryGetManaged(CUdeviceptr*, size_t*, CUlibrary, const char* name) {
  INITIALIZED();
  REQUIRE(name != nullptr);
  // The program will read the variable on the CPU: say why it will not find it.
  log(Level::kError,
      "the managed variable %s cannot be had: managed memory is not supported over "
      "the wire",
      name);
  return CUDA_ERROR_NOT_SUPPORTED;
}

// ---- Kernels and functions --------------------------------------------------------------------

CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  ENTER();
  REQUIRE(out != nullptr);
  Function* function;
  const CUresult result = function_in(context, reinterpret_cast<CUfunction>(kernel), &function);
  if (result == CUDA_SUCCESS) *out = handle_of(function);
  return result;
}

CUresult cuKernelGetLibrary(CUlibrary* out, CUkernel kernel) {
  INITIALIZED();
  REQUIRE(out != nullptr);
  Function* found = find_function(kernel);
  if (found == nullptr || found->library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *out = reinterpret_cast<CUlibrary>(found->library->handle);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  INITIALIZED();
  REQUIRE(name != nullptr);
  Function* found = find_function(kernel);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *name = found->name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char** name, CUfunction function) {
  return cuKernelGetName(name, reinterpret_cast<CUkernel>(function));
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute which, CUkernel kernel,
                              CUdevice ordinal) {
  Function* function;
  Context* context;
  if (const CUresult e = kernel_on(kernel, ordinal, &function, &context)) return e;
  return attribute(function, which, value);
}

CUresult cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel,
                              CUdevice ordinal) {
  INITIALIZED();
  Function* found = find_function(kernel);
  if (found == nullptr || found->library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Function* function;
  Context* context;
  if (const CUresult e = kernel_on(kernel, ordinal, &function, &context)) return e;
  const CUresult result = set_attribute(context, function, which, value);
  if (result == CUDA_SUCCESS) {
    std::lock_guard guard(found->lock);
    found->set_attributes[ordinal][which] = value;
  }
  return result;
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice ordinal) {
  Function* function;
  Context* context;
  REQUIRE(config >= CU_FUNC_CACHE_PREFER_NONE && config <= CU_FUNC_CACHE_PREFER_EQUAL);
  return kernel_on(kernel, ordinal, &function, &context);
}

static CUresult parameter_info(Function* function, size_t index, size_t* offset, size_t* bytes) {
  REQUIRE(offset != nullptr);
  if (!function->layout_known) return CUDA_ERROR_NOT_SUPPORTED;
  REQUIRE(index < function->parameters.size());
  *offset = function->parameters[index].offset;
  if (bytes != nullptr) *bytes = function->parameters[index].bytes;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* bytes) {
  ENTER();
  Function* function;
  if (const CUresult e = function_in(context, reinterpret_cast<CUfunction>(kernel), &function))
    return e;
  return parameter_info(function, index, offset, bytes);
}

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  ENTER();
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  return parameter_info(function, index, offset, bytes);
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction handle) {
  ENTER();
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  return attribute(function, which, value);
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute which, int value) {
  ENTER();
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  return set_attribute(context, function, which, value);
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  ENTER();
  REQUIRE(config >= CU_FUNC_CACHE_PREFER_NONE && config <= CU_FUNC_CACHE_PREFER_EQUAL);
  Function* function;
  return function_in(context, handle, &function);  // a preference
}

CUresult cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig) {
  ENTER();
  Function* function;
  return function_in(context, handle, &function);
}

// Deprecated, but pycuda calls it before every launch, which gives the shape again.
CUresult cuFuncSetBlockShape(CUfunction handle, int x, int y, int z) {
  ENTER();
  REQUIRE(x > 0 && y > 0 && z > 0);
  Function* function;
  return function_in(context, handle, &function);
}

CUresult cuFuncSetSharedSize(CUfunction handle, unsigned int) {
  ENTER();
  Function* function;
  return function_in(context, handle, &function);
}

CUresult cuFuncGetModule(CUmodule* out, CUfunction handle) {
  ENTER();
  REQUIRE(out != nullptr);
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  *out = reinterpret_cast<CUmodule>(function->module->handle);
  return CUDA_SUCCESS;
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction handle) {
  ENTER();
  REQUIRE(state != nullptr);
  Function* found = find_function(handle);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const Function* last = found->last.load();
  const bool loaded = found->library == nullptr || (last != nullptr && last->context == context);
  *state = loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
  ENTER();
  Function* function;
  return function_in(context, handle, &function);
}

}  // extern "C"
#pragma GCC visibility pop
