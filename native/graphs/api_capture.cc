// The entry points of stream capture.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "api/cuda_abi.h"
#include "graphs/capture_state.h"

using namespace gpupool::graphs;  // NOLINT: a file of entry points

namespace {

CUresult info_of(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                 const CUgraphNode** dependencies, const CUgraphEdgeData** data, size_t* count,
                 bool lossy) {
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (data != nullptr) *data = nullptr;
  if (count != nullptr) *count = 0;
  return with_participant(stream, [&](Guard& guard, Participant* entry) -> CUresult {
    if (entry == nullptr) {
      *status = CU_STREAM_CAPTURE_STATUS_NONE;
      return CUDA_SUCCESS;
    }
    if (entry->capture->invalid) {
      *status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
      return CUDA_SUCCESS;
    }
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id != nullptr) *id = entry->capture->id;
    if (graph != nullptr) *graph = entry->capture->graph->as_cuda();
    entry->shown_nodes.clear();
    entry->shown_data.clear();
    for (const auto& dependency : entry->dependencies) {
      if (guard.node(reinterpret_cast<CUgraphNode>(dependency.node)) == nullptr) continue;
      entry->shown_nodes.push_back(reinterpret_cast<CUgraphNode>(dependency.node));
      entry->shown_data.push_back(dependency.data);
      const CUgraphEdgeData& edge = dependency.data;
      if (lossy && (edge.from_port | edge.to_port | edge.type) != 0) return CUDA_ERROR_LOSSY_QUERY;
    }
    if (dependencies != nullptr) *dependencies = entry->shown_nodes.data();
    if (data != nullptr) *data = entry->shown_data.data();
    if (count != nullptr) *count = entry->shown_nodes.size();
    return CUDA_SUCCESS;
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return begin_capture(stream, mode, nullptr, nullptr, nullptr, 0);
}

CUresult cuStreamBeginCapture(CUstream stream) {
  return begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, nullptr, nullptr, nullptr, 0);
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                     const CUgraphEdgeData* data, size_t count,
                                     CUstreamCaptureMode mode) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return begin_capture(stream, mode, graph, nodes, data, count);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) { return end_capture(stream, graph); }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!capturing()) {
    CUcontext context;
    StreamInfo info;
    if (const CUresult e = current(&context)) return e;
    if (const CUresult e = find_stream(stream, &info)) return e;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  }
  return info_of(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr, false);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return info_of(stream, status, id, nullptr, nullptr, nullptr, nullptr, false);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   size_t* count) {
  return info_of(stream, status, id, graph, dependencies, nullptr, count, true);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   const CUgraphEdgeData** data, size_t* count) {
  return info_of(stream, status, id, graph, dependencies, data, count, data == nullptr);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode* nodes,
                                              const CUgraphEdgeData* data, size_t count,
                                              unsigned int flags) {
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) return CUDA_ERROR_INVALID_VALUE;
  return with_participant(stream, [&](Guard& guard, Participant* entry) -> CUresult {
    if (entry == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (entry->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    std::vector<Edge> edges;
    if (const CUresult e =
            guard.find_dependencies(entry->capture->graph.get(), nodes, data, count, &edges)) {
      return e;
    }
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) entry->dependencies.clear();
    for (const Edge& edge : edges) {
      std::erase_if(entry->dependencies,
                    [&](const auto& e) { return e.node == edge.node->handle; });
      entry->dependencies.push_back({edge.node->handle, edge.data});
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* nodes, size_t count,
                                           unsigned int flags) {
  return cuStreamUpdateCaptureDependencies_v2(stream, nodes, nullptr, count, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (const CUresult e = initialised()) return e;
  return exchange_mode(mode);
}

}  // extern "C"
#pragma GCC visibility pop
