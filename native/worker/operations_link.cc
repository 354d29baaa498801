// The linker.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>
#include <string>

#include "worker/admission.h"
#include "worker/session_state.h"

namespace gpupool::worker {
namespace {

using wire::Operation;

constexpr int kMaxLinks = 64;  // each has two log buffers

// The logs so far, and optionally the image's size.
bool answer_with_logs(SessionState& session, const Command& command, const Link& link,
                      CUresult result, uint64_t image_bytes, const uint8_t* image) {
  const char* info = link.info_log.get();
  const char* error = link.error_log.get();
  const size_t info_bytes = strnlen(info, wire::kMaxLogBytes);
  const size_t error_bytes = strnlen(error, wire::kMaxLogBytes);
  std::vector<uint8_t> body(sizeof(wire::CompileLogs) + wire::align8(info_bytes) +
                            wire::align8(error_bytes));
  wire::Encoder encoder(body.data());
  encoder.put(wire::CompileLogs{image_bytes, static_cast<uint32_t>(info_bytes),
                                static_cast<uint32_t>(error_bytes)});
  encoder.raw(info, info_bytes);
  encoder.raw(error, error_bytes);
  if (image_bytes == 0) return session.reply(command.call, result, body.data(), encoder.size());
  const uint8_t* at = image;
  bool first = true;  // its reply has the logs
  for (uint64_t left = image_bytes; left > 0;) {
    carriers::Part parts[wire::kMaxBulkSegments];
    int count = 0;
    while (left > 0 && count < static_cast<int>(wire::kMaxBulkSegments)) {
      const uint64_t piece = std::min<uint64_t>(left, wire::kMaxBulkSegment);
      parts[count++] = {const_cast<uint8_t*>(at), piece};
      at += piece;
      left -= piece;
    }
    if (!session.reply(command.call, result, body.data(), first ? encoder.size() : 0, parts, count,
                       left != 0)) {
      return false;
    }
    first = false;
  }
  return true;
}

bool create(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  const auto body = decoder.get<wire::LinkOptions>();
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  int count = 0;
  session.links.for_each([&](wire::Handle, Link&) { count++; });
  if (count >= kMaxLinks) return session.answer(command, CUDA_ERROR_OUT_OF_MEMORY);
  Link* link = session.links.create(handle);
  if (link == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  link->context = context->id;
  link->info_log.reset(new char[wire::kMaxLogBytes + 1]());
  link->error_log.reset(new char[wire::kMaxLogBytes + 1]());
  link->options.reset(new CUjit_option[10]);
  link->values.reset(new void*[10]);
  unsigned options = 0;
  auto add = [&](CUjit_option option, uint64_t value) {
    link->options[options] = option;
    link->values[options++] = reinterpret_cast<void*>(value);
  };
  add(CU_JIT_INFO_LOG_BUFFER, reinterpret_cast<uint64_t>(link->info_log.get()));
  add(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, wire::kMaxLogBytes);
  add(CU_JIT_ERROR_LOG_BUFFER, reinterpret_cast<uint64_t>(link->error_log.get()));
  add(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, wire::kMaxLogBytes);
  if (body.max_registers != 0) add(CU_JIT_MAX_REGISTERS, body.max_registers);
  if (body.threads_per_block != 0) add(CU_JIT_THREADS_PER_BLOCK, body.threads_per_block);
  if (body.optimization >= 0 && body.optimization <= 4) {
    add(CU_JIT_OPTIMIZATION_LEVEL, static_cast<uint64_t>(body.optimization));
  }
  if (body.debug_info & 1) add(CU_JIT_GENERATE_DEBUG_INFO, 1);
  if (body.debug_info & 2) add(CU_JIT_GENERATE_LINE_INFO, 1);
  const auto call = session.driver().cuLinkCreate_v2;
  const CUresult result = call == nullptr ? CUDA_ERROR_NOT_SUPPORTED : session.query(context, [&] {
    return call(options, link->options.get(), link->values.get(), &link->driver);
  });
  if (result != CUDA_SUCCESS) session.links.erase(handle);
  return session.answer(command, result);
}

bool add(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::LinkAdd>();
  const std::string name(decoder.raw(body.name_bytes));
  if (!decoder.finished() || body.bytes > wire::kMaxImageBytes || body.bytes == 0 ||
      (body.more_follows == 0) != command.wants_reply()) {
    return session.malformed(command);
  }
  Link* link = session.links.find(body.link);
  Context* context = link == nullptr ? nullptr : session.context_by_id(link->context);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  if (link->host_charged == 0 && !link->refused) {
    link->refused = !session.account().charge_host(body.bytes);
    if (!link->refused) link->host_charged = body.bytes;
  }
  if (link->refused) {
    if (body.more_follows != 0) return true;
    link->refused = false;
    return answer_with_logs(session, command, *link, CUDA_ERROR_OUT_OF_MEMORY, 0, nullptr);
  }
  if (link->input.size() + command.bulk_bytes > link->host_charged ||
      body.bytes != link->host_charged) {
    return session.malformed(command);
  }
  const size_t before = link->input.size();
  link->input.reserve(body.bytes);
  link->input.resize(before + command.bulk_bytes);
  if (!session.read_bulk(link->input.data() + before, command.bulk_bytes)) return false;
  if (body.more_follows != 0) return true;
  if (link->input.size() != body.bytes) return session.malformed(command);
  int major = 0, minor = 0;
  const int device = session.assignment().device_ordinal;
  session.driver().cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                        device);
  session.driver().cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                        device);
  std::vector<LinkInput> inputs;
  CUresult result = admit_link_input(
      static_cast<CUjitInputType>(body.type), std::move(link->input), major, minor,
      [&](uint64_t bytes) {
        if (!session.account().charge_host(bytes)) return false;
        link->host_charged += bytes;
        return true;
      },
      &inputs);
  // Code for which the driver has no use is passed over for the next best.
  for (size_t i = 0; i < inputs.size(); i++) {
    LinkInput& input = inputs[i];
    result = session.query(context, [&] {
      return session.driver().cuLinkAddData_v2(link->driver, input.type, input.bytes.data(),
                                               input.bytes.size(), name.c_str(), 0, nullptr,
                                               nullptr);
    });
    if (result != CUDA_ERROR_NO_BINARY_FOR_GPU && result != CUDA_ERROR_INVALID_IMAGE) break;
  }
  std::vector<LinkInput>().swap(inputs);
  std::vector<uint8_t>().swap(link->input);
  session.account().refund_host(link->host_charged);
  link->host_charged = 0;
  // The driver keeps the inputs until the link is destroyed.
  std::string why;
  if (!session.account().settle_host(&why)) return session.refuse(why);
  return answer_with_logs(session, command, *link, result, 0, nullptr);
}

}  // namespace

bool execute_link(SessionState& session, const Command& command) {
  const auto operation = static_cast<Operation>(command.operation);
  if (operation == Operation::kLinkCreateV2) return create(session, command);
  if (operation == Operation::kLinkAddDataV2) return add(session, command);
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  if (!decoder.finished()) return session.malformed(command);
  Link* link = session.links.find(handle);
  Context* context = link == nullptr ? nullptr : session.context_by_id(link->context);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  if (operation == Operation::kLinkDestroy) {
    const CUresult result =
        session.query(context, [&] { return session.driver().cuLinkDestroy(link->driver); });
    session.account().refund_host(link->host_charged);
    session.links.erase(handle);
    return session.answer(command, result);
  }
  if (!command.wants_reply()) return session.malformed(command);
  void* image = nullptr;
  size_t bytes = 0;
  CUresult result = session.query(
      context, [&] { return session.driver().cuLinkComplete(link->driver, &image, &bytes); });
  if (result == CUDA_SUCCESS && bytes > wire::kMaxImageBytes) result = CUDA_ERROR_OUT_OF_MEMORY;
  return answer_with_logs(session, command, *link, result, result == CUDA_SUCCESS ? bytes : 0,
                          static_cast<const uint8_t*>(image));
}

}  // namespace gpupool::worker
