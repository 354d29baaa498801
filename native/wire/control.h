// The handshake at the start of every connection, and what travels on the control connection.
//
// A session has one control connection, which ends at the broker and lives as long as the client
// process, and one data connection for each slice that the program uses, which the broker hands to
// a worker after kWelcome. The lease's key never travels: both sides prove that they have it.
// A connection for the lease's status needs no session and is over after one answer.
//
//   client                                   broker
//   kHello   HelloBody                 ->
//                                      <-    kChallenge ChallengeBody
//   kProof   ProofBody                 ->
//                                      <-    kWelcome WelcomeBody (+ snapshots, offers)
//                                            | kRefused RefusedBody
//   u64, if a ring was offered         ->    1: the rest goes over the ring, 2: over this
//   connection
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gpupool::wire {

constexpr uint64_t kHelloMagic = 0x004C4F4F50555047;  // "GPUPOOL\0"
constexpr int kHandshakeTimeoutSeconds = 5;           // then the broker closes the connection

enum class ConnectionPurpose : uint16_t {
  kSession = 1,  // control connection: opens a session
  kDevice = 2,   // data connection of one slice of an open session
  kStatus = 3,   // opens no session: kWelcome as for kSession, then one kStatus, then the end
};

struct HelloBody {
  uint64_t magic;  // kHelloMagic
  uint16_t major;  // protocol versions that the client speaks
  uint16_t minor;
  uint16_t minor_min;
  uint16_t purpose;   // ConnectionPurpose
  uint8_t lease[16];  // the lease's uuid; 0: that which the socket stands for (the key is 0, too)
  uint8_t client_nonce[32];
  uint8_t session[16];  // kDevice: the session's id from its kWelcome; else 0
  uint32_t device;      // kDevice: ordinal of the slice in the lease; else 0
  uint32_t pid;         // of the client, for people; never trusted
  char program[64];     // the client's program name, for people; never trusted
  uint64_t arena_base;  // kDevice: the arena that the client reserved for this device's addresses
  uint64_t arena_bytes;
  // From minor version 2 on:
  uint32_t accepts;  // kDevice: AcceptedOffers that the client knows what to do with
  uint32_t reserved;
};
static_assert(sizeof(HelloBody) == 176);
constexpr size_t kFirstHelloBytes = offsetof(HelloBody, accepts);  // of minor version 1

enum AcceptedOffers : uint32_t {
  kAcceptsRing = 1,    // a ring in shared memory (doc/rings.md)
  kAcceptsRegion = 2,  // the same in a part of a virtual machine's region
};

struct ChallengeBody {
  uint16_t major;
  uint16_t minor;  // the version of this connection: the highest that both speak
  uint32_t reserved;
  uint8_t server_nonce[32];
};
static_assert(sizeof(ChallengeBody) == 40);

// HMAC-SHA256(lease key, "gpupool client 1" (16 bytes) | server_nonce | HelloBody)
struct ProofBody {
  uint8_t proof[32];
};

// proof: HMAC-SHA256(lease key, "gpupool server 1" (16 bytes) | client_nonce | server_nonce)
struct WelcomeBody {
  uint8_t proof[32];
  uint8_t session[16];
  uint32_t epoch;
  uint32_t device_count;    // kSession, kStatus: the number of DeviceSnapshots that follow
  uint64_t initial_credit;  // bytes that the client may send before the first credit
};
static_assert(sizeof(WelcomeBody) == 64);

// Follows all else in the kWelcome of a client that accepts something. With kRing the region's
// descriptor comes with the frame. With kRegion a RegionOffer follows; the descriptor is the
// guest's own, which its helper has given the client with the connection's first bytes.
struct CarrierOffer {
  uint32_t kind;     // OfferKind
  uint32_t version;  // of the region's layout
  uint32_t command_bytes;
  uint32_t bulk_bytes;
};
static_assert(sizeof(CarrierOffer) == 16);
enum class OfferKind : uint32_t { kNone = 0, kRing = 1, kRegion = 2 };

struct RegionOffer {
  uint64_t offset;  // of the ring in the region
  uint64_t region_bytes;
};
static_assert(sizeof(RegionOffer) == 16);

// What the client needs to answer device queries by itself; follows WelcomeBody of a kSession.
constexpr uint32_t kAttributeCount = 160;
struct DeviceSnapshot {
  char name[256];
  uint8_t uuid[16];         // the slice's virtual UUID
  uint64_t memory_bytes;    // of the slice: cuDeviceTotalMem
  uint32_t driver_version;  // cuDriverGetVersion
  uint32_t compute_percent;
  int32_t attributes[kAttributeCount];  // by CUdevice_attribute; PCI ids are the slice's own
  int32_t stream_priority_least;
  int32_t stream_priority_greatest;
};
static_assert(sizeof(DeviceSnapshot) == 936 && std::is_trivially_copyable_v<DeviceSnapshot>);

// How the lease's slices do, for NVML. The body of a kStatus frame: StatusBody, slice_count times
// SliceStatus, process_count times ProcessStatus. A later version may append to each of them: the
// sizes are told, and what a reader does not know it skips.
struct StatusBody {
  uint32_t body_bytes;  // of this structure
  uint32_t slice_bytes;
  uint32_t slice_count;  // as many as DeviceSnapshots, in the same order
  uint32_t process_bytes;
  uint32_t process_count;   // at most kMaxStatusProcesses
  uint32_t reserved;        // 0
  char driver_version[32];  // of the host's driver, as its NVML says it; empty: not known
};
static_assert(sizeof(StatusBody) == 56);

struct SliceStatus {
  uint64_t memory_bytes;
  uint64_t used_bytes;     // by all sessions of the lease
  uint32_t busy_permille;  // of the device's time, in the last second or so; kNotMeasured
  uint32_t reserved;       // 0
};
static_assert(sizeof(SliceStatus) == 24);
constexpr uint32_t kNotMeasured = 0xffffffff;

// A process of the lease that uses a slice. The program's name is what it said of itself.
constexpr uint32_t kMaxStatusProcesses = 512;
struct ProcessStatus {
  uint32_t pid;     // as the process that asks would see it
  uint32_t device;  // ordinal of the slice in the lease
  uint64_t used_bytes;
  char program[32];
  uint32_t busy_permille;  // as that of the slice
  uint32_t reserved;       // 0
};
static_assert(sizeof(ProcessStatus) == 56);
constexpr uint32_t kFirstProcessStatusBytes = 48;  // without what was appended later

enum class RefusalCode : uint32_t {
  kBadFrame = 1,      // not a frame, or one that is out of order
  kVersion = 2,       // no protocol version in common
  kUnknownLease = 3,  // also a lease that has ended
  kProof = 4,         // wrong key
  kNoWorker = 5,      // the worker could not be started
  kLimit = 6,         // too many sessions
  kInternal = 7,
};

struct RefusedBody {
  uint32_t code;        // RefusalCode
  uint32_t text_bytes;  // length of the sentence that follows (UTF-8, padded to a multiple of 8)
};

}  // namespace gpupool::wire
