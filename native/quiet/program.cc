// Modules, libraries, kernels and linking: names, parameter layouts and variables are real, code is
// not looked at.
#include <string.h>

#include <algorithm>
#include <set>

#include "frontdoor/cubin.h"
#include "frontdoor/images.h"
#include "frontdoor/ptx_scan.h"
#include "quiet/quiet.h"

using namespace gpupool::quiet;
using namespace gpupool::frontdoor;

namespace {

struct Modules {
  std::mutex mutex;
  std::set<CUmod_st*> all;
};

Modules& modules() {
  static Modules* const instance = new Modules;
  return *instance;
}

int device_of(CUcontext context) { return context != nullptr ? context->device : 0; }

CUresult add_code(CUmod_st* module, CodeKind kind, const std::vector<uint8_t>& code) {
  ProgramInfo info;
  if (kind == CodeKind::kPtx) {
    if (!scan_ptx({reinterpret_cast<const char*>(code.data()), code.size()}, &info, nullptr))
      return CUDA_ERROR_INVALID_PTX;
  } else if (!scan_cubin(code, &info)) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  module->info.architecture = std::max(module->info.architecture, info.architecture);
  std::move(info.kernels.begin(), info.kernels.end(), std::back_inserter(module->info.kernels));
  std::move(info.globals.begin(), info.globals.end(), std::back_inserter(module->info.globals));
  return CUDA_SUCCESS;
}

CUresult load(CUmod_st** result, const void* image, CUcontext context) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (result == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Image opened;
  CUresult error = open_trusted(image, &opened);
  if (error != CUDA_SUCCESS) return error;
  auto module = std::make_unique<CUmod_st>();
  module->context = context;
  const Device& device = machine().devices[device_of(context)];
  for (const auto& part : opened.parts) {
    const Candidate* best = nullptr;
    std::vector<uint8_t> code;
    if ((error = select(part, {device.major, device.minor, true, true}, &best)) != CUDA_SUCCESS)
      return error;
    if ((error = extract(*best, kMaxRawBytes, &code)) != CUDA_SUCCESS) return error;
    if ((error = add_code(module.get(), best->kind, code)) != CUDA_SUCCESS) return error;
  }
  for (const KernelLayout& kernel : module->info.kernels) {
    CUfunc_st& function = module->functions[kernel.name];
    function.layout = &kernel;
    function.module = module.get();
  }
  std::lock_guard lock(modules().mutex);
  modules().all.insert(module.get());
  *result = module.release();
  return CUDA_SUCCESS;
}

CUresult unload(CUmod_st* module) {
  {
    std::lock_guard lock(modules().mutex);
    if (modules().all.erase(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
  }
  for (auto& [name, place] : module->globals) release(place.first, MemoryKind::kDevice);
  module->magic = 0;
  delete module;
  return CUDA_SUCCESS;
}

CUresult get_function(CUfunc_st** function, CUmod_st* module, const char* name) {
  if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(module)) return CUDA_ERROR_INVALID_HANDLE;
  auto found = module->functions.find(name);
  if (found == module->functions.end()) return CUDA_ERROR_NOT_FOUND;
  *function = &found->second;
  return CUDA_SUCCESS;
}

// A variable gets its memory, zeroed, when it is first asked for.
CUresult get_global(CUdeviceptr* address, size_t* bytes, CUmod_st* module, const char* name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(module)) return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard lock(module->mutex);
  auto found = module->globals.find(name);
  if (found == module->globals.end()) {
    auto layout = std::find_if(module->info.globals.begin(), module->info.globals.end(),
                               [&](const GlobalLayout& global) { return global.name == name; });
    if (layout == module->info.globals.end()) return CUDA_ERROR_NOT_FOUND;
    uint64_t at = 0;
    CUresult error =
        allocate(std::max<uint64_t>(layout->bytes, 1), MemoryKind::kDevice, nullptr, &at);
    if (error != CUDA_SUCCESS) return error;
    memset(reinterpret_cast<void*>(at), 0, layout->bytes);
    found = module->globals.emplace(name, std::make_pair(at, layout->bytes)).first;
  }
  if (address != nullptr) *address = found->second.first;
  if (bytes != nullptr) *bytes = found->second.second;
  return CUDA_SUCCESS;
}

CUresult enumerate(CUfunc_st** functions, unsigned count, CUmod_st* module) {
  if (functions == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(module)) return CUDA_ERROR_INVALID_HANDLE;
  for (auto& [name, function] : module->functions) {
    if (count-- == 0) break;
    *functions++ = &function;
  }
  return CUDA_SUCCESS;
}

CUresult parameter_info(CUfunc_st* function, size_t index, size_t* offset, size_t* bytes) {
  if (!is_valid(function)) return CUDA_ERROR_INVALID_HANDLE;
  if (offset == nullptr || index >= function->layout->parameters.size())
    return CUDA_ERROR_INVALID_VALUE;
  *offset = function->layout->parameters[index].offset;
  if (bytes != nullptr) *bytes = function->layout->parameters[index].bytes;
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUfunction_attribute which, CUfunc_st* function) {
  if (value == nullptr || which < 0 || which >= CU_FUNC_ATTRIBUTE_MAX)
    return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(function)) return CUDA_ERROR_INVALID_HANDLE;
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(function->layout->static_shared_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value =
          function->layout->registers != 0 ? static_cast<int>(function->layout->registers) : 32;
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = function->module->info.architecture;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = 49152 - static_cast<int>(std::min(function->layout->static_shared_bytes, 49152u));
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = -1;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

// CUlibrary and CUmodule, CUkernel and CUfunction are one and the same here.
CUmod_st* module_of(CUlibrary library) { return reinterpret_cast<CUmod_st*>(library); }
CUfunc_st* function_of(CUkernel kernel) { return reinterpret_cast<CUfunc_st*>(kernel); }

}  // namespace

void gpupool::quiet::release_modules(CUcontext context) {
  std::vector<CUmod_st*> ended;
  {
    std::lock_guard lock(modules().mutex);
    for (CUmod_st* module : modules().all) {
      if (module->context == context) ended.push_back(module);
    }
  }
  for (CUmod_st* module : ended) unload(module);
}

GPUPOOL_API cuModuleLoadData(CUmodule* module, const void* image) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return load(module, image, current_context());
}

GPUPOOL_API cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int, CUjit_option*,
                               void**) {
  return cuModuleLoadData(module, image);
}

GPUPOOL_API cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
  return cuModuleLoadData(module, fatCubin);
}
GPUPOOL_API cuModuleUnload(CUmodule hmod) { return unload(hmod); }
GPUPOOL_API cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
  return get_function(hfunc, hmod, name);
}

GPUPOOL_API cuModuleGetFunctionCount(unsigned int* count, CUmodule mod) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(mod)) return CUDA_ERROR_INVALID_HANDLE;
  *count = static_cast<unsigned>(mod->functions.size());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleEnumerateFunctions(CUfunction* functions, unsigned int numFunctions,
                                       CUmodule mod) {
  return enumerate(functions, numFunctions, mod);
}

GPUPOOL_API cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod,
                                 const char* name) {
  return get_global(dptr, bytes, hmod, name);
}

GPUPOOL_API cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**,
                              unsigned int, CUlibraryOption*, void**, unsigned int) {
  return load(reinterpret_cast<CUmod_st**>(library), code, nullptr);
}

GPUPOOL_API cuLibraryUnload(CUlibrary library) { return unload(module_of(library)); }

GPUPOOL_API cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
  return get_function(reinterpret_cast<CUfunc_st**>(pKernel), module_of(library), name);
}

GPUPOOL_API cuLibraryGetKernelCount(unsigned int* count, CUlibrary lib) {
  return cuModuleGetFunctionCount(count, module_of(lib));
}

GPUPOOL_API cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int numKernels, CUlibrary lib) {
  return enumerate(reinterpret_cast<CUfunc_st**>(kernels), numKernels, module_of(lib));
}

GPUPOOL_API cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
  if (pMod == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(module_of(library))) return CUDA_ERROR_INVALID_HANDLE;
  *pMod = module_of(library);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library,
                               const char* name) {
  return get_global(dptr, bytes, module_of(library), name);
}

GPUPOOL_API cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
  if (pFunc == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(function_of(kernel))) return CUDA_ERROR_INVALID_HANDLE;
  *pFunc = function_of(kernel);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelGetLibrary(CUlibrary* pLib, CUkernel kernel) {
  if (pLib == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(function_of(kernel))) return CUDA_ERROR_INVALID_HANDLE;
  *pLib = reinterpret_cast<CUlibrary>(function_of(kernel)->module);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
  if (hmod == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(hfunc)) return CUDA_ERROR_INVALID_HANDLE;
  *hmod = hfunc->module;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncGetName(const char** name, CUfunction hfunc) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(hfunc)) return CUDA_ERROR_INVALID_HANDLE;
  *name = hfunc->layout->name.c_str();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuKernelGetName(const char** name, CUkernel hfunc) {
  return cuFuncGetName(name, function_of(hfunc));
}

GPUPOOL_API cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset,
                                 size_t* paramSize) {
  return parameter_info(function_of(kernel), paramIndex, paramOffset, paramSize);
}

GPUPOOL_API cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset,
                               size_t* paramSize) {
  return parameter_info(func, paramIndex, paramOffset, paramSize);
}

GPUPOOL_API cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
  return attribute(pi, attrib, hfunc);
}

GPUPOOL_API cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice) {
  return attribute(pi, attrib, function_of(kernel));
}

GPUPOOL_API cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute, int) {
  return is_valid(hfunc) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
GPUPOOL_API cuKernelSetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) {
  return CUDA_SUCCESS;
}
GPUPOOL_API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
GPUPOOL_API cuKernelSetCacheConfig(CUkernel, CUfunc_cache, CUdevice) { return CUDA_SUCCESS; }
GPUPOOL_API cuFuncSetBlockShape(CUfunction, int, int, int) { return CUDA_SUCCESS; }
GPUPOOL_API cuFuncSetSharedSize(CUfunction, unsigned int) { return CUDA_SUCCESS; }
GPUPOOL_API cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }

GPUPOOL_API cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction) {
  if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func,
                                                        int blockSize, size_t dynamicSMemSize) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize,
                                                              dynamicSMemSize, 0);
}

GPUPOOL_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, CUfunction func,
                                                                 int blockSize, size_t,
                                                                 unsigned int) {
  if (numBlocks == nullptr || blockSize <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_valid(func)) return CUDA_ERROR_INVALID_HANDLE;
  *numBlocks = std::clamp(2048 / blockSize, 0, 32);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, CUfunction,
                                                    int numBlocks, int blockSize) {
  if (dynamicSmemSize == nullptr || numBlocks <= 0 || blockSize <= 0)
    return CUDA_ERROR_INVALID_VALUE;
  *dynamicSmemSize = 49152;
  return CUDA_SUCCESS;
}

// The linker hands back the code that it was given last: nothing looks at what it made.
struct CUlinkState_st {
  std::vector<uint8_t> code;
};

GPUPOOL_API cuLinkCreate_v2(unsigned int, CUjit_option*, void**, CUlinkState* stateOut) {
  if (stateOut == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *stateOut = new CUlinkState_st;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLinkAddData_v2(CUlinkState state, CUjitInputType, void* data, size_t size,
                             const char*, unsigned int, CUjit_option*, void**) {
  if (state == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto* bytes = static_cast<const uint8_t*>(data);
  state->code.assign(bytes, bytes + size);
  state->code.push_back(0);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLinkComplete(CUlinkState state, void** cubinOut, size_t* sizeOut) {
  if (state == nullptr || cubinOut == nullptr || sizeOut == nullptr || state->code.empty())
    return CUDA_ERROR_INVALID_VALUE;
  *cubinOut = state->code.data();
  *sizeOut = state->code.size() - 1;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLinkDestroy(CUlinkState state) {
  delete state;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuProfilerStart(void) { return CUDA_SUCCESS; }
GPUPOOL_API cuProfilerStop(void) { return CUDA_SUCCESS; }
