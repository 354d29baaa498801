// What comes from the other end of a connection, without a connection: the lease file, both sides
// of the handshake, frames, and the description of a graph. The first byte says which. Sessions are
// fuzzed as a whole by protocol.py.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "carriers/carrier.h"
#include "wire/frame_io.h"
#include "wire/graph_nodes.h"
#include "wire/handshake.h"
#include "wire/status.h"

namespace gpupool::wire {
namespace {

constexpr uint64_t kMaxMemory = 64 << 20;

void check(bool right, const char* what) {
  if (right) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

// The input as a connection that then ends.
class Input : public HandshakeStream, public carriers::Carrier {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool send_all(const void*, size_t, int) override { return true; }
  bool receive_all(void* to, size_t bytes, int) override {
    if (bytes > left_) return false;
    take(to, bytes);
    return true;
  }

  carriers::Moved write(const carriers::Part*, int, bool) override {
    return {carriers::Status::kClosed, 0};
  }
  carriers::Moved read(const carriers::Part* parts, int count, bool) override {
    size_t moved = 0;
    for (int i = 0; i < count; ++i) {
      const size_t bytes = std::min(parts[i].bytes, left_);
      take(parts[i].data, bytes);
      moved += bytes;
    }
    if (moved == 0) return {carriers::Status::kClosed, 0};
    return {carriers::Status::kOk, moved};
  }
  int wait(int what, int64_t) override { return what; }
  void shutdown() override { left_ = 0; }
  void abandon() override {}
  const char* kind() const override { return "fuzz"; }

 private:
  void take(void* to, size_t bytes) {
    if (bytes != 0) memcpy(to, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
  }
  const uint8_t* data_;
  size_t left_;
};

LeaseFile a_lease() {
  LeaseFile lease;
  lease.lease.fill(1);
  lease.key.fill(2);
  return lease;
}

void lease_file(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::string why;
  const auto lease = parse_lease(text, &why);
  check(lease.has_value() != !why.empty() || lease.has_value(), "refused without a reason");
  if (const auto uuid = parse_uuid(text)) {
    check(parse_uuid(format_uuid(*uuid)) == uuid, "a uuid is another one when it is written");
  }
}

void server(const uint8_t* data, size_t size) {
  const LeaseFile lease = a_lease();
  ServerHandshake handshake(
      [&](const Uuid& id) { return id == lease.lease ? std::optional(lease.key) : std::nullopt; });
  while (size != 0) {
    const size_t bytes = std::min(handshake.wanted(), size);
    if (bytes == 0) break;
    handshake.input(data, bytes);
    data += bytes;
    size -= bytes;
  }
  // Nobody can guess 32 bytes that depend on a number of ours.
  check(handshake.state() != ServerHandshake::State::kProven, "proven without the key");
  check(handshake.output().size() < 64 * 1024, "too long an answer");
  check(memchr(handshake.hello().program, 0, sizeof handshake.hello().program) != nullptr,
        "a name without an end");
}

void client(const uint8_t* data, size_t size) {
  Input broker(data, size);
  const HandshakeResult result = client_handshake(broker, a_lease(), {}, 1000);
  check(!result.ok, "a broker without the key is believed");
  check(!result.message.empty(), "failed without a reason");
  if (const auto status = parse_status(data, size)) {
    check(status->processes.size() <= kMaxStatusProcesses, "too many processes");
    for (const ProcessStatus& process : status->processes) {
      check(process.device < status->slices.size(), "a process of no slice");
      check(memchr(process.program, 0, sizeof process.program) != nullptr, "a name without an end");
    }
  }
}

void frames(const uint8_t* data, size_t size) {
  Input peer(data, size);
  FrameReader reader(peer, 1);
  std::vector<uint8_t> bulk(4096);
  for (;;) {
    const auto result = reader.next(true);
    if (result != FrameReader::Result::kFrame) {
      check(result != FrameReader::Result::kBlocked, "blocked in spite of waiting");
      check(result != FrameReader::Result::kBad || !reader.reason().empty(), "no reason");
      return;
    }
    uint64_t sum = 0;
    for (uint32_t i = 0; i < reader.header().bulk_count; ++i) sum += reader.segments()[i];
    check(sum == reader.bulk_left(), "another sum of segments");
    // Every byte of the body is there.
    uint8_t all = 0;
    for (uint32_t i = 0; i < reader.header().body_bytes; ++i) all |= reader.body()[i];
    bulk[0] = all;
    while (reader.bulk_left() != 0) {
      const size_t bytes = std::min<uint64_t>(reader.bulk_left(), bulk.size());
      if (reader.read_bulk(bulk.data(), bytes, true).status != carriers::Status::kOk) return;
    }
  }
}

void graph(const uint8_t* data, size_t size) {
  if (size < 8) return;
  uint32_t count, update;
  memcpy(&count, data, 4);
  memcpy(&update, data + 4, 4);
  std::vector<GraphNode> nodes;
  if (!decode_graph(data + 8, size - 8, count, (update & 1) != 0, &nodes)) return;
  check(nodes.size() == count, "another number of nodes");
  check(nodes.size() * sizeof(GraphNode) < kMaxMemory, "too many nodes");
  for (size_t i = 0; i < nodes.size(); ++i)
    for (const uint32_t before : nodes[i].dependencies) check(before < i, "a later node");
}

}  // namespace
}  // namespace gpupool::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool::wire;
  if (size == 0) return 0;
  constexpr void (*kParsers[])(const uint8_t*, size_t) = {lease_file, server, client, frames,
                                                          graph};
  kParsers[data[0] % std::size(kParsers)](data + 1, size - 1);
  return 0;
}
