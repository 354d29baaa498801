#define GPUPOOL_CUDA_ABI_EXACT 1
#include "client/state.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "carriers/ring.h"
#include "client/connect.h"
#include "client/log.h"
#include "client/pools.h"
#include "frontdoor/default_stream.h"
#include "frontdoor/visible_devices.h"
#include "graphs/arrays.h"
#include "graphs/capture.h"
#include "wire/handshake.h"

namespace gpupool::client {
namespace {

// What a data connection goes on over: itself, or the ring that was offered with it.
std::unique_ptr<carriers::Carrier> settle_carrier(wire::Connected& connected) {
  auto carrier = std::move(static_cast<CarrierStream&>(*connected.stream).carrier);
  const wire::CarrierOffer& offer = connected.handshake.offer;
  const int memory =
      strcmp(carrier->kind(), "unix") == 0 ? carriers::take_descriptor(*carrier) : -1;
  const bool region = offer.kind == static_cast<uint32_t>(wire::OfferKind::kRegion);
  if (!region && offer.kind != static_cast<uint32_t>(wire::OfferKind::kRing)) {
    if (memory >= 0) close(memory);
    return carrier;
  }
  carriers::RingPlace place;
  if (region) {
    // Zero would mean a memfd, which is checked in another way.
    place.file_bytes = std::max<uint64_t>(connected.handshake.region.region_bytes, 1);
    place.offset = connected.handshake.region.offset;
  }
  return carriers::choose_ring(std::move(carrier), memory, offer.version,
                               {offer.command_bytes, offer.bulk_bytes}, connected.handshake.epoch,
                               place);
}

// In a virtual machine every connection brings the region's descriptor; most have no use for it.
void drop_descriptor(wire::HandshakeStream& stream) {
  carriers::Carrier& carrier = *static_cast<CarrierStream&>(stream).carrier;
  if (strcmp(carrier.kind(), "unix") != 0) return;
  if (const int fd = carriers::take_descriptor(carrier); fd >= 0) close(fd);
}

// Arenas lie where neither programs nor the dynamic linker put anything, nor AddressSanitizer its
// shadow, at multiples of their size.
constexpr uint64_t kArenaFirst = 0x2000'0000'0000;
constexpr uint64_t kArenaLast = 0x5000'0000'0000;
constexpr uint64_t kMinArenaBytes = 16ull << 30;
constexpr uint64_t kUsualArenaBytes = 256ull << 30;  // a slice may grow while a program runs

// Room for fragmentation, and for memory that is mapped more than once.
uint64_t arena_size(uint64_t memory, uint64_t least) {
  uint64_t bytes = least;
  while (bytes < memory * 4) bytes *= 2;
  return bytes;
}

// Reserves the next free arena at or after *at; false: there is none.
bool reserve_arena(uint64_t* at, uint64_t bytes) {
  for (uint64_t base = (*at + bytes - 1) / bytes * bytes; base + bytes <= kArenaLast;
       base += bytes) {
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
    void* got = mmap(reinterpret_cast<void*>(base), bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == reinterpret_cast<void*>(base)) {
      *at = base;
      return true;
    }
    if (got != MAP_FAILED) munmap(got, bytes);  // a kernel that does not know the flag
  }
  return false;
}

pthread_key_t thread_key;
__attribute__((tls_model("initial-exec"))) thread_local ThreadState* own_state = nullptr;

void end_thread(void* state) {
  own_state = nullptr;
  delete static_cast<ThreadState*>(state);
}

}  // namespace

struct Process::Session {
  wire::LeaseFile lease;
  wire::HandshakeResult control;
  size_t carrier = 0;
  std::unique_ptr<wire::HandshakeStream> stream;  // stays open: its end is the session's end
};

Process& Process::get() {
  static Process* const process = new Process;
  return *process;
}

Process::Process() {
  pthread_key_create(&thread_key, end_thread);
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
}

// The connections are the parent's. As with the real driver, CUDA is of no use in a child of a
// process that has used it.
void Process::after_fork_in_child() {
  Process& process = get();
  if (process.state_.load() == CUDA_ERROR_NOT_INITIALIZED) return;
  process.state_.store(-1);
  if (process.session_ != nullptr && process.session_->stream != nullptr) {
    static_cast<CarrierStream*>(process.session_->stream.get())->carrier->abandon();
  }
  for (auto& device : process.devices_) {
    if (Channel* channel = device->channel.load()) channel->abandon();
  }
}

CUresult Process::init(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const int known = state_.load(std::memory_order_acquire);
  if (known == -1) return CUDA_ERROR_NOT_INITIALIZED;
  if (known != CUDA_ERROR_NOT_INITIALIZED) return static_cast<CUresult>(known);
  std::lock_guard guard(lock_);
  if (state_.load() == CUDA_ERROR_NOT_INITIALIZED) {
    const CUresult result = connect();
    // "No device" is not kept: a lease may be there at the next try.
    if (result != CUDA_SUCCESS) return result;
    state_.store(result, std::memory_order_release);
  }
  return static_cast<CUresult>(state_.load());
}

CUresult Process::connect() {
  std::string why;
  // A program that was given a lease is told what is wrong with it; others just see no device.
  const bool speak = log_chosen() || wire::lease_was_given();
  auto lease = wire::load_lease_from_environment(&why);
  if (!lease) {
    if (speak) log(Level::kError, "no lease: %s", why.c_str());
    return CUDA_ERROR_NO_DEVICE;
  }
  wire::HelloRequest request;
  request.purpose = wire::ConnectionPurpose::kSession;
  wire::Connected connected = wire::connect_lease(*lease, request, open_carrier);
  if (!connected.handshake.ok) {
    if (speak) log(Level::kError, "no session: %s", connected.handshake.message.c_str());
    return CUDA_ERROR_NO_DEVICE;
  }
  drop_descriptor(*connected.stream);
  session_ = std::make_unique<Session>();
  session_->lease = std::move(*lease);
  session_->carrier = connected.carrier;
  session_->stream = std::move(connected.stream);
  session_->control = std::move(connected.handshake);
  choose_visible(session_->control.devices);
  if (devices_.empty()) {
    if (log_chosen()) log(Level::kError, "no device of the lease is visible");
    session_.reset();
    return CUDA_ERROR_NO_DEVICE;
  }
  log(Level::kInfo, "session %s: %zu devices over %s",
      wire::format_uuid(session_->control.session).c_str(), devices_.size(),
      session_->lease.carriers[session_->carrier].kind.c_str());
  return CUDA_SUCCESS;
}

void Process::choose_visible(std::vector<wire::DeviceSnapshot> all) {
  std::vector<frontdoor::DeviceUuid> uuids(all.size());
  for (size_t i = 0; i < all.size(); i++) memcpy(uuids[i].data(), all[i].uuid, uuids[i].size());
  for (int chosen : frontdoor::visible_devices(getenv("CUDA_VISIBLE_DEVICES"), uuids)) {
    const auto index = static_cast<uint32_t>(chosen);
    auto device = std::make_unique<Device>();
    device->ordinal = static_cast<int>(devices_.size());
    device->lease_ordinal = index;
    device->snapshot = all[index];
    // What this version cannot do over the wire is not offered.
    for (int attribute :
         {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
          CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
          CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
          CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
          CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
          CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
          CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
          CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
          CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR}) {
      device->snapshot.attributes[attribute] = 0;
    }
    device->snapshot.attributes[CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1;
    // Pools are the client's own.
    device->snapshot.attributes[CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED] = 1;
    device->snapshot.name[sizeof device->snapshot.name - 1] = '\0';
    devices_.push_back(std::move(device));
    driver_version_ = static_cast<int>(all[index].driver_version);
  }
}

CUresult Process::channel(Device& device, Channel** channel) {
  if ((*channel = device.channel.load(std::memory_order_acquire)) != nullptr) return CUDA_SUCCESS;
  const CUresult result = connect_device(device);
  *channel = device.channel.load(std::memory_order_acquire);
  return result;
}

// With device.lock held.
CUresult Process::connect_device(Device& device) {
  if (device.channel.load() != nullptr) return CUDA_SUCCESS;
  if (device.arena_bytes == 0) {
    bool reserved = false;
    // Less where the program's address space is limited.
    for (const uint64_t least : {kUsualArenaBytes, kMinArenaBytes}) {
      device.arena_bytes = arena_size(device.snapshot.memory_bytes, least);
      device.arena_base = kArenaFirst;
      reserved = reserve_arena(&device.arena_base, device.arena_bytes);
      if (reserved) break;
    }
    if (!reserved) {
      device.arena_bytes = 0;
      log(Level::kError, "there is no room for the addresses of device %d", device.ordinal);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  wire::HelloRequest request;
  request.purpose = wire::ConnectionPurpose::kDevice;
  request.session = session_->control.session;
  request.device = device.lease_ordinal;
  request.arena_base = device.arena_base;
  request.arena_bytes = device.arena_bytes;
  request.accepts = wire::kAcceptsRing | wire::kAcceptsRegion;
  wire::Connected connected =
      wire::connect_lease(session_->lease, request, open_carrier, session_->carrier, 30000);
  if (!connected.handshake.ok) {
    log(Level::kError, "no worker for device %d: %s", device.ordinal,
        connected.handshake.message.c_str());
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
  auto carrier = settle_carrier(connected);
  log(Level::kInfo, "device %d is used over a carrier of the kind %s", device.ordinal,
      carrier->kind());
  device.channel.store(new Channel(std::move(carrier), connected.handshake.epoch,
                                   connected.handshake.initial_credit, device),
                       std::memory_order_release);
  return CUDA_SUCCESS;
}

bool Device::next_arena() {
  munmap(reinterpret_cast<void*>(arena_base), arena_bytes);
  uint64_t at = arena_base + arena_bytes;
  if (!reserve_arena(&at, arena_bytes)) {
    arena_bytes = 0;
    return false;
  }
  arena_base = at;
  return true;
}

// ---- Threads ----------------------------------------------------------------------------------

ThreadState& thread_state() {
  if (own_state == nullptr) [[unlikely]] {
    Process::get();
    own_state = new ThreadState;
    static std::atomic<uint32_t> next{1};
    own_state->index = next.fetch_add(1);
    pthread_setspecific(thread_key, own_state);
  }
  return *own_state;
}

uint32_t thread_index() { return thread_state().index; }

// ---- Contexts and errors ----------------------------------------------------------------------

bool is_sticky(CUresult error) {
  switch (error) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return true;
    default:
      return false;
  }
}

Context* find_context(CUcontext context) {
  return Process::get().tables.contexts.find(reinterpret_cast<uint64_t>(context));
}

Channel& channel_of(const Context* context) {
  return *context->device->channel.load(std::memory_order_relaxed);
}

CUresult check_context(const Context* context) {
  if (!context->active.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  const int sticky = context->sticky.load(std::memory_order_relaxed);
  if (sticky != 0) return static_cast<CUresult>(sticky);
  if (channel_of(context).lost()) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  return CUDA_SUCCESS;
}

CUresult enter(Context** context) {
  const CUresult state = Process::get().check();
  if (state != CUDA_SUCCESS) [[unlikely]] {
    return static_cast<int>(state) == -1 ? CUDA_ERROR_NOT_INITIALIZED : state;
  }
  *context = current_context();
  if (*context == nullptr) {
    return thread_state().in_host_function ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_CONTEXT;
  }
  return check_context(*context);
}

CUresult settle(Context* context, CUresult result) {
  if (is_sticky(result)) {
    int none = 0;
    if (context->sticky.compare_exchange_strong(none, result)) {
      context->device->host_calls.context_failed(context);
    }
    return result;
  }
  const int sticky = context->sticky.load(std::memory_order_relaxed);
  if (sticky != 0) return static_cast<CUresult>(sticky);
  if (result == CUDA_SUCCESS && context->refused.load(std::memory_order_relaxed) != 0) {
    return static_cast<CUresult>(context->refused.exchange(0));
  }
  return result;
}

namespace {
template <typename F>
void for_contexts(Device* device, uint32_t wire_id, F&& f) {
  Process::get().tables.contexts.for_each([&](Context* context) {
    if (context->device == device && (wire_id == 0 || context->wire_id() == wire_id)) f(context);
  });
}
}  // namespace

void Device::sticky_error(uint32_t context, CUresult error) {
  for_contexts(this, context, [&](Context* it) {
    int none = 0;
    if (it->sticky.compare_exchange_strong(none, error)) host_calls.context_failed(it);
  });
}

void Device::refused_command(uint32_t context, CUresult error, uint16_t operation) {
  const char* name = wire::operation_name(operation);
  log(Level::kInfo, "the driver refused %s: error %d", name != nullptr ? name : "a command", error);
  for_contexts(this, context, [&](Context* it) {
    int none = 0;
    it->refused.compare_exchange_strong(none, error);
  });
}

void Device::host_function_called(uint32_t context, const wire::HostFunctionCall& call) {
  host_calls.called(context, call);
}

void Device::printf_output(const char* text, size_t bytes) {
  // Through the program's own stdio, so that it stands in the right place in its output.
  fwrite(text, 1, bytes, stdout);
}

void Device::error_output(const char* text, size_t bytes) { fwrite(text, 1, bytes, stderr); }

// ---- Streams and events -----------------------------------------------------------------------

namespace {
// CU_STREAM_PER_THREAD is an ordinary stream on the wire, made at its first use by a thread.
CUresult per_thread_stream(Context* context, Stream** object) {
  auto& own = thread_state().per_thread_streams;
  const auto found = own.find(context->handle);
  if (found != own.end()) {
    if (Process::get().tables.streams.find(found->second->handle) == found->second &&
        found->second->context == context && found->second->per_thread) {
      *object = found->second;
      return CUDA_SUCCESS;
    }
    own.erase(found);
  }
  Stream* stream = Process::get().tables.streams.allocate();
  if (stream == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  stream->context = context;
  stream->flags = CU_STREAM_DEFAULT;
  stream->priority = 0;
  stream->per_thread = true;
  {
    Channel::Post post(channel_of(context), op(Operation::kStreamCreateWithPriority),
                       context->wire_id(), sizeof(wire::StreamCreate));
    post.encoder().put(wire::StreamCreate{stream->wire, stream->flags, 0});
  }
  Process::get().tables.streams.publish(stream);
  own[context->handle] = stream;
  *object = stream;
  return CUDA_SUCCESS;
}
}  // namespace

CUresult resolve_stream(Context* context, CUstream stream, wire::Handle* on_wire, Stream** object) {
  const auto value = reinterpret_cast<uint64_t>(frontdoor::resolve_stream(stream));
  if (object != nullptr) *object = nullptr;
  if (value <= 1) {
    *on_wire = kLegacyStream;
    return CUDA_SUCCESS;
  }
  Stream* found = nullptr;
  if (value == 2) {
    const CUresult result = per_thread_stream(context, &found);
    if (result != CUDA_SUCCESS) return result;
  } else {
    found = Process::get().tables.streams.find(value);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (found->context != context) {
      // A stream of another context of the same device may be used; the worker finds its own.
      if (found->context->device != context->device) return CUDA_ERROR_INVALID_HANDLE;
    }
  }
  *on_wire = found->wire;
  if (object != nullptr) *object = found;
  return CUDA_SUCCESS;
}

CUresult resolve_event(CUevent event, Event** object) {
  *object = Process::get().tables.events.find(reinterpret_cast<uint64_t>(event));
  return *object == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

void drop_objects_of(Context* context) {
  graphs::forget_context(reinterpret_cast<CUcontext>(context->handle));
  graphs::forget_arrays(reinterpret_cast<CUcontext>(context->handle));
  Process& process = Process::get();
  auto drop = [context](auto& table) {
    table.for_each([&](auto* object) {
      if (object->context == context) table.retire(object);
    });
  };
  drop(process.tables.streams);
  drop(process.tables.events);
  drop(process.tables.links);
  drop_modules_of(context);
  drop_pool_memory_of(context);
  process.ranges.drop_context(context);
}

}  // namespace gpupool::client
