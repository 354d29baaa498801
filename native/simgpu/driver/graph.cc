// The simulated GPU's part of graphs: an executable is a list of steps that a stream works off, in
// an order in which dependencies come first.
#include "graphs/hooks.h"
#include "simgpu/driver/copies.h"
#include "simgpu/driver/launches.h"

namespace gpupool::graphs {

using namespace gpupool::simgpu;  // NOLINT: the hooks stand between both

CUresult initialised() { return driver_status(); }

CUresult current(CUcontext* context) {
  GPUPOOL_CURRENT(it);
  *context = handle_of(it);
  return CUDA_SUCCESS;
}

CUresult find_stream(CUstream handle, StreamInfo* info) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(simgpu::find_stream(handle, context, &stream));
  info->key = reinterpret_cast<uint64_t>(stream.get());
  info->context = handle_of(stream->context);
  info->legacy = stream == stream->context->legacy_stream();
  info->blocking = stream->is_blocking() && !info->legacy;
  return CUDA_SUCCESS;
}

CUresult find_event(CUevent event) {
  return driver().events.get(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult find_device(CUdevice ordinal) {
  Device* device;
  return simgpu::find_device(ordinal, &device);
}

namespace {

CUresult context_for(CUcontext handle, Context** context) {
  if (!handle) return current_context(context);
  *context = find_context(handle);
  if (!*context || !(*context)->active) return CUDA_ERROR_INVALID_CONTEXT;
  return (*context)->status();
}

}  // namespace

CUresult find_kernel(CUfunction handle, CUcontext context_handle, KernelLayout* layout) {
  Context* context;
  GPUPOOL_TRY(context_for(context_handle, &context));
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  const KernelInfo* info;
  GPUPOOL_TRY(function->info(&info));
  for (const ParameterInfo& p : info->parameters) {
    layout->parameters.push_back({uint32_t(p.offset), uint32_t(p.bytes)});
  }
  layout->parameter_bytes = uint32_t(info->parameter_bytes);
  layout->context = handle_of(function->context);
  return CUDA_SUCCESS;
}

namespace {

CUresult prepare(const KernelWork& work, std::shared_ptr<Launch>* launch, Context** context,
                 const KernelInfo** info) {
  GPUPOOL_TRY(context_for(work.context, context));
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(work.callee(), *context, &function));
  *context = function->context;
  GPUPOOL_TRY(function->info(info));
  Shape shape{};
  for (int i = 0; i < 3; ++i) shape.grid[i] = work.grid[i], shape.block[i] = work.block[i];
  shape.shared = work.shared_bytes;
  shape.cooperative = work.cooperative();
  const auto cluster = work.attributes.find(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  if (cluster != work.attributes.end()) {
    const auto& dim = cluster->second.clusterDim;
    if (dim.x > 1 || dim.y > 1 || dim.z > 1) return CUDA_ERROR_INVALID_VALUE;
  }
  GPUPOOL_TRY(prepare_launch(function, shape, launch));
  (*launch)->parameters = work.parameters;
  return CUDA_SUCCESS;
}

Fill fill_of(const MemsetWork& work) {
  const auto& f = work.fill;
  return {f.dst, f.pitch, f.width, f.height, f.value, f.elementSize};
}

}  // namespace

CUresult check(const KernelWork& work) {
  std::shared_ptr<Launch> launch;
  Context* context;
  const KernelInfo* info;
  return prepare(work, &launch, &context, &info);
}

CUresult check(const MemcpyWork& work) {
  Copy copy;
  GPUPOOL_TRY(copy_of(work.copy, &copy));
  return simgpu::check(copy);
}

CUresult check(const MemsetWork& work) { return simgpu::check(fill_of(work)); }

bool is_device_memory(CUdeviceptr address) {
  auto range = addresses().find(address);
  return range && range->on_device();
}

// ---- Memory of allocation nodes -----------------------------------------------------------------

namespace {

// By address: the allocation's id, since a context's end frees its memory, too.
struct GraphAllocations {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> ids;
};
GraphAllocations& graph_allocations() {
  static auto& instance = *new GraphAllocations;
  return instance;
}

}  // namespace

CUresult allocate_memory(CUdevice ordinal, size_t bytes, CUdeviceptr* address) {
  GPUPOOL_CURRENT(context);
  Device* device;
  GPUPOOL_TRY(simgpu::find_device(ordinal, &device));
  if (device != context->device) return CUDA_ERROR_NOT_SUPPORTED;
  *address = device->heap->allocate(bytes, 512, RangeKind::kDevice, context);
  if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
  auto range = addresses().find(*address);
  std::lock_guard lock(graph_allocations().mutex);
  graph_allocations().ids[*address] = range ? range->id : 0;
  return CUDA_SUCCESS;
}

void release_memory(CUdevice ordinal, CUdeviceptr address) {
  uint64_t id;
  {
    std::lock_guard lock(graph_allocations().mutex);
    id = graph_allocations().ids[address];
    graph_allocations().ids.erase(address);
  }
  auto range = addresses().find(address);
  Device* device;
  if (!range || range->id != id || simgpu::find_device(ordinal, &device) != CUDA_SUCCESS) return;
  range->context->wait_idle();  // work that may use it comes first
  device->heap->release(address);
}

// ---- Executables --------------------------------------------------------------------------------

namespace {

// What one launch has of its own.
struct Run {
  Context* context;  // of the stream
  std::vector<std::shared_ptr<RecordPoint>> points;
};
using Step = std::function<void(const Run&)>;

class SimulatedExecutable final : public Executable {
 public:
  explicit SimulatedExecutable(const Plan* plan) : plan_(*plan) {}

  ~SimulatedExecutable() override = default;

  CUresult build(int* failed) {
    steps_ = std::make_shared<std::vector<Step>>(plan_.size());
    events_.resize(plan_.size());
    for (size_t i = 0; i < plan_.size(); ++i) {
      *failed = int(i);
      GPUPOOL_TRY(make_step(i, &(*steps_)[i]));
    }
    return CUDA_SUCCESS;
  }

  CUresult launch(CUstream handle) override {
    GPUPOOL_CURRENT(context);
    std::shared_ptr<Stream> stream;
    GPUPOOL_TRY(simgpu::find_stream(handle, context, &stream));
    for (const auto& [of, needs] : needs_)
      GPUPOOL_TRY(of->prepare_for(needs.prints, needs.allocates));
    auto run = std::make_shared<Run>();
    run->context = stream->context;
    if (has_events_) {
      run->points.resize(plan_.size());
      for (size_t i = 0; i < plan_.size(); ++i) {
        if (!events_[i]) continue;
        std::lock_guard lock(events_[i]->mutex);
        if (std::holds_alternative<RecordWork>(*plan_[i].work)) {
          events_[i]->last = run->points[i] = std::make_shared<RecordPoint>();
        } else {
          run->points[i] = events_[i]->last;  // null: nothing to wait for
        }
      }
    }
    // One launch of an executable after the other, whatever their streams.
    auto previous = last_;
    last_ = std::make_shared<RecordPoint>();
    const bool calls_program = std::any_of(plan_.begin(), plan_.end(), [](const PlanNode& node) {
      return std::holds_alternative<HostWork>(*node.work);
    });
    stream->context->submit(
        stream,
        [run, previous, done = last_, steps = steps_] {
          if (previous) previous->wait();
          for (const Step& step : *steps) {
            if (step) step(*run);
          }
          done->complete();
        },
        calls_program);
    return CUDA_SUCCESS;
  }

  CUresult upload(CUstream) override { return CUDA_SUCCESS; }

  CUresult update(const std::vector<uint32_t>& changed) override {
    // Launches that are on their way keep the steps that they have.
    auto steps = steps_.use_count() > 1 ? std::make_shared<std::vector<Step>>(*steps_) : steps_;
    for (uint32_t i : changed) {
      Step step;
      GPUPOOL_TRY(make_step(i, &step));
      (*steps)[i] = std::move(step);
    }
    steps_ = std::move(steps);
    return CUDA_SUCCESS;
  }

 private:
  CUresult make_step(size_t index, Step* step) {
    const PlanNode& node = plan_[index];
    *step = nullptr;
    events_[index].reset();
    if (!node.enabled) return CUDA_SUCCESS;
    if (const auto* kernel = std::get_if<KernelWork>(&*node.work)) {
      std::shared_ptr<Launch> launch;
      Context* context;
      const KernelInfo* info;
      GPUPOOL_TRY(prepare(*kernel, &launch, &context, &info));
      needs_[context].prints |= info->prints;
      needs_[context].allocates |= info->allocates;
      *step = [launch, context](const Run&) { context->run(*launch); };
    } else if (const auto* memcpy = std::get_if<MemcpyWork>(&*node.work)) {
      Copy copy;
      GPUPOOL_TRY(copy_of(memcpy->copy, &copy));
      *step = [copy](const Run& run) { guarded(run, copy); };
    } else if (const auto* memset = std::get_if<MemsetWork>(&*node.work)) {
      const Fill fill = fill_of(*memset);
      *step = [fill](const Run& run) { guarded(run, fill); };
    } else if (const auto* host = std::get_if<HostWork>(&*node.work)) {
      *step = [function = host->function, data = host->data](const Run& run) {
        if (run.context->status() == CUDA_SUCCESS) call_host_function([=] { function(data); });
      };
    } else if (const auto* record = std::get_if<RecordWork>(&*node.work)) {
      GPUPOOL_TRY(take_event(index, record->event));
      *step = [index](const Run& run) { run.points[index]->complete(); };
    } else if (const auto* wait = std::get_if<WaitWork>(&*node.work)) {
      GPUPOOL_TRY(take_event(index, wait->event));
      *step = [index](const Run& run) {
        if (run.points[index]) run.points[index]->wait();
      };
    }
    return CUDA_SUCCESS;
  }

  CUresult take_event(size_t index, CUevent event) {
    events_[index] = driver().events.get(event);
    has_events_ = true;
    return events_[index] ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }

  // The memory may have been freed since the graph was made.
  template <class What>
  static void guarded(const Run& run, const What& what) {
    if (run.context->status() != CUDA_SUCCESS) return;
    if (simgpu::check(what) == CUDA_SUCCESS) {
      perform(what);
    } else {
      run.context->set_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
  }

  const Plan& plan_;
  std::shared_ptr<std::vector<Step>> steps_;
  std::vector<std::shared_ptr<Event>> events_;  // by node
  bool has_events_ = false;
  // What its kernels use of the device's runtime.
  struct Needs {
    bool prints = false, allocates = false;
  };
  std::map<Context*, Needs> needs_;
  std::shared_ptr<RecordPoint> last_;
};

}  // namespace

CUresult make_executable(CUcontext, const Plan* plan, std::unique_ptr<Executable>* out,
                         int* error_node) {
  auto executable = std::make_unique<SimulatedExecutable>(plan);
  GPUPOOL_TRY(executable->build(error_node));
  *error_node = -1;
  *out = std::move(executable);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::graphs
