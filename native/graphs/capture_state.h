// The captures of the process, for capture.cc and the entry points of capturing.
#pragma once

#include <pthread.h>

#include "graphs/capture.h"
#include "graphs/hooks.h"

namespace gpupool::graphs {

struct Capture {
  uint64_t id = 0;
  std::shared_ptr<Graph> graph;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  pthread_t thread{};
  uint64_t origin = 0;  // key of the stream that began it
  bool invalid = false;
  bool own_graph = true;  // made by the capture; else the program gave it
  // Of streams that were destroyed before they were joined.
  std::vector<uint64_t> unjoined;
};

// A stream in a capture, and what its next work comes after (by handle: a program may destroy
// nodes of the graph that it captures into).
struct Participant {
  std::shared_ptr<Capture> capture;
  StreamInfo stream;
  struct Dependency {
    uint64_t node;
    CUgraphEdgeData data;
  };
  std::vector<Dependency> dependencies;
  // What cuStreamGetCaptureInfo gave out: valid until the next call that changes it.
  std::vector<CUgraphNode> shown_nodes;
  std::vector<CUgraphEdgeData> shown_data;
};

// Begins with the graph's node list as dependencies.
CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                       const CUgraphNode* dependencies, const CUgraphEdgeData* data, size_t count);
CUresult end_capture(CUstream stream, CUgraph* graph);
// Runs `f(Participant*)`, null: the stream does not capture, with all locks held.
CUresult with_participant(CUstream stream, const std::function<CUresult(Guard&, Participant*)>& f);
CUresult exchange_mode(CUstreamCaptureMode* mode);

}  // namespace gpupool::graphs
