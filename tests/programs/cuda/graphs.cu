// CUDA graphs with the runtime API: captured and built by hand, launched again and again with other
// input, updated as a whole and node by node, with copies from and to host memory; each result is
// compared with the CPU.
#include <cstdint>
#include <cstring>
#include <string>

#include "check.h"

constexpr int kN = 20000, kBlocks = (kN + 255) / 256;
constexpr size_t kBytes = kN * sizeof(float);

__global__ void scale_add(const float* in, float* out, float factor, float offset, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor + offset;
}

__global__ void combine(const float* a, const float* b, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] - b[i];
}

static std::vector<float> input(unsigned long long seed) {
  Random random{seed};
  std::vector<float> values(kN);
  for (float& value : values) value = static_cast<float>(random.unit() * 8 - 4);
  return values;
}

static std::vector<float> expected(const std::vector<float>& in, float factor, float offset) {
  std::vector<float> out(kN);
  for (int i = 0; i < kN; ++i) {
    const float left = std::fma(in[i], factor, offset), right = std::fma(in[i], 0.5f, 1.0f);
    out[i] = left - right;
  }
  return out;
}

static cudaError_t add_edge(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to) {
#if CUDART_VERSION >= 13000
  return cudaGraphAddDependencies(graph, &from, &to, nullptr, 1);
#else
  return cudaGraphAddDependencies(graph, &from, &to, 1);
#endif
}

struct Buffers {
  float *in, *left, *right, *out, *pinned_in, *pinned_out;
  Buffers() {
    for (float** device : {&in, &left, &right, &out}) CHECK(cudaMalloc(device, kBytes));
    CHECK(cudaMallocHost(&pinned_in, kBytes));
    CHECK(cudaMallocHost(&pinned_out, kBytes));
  }
  ~Buffers() {
    for (float* device : {in, left, right, out}) CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned_in));
    CHECK(cudaFreeHost(pinned_out));
  }
  void set(const std::vector<float>& values) { std::memcpy(pinned_in, values.data(), kBytes); }
  std::vector<float> result() const { return {pinned_out, pinned_out + kN}; }
};

// Copy in, two branches on two streams, one result, copy out.
static cudaGraph_t capture(const Buffers& b, cudaStream_t one, cudaStream_t two, float factor,
                           float offset, bool copies) {
  cudaEvent_t fork, join;
  CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal));
  if (copies) CHECK(cudaMemcpyAsync(b.in, b.pinned_in, kBytes, cudaMemcpyHostToDevice, one));
  CHECK(cudaEventRecord(fork, one));
  CHECK(cudaStreamWaitEvent(two, fork, 0));
  scale_add<<<kBlocks, 256, 0, one>>>(b.in, b.left, factor, offset, kN);
  scale_add<<<kBlocks, 256, 0, two>>>(b.in, b.right, 0.5f, 1.0f, kN);
  CHECK(cudaEventRecord(join, two));
  CHECK(cudaStreamWaitEvent(one, join, 0));
  combine<<<kBlocks, 256, 0, one>>>(b.left, b.right, b.out, kN);
  if (copies) CHECK(cudaMemcpyAsync(b.pinned_out, b.out, kBytes, cudaMemcpyDeviceToHost, one));
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(one, &graph));
  CHECK(cudaEventDestroy(fork));
  CHECK(cudaEventDestroy(join));
  return graph;
}

static void replays(const Buffers& b, cudaStream_t one, cudaStream_t two) {
  cudaGraph_t graph = capture(b, one, two, 3.0f, 2.0f, true);
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  for (unsigned round = 0; round < 5; ++round) {
    const std::vector<float> values = input(round);
    std::memcpy(b.pinned_in, values.data(), kBytes);
    CHECK(cudaGraphLaunch(exec, round % 2 ? two : one));
    CHECK(cudaDeviceSynchronize());
    expect_equal(b.result(), expected(values, 3.0f, 2.0f), "replay");
  }
  // As PyTorch does: the input is copied in front of the launch, the output taken after it.
  graph = capture(b, one, two, 1.5f, -1.0f, false);
  cudaGraphExec_t device_only;
  CHECK(cudaGraphInstantiate(&device_only, graph, 0));
  CHECK(cudaGraphUpload(device_only, one));
  for (unsigned round = 10; round < 15; ++round) {
    const std::vector<float> values = input(round);
    CHECK(cudaMemcpyAsync(b.in, values.data(), kBytes, cudaMemcpyHostToDevice, one));
    CHECK(cudaGraphLaunch(device_only, one));
    CHECK(cudaGraphLaunch(device_only, one));
    std::vector<float> got(kN);
    CHECK(cudaMemcpyAsync(got.data(), b.out, kBytes, cudaMemcpyDeviceToHost, one));
    CHECK(cudaStreamSynchronize(one));
    expect_equal(got, expected(values, 1.5f, -1.0f), "graph on the device");
  }
  // The same shape captured with other values replaces what the executable does.
  cudaGraph_t other = capture(b, one, two, -2.0f, 0.25f, false);
  cudaGraphExecUpdateResultInfo info;
  CHECK(cudaGraphExecUpdate(device_only, other, &info));
  EXPECT(info.result == cudaGraphExecUpdateSuccess);
  CHECK(cudaGraphDestroy(other));
  const std::vector<float> values = input(99);
  CHECK(cudaMemcpy(b.in, values.data(), kBytes, cudaMemcpyHostToDevice));
  CHECK(cudaGraphLaunch(device_only, one));
  CHECK(cudaStreamSynchronize(one));
  expect_equal(to_host(b.out, kN), expected(values, -2.0f, 0.25f), "updated graph");
  // Another shape does not fit.
  other = capture(b, one, two, 1.0f, 1.0f, true);
  EXPECT(cudaGraphExecUpdate(device_only, other, &info) == cudaErrorGraphExecUpdateFailure);
  EXPECT(info.result == cudaGraphExecUpdateErrorTopologyChanged);
  EXPECT(cudaGetLastError() == cudaErrorGraphExecUpdateFailure);
  CHECK(cudaGraphLaunch(device_only, one));  // as it was before
  CHECK(cudaStreamSynchronize(one));
  expect_equal(to_host(b.out, kN), expected(values, -2.0f, 0.25f), "graph after a failed update");
  CHECK(cudaGraphDestroy(other));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaGraphExecDestroy(device_only));
  CHECK(cudaGraphExecDestroy(exec));
}

// The same computation as nodes and edges, with a memset, a 2D copy and a child graph.
static void by_hand(const Buffers& b, cudaStream_t stream) {
  cudaGraph_t graph, child;
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphCreate(&child, 0));
  float factor = 4.0f, offset = 1.0f;
  int n = kN;
  void* left_arguments[] = {(void*)&b.in, (void*)&b.left, &factor, &offset, &n};
  cudaKernelNodeParams left_node_parameters = {};
  left_node_parameters.func = reinterpret_cast<void*>(scale_add);
  left_node_parameters.gridDim = dim3(kBlocks);
  left_node_parameters.blockDim = dim3(256);
  left_node_parameters.kernelParams = left_arguments;
  cudaGraphNode_t left, inner, zero, copy_in, copy_out, whole;
  CHECK(cudaGraphAddKernelNode(&inner, child, nullptr, 0, &left_node_parameters));
  CHECK(cudaGraphAddMemcpyNode1D(&copy_in, graph, nullptr, 0, b.in, b.pinned_in, kBytes,
                                 cudaMemcpyHostToDevice));
  CHECK(cudaGraphAddChildGraphNode(&left, graph, &copy_in, 1, child));
  cudaMemsetParams zeros = {};
  zeros.dst = b.right;
  zeros.value = 0;
  zeros.elementSize = 4;
  zeros.width = kN;
  zeros.height = 1;
  CHECK(cudaGraphAddMemsetNode(&zero, graph, nullptr, 0, &zeros));
  void* combine_arguments[] = {(void*)&b.left, (void*)&b.right, (void*)&b.out, &n};
  cudaKernelNodeParams combine_parameters = {};
  combine_parameters.func = reinterpret_cast<void*>(combine);
  combine_parameters.gridDim = dim3(kBlocks);
  combine_parameters.blockDim = dim3(256);
  combine_parameters.kernelParams = combine_arguments;
  const cudaGraphNode_t both[] = {left, zero};
  CHECK(cudaGraphAddKernelNode(&whole, graph, both, 2, &combine_parameters));
  // 100 rows of 200 floats, of which the first 50 are copied out.
  cudaMemcpy3DParms rows = {};
  rows.srcPtr = make_cudaPitchedPtr(b.out, 200 * sizeof(float), 200 * sizeof(float), 100);
  rows.dstPtr = make_cudaPitchedPtr(b.pinned_out, 200 * sizeof(float), 200 * sizeof(float), 100);
  rows.extent = make_cudaExtent(50 * sizeof(float), 100, 1);
  rows.kind = cudaMemcpyDeviceToHost;
  CHECK(cudaGraphAddMemcpyNode(&copy_out, graph, nullptr, 0, &rows));
  CHECK(add_edge(graph, whole, copy_out));
  EXPECT(add_edge(graph, copy_out, copy_in) == cudaErrorInvalidValue);  // a cycle
  cudaGetLastError();

  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  auto check = [&](const char* what, float f, float o, float subtract) {
    const std::vector<float> values = input(7);
    std::memcpy(b.pinned_in, values.data(), kBytes);
    std::memset(b.pinned_out, 0, kBytes);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    std::vector<float> want(kN, 0.0f);
    for (int y = 0; y < 100; ++y) {
      for (int x = 0; x < 50; ++x) {
        const int i = y * 200 + x;
        want[i] = std::fma(values[i], f, o) - subtract;
      }
    }
    expect_equal(b.result(), want, what);
  };
  check("graph by hand", 4.0f, 1.0f, 0.0f);

  // Other parameters for one node of the executable: a memset's value, a kernel's argument.
  zeros.value = 0x3F800000;  // 1.0f
  CHECK(cudaGraphExecMemsetNodeSetParams(exec, zero, &zeros));
  check("other memset", 4.0f, 1.0f, 1.0f);
  cudaGraph_t embedded;
  CHECK(cudaGraphChildGraphNodeGetGraph(left, &embedded));
  factor = -3.0f;
  CHECK(cudaGraphKernelNodeSetParams(inner, &left_node_parameters));
  CHECK(cudaGraphExecChildGraphNodeSetParams(exec, left, child));
  check("other child", -3.0f, 1.0f, 1.0f);
  unsigned enabled = 7;
  CHECK(cudaGraphNodeSetEnabled(exec, copy_out, 0));
  CHECK(cudaGraphNodeGetEnabled(exec, copy_out, &enabled));
  EXPECT(enabled == 0);
  b.pinned_out[0] = 1234.0f;
  CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  EXPECT(b.pinned_out[0] == 1234.0f);
  CHECK(cudaGraphNodeSetEnabled(exec, copy_out, 1));
  CHECK(cudaGraphNodeSetEnabled(exec, zero, 0));
  check("without memset", -3.0f, 1.0f, 1.0f);

  // A clone is a graph of its own.
  cudaGraph_t clone;
  cudaGraphNode_t cloned;
  CHECK(cudaGraphClone(&clone, graph));
  CHECK(cudaGraphNodeFindInClone(&cloned, whole, clone));
  CHECK(cudaGraphDestroyNode(copy_out));
  size_t nodes = 0;
  CHECK(cudaGraphGetNodes(clone, nullptr, &nodes));
  EXPECT(nodes == 5);
  CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT(nodes == 4);
  CHECK(cudaGraphDestroy(clone));
  CHECK(cudaGraphDestroy(child));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaGraphExecDestroy(exec));
}

// Memory that is allocated and freed inside a graph.
static void memory_nodes(const Buffers& b, cudaStream_t stream) {
  const std::vector<float> values = input(5);
  CHECK(cudaMemcpy(b.in, values.data(), kBytes, cudaMemcpyHostToDevice));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  float* temporary;
  CHECK(cudaMallocAsync(&temporary, kBytes, stream));
  scale_add<<<kBlocks, 256, 0, stream>>>(b.in, temporary, 2.0f, 0.0f, kN);
  combine<<<kBlocks, 256, 0, stream>>>(temporary, b.in, b.out, kN);
  CHECK(cudaFreeAsync(temporary, stream));
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int round = 0; round < 3; ++round) CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  expect_equal(to_host(b.out, kN), values, "graph with memory of its own");  // 2 x - x
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
}

static int destroyed = 0;
static void CUDART_CB destroy(void* object) { destroyed += *static_cast<int*>(object); }

static void user_objects() {
  int one = 1;
  cudaUserObject_t object;
  CHECK(cudaUserObjectCreate(&object, &one, destroy, 1, cudaUserObjectNoDestructorSync));
  cudaGraph_t graph;
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  cudaGraphNode_t node;
  CHECK(cudaGraphAddEmptyNode(&node, graph, nullptr, 0));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  EXPECT(destroyed == 0);  // the executable still holds it
  CHECK(cudaGraphExecDestroy(exec));
  EXPECT(destroyed == 1);
}

static void picture(const Buffers& b, cudaStream_t one, cudaStream_t two) {
  cudaGraph_t graph = capture(b, one, two, 1.0f, 1.0f, false);
  char path[] = "/tmp/graphs-XXXXXX";
  const int file = mkstemp(path);
  EXPECT(file >= 0);
  CHECK(cudaGraphDebugDotPrint(graph, path, cudaGraphDebugDotFlagsVerbose));
  FILE* in = fdopen(file, "r");
  std::string text(100000, '\0');
  text.resize(fread(text.data(), 1, text.size(), in));
  fclose(in);
  std::remove(path);
  EXPECT(text.find("digraph") == 0 && text.find("scale_add") != std::string::npos &&
         text.find(" -> ") != std::string::npos);
  CHECK(cudaGraphDestroy(graph));
}

int main() {
  cudaStream_t one, two;
  CHECK(cudaStreamCreate(&one));
  CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
  {
    const Buffers b;
    replays(b, one, two);
    by_hand(b, one);
    memory_nodes(b, two);
    user_objects();
    picture(b, one, two);
  }
  return verdict_ok();
}
