#include "graphs/capture.h"

#include <algorithm>
#include <unordered_set>

#include "graphs/capture_state.h"

namespace gpupool::graphs {

std::atomic<unsigned> captures_open{0}, watched{0};

namespace {

struct CapturedEvent {
  std::weak_ptr<Capture> capture;  // gone: that capture has ended
  std::vector<Participant::Dependency> dependencies;
};

// Under the graphs' lock.
struct State {
  std::vector<std::shared_ptr<Capture>> captures;
  std::map<uint64_t, Participant> streams;
  std::map<uint64_t, CapturedEvent> events;
  uint64_t next_id = 1;

  void count() {
    captures_open.store(static_cast<unsigned>(captures.size()), std::memory_order_relaxed);
    watched.store(static_cast<unsigned>(captures.size() + events.size()),
                  std::memory_order_relaxed);
  }
};
State& state() {
  static auto& instance = *new State;
  return instance;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool mine(const Capture& capture) { return pthread_equal(capture.thread, pthread_self()) != 0; }

uint64_t key_of(CUevent event) { return reinterpret_cast<uint64_t>(event); }

Participant* participant(uint64_t key) {
  const auto found = state().streams.find(key);
  return found == state().streams.end() ? nullptr : &found->second;
}

void merge(std::vector<Participant::Dependency>* into,
           const std::vector<Participant::Dependency>& more) {
  for (const auto& entry : more) {
    const bool there = std::any_of(into->begin(), into->end(),
                                   [&](const auto& e) { return e.node == entry.node; });
    if (!there) into->push_back(entry);
  }
}

// The legacy stream is ordered with every blocking stream: using it would add a dependency that
// no call names.
bool conflicts_with_legacy(CUcontext context, bool only_ask = false) {
  bool found = false;
  for (auto& [key, entry] : state().streams) {
    if (entry.stream.blocking && entry.stream.context == context) {
      if (!only_ask) entry.capture->invalid = true;
      found = true;
    }
  }
  return found;
}

// The nodes behind dependencies, less those that the program has destroyed.
std::vector<Edge> edges_of(Guard& guard, const Participant& entry) {
  std::vector<Edge> edges;
  for (const auto& dependency : entry.dependencies) {
    Node* node = guard.node(reinterpret_cast<CUgraphNode>(dependency.node));
    if (node != nullptr && node->graph == entry.capture->graph.get()) {
      edges.push_back({node, dependency.data});
    }
  }
  return edges;
}

// A stream's place in a capture, for a call that submits work. False: it does not capture, and the
// call goes on unless *result says otherwise.
bool route(const StreamInfo& info, Participant** entry, CUresult* result) {
  *entry = participant(info.key);
  *result = CUDA_SUCCESS;
  if (*entry == nullptr) {
    if (info.legacy && conflicts_with_legacy(info.context)) {
      *result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return false;
  }
  if ((*entry)->capture->invalid) {
    *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *entry = nullptr;
    return false;
  }
  return true;
}

CUresult add(Guard& guard, Participant* entry, Work work) {
  Node* node = nullptr;
  const CUresult result = guard.add_node(entry->capture->graph.get(), edges_of(guard, *entry),
                                         share(std::move(work)), &node);
  if (result != CUDA_SUCCESS) {
    entry->capture->invalid = true;
    return result;
  }
  entry->dependencies.assign(1, {node->handle, {}});
  return CUDA_SUCCESS;
}

// Ends a capture for all its streams. The events that stand for its nodes stay captured.
void finish(Guard& guard, const std::shared_ptr<Capture>& capture) {
  std::erase_if(state().streams, [&](const auto& e) { return e.second.capture == capture; });
  std::erase(state().captures, capture);
  capture->graph->capturing--;
  if (capture->invalid && capture->own_graph) guard.drop_graph(capture->graph.get());
  state().count();
}

}  // namespace

// ---- Beginning and ending -----------------------------------------------------------------------

CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                       const CUgraphNode* dependencies, const CUgraphEdgeData* data, size_t count) {
  if (static_cast<unsigned>(mode) > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  StreamInfo info;
  if (const CUresult e = find_stream(stream, &info)) return e;
  if (info.legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  Guard guard;
  if (Participant* entry = participant(info.key)) {
    entry->capture->invalid = true;
    return CUDA_ERROR_ILLEGAL_STATE;
  }
  auto capture = std::make_shared<Capture>();
  std::vector<Edge> edges;
  if (graph != nullptr) {
    capture->graph = guard.shared_graph(graph);
    if (capture->graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    capture->own_graph = false;
    if (const CUresult e =
            guard.find_dependencies(capture->graph.get(), dependencies, data, count, &edges)) {
      return e;
    }
  } else {
    capture->graph = guard.make_graph();
  }
  capture->graph->capturing++;
  capture->id = state().next_id++;
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->origin = info.key;
  Participant entry;
  entry.capture = capture;
  entry.stream = info;
  for (const Edge& edge : edges) entry.dependencies.push_back({edge.node->handle, edge.data});
  state().captures.push_back(std::move(capture));
  state().streams[info.key] = std::move(entry);
  state().count();
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream stream, CUgraph* graph) {
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  StreamInfo info;
  if (const CUresult e = find_stream(stream, &info)) return e;
  Guard guard;
  Participant* entry = participant(info.key);
  if (entry == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  const std::shared_ptr<Capture> capture = entry->capture;
  if (capture->origin != info.key) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !mine(*capture)) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  *graph = nullptr;
  CUresult result = CUDA_SUCCESS;
  if (capture->invalid) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else {
    // Everything that other streams did last has to be in front of what this one did last.
    std::unordered_set<const Node*> joined;
    std::vector<const Node*> open;
    for (const Edge& edge : edges_of(guard, *entry)) open.push_back(edge.node);
    while (!open.empty()) {
      const Node* node = open.back();
      open.pop_back();
      if (!joined.insert(node).second) continue;
      for (const Edge& edge : node->dependencies) open.push_back(edge.node);
    }
    auto is_joined = [&](uint64_t handle) {
      const Node* node = guard.node(reinterpret_cast<CUgraphNode>(handle));
      return node == nullptr || joined.count(node) != 0;
    };
    bool all = std::all_of(capture->unjoined.begin(), capture->unjoined.end(), is_joined);
    for (const auto& [key, other] : state().streams) {
      if (other.capture != capture || key == info.key) continue;
      for (const auto& dependency : other.dependencies) all = all && is_joined(dependency.node);
    }
    if (!all) {
      capture->invalid = true;
      result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
  }
  if (result == CUDA_SUCCESS) *graph = capture->graph->as_cuda();
  finish(guard, capture);
  return result;
}

CUresult with_participant(CUstream stream, const std::function<CUresult(Guard&, Participant*)>& f) {
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  StreamInfo info;
  if (const CUresult e = find_stream(stream, &info)) return e;
  Guard guard;
  Participant* entry = participant(info.key);
  // Asking does not invalidate anything.
  if (entry == nullptr && info.legacy && conflicts_with_legacy(info.context, true)) {
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return f(guard, entry);
}

CUresult exchange_mode(CUstreamCaptureMode* mode) {
  if (mode == nullptr || static_cast<unsigned>(*mode) > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::swap(thread_mode, *mode);
  return CUDA_SUCCESS;
}

// ---- Work ---------------------------------------------------------------------------------------

bool capture(CUstream stream, CUresult* result, const std::function<CUresult(Work*)>& describe) {
  StreamInfo info;
  *result = find_stream(stream, &info);
  if (*result != CUDA_SUCCESS) return true;
  std::shared_ptr<Capture> into;
  {
    Guard guard;
    Participant* entry;
    if (!route(info, &entry, result)) return *result != CUDA_SUCCESS;
    into = entry->capture;
  }
  // Describing asks the library, which has locks of its own. An error in the parameters leaves the
  // capture as it is.
  Work work{EmptyWork{}};
  *result = describe(&work);
  if (*result != CUDA_SUCCESS) return true;
  Guard guard;
  Participant* entry;
  if (!route(info, &entry, result)) {
    if (*result == CUDA_SUCCESS) *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return true;
  }
  *result = add(guard, entry, std::move(work));
  return true;
}

bool capture_launch(CUstream stream, CUfunction function, const unsigned grid[3],
                    const unsigned block[3], unsigned shared_bytes,
                    const CUlaunchAttribute* attributes, unsigned attribute_count,
                    void** parameters, void** extra, CUresult* result) {
  return capture(stream, result, [&](Work* out) -> CUresult {
    KernelWork work;
    work.function = function;
    std::copy(grid, grid + 3, work.grid);
    std::copy(block, block + 3, work.block);
    work.shared_bytes = shared_bytes;
    for (unsigned i = 0; i < attribute_count; i++) {
      work.attributes[attributes[i].id] = attributes[i].value;
    }
    KernelLayout layout;
    if (const CUresult e = find_kernel(function, nullptr, &layout)) return e;
    if (const CUresult e = gather(layout, parameters, extra, &work)) return e;
    if (const CUresult e = check(work)) return e;
    *out = std::move(work);
    return CUDA_SUCCESS;
  });
}

bool capture_copy(CUstream stream, const CUDA_MEMCPY3D& copy, CUresult* result) {
  return capture(stream, result, [&](Work* out) -> CUresult {
    MemcpyWork work;
    work.copy = copy;
    if (const CUresult e = current(&work.context)) return e;
    if (const CUresult e = check(work)) return e;
    *out = work;
    return CUDA_SUCCESS;
  });
}

bool capture_copy(CUstream stream, CUmemorytype to_type, uint64_t to, CUmemorytype from_type,
                  uint64_t from, size_t bytes, CUresult* result) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = from_type;
  copy.dstMemoryType = to_type;
  if (from_type == CU_MEMORYTYPE_HOST) {
    copy.srcHost = reinterpret_cast<const void*>(from);
  } else {
    copy.srcDevice = from;
  }
  if (to_type == CU_MEMORYTYPE_HOST) {
    copy.dstHost = reinterpret_cast<void*>(to);
  } else {
    copy.dstDevice = to;
  }
  copy.srcPitch = copy.dstPitch = copy.WidthInBytes = bytes;
  copy.srcHeight = copy.dstHeight = copy.Height = copy.Depth = 1;
  return capture_copy(stream, copy, result);
}

bool capture_copy(CUstream stream, const CUDA_MEMCPY2D& plane, CUresult* result) {
  CUDA_MEMCPY3D copy{};
  copy.srcXInBytes = plane.srcXInBytes;
  copy.srcY = plane.srcY;
  copy.srcMemoryType = plane.srcMemoryType;
  copy.srcHost = plane.srcHost;
  copy.srcDevice = plane.srcDevice;
  copy.srcArray = plane.srcArray;
  copy.srcPitch = plane.srcPitch;
  copy.dstXInBytes = plane.dstXInBytes;
  copy.dstY = plane.dstY;
  copy.dstMemoryType = plane.dstMemoryType;
  copy.dstHost = plane.dstHost;
  copy.dstDevice = plane.dstDevice;
  copy.dstArray = plane.dstArray;
  copy.dstPitch = plane.dstPitch;
  copy.WidthInBytes = plane.WidthInBytes;
  copy.Height = plane.Height;
  copy.Depth = 1;
  return capture_copy(stream, copy, result);
}

bool capture_fill(CUstream stream, CUdeviceptr address, size_t pitch, unsigned value,
                  unsigned element, size_t width, size_t height, CUresult* result) {
  return capture(stream, result, [&](Work* out) -> CUresult {
    MemsetWork work;
    work.fill = {address, pitch, value, element, width, height, nullptr};
    if (const CUresult e = current(&work.fill.ctx)) return e;
    if (const CUresult e = check(work)) return e;
    *out = work;
    return CUDA_SUCCESS;
  });
}

bool capture_host(CUstream stream, CUhostFn function, void* data, CUresult* result) {
  return capture(stream, result, [&](Work* out) -> CUresult {
    *out = HostWork{function, data};
    return CUDA_SUCCESS;
  });
}

bool capture_record(CUstream stream, CUevent event, unsigned flags, CUresult* result) {
  StreamInfo info;
  if ((*result = find_stream(stream, &info)) || (*result = find_event(event))) return true;
  if ((flags & ~unsigned{CU_EVENT_RECORD_EXTERNAL}) != 0) {
    *result = CUDA_ERROR_INVALID_VALUE;
    return true;
  }
  Guard guard;
  Participant* entry;
  if (!route(info, &entry, result)) {
    if (*result == CUDA_SUCCESS) {
      state().events.erase(key_of(event));  // recorded anew, outside of any capture
      state().count();
    }
    return *result != CUDA_SUCCESS;
  }
  if (flags & CU_EVENT_RECORD_EXTERNAL) {
    *result = add(guard, entry, RecordWork{event});
    return true;
  }
  state().events[key_of(event)] = {entry->capture, entry->dependencies};
  state().count();
  return true;
}

bool capture_wait(CUstream stream, CUevent event, unsigned flags, CUresult* result) {
  StreamInfo info;
  if ((*result = find_stream(stream, &info)) || (*result = find_event(event))) return true;
  if ((flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) != 0) {
    *result = CUDA_ERROR_INVALID_VALUE;
    return true;
  }
  Guard guard;
  Participant* entry;
  const bool captures = route(info, &entry, result);
  if (*result != CUDA_SUCCESS) return true;
  if (captures && flags & CU_EVENT_WAIT_EXTERNAL) {
    *result = add(guard, entry, WaitWork{event});
    return true;
  }
  const auto found = state().events.find(key_of(event));
  if (found == state().events.end()) {
    if (!captures) return false;
    // Work before the capture can't be in front of work inside.
    entry->capture->invalid = true;
    *result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    return true;
  }
  const std::shared_ptr<Capture> from = found->second.capture.lock();
  const bool open = from != nullptr && std::find(state().captures.begin(), state().captures.end(),
                                                 from) != state().captures.end();
  if (!open) {
    if (captures) entry->capture->invalid = true;
    *result = captures ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_ERROR_CAPTURED_EVENT;
    return true;
  }
  if (from->invalid) {
    *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return true;
  }
  if (!captures) {
    if (info.legacy) {
      from->invalid = true;
      *result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
      return true;
    }
    // The stream joins the capture.
    Participant joining;
    joining.capture = from;
    joining.stream = info;
    joining.dependencies = found->second.dependencies;
    state().streams[info.key] = std::move(joining);
    return true;
  }
  if (entry->capture != from) {
    entry->capture->invalid = from->invalid = true;
    *result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    return true;
  }
  merge(&entry->dependencies, found->second.dependencies);
  return true;
}

bool capture_allocation(CUstream stream, CUdevice device, size_t bytes, CUdeviceptr* address,
                        CUresult* result) {
  return capture(stream, result, [&](Work* out) -> CUresult {
    AllocWork work;
    if (const CUresult e = new_graph_memory(device, bytes, &work.memory)) return e;
    work.parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    work.parameters.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    work.parameters.bytesize = bytes;
    work.parameters.dptr = *address = work.memory->address;
    *out = std::move(work);
    return CUDA_SUCCESS;
  });
}

bool capture_free(CUstream stream, CUdeviceptr address, CUresult* result) {
  return capture(stream, result, [&](Work* out) -> CUresult {
    FreeWork work;
    work.address = address;
    work.memory = find_graph_memory(address);
    // What was not allocated by a graph can't be freed by one.
    if (work.memory == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = std::move(work);
    return CUDA_SUCCESS;
  });
}

bool refuse_capture(CUstream stream, CUresult* result) {
  return capture(stream, result,
                 [](Work*) -> CUresult { return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; });
}

// ---- What may not be called ---------------------------------------------------------------------

CUresult check_stream_query(CUstream stream) {
  StreamInfo info;
  if (const CUresult e = find_stream(stream, &info)) return e;
  Guard guard;
  if (Participant* entry = participant(info.key)) {
    entry->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return info.legacy && conflicts_with_legacy(info.context) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                                                            : CUDA_SUCCESS;
}

CUresult check_event_query(CUevent event) {
  if (const CUresult e = find_event(event)) return e;
  {
    Guard guard;
    const auto found = state().events.find(key_of(event));
    if (found != state().events.end()) {
      if (const auto from = found->second.capture.lock()) from->invalid = true;
      return CUDA_ERROR_CAPTURED_EVENT;
    }
  }
  return check_unsafe();
}

bool refuse_events(CUevent first, CUevent second, CUresult* result) {
  *result = check_event_query(first);
  if (*result == CUDA_SUCCESS) *result = check_event_query(second);
  return *result != CUDA_SUCCESS;
}

CUresult check_context_wait(CUcontext context) {
  Guard guard;
  bool found = false;
  for (auto& [key, entry] : state().streams) {
    if (entry.stream.context != context) continue;
    entry.capture->invalid = true;
    found = true;
  }
  return found ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult check_unsafe() {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  Guard guard;
  bool found = false;
  for (const auto& capture : state().captures) {
    const bool prohibits = mine(*capture) ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                                          : thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                                capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!prohibits) continue;
    capture->invalid = true;
    found = true;
  }
  return found ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult check_synchronous() {
  if (const CUresult e = check_stream_query(nullptr)) return e;
  return check_unsafe();
}

// ---- Objects that end ---------------------------------------------------------------------------

void forget_stream(uint64_t key) {
  if (!watching()) return;
  Guard guard;
  Participant* entry = participant(key);
  if (entry == nullptr) return;
  const std::shared_ptr<Capture> capture = entry->capture;
  if (capture->origin == key) {
    capture->invalid = true;
    finish(guard, capture);  // nobody can end it any more
    return;
  }
  for (const auto& dependency : entry->dependencies) capture->unjoined.push_back(dependency.node);
  state().streams.erase(key);
}

void forget_event(CUevent event) {
  if (!watching()) return;
  Guard guard;
  state().events.erase(key_of(event));
  state().count();
}

void forget_context(CUcontext context) {
  if (!watching()) return;
  Guard guard;
  std::vector<std::shared_ptr<Capture>> over;
  for (const auto& [key, entry] : state().streams) {
    if (entry.stream.context == context) over.push_back(entry.capture);
  }
  for (const auto& capture : over) {
    if (std::find(state().captures.begin(), state().captures.end(), capture) ==
        state().captures.end()) {
      continue;
    }
    capture->invalid = true;
    finish(guard, capture);
  }
}

}  // namespace gpupool::graphs
