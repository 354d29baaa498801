/* Stream capture by the driver API: what becomes of work in capturing streams, and the errors that
   CUDA documents for it, each at the call. */
#include <pthread.h>

#include "common.h"

enum { kN = 1000 };

static Session session;
static CUfunction fill;

static CUresult launch_fill(CUdeviceptr to, unsigned value, CUstream stream) {
  unsigned n = kN;
  void* parameters[] = {&to, &value, &n};
  return cuLaunchKernel(fill, (kN + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters, NULL);
}

static CUstreamCaptureStatus status_of(CUstream stream) {
  CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
  CHECK(cuStreamIsCapturing(stream, &status));
  return status;
}

static void begin(CUstream stream) {
  CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

/* Ends a capture that something has invalidated. */
static void end_invalid(CUstream stream) {
  CUgraph graph = (CUgraph)1;
  EXPECT(status_of(stream) == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT(graph == NULL);
  EXPECT(status_of(stream) == CU_STREAM_CAPTURE_STATUS_NONE);
}

static void expect_values(CUdeviceptr from, unsigned first) {
  unsigned host[kN];
  CHECK(cuMemcpyDtoH(host, from, sizeof host));
  for (unsigned i = 0; i < kN; i++) EXPECT(host[i] == first + i);
}

/* Nothing runs while it is captured; launches run it, each time. */
static void nothing_runs_early(CUstream stream) {
  CUdeviceptr a;
  CHECK(cuMemAlloc(&a, kN * 4));
  CHECK(launch_fill(a, 5, stream));
  CHECK(cuStreamSynchronize(stream));
  begin(stream);
  EXPECT(status_of(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(launch_fill(a, 100, stream));
  cuuint64_t id = 0;
  CUgraph inner = NULL;
  const CUgraphNode* nodes = NULL;
  size_t count = 0;
  CUstreamCaptureStatus status;
  CHECK(cuStreamGetCaptureInfo(stream, &status, &id, &inner, &nodes, NULL, &count));
  EXPECT(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && id != 0 && inner != NULL && count == 1);
  CUgraphNodeType type;
  CHECK(cuGraphNodeGetType(nodes[0], &type));
  EXPECT(type == CU_GRAPH_NODE_TYPE_KERNEL);
  CUDA_KERNEL_NODE_PARAMS parameters;
  CHECK(cuGraphKernelNodeGetParams(nodes[0], &parameters));
  EXPECT(parameters.blockDimX == 128 && parameters.gridDimX == (kN + 127) / 128);
  EXPECT(*(CUdeviceptr*)parameters.kernelParams[0] == a);
  EXPECT(*(unsigned*)parameters.kernelParams[1] == 100);
  CUgraph graph;
  CHECK(cuStreamEndCapture(stream, &graph));
  EXPECT(graph == inner && status_of(stream) == CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK(cuCtxSynchronize());
  expect_values(a, 5);
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphDestroy(graph)); /* the executable lives on */
  EXPECT(cuGraphDestroy(graph) == CUDA_ERROR_INVALID_VALUE);
  expect_values(a, 5);
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  expect_values(a, 100);
  CHECK(launch_fill(a, 7, stream));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamSynchronize(stream));
  expect_values(a, 100);
  CHECK(cuGraphExecDestroy(exec));
  EXPECT(cuGraphLaunch(exec, stream) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(a));
}

/* Begin and end where they do not belong. */
static void begin_and_end(CUstream stream, CUstream other) {
  CUgraph graph;
  EXPECT(cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL) ==
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT(cuStreamBeginCapture(stream, (CUstreamCaptureMode)9) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_ILLEGAL_STATE);
  begin(stream);
  EXPECT(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_ERROR_ILLEGAL_STATE);
  end_invalid(stream);
  begin(stream);
  EXPECT(cuStreamEndCapture(other, &graph) == CUDA_ERROR_ILLEGAL_STATE);
  CHECK(cuStreamEndCapture(stream, &graph)); /* an empty graph is a graph */
  size_t count = 99;
  CHECK(cuGraphGetNodes(graph, NULL, &count));
  EXPECT(count == 0);
  CHECK(cuGraphDestroy(graph));
}

/* Waiting for, or asking about, what is only captured. */
static void waits(CUstream stream, CUevent event) {
  begin(stream);
  EXPECT(cuStreamSynchronize(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_invalid(stream);
  begin(stream);
  EXPECT(cuStreamQuery(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_invalid(stream);
  begin(stream);
  EXPECT(cuCtxSynchronize() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_invalid(stream);
  begin(stream);
  CHECK(cuEventRecord(event, stream));
  EXPECT(cuEventQuery(event) == CUDA_ERROR_CAPTURED_EVENT);
  end_invalid(stream);
  EXPECT(cuEventSynchronize(event) == CUDA_ERROR_CAPTURED_EVENT);
  CHECK(cuEventRecord(event, stream)); /* outside: an ordinary event again */
  CHECK(cuEventSynchronize(event));
  CHECK(cuEventQuery(event));
}

/* Calls that may depend on other work without saying so. */
static void unsafe_calls(CUstream stream) {
  CUdeviceptr memory = 0;
  begin(stream);
  EXPECT(cuMemAlloc(&memory, 4096) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT(launch_fill(0, 0, stream) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  end_invalid(stream);
  CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK(cuMemAlloc(&memory, 4096));
  CHECK(cuMemFree(memory));
  CUgraph graph;
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphDestroy(graph));
  begin(stream);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK(cuMemAlloc(&memory, 4096));
  CHECK(cuMemFree(memory));
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT(mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphDestroy(graph));
}

/* The legacy default stream is ordered with every blocking stream. */
static void legacy_stream(CUstream blocking, CUstream non_blocking, CUdeviceptr a) {
  begin(blocking);
  EXPECT(launch_fill(a, 1, NULL) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  end_invalid(blocking);
  begin(blocking);
  unsigned word = 3;
  EXPECT(cuMemcpyHtoD(a, &word, 4) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  end_invalid(blocking);
  CUgraph graph;
  CUstreamCaptureStatus status;
  begin(blocking); /* asking about it harms nothing */
  EXPECT(cuStreamIsCapturing(NULL, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(cuStreamEndCapture(blocking, &graph));
  CHECK(cuGraphDestroy(graph));
  begin(non_blocking);
  CHECK(launch_fill(a, 1, NULL));
  CHECK(cuStreamEndCapture(non_blocking, &graph));
  CHECK(cuGraphDestroy(graph));
  CHECK(cuCtxSynchronize());
  expect_values(a, 1);
}

/* Fork by an event and join by another; what is not joined, merged or comes from outside. */
static void forks(CUstream one, CUstream two, CUevent fork, CUevent join, CUdeviceptr a,
                  CUdeviceptr b) {
  CUgraph graph;
  begin(one);
  CHECK(launch_fill(a, 10, one));
  CHECK(cuEventRecord(fork, one));
  CHECK(cuStreamWaitEvent(two, fork, 0));
  EXPECT(status_of(two) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(launch_fill(b, 20, two));
  CHECK(launch_fill(a, 30, one));
  EXPECT(cuStreamEndCapture(two, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  CHECK(cuEventRecord(join, two));
  CHECK(cuStreamWaitEvent(one, join, 0));
  CHECK(cuMemcpyDtoDAsync(a, b, kN * 4, one));
  CHECK(cuStreamEndCapture(one, &graph));
  EXPECT(status_of(two) == CU_STREAM_CAPTURE_STATUS_NONE);
  size_t nodes = 0, edges = 0, roots = 0;
  CHECK(cuGraphGetNodes(graph, NULL, &nodes));
  CHECK(cuGraphGetEdges(graph, NULL, NULL, NULL, &edges));
  CHECK(cuGraphGetRootNodes(graph, NULL, &roots));
  EXPECT(nodes == 4 && edges == 4 && roots == 1);
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, two));
  CHECK(cuStreamSynchronize(two));
  expect_values(a, 20);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));

  begin(one);
  CHECK(cuEventRecord(fork, one));
  CHECK(cuStreamWaitEvent(two, fork, 0));
  CHECK(launch_fill(b, 20, two));
  EXPECT(cuStreamEndCapture(one, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  EXPECT(graph == NULL && status_of(one) == CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT(status_of(two) == CU_STREAM_CAPTURE_STATUS_NONE);

  CHECK(cuEventRecord(fork, two)); /* before the capture */
  begin(one);
  EXPECT(cuStreamWaitEvent(one, fork, 0) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  end_invalid(one);

  begin(one);
  begin(two);
  CHECK(cuEventRecord(fork, one));
  EXPECT(cuStreamWaitEvent(two, fork, 0) == CUDA_ERROR_STREAM_CAPTURE_MERGE);
  end_invalid(one);
  end_invalid(two);
  CHECK(cuEventRecord(fork, one));
  CHECK(cuEventSynchronize(fork));
}

static void* other_thread(void* stream) {
  CHECK(cuCtxSetCurrent(session.context));
  CUgraph graph;
  EXPECT(cuStreamEndCapture((CUstream)stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  CUdeviceptr memory;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  CHECK(cuMemAlloc(&memory, 64)); /* captures of other threads do not matter to it */
  CHECK(cuMemFree(memory));
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT(cuMemAlloc(&memory, 64) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  return NULL;
}

static void threads(CUstream stream) {
  begin(stream);
  pthread_t thread;
  EXPECT(pthread_create(&thread, NULL, other_thread, stream) == 0);
  EXPECT(pthread_join(thread, NULL) == 0);
  end_invalid(stream);
}

/* Dependencies that the program sets by itself, and a capture into its own graph. */
static void dependencies(CUstream stream, CUdeviceptr a, CUdeviceptr b) {
  CUgraph graph, same;
  CUgraphNode empty, first;
  CHECK(cuGraphCreate(&graph, 0));
  CHECK(cuGraphAddEmptyNode(&empty, graph, NULL, 0));
  CHECK(cuStreamBeginCaptureToGraph(stream, graph, &empty, NULL, 1,
                                    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CHECK(launch_fill(a, 1, stream));
  EXPECT(cuGraphDestroy(graph) == CUDA_ERROR_INVALID_VALUE); /* in use */
  CUstreamCaptureStatus status;
  const CUgraphNode* nodes;
  size_t count;
  CHECK(cuStreamGetCaptureInfo(stream, &status, NULL, NULL, &nodes, NULL, &count));
  EXPECT(count == 1);
  first = nodes[0];
  CHECK(cuStreamUpdateCaptureDependencies(stream, &empty, NULL, 1,
                                          CU_STREAM_SET_CAPTURE_DEPENDENCIES));
  CHECK(launch_fill(b, 2, stream));
  CHECK(cuStreamUpdateCaptureDependencies(stream, &first, NULL, 1,
                                          CU_STREAM_ADD_CAPTURE_DEPENDENCIES));
  CHECK(cuMemcpyDtoDAsync(a, b, kN * 4, stream));
  CHECK(cuStreamEndCapture(stream, &same));
  EXPECT(same == graph);
  size_t edges = 0;
  CHECK(cuGraphGetEdges(graph, NULL, NULL, NULL, &edges));
  EXPECT(edges == 4);
  CUgraphExec exec;
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  CHECK(cuGraphLaunch(exec, NULL));
  CHECK(cuCtxSynchronize());
  expect_values(a, 2);
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(graph));
}

/* A launch of an executable in a capturing stream becomes a child graph. */
static void nested(CUstream stream, CUdeviceptr a) {
  CUgraph graph, outer;
  CUgraphExec exec, outer_exec;
  begin(stream);
  CHECK(launch_fill(a, 40, stream));
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphInstantiate(&exec, graph, 0));
  begin(stream);
  CHECK(cuMemsetD32Async(a, 9, kN, stream));
  CHECK(cuGraphLaunch(exec, stream));
  CHECK(cuStreamEndCapture(stream, &outer));
  CUgraphNode nodes[3];
  size_t count = 3;
  CHECK(cuGraphGetNodes(outer, nodes, &count));
  EXPECT(count == 2);
  CUgraphNodeType type;
  CHECK(cuGraphNodeGetType(nodes[1], &type));
  EXPECT(type == CU_GRAPH_NODE_TYPE_GRAPH);
  CHECK(cuGraphInstantiate(&outer_exec, outer, 0));
  CHECK(cuGraphLaunch(outer_exec, stream));
  CHECK(cuStreamSynchronize(stream));
  expect_values(a, 40);
  CHECK(cuGraphExecDestroy(outer_exec));
  CHECK(cuGraphExecDestroy(exec));
  CHECK(cuGraphDestroy(outer));
  CHECK(cuGraphDestroy(graph));
}

/* A program that forgets to end a capture. */
static void forgotten(void) {
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  begin(stream);
  CHECK(cuStreamDestroy(stream));
  CHECK(cuCtxSynchronize());
}

int main(void) {
  session = open_session();
  fill = kernel_of(&session, "fill");
  CUstream blocking, other, non_blocking;
  CUevent fork, join;
  CUdeviceptr a, b;
  CHECK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  CHECK(cuStreamCreate(&other, CU_STREAM_DEFAULT));
  CHECK(cuStreamCreate(&non_blocking, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&a, kN * 4));
  CHECK(cuMemAlloc(&b, kN * 4));
  nothing_runs_early(blocking);
  nothing_runs_early(non_blocking);
  begin_and_end(blocking, other);
  waits(blocking, fork);
  unsafe_calls(blocking);
  legacy_stream(blocking, non_blocking, a);
  forks(blocking, other, fork, join, a, b);
  threads(blocking);
  dependencies(blocking, a, b);
  nested(other, a);
  forgotten();
  CHECK(cuCtxSynchronize());
  close_session(&session);
  return verdict_ok();
}
