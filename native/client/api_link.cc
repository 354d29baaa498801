// The linker: cuLink*. Inputs travel to the worker's driver; the image comes back.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <stdio.h>
#include <string.h>

#include "api/cuda_abi.h"
#include "client/links.h"
#include "client/log.h"

namespace gpupool::client {

struct LinkState {
  JitOptions options;
  std::vector<uint8_t> image;
};

namespace {

CUresult create_link(Context* context, const JitOptions& options, Link** out) {
  Link* link = Process::get().tables.links.allocate();
  if (link == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  link->context = context;
  link->state = std::make_shared<LinkState>();
  link->state->options = options;
  const wire::LinkOptions body{options.max_registers,
                               options.threads_per_block,
                               options.optimization,
                               options.debug_info,
                               1,
                               0};
  {
    Channel::Post post(channel_of(context), op(Operation::kLinkCreateV2), context->wire_id(),
                       sizeof(wire::Handle) + sizeof body);
    wire::Encoder encoder = post.encoder();
    encoder.handle(link->wire);
    encoder.put(body);
  }
  Process::get().tables.links.publish(link);
  *out = link;
  return CUDA_SUCCESS;
}

CUresult add(Link* link, CUjitInputType type, const void* data, uint64_t bytes, const char* name) {
  if (name == nullptr) name = "";
  const size_t name_bytes = std::min<size_t>(strlen(name), 4096);
  wire::LinkAdd body{
      link->wire, bytes, static_cast<uint32_t>(type), static_cast<uint32_t>(name_bytes), 0, 0};
  PendingCall call;
  const CUresult result = send_in_pieces(
      link->context, op(Operation::kLinkAddDataV2), static_cast<const uint8_t*>(data), bytes,
      sizeof body + wire::align8(name_bytes),
      [&](wire::Encoder& encoder, bool more) {
        body.more_follows = more ? 1 : 0;
        encoder.put(body);
        encoder.raw(name, name_bytes);
      },
      &call);
  wire::Decoder decoder = call.decoder();
  deliver_logs(link->state->options, decoder, nullptr);
  return settle(link->context, result);
}

CUresult complete(Link* link, std::vector<uint8_t>* image) {
  PendingCall call;
  call.bulk_to_vector = true;
  call.bulk_room = wire::kMaxImageBytes;
  const CUresult result =
      channel_of(link->context)
          .call(
              op(Operation::kLinkComplete), link->context->wire_id(), sizeof(wire::Handle),
              [&](wire::Encoder& encoder) { encoder.handle(link->wire); }, &call);
  wire::Decoder decoder = call.decoder();
  uint64_t image_bytes = 0;
  deliver_logs(link->state->options, decoder, &image_bytes);
  if (result != CUDA_SUCCESS) return settle(link->context, result);
  if (image_bytes != call.bulk.size()) return CUDA_ERROR_UNKNOWN;
  *image = std::move(call.bulk);
  return CUDA_SUCCESS;
}

void destroy_link(Link* link) {
  const wire::Handle handle = link->wire;
  Context* context = link->context;
  auto state = std::move(link->state);
  if (!Process::get().tables.links.retire(link)) return;
  Channel::Post post(channel_of(context), op(Operation::kLinkDestroy), context->wire_id(),
                     sizeof handle);
  post.encoder().handle(handle);
}

Link* find_link(CUlinkState state) {
  return Process::get().tables.links.find(reinterpret_cast<uint64_t>(state));
}

}  // namespace

CUresult link_pieces(Context* context, const std::vector<Code::Piece>& pieces,
                     const JitOptions& options, std::vector<uint8_t>* image) {
  Link* link;
  CUresult result = create_link(context, options, &link);
  if (result != CUDA_SUCCESS) return result;
  for (const Code::Piece& piece : pieces) {
    if (result != CUDA_SUCCESS) break;
    std::vector<uint8_t> text;
    const std::vector<uint8_t>* data = &piece.bytes;
    if (piece.ptx) {  // the driver wants the NUL
      text = piece.bytes;
      text.push_back(0);
      data = &text;
    }
    result = add(link, piece.ptx ? CU_JIT_INPUT_PTX : CU_JIT_INPUT_CUBIN, data->data(),
                 data->size(), "");
  }
  if (result == CUDA_SUCCESS) result = complete(link, image);
  destroy_link(link);
  return result;
}

}  // namespace gpupool::client

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()     \
  Context* context; \
  if (const CUresult e_ = enter(&context)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;

#pragma GCC visibility push(default)
extern "C" {

CUresult cuLinkCreate_v2(unsigned int count, CUjit_option* options, void** values,
                         CUlinkState* out) {
  ENTER();
  REQUIRE(out != nullptr);
  JitOptions parsed;
  if (const CUresult e = parse_options(count, options, values, &parsed)) return e;
  Link* link;
  const CUresult result = create_link(context, parsed, &link);
  if (result == CUDA_SUCCESS) *out = reinterpret_cast<CUlinkState>(link->handle);
  return result;
}

CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t bytes,
                          const char* name, unsigned int count, CUjit_option* options,
                          void** values) {
  ENTER();
  Link* link = find_link(state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  REQUIRE(data != nullptr && bytes != 0 && bytes < wire::kMaxImageBytes);
  REQUIRE(type >= CU_JIT_INPUT_CUBIN && type < CU_JIT_NUM_INPUT_TYPES);
  JitOptions unused;
  if (const CUresult e = parse_options(count, options, values, &unused)) return e;
  return add(link, type, data, bytes, name);
}

CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path,
                          unsigned int count, CUjit_option* options, void** values) {
  REQUIRE(path != nullptr);
  FILE* file = fopen(path, "rbe");
  if (file == nullptr) return CUDA_ERROR_FILE_NOT_FOUND;
  std::vector<uint8_t> data;
  uint8_t piece[65536];
  size_t n;
  while ((n = fread(piece, 1, sizeof piece, file)) > 0 && data.size() < wire::kMaxImageBytes) {
    data.insert(data.end(), piece, piece + n);
  }
  fclose(file);
  if (type == CU_JIT_INPUT_PTX) data.push_back(0);
  return cuLinkAddData_v2(state, type, data.data(), data.size(), path, count, options, values);
}

CUresult cuLinkComplete(CUlinkState state, void** image, size_t* bytes) {
  ENTER();
  Link* link = find_link(state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  REQUIRE(image != nullptr);
  const CUresult result = complete(link, &link->state->image);
  if (result != CUDA_SUCCESS) return result;
  *image = link->state->image.data();  // valid until the state is destroyed
  if (bytes != nullptr) *bytes = link->state->image.size();
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
  ENTER();
  Link* link = find_link(state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  destroy_link(link);
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
