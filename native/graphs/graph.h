// Graphs as a program builds them: nodes, dependencies, user objects, and the flat plan that an
// executable is made of. One lock guards all of it; handles are numbers that are looked up, never
// followed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "api/cuda_abi.h"

namespace gpupool::graphs {

struct Graph;
struct Node;

struct Parameter {
  uint32_t offset = 0, bytes = 0;
};

// What a library knows of a kernel.
struct KernelLayout {
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  bool known = true;            // false: only a whole block of parameters can be passed
  CUcontext context = nullptr;  // in which the kernel runs
};

struct KernelWork {
  CUfunction function = nullptr;  // as the program gave it; a CUkernel may stand here
  CUkernel kernel = nullptr;      // given as a kernel
  CUcontext context = nullptr;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<Parameter> layout;
  std::vector<uint8_t> parameters;
  std::map<int, CUlaunchAttributeValue> attributes;  // by CUlaunchAttributeID
  std::vector<void*> pointers;                       // to each parameter, for programs that ask

  CUfunction callee() const {
    return kernel != nullptr ? reinterpret_cast<CUfunction>(kernel) : function;
  }
  bool cooperative() const;
};
struct MemcpyWork {
  CUDA_MEMCPY3D copy{};
  CUcontext context = nullptr;
};
struct MemsetWork {
  CUDA_MEMSET_NODE_PARAMS_v2 fill{};
};
struct HostWork {
  CUhostFn function = nullptr;
  void* data = nullptr;
};
struct EmptyWork {};
struct RecordWork {
  CUevent event = nullptr;
};
struct WaitWork {
  CUevent event = nullptr;
};
struct ChildWork {
  std::shared_ptr<Graph> graph;
};

// Memory of an allocation node: there from the making of the node until nobody knows it any more.
struct GraphMemory {
  CUdeviceptr address = 0;
  size_t bytes = 0;
  CUdevice device = 0;
  std::atomic<bool> live{false};  // a launch has allocated it, and nothing has freed it since
  ~GraphMemory();
};
struct AllocWork {
  CUDA_MEM_ALLOC_NODE_PARAMS_v2 parameters{};
  std::vector<CUmemAccessDesc> access;
  std::shared_ptr<GraphMemory> memory;
};
struct FreeWork {
  CUdeviceptr address = 0;
  std::shared_ptr<GraphMemory> memory;
};

// In the order of CUgraphNodeType as far as there is one for each: see type_of().
using Work = std::variant<KernelWork, MemcpyWork, MemsetWork, HostWork, ChildWork, EmptyWork,
                          WaitWork, RecordWork, AllocWork, FreeWork>;
using WorkPointer = std::shared_ptr<const Work>;
CUgraphNodeType type_of(const Work& work);

struct Edge {
  Node* node = nullptr;
  CUgraphEdgeData data{};
};

struct Node {
  uint64_t handle = 0;
  Graph* graph = nullptr;
  uint64_t original = 0;  // of a clone: the node it was made from
  WorkPointer work;
  std::vector<Edge> dependencies;
  std::vector<Node*> dependents;
  size_t position = 0;  // in the graph's list

  CUgraphNode as_cuda() const { return reinterpret_cast<CUgraphNode>(handle); }
  CUgraphNodeType type() const { return type_of(*work); }
};

struct UserObject {
  uint64_t handle = 0;
  void* pointer = nullptr;
  CUhostFn destroy = nullptr;
  uint64_t count = 0;
};
using Held = std::map<uint64_t, uint64_t>;  // user object, references

struct Graph : std::enable_shared_from_this<Graph> {
  uint64_t handle = 0;
  std::vector<std::unique_ptr<Node>> nodes;  // in the order in which they were added
  Held held;
  bool embedded = false;   // belongs to a child graph node
  unsigned capturing = 0;  // streams that capture into it

  CUgraph as_cuda() const { return reinterpret_cast<CUgraph>(handle); }
};

// One node of an executable graph. Child graphs are taken apart.
struct PlanNode {
  uint64_t source = 0;  // the node it was made from; 0: the end of a child graph
  WorkPointer work;
  std::vector<uint32_t> dependencies;  // earlier nodes of the plan
  bool enabled = true;
};
using Plan = std::vector<PlanNode>;

constexpr size_t kMaxNodes = 1 << 18;  // of one graph, children included
constexpr unsigned kMaxChildDepth = 64;

// All graphs, executables' bookkeeping apart, under one lock. What has to be called without it
// (destructors of user objects) waits in `after` until the lock is given back.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  Graph* graph(CUgraph handle);
  std::shared_ptr<Graph> shared_graph(CUgraph handle);
  Node* node(CUgraphNode handle);
  UserObject* user_object(CUuserObject handle);

  std::shared_ptr<Graph> make_graph();
  // CUDA_ERROR_INVALID_VALUE: a dependency is of another graph, or twice there.
  CUresult add_node(Graph* graph, const std::vector<Edge>& dependencies, WorkPointer work,
                    Node** out);
  CUresult find_dependencies(Graph* graph, const CUgraphNode* nodes, const CUgraphEdgeData* data,
                             size_t count, std::vector<Edge>* out);
  CUresult clone(Graph* from, bool embedded, std::shared_ptr<Graph>* out, unsigned depth = 0);
  void drop_node(Node* node);
  void drop_graph(Graph* graph);

  void add_user_object(std::shared_ptr<UserObject> object);
  void hold(Held* held, uint64_t object, uint64_t count);
  void release(uint64_t object, uint64_t count);
  void release_all(Held* held);

  // False: there is a cycle, or too much of it.
  bool flatten(const Graph& graph, Plan* plan);

 private:
  void forget(Node* node);
  std::unique_lock<std::mutex> lock_;
  std::vector<std::pair<CUhostFn, void*>> after_;
  std::vector<WorkPointer> works_;  // may own memory: given up without the lock
  std::vector<std::shared_ptr<Graph>> graphs_;
};

uint64_t new_handle();

// Work for a node; a kernel's parameters get their addresses.
WorkPointer share(Work work);

// A default edge, and whether one is valid.
CUresult check_edge(const CUgraphEdgeData& data);
// Copies the parameters that a launch passes into the work.
CUresult gather(const KernelLayout& layout, void** parameters, void** extra, KernelWork* work);
// An address of a graph's allocation node that a program frees by itself; false: no such address.
bool free_graph_memory(CUdeviceptr address);
std::shared_ptr<GraphMemory> find_graph_memory(CUdeviceptr address);

// Bytes of a device's allocation nodes, now and at most: none is kept for later, so that used and
// reserved memory are the same but for when their highest value was forgotten.
struct GraphMemoryUse {
  uint64_t bytes = 0, used_high = 0, reserved_high = 0;
};
GraphMemoryUse graph_memory_use(CUdevice device);
void forget_highest(CUdevice device, bool reserved);
CUresult new_graph_memory(CUdevice device, size_t bytes, std::shared_ptr<GraphMemory>* out);

}  // namespace gpupool::graphs
