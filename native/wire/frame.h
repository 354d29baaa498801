// The frames that travel between a client and its worker (and, at the start of a connection, the
// broker). One stream of bytes carries frames in both directions; see doc/protocol.md.
//
// Every integer is little-endian. Layouts are fixed: they never follow CUDA's structures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gpupool::wire {

constexpr uint32_t kFrameMagic = 0x46505047;  // "GPPF"
constexpr uint16_t kProtocolMajor = 0;
constexpr uint16_t kProtocolMinor = 2;     // what this build speaks
constexpr uint16_t kProtocolMinorMin = 1;  // the oldest minor version that this build serves

constexpr uint32_t kMaxFrameBody = 256 * 1024;     // commands, replies or events of one frame
constexpr uint32_t kMaxBulkSegments = 16;          // bulk segments of one frame
constexpr uint32_t kMaxBulkSegment = 1024 * 1024;  // bytes of one bulk segment
constexpr uint32_t kInlineDataLimit = 16 * 1024;   // data up to this size lies in the command

// Credit: a client may not send more than the worker has granted; the worker may send without limit
// (kUnlimitedCredit), since it only answers what the client has asked for and is about to read.
constexpr uint64_t kInitialCredit = 16 * 1024 * 1024;
constexpr uint64_t kUnlimitedCredit = ~0ull;

enum class FrameKind : uint16_t {
  kHello = 1,      // client to broker: control.h
  kChallenge = 2,  // broker to client
  kProof = 3,      // client to broker
  kWelcome = 4,    // broker to client: the connection may be used
  kRefused = 5,    // broker or worker to client: a code and a sentence; the connection ends
  kStatus = 6,     // broker to client: how the lease does, on a connection for that
  kCommands = 16,  // client to worker: a batch of commands
  kReplies = 17,   // worker to client: answers to commands that wanted one
  kEvents = 18,    // worker to client: printf output, sticky errors, host callbacks
  kCredit = 19,    // either way: nothing but the acknowledgement and credit of the header
  kControl = 32,   // client and broker, on the control connection after kWelcome
};

// Wire layout: FrameHeader, u32 sizes of the bulk segments (bulk_count of them, padded with one u32
// to a multiple of 8 bytes), body (body_bytes, a multiple of 8), then the bulk segments' bytes.
// A relay forwards a frame with the header and the list of segments alone.
struct FrameHeader {
  uint32_t magic;         // kFrameMagic
  uint16_t kind;          // FrameKind
  uint16_t bulk_count;    // bulk segments that follow the body
  uint32_t body_bytes;    // <= kMaxFrameBody, multiple of 8
  uint32_t epoch;         // the session's epoch, from kWelcome; another epoch's frames are refused
  uint64_t sequence;      // number of this frame in its direction, from 1; 0 in the handshake
  uint64_t acknowledged;  // highest sequence of the other direction that was taken in completely
  uint64_t credit;        // bytes (headers, bodies and bulk since the start) the peer may have sent
  uint64_t bulk_bytes;    // sum of the bulk segments
};
static_assert(sizeof(FrameHeader) == 48 && std::is_trivially_copyable_v<FrameHeader>);

enum CommandFlags : uint8_t {
  kWantsReply = 1,  // the body begins with the u64 call number that the reply repeats
};

// One command of a kCommands frame; commands are 8-byte aligned and follow one another.
// All commands of a session are executed as if in the order in which they stand in the stream.
struct CommandHeader {
  uint32_t bytes;      // header and body, multiple of 8
  uint16_t operation;  // append-only number, generated: wire/operations.h
  uint8_t flags;       // CommandFlags
  uint8_t bulk_count;  // the next segments of the frame are this command's, so that an unknown
                       // operation's can be skipped
  uint32_t thread;     // client thread: an index from 1, given by the client
  uint32_t context;    // wire id of the current context (index of its handle), 0: none
};
static_assert(sizeof(CommandHeader) == 16);

enum ReplyFlags : uint16_t {
  kMoreFollows = 1,  // the same call gets another reply (a long copy, in pieces)
};

// One answer of a kReplies frame. Its bulk data are the next `bulk_count` segments of the frame.
struct ReplyHeader {
  uint32_t bytes;       // header and body, multiple of 8
  uint16_t flags;       // ReplyFlags
  uint16_t bulk_count;  // segments of the frame that belong to this reply
  uint64_t call;        // the command's call number
  int32_t status;       // CUresult
  uint32_t reserved;    // 0
};
static_assert(sizeof(ReplyHeader) == 24);

enum class EventKind : uint16_t {
  kStickyError = 1,   // body: i32 CUresult, u32 0, u64 last sequence taken in; context: whose
  kPrintf = 2,        // body: u64 length, then bytes for the client's standard output
  kAsyncError = 3,    // body: i32 CUresult, u16 operation, u16 0: an unanswered command was refused
  kHostCallback = 4,  // body: HostFunctionCall (messages.h); the client answers with an operation
  kStandardError = 5,  // body: as kPrintf's, for the client's standard error
};

struct EventHeader {
  uint32_t bytes;     // header and body, multiple of 8
  uint16_t kind;      // EventKind
  uint16_t reserved;  // 0
  uint32_t context;   // wire id of the context concerned, 0: the session
  uint32_t thread;    // client thread concerned, 0: none
};
static_assert(sizeof(EventHeader) == 16);

// A handle as it travels: invented by the client, checked by the worker at every use.
// 0 is CUDA's null handle. For streams, index 1 and 2 with generation 0 are the legacy and the
// per-thread default stream; the client resolves the latter before it sends (per-thread streams are
// ordinary streams on the wire), so a worker refuses index 2.
struct Handle {
  uint32_t index = 0;       // position in the worker's table of this kind of object
  uint32_t generation = 0;  // changes each time an index is used again
};
static_assert(sizeof(Handle) == 8);

constexpr uint32_t kMaxHandleIndex = 1u << 20;  // objects of one kind in a session

}  // namespace gpupool::wire
