// Graphs: making, cloning, destroying, edges, user objects, a picture of a graph.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <string>

#include "api/cuda_abi.h"
#include "graphs/hooks.h"

using namespace gpupool::graphs;  // NOLINT: a file of entry points

#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define START() \
  if (const CUresult e_ = initialised()) return e_;

namespace {

bool plain(const CUgraphEdgeData& data) { return (data.from_port | data.to_port | data.type) == 0; }

// Hands a list to a program that asks for its length first, or for a part of it: what is beyond
// the list is null.
CUresult give(const std::vector<Edge>& list, CUgraphNode* nodes, CUgraphEdgeData* data,
              size_t* count, bool lossy) {
  REQUIRE(count != nullptr);
  if (nodes == nullptr) {
    *count = list.size();
    return CUDA_SUCCESS;
  }
  for (size_t i = 0; i < *count; i++) {
    const bool there = i < list.size();
    if (there && lossy && !plain(list[i].data)) return CUDA_ERROR_LOSSY_QUERY;
    nodes[i] = there ? list[i].node->as_cuda() : nullptr;
    if (data != nullptr) data[i] = there ? list[i].data : CUgraphEdgeData{};
  }
  *count = std::min(*count, list.size());
  return CUDA_SUCCESS;
}

CUresult edges(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data,
               size_t* count, bool lossy) {
  START();
  REQUIRE(count != nullptr && (from == nullptr) == (to == nullptr));
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr);
  size_t index = 0;
  for (const auto& node : graph->nodes) {
    for (const Edge& edge : node->dependencies) {
      if (from != nullptr && index < *count) {
        if (lossy && !plain(edge.data)) return CUDA_ERROR_LOSSY_QUERY;
        from[index] = edge.node->as_cuda();
        to[index] = node->as_cuda();
        if (data != nullptr) data[index] = edge.data;
      }
      index++;
    }
  }
  if (from != nullptr) {
    for (size_t i = index; i < *count; i++) {
      from[i] = to[i] = nullptr;
      if (data != nullptr) data[i] = CUgraphEdgeData{};
    }
    *count = std::min(*count, index);
  } else {
    *count = index;
  }
  return CUDA_SUCCESS;
}

CUresult dependencies(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count,
                      bool lossy) {
  START();
  Guard guard;
  const Node* node = guard.node(handle);
  REQUIRE(node != nullptr);
  return give(node->dependencies, nodes, data, count, lossy);
}

CUresult dependents(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count,
                    bool lossy) {
  START();
  Guard guard;
  const Node* node = guard.node(handle);
  REQUIRE(node != nullptr);
  std::vector<Edge> list;
  for (Node* dependent : node->dependents) {
    for (const Edge& edge : dependent->dependencies) {
      if (edge.node == node) list.push_back({dependent, edge.data});
    }
  }
  return give(list, nodes, data, count, lossy);
}

// True if `to` comes after `from` already, or is it.
bool reaches(const Node* from, const Node* to) {
  std::vector<char> seen(from->graph->nodes.size());
  std::vector<const Node*> open{from};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == to) return true;
    if (seen[node->position]) continue;
    seen[node->position] = 1;
    for (const Node* dependent : node->dependents) open.push_back(dependent);
  }
  return false;
}

CUresult add_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to,
                          const CUgraphEdgeData* data, size_t count) {
  START();
  REQUIRE(count == 0 || (from != nullptr && to != nullptr));
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr);
  // All of them or none.
  for (size_t i = 0; i < count; i++) {
    const Node *first = guard.node(from[i]), *second = guard.node(to[i]);
    REQUIRE(first != nullptr && second != nullptr && first != second && first->graph == graph &&
            second->graph == graph);
    REQUIRE(data == nullptr || check_edge(data[i]) == CUDA_SUCCESS);
    for (const Edge& edge : second->dependencies) REQUIRE(edge.node != first);
  }
  for (size_t i = 0; i < count; i++) {
    Node *first = guard.node(from[i]), *second = guard.node(to[i]);
    if (reaches(second, first)) {
      for (size_t j = 0; j < i; j++) {
        Node *a = guard.node(from[j]), *b = guard.node(to[j]);
        std::erase_if(b->dependencies, [a](const Edge& e) { return e.node == a; });
        std::erase(a->dependents, b);
      }
      return CUDA_ERROR_INVALID_VALUE;  // a cycle
    }
    second->dependencies.push_back({first, data != nullptr ? data[i] : CUgraphEdgeData{}});
    first->dependents.push_back(second);
  }
  return CUDA_SUCCESS;
}

CUresult remove_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to,
                             const CUgraphEdgeData* data, size_t count) {
  START();
  REQUIRE(count == 0 || (from != nullptr && to != nullptr));
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr);
  for (size_t i = 0; i < count; i++) {
    const Node *first = guard.node(from[i]), *second = guard.node(to[i]);
    REQUIRE(first != nullptr && second != nullptr && first->graph == graph &&
            second->graph == graph);
    const CUgraphEdgeData wanted = data != nullptr ? data[i] : CUgraphEdgeData{};
    const bool there = std::any_of(
        second->dependencies.begin(), second->dependencies.end(), [&](const Edge& edge) {
          return edge.node == first && edge.data.from_port == wanted.from_port &&
                 edge.data.to_port == wanted.to_port && edge.data.type == wanted.type;
        });
    REQUIRE(there);
  }
  for (size_t i = 0; i < count; i++) {
    Node *first = guard.node(from[i]), *second = guard.node(to[i]);
    std::erase_if(second->dependencies, [first](const Edge& e) { return e.node == first; });
    std::erase(first->dependents, second);
  }
  return CUDA_SUCCESS;
}

const char* name_of(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return "KERNEL";
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST:
      return "HOST";
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return "GRAPH";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return "EVENT_WAIT";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return "EVENT_RECORD";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
      return "MEM_ALLOC";
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return "MEM_FREE";
    default:
      return "EMPTY";
  }
}

std::string details(const Work& work) {
  char text[256] = "";
  if (const auto* kernel = std::get_if<KernelWork>(&work)) {
    const char* name = nullptr;
    cuFuncGetName(&name, kernel->callee());
    snprintf(text, sizeof text, "\\n%.100s\\n{%u,%u,%u},{%u,%u,%u},%u",
             name != nullptr ? name : "?", kernel->grid[0], kernel->grid[1], kernel->grid[2],
             kernel->block[0], kernel->block[1], kernel->block[2], kernel->shared_bytes);
  } else if (const auto* copy = std::get_if<MemcpyWork>(&work)) {
    snprintf(text, sizeof text, "\\n%zu x %zu x %zu bytes", copy->copy.WidthInBytes,
             copy->copy.Height, copy->copy.Depth);
  } else if (const auto* fill = std::get_if<MemsetWork>(&work)) {
    snprintf(text, sizeof text, "\\n0x%llx: %zu x %zu of %u bytes, value 0x%x",
             static_cast<unsigned long long>(fill->fill.dst), fill->fill.width, fill->fill.height,
             fill->fill.elementSize, fill->fill.value);
  }
  return text;
}

void draw(const Graph& graph, bool verbose, unsigned depth, std::string* out) {
  const std::string prefix = "graph_" + std::to_string(graph.handle >> 4 & 0xFFFFFFF) + "_node_";
  *out += "subgraph cluster_" + std::to_string(graph.handle >> 4 & 0xFFFFFFF) + " {\n";
  *out += "label=\"graph_" + std::to_string(graph.handle >> 4 & 0xFFFFFFF) +
          "\" graph[style=\"dashed\"]\n";
  for (const auto& node : graph.nodes) {
    const std::string id = std::to_string(node->position);
    *out += "\"" + prefix + id + "\"[style=\"solid\" shape=\"rectangle\" label=\"" + id + "\\n" +
            name_of(node->type()) + (verbose ? details(*node->work) : "") + "\"];\n";
    const auto* child = std::get_if<ChildWork>(&*node->work);
    if (child != nullptr && depth < kMaxChildDepth) draw(*child->graph, verbose, depth + 1, out);
  }
  for (const auto& node : graph.nodes) {
    for (const Edge& edge : node->dependencies) {
      *out += "\"" + prefix + std::to_string(edge.node->position) + "\" -> \"" + prefix +
              std::to_string(node->position) + "\";\n";
    }
  }
  *out += "}\n";
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGraphCreate(CUgraph* out, unsigned int flags) {
  START();
  REQUIRE(out != nullptr && flags == 0);
  Guard guard;
  *out = guard.make_graph()->as_cuda();
  return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph* out, CUgraph original) {
  START();
  REQUIRE(out != nullptr);
  Guard guard;
  Graph* graph = guard.graph(original);
  REQUIRE(graph != nullptr);
  std::shared_ptr<Graph> copy;
  if (const CUresult e = guard.clone(graph, false, &copy)) return e;
  *out = copy->as_cuda();
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
  START();
  Guard guard;
  Graph* graph = guard.graph(handle);
  // A child's graph belongs to its node; one that streams capture into is in use.
  REQUIRE(graph != nullptr && !graph->embedded && graph->capturing == 0);
  guard.drop_graph(graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode* out, CUgraphNode original, CUgraph clone) {
  START();
  REQUIRE(out != nullptr);
  Guard guard;
  Graph* graph = guard.graph(clone);
  REQUIRE(graph != nullptr);
  for (const auto& node : graph->nodes) {
    if (node->original != reinterpret_cast<uint64_t>(original)) continue;
    *out = node->as_cuda();
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  START();
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr);
  std::vector<Edge> list;
  for (const auto& node : graph->nodes) list.push_back({node.get(), {}});
  return give(list, nodes, nullptr, count, false);
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  START();
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr);
  std::vector<Edge> list;
  for (const auto& node : graph->nodes) {
    if (node->dependencies.empty()) list.push_back({node.get(), {}});
  }
  return give(list, nodes, nullptr, count, false);
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* count) {
  return edges(graph, from, to, nullptr, count, true);
}
CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to,
                            CUgraphEdgeData* data, size_t* count) {
  return edges(graph, from, to, data, count, data == nullptr);
}
CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
  return dependencies(node, nodes, nullptr, count, true);
}
CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData* data,
                                       size_t* count) {
  return dependencies(node, nodes, data, count, data == nullptr);
}
CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
  return dependents(node, nodes, nullptr, count, true);
}
CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode* nodes,
                                         CUgraphEdgeData* data, size_t* count) {
  return dependents(node, nodes, data, count, data == nullptr);
}
CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                size_t count) {
  return add_dependencies(graph, from, to, nullptr, count);
}
CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData* data, size_t count) {
  return add_dependencies(graph, from, to, data, count);
}
CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   size_t count) {
  return remove_dependencies(graph, from, to, nullptr, count);
}
CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* data, size_t count) {
  return remove_dependencies(graph, from, to, data, count);
}

CUresult cuGraphDebugDotPrint(CUgraph handle, const char* path, unsigned int flags) {
  START();
  REQUIRE(path != nullptr);
  std::string text = "digraph dot {\n";
  {
    Guard guard;
    Graph* graph = guard.graph(handle);
    REQUIRE(graph != nullptr);
    draw(*graph, flags != 0, 0, &text);
  }
  text += "}\n";
  FILE* file = fopen(path, "we");
  if (file == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  const bool written = fwrite(text.data(), 1, text.size(), file) == text.size();
  return fclose(file) == 0 && written ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult cuUserObjectCreate(CUuserObject* out, void* pointer, CUhostFn destroy, unsigned int count,
                            unsigned int flags) {
  START();
  REQUIRE(out != nullptr && destroy != nullptr && count != 0 && count <= 0x7FFFFFFF);
  REQUIRE(flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  auto object = std::make_shared<UserObject>();
  object->pointer = pointer;
  object->destroy = destroy;
  object->count = count;
  Guard guard;
  UserObject* it = object.get();
  guard.add_user_object(std::move(object));
  *out = reinterpret_cast<CUuserObject>(it->handle);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned int count) {
  START();
  Guard guard;
  UserObject* object = guard.user_object(handle);
  REQUIRE(object != nullptr && count != 0 && count <= 0x7FFFFFFF);
  object->count += count;
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned int count) {
  START();
  Guard guard;
  UserObject* object = guard.user_object(handle);
  REQUIRE(object != nullptr && count != 0 && count <= object->count);
  guard.release(object->handle, count);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph handle, CUuserObject object_handle, unsigned int count,
                                 unsigned int flags) {
  START();
  Guard guard;
  Graph* graph = guard.graph(handle);
  UserObject* object = guard.user_object(object_handle);
  REQUIRE(graph != nullptr && object != nullptr && count != 0 && count <= 0x7FFFFFFF);
  REQUIRE((flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}) == 0);
  if (flags & CU_GRAPH_USER_OBJECT_MOVE) {
    REQUIRE(count <= object->count);  // the caller's own references
    graph->held[object->handle] += count;
  } else {
    guard.hold(&graph->held, object->handle, count);
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph handle, CUuserObject object, unsigned int count) {
  START();
  Guard guard;
  Graph* graph = guard.graph(handle);
  REQUIRE(graph != nullptr && count != 0);
  const auto held = graph->held.find(reinterpret_cast<uint64_t>(object));
  REQUIRE(held != graph->held.end() && count <= held->second);
  const uint64_t which = held->first;
  if ((held->second -= count) == 0) graph->held.erase(held);
  guard.release(which, count);
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
