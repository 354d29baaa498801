// What a worker, or a relay, and the broker say to each other: one packet per message on a
// SOCK_SEQPACKET pair (fd 3 of the worker). Both ends are of the same build. The broker trusts
// nothing that comes from a worker, since a hostile tenant may have taken it over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpupool::worker {

constexpr int kChannelFd = 3;

enum class MessageKind : uint32_t {
  // Broker to worker.
  kAssign = 1,   // payload: AssignPayload; with descriptors: the client's connection, the page of
                 // spinners if there is one, then the ring if one was offered; a relay's: followed
                 // by RelayPayload
  kAccount = 2,  // answer to kCharge or kQuery: value: 1 granted, 0 not; limit, used
  // Broker to the relay of a session from another host.
  kFarAssign = 3,  // payload: FarPayload; with the other relay's connection, the page of spinners
  kFarConnection =
      4,           // answer to kFarOpen: with a connection to the broker; none: the text says why
  kFarResume = 5,  // payload: its preamble; with a new connection, perhaps the other relay\'s
  kFarUsage = 6,   // value: bytes of the device that the session has, used: thousandths of its time
  // Worker to broker.
  kReady = 16,       // value: 1 the driver is loaded; 0 it is not, the text says why
  kSnapshot = 17,    // value: 1 payload: wire::DeviceSnapshot; 0 the text says why
  kCharge = 18,      // value: bytes; answered
  kRefund = 19,      // value: bytes; not answered
  kQuery = 20,       // answered
  kEnded = 21,       // value: 0 the client went, the normal end; text: the last word
  kChargeHost = 22,  // value: bytes of the host's memory; answered like kCharge
  kRefundHost = 23,  // value: bytes; not answered
  kCarrier = 24,     // value: 1 the client has taken the ring that it was offered, 0 it has not
  kBear = 25,        // value: bytes that the driver took, for which the slice has no room; answered
  kRefundBorne = 26,  // value: bytes; not answered
  kBusy = 27,         // value: thousandths of the device's time; not answered
  kUsage = 30,        // of a relay; as kFarUsage: what the session has on the other host
  kFarPeer = 28,      // text: the names in the other relay's certificate, a line each
  kFarOpen = 29,      // answered
};

// In front of every message; the payload or text follows.
struct MessageHeader {
  uint32_t kind;           // MessageKind
  uint32_t payload_bytes;  // that follow
  uint64_t value;
  uint64_t limit;
  uint64_t used;
};
static_assert(sizeof(MessageHeader) == 32);

struct AssignPayload {
  uint32_t epoch;
  uint16_t minor;
  uint16_t reserved;
  uint64_t initial_credit;
  uint64_t arena_base;
  uint64_t arena_bytes;
  uint64_t host_bytes;          // of the host's memory that the slice's sessions may take
  char session[40];             // in text, for the log
  uint32_t ring_command_bytes;  // 0: no ring was offered
  uint32_t ring_bulk_bytes;
  uint32_t spinners;  // sessions of this host that may spin at once
  uint32_t more;
  uint64_t ring_offset;      // in its file
  uint64_t ring_file_bytes;  // 0: a memfd with nothing but the ring
};
static_assert(sizeof(AssignPayload) == 112);

// Of a session whose slice is on another host.
struct RelayPayload {
  char peer[256];     // the host's name in its certificate
  char address[288];  // ADDRESS:PORT
  uint8_t lease[16];  // there
  uint8_t key[32];
  uint32_t interruption_ms;
  uint32_t pid;  // of the client, for people
  char program[64];
};
static_assert(sizeof(RelayPayload) == 664);

struct FarPayload {
  uint32_t interruption_ms;
  uint32_t spinners;
};

constexpr size_t kMaxPayload = 4096;

struct Message {
  MessageHeader header{};
  std::string payload;
  std::vector<int> fds;  // received with it; the receiver owns them
};

enum class ReceiveStatus { kMessage, kNothing, kClosed };

// False: the other side is gone, or (non-blocking) does not read.
bool send_message(int channel, MessageKind kind, uint64_t value, std::string_view payload = {},
                  const std::vector<int>& fds = {}, uint64_t limit = 0, uint64_t used = 0,
                  bool wait = true);
// One message. kClosed also for a packet that is not a message.
ReceiveStatus receive_message(int channel, Message* message, bool wait);

}  // namespace gpupool::worker
