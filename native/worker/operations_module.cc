// Modules, functions and variables.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>
#include <string>

#include "worker/admission.h"
#include "worker/session_state.h"

namespace gpupool::worker {

using wire::Operation;

namespace {

constexpr size_t kMaxParameters = 4096;

// The options of a compilation, and the logs that it writes.
class Jit {
 public:
  explicit Jit(const wire::ModuleLoad& body) {
    if (body.want_log != 0) {
      info_.resize(wire::kMaxLogBytes);
      error_.resize(wire::kMaxLogBytes);
      add(CU_JIT_INFO_LOG_BUFFER, reinterpret_cast<uint64_t>(info_.data()));
      add(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, info_.size());
      add(CU_JIT_ERROR_LOG_BUFFER, reinterpret_cast<uint64_t>(error_.data()));
      add(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, error_.size());
    }
    if (body.max_registers != 0) add(CU_JIT_MAX_REGISTERS, body.max_registers);
    if (body.threads_per_block != 0) add(CU_JIT_THREADS_PER_BLOCK, body.threads_per_block);
    if (body.optimization >= 0 && body.optimization <= 4) {
      add(CU_JIT_OPTIMIZATION_LEVEL, static_cast<uint64_t>(body.optimization));
    }
    if (body.debug_info & 1) add(CU_JIT_GENERATE_DEBUG_INFO, 1);
    if (body.debug_info & 2) add(CU_JIT_GENERATE_LINE_INFO, 1);
    if (body.debug_info & 4) add(CU_JIT_FALLBACK_STRATEGY, CU_PREFER_PTX);
  }

  unsigned count() const { return count_; }
  CUjit_option* options() { return options_; }
  void** values() { return values_; }

  // A sentence of our own, if the client wants any and the driver has said nothing.
  void say(const std::string& why) {
    if (error_.empty() || error_[0] != '\0') return;
    const size_t bytes = std::min(why.size(), error_.size() - 1);
    memcpy(error_.data(), why.data(), bytes);
    error_[bytes] = '\0';
  }

  bool reply(SessionState& session, const Command& command, CUresult result) {
    const size_t info_bytes = info_.empty() ? 0 : strnlen(info_.data(), info_.size());
    const size_t error_bytes = error_.empty() ? 0 : strnlen(error_.data(), error_.size());
    std::vector<uint8_t> body(sizeof(wire::CompileLogs) + wire::align8(info_bytes) +
                              wire::align8(error_bytes));
    wire::Encoder encoder(body.data());
    encoder.put(wire::CompileLogs{0, static_cast<uint32_t>(info_bytes),
                                  static_cast<uint32_t>(error_bytes)});
    encoder.raw(info_.data(), info_bytes);
    encoder.raw(error_.data(), error_bytes);
    return session.reply(command.call, result, body.data(), encoder.size());
  }

 private:
  void add(CUjit_option option, uint64_t value) {
    options_[count_] = option;
    values_[count_++] = reinterpret_cast<void*>(value);
  }

  CUjit_option options_[10];
  void* values_[10];
  unsigned count_ = 0;
  std::vector<char> info_, error_;
};

// PTX of whose variables the scan could be mistaken is compiled first, which takes no memory of the
// device: of machine code the sections tell. Also the driver then says what is wrong with the text.
CUresult compile(SessionState& session, Context* context, Jit& jit, Code* code) {
  const DriverTable& driver = session.driver();
  if (driver.cuLinkCreate_v2 == nullptr) return CUDA_ERROR_INVALID_PTX;
  CUlinkState link = nullptr;
  CUresult result = session.query(context, [&] {
    return driver.cuLinkCreate_v2(jit.count(), jit.options(), jit.values(), &link);
  });
  if (result != CUDA_SUCCESS) return result;
  result = driver.cuLinkAddData_v2(link, CU_JIT_INPUT_PTX, code->bytes.data(), code->bytes.size(),
                                   "ptx input", 0, nullptr, nullptr);
  void* made = nullptr;
  size_t bytes = 0;
  if (result == CUDA_SUCCESS) result = driver.cuLinkComplete(link, &made, &bytes);
  if (result == CUDA_SUCCESS && bytes > wire::kMaxImageBytes) result = CUDA_ERROR_OUT_OF_MEMORY;
  Code compiled;
  if (result == CUDA_SUCCESS) {
    const auto* at = static_cast<const uint8_t*>(made);
    result = admit_image({at, at + bytes}, &compiled);
  }
  driver.cuLinkDestroy(link);
  if (result != CUDA_SUCCESS) return result;
  if (!compiled.variables_known) return CUDA_ERROR_INVALID_PTX;
  *code = std::move(compiled);
  return CUDA_SUCCESS;
}

// Loads the image; in any case what it does not keep is given back.
CUresult load_image(SessionState& session, Context* context, Module* module, Jit& jit) {
  // The device's printf is a call of vprintf in PTX and in cubins.
  static constexpr std::string_view kPrint = "vprintf";
  module->prints =
      memmem(module->image.data(), module->image.size(), kPrint.data(), kPrint.size()) != nullptr;
  Code code;
  CUresult result = admit_image(std::move(module->image), &code);
  std::vector<uint8_t>().swap(module->image);
  const std::string why = code.why;
  if (result == CUDA_SUCCESS && !code.variables_known) {
    result = compile(session, context, jit, &code);
    if (result == CUDA_ERROR_INVALID_PTX) {
      jit.say("gpupool cannot tell how much memory the variables of this PTX take: " + why);
    }
  } else if (result != CUDA_SUCCESS) {
    jit.say("gpupool refuses the image: " + why);
  }
  if (result != CUDA_SUCCESS) return result;
  if (!session.account().charge(code.variable_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  result = session.query(context, [&] {
    return session.driver().cuModuleLoadDataEx(&module->driver, code.bytes.data(), jit.count(),
                                               jit.options(), jit.values());
  });
  if (result != CUDA_SUCCESS) {
    session.account().refund(code.variable_bytes);
    return result;
  }
  module->charged = code.variable_bytes;
  return CUDA_SUCCESS;
}

wire::FunctionInfo info_of(SessionState& session, CUfunction function) {
  wire::FunctionInfo info{};
  for (uint32_t i = 0; i < wire::kFunctionAttributes; i++) {
    if (session.driver().cuFuncGetAttribute(
            &info.attributes[i], static_cast<CUfunction_attribute>(i), function) == CUDA_SUCCESS) {
      info.attribute_mask |= 1u << i;
    }
  }
  return info;
}

bool load(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::ModuleLoad>();
  if (!decoder.finished() || body.image_bytes > wire::kMaxImageBytes ||
      (body.more_follows == 0) != command.wants_reply()) {
    return session.malformed(command);
  }
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Module* module = session.modules.find(body.module);
  if (module == nullptr) {
    module = session.modules.create(body.module);
    if (module == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
    module->loading = true;
    module->context = context->id;
    module->refused = !session.account().charge_host(body.image_bytes);
    if (!module->refused) module->host_charged = body.image_bytes;
  } else if (!module->loading || module->context != context->id) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  if (module->refused) {
    if (body.more_follows != 0) return true;
    session.modules.erase(body.module);
    return Jit(body).reply(session, command, CUDA_ERROR_OUT_OF_MEMORY);
  }
  if (module->image.size() + command.bulk_bytes > module->host_charged ||
      body.image_bytes != module->host_charged) {
    return session.malformed(command);
  }
  const size_t before = module->image.size();
  module->image.reserve(body.image_bytes);
  module->image.resize(before + command.bulk_bytes);
  if (!session.read_bulk(module->image.data() + before, command.bulk_bytes)) return false;
  if (body.more_follows != 0) return true;
  if (module->image.size() != body.image_bytes) return session.malformed(command);

  Jit jit(body);
  // While it is compiled it lies there several times.
  const uint64_t working = 3 * module->host_charged;
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (session.account().charge_host(working)) {
    result = load_image(session, context, module, jit);
    session.account().refund_host(working);
  }
  module->loading = false;
  session.account().refund_host(module->host_charged);
  module->host_charged = 0;
  // What the driver took for it in fact, of the device and of the host.
  std::string why;
  if (result == CUDA_SUCCESS &&
      (!session.account().settle() || !session.account().settle_host(&why))) {
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (result != CUDA_SUCCESS) {
    drop_module(session, body.module, true);
    session.account().settle();
  }
  return jit.reply(session, command, result);
}

bool get_function(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::FunctionGet>();
  const std::string_view name = decoder.raw(body.name_bytes);
  if (!decoder.finished() || !command.wants_reply() || name.size() > wire::kMaxNameBytes) {
    return session.malformed(command);
  }
  Module* module = session.modules.find(body.module);
  Context* context = module == nullptr ? nullptr : session.context_by_id(module->context);
  if (context == nullptr || module->loading) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  const std::string text(name);
  CUfunction made = nullptr;
  const CUresult result = session.query(context, [&] {
    return session.driver().cuModuleGetFunction(&made, module->driver, text.c_str());
  });
  std::string why;
  if (!session.account().settle_or_end(&why)) return session.refuse(why);
  if (result != CUDA_SUCCESS) return session.answer(command, result);
  Function* function = session.functions.create(body.function);
  if (function == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  function->driver = made;
  function->context = context->id;
  function->module = body.module;
  function->prints = module->prints;
  wire::FunctionInfo info = info_of(session, made);
  std::vector<wire::FunctionParameter> parameters;
  const auto ask = session.driver().cuFuncGetParamInfo;
  if (ask != nullptr) {
    CUresult last = CUDA_SUCCESS;
    while (parameters.size() < kMaxParameters) {
      size_t offset, bytes;
      last = ask(made, parameters.size(), &offset, &bytes);
      if (last != CUDA_SUCCESS) break;
      parameters.push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(bytes)});
      function->parameter_bytes =
          std::max(function->parameter_bytes, static_cast<uint32_t>(offset + bytes));
    }
    // The index behind the last parameter is an invalid value; anything else is another trouble.
    function->parameters_known = last == CUDA_ERROR_INVALID_VALUE;
  }
  info.parameters_known = function->parameters_known ? 1 : 0;
  info.parameter_count = function->parameters_known ? static_cast<uint32_t>(parameters.size()) : 0;
  if (!function->parameters_known) function->parameter_bytes = 0;
  std::vector<uint8_t> reply(sizeof info + info.parameter_count * sizeof(wire::FunctionParameter));
  wire::Encoder encoder(reply.data());
  encoder.put(info);
  for (uint32_t i = 0; i < info.parameter_count; i++) encoder.put(parameters[i]);
  return session.answer(command, CUDA_SUCCESS, reply.data(), encoder.size());
}

bool get_global(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  const std::string name(decoder.bytes());
  if (!decoder.finished() || !command.wants_reply() || name.size() > wire::kMaxNameBytes) {
    return session.malformed(command);
  }
  Module* module = session.modules.find(handle);
  Context* context = module == nullptr ? nullptr : session.context_by_id(module->context);
  if (context == nullptr || module->loading) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const CUresult result = session.query(context, [&] {
    return session.driver().cuModuleGetGlobal_v2(&address, &bytes, module->driver, name.c_str());
  });
  if (result == CUDA_SUCCESS) session.memory().add_global(address, bytes, handle.index);
  const uint64_t words[2] = {address, bytes};
  return session.answer(command, result, words, sizeof words);
}

}  // namespace

void drop_module(SessionState& session, wire::Handle handle, bool unload) {
  Module* module = session.modules.find(handle);
  if (module == nullptr) return;
  session.functions.for_each([&](wire::Handle function_handle, Function& function) {
    if (function.module.index == handle.index) session.functions.erase(function_handle);
  });
  session.memory().drop_globals(handle.index);
  if (unload && module->driver != nullptr) {
    if (Context* context = session.context_by_id(module->context)) {
      session.query(context, [&] { return session.driver().cuModuleUnload(module->driver); });
    }
  }
  if (module->charged != 0) session.account().refund(module->charged);
  session.account().refund_host(module->host_charged);
  session.modules.erase(handle);
}

bool execute_module(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  switch (static_cast<Operation>(command.operation)) {
    case Operation::kModuleLoadDataEx:
      return load(session, command);
    case Operation::kModuleGetFunction:
      return get_function(session, command);
    case Operation::kModuleGetGlobalV2:
      return get_global(session, command);
    case Operation::kModuleUnload: {
      const wire::Handle handle = decoder.handle();
      if (!decoder.finished()) return session.malformed(command);
      if (session.modules.find(handle) == nullptr) {
        return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
      }
      drop_module(session, handle, true);
      return session.answer(command, CUDA_SUCCESS);
    }
    default:
      break;
  }
  const wire::Handle handle = decoder.handle();
  Function* function = session.function(handle);
  Context* context = function == nullptr ? nullptr : session.context_by_id(function->context);
  const DriverTable& driver = session.driver();
  switch (static_cast<Operation>(command.operation)) {
    case Operation::kFuncSetAttribute: {
      const auto attribute = static_cast<CUfunction_attribute>(decoder.narrow<int>());
      const int value = decoder.narrow<int>();
      if (!decoder.finished()) return session.malformed(command);
      if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
      if (driver.cuFuncSetAttribute == nullptr)
        return session.answer(command, CUDA_ERROR_NOT_SUPPORTED);
      return session.answer(command, session.query(context, [&] {
        return driver.cuFuncSetAttribute(function->driver, attribute, value);
      }));
    }
    case Operation::kFuncGetAttribute: {
      if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
      if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
      session.make_current(context);
      const wire::FunctionInfo info = info_of(session, function->driver);
      return session.answer(command, CUDA_SUCCESS, &info, sizeof info);
    }
    default: {
      const int block = decoder.narrow<int>();
      const uint64_t shared = decoder.scalar();
      const auto flags = decoder.narrow<unsigned>();
      if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
      if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
      const auto ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags;
      if (ask == nullptr) return session.answer(command, CUDA_ERROR_NOT_SUPPORTED);
      int blocks = 0;
      const CUresult result = session.query(
          context, [&] { return ask(&blocks, function->driver, block, shared, flags); });
      const auto word = static_cast<uint64_t>(static_cast<int64_t>(blocks));
      return session.answer(command, result, &word, sizeof word);
    }
  }
}

}  // namespace gpupool::worker
