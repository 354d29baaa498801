// The nodes of an executable graph as they travel: records one after the other, in an order in
// which dependencies come first. Only work on the device is among them; what needs the client's
// memory or functions, the client does between the graphs that it has cut its own into.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "wire/codec.h"
#include "wire/messages.h"

namespace gpupool::wire {

enum class GraphNodeKind : uint32_t {
  kEmpty = 0,
  kKernel = 1,  // Launch without a stream, parameters
  kCopy = 2,    // GraphCopy
  kFill = 3,    // GraphFill
  kRecord = 4,  // Handle of an event
  kWait = 5,    // Handle of an event
};

// Then the dependencies (u32 indices of earlier nodes, padded to 8 bytes), then the body.
struct GraphNodeHeader {
  uint32_t kind;          // GraphNodeKind
  uint32_t index;         // of the node in its graph
  uint32_t enabled;       // 0: it does nothing
  uint32_t dependencies;  // how many; none in updates
};
struct GraphCopy {
  uint64_t destination, destination_pitch, destination_height;
  uint64_t source, source_pitch, source_height;
  uint64_t width, height, depth;  // bytes, rows, planes
};
struct GraphFill {
  uint64_t address, pitch, width, height;  // elements, rows
  uint32_t value, element;
};
static_assert(sizeof(GraphNodeHeader) == 16 && sizeof(GraphCopy) == 72 && sizeof(GraphFill) == 40);

constexpr uint32_t kMaxGraphNodes = 1 << 18;
constexpr uint64_t kMaxGraphBytes = 128ull * 1024 * 1024;
constexpr uint64_t kMaxGraphExtent = 1ull << 40;  // of any size in GraphCopy and GraphFill

struct GraphNode {
  GraphNodeHeader header;
  std::vector<uint32_t> dependencies;
  Launch launch{};
  std::string_view parameters;  // in the description
  GraphCopy copy{};
  GraphFill fill{};
  Handle event;
};

// Reads `count` records; false: they are not exactly that, or a node depends on a later one, or has
// another index than its place (`update`: an index that is out of range). Handles and addresses are
// not looked at. Sizes that could overflow are refused.
bool decode_graph(const uint8_t* data, size_t bytes, uint32_t count, bool update,
                  std::vector<GraphNode>* out);

}  // namespace gpupool::wire
