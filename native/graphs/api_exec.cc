// Executable graphs: instantiation, launches, updates.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>

#include "api/cuda_abi.h"
#include "graphs/capture.h"
#include "graphs/node_work.h"

using namespace gpupool::graphs;  // NOLINT: a file of entry points

#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define START() \
  if (const CUresult e_ = initialised()) return e_;

namespace {

struct Exec {
  std::mutex lock;
  Plan plan;
  std::unordered_map<uint64_t, uint32_t> nodes;  // the graph's node to the plan's
  std::unique_ptr<Executable> executable;
  uint64_t flags = 0;
  Held held;
  bool allocates = false;
};

struct Execs {
  std::mutex lock;
  std::unordered_map<uint64_t, std::shared_ptr<Exec>> all;
};
Execs& execs() {
  static auto& instance = *new Execs;
  return instance;
}

std::shared_ptr<Exec> find_exec(CUgraphExec handle) {
  std::lock_guard lock(execs().lock);
  const auto found = execs().all.find(reinterpret_cast<uint64_t>(handle));
  return found == execs().all.end() ? nullptr : found->second;
}

CUcontext context_of(const Work& work) {
  if (const auto* kernel = std::get_if<KernelWork>(&work)) return kernel->context;
  if (const auto* copy = std::get_if<MemcpyWork>(&work)) return copy->context;
  if (const auto* fill = std::get_if<MemsetWork>(&work)) return fill->fill.ctx;
  return nullptr;
}

// Frees must come after their allocations, and nothing be allocated or freed twice.
bool memory_in_order(const Plan& plan, bool* allocates) {
  std::map<CUdeviceptr, int> state;  // 1 allocated here, 2 freed
  for (const PlanNode& node : plan) {
    if (const auto* allocation = std::get_if<AllocWork>(&*node.work)) {
      *allocates = true;
      if (state[allocation->memory->address]++ != 0) return false;
    } else if (const auto* freeing = std::get_if<FreeWork>(&*node.work)) {
      *allocates = true;
      int& it = state[freeing->address];
      if (it == 2) return false;
      it = 2;
    }
  }
  return true;
}

CUresult instantiate(CUgraphExec* out, CUgraph handle, uint64_t flags, CUgraphNode* error_node,
                     CUgraphInstantiateResult* why) {
  START();
  REQUIRE(out != nullptr);
  constexpr uint64_t kKnown =
      CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
      CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  REQUIRE((flags & ~kKnown) == 0);
  *why = CUDA_GRAPH_INSTANTIATE_ERROR;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
    *why = CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED;
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  CUcontext context = nullptr;
  if (const CUresult e = current(&context)) return e;
  auto exec = std::make_shared<Exec>();
  exec->flags = flags;
  {
    Guard guard;
    Graph* graph = guard.graph(handle);
    REQUIRE(graph != nullptr && graph->capturing == 0);
    if (!guard.flatten(*graph, &exec->plan)) {
      *why = CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE;
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (const auto& [object, count] : graph->held) guard.hold(&exec->held, object, count);
  }
  auto give_up = [&](CUresult result) {
    Guard guard;
    guard.release_all(&exec->held);
    return result;
  };
  for (uint32_t i = 0; i < exec->plan.size(); i++) {
    const PlanNode& node = exec->plan[i];
    exec->nodes[node.source] = i;
    if (CUcontext own = context_of(*node.work)) context = own;
  }
  if (!memory_in_order(exec->plan, &exec->allocates)) {
    *why = CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE;
    return give_up(CUDA_ERROR_INVALID_VALUE);
  }
  int failed = -1;
  if (const CUresult e = make_executable(context, &exec->plan, &exec->executable, &failed)) {
    if (failed >= 0 && error_node != nullptr) {
      *error_node = reinterpret_cast<CUgraphNode>(exec->plan[static_cast<size_t>(failed)].source);
    }
    if (e == CUDA_ERROR_NOT_SUPPORTED) *why = CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED;
    return give_up(e);
  }
  *why = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  const uint64_t number = new_handle();
  std::lock_guard lock(execs().lock);
  execs().all[number] = std::move(exec);
  *out = reinterpret_cast<CUgraphExec>(number);
  return CUDA_SUCCESS;
}

// What a launch means for the memory of the executable's allocation nodes.
CUresult account_memory(Exec& exec) {
  const bool frees_itself = exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
  for (const PlanNode& node : exec.plan) {
    const auto* allocation = std::get_if<AllocWork>(&*node.work);
    REQUIRE(allocation == nullptr || !allocation->memory->live || frees_itself);
  }
  for (const PlanNode& node : exec.plan) {
    if (const auto* allocation = std::get_if<AllocWork>(&*node.work)) {
      allocation->memory->live = true;
    } else if (const auto* freeing = std::get_if<FreeWork>(&*node.work)) {
      freeing->memory->live = false;
    }
  }
  return CUDA_SUCCESS;
}

// A launch into a stream that captures: the executable's work as a child graph.
CUresult as_child(Exec& exec, Work* out) {
  Plan plan;
  {
    std::lock_guard lock(exec.lock);
    plan = exec.plan;
  }
  Guard guard;
  ChildWork child;
  child.graph = guard.make_graph();
  child.graph->embedded = true;
  for (const PlanNode& entry : plan) {
    std::vector<Edge> edges;
    for (uint32_t dependency : entry.dependencies) {
      edges.push_back({child.graph->nodes[dependency].get(), {}});
    }
    static const WorkPointer kEmpty = share(EmptyWork{});
    Node* node;
    if (const CUresult e =
            guard.add_node(child.graph.get(), edges, entry.enabled ? entry.work : kEmpty, &node)) {
      guard.drop_graph(child.graph.get());
      return e;
    }
  }
  *out = std::move(child);
  return CUDA_SUCCESS;
}

CUresult launch(CUgraphExec handle, CUstream stream) {
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr);
  GPUPOOL_CAPTURE(
      capture(stream, &capture_result, [&](Work* out) { return as_child(*exec, out); }));
  std::lock_guard lock(exec->lock);
  REQUIRE(exec->executable != nullptr);
  if (exec->allocates) [[unlikely]] {
    if (const CUresult e = account_memory(*exec)) return e;
  }
  return exec->executable->launch(stream);
}

// Whether an executable can take this in the place of what a node does now.
CUgraphExecUpdateResult compare(const Work& now, const Work& then) {
  if (now.index() != then.index()) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
  if (const auto* kernel = std::get_if<KernelWork>(&now)) {
    const auto& other = std::get<KernelWork>(then);
    if (kernel->context != other.context) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
    }
    if (kernel->cooperative() != other.cooperative()) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
    }
  } else if (const auto* copy = std::get_if<MemcpyWork>(&now)) {
    const auto& other = std::get<MemcpyWork>(then);
    auto on_device = [](CUmemorytype type, CUdeviceptr address) {
      return type == CU_MEMORYTYPE_UNIFIED ? is_device_memory(address) : type != CU_MEMORYTYPE_HOST;
    };
    const CUDA_MEMCPY3D &a = copy->copy, &b = other.copy;
    if (copy->context != other.context ||
        on_device(a.srcMemoryType, a.srcDevice) != on_device(b.srcMemoryType, b.srcDevice) ||
        on_device(a.dstMemoryType, a.dstDevice) != on_device(b.dstMemoryType, b.dstDevice)) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
  } else if (const auto* fill = std::get_if<MemsetWork>(&now)) {
    if (fill->fill.ctx != std::get<MemsetWork>(then).fill.ctx) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
  } else if (const auto* allocation = std::get_if<AllocWork>(&now)) {
    if (allocation->memory != std::get<AllocWork>(then).memory) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    }
  } else if (const auto* freeing = std::get_if<FreeWork>(&now)) {
    if (freeing->address != std::get<FreeWork>(then).address) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    }
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

// Puts other work into the nodes [first, first + works.size()), all or none.
CUresult replace(Exec& exec, const std::vector<std::pair<uint32_t, WorkPointer>>& works) {
  std::vector<uint32_t> changed;
  std::vector<WorkPointer> before;
  for (const auto& [index, work] : works) {
    PlanNode& node = exec.plan[index];
    if (node.work == work) continue;
    changed.push_back(index);
    before.push_back(node.work);
    node.work = work;
  }
  if (changed.empty()) return CUDA_SUCCESS;
  REQUIRE(exec.executable != nullptr);  // destroyed by another thread meanwhile
  const CUresult result = exec.executable->update(changed);
  if (result == CUDA_SUCCESS) return result;
  for (size_t i = 0; i < changed.size(); i++) exec.plan[changed[i]].work = before[i];
  exec.executable->update(changed);
  return result;
}

CUresult update(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo* info) {
  START();
  REQUIRE(info != nullptr);
  *info = {CU_GRAPH_EXEC_UPDATE_ERROR, nullptr, nullptr};
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr);
  Plan then;
  {
    Guard guard;
    Graph* graph = guard.graph(graph_handle);
    REQUIRE(graph != nullptr && graph->capturing == 0 && guard.flatten(*graph, &then));
  }
  auto failed = [&](CUgraphExecUpdateResult result, uint64_t node) {
    info->result = result;
    info->errorNode = reinterpret_cast<CUgraphNode>(node);
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  };
  std::lock_guard lock(exec->lock);
  if (then.size() != exec->plan.size()) {
    return failed(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, 0);
  }
  std::vector<std::pair<uint32_t, WorkPointer>> works;
  for (uint32_t i = 0; i < then.size(); i++) {
    std::vector<uint32_t> a = exec->plan[i].dependencies, b = then[i].dependencies;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    if (a != b) return failed(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, then[i].source);
    const auto result = compare(*exec->plan[i].work, *then[i].work);
    if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return failed(result, then[i].source);
    works.emplace_back(i, then[i].work);
  }
  if (const CUresult e = replace(*exec, works)) return e;
  info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  return CUDA_SUCCESS;
}

// Other work for one node, named by the graph's node.
CUresult set_node(CUgraphExec handle, CUgraphNode node, WorkPointer work) {
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr);
  std::lock_guard lock(exec->lock);
  const auto found = exec->nodes.find(reinterpret_cast<uint64_t>(node));
  REQUIRE(found != exec->nodes.end());
  const WorkPointer& now = exec->plan[found->second].work;
  if (std::holds_alternative<KernelWork>(*now) && std::holds_alternative<KernelWork>(*work)) {
    KernelWork with = std::get<KernelWork>(*work);
    with.attributes = std::get<KernelWork>(*now).attributes;
    work = share(std::move(with));
  }
  if (compare(*now, *work) != CU_GRAPH_EXEC_UPDATE_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  return replace(*exec, {{found->second, std::move(work)}});
}

CUcontext context_in(CUgraphExec handle, CUgraphNode node) {
  const std::shared_ptr<Exec> exec = find_exec(handle);
  if (exec == nullptr) return nullptr;
  std::lock_guard lock(exec->lock);
  const auto found = exec->nodes.find(reinterpret_cast<uint64_t>(node));
  return found == exec->nodes.end() ? nullptr : context_of(*exec->plan[found->second].work);
}

template <typename Parameters>
CUresult set_kernel(CUgraphExec exec, CUgraphNode node, const Parameters* parameters) {
  START();
  KernelWork work;
  if (const CUresult e = read_kernel(parameters, &work)) return e;
  return set_node(exec, node, share(std::move(work)));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  CUgraphInstantiateResult why;
  return instantiate(out, graph, flags, nullptr, &why);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* out, CUgraph graph, CUgraphNode* error_node, char* log,
                               size_t log_bytes) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_bytes != 0) log[0] = '\0';
  CUgraphInstantiateResult why;
  return instantiate(out, graph, 0, error_node, &why);
}
CUresult cuGraphInstantiate(CUgraphExec* out, CUgraph graph, CUgraphNode* error_node, char* log,
                            size_t log_bytes) {
  return cuGraphInstantiate_v2(out, graph, error_node, log, log_bytes);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
  REQUIRE(parameters != nullptr);
  parameters->hErrNode_out = nullptr;
  const CUresult result = instantiate(out, graph, parameters->flags, &parameters->hErrNode_out,
                                      &parameters->result_out);
  if (result != CUDA_SUCCESS || !(parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)) {
    return result;
  }
  return cuGraphUpload(*out, parameters->hUploadStream);
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t* flags) {
  START();
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr && flags != nullptr);
  *flags = exec->flags;
  return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream stream) {
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr);
  StreamInfo info;
  if (const CUresult e = find_stream(stream, &info)) return e;
  std::lock_guard lock(exec->lock);
  REQUIRE(exec->executable != nullptr);
  return exec->executable->upload(stream);
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { return launch(exec, stream); }

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  START();
  std::shared_ptr<Exec> exec;
  {
    std::lock_guard lock(execs().lock);
    const auto found = execs().all.find(reinterpret_cast<uint64_t>(handle));
    REQUIRE(found != execs().all.end());
    exec = std::move(found->second);
    execs().all.erase(found);
  }
  {
    std::lock_guard lock(exec->lock);
    exec->executable.reset();
  }
  Guard guard;
  guard.release_all(&exec->held);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  return update(exec, graph, info);
}
CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* error_node,
                           CUgraphExecUpdateResult* why) {
  REQUIRE(why != nullptr);
  CUgraphExecUpdateResultInfo info;
  const CUresult result = update(exec, graph, &info);
  *why = info.result;
  if (error_node != nullptr) *error_node = info.errorNode;
  return result;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* parameters) {
  return set_kernel(exec, node, parameters);
}
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS* parameters) {
  return set_kernel(exec, node, parameters);
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_MEMCPY3D* parameters, CUcontext context) {
  START();
  MemcpyWork work;
  if (context == nullptr) context = context_in(exec, node);
  if (const CUresult e = read_copy(parameters, context, &work)) return e;
  return set_node(exec, node, share(work));
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_MEMSET_NODE_PARAMS* parameters,
                                        CUcontext context) {
  START();
  MemsetWork work;
  if (context == nullptr) context = context_in(exec, node);
  if (const CUresult e = read_fill(parameters, context, &work)) return e;
  return set_node(exec, node, share(work));
}
CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                      const CUDA_HOST_NODE_PARAMS* parameters) {
  START();
  REQUIRE(parameters != nullptr);
  HostWork work;
  if (const CUresult e = read_host(parameters->fn, parameters->userData, &work)) return e;
  return set_node(exec, node, share(work));
}
CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  START();
  if (const CUresult e = find_event(event)) return e;
  return set_node(exec, node, share(RecordWork{event}));
}
CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  START();
  if (const CUresult e = find_event(event)) return e;
  return set_node(exec, node, share(WaitWork{event}));
}

// The child's nodes lie in front of the plan's entry for the child node.
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec handle, CUgraphNode node, CUgraph child) {
  START();
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr);
  Plan now, then;
  {
    Guard guard;
    Graph* graph = guard.graph(child);
    const Node* it = guard.node(node);
    REQUIRE(graph != nullptr && it != nullptr);
    const auto* before = std::get_if<ChildWork>(&*it->work);
    REQUIRE(before != nullptr && guard.flatten(*graph, &then) &&
            guard.flatten(*before->graph, &now));
  }
  std::lock_guard lock(exec->lock);
  const auto found = exec->nodes.find(reinterpret_cast<uint64_t>(node));
  REQUIRE(found != exec->nodes.end() && now.size() == then.size() && found->second >= now.size());
  const uint32_t first = found->second - static_cast<uint32_t>(now.size());
  std::vector<std::pair<uint32_t, WorkPointer>> works;
  for (uint32_t i = 0; i < then.size(); i++) {
    REQUIRE(now[i].dependencies == then[i].dependencies);
    REQUIRE(compare(*exec->plan[first + i].work, *then[i].work) == CU_GRAPH_EXEC_UPDATE_SUCCESS);
    works.emplace_back(first + i, then[i].work);
  }
  return replace(*exec, works);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                  CUgraphNodeParams* parameters) {
  START();
  REQUIRE(parameters != nullptr);
  if (parameters->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    return cuGraphExecChildGraphNodeSetParams(exec, node, parameters->graph.graph);
  }
  WorkPointer work;
  if (const CUresult e = read_any(*parameters, &work)) return e;
  if (work == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  return set_node(exec, node, std::move(work));
}

CUresult cuGraphNodeSetEnabled(CUgraphExec handle, CUgraphNode node, unsigned int enabled) {
  START();
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr);
  std::lock_guard lock(exec->lock);
  const auto found = exec->nodes.find(reinterpret_cast<uint64_t>(node));
  REQUIRE(found != exec->nodes.end());
  PlanNode& it = exec->plan[found->second];
  // Kernels, copies and memsets only, as with CUDA.
  REQUIRE(it.work->index() <= 2);
  if (it.enabled == (enabled != 0)) return CUDA_SUCCESS;
  REQUIRE(exec->executable != nullptr);
  it.enabled = enabled != 0;
  const CUresult result = exec->executable->update({found->second});
  if (result != CUDA_SUCCESS) it.enabled = !it.enabled;
  return result;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode node, unsigned int* enabled) {
  START();
  const std::shared_ptr<Exec> exec = find_exec(handle);
  REQUIRE(exec != nullptr && enabled != nullptr);
  std::lock_guard lock(exec->lock);
  const auto found = exec->nodes.find(reinterpret_cast<uint64_t>(node));
  REQUIRE(found != exec->nodes.end() && exec->plan[found->second].work->index() <= 2);
  *enabled = exec->plan[found->second].enabled;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
  START();
  return find_device(device);  // memory goes with the last graph that knows it
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute,
                                      void* value) {
  START();
  if (const CUresult e = find_device(device)) return e;
  REQUIRE(value != nullptr);
  const GraphMemoryUse use = graph_memory_use(device);
  cuuint64_t bytes = use.bytes;
  switch (static_cast<int>(attribute)) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
      break;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
      bytes = use.used_high;
      break;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
      bytes = use.reserved_high;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  memcpy(value, &bytes, sizeof bytes);
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute,
                                      void* value) {
  START();
  if (const CUresult e = find_device(device)) return e;
  // Only the highest values can be set, to 0.
  REQUIRE(value != nullptr && (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH ||
                               attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH));
  cuuint64_t bytes;
  memcpy(&bytes, value, sizeof bytes);
  REQUIRE(bytes == 0);
  forget_highest(device, attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
