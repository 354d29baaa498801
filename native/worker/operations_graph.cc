// Executable graphs: the driver's own, made of the nodes that a client describes.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include "wire/graph_nodes.h"
#include "worker/session_state.h"

namespace gpupool::worker {
namespace {

using wire::GraphNode;
using wire::GraphNodeKind;
using wire::Operation;

constexpr uint64_t kMaxSessionNodes = 1 << 19;  // of all executables together

// Everything about a node that a client could have got wrong.
CUresult check(SessionState& session, const GraphNode& node) {
  switch (static_cast<GraphNodeKind>(node.header.kind)) {
    case GraphNodeKind::kEmpty:
      return CUDA_SUCCESS;
    case GraphNodeKind::kKernel: {
      const Function* function = session.function(node.launch.function);
      if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      if (session.context_by_id(function->context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
      if ((node.launch.flags & ~wire::kLaunchCooperative) != 0) return CUDA_ERROR_NOT_SUPPORTED;
      return node.parameters.size() < function->parameter_bytes ? CUDA_ERROR_INVALID_VALUE
                                                                : CUDA_SUCCESS;
    }
    case GraphNodeKind::kCopy: {
      const wire::GraphCopy& c = node.copy;
      auto bytes = [&c](uint64_t pitch, uint64_t rows) {
        return ((c.depth - 1) * rows + c.height - 1) * pitch + c.width;
      };
      return session.device_range(c.destination,
                                  bytes(c.destination_pitch, c.destination_height)) &&
                     session.device_range(c.source, bytes(c.source_pitch, c.source_height))
                 ? CUDA_SUCCESS
                 : CUDA_ERROR_INVALID_VALUE;
    }
    case GraphNodeKind::kFill: {
      const wire::GraphFill& f = node.fill;
      const uint64_t bytes = (f.height - 1) * f.pitch + f.width * f.element;
      return session.device_range(f.address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    default:
      return session.event(node.event) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  }
}

// A node's parameters as the driver takes them.
struct Parameters {
  CUDA_KERNEL_NODE_PARAMS kernel{};
  CUDA_MEMCPY3D copy{};
  CUDA_MEMSET_NODE_PARAMS fill{};
  CUevent event = nullptr;
  std::vector<uint8_t> padded;
  size_t bytes = 0;
  void* extra[5];

  Parameters(SessionState& session, const GraphNode& node) {
    switch (static_cast<GraphNodeKind>(node.header.kind)) {
      case GraphNodeKind::kKernel: {
        const wire::Launch& launch = node.launch;
        const Function* function = session.function(launch.function);
        kernel.func = function->driver;
        kernel.gridDimX = launch.grid[0];
        kernel.gridDimY = launch.grid[1];
        kernel.gridDimZ = launch.grid[2];
        kernel.blockDimX = launch.block[0];
        kernel.blockDimY = launch.block[1];
        kernel.blockDimZ = launch.block[2];
        kernel.sharedMemBytes = launch.shared_bytes;
        kernel.ctx = session.context_by_id(function->context)->driver;
        bytes = node.parameters.size();
        // The driver takes as many bytes as the kernel has parameters, however few came.
        padded.resize(function->parameters_known ? bytes : wire::kMaxParameterBytes + 4);
        memcpy(padded.data(), node.parameters.data(), bytes);
        extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
        extra[1] = padded.data();
        extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
        extra[3] = &bytes;
        extra[4] = CU_LAUNCH_PARAM_END;
        if (bytes != 0) kernel.extra = extra;
        break;
      }
      case GraphNodeKind::kCopy:
        copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = node.copy.source;
        copy.srcPitch = node.copy.source_pitch;
        copy.srcHeight = node.copy.source_height;
        copy.dstDevice = node.copy.destination;
        copy.dstPitch = node.copy.destination_pitch;
        copy.dstHeight = node.copy.destination_height;
        copy.WidthInBytes = node.copy.width;
        copy.Height = node.copy.height;
        copy.Depth = node.copy.depth;
        break;
      case GraphNodeKind::kFill:
        fill.dst = node.fill.address;
        fill.pitch = node.fill.pitch;
        fill.value = node.fill.value;
        fill.elementSize = node.fill.element;
        fill.width = node.fill.width;
        fill.height = node.fill.height;
        break;
      case GraphNodeKind::kRecord:
      case GraphNodeKind::kWait:
        event = session.event(node.event)->driver;
        break;
      default:
        break;
    }
  }
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;
};

CUresult set_attributes(const DriverTable& driver, const wire::Launch& launch, CUgraphNode made) {
  CUkernelNodeAttrValue value{};
  if (launch.flags & wire::kLaunchCooperative) {
    if (driver.cuGraphKernelNodeSetAttribute == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    value.cooperative = 1;
    const CUresult e =
        driver.cuGraphKernelNodeSetAttribute(made, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value);
    if (e != CUDA_SUCCESS) return e;
  }
  if (launch.cluster[0] == 0) return CUDA_SUCCESS;
  if (driver.cuGraphKernelNodeSetAttribute == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  value = {};
  value.clusterDim.x = launch.cluster[0];
  value.clusterDim.y = launch.cluster[1];
  value.clusterDim.z = launch.cluster[2];
  return driver.cuGraphKernelNodeSetAttribute(made, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value);
}

CUresult add(SessionState& session, const Context* context, CUgraph graph,
             const std::vector<CUgraphNode>& nodes, const GraphNode& node, CUgraphNode* made) {
  const DriverTable& driver = session.driver();
  if (const CUresult e = check(session, node)) return e;
  std::vector<CUgraphNode> before;
  for (uint32_t dependency : node.dependencies) before.push_back(nodes[dependency]);
  const size_t count = before.size();
  Parameters parameters(session, node);
  switch (static_cast<GraphNodeKind>(node.header.kind)) {
    case GraphNodeKind::kKernel: {
      const CUresult e =
          driver.cuGraphAddKernelNode_v2(made, graph, before.data(), count, &parameters.kernel);
      return e != CUDA_SUCCESS ? e : set_attributes(driver, node.launch, *made);
    }
    case GraphNodeKind::kCopy:
      return driver.cuGraphAddMemcpyNode(made, graph, before.data(), count, &parameters.copy,
                                         context->driver);
    case GraphNodeKind::kFill:
      return driver.cuGraphAddMemsetNode(made, graph, before.data(), count, &parameters.fill,
                                         context->driver);
    case GraphNodeKind::kRecord:
      return driver.cuGraphAddEventRecordNode(made, graph, before.data(), count, parameters.event);
    case GraphNodeKind::kWait:
      return driver.cuGraphAddEventWaitNode(made, graph, before.data(), count, parameters.event);
    default:
      return driver.cuGraphAddEmptyNode(made, graph, before.data(), count);
  }
}

// What the executable's launches will need, as far as its kernel nodes tell.
void note_kernel(SessionState& session, const GraphNode& node, GraphExec* exec) {
  const Function* function = session.function(node.launch.function);
  exec->prints = exec->prints || function->prints;
  if (function->launched) return;
  exec->unsettled = true;
  if (node.header.enabled != 0) {
    exec->fresh[node.launch.function.index] = node.launch.function.generation;
  }
}

CUresult set(SessionState& session, const Context* context, GraphExec* exec,
             const GraphNode& node) {
  const DriverTable& driver = session.driver();
  if (node.header.index >= exec->nodes.size() ||
      node.header.kind != exec->kinds[node.header.index]) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (const CUresult e = check(session, node)) return e;
  const CUgraphNode it = exec->nodes[node.header.index];
  Parameters parameters(session, node);
  CUresult result = CUDA_SUCCESS;
  const auto kind = static_cast<GraphNodeKind>(node.header.kind);
  switch (kind) {
    case GraphNodeKind::kKernel:
      note_kernel(session, node, exec);
      result = driver.cuGraphExecKernelNodeSetParams_v2(exec->driver, it, &parameters.kernel);
      break;
    case GraphNodeKind::kCopy:
      result = driver.cuGraphExecMemcpyNodeSetParams(exec->driver, it, &parameters.copy,
                                                     context->driver);
      break;
    case GraphNodeKind::kFill:
      result = driver.cuGraphExecMemsetNodeSetParams(exec->driver, it, &parameters.fill,
                                                     context->driver);
      break;
    case GraphNodeKind::kRecord:
      return driver.cuGraphExecEventRecordNodeSetEvent(exec->driver, it, parameters.event);
    case GraphNodeKind::kWait:
      return driver.cuGraphExecEventWaitNodeSetEvent(exec->driver, it, parameters.event);
    default:
      return CUDA_SUCCESS;
  }
  if (result != CUDA_SUCCESS) return result;
  return driver.cuGraphNodeSetEnabled(exec->driver, it, node.header.enabled);
}

// A driver of CUDA 12 has all of them.
bool available(const DriverTable& d) {
  return d.cuGraphCreate && d.cuGraphDestroy && d.cuGraphAddKernelNode_v2 &&
         d.cuGraphAddMemcpyNode && d.cuGraphAddMemsetNode && d.cuGraphAddEmptyNode &&
         d.cuGraphAddEventRecordNode && d.cuGraphAddEventWaitNode &&
         d.cuGraphInstantiateWithFlags && d.cuGraphExecDestroy &&
         d.cuGraphExecKernelNodeSetParams_v2 && d.cuGraphExecMemcpyNodeSetParams &&
         d.cuGraphExecMemsetNodeSetParams && d.cuGraphExecEventRecordNodeSetEvent &&
         d.cuGraphExecEventWaitNodeSetEvent && d.cuGraphNodeSetEnabled && d.cuGraphLaunch;
}

CUresult instantiate(SessionState& session, Context* context, const std::vector<GraphNode>& nodes,
                     GraphExec* exec) {
  const DriverTable& driver = session.driver();
  if (!available(driver)) return CUDA_ERROR_NOT_SUPPORTED;
  session.make_current(context);
  CUgraph graph = nullptr;
  CUresult result = driver.cuGraphCreate(&graph, 0);
  if (result != CUDA_SUCCESS) return result;
  for (const GraphNode& node : nodes) {
    CUgraphNode made = nullptr;
    result = add(session, context, graph, exec->nodes, node, &made);
    if (result != CUDA_SUCCESS) break;
    exec->nodes.push_back(made);
    exec->kinds.push_back(node.header.kind);
    if (node.header.kind == static_cast<uint32_t>(GraphNodeKind::kKernel)) {
      note_kernel(session, node, exec);
    }
  }
  if (result == CUDA_SUCCESS) {
    result = driver.cuGraphInstantiateWithFlags(&exec->driver, graph, 0);
  }
  for (size_t i = 0; result == CUDA_SUCCESS && i < nodes.size(); i++) {
    if (nodes[i].header.enabled != 0) continue;
    result = driver.cuGraphNodeSetEnabled(exec->driver, exec->nodes[i], 0);
  }
  if (result != CUDA_SUCCESS) {
    if (exec->driver != nullptr) driver.cuGraphExecDestroy(exec->driver);
    exec->driver = nullptr;
    driver.cuGraphDestroy(graph);
    return result;
  }
  // Its nodes are the names by which the executable's are changed.
  exec->graph = graph;
  exec->context = context->id;
  return CUDA_SUCCESS;
}

// Takes in nodes, which may come in several commands. False: the session has to end.
bool take_nodes(SessionState& session, const Command& command, const wire::GraphDefine& body,
                std::string_view data, std::vector<uint8_t>* description) {
  const size_t before = description->size();
  if (body.bytes > wire::kMaxGraphBytes - before) return session.malformed(command);
  description->resize(before + body.bytes);
  if (!data.empty()) {
    memcpy(description->data() + before, data.data(), data.size());
    return true;
  }
  return session.read_bulk(description->data() + before, body.bytes);
}

bool define(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::GraphDefine>();
  if (!decoder.finished() || command.bulk_bytes != body.bytes ||
      body.count > wire::kMaxGraphNodes || (body.more_follows == 0) != command.wants_reply()) {
    return session.malformed(command);
  }
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  GraphExec* exec = session.graph_execs.find(body.executable);
  if (exec == nullptr) exec = session.graph_execs.create(body.executable);
  if (exec == nullptr || exec->driver != nullptr) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  exec->context = context->id;
  if (!take_nodes(session, command, body, {}, &exec->description)) return false;
  if (body.more_follows != 0) return true;
  std::vector<GraphNode> nodes;
  const std::vector<uint8_t> description = std::move(exec->description);
  if (!wire::decode_graph(description.data(), description.size(), body.count, false, &nodes)) {
    return session.malformed(command);
  }
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (session.graph_nodes + nodes.size() <= kMaxSessionNodes) {
    result = instantiate(session, context, nodes, exec);
  }
  if (result == CUDA_SUCCESS) {
    session.graph_nodes += nodes.size();
    if (!session.account().settle()) {
      drop_graph_exec(session, body.executable, false);
      session.account().settle();
      result = CUDA_ERROR_OUT_OF_MEMORY;
    }
  } else {
    session.graph_execs.erase(body.executable);
  }
  return session.answer(command, result);
}

bool update(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::GraphDefine>();
  std::string_view data;
  if (command.bulk_count == 0) data = decoder.raw(body.bytes);
  if (!decoder.finished() || (command.bulk_count != 0 && command.bulk_bytes != body.bytes) ||
      body.count > wire::kMaxGraphNodes || body.bytes == 0) {
    return session.malformed(command);
  }
  GraphExec* exec = session.graph_execs.find(body.executable);
  Context* context = exec == nullptr ? nullptr : session.context_by_id(exec->context);
  if (context == nullptr || exec->driver == nullptr) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  if (!take_nodes(session, command, body, data, &exec->description)) return false;
  if (body.more_follows != 0) return true;
  std::vector<GraphNode> nodes;
  const std::vector<uint8_t> description = std::move(exec->description);
  exec->description.clear();
  if (!wire::decode_graph(description.data(), description.size(), body.count, true, &nodes)) {
    return session.malformed(command);
  }
  session.make_current(context);
  CUresult result = CUDA_SUCCESS;
  for (const GraphNode& node : nodes) {
    const CUresult one = set(session, context, exec, node);
    if (result == CUDA_SUCCESS) result = one;
  }
  return session.answer(command, result);
}

// Stacks and heaps are taken when a kernel is first launched, in a graph as well.
bool settle_launch(SessionState& session, GraphExec* exec, CUresult result) {
  std::string why;
  if (!session.account().settle_or_end(&why)) return session.refuse(why);
  if (result != CUDA_SUCCESS) return true;
  for (const auto& [index, generation] : exec->fresh) {
    if (Function* function = session.function({index, generation})) function->launched = true;
  }
  exec->fresh.clear();
  exec->unsettled = false;
  return true;
}

bool submit(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle(), stream_handle = decoder.handle();
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  GraphExec* exec = session.graph_execs.find(handle);
  Stream* stream = session.stream(context, stream_handle);
  if (exec == nullptr || exec->driver == nullptr || stream == nullptr) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  const DriverTable& driver = session.driver();
  if (static_cast<Operation>(command.operation) == Operation::kGraphUpload) {
    if (driver.cuGraphUpload == nullptr) return session.answer(command, CUDA_SUCCESS);
    const CUresult result = session.submit(
        context, stream, [&] { return driver.cuGraphUpload(exec->driver, stream->driver); });
    std::string why;
    if (exec->unsettled && !session.account().settle_or_end(&why)) return session.refuse(why);
    return session.answer(command, result);
  }
  if (exec->prints) context->printing = true;
  session.launches.fetch_add(1, std::memory_order_relaxed);
  const CUresult result = session.submit(
      context, stream, [&] { return driver.cuGraphLaunch(exec->driver, stream->driver); });
  if (exec->unsettled && !settle_launch(session, exec, result)) return false;
  return session.answer(command, result);
}

}  // namespace

void drop_graph_exec(SessionState& session, wire::Handle handle, bool broken) {
  GraphExec* exec = session.graph_execs.find(handle);
  if (exec == nullptr) return;
  if (exec->driver != nullptr && !broken) {
    session.driver().cuGraphExecDestroy(exec->driver);
    session.driver().cuGraphDestroy(exec->graph);
  }
  if (exec->driver != nullptr) session.graph_nodes -= exec->nodes.size();
  session.graph_execs.erase(handle);
}

bool execute_graph(SessionState& session, const Command& command) {
  switch (static_cast<Operation>(command.operation)) {
    case Operation::kGraphInstantiateWithFlags:
      return define(session, command);
    case Operation::kGraphExecUpdateV2:
      return update(session, command);
    case Operation::kGraphExecDestroy: {
      wire::Decoder decoder = command.body;
      const wire::Handle handle = decoder.handle();
      if (!decoder.finished()) return session.malformed(command);
      GraphExec* exec = session.graph_execs.find(handle);
      if (exec == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
      Context* context = session.context_by_id(exec->context);
      if (context != nullptr) session.make_current(context);
      drop_graph_exec(session, handle, false);
      return session.answer(command, CUDA_SUCCESS);
    }
    default:
      return submit(session, command);
  }
}

}  // namespace gpupool::worker
