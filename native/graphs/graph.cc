#include "graphs/graph.h"

#include <string.h>

#include <algorithm>
#include <atomic>

#include "graphs/hooks.h"

namespace gpupool::graphs {
namespace {

struct Registry {
  std::mutex lock;
  std::unordered_map<uint64_t, std::shared_ptr<Graph>> graphs;
  std::unordered_map<uint64_t, Node*> nodes;
  std::unordered_map<uint64_t, std::shared_ptr<UserObject>> user_objects;
};

// Never destroyed: programs destroy graphs in their exit handlers.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

struct Memories {
  std::mutex lock;
  std::map<CUdeviceptr, std::weak_ptr<GraphMemory>> all;
  std::atomic<size_t> count{0};
  std::map<CUdevice, GraphMemoryUse> use;
};
Memories& memories() {
  static auto& instance = *new Memories;
  return instance;
}

template <typename Handle>
uint64_t number(Handle handle) {
  return reinterpret_cast<uint64_t>(handle);
}

}  // namespace

// Numbers that no other kind of handle has, and never the same twice.
uint64_t new_handle() {
  static std::atomic<uint64_t> next{1};
  return uint64_t{0x47} << 40 | (next.fetch_add(1, std::memory_order_relaxed) << 4 & 0xFFFFFFFFF0);
}

WorkPointer share(Work work) {
  auto shared = std::make_shared<Work>(std::move(work));
  if (auto* kernel = std::get_if<KernelWork>(&*shared)) {
    kernel->pointers.clear();
    for (const Parameter& at : kernel->layout) {
      kernel->pointers.push_back(kernel->parameters.data() + at.offset);
    }
  }
  return shared;
}

bool KernelWork::cooperative() const {
  const auto found = attributes.find(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
  return found != attributes.end() && found->second.cooperative != 0;
}

CUgraphNodeType type_of(const Work& work) {
  constexpr CUgraphNodeType kTypes[] = {
      CU_GRAPH_NODE_TYPE_KERNEL,     CU_GRAPH_NODE_TYPE_MEMCPY,       CU_GRAPH_NODE_TYPE_MEMSET,
      CU_GRAPH_NODE_TYPE_HOST,       CU_GRAPH_NODE_TYPE_GRAPH,        CU_GRAPH_NODE_TYPE_EMPTY,
      CU_GRAPH_NODE_TYPE_WAIT_EVENT, CU_GRAPH_NODE_TYPE_EVENT_RECORD, CU_GRAPH_NODE_TYPE_MEM_ALLOC,
      CU_GRAPH_NODE_TYPE_MEM_FREE};
  return kTypes[work.index()];
}

// ---- Memory of allocation nodes -----------------------------------------------------------------

GraphMemory::~GraphMemory() {
  if (address == 0) return;
  {
    std::lock_guard lock(memories().lock);
    memories().all.erase(address);
    memories().use[device].bytes -= bytes;
    memories().count = memories().all.size();
  }
  release_memory(device, address);
}

CUresult new_graph_memory(CUdevice device, size_t bytes, std::shared_ptr<GraphMemory>* out) {
  CUdeviceptr address = 0;
  if (const CUresult e = allocate_memory(device, bytes, &address)) return e;
  auto memory = std::make_shared<GraphMemory>();
  memory->address = address;
  memory->bytes = bytes;
  memory->device = device;
  std::lock_guard lock(memories().lock);
  memories().all[address] = memory;
  GraphMemoryUse& use = memories().use[device];
  use.bytes += bytes;
  use.used_high = std::max(use.used_high, use.bytes);
  use.reserved_high = std::max(use.reserved_high, use.bytes);
  memories().count = memories().all.size();
  *out = std::move(memory);
  return CUDA_SUCCESS;
}

GraphMemoryUse graph_memory_use(CUdevice device) {
  std::lock_guard lock(memories().lock);
  return memories().use[device];
}

void forget_highest(CUdevice device, bool reserved) {
  std::lock_guard lock(memories().lock);
  GraphMemoryUse& use = memories().use[device];
  (reserved ? use.reserved_high : use.used_high) = use.bytes;
}

std::shared_ptr<GraphMemory> find_graph_memory(CUdeviceptr address) {
  if (memories().count.load(std::memory_order_relaxed) == 0) return nullptr;
  std::lock_guard lock(memories().lock);
  const auto found = memories().all.find(address);
  return found == memories().all.end() ? nullptr : found->second.lock();
}

bool free_graph_memory(CUdeviceptr address) {
  const auto memory = find_graph_memory(address);
  if (memory == nullptr) return false;
  memory->live = false;
  return true;
}

// ---- Looking up ---------------------------------------------------------------------------------

Guard::Guard() : lock_(registry().lock) {}

Guard::~Guard() {
  lock_.unlock();
  for (auto& [function, data] : after_) function(data);
}

Graph* Guard::graph(CUgraph handle) {
  const auto found = registry().graphs.find(number(handle));
  return found == registry().graphs.end() ? nullptr : found->second.get();
}

std::shared_ptr<Graph> Guard::shared_graph(CUgraph handle) {
  const auto found = registry().graphs.find(number(handle));
  return found == registry().graphs.end() ? nullptr : found->second;
}

Node* Guard::node(CUgraphNode handle) {
  const auto found = registry().nodes.find(number(handle));
  return found == registry().nodes.end() ? nullptr : found->second;
}

UserObject* Guard::user_object(CUuserObject handle) {
  const auto found = registry().user_objects.find(number(handle));
  return found == registry().user_objects.end() ? nullptr : found->second.get();
}

// ---- Building -----------------------------------------------------------------------------------

CUresult check_edge(const CUgraphEdgeData& data) {
  if (data.from_port > CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER || data.to_port != 0 ||
      data.type > CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Programmatic launches overlap kernels; a full dependency gives the same results.
  return CUDA_SUCCESS;
}

std::shared_ptr<Graph> Guard::make_graph() {
  auto graph = std::make_shared<Graph>();
  graph->handle = new_handle();
  registry().graphs[graph->handle] = graph;
  return graph;
}

CUresult Guard::find_dependencies(Graph* graph, const CUgraphNode* nodes,
                                  const CUgraphEdgeData* data, size_t count,
                                  std::vector<Edge>* out) {
  if (count != 0 && nodes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (count > kMaxNodes) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    Node* found = node(nodes[i]);
    if (found == nullptr || found->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    Edge edge;
    edge.node = found;
    if (data != nullptr) edge.data = data[i];
    if (const CUresult e = check_edge(edge.data)) return e;
    out->push_back(edge);
  }
  return CUDA_SUCCESS;
}

CUresult Guard::add_node(Graph* graph, const std::vector<Edge>& dependencies, WorkPointer work,
                         Node** out) {
  if (graph->nodes.size() >= kMaxNodes) return CUDA_ERROR_OUT_OF_MEMORY;
  std::vector<Node*> seen;
  for (const Edge& edge : dependencies) {
    if (edge.node->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    seen.push_back(edge.node);
  }
  std::sort(seen.begin(), seen.end());
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) return CUDA_ERROR_INVALID_VALUE;
  auto node = std::make_unique<Node>();
  node->handle = new_handle();
  node->graph = graph;
  node->work = std::move(work);
  node->dependencies = dependencies;
  node->position = graph->nodes.size();
  for (const Edge& edge : dependencies) edge.node->dependents.push_back(node.get());
  registry().nodes[node->handle] = node.get();
  *out = node.get();
  graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

CUresult Guard::clone(Graph* from, bool embedded, std::shared_ptr<Graph>* out, unsigned depth) {
  if (depth >= kMaxChildDepth) return CUDA_ERROR_NOT_SUPPORTED;
  auto copy = make_graph();
  copy->embedded = embedded;
  CUresult result = CUDA_SUCCESS;
  for (const auto& node : from->nodes) {
    WorkPointer work = node->work;
    if (const auto* child = std::get_if<ChildWork>(&*work)) {
      ChildWork own;
      result = clone(child->graph.get(), true, &own.graph, depth + 1);
      if (result != CUDA_SUCCESS) break;
      work = std::make_shared<const Work>(std::move(own));
    } else if (std::holds_alternative<AllocWork>(*work) ||
               std::holds_alternative<FreeWork>(*work)) {
      result = CUDA_ERROR_NOT_SUPPORTED;  // CUDA does not clone them either
      break;
    }
    Node* made;
    result = add_node(copy.get(), {}, std::move(work), &made);
    if (result != CUDA_SUCCESS) break;
    made->original = node->handle;
  }
  if (result != CUDA_SUCCESS) {
    drop_graph(copy.get());
    return result;
  }
  for (size_t i = 0; i < from->nodes.size(); i++) {
    Node* to = copy->nodes[i].get();
    for (const Edge& edge : from->nodes[i]->dependencies) {
      Node* dependency = copy->nodes[edge.node->position].get();
      to->dependencies.push_back({dependency, edge.data});
      dependency->dependents.push_back(to);
    }
  }
  for (const auto& [object, count] : from->held) hold(&copy->held, object, count);
  *out = std::move(copy);
  return CUDA_SUCCESS;
}

// A node's handle and work are given up; it is no longer linked with others.
void Guard::forget(Node* node) {
  registry().nodes.erase(node->handle);
  if (const auto* child = std::get_if<ChildWork>(&*node->work)) drop_graph(child->graph.get());
  works_.push_back(std::move(node->work));
}

void Guard::drop_node(Node* node) {
  for (const Edge& edge : node->dependencies) std::erase(edge.node->dependents, node);
  for (Node* dependent : node->dependents) {
    std::erase_if(dependent->dependencies, [node](const Edge& e) { return e.node == node; });
  }
  Graph* graph = node->graph;
  forget(node);
  const size_t position = node->position;
  graph->nodes.erase(graph->nodes.begin() + static_cast<long>(position));
  for (size_t i = position; i < graph->nodes.size(); i++) graph->nodes[i]->position = i;
}

void Guard::drop_graph(Graph* graph) {
  for (auto& node : graph->nodes) forget(node.get());
  graph->nodes.clear();
  release_all(&graph->held);
  const auto found = registry().graphs.find(graph->handle);
  if (found == registry().graphs.end()) return;
  graphs_.push_back(std::move(found->second));
  registry().graphs.erase(found);
}

// ---- User objects -------------------------------------------------------------------------------

void Guard::add_user_object(std::shared_ptr<UserObject> object) {
  object->handle = new_handle();
  registry().user_objects[object->handle] = std::move(object);
}

void Guard::hold(Held* held, uint64_t object, uint64_t count) {
  const auto found = registry().user_objects.find(object);
  if (found == registry().user_objects.end()) return;
  found->second->count += count;
  (*held)[object] += count;
}

void Guard::release(uint64_t object, uint64_t count) {
  const auto found = registry().user_objects.find(object);
  if (found == registry().user_objects.end()) return;
  UserObject& it = *found->second;
  it.count -= std::min(it.count, count);
  if (it.count != 0) return;
  after_.emplace_back(it.destroy, it.pointer);
  registry().user_objects.erase(found);
}

void Guard::release_all(Held* held) {
  for (const auto& [object, count] : *held) release(object, count);
  held->clear();
}

// ---- The plan -----------------------------------------------------------------------------------

namespace {

// Appends the graph's nodes, in an order in which dependencies come first and that depends on the
// graph's shape and the order of adding alone.
bool append(const Graph& graph, const std::vector<uint32_t>& before, Plan* plan,
            std::vector<uint32_t>* ends, unsigned depth) {
  if (depth >= kMaxChildDepth) return false;
  const size_t count = graph.nodes.size();
  std::vector<size_t> missing(count);
  std::vector<uint32_t> index(count);
  std::vector<size_t> ready;  // a heap: the earliest node first
  const auto later = std::greater<size_t>();
  for (size_t i = 0; i < count; i++) {
    missing[i] = graph.nodes[i]->dependencies.size();
    if (missing[i] == 0) ready.push_back(i);
  }
  std::make_heap(ready.begin(), ready.end(), later);
  size_t done = 0;
  while (!ready.empty()) {
    std::pop_heap(ready.begin(), ready.end(), later);
    const size_t i = ready.back();
    ready.pop_back();
    const Node& node = *graph.nodes[i];
    PlanNode entry;
    entry.source = node.handle;
    if (node.dependencies.empty()) {
      entry.dependencies = before;
    } else {
      for (const Edge& edge : node.dependencies) {
        entry.dependencies.push_back(index[edge.node->position]);
      }
    }
    if (const auto* child = std::get_if<ChildWork>(&*node.work)) {
      std::vector<uint32_t> child_ends;
      if (!append(*child->graph, entry.dependencies, plan, &child_ends, depth + 1)) return false;
      if (!child->graph->nodes.empty()) entry.dependencies = std::move(child_ends);
      static const WorkPointer kEmpty = std::make_shared<const Work>(EmptyWork{});
      entry.work = kEmpty;
    } else {
      entry.work = node.work;
    }
    if (plan->size() >= kMaxNodes) return false;
    index[i] = static_cast<uint32_t>(plan->size());
    if (node.dependents.empty()) ends->push_back(index[i]);
    plan->push_back(std::move(entry));
    done++;
    for (const Node* dependent : node.dependents) {
      if (--missing[dependent->position] == 0) {
        ready.push_back(dependent->position);
        std::push_heap(ready.begin(), ready.end(), later);
      }
    }
  }
  return done == count;
}

}  // namespace

bool Guard::flatten(const Graph& graph, Plan* plan) {
  std::vector<uint32_t> ends;
  return append(graph, {}, plan, &ends, 0);
}

// ---- Kernel parameters --------------------------------------------------------------------------

CUresult gather(const KernelLayout& layout, void** parameters, void** extra, KernelWork* work) {
  work->layout = layout.parameters;
  work->context = layout.context;
  work->parameters.assign(layout.parameter_bytes, 0);
  if (parameters != nullptr && extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (extra != nullptr) {
    const void* data = nullptr;
    size_t bytes = 0;
    bool have_data = false, have_bytes = false;
    for (int i = 0; i < 16 && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
      if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
        data = extra[i + 1];
        have_data = true;
      } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1] != nullptr) {
        bytes = *static_cast<const size_t*>(extra[i + 1]);
        have_bytes = true;
      } else {
        return CUDA_ERROR_INVALID_VALUE;
      }
    }
    constexpr size_t kMaxBytes = 32764;
    if (!have_data || !have_bytes || bytes > kMaxBytes || (data == nullptr && bytes != 0) ||
        (layout.known && bytes < layout.parameter_bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!layout.known) work->parameters.resize(bytes);
    if (!work->parameters.empty()) {
      memcpy(work->parameters.data(), data, std::min(bytes, work->parameters.size()));
    }
  } else if (!layout.known) {
    return CUDA_ERROR_NOT_SUPPORTED;
  } else if (!layout.parameters.empty()) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < layout.parameters.size(); i++) {
      const Parameter& at = layout.parameters[i];
      if (parameters[i] == nullptr || at.offset > work->parameters.size() ||
          at.bytes > work->parameters.size() - at.offset) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      memcpy(work->parameters.data() + at.offset, parameters[i], at.bytes);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::graphs
