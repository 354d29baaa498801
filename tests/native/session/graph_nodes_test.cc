// The description of a graph: what it says is read as it was written, and what is wrong is refused
// before anything is allocated.
#include "wire/graph_nodes.h"

#include <gtest/gtest.h>

#include <random>

namespace gpupool::wire {
namespace {

class Description {
 public:
  template <typename T>
  Description& put(const T& value) {
    return raw(&value, sizeof value);
  }
  Description& raw(const void* data, size_t size) {
    const auto* at = static_cast<const uint8_t*>(data);
    bytes.insert(bytes.end(), at, at + size);
    bytes.resize(align8(bytes.size()));
    return *this;
  }
  Description& node(GraphNodeKind kind, uint32_t index, std::vector<uint32_t> dependencies = {},
                    uint32_t enabled = 1) {
    put(GraphNodeHeader{static_cast<uint32_t>(kind), index, enabled,
                        static_cast<uint32_t>(dependencies.size())});
    return raw(dependencies.data(), dependencies.size() * 4);
  }
  bool read(uint32_t count, bool update = false) {
    return decode_graph(bytes.data(), bytes.size(), count, update, &nodes);
  }
  std::vector<uint8_t> bytes;
  std::vector<GraphNode> nodes;
};

constexpr GraphCopy kCopy{0x1000, 64, 3, 0x9000, 32, 2, 16, 2, 5};
constexpr GraphFill kFill{0x1000, 32, 4, 3, 0xAABB, 2};

Description good() {
  Description d;
  Launch launch{};
  launch.function = {5, 6};
  launch.grid[0] = 7;
  launch.parameter_bytes = 3;
  d.node(GraphNodeKind::kEmpty, 0);
  d.node(GraphNodeKind::kKernel, 1, {0}).put(launch).raw("abc", 3);
  d.node(GraphNodeKind::kCopy, 2, {0, 1}, 0).put(kCopy);
  d.node(GraphNodeKind::kFill, 3, {1}).put(kFill);
  d.node(GraphNodeKind::kRecord, 4, {2, 3}).put(Handle{8, 9});
  d.node(GraphNodeKind::kWait, 5).put(Handle{10, 11});
  return d;
}

TEST(GraphNodes, AreReadAsWritten) {
  Description d = good();
  ASSERT_TRUE(d.read(6));
  ASSERT_EQ(d.nodes.size(), 6u);
  EXPECT_EQ(d.nodes[1].launch.function.index, 5u);
  EXPECT_EQ(d.nodes[1].launch.grid[0], 7u);
  EXPECT_EQ(d.nodes[1].parameters, "abc");
  EXPECT_EQ(d.nodes[1].dependencies, std::vector<uint32_t>({0}));
  EXPECT_EQ(d.nodes[2].header.enabled, 0u);
  EXPECT_EQ(d.nodes[2].copy.source_pitch, 32u);
  EXPECT_EQ(d.nodes[3].fill.value, 0xAABBu);
  EXPECT_EQ(d.nodes[4].event.generation, 9u);
  EXPECT_EQ(d.nodes[4].dependencies, std::vector<uint32_t>({2, 3}));
  EXPECT_EQ(d.nodes[5].event.index, 10u);
}

TEST(GraphNodes, CountsAreWhatTheyClaim) {
  for (uint32_t count : {0u, 1u, 5u, 7u, kMaxGraphNodes, kMaxGraphNodes + 1, ~0u}) {
    EXPECT_FALSE(good().read(count)) << count;
  }
  Description none;
  EXPECT_TRUE(none.read(0));
  EXPECT_FALSE(none.read(1));
  EXPECT_FALSE(none.read(kMaxGraphNodes));
  Description greedy;
  greedy.put(GraphNodeHeader{0, 0, 1, 0x40000000});
  EXPECT_FALSE(greedy.read(1));
}

TEST(GraphNodes, NothingComesBeforeItself) {
  EXPECT_FALSE(Description().node(GraphNodeKind::kEmpty, 0, {0}).read(1));
  EXPECT_FALSE(
      Description().node(GraphNodeKind::kEmpty, 0).node(GraphNodeKind::kEmpty, 1, {1}).read(2));
  EXPECT_FALSE(
      Description().node(GraphNodeKind::kEmpty, 0).node(GraphNodeKind::kEmpty, 1, {7}).read(2));
  EXPECT_FALSE(
      Description().node(GraphNodeKind::kEmpty, 0).node(GraphNodeKind::kEmpty, 1, {0, 0}).read(2));
  EXPECT_FALSE(Description().node(GraphNodeKind::kEmpty, 1).read(1));
  Description two;
  two.node(GraphNodeKind::kEmpty, 0).node(GraphNodeKind::kEmpty, 1);
  EXPECT_FALSE(two.node(GraphNodeKind::kEmpty, 2, {1, 0}).read(3));
}

TEST(GraphNodes, UpdatesNameNodesWithoutDependencies) {
  Description d;
  d.node(GraphNodeKind::kFill, 1000).put(kFill);
  EXPECT_TRUE(d.read(1, true));
  EXPECT_EQ(d.nodes[0].header.index, 1000u);
  EXPECT_FALSE(d.read(1, false));
  EXPECT_FALSE(Description().node(GraphNodeKind::kEmpty, kMaxGraphNodes).read(1, true));
  EXPECT_FALSE(Description()
                   .node(GraphNodeKind::kEmpty, 0)
                   .node(GraphNodeKind::kEmpty, 1, {0})
                   .read(2, true));
}

TEST(GraphNodes, SizesThatOverflowAreRefused) {
  auto copy = [](auto change) {
    GraphCopy c = kCopy;
    change(c);
    Description d;
    d.node(GraphNodeKind::kCopy, 0).put(c);
    return d.read(1);
  };
  EXPECT_TRUE(copy([](GraphCopy&) {}));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.width = 0; }));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.width = 1ull << 63; }));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.width = 65; }));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.source_pitch = 15; }));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.destination_height = 1; }));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.depth = 1ull << 40; }));
  EXPECT_FALSE(copy([](GraphCopy& c) { c.source_pitch = c.source_height = 1ull << 39; }));
  auto fill = [](auto change) {
    GraphFill f = kFill;
    change(f);
    Description d;
    d.node(GraphNodeKind::kFill, 0).put(f);
    return d.read(1);
  };
  EXPECT_TRUE(fill([](GraphFill&) {}));
  EXPECT_FALSE(fill([](GraphFill& f) { f.element = 3; }));
  EXPECT_FALSE(fill([](GraphFill& f) { f.element = 0; }));
  EXPECT_FALSE(fill([](GraphFill& f) { f.address = 0x1001; }));
  EXPECT_FALSE(fill([](GraphFill& f) { f.height = 1ull << 60; }));
  EXPECT_FALSE(fill([](GraphFill& f) { f.width = 1ull << 62; }));
  EXPECT_FALSE(fill([](GraphFill& f) { f.pitch = 4; }));
  Description parameters;
  Launch launch{};
  launch.parameter_bytes = kMaxParameterBytes + 1;
  parameters.node(GraphNodeKind::kKernel, 0).put(launch);
  parameters.bytes.resize(parameters.bytes.size() + 65536);
  EXPECT_FALSE(parameters.read(1));
}

// Whatever comes: an answer, and nothing read beyond the end (AddressSanitizer says so).
TEST(GraphNodes, AnyBytesGetAnAnswer) {
  std::mt19937 random(20240711);
  for (int round = 0; round < 20000; round++) {
    Description d = good();
    const int changes = static_cast<int>(random() % 4);
    for (int i = 0; i < changes; i++) {
      const size_t at = random() % (d.bytes.size() / 4) * 4;
      const uint32_t words[] = {0,          1,          2,   6,
                                0x7FFFFFFF, 0x80000000, ~0u, static_cast<uint32_t>(random())};
      const uint32_t word = words[random() % 8];
      memcpy(d.bytes.data() + at, &word, 4);
    }
    if (random() % 4 == 0) d.bytes.resize(random() % d.bytes.size());
    const std::vector<uint8_t> exact(d.bytes);
    std::vector<GraphNode> nodes;
    const bool update = random() % 2;
    if (!decode_graph(exact.data(), exact.size(), 6, update, &nodes)) continue;
    for (size_t i = 0; i < nodes.size(); i++) {
      for (uint32_t dependency : nodes[i].dependencies) ASSERT_LT(dependency, i);
      if (!update) {
        ASSERT_EQ(nodes[i].header.index, i);
      }
    }
  }
}

}  // namespace
}  // namespace gpupool::wire
