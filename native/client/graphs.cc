// The client's part of graphs. A graph is cut into segments of work on the device, each an
// executable of the worker's driver, and what this process has to do between them: copies from and
// to host memory, and host functions. A graph that only uses the device is one segment, and its
// launch one small command.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>

#include "client/graph_work.h"
#include "client/log.h"
#include "client/modules.h"
#include "client/pools.h"
#include "client/state.h"
#include "frontdoor/runtime_caller.h"
#include "graphs/arrays.h"
#include "graphs/hooks.h"
#include "wire/graph_nodes.h"

namespace gpupool::graphs {
namespace {

struct Segment : Object {};

Table<Segment, Kind::kGraphExec>& segments() {
  static auto& instance = *new Table<Segment, Kind::kGraphExec>;
  return instance;
}

// A description as it grows.
class Bytes {
 public:
  template <typename T>
  void put(const T& value) {
    static_assert(sizeof(T) % 8 == 0);
    raw(&value, sizeof value);
  }
  void raw(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    data_.insert(data_.end(), from, from + bytes);
    data_.resize(wire::align8(data_.size()));
  }
  std::vector<uint8_t>& data() { return data_; }

 private:
  std::vector<uint8_t> data_;
};

wire::GraphNodeKind kind_of(const Work& work) {
  using wire::GraphNodeKind;
  if (std::holds_alternative<KernelWork>(work)) return GraphNodeKind::kKernel;
  if (std::holds_alternative<MemcpyWork>(work)) return GraphNodeKind::kCopy;
  if (std::holds_alternative<MemsetWork>(work)) return GraphNodeKind::kFill;
  if (std::holds_alternative<RecordWork>(work)) return GraphNodeKind::kRecord;
  if (std::holds_alternative<WaitWork>(work)) return GraphNodeKind::kWait;
  return GraphNodeKind::kEmpty;
}

bool on_host(const Work& work) {
  if (std::holds_alternative<HostWork>(work)) return true;
  const auto* copy = std::get_if<MemcpyWork>(&work);
  return copy != nullptr && direction_of(copy->copy) != Direction::kOnDevice;
}

CUresult describe(const PlanNode& node, uint32_t index, std::vector<uint32_t> dependencies,
                  const Device* device, Bytes* out) {
  std::sort(dependencies.begin(), dependencies.end());
  dependencies.erase(std::unique(dependencies.begin(), dependencies.end()), dependencies.end());
  const Work& work = *node.work;
  out->put(wire::GraphNodeHeader{static_cast<uint32_t>(kind_of(work)), index,
                                 node.enabled ? 1u : 0u,
                                 static_cast<uint32_t>(dependencies.size())});
  out->raw(dependencies.data(), dependencies.size() * sizeof(uint32_t));
  if (const auto* kernel = std::get_if<KernelWork>(&work)) {
    Function* function;
    if (const CUresult e = function_of(*kernel, &function)) return e;
    if (function->context->device != device) return CUDA_ERROR_NOT_SUPPORTED;
    wire::Launch launch{};
    launch.function = function->wire;
    std::copy(kernel->grid, kernel->grid + 3, launch.grid);
    std::copy(kernel->block, kernel->block + 3, launch.block);
    launch.shared_bytes = kernel->shared_bytes;
    if (kernel->cooperative()) launch.flags |= wire::kLaunchCooperative;
    const auto cluster = kernel->attributes.find(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
    if (cluster != kernel->attributes.end()) {
      launch.cluster[0] = cluster->second.clusterDim.x;
      launch.cluster[1] = cluster->second.clusterDim.y;
      launch.cluster[2] = cluster->second.clusterDim.z;
    }
    launch.parameter_bytes = static_cast<uint32_t>(kernel->parameters.size());
    out->put(launch);
    out->raw(kernel->parameters.data(), kernel->parameters.size());
  } else if (const auto* copy = std::get_if<MemcpyWork>(&work)) {
    End to, from;
    if (const CUresult e = ends_of(copy->copy, &to, &from)) return e;
    out->put(wire::GraphCopy{to.address, to.pitch, to.rows, from.address, from.pitch, from.rows,
                             copy->copy.WidthInBytes, copy->copy.Height, copy->copy.Depth});
  } else if (const auto* fill = std::get_if<MemsetWork>(&work)) {
    out->put(wire_fill(*fill));
  } else if (kind_of(work) == wire::GraphNodeKind::kRecord ||
             kind_of(work) == wire::GraphNodeKind::kWait) {
    const auto* record = std::get_if<RecordWork>(&work);
    Event* event;
    if (const CUresult e = resolve_event(
            record != nullptr ? record->event : std::get<WaitWork>(work).event, &event)) {
      return e;
    }
    if (event->context->device != device) return CUDA_ERROR_NOT_SUPPORTED;
    out->put(event->wire);
  }
  return CUDA_SUCCESS;
}

class RemoteExecutable final : public Executable {
 public:
  RemoteExecutable(Context* context, const Plan* plan)
      : context_(context), context_handle_(context->handle), plan_(*plan) {}

  ~RemoteExecutable() override {
    for (const Phase& phase : phases_) {
      if (phase.segment == nullptr) continue;
      const wire::Handle handle = phase.segment->wire;
      if (!segments().retire(phase.segment) || !alive()) continue;
      Channel::Post post(channel_of(context_), op(Operation::kGraphExecDestroy),
                         context_->wire_id(), sizeof handle);
      post.encoder().handle(handle);
    }
  }

  CUresult build(int* failed) {
    cut();
    for (Phase& phase : phases_) {
      if (phase.host) continue;
      Bytes description;
      for (uint32_t i : phase.nodes) {
        *failed = static_cast<int>(i);
        std::vector<uint32_t> dependencies;
        for (uint32_t dependency : plan_[i].dependencies) {
          if (places_[dependency].phase == places_[i].phase) {
            dependencies.push_back(places_[dependency].index);
          }
        }
        if (const CUresult e = describe(plan_[i], places_[i].index, std::move(dependencies),
                                        context_->device, &description)) {
          return e;
        }
      }
      *failed = -1;
      if (const CUresult e = define(&phase, description.data())) return e;
    }
    return CUDA_SUCCESS;
  }

  CUresult launch(CUstream stream) override {
    Context* current_one;
    if (const CUresult e = enter(&current_one)) return e;
    if (!alive()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    wire::Handle on_wire;
    client::Stream* object;
    if (const CUresult e = resolve_stream(current_one, stream, &on_wire, &object)) return e;
    Context* owner = object != nullptr ? object->context : current_one;
    if (owner->device != context_->device) return CUDA_ERROR_INVALID_HANDLE;
    if (phases_.size() == 1 && phases_[0].segment != nullptr) [[likely]] {
      submit(Operation::kGraphLaunch, owner, phases_[0], on_wire);
      return CUDA_SUCCESS;
    }
    // The parts of one launch come before those of the next, also in another stream.
    if (launched_ && last_ != stream) cuStreamSynchronize(last_);
    launched_ = true;
    last_ = stream;
    bool wrote = false;
    for (const Phase& phase : phases_) {
      if (phase.segment != nullptr) submit(Operation::kGraphLaunch, owner, phase, on_wire);
      if (!phase.host) continue;
      for (uint32_t i : phase.nodes) {
        if (const CUresult e = do_on_host(plan_[i], stream, &wrote)) return e;
      }
    }
    return CUDA_SUCCESS;
  }

  CUresult upload(CUstream stream) override {
    Context* current_one;
    if (const CUresult e = enter(&current_one)) return e;
    if (!alive()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    wire::Handle on_wire;
    if (const CUresult e = resolve_stream(current_one, stream, &on_wire)) return e;
    for (const Phase& phase : phases_) {
      if (phase.segment != nullptr) submit(Operation::kGraphUpload, current_one, phase, on_wire);
    }
    return CUDA_SUCCESS;
  }

  CUresult update(const std::vector<uint32_t>& changed) override {
    if (!alive()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (const CUresult e = check_context(context_)) return e;
    std::map<uint32_t, std::pair<Bytes, uint32_t>> parts;  // by phase: records, and how many
    for (uint32_t i : changed) {
      const Place place = places_[i];
      // What the host does is looked at when it is done.
      if (place.phase >= phases_.size() || phases_[place.phase].host) continue;
      auto& [bytes, count] = parts[place.phase];
      if (const CUresult e = describe(plan_[i], place.index, {}, context_->device, &bytes)) {
        return e;
      }
      count++;
    }
    for (auto& [phase, part] : parts) {
      send_update(phases_[phase], part.first.data(), part.second);
    }
    return CUDA_SUCCESS;
  }

 private:
  struct Phase {
    bool host = false;
    std::vector<uint32_t> nodes;
    Segment* segment = nullptr;
  };
  struct Place {
    uint32_t phase = 0, index = 0;
  };

  bool alive() const { return context_->handle == context_handle_ && context_->active.load(); }

  // As few segments as the dependencies allow: even phases are the device's, odd ones the host's.
  void cut() {
    places_.resize(plan_.size());
    std::vector<uint32_t> phase_of(plan_.size());
    uint32_t last = 0;
    for (size_t i = 0; i < plan_.size(); i++) {
      const Work& work = *plan_[i].work;
      const bool empty = kind_of(work) == wire::GraphNodeKind::kEmpty && !on_host(work);
      const uint32_t parity = on_host(work) ? 1 : 0;
      uint32_t phase = empty ? 0 : parity;
      for (uint32_t dependency : plan_[i].dependencies) {
        uint32_t least = phase_of[dependency];
        if (!empty && least % 2 != parity) least++;
        phase = std::max(phase, least);
      }
      phase_of[i] = phase;
      last = std::max(last, phase);
    }
    // Phases without work are left out.
    std::vector<char> used(last + 1);
    for (size_t i = 0; i < plan_.size(); i++) {
      const Work& work = *plan_[i].work;
      if (on_host(work) || kind_of(work) != wire::GraphNodeKind::kEmpty) used[phase_of[i]] = 1;
    }
    std::vector<uint32_t> number(last + 1);
    for (uint32_t phase = 0; phase <= last; phase++) {
      number[phase] = static_cast<uint32_t>(phases_.size());
      if (!used[phase]) continue;
      phases_.emplace_back();
      phases_.back().host = phase % 2 == 1;
    }
    for (uint32_t i = 0; i < plan_.size(); i++) {
      if (!used[phase_of[i]]) continue;
      Phase& phase = phases_[number[phase_of[i]]];
      places_[i] = {number[phase_of[i]], static_cast<uint32_t>(phase.nodes.size())};
      phase.nodes.push_back(i);
    }
    // What only holds others together in a phase that is left out belongs nowhere.
    for (uint32_t i = 0; i < plan_.size(); i++) {
      if (!used[phase_of[i]]) places_[i] = {~0u, 0};
    }
  }

  CUresult define(Phase* phase, std::vector<uint8_t>& description) {
    if (description.size() > wire::kMaxGraphBytes) return CUDA_ERROR_OUT_OF_MEMORY;
    Segment* segment = segments().allocate();
    if (segment == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    segment->context = context_;
    PendingCall call;
    CUresult result = CUDA_SUCCESS;
    const auto count = static_cast<uint32_t>(phase->nodes.size());
    send_pieces(description, [&](uint8_t* at, size_t bytes, bool more) {
      const wire::GraphDefine body{segment->wire, bytes, count, more ? 1u : 0u};
      const carriers::Part part{at, bytes};
      auto fill = [&](wire::Encoder& encoder) { encoder.put(body); };
      if (more) {
        channel_of(context_).send_bulk(op(Operation::kGraphInstantiateWithFlags),
                                       context_->wire_id(), sizeof body, fill, &part, 1);
      } else {
        result = channel_of(context_).call(op(Operation::kGraphInstantiateWithFlags),
                                           context_->wire_id(), sizeof body, fill, &call, &part, 1);
      }
    });
    if (result != CUDA_SUCCESS) {
      segments().discard(segment);
      return settle(context_, result);
    }
    segments().publish(segment);
    phase->segment = segment;
    return CUDA_SUCCESS;
  }

  void send_update(const Phase& phase, std::vector<uint8_t>& description, uint32_t count) {
    constexpr size_t kInline = 16 * 1024;
    if (description.size() <= kInline) {
      const wire::GraphDefine body{phase.segment->wire, description.size(), count, 0};
      Channel::Post post(channel_of(context_), op(Operation::kGraphExecUpdateV2),
                         context_->wire_id(), sizeof body + description.size());
      wire::Encoder encoder = post.encoder();
      encoder.put(body);
      encoder.raw(description.data(), description.size());
      return;
    }
    send_pieces(description, [&](uint8_t* at, size_t bytes, bool more) {
      const wire::GraphDefine body{phase.segment->wire, bytes, count, more ? 1u : 0u};
      const carriers::Part part{at, bytes};
      channel_of(context_).send_bulk(
          op(Operation::kGraphExecUpdateV2), context_->wire_id(), sizeof body,
          [&](wire::Encoder& encoder) { encoder.put(body); }, &part, 1);
    });
  }

  template <typename Send>
  static void send_pieces(std::vector<uint8_t>& data, Send&& send) {
    constexpr size_t kPiece = 512 * 1024;
    for (size_t done = 0; done < data.size();) {
      const size_t bytes = std::min(kPiece, data.size() - done);
      send(data.data() + done, bytes, done + bytes < data.size());
      done += bytes;
    }
  }

  void submit(Operation operation, Context* owner, const Phase& phase, wire::Handle stream) {
    Channel::Post post(channel_of(owner), op(operation), owner->wire_id(),
                       2 * sizeof(wire::Handle));
    wire::Encoder encoder = post.encoder();
    encoder.handle(phase.segment->wire);
    encoder.handle(stream);
  }

  // `wrote`: something earlier in this launch writes host memory, perhaps the source of a copy, and
  // may not be over yet.
  static CUresult do_on_host(const PlanNode& node, CUstream stream, bool* wrote) {
    if (const auto* host = std::get_if<HostWork>(&*node.work)) {
      *wrote = true;
      return cuLaunchHostFunc(stream, host->function, host->data);
    }
    const auto* copy = std::get_if<MemcpyWork>(&*node.work);
    if (copy == nullptr || !node.enabled) return CUDA_SUCCESS;
    const Direction direction = direction_of(copy->copy);
    if (direction == Direction::kOnHost || (direction == Direction::kToDevice && *wrote)) {
      if (const CUresult e = cuStreamSynchronize(stream)) return e;
      *wrote = false;
    }
    if (direction == Direction::kFromDevice) *wrote = true;
    return cuMemcpy3DAsync_v2(&copy->copy, stream);
  }

  Context* const context_;
  const uint64_t context_handle_;
  const Plan& plan_;
  std::vector<Phase> phases_;
  std::vector<Place> places_;
  bool launched_ = false;
  CUstream last_ = nullptr;
};

}  // namespace

CUresult make_executable(CUcontext handle, const Plan* plan, std::unique_ptr<Executable>* out,
                         int* error_node) {
  Context* context;
  if (const CUresult e = context_for(handle, &context)) return e;
  auto executable = std::make_unique<RemoteExecutable>(context, plan);
  if (const CUresult e = executable->build(error_node)) return e;
  *out = std::move(executable);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::graphs
