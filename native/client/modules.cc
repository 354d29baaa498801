#define GPUPOOL_CUDA_ABI_EXACT 1
#include "client/modules.h"

#include <string.h>

#include <algorithm>
#include <new>

#include "client/links.h"
#include "client/log.h"
#include "frontdoor/cubin.h"
#include "frontdoor/ptx_scan.h"

namespace gpupool::client {

ModuleTables& module_tables() {
  static ModuleTables* const tables = new ModuleTables;
  return *tables;
}

CUresult parse_options(unsigned count, const CUjit_option* options, void** values,
                       JitOptions* out) {
  if (count != 0 && (options == nullptr || values == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; i++) {
    const auto number = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(values[i]));
    switch (options[i]) {
      case CU_JIT_MAX_REGISTERS:
        out->max_registers = number;
        break;
      case CU_JIT_THREADS_PER_BLOCK:
        out->threads_per_block = number;
        break;
      case CU_JIT_OPTIMIZATION_LEVEL:
        out->optimization = static_cast<int32_t>(number);
        break;
      case CU_JIT_GENERATE_DEBUG_INFO:
        if (number != 0) out->debug_info |= 1;
        break;
      case CU_JIT_GENERATE_LINE_INFO:
        if (number != 0) out->debug_info |= 2;
        break;
      case CU_JIT_INFO_LOG_BUFFER:
        out->info_log = static_cast<char*>(values[i]);
        break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        out->info_room = number;
        out->info_size = &values[i];
        break;
      case CU_JIT_ERROR_LOG_BUFFER:
        out->error_log = static_cast<char*>(values[i]);
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        out->error_room = number;
        out->error_size = &values[i];
        break;
      case CU_JIT_WALL_TIME:
        out->wall_time = &values[i];
        break;
      default:
        break;  // hints: target, cache mode, fallback strategy, verbosity
    }
  }
  return CUDA_SUCCESS;
}

namespace {
void deliver(std::string_view text, char* to, size_t room, void** size) {
  size_t written = 0;
  if (to != nullptr && room > 0) {
    written = std::min(text.size(), room - 1);
    memcpy(to, text.data(), written);
    to[written] = '\0';
  }
  if (size != nullptr) *size = reinterpret_cast<void*>(written);
}
}  // namespace

void deliver_logs(const JitOptions& options, wire::Decoder& decoder, uint64_t* image_bytes) {
  std::string_view info, error;
  if (decoder.left() >= sizeof(wire::CompileLogs)) {
    const auto logs = decoder.get<wire::CompileLogs>();
    if (image_bytes != nullptr) *image_bytes = logs.image_bytes;
    info = decoder.raw(logs.info_bytes);
    error = decoder.raw(logs.error_bytes);
  }
  deliver(info, options.info_log, options.info_room, options.info_size);
  deliver(error, options.error_log, options.error_room, options.error_size);
  if (options.wall_time != nullptr) *options.wall_time = nullptr;  // 0.0f
  if (!error.empty()) {
    log(Level::kInfo, "device code was refused: %.*s", static_cast<int>(error.size()),
        error.data());
  }
}

// ---- Code -------------------------------------------------------------------------------------

CUresult make_code(const frontdoor::Image& image, const Device& device,
                   std::shared_ptr<Code>* out) try {
  auto code = std::make_shared<Code>();
  frontdoor::Selection selection;
  selection.major = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  selection.minor = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  frontdoor::Selection compiled = selection;
  compiled.cubin = false;
  for (const auto& part : image.parts) {
    const frontdoor::Candidate* best = nullptr;
    const frontdoor::Candidate* ptx = nullptr;
    frontdoor::select(part, compiled, &ptx);
    CUresult result = frontdoor::select(part, selection, &best);
    // The driver executes no machine code; without PTX it has the last word all the same.
    if (device.ptx_only && ptx != nullptr) best = ptx, result = CUDA_SUCCESS;
    // Of a program in parts those that fit are linked: the device runtime's may be for other cards.
    if (result == CUDA_ERROR_NO_BINARY_FOR_GPU && image.parts.size() > 1) continue;
    if (result != CUDA_SUCCESS) return result;
    Code::Piece piece;
    piece.ptx = best->kind == frontdoor::CodeKind::kPtx;
    piece.has_ptx = !piece.ptx && ptx != nullptr;
    result = frontdoor::extract(*best, wire::kMaxImageBytes - 1, &piece.bytes);
    if (result != CUDA_SUCCESS) return result;
    code->pieces.push_back(std::move(piece));
  }
  if (code->pieces.empty()) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  if (code->pieces.size() == 1) {
    const Code::Piece& piece = code->pieces[0];
    std::string why;
    if (piece.ptx) {
      code->info_known = frontdoor::scan_ptx(
          {reinterpret_cast<const char*>(piece.bytes.data()), piece.bytes.size()}, &code->info,
          &why);
      if (!code->info_known)
        log(Level::kInfo, "PTX that is only known to the driver: %s", why.c_str());
    } else {
      code->info_known = frontdoor::scan_cubin(piece.bytes, &code->info);
    }
  }
  *out = std::move(code);
  return CUDA_SUCCESS;
} catch (const std::bad_alloc&) {
  return CUDA_ERROR_OUT_OF_MEMORY;
}

bool take_ptx_instead(Device* device, const Code& code) {
  bool machine_code = false, better = false;
  for (const Code::Piece& piece : code.pieces) {
    machine_code |= !piece.ptx;
    better |= piece.has_ptx;
  }
  if (machine_code) device->ptx_only = true;
  return better;
}

// ---- Modules ----------------------------------------------------------------------------------

namespace {

CUresult upload(Context* context, Module* module, const Code::Piece& piece,
                const JitOptions& options) {
  wire::ModuleLoad body{module->wire,
                        piece.bytes.size(),
                        options.max_registers,
                        options.threads_per_block,
                        options.optimization,
                        options.debug_info,
                        options.want_log() ? 1u : 0u,
                        0};
  if (log_enabled(Level::kInfo)) body.want_log = 1;
  if (piece.has_ptx) body.debug_info |= 4;
  PendingCall call;
  const CUresult result = send_in_pieces(
      context, op(Operation::kModuleLoadDataEx), piece.bytes.data(), piece.bytes.size(),
      sizeof body,
      [&](wire::Encoder& encoder, bool more) {
        body.more_follows = more ? 1 : 0;
        encoder.put(body);
      },
      &call);
  wire::Decoder decoder = call.decoder();
  deliver_logs(options, decoder, nullptr);
  return result;
}

}  // namespace

CUresult load_module(Context* context, std::shared_ptr<Code> code, const JitOptions& options,
                     Library* library, Module** out) {
  ModuleTables& tables = module_tables();
  Module* module = tables.modules.allocate();
  if (module == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  module->context = context;
  module->library = library;
  module->functions.clear();
  CUresult result;
  if (code->pieces.size() == 1) {
    result = upload(context, module, code->pieces[0], options);
  } else {
    Code::Piece linked;
    result = link_pieces(context, code->pieces, options, &linked.bytes);
    if (result == CUDA_SUCCESS) result = upload(context, module, linked, options);
  }
  if (result != CUDA_SUCCESS) {
    tables.modules.discard(module);
    return settle(context, result);
  }
  module->code = std::move(code);
  tables.modules.publish(module);
  *out = module;
  return CUDA_SUCCESS;
}

void unload_module(Module* module, bool tell_worker) {
  ModuleTables& tables = module_tables();
  Context* context = module->context;
  const wire::Handle handle = module->wire;
  {
    std::lock_guard guard(module->lock);
    for (auto& [name, function] : module->functions) tables.functions.retire(function);
    module->functions.clear();
    module->code.reset();
  }
  if (!tables.modules.retire(module)) return;
  if (tell_worker) {
    Channel::Post post(channel_of(context), op(Operation::kModuleUnload), context->wire_id(),
                       sizeof handle);
    post.encoder().handle(handle);
  }
}

namespace {

void take_attributes(Function* function, const wire::FunctionInfo& info) {
  memcpy(function->attributes, info.attributes, sizeof function->attributes);
  function->attribute_mask = info.attribute_mask;
}

// Where parameters lie: from the driver if it can say, else from the image.
CUresult take_layout(Function* function, const wire::FunctionInfo& info, wire::Decoder& decoder,
                     const frontdoor::KernelLayout* known) {
  function->parameters.clear();
  function->parameter_bytes = 0;
  function->layout_known = false;
  function->max_threads = 0;
  memset(function->required_threads, 0, sizeof function->required_threads);
  if (known != nullptr) {
    function->parameters = known->parameters;
    function->parameter_bytes = known->parameter_bytes;
    memcpy(function->required_threads, known->required_threads, sizeof function->required_threads);
    if (known->max_threads[0] != 0) {
      function->max_threads = known->max_threads[0] * std::max(1u, known->max_threads[1]) *
                              std::max(1u, known->max_threads[2]);
    }
    function->layout_known = true;
    return CUDA_SUCCESS;
  }
  if (info.parameters_known == 0) return CUDA_SUCCESS;
  for (uint32_t i = 0; i < info.parameter_count; i++) {
    const auto parameter = decoder.get<wire::FunctionParameter>();
    if (!decoder.ok()) return CUDA_ERROR_UNKNOWN;
    if (parameter.offset > wire::kMaxParameterBytes || parameter.bytes > wire::kMaxParameterBytes) {
      return CUDA_ERROR_UNKNOWN;
    }
    function->parameters.push_back({parameter.offset, parameter.bytes});
    function->parameter_bytes =
        std::max(function->parameter_bytes, parameter.offset + parameter.bytes);
  }
  if (function->parameter_bytes > wire::kMaxParameterBytes) return CUDA_ERROR_UNKNOWN;
  function->layout_known = true;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult get_function(Module* module, const char* name, Function** out) {
  const size_t length = strlen(name);
  if (length == 0 || length > wire::kMaxNameBytes) return CUDA_ERROR_NOT_FOUND;
  std::lock_guard guard(module->lock);
  if (module->code == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const auto found = module->functions.find(name);
  if (found != module->functions.end()) {
    *out = found->second;
    return CUDA_SUCCESS;
  }
  const frontdoor::KernelLayout* layout = nullptr;
  if (module->code->info_known) {
    layout = module->code->info.kernel(name);
    if (layout == nullptr) return CUDA_ERROR_NOT_FOUND;
  }
  Function* function = module_tables().functions.allocate();
  if (function == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  const wire::FunctionGet body{module->wire, function->wire, length};
  PendingCall call;
  CUresult result = channel_of(module->context)
                        .call(
                            op(Operation::kModuleGetFunction), module->context->wire_id(),
                            sizeof body + wire::align8(length),
                            [&](wire::Encoder& encoder) {
                              encoder.put(body);
                              encoder.raw(name, length);
                            },
                            &call);
  if (result == CUDA_SUCCESS) {
    wire::Decoder decoder = call.decoder();
    const auto info = decoder.get<wire::FunctionInfo>();
    if (decoder.ok()) {
      take_attributes(function, info);
      result = take_layout(function, info, decoder, layout);
    } else {
      result = CUDA_ERROR_UNKNOWN;
    }
  }
  if (result != CUDA_SUCCESS) {
    module_tables().functions.discard(function);
    return settle(module->context, result);
  }
  function->context = module->context;
  function->name = name;
  function->module = module;
  function->library = nullptr;
  function->last = nullptr;
  function->occupancy.clear();
  function->set_attributes.clear();
  module_tables().functions.publish(function);
  module->functions[name] = function;
  *out = function;
  return CUDA_SUCCESS;
}

CUresult refresh_attributes(Function* function) {
  Context* context = function->context;
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(Operation::kFuncGetAttribute), context->wire_id(), sizeof(wire::Handle),
      [&](wire::Encoder& encoder) { encoder.handle(function->wire); }, &call);
  if (result != CUDA_SUCCESS) return settle(context, result);
  wire::Decoder decoder = call.decoder();
  const auto info = decoder.get<wire::FunctionInfo>();
  if (!decoder.ok()) return CUDA_ERROR_UNKNOWN;
  take_attributes(function, info);
  return CUDA_SUCCESS;
}

CUresult get_global(Module* module, const char* name, uint64_t* address, uint64_t* bytes) {
  const size_t length = strlen(name);
  if (length == 0 || length > wire::kMaxNameBytes) return CUDA_ERROR_NOT_FOUND;
  PendingCall call;
  const CUresult result = channel_of(module->context)
                              .call(
                                  op(Operation::kModuleGetGlobalV2), module->context->wire_id(),
                                  sizeof(wire::Handle) + wire::Encoder::bytes_size(length),
                                  [&](wire::Encoder& encoder) {
                                    encoder.handle(module->wire);
                                    encoder.bytes(name, length);
                                  },
                                  &call);
  if (result != CUDA_SUCCESS) return settle(module->context, result);
  wire::Decoder decoder = call.decoder();
  *address = decoder.scalar();
  *bytes = decoder.scalar();
  if (!decoder.ok()) return CUDA_ERROR_UNKNOWN;
  Range range;
  range.base = *address;
  range.bytes = *bytes;
  range.type = Range::Type::kGlobal;
  range.context = module->context;
  Process::get().ranges.add(range);  // false: it is known already
  return CUDA_SUCCESS;
}

// ---- Libraries --------------------------------------------------------------------------------

// With library->lock held.
CUresult library_code(Library* library, const Device& device, std::shared_ptr<Code>* out) {
  auto [entry, fresh] = library->code.try_emplace(device.ordinal);
  if (fresh) entry->second.first = make_code(*library->image, device, &entry->second.second);
  *out = entry->second.second;
  return entry->second.first;
}

CUresult library_module(Library* library, Context* context, Module** out) {
  std::lock_guard guard(library->lock);
  const auto found = library->modules.find(context);
  if (found != library->modules.end()) {
    *out = found->second;
    return CUDA_SUCCESS;
  }
  std::shared_ptr<Code> code;
  CUresult result = library_code(library, *context->device, &code);
  if (result != CUDA_SUCCESS) return result;
  result = load_module(context, code, library->options, library, out);
  if (result == CUDA_ERROR_NO_BINARY_FOR_GPU && take_ptx_instead(context->device, *code)) {
    library->code.erase(context->device->ordinal);
    result = library_code(library, *context->device, &code);
    if (result == CUDA_SUCCESS) {
      result = load_module(context, code, library->options, library, out);
    }
  }
  if (result == CUDA_SUCCESS) library->modules[context] = *out;
  return result;
}

namespace {
CUresult bind_kernel(Context* context, Function* kernel, Function** out) {
  Module* module;
  CUresult result = library_module(kernel->library, context, &module);
  if (result != CUDA_SUCCESS) return result;
  result = get_function(module, kernel->name.c_str(), out);
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard guard(kernel->lock);
  const auto set = kernel->set_attributes.find(context->device->ordinal);
  if (set != kernel->set_attributes.end()) {
    for (const auto& [attribute, value] : set->second) {
      cuFuncSetAttribute(reinterpret_cast<CUfunction>((*out)->handle),
                         static_cast<CUfunction_attribute>(attribute), value);
    }
  }
  kernel->last.store(*out, std::memory_order_release);
  return CUDA_SUCCESS;
}
}  // namespace

CUresult function_in(Context* context, CUfunction handle, Function** out) {
  Function* found = module_tables().functions.find(reinterpret_cast<uint64_t>(handle));
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (found->library == nullptr) {
    if (found->context != context) return CUDA_ERROR_INVALID_HANDLE;
    *out = found;
    return CUDA_SUCCESS;
  }
  Function* last = found->last.load(std::memory_order_acquire);
  if (last != nullptr && last->context == context) {
    *out = last;
    return CUDA_SUCCESS;
  }
  return bind_kernel(context, found, out);
}

void drop_modules_of(Context* context) {
  ModuleTables& tables = module_tables();
  tables.functions.for_each([&](Function* function) {
    Function* last = function->last.load();
    if (last != nullptr && last->context == context) function->last = nullptr;
  });
  tables.libraries.for_each([&](Library* library) {
    std::lock_guard guard(library->lock);
    library->modules.erase(context);
  });
  tables.modules.for_each([&](Module* module) {
    if (module->context == context) unload_module(module, false);
  });
}

}  // namespace gpupool::client
