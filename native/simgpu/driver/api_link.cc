// cuLink*: joins PTX texts. The "cubin" that comes out is text of our own that the loader knows.
#include <string.h>

#include "frontdoor/images.h"
#include "simgpu/driver/linked_text.h"
#include "simgpu/driver/module.h"

namespace gpupool::simgpu {
namespace {

struct LinkState {
  Context* context = nullptr;
  JitOptions options;
  std::vector<SourceText> parts;
  std::string info, errors, output;
};

HandleTable<LinkState>& links() {
  static auto& table = *new HandleTable<LinkState>;
  return table;
}

CUresult find_link(CUlinkState handle, std::shared_ptr<LinkState>* state) {
  GPUPOOL_CURRENT(context);
  *state = links().get(handle);
  return *state ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult add_text(LinkState& state, std::string text, const std::string& name) {
  std::vector<SourceText> parts;
  if (!split_parts(text, &parts)) parts.push_back({name, std::move(text)});
  for (SourceText& part : parts) {
    // What is wrong with a text is told when it is added; names may still be missing.
    std::string log;
    LoadStatus status = check_link({part}, state.context->device->gpu.model, &log);
    if (status != LoadStatus::kOk && status != LoadStatus::kUnresolvedSymbol) {
      state.errors += log;
      state.options.write(state.info, state.errors);
      return result_of(status);
    }
    state.parts.push_back(std::move(part));
  }
  return CUDA_SUCCESS;
}

CUresult add(LinkState& state, int type, const uint8_t* data, size_t size,
             const std::string& name) {
  const frontdoor::Bytes bytes(data, size);
  switch (type) {
    case CU_JIT_INPUT_PTX: {
      std::string text(reinterpret_cast<const char*>(data), size);
      while (!text.empty() && text.back() == 0) text.pop_back();
      return add_text(state, std::move(text), name);
    }
    case CU_JIT_INPUT_CUBIN:
    case CU_JIT_INPUT_OBJECT:
    case CU_JIT_INPUT_FATBINARY: {
      frontdoor::Image image;
      GPUPOOL_TRY(frontdoor::open_bounded(bytes, &image));
      const DeviceModel& model = state.context->device->gpu.model;
      const frontdoor::Selection selection{model.cc_major, model.cc_minor, false, true};
      for (const auto& part : image.parts) {
        const frontdoor::Candidate* best = nullptr;
        GPUPOOL_TRY(frontdoor::select(part, selection, &best));
        std::vector<uint8_t> code;
        GPUPOOL_TRY(frontdoor::extract(*best, frontdoor::kMaxRawBytes, &code));
        GPUPOOL_TRY(add_text(state, std::string(code.begin(), code.end()), name));
      }
      return CUDA_SUCCESS;
    }
    case CU_JIT_INPUT_LIBRARY:
      // Static libraries are the device runtime, as far as PTX producers use them; what it
      // provides is built in.
      if (size < 8 || memcmp(data, "!<arch>\n", 8) != 0) return CUDA_ERROR_INVALID_IMAGE;
      state.info += name + ": left out, the device runtime is built in\n";
      return CUDA_SUCCESS;
    case CU_JIT_INPUT_NVVM:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace
}  // namespace gpupool::simgpu

using namespace gpupool::simgpu;

GPUPOOL_API cuLinkCreate_v2(unsigned int count, CUjit_option* options, void** values,
                            CUlinkState* out) {
  GPUPOOL_CURRENT(context);
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  auto state = std::make_shared<LinkState>();
  state->context = context;
  GPUPOOL_TRY(state->options.read(count, options, values));
  *out = links().add<CUlinkState>(std::move(state));
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLinkAddData_v2(CUlinkState handle, CUjitInputType type, void* data, size_t size,
                             const char* name, unsigned int, CUjit_option*, void**) {
  std::shared_ptr<LinkState> state;
  GPUPOOL_TRY(find_link(handle, &state));
  if (!data || !size) return CUDA_ERROR_INVALID_VALUE;
  return add(*state, int(type), static_cast<const uint8_t*>(data), size, name ? name : "ptx input");
}

GPUPOOL_API cuLinkAddFile_v2(CUlinkState handle, CUjitInputType type, const char* path,
                             unsigned int, CUjit_option*, void**) {
  std::shared_ptr<LinkState> state;
  GPUPOOL_TRY(find_link(handle, &state));
  std::vector<char> bytes;
  GPUPOOL_TRY(read_file(path, &bytes));
  return add(*state, int(type), reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size() - 1,
             path);
}

GPUPOOL_API cuLinkComplete(CUlinkState handle, void** out, size_t* size) {
  std::shared_ptr<LinkState> state;
  GPUPOOL_TRY(find_link(handle, &state));
  if (!out || state->parts.empty()) return CUDA_ERROR_INVALID_VALUE;
  std::string log;
  LoadStatus status = check_link(state->parts, state->context->device->gpu.model, &log);
  if (status != LoadStatus::kOk) {
    state->errors += log;
    state->options.write(state->info, state->errors);
    return status == LoadStatus::kUnresolvedSymbol ? CUDA_ERROR_NO_BINARY_FOR_GPU
                                                   : result_of(status);
  }
  for (SourceText& part : state->parts) {
    part.max_registers = at_most(part.max_registers, state->options.max_registers());
  }
  state->output = join_parts(state->parts);
  state->options.write(state->info, state->errors);
  *out = state->output.data();
  if (size) *size = state->output.size() + 1;  // with the NUL that ends it
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLinkDestroy(CUlinkState handle) {
  GPUPOOL_TRY(driver_status());
  return links().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
