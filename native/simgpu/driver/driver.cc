// The driver of the process: initialisation, fork(), the calling thread's context, device handles.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>

#include "frontdoor/default_stream.h"
#include "frontdoor/hooks.h"
#include "frontdoor/visible_devices.h"
#include "simgpu/driver/context.h"

namespace gpupool::simgpu {
namespace {

std::mutex init_mutex;
std::atomic<int> init_status{CUDA_ERROR_NOT_INITIALIZED};
std::atomic<bool> forked{false};
bool tried = false;

void say(const std::string& sentence) {
  std::string line = "gpupool simulated GPU: " + sentence + "\n";
  ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
  (void)ignored;
}

void in_child() {
  // Threads and their locks are gone: nothing may be used any more, as with the real driver.
  forked = true;
  init_status = CUDA_ERROR_NOT_INITIALIZED;
  for (auto& device : driver().devices) device->card->abandon();
}

CUresult initialise() {
  MachineResult result = load_machine(library_directory(reinterpret_cast<void*>(&initialise)));
  if (!result.machine) {
    say(result.error);
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  Driver& d = driver();
  d.machine = std::move(*result.machine);
  std::vector<frontdoor::DeviceUuid> uuids;
  for (const auto& gpu : d.machine.gpus) uuids.push_back(gpu.uuid);
  const std::string directory = state_directory();
  std::vector<std::unique_ptr<Device>> devices;
  for (int index : frontdoor::visible_devices(getenv("CUDA_VISIBLE_DEVICES"), uuids)) {
    auto device = std::make_unique<Device>();
    device->ordinal = int(devices.size());
    device->gpu = d.machine.gpus[size_t(index)];
    std::string error;
    device->card =
        CardState::open(directory, device->gpu.uuid_text(), device->gpu.memory_bytes, &error);
    if (!device->card) {
      say(error);
      return CUDA_ERROR_NOT_INITIALIZED;
    }
    device->heap = std::make_unique<DeviceHeap>(device->ordinal, device->card.get());
    device->physical = std::make_unique<PhysicalStore>(device->card.get());
    device->primary = new Context(device.get(), true, 0);
    d.contexts.insert(device->primary);
    devices.push_back(std::move(device));
  }
  if (devices.empty()) return CUDA_ERROR_NO_DEVICE;
  if (d.machine.empty_kernels) {
    say("GPUPOOL_SIMGPU_EMPTY_KERNELS is set: kernels that come without PTX DO NOTHING, and what "
        "programs compute with them is WRONG");
  }
  d.devices = std::move(devices);
  pthread_atfork(nullptr, nullptr, in_child);
  return CUDA_SUCCESS;
}

}  // namespace

// Never destroyed: runtimes call in from their own exit handlers, and streams may still be running.
Driver& driver() {
  static auto& instance = *new Driver;
  return instance;
}

namespace {
thread_local bool in_host_function = false;
}

CUresult driver_status() {
  if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
  return CUresult(init_status.load(std::memory_order_acquire));
}

void call_host_function(const std::function<void()>& function) {
  in_host_function = true;
  function();
  in_host_function = false;
}

CUresult find_device(CUdevice ordinal, Device** device) {
  GPUPOOL_TRY(driver_status());
  auto& devices = driver().devices;
  if (ordinal < 0 || size_t(ordinal) >= devices.size()) return CUDA_ERROR_INVALID_DEVICE;
  *device = devices[size_t(ordinal)].get();
  return CUDA_SUCCESS;
}

Context* find_context(CUcontext handle) {
  auto* context = reinterpret_cast<Context*>(handle);
  std::lock_guard lock(driver().contexts_mutex);
  return driver().contexts.count(context) ? context : nullptr;
}

// Not destroyed with the thread: exit handlers of the program still ask for the current context.
std::vector<Context*>& context_stack() {
  static thread_local std::vector<Context*>* stack = nullptr;
  if (!stack) stack = new std::vector<Context*>;
  return *stack;
}

Context* current_or_null() {
  auto& stack = context_stack();
  return stack.empty() ? nullptr : stack.back();
}

void set_current(Context* context) {
  auto& stack = context_stack();
  if (!stack.empty()) stack.pop_back();
  if (context) stack.push_back(context);
}

CUresult current_context(Context** context) {
  GPUPOOL_TRY(driver_status());
  Context* current = current_or_null();
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  if (!current->active) {
    return current->epoch ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
  }
  GPUPOOL_TRY(current->status());
  *context = current;
  return CUDA_SUCCESS;
}

CUresult find_stream(CUstream handle, Context* context, std::shared_ptr<Stream>* stream) {
  handle = frontdoor::resolve_stream(handle);
  if (handle == CU_STREAM_LEGACY) {
    *stream = context->legacy_stream();
  } else if (handle == CU_STREAM_PER_THREAD) {
    *stream = context->thread_stream();
  } else {
    *stream = driver().streams.get(handle);
  }
  return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace gpupool::simgpu

CUresult gpupool::frontdoor::primary_context_handle(CUdevice ordinal, CUcontext* context) {
  simgpu::Device* device;
  GPUPOOL_TRY(simgpu::find_device(ordinal, &device));
  *context = simgpu::handle_of(device->primary);
  return CUDA_SUCCESS;
}

using namespace gpupool::simgpu;

GPUPOOL_API cuInit(unsigned int flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (forked) return CUDA_ERROR_NOT_INITIALIZED;
  std::lock_guard lock(init_mutex);
  if (!tried) {
    tried = true;
    init_status = initialise();
  }
  return driver_status();
}

GPUPOOL_API cuDriverGetVersion(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  if (driver_status() == CUDA_SUCCESS) {
    *version = driver().machine.cuda_version;
    return CUDA_SUCCESS;
  }
  // Answered before cuInit, too.
  MachineResult result =
      load_machine(library_directory(reinterpret_cast<void*>(&cuDriverGetVersion)));
  *version = result.machine ? result.machine->cuda_version : MachineDescription{}.cuda_version;
  return CUDA_SUCCESS;
}
