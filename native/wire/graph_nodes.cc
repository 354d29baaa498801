#include "wire/graph_nodes.h"

namespace gpupool::wire {
namespace {

bool sane(const GraphCopy& c) {
  for (uint64_t size : {c.destination_pitch, c.destination_height, c.source_pitch, c.source_height,
                        c.width, c.height, c.depth}) {
    if (size == 0 || size > kMaxGraphExtent) return false;
  }
  for (auto [pitch, rows] : {std::pair{c.destination_pitch, c.destination_height},
                             std::pair{c.source_pitch, c.source_height}}) {
    if (pitch < c.width || rows < c.height) return false;
    if (rows > kMaxGraphExtent / pitch || c.depth > kMaxGraphExtent / (pitch * rows)) return false;
  }
  return true;
}

bool sane(const GraphFill& f) {
  if (f.element != 1 && f.element != 2 && f.element != 4) return false;
  if (f.width == 0 || f.height == 0 || f.width > kMaxGraphExtent || f.height > kMaxGraphExtent) {
    return false;
  }
  if (f.address % f.element != 0) return false;
  if (f.height == 1) return true;
  return f.pitch >= f.width * f.element && f.pitch % f.element == 0 && f.pitch <= kMaxGraphExtent &&
         f.height <= kMaxGraphExtent / f.pitch;
}

}  // namespace

bool decode_graph(const uint8_t* data, size_t bytes, uint32_t count, bool update,
                  std::vector<GraphNode>* out) {
  // A record is no shorter than its header: the count is checked before anything is allocated.
  if (count > kMaxGraphNodes || bytes > kMaxGraphBytes || bytes / sizeof(GraphNodeHeader) < count) {
    return false;
  }
  Decoder decoder(data, bytes);
  out->clear();
  out->reserve(count);
  for (uint32_t i = 0; i < count; i++) {
    GraphNode node;
    node.header = decoder.get<GraphNodeHeader>();
    const GraphNodeHeader& header = node.header;
    if (!decoder.ok() || header.enabled > 1 || header.index >= kMaxGraphNodes) return false;
    if (update ? header.dependencies != 0 : header.index != i || header.dependencies > i) {
      return false;
    }
    if (header.dependencies != 0) {
      const std::string_view list = decoder.raw(uint64_t{header.dependencies} * 4);
      if (!decoder.ok()) return false;
      node.dependencies.resize(header.dependencies);
      memcpy(node.dependencies.data(), list.data(), list.size());
      // In order and each once, so that the driver has nothing to refuse.
      uint32_t next = 0;
      for (uint32_t dependency : node.dependencies) {
        if (dependency < next || dependency >= i) return false;
        next = dependency + 1;
      }
    }
    switch (static_cast<GraphNodeKind>(header.kind)) {
      case GraphNodeKind::kEmpty:
        break;
      case GraphNodeKind::kKernel:
        node.launch = decoder.get<Launch>();
        if (node.launch.parameter_bytes > kMaxParameterBytes) return false;
        node.parameters = decoder.raw(node.launch.parameter_bytes);
        break;
      case GraphNodeKind::kCopy:
        node.copy = decoder.get<GraphCopy>();
        if (!sane(node.copy)) return false;
        break;
      case GraphNodeKind::kFill:
        node.fill = decoder.get<GraphFill>();
        if (!sane(node.fill)) return false;
        break;
      case GraphNodeKind::kRecord:
      case GraphNodeKind::kWait:
        node.event = decoder.handle();
        break;
      default:
        return false;
    }
    if (!decoder.ok()) return false;
    out->push_back(std::move(node));
  }
  return decoder.finished();
}

}  // namespace gpupool::wire
