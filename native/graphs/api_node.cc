// The entry points that add nodes, and read and write what they do.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include "api/cuda_abi.h"
#include "graphs/node_work.h"

using namespace gpupool::graphs;  // NOLINT: a file of entry points

#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define START() \
  if (const CUresult e_ = initialised()) return e_;

namespace gpupool::graphs {

CUresult read_copy(const CUDA_MEMCPY3D* from, CUcontext context, MemcpyWork* work) {
  REQUIRE(from != nullptr && from->WidthInBytes != 0 && from->Height != 0 && from->Depth != 0);
  work->copy = *from;
  work->context = context;
  if (context == nullptr) {
    if (const CUresult e = current(&work->context)) return e;
  }
  return check(*work);
}

CUresult read_fill(const CUDA_MEMSET_NODE_PARAMS* from, CUcontext context, MemsetWork* work) {
  REQUIRE(from != nullptr);
  work->fill = {from->dst,   from->pitch,  from->value, from->elementSize,
                from->width, from->height, context};
  if (context == nullptr) {
    if (const CUresult e = current(&work->fill.ctx)) return e;
  }
  REQUIRE(from->elementSize == 1 || from->elementSize == 2 || from->elementSize == 4);
  REQUIRE(from->width != 0 && from->height != 0);
  return check(*work);
}

CUresult read_host(CUhostFn function, void* data, HostWork* work) {
  REQUIRE(function != nullptr);
  *work = {function, data};
  return CUDA_SUCCESS;
}

CUresult read_any(const CUgraphNodeParams& from, WorkPointer* out) {
  int type;  // whatever the program wrote
  memcpy(&type, &from.type, sizeof type);
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      KernelWork work;
      if (const CUresult e = read_kernel(&from.kernel, &work)) return e;
      *out = share(std::move(work));
      return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      MemcpyWork work;
      if (const CUresult e = read_copy(&from.memcpy.copyParams, from.memcpy.copyCtx, &work)) {
        return e;
      }
      *out = share(work);
      return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const auto& fill = from.memset;
      const CUDA_MEMSET_NODE_PARAMS first{fill.dst,         fill.pitch, fill.value,
                                          fill.elementSize, fill.width, fill.height};
      MemsetWork work;
      if (const CUresult e = read_fill(&first, fill.ctx, &work)) return e;
      *out = share(work);
      return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      HostWork work;
      if (const CUresult e = read_host(from.host.fn, from.host.userData, &work)) return e;
      *out = share(work);
      return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_EMPTY:
      *out = share(EmptyWork{});
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      if (const CUresult e = find_event(from.eventRecord.event)) return e;
      *out = share(RecordWork{from.eventRecord.event});
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      if (const CUresult e = find_event(from.eventWait.event)) return e;
      *out = share(WaitWork{from.eventWait.event});
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH:
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult read_allocation(CUDA_MEM_ALLOC_NODE_PARAMS* parameters, AllocWork* work) {
  REQUIRE(parameters != nullptr && parameters->bytesize != 0);
  const CUmemPoolProps& pool = parameters->poolProps;
  REQUIRE(pool.allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
          pool.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
          pool.handleTypes == CU_MEM_HANDLE_TYPE_NONE);
  REQUIRE(parameters->accessDescCount == 0 || parameters->accessDescs != nullptr);
  if (const CUresult e = find_device(pool.location.id)) return e;
  for (size_t i = 0; i < parameters->accessDescCount; i++) {
    const CUmemAccessDesc& access = parameters->accessDescs[i];
    if (access.location.id != pool.location.id) return CUDA_ERROR_NOT_SUPPORTED;  // peers
    work->access.push_back(access);
  }
  if (const CUresult e = new_graph_memory(pool.location.id, parameters->bytesize, &work->memory)) {
    return e;
  }
  parameters->dptr = work->memory->address;
  memcpy(&work->parameters, parameters, sizeof work->parameters);
  work->parameters.accessDescs = work->access.data();
  return CUDA_SUCCESS;
}

}  // namespace gpupool::graphs

namespace {

CUresult add(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies,
             const CUgraphEdgeData* data, size_t count, WorkPointer work) {
  REQUIRE(out != nullptr);
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr);
  std::vector<Edge> edges;
  if (const CUresult e = guard.find_dependencies(graph, dependencies, data, count, &edges)) {
    return e;
  }
  Node* node;
  if (const CUresult e = guard.add_node(graph, edges, std::move(work), &node)) return e;
  *out = node->as_cuda();
  return CUDA_SUCCESS;
}

// `move`: the graph itself becomes the node's.
CUresult add_child(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies,
                   const CUgraphEdgeData* data, size_t count, CUgraph child_handle, bool move) {
  REQUIRE(out != nullptr);
  Guard guard;
  Graph* graph = guard.graph(handle);
  const std::shared_ptr<Graph> child = guard.shared_graph(child_handle);
  REQUIRE(graph != nullptr && child != nullptr && child.get() != graph);
  std::vector<Edge> edges;
  if (const CUresult e = guard.find_dependencies(graph, dependencies, data, count, &edges)) {
    return e;
  }
  ChildWork work;
  if (move) {
    REQUIRE(!child->embedded && child->capturing == 0);
    // A graph inside of itself would never end.
    std::vector<const Graph*> open{child.get()};
    while (!open.empty()) {
      const Graph* it = open.back();
      open.pop_back();
      REQUIRE(it != graph);
      for (const auto& node : it->nodes) {
        if (const auto* inner = std::get_if<ChildWork>(&*node->work)) {
          open.push_back(inner->graph.get());
        }
      }
    }
    work.graph = child;
  } else if (const CUresult e = guard.clone(child.get(), true, &work.graph)) {
    return e;
  }
  const std::shared_ptr<Graph> embedded = work.graph;
  Node* node;
  if (const CUresult e = guard.add_node(graph, edges, share(std::move(work)), &node)) {
    if (!move) guard.drop_graph(embedded.get());
    return e;
  }
  embedded->embedded = true;
  *out = node->as_cuda();
  return CUDA_SUCCESS;
}

CUresult add_free(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                  const CUgraphEdgeData* data, size_t count, CUdeviceptr address) {
  FreeWork work;
  work.address = address;
  work.memory = find_graph_memory(address);
  REQUIRE(work.memory != nullptr);
  {
    Guard guard;
    Graph* it = guard.graph(graph);
    REQUIRE(it != nullptr);
    for (const auto& node : it->nodes) {
      const auto* other = std::get_if<FreeWork>(&*node->work);
      REQUIRE(other == nullptr || other->address != address);  // freed twice
    }
  }
  return add(out, graph, dependencies, data, count, share(std::move(work)));
}

template <typename W, typename F>
CUresult read(CUgraphNode handle, F&& f) {
  START();
  Guard guard;
  const Node* node = guard.node(handle);
  REQUIRE(node != nullptr);
  const W* work = std::get_if<W>(&*node->work);
  REQUIRE(work != nullptr);
  f(*work);
  return CUDA_SUCCESS;
}

// Replaces what a node does by something of the same type.
CUresult replace(CUgraphNode handle, WorkPointer work) {
  Guard guard;
  Node* node = guard.node(handle);
  REQUIRE(node != nullptr && node->work->index() == work->index());
  if (std::holds_alternative<KernelWork>(*work)) {
    const auto& before = std::get<KernelWork>(*node->work);
    if (!before.attributes.empty()) {
      KernelWork with = std::get<KernelWork>(*work);
      with.attributes = before.attributes;
      work = share(std::move(with));
    }
  }
  node->work.swap(work);
  return CUDA_SUCCESS;
}

template <typename Parameters>
CUresult add_kernel(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                    const Parameters* parameters) {
  START();
  KernelWork work;
  if (const CUresult e = read_kernel(parameters, &work)) return e;
  return add(out, graph, dependencies, nullptr, count, share(std::move(work)));
}

template <typename Parameters>
CUresult get_kernel(CUgraphNode node, Parameters* out) {
  REQUIRE(out != nullptr);
  return read<KernelWork>(node, [out](const KernelWork& work) {
    memset(static_cast<void*>(out), 0, sizeof *out);
    out->func = work.function;
    out->gridDimX = work.grid[0];
    out->gridDimY = work.grid[1];
    out->gridDimZ = work.grid[2];
    out->blockDimX = work.block[0];
    out->blockDimY = work.block[1];
    out->blockDimZ = work.block[2];
    out->sharedMemBytes = work.shared_bytes;
    out->kernelParams = work.pointers.empty() ? nullptr : const_cast<void**>(work.pointers.data());
    if constexpr (!std::is_same_v<Parameters, CUDA_KERNEL_NODE_PARAMS_v1>) {
      out->kern = work.kernel;
      out->ctx = work.context;
    }
  });
}

template <typename Parameters>
CUresult set_kernel(CUgraphNode node, const Parameters* parameters) {
  START();
  KernelWork work;
  if (const CUresult e = read_kernel(parameters, &work)) return e;
  return replace(node, share(std::move(work)));
}

CUresult add_event(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                   CUevent event, bool record) {
  START();
  if (const CUresult e = find_event(event)) return e;
  return add(out, graph, dependencies, nullptr, count,
             record ? share(RecordWork{event}) : share(WaitWork{event}));
}

CUresult add_any(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                 const CUgraphEdgeData* data, size_t count, CUgraphNodeParams* parameters) {
  START();
  REQUIRE(out != nullptr && parameters != nullptr);
  WorkPointer work;
  if (const CUresult e = read_any(*parameters, &work)) return e;
  if (work != nullptr) return add(out, graph, dependencies, data, count, std::move(work));
  switch (parameters->type) {
    case CU_GRAPH_NODE_TYPE_GRAPH:
      REQUIRE(parameters->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE ||
              parameters->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
      return add_child(out, graph, dependencies, data, count, parameters->graph.graph,
                       parameters->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == sizeof(CUDA_MEM_ALLOC_NODE_PARAMS_v2));
      AllocWork allocation;
      auto* in = reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS*>(&parameters->alloc);
      if (const CUresult e = read_allocation(in, &allocation)) return e;
      return add(out, graph, dependencies, data, count, share(std::move(allocation)));
    }
    default:
      return add_free(out, graph, dependencies, data, count, parameters->free.dptr);
  }
}

constexpr int kKernelAttributes[] = {CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
                                     CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                                     CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                     CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
                                     CU_LAUNCH_ATTRIBUTE_PRIORITY,
                                     CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
                                     CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
                                     CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT};

bool is_kernel_attribute(int attribute) {
  for (int known : kKernelAttributes) {
    if (known == attribute) return true;
  }
  return false;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGraphAddKernelNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                              size_t count, const CUDA_KERNEL_NODE_PARAMS_v1* parameters) {
  return add_kernel(out, graph, dependencies, count, parameters);
}
CUresult cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                                 size_t count, const CUDA_KERNEL_NODE_PARAMS* parameters) {
  return add_kernel(out, graph, dependencies, count, parameters);
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1* out) {
  return get_kernel(node, out);
}
CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* out) {
  return get_kernel(node, out);
}
CUresult cuGraphKernelNodeSetParams(CUgraphNode node,
                                    const CUDA_KERNEL_NODE_PARAMS_v1* parameters) {
  return set_kernel(node, parameters);
}
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node,
                                       const CUDA_KERNEL_NODE_PARAMS* parameters) {
  return set_kernel(node, parameters);
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                       CUkernelNodeAttrValue* out) {
  REQUIRE(out != nullptr && is_kernel_attribute(attribute));
  return read<KernelWork>(node, [&](const KernelWork& work) {
    memset(static_cast<void*>(out), 0, sizeof *out);
    const auto found = work.attributes.find(attribute);
    if (found != work.attributes.end()) *out = found->second;
  });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue* value) {
  REQUIRE(value != nullptr && is_kernel_attribute(attribute));
  KernelWork work;
  if (const CUresult e = read<KernelWork>(node, [&](const KernelWork& it) { work = it; })) {
    return e;
  }
  work.attributes[attribute] = *value;
  if (const CUresult e = check(work)) return e;
  Guard guard;
  Node* it = guard.node(node);
  REQUIRE(it != nullptr && std::holds_alternative<KernelWork>(*it->work));
  it->work = share(std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
  START();
  Guard guard;
  Node *target = guard.node(to), *source = guard.node(from);
  REQUIRE(target != nullptr && source != nullptr &&
          std::holds_alternative<KernelWork>(*target->work) &&
          std::holds_alternative<KernelWork>(*source->work));
  KernelWork work = std::get<KernelWork>(*target->work);
  work.attributes = std::get<KernelWork>(*source->work).attributes;
  target->work = share(std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuGraphAddMemcpyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                              size_t count, const CUDA_MEMCPY3D* parameters, CUcontext context) {
  START();
  MemcpyWork work;
  if (const CUresult e = read_copy(parameters, context, &work)) return e;
  return add(out, graph, dependencies, nullptr, count, share(work));
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D* out) {
  REQUIRE(out != nullptr);
  return read<MemcpyWork>(node, [out](const MemcpyWork& work) { *out = work.copy; });
}
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D* parameters) {
  MemcpyWork work;
  CUcontext context = nullptr;
  if (const CUresult e =
          read<MemcpyWork>(node, [&](const MemcpyWork& it) { context = it.context; })) {
    return e;
  }
  if (const CUresult e = read_copy(parameters, context, &work)) return e;
  return replace(node, share(work));
}

CUresult cuGraphAddMemsetNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                              size_t count, const CUDA_MEMSET_NODE_PARAMS* parameters,
                              CUcontext context) {
  START();
  MemsetWork work;
  if (const CUresult e = read_fill(parameters, context, &work)) return e;
  return add(out, graph, dependencies, nullptr, count, share(work));
}
CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* out) {
  REQUIRE(out != nullptr);
  return read<MemsetWork>(node, [out](const MemsetWork& work) {
    const auto& fill = work.fill;
    *out = {fill.dst, fill.pitch, fill.value, fill.elementSize, fill.width, fill.height};
  });
}
CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* parameters) {
  CUcontext context = nullptr;
  if (const CUresult e =
          read<MemsetWork>(node, [&](const MemsetWork& it) { context = it.fill.ctx; })) {
    return e;
  }
  MemsetWork work;
  if (const CUresult e = read_fill(parameters, context, &work)) return e;
  return replace(node, share(work));
}

CUresult cuGraphAddHostNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                            size_t count, const CUDA_HOST_NODE_PARAMS* parameters) {
  START();
  REQUIRE(parameters != nullptr);
  HostWork work;
  if (const CUresult e = read_host(parameters->fn, parameters->userData, &work)) return e;
  return add(out, graph, dependencies, nullptr, count, share(work));
}
CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS* out) {
  REQUIRE(out != nullptr);
  return read<HostWork>(node, [out](const HostWork& work) { *out = {work.function, work.data}; });
}
CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS* parameters) {
  START();
  REQUIRE(parameters != nullptr);
  HostWork work;
  if (const CUresult e = read_host(parameters->fn, parameters->userData, &work)) return e;
  return replace(node, share(work));
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                                  size_t count, CUgraph child) {
  START();
  return add_child(out, graph, dependencies, nullptr, count, child, false);
}
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* out) {
  REQUIRE(out != nullptr);
  return read<ChildWork>(node, [out](const ChildWork& work) { *out = work.graph->as_cuda(); });
}

CUresult cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                             size_t count) {
  START();
  return add(out, graph, dependencies, nullptr, count, share(EmptyWork{}));
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                                   size_t count, CUevent event) {
  return add_event(out, graph, dependencies, count, event, true);
}
CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent* out) {
  REQUIRE(out != nullptr);
  return read<RecordWork>(node, [out](const RecordWork& work) { *out = work.event; });
}
CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
  START();
  if (const CUresult e = find_event(event)) return e;
  return replace(node, share(RecordWork{event}));
}
CUresult cuGraphAddEventWaitNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                                 size_t count, CUevent event) {
  return add_event(out, graph, dependencies, count, event, false);
}
CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent* out) {
  REQUIRE(out != nullptr);
  return read<WaitWork>(node, [out](const WaitWork& work) { *out = work.event; });
}
CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
  START();
  if (const CUresult e = find_event(event)) return e;
  return replace(node, share(WaitWork{event}));
}

CUresult cuGraphAddMemAllocNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                                size_t count, CUDA_MEM_ALLOC_NODE_PARAMS* parameters) {
  START();
  REQUIRE(out != nullptr);
  AllocWork work;
  if (const CUresult e = read_allocation(parameters, &work)) return e;
  return add(out, graph, dependencies, nullptr, count, share(std::move(work)));
}
CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS* out) {
  REQUIRE(out != nullptr);
  return read<AllocWork>(node, [out](const AllocWork& work) {
    memcpy(static_cast<void*>(out), &work.parameters, sizeof *out);
    out->accessDescs = work.access.data();
  });
}
CUresult cuGraphAddMemFreeNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                               size_t count, CUdeviceptr address) {
  START();
  REQUIRE(out != nullptr);
  return add_free(out, graph, dependencies, nullptr, count, address);
}
CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr* out) {
  REQUIRE(out != nullptr);
  return read<FreeWork>(node, [out](const FreeWork& work) { *out = work.address; });
}

CUresult cuGraphAddNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                        size_t count, CUgraphNodeParams* parameters) {
  return add_any(out, graph, dependencies, nullptr, count, parameters);
}
CUresult cuGraphAddNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* data, size_t count,
                           CUgraphNodeParams* parameters) {
  return add_any(out, graph, dependencies, data, count, parameters);
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* parameters) {
  START();
  REQUIRE(parameters != nullptr);
  WorkPointer work;
  if (const CUresult e = read_any(*parameters, &work)) return e;
  if (work == nullptr) return CUDA_ERROR_NOT_SUPPORTED;  // children, memory
  return replace(node, std::move(work));
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  START();
  REQUIRE(type != nullptr);
  Guard guard;
  const Node* node = guard.node(handle);
  REQUIRE(node != nullptr);
  *type = node->type();
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode handle) {
  START();
  Guard guard;
  Node* node = guard.node(handle);
  REQUIRE(node != nullptr);
  // Memory nodes and what lies in a child graph stay, as with CUDA.
  const Work& work = *node->work;
  if (std::holds_alternative<AllocWork>(work) || std::holds_alternative<FreeWork>(work)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  guard.drop_node(node);
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
