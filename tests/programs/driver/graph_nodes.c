/* Graphs by the driver API: every kind of node, what is written to a node is read back, edges, and
   what is wrong is refused at the call. With "host": also nodes that call the program. */
#include "common.h"

enum { kN = 256 };

static Session session;
static CUfunction fill, vector_add;

static void fill_parameters(CUDA_KERNEL_NODE_PARAMS* node, void** arguments) {
  memset(node, 0, sizeof *node);
  node->func = fill;
  node->gridDimX = 2;
  node->gridDimY = node->gridDimZ = 1;
  node->blockDimX = 128;
  node->blockDimY = node->blockDimZ = 1;
  node->kernelParams = arguments;
}

static CUDA_MEMCPY3D rows(CUdeviceptr to, CUdeviceptr from) {
  /* 3 planes of 4 rows of 16 bytes, out of rows of 32 bytes and planes of 5 rows */
  CUDA_MEMCPY3D copy;
  memset(&copy, 0, sizeof copy);
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from;
  copy.srcPitch = 32;
  copy.srcHeight = 5;
  copy.dstDevice = to;
  copy.dstPitch = 16;
  copy.dstHeight = 4;
  copy.WidthInBytes = 16;
  copy.Height = 4;
  copy.Depth = 3;
  return copy;
}

static void expect_words(CUdeviceptr from, const unsigned* expected, size_t count) {
  unsigned host[kN * 4];
  CHECK(cuMemcpyDtoH(host, from, count * 4));
  for (size_t i = 0; i < count; i++) EXPECT(host[i] == expected[i]);
}

static void nodes_and_edges(CUdeviceptr a, CUdeviceptr b) {
  CUgraph graph;
  CUgraphNode empty, set, kernel, copy, type_of[8], from[8], to[8];
  CHECK(cuGraphCreate(&graph, 0));
  EXPECT(cuGraphCreate(&graph, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphAddEmptyNode(&empty, graph, NULL, 0));

  CUDA_MEMSET_NODE_PARAMS zero = {a, 0, 7, 4, kN, 1}, zero_back;
  CHECK(cuGraphAddMemsetNode(&set, graph, &empty, 1, &zero, session.context));
  CHECK(cuGraphMemsetNodeGetParams(set, &zero_back));
  EXPECT(memcmp(&zero, &zero_back, sizeof zero) == 0);

  unsigned first = 3, n = 120;
  void* arguments[] = {&a, &first, &n};
  CUDA_KERNEL_NODE_PARAMS node, back;
  fill_parameters(&node, arguments);
  CHECK(cuGraphAddKernelNode(&kernel, graph, &set, 1, &node));
  first = 1000; /* the node has its own copy */
  CHECK(cuGraphKernelNodeGetParams(kernel, &back));
  EXPECT(back.func == fill && back.gridDimX == 2 && back.sharedMemBytes == 0);
  EXPECT(*(unsigned*)back.kernelParams[1] == 3 && *(unsigned*)back.kernelParams[2] == 120);

  CUDA_MEMCPY3D planes = rows(b, a), planes_back;
  CHECK(cuGraphAddMemcpyNode(&copy, graph, &kernel, 1, &planes, session.context));
  CHECK(cuGraphMemcpyNodeGetParams(copy, &planes_back));
  EXPECT(memcmp(&planes, &planes_back, sizeof planes) == 0);

  CUgraphNodeType type;
  CHECK(cuGraphNodeGetType(copy, &type));
  EXPECT(type == CU_GRAPH_NODE_TYPE_MEMCPY);
  size_t count = 8;
  CHECK(cuGraphGetNodes(graph, type_of, &count));
  EXPECT(count == 4 && type_of[0] == empty && type_of[3] == copy);
  count = 8;
  CUgraphEdgeData data[8];
  CHECK(cuGraphGetEdges(graph, from, to, data, &count));
  EXPECT(count == 3 && from[0] == empty && to[0] == set && from[2] == kernel && to[2] == copy);
  EXPECT(data[1].type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT && from[5] == NULL);
  count = 1;
  CHECK(cuGraphNodeGetDependencies(copy, from, NULL, &count));
  EXPECT(count == 1 && from[0] == kernel);
  CHECK(cuGraphNodeGetDependentNodes(empty, NULL, NULL, &count));
  EXPECT(count == 1);

  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, NULL));
  unsigned expected[kN], copied[3 * 4 * 4];
  for (unsigned i = 0; i < kN; i++) expected[i] = i < 120 ? 3 + i : 7;
  for (int z = 0; z < 3; z++) {
    for (int y = 0; y < 4; y++) {
      for (int x = 0; x < 4; x++) copied[(z * 4 + y) * 4 + x] = expected[(z * 5 + y) * 8 + x];
    }
  }
  expect_words(a, expected, kN);
  expect_words(b, copied, 3 * 4 * 4);

  /* Other parameters in the executable only, then in the graph. */
  first = 500;
  CHECK(cuGraphExecKernelNodeSetParams(exec, kernel, &node));
  CHECK(cuGraphKernelNodeGetParams(kernel, &back));
  EXPECT(*(unsigned*)back.kernelParams[1] == 3);
  CHECK(cuGraphLaunch(exec, NULL));
  for (unsigned i = 0; i < 120; i++) expected[i] = 500 + i;
  expect_words(a, expected, kN);
  first = 900;
  CHECK(cuGraphKernelNodeSetParams(kernel, &node));
  CHECK(cuGraphLaunch(exec, NULL));
  expect_words(a, expected, kN);
  CUgraphExecUpdateResultInfo info;
  CHECK(cuGraphExecUpdate(exec, graph, &info));
  EXPECT(info.result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
  CHECK(cuGraphLaunch(exec, NULL));
  for (unsigned i = 0; i < 120; i++) expected[i] = 900 + i;
  expect_words(a, expected, kN);

  /* Without the kernel, the memset shows. */
  CHECK(cuGraphNodeSetEnabled(exec, kernel, 0));
  CHECK(cuGraphLaunch(exec, NULL));
  for (unsigned i = 0; i < kN; i++) expected[i] = 7;
  expect_words(a, expected, kN);
  EXPECT(cuGraphNodeSetEnabled(exec, empty, 0) == CUDA_ERROR_INVALID_VALUE);

  /* Another shape, another kind of node. */
  CHECK(cuGraphRemoveDependencies(graph, &set, &kernel, NULL, 1));
  EXPECT(cuGraphExecUpdate(exec, graph, &info) == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  CHECK(cuGraphAddDependencies(graph, &set, &kernel, NULL, 1));
  CHECK(cuGraphExecUpdate(exec, graph, &info));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
}

static void events(CUdeviceptr a, CUstream stream) {
  CUgraph graph;
  CUgraphNode record, wait;
  CUevent first, second, back;
  CHECK(cuEventCreate(&first, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&second, CU_EVENT_DEFAULT));
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddEventWaitNode(&wait, graph, NULL, 0, second));
  CHECK(cuGraphAddEventRecordNode(&record, graph, &wait, 1, first));
  CHECK(cuGraphEventRecordNodeGetEvent(record, &back));
  EXPECT(back == first);
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuMemsetD32Async(a, 1, kN, stream));
  CHECK(cuEventRecord(second, stream));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuEventSynchronize(first));
  CHECK(cuEventQuery(second));
  float milliseconds = -1;
  CHECK(cuEventElapsedTime(&milliseconds, second, first));
  EXPECT(milliseconds >= 0);
  CHECK(cuGraphExecEventRecordNodeSetEvent(exec, record, second));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuEventSynchronize(second));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
  CHECK(cuEventDestroy(first));
  CHECK(cuEventDestroy(second));
}

static cuuint64_t graph_memory(CUgraphMem_attribute attribute) {
  cuuint64_t bytes = 77;
  CHECK(cuDeviceGetGraphMemAttribute(0, attribute, &bytes));
  return bytes;
}

static void memory(CUstream stream) {
  CUgraph graph, other;
  CUgraphNode allocate, set, release;
  CUDA_MEM_ALLOC_NODE_PARAMS parameters;
  memset(&parameters, 0, sizeof parameters);
  parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  parameters.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  parameters.bytesize = 1 << 20;
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddMemAllocNode(&allocate, graph, NULL, 0, &parameters));
  EXPECT(parameters.dptr != 0);
  CUDA_MEMSET_NODE_PARAMS value = {parameters.dptr, 0, 0x42, 1, 1 << 20, 1};
  CHECK(cuGraphAddMemsetNode(&set, graph, &allocate, 1, &value, session.context));
  EXPECT(cuGraphClone(&other, graph) == CUDA_ERROR_NOT_SUPPORTED);
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  unsigned char byte = 0;
  CHECK(cuMemcpyDtoH(&byte, parameters.dptr + 12345, 1));
  EXPECT(byte == 0x42);
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) >= 1 << 20);
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) >= 1 << 20);
  /* It is allocated: not again before it is freed. */
  EXPECT(cuGraphLaunch(exec, stream) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFreeAsync(parameters.dptr, stream));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuMemFree(parameters.dptr));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphAddMemFreeNode(&release, graph, &set, 1, parameters.dptr));
  CUdeviceptr back;
  CHECK(cuGraphMemFreeNodeGetParams(release, &back));
  EXPECT(back == parameters.dptr);
  EXPECT(cuGraphAddMemFreeNode(&release, graph, &set, 1, parameters.dptr) ==
         CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
  CHECK(cuDeviceGraphMemTrim(0));
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 0);
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 0);
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) >= 1 << 20);
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) >= 1 << 20);
  cuuint64_t zero = 0, one = 1;
  CHECK(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &zero));
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) == 0);
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) >= 1 << 20);
  CHECK(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &zero));
  EXPECT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) == 0);
  EXPECT(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &one) ==
         CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &zero) ==
         CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuDeviceGetGraphMemAttribute(0, (CUgraphMem_attribute)17, &one) ==
         CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuDeviceGetGraphMemAttribute(99, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &one) ==
         CUDA_ERROR_INVALID_DEVICE);
}

static void wrong(CUdeviceptr a) {
  CUgraph graph, other;
  CUgraphNode one, two, foreign, made;
  CUgraphExec exec;
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphCreate(&other, 0));
  CHECK(cuGraphAddEmptyNode(&foreign, other, NULL, 0));
  CHECK(cuGraphAddEmptyNode(&one, graph, NULL, 0));
  CHECK(cuGraphAddEmptyNode(&two, graph, &one, 1));
  CUgraphNode twice[] = {one, one};
  EXPECT(cuGraphAddEmptyNode(&made, graph, twice, 2) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddEmptyNode(&made, graph, &foreign, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddEmptyNode(&made, graph, NULL, 3) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddEmptyNode(NULL, graph, NULL, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddEmptyNode(&made, (CUgraph)0x1234, NULL, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddEmptyNode(&made, (CUgraph)one, NULL, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddDependencies(graph, &two, &one, NULL, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddDependencies(graph, &one, &one, NULL, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddDependencies(graph, &one, &two, NULL, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphRemoveDependencies(graph, &two, &one, NULL, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddChildGraphNode(&made, graph, NULL, 0, graph) == CUDA_ERROR_INVALID_VALUE);

  unsigned first = 0, n = kN;
  void* arguments[] = {&a, &first, &n};
  CUDA_KERNEL_NODE_PARAMS kernel;
  fill_parameters(&kernel, arguments);
  kernel.blockDimX = 4096;
  EXPECT(cuGraphAddKernelNode(&made, graph, NULL, 0, &kernel) == CUDA_ERROR_INVALID_VALUE);
  fill_parameters(&kernel, arguments);
  kernel.func = (CUfunction)0x77;
  EXPECT(cuGraphAddKernelNode(&made, graph, NULL, 0, &kernel) == CUDA_ERROR_INVALID_HANDLE);
  fill_parameters(&kernel, NULL);
  EXPECT(cuGraphAddKernelNode(&made, graph, NULL, 0, &kernel) == CUDA_ERROR_INVALID_VALUE);
  CUDA_MEMSET_NODE_PARAMS set = {a, 0, 7, 3, 1, 1};
  EXPECT(cuGraphAddMemsetNode(&made, graph, NULL, 0, &set, session.context) ==
         CUDA_ERROR_INVALID_VALUE);
  set.elementSize = 4;
  set.width = 1u << 30;
  EXPECT(cuGraphAddMemsetNode(&made, graph, NULL, 0, &set, session.context) ==
         CUDA_ERROR_INVALID_VALUE);
  CUDA_MEMCPY3D copy = rows(a, a + 0x100);
  copy.Depth = (size_t)1 << 40;
  EXPECT(cuGraphAddMemcpyNode(&made, graph, NULL, 0, &copy, session.context) ==
         CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphAddEventRecordNode(&made, graph, NULL, 0, (CUevent)0x10) ==
         CUDA_ERROR_INVALID_HANDLE);
  EXPECT(cuGraphInstantiate(&exec, graph, 1u << 20) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphInstantiate(&exec, NULL, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphLaunch((CUgraphExec)0x40, NULL) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuGraphDestroyNode((CUgraphNode)graph) == CUDA_ERROR_INVALID_VALUE);
  CUgraphNodeParams any;
  memset(&any, 0, sizeof any);
  any.type = (CUgraphNodeType)99;
  EXPECT(cuGraphAddNode(&made, graph, NULL, NULL, 0, &any) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphInstantiate(&exec, graph, 0)); /* two empty nodes */
  EXPECT(cuGraphExecKernelNodeSetParams(exec, one, &kernel) != CUDA_SUCCESS);
  CHECK(cuGraphLaunch(exec, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuGraphExecDestroy(exec));
  EXPECT(cuGraphExecDestroy(exec) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuGraphDestroy(graph));
  CHECK(cuGraphDestroy(other));
}

/* A long chain and a wide fan, and graphs in graphs. */
static void large(CUdeviceptr a, CUstream stream) {
  enum { kChain = 3000 };
  CUgraph chain, outer;
  CUgraphNode last = NULL, node;
  CHECK(cuGraphCreate(&chain, 0));
  for (unsigned i = 0; i < kChain; i++) {
    CUDA_MEMSET_NODE_PARAMS set = {a, 0, i, 4, kN, 1};
    CHECK(cuGraphAddMemsetNode(&node, chain, &last, i != 0, &set, session.context));
    last = node;
  }
  CHECK(cuGraphCreate(&outer, 0));
  for (int i = 0; i < 3; i++) CHECK(cuGraphAddChildGraphNode(&node, outer, NULL, 0, chain));
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, outer, 0));
  for (int i = 0; i < 3; i++) CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  unsigned expected[kN];
  for (unsigned i = 0; i < kN; i++) expected[i] = kChain - 1;
  expect_words(a, expected, kN);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(outer));
  CHECK(cuGraphDestroy(chain));
}

typedef struct {
  int calls, order;
  const unsigned* from;
  unsigned* to;
} Call;
static int next_order = 0;

static void add_one(void* data) { /* between a copy out and a copy in */
  Call* call = (Call*)data;
  call->calls++;
  call->order = next_order++;
  for (int i = 0; i < kN; i++) call->to[i] = call->from[i] + 1;
}

static void host_nodes(CUdeviceptr a, CUdeviceptr b, CUstream stream) {
  static unsigned out[kN], in[kN];
  Call call = {0, -1, out, in};
  CUgraph graph;
  CUgraphNode kernel, copy_out, host, copy_in;
  unsigned first = 10, n = kN;
  void* arguments[] = {&a, &first, &n};
  CUDA_KERNEL_NODE_PARAMS node;
  fill_parameters(&node, arguments);
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddKernelNode(&kernel, graph, NULL, 0, &node));
  CUDA_MEMCPY3D copy;
  memset(&copy, 0, sizeof copy);
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = a;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = out;
  copy.srcPitch = copy.dstPitch = copy.WidthInBytes = kN * 4;
  copy.Height = copy.Depth = copy.srcHeight = copy.dstHeight = 1;
  CHECK(cuGraphAddMemcpyNode(&copy_out, graph, &kernel, 1, &copy, session.context));
  CUDA_HOST_NODE_PARAMS function = {add_one, &call}, back;
  CHECK(cuGraphAddHostNode(&host, graph, &copy_out, 1, &function));
  CHECK(cuGraphHostNodeGetParams(host, &back));
  EXPECT(back.fn == add_one && back.userData == &call);
  memset(&copy, 0, sizeof copy);
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = in;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = b;
  copy.srcPitch = copy.dstPitch = copy.WidthInBytes = kN * 4;
  copy.Height = copy.Depth = copy.srcHeight = copy.dstHeight = 1;
  CHECK(cuGraphAddMemcpyNode(&copy_in, graph, &host, 1, &copy, session.context));
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  unsigned expected[kN];
  for (unsigned round = 0; round < 3; round++) {
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    EXPECT(call.calls == (int)round + 1);
    for (unsigned i = 0; i < kN; i++) expected[i] = 11 + i;
    expect_words(b, expected, kN);
    CHECK(cuMemsetD32(b, 0, kN));
  }
  /* Another function's data in the executable. */
  Call second = {0, -1, out, in};
  function.userData = &second;
  CHECK(cuGraphExecHostNodeSetParams(exec, host, &function));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  EXPECT(call.calls == 3 && second.calls == 1);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
}

int main(int count, char** arguments) {
  session = open_session();
  fill = kernel_of(&session, "fill");
  vector_add = kernel_of(&session, "vector_add");
  CUdeviceptr a, b;
  CUstream stream;
  CHECK(cuMemAlloc(&a, kN * 4));
  CHECK(cuMemAlloc(&b, kN * 4));
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  nodes_and_edges(a, b);
  events(a, stream);
  memory(stream);
  wrong(a);
  large(a, stream);
  if (count > 1 && strcmp(arguments[1], "host") == 0) host_nodes(a, b, stream);
  CHECK(cuStreamDestroy(stream));
  CHECK(cuMemFree(a));
  CHECK(cuMemFree(b));
  close_session(&session);
  return verdict_ok();
}
