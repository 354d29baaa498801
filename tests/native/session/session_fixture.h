// A session that runs in a thread over a socket pair, on the quiet driver, and the other end of it.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "carriers/carrier.h"
#include "carriers/ring.h"
#include "wire/codec.h"
#include "wire/frame_io.h"
#include "wire/messages.h"
#include "worker/session.h"

namespace gpupool::test {

constexpr uint32_t kEpoch = 11;
constexpr uint64_t kArenaBase = 0x2000'0000'0000;
constexpr uint64_t kArenaBytes = 16ull << 30;
constexpr uint64_t kMemory = 256ull << 20;      // of the slice
constexpr uint64_t kBorne = 16ull << 20;        // of the driver's own, when the slice is full
constexpr uint64_t kHostMemory = 512ull << 20;  // of the host, for the slice's sessions

class CountingAccount final : public worker::MemoryAccount {
 public:
  bool charge(uint64_t bytes) override {
    if (bytes > kMemory - used.load()) return false;
    used += bytes;
    return true;
  }
  void refund(uint64_t bytes) override {
    EXPECT_LE(bytes, used.load());
    used -= bytes;
  }
  State query() override { return {kMemory, used.load()}; }
  bool charge_host(uint64_t bytes) override {
    if (bytes > kHostMemory - host_used.load()) return false;
    host_used += bytes;
    return true;
  }
  void refund_host(uint64_t bytes) override {
    EXPECT_LE(bytes, host_used.load());
    host_used -= bytes;
  }
  bool bear(uint64_t bytes) override {
    if (bytes > kBorne - borne.load()) return false;
    borne += bytes;
    return true;
  }
  void refund_borne(uint64_t bytes) override {
    EXPECT_LE(bytes, borne.load());
    borne -= bytes;
  }
  std::atomic<uint64_t> used{0}, host_used{0}, borne{0};
};

// What the driver says that it holds, for tests in which it takes memory by itself.
class ToldUsage final : public worker::DeviceUsage {
 public:
  std::optional<uint64_t> bytes() override { return held.load(); }
  std::atomic<uint64_t> held{0};
};

struct Reply {
  uint64_t call = 0;
  CUresult status = CUDA_SUCCESS;
  bool more = false;
  std::vector<uint8_t> body, bulk;
};

struct Event {
  wire::EventKind kind{};
  uint32_t context = 0;
  std::vector<uint8_t> body;
};

inline worker::Driver& quiet_driver() {
  static std::unique_ptr<worker::Driver> driver = [] {
    std::string why;
    auto loaded = worker::Driver::load(GPUPOOL_QUIET_DIRECTORY, &why);
    EXPECT_NE(loaded, nullptr) << why;
    return loaded;
  }();
  return *driver;
}

class Served {
 public:
  explicit Served(uint64_t arena_base = kArenaBase, worker::DeviceUsage* usage = nullptr) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    if (getenv("GPUPOOL_TEST_RINGS") != nullptr) {
      std::string why;
      ring = carriers::make_ring_memfd({}, kEpoch, &why);
      EXPECT_GE(ring, 0) << why;
    }
    carrier = carrier_of(ends[0], carriers::RingSide::kClient);
    writer = std::make_unique<wire::FrameWriter>(*carrier, kEpoch);
    reader = std::make_unique<wire::FrameReader>(*carrier, kEpoch);
    worker::Assignment assignment;
    assignment.epoch = kEpoch;
    assignment.minor = wire::kProtocolMinor;
    assignment.initial_credit = wire::kInitialCredit;
    assignment.arena_base = arena_base;
    assignment.arena_bytes = kArenaBytes;
    assignment.usage = usage;
    session = std::make_unique<worker::Session>(carrier_of(ends[1], carriers::RingSide::kWorker),
                                                assignment, quiet_driver(), account);
    thread = std::thread([this] {
      outcome = session->run();
      session.reset();  // closes the connection, gives everything back
      ended = true;
    });
  }
  ~Served() {
    end();
    if (ring >= 0) close(ring);
  }

  // All these tests also run over a ring (GPUPOOL_TEST_RINGS, see CMakeLists.txt).
  std::unique_ptr<carriers::Carrier> carrier_of(int end, carriers::RingSide side) {
    if (ring < 0) return carriers::make_socket_carrier(end);
    std::string why;
    return carriers::make_ring_carrier(carriers::map_ring(ring, {}, &why), {}, side, kEpoch,
                                       carriers::make_socket_bell(end));
  }
  int ring = -1;

  worker::SessionOutcome end() {
    if (thread.joinable()) {
      carrier->shutdown();
      thread.join();
    }
    return outcome;
  }

  // Appends one command; `fill(Encoder&)`.
  template <typename Fill>
  uint64_t add(uint16_t operation, size_t body_bytes, bool wants_reply, Fill&& fill,
               int bulk_count = 0, uint32_t context = 1) {
    const size_t bytes = sizeof(wire::CommandHeader) + (wants_reply ? 8 : 0) + body_bytes;
    const size_t at = batch.size();
    batch.resize(at + bytes);
    const uint64_t call = wants_reply ? next_call++ : 0;
    const wire::CommandHeader header{static_cast<uint32_t>(bytes),
                                     operation,
                                     static_cast<uint8_t>(wants_reply ? wire::kWantsReply : 0),
                                     static_cast<uint8_t>(bulk_count),
                                     1,
                                     context};
    memcpy(batch.data() + at, &header, sizeof header);
    if (wants_reply) memcpy(batch.data() + at + sizeof header, &call, 8);
    wire::Encoder encoder(batch.data() + at + bytes - body_bytes);
    fill(encoder);
    return call;
  }
  template <typename Fill>
  uint64_t add(wire::Operation operation, size_t body_bytes, bool wants_reply, Fill&& fill,
               int bulk_count = 0, uint32_t context = 1) {
    return add(static_cast<uint16_t>(operation), body_bytes, wants_reply, fill, bulk_count,
               context);
  }

  bool send(const std::vector<carriers::Part>& bulk = {}) {
    const bool ok =
        writer->send(wire::FrameKind::kCommands, batch.data(), static_cast<uint32_t>(batch.size()),
                     bulk.data(), static_cast<int>(bulk.size()), 0, wire::kUnlimitedCredit, [this] {
                       carrier->wait(carriers::kWritable, 1000000);
                       return true;
                     });
    batch.clear();
    return ok;
  }

  // Reads frames until the call's last reply; false: the session has ended (refusal says why).
  bool wait(uint64_t call, Reply* reply) {
    *reply = Reply{};
    for (;;) {
      while (!replies.empty()) {
        Reply next = std::move(replies.front());
        replies.pop_front();
        EXPECT_EQ(next.call, call);
        reply->call = next.call;
        reply->status = next.status;
        reply->body.insert(reply->body.end(), next.body.begin(), next.body.end());
        reply->bulk.insert(reply->bulk.end(), next.bulk.begin(), next.bulk.end());
        if (!next.more) return true;
      }
      if (!read_frame()) return false;
    }
  }

  bool read_frame() {
    if (reader->next(true) != wire::FrameReader::Result::kFrame) return false;
    const wire::FrameHeader header = reader->header();
    std::vector<uint8_t> body(reader->body(), reader->body() + header.body_bytes);
    std::vector<std::vector<uint8_t>> bulk;
    for (int i = 0; i < header.bulk_count; i++) {
      bulk.emplace_back(reader->segments()[i]);
      for (size_t done = 0; done < bulk.back().size();) {
        const auto moved =
            reader->read_bulk(bulk.back().data() + done, bulk.back().size() - done, true);
        if (moved.status != carriers::Status::kOk) return false;
        done += moved.bytes;
      }
    }
    size_t segment = 0;
    for (size_t at = 0; at < body.size();) {
      if (header.kind == static_cast<uint16_t>(wire::FrameKind::kReplies)) {
        wire::ReplyHeader head;
        memcpy(&head, body.data() + at, sizeof head);
        Reply reply{head.call,
                    static_cast<CUresult>(head.status),
                    (head.flags & wire::kMoreFollows) != 0,
                    {body.begin() + static_cast<long>(at + sizeof head),
                     body.begin() + static_cast<long>(at + head.bytes)},
                    {}};
        for (int i = 0; i < head.bulk_count; i++) {
          reply.bulk.insert(reply.bulk.end(), bulk[segment].begin(), bulk[segment].end());
          segment++;
        }
        replies.push_back(std::move(reply));
        at += head.bytes;
      } else if (header.kind == static_cast<uint16_t>(wire::FrameKind::kEvents)) {
        wire::EventHeader head;
        memcpy(&head, body.data() + at, sizeof head);
        events.push_back({static_cast<wire::EventKind>(head.kind),
                          head.context,
                          {body.begin() + static_cast<long>(at + sizeof head),
                           body.begin() + static_cast<long>(at + head.bytes)}});
        at += head.bytes;
      } else {
        if (header.kind == static_cast<uint16_t>(wire::FrameKind::kRefused)) {
          uint32_t head[2];
          memcpy(head, body.data(), sizeof head);
          refusal.assign(reinterpret_cast<char*>(body.data()) + 8, head[1]);
        }
        break;
      }
    }
    return true;
  }

  // The commands that most tests begin with.
  CUresult create_context(uint32_t index = 1) {
    const wire::ContextCreate body{{index, 1}, 0, index == 1 ? 1u : 0u, kArenaBase, kArenaBytes};
    const uint64_t call = add(
        wire::Operation::kCtxCreateV4, sizeof body, true,
        [&](wire::Encoder& encoder) { encoder.put(body); }, 0, index);
    Reply reply;
    if (!send() || !wait(call, &reply)) return CUDA_ERROR_UNKNOWN;
    return reply.status;
  }
  CUresult allocate(uint64_t bytes, uint64_t* address) {
    const uint64_t call = add(wire::Operation::kMemAllocV2, 8, true,
                              [&](wire::Encoder& encoder) { encoder.scalar(bytes); });
    Reply reply;
    if (!send() || !wait(call, &reply)) return CUDA_ERROR_UNKNOWN;
    if (reply.status == CUDA_SUCCESS) memcpy(address, reply.body.data(), 8);
    return reply.status;
  }
  CUresult synchronize() {
    const uint64_t call = add(wire::Operation::kCtxSynchronize, 0, true, [](wire::Encoder&) {});
    Reply reply;
    if (!send() || !wait(call, &reply)) return CUDA_ERROR_UNKNOWN;
    return reply.status;
  }

  CountingAccount account;
  std::unique_ptr<carriers::Carrier> carrier;
  std::unique_ptr<wire::FrameWriter> writer;
  std::unique_ptr<wire::FrameReader> reader;
  std::unique_ptr<worker::Session> session;
  std::thread thread;
  worker::SessionOutcome outcome;
  std::atomic<bool> ended{false};
  std::vector<uint8_t> batch;
  std::deque<Reply> replies;
  std::vector<Event> events;
  std::string refusal;
  uint64_t next_call = 1;
};

}  // namespace gpupool::test
