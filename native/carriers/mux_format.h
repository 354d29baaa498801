// What travels on a port that many connections share: the layout of the multiplexer's frames. All
// numbers are little-endian. doc/protocol.md says how they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gpupool::carriers {

constexpr uint16_t kMuxVersion = 1;
constexpr uint16_t kMuxVersionMin = 1;

enum class MuxKind : uint16_t {
  kHello = 1,   // MuxHello; channel 0
  kOpen = 2,    // guest to host: a new channel; numbers only ever rise within an epoch
  kAccept = 3,  // host to guest
  kData = 4,    // 1 to kMuxMaxData bytes
  kCredit = 5,  // MuxCredit
  kEnd = 6,     // the sender sends no more on this channel
  kClose = 7,   // the channel is over in both directions; a sentence
  kInfo = 8,    // host to guest, channel 0: JSON about the port's lease
};

struct MuxHeader {
  uint32_t epoch;    // the low half of the guest's; kMuxHelloEpoch: this is a hello
  uint32_t channel;  // from 1
  uint16_t kind;     // MuxKind
  uint16_t reserved;
  uint32_t length;  // of what follows
};
static_assert(sizeof(MuxHeader) == 16 && std::is_trivially_copyable_v<MuxHeader>);

constexpr uint32_t kMuxHelloEpoch = 0x584D5047;  // "GPMX"
constexpr uint32_t kMuxMaxData = 32 * 1024;
constexpr uint32_t kMuxMaxText = 512;   // of a kClose
constexpr uint32_t kMuxMaxInfo = 8192;  // of a kInfo

// Zero bytes that end whatever frame an earlier process left cut off in the stream.
constexpr size_t kMuxFillerBytes = sizeof(MuxHeader) + kMuxMaxData;

// A reader that lost its place looks for the header and the magic of a hello.
constexpr uint8_t kMuxMagic[16] = {0x9d, 'g', 'p', 'u', 'p',  'o',  'o',  'l',
                                   0xe3, 'm', 'u', 'x', 0x0d, 0x0a, 0x1a, 0xf7};

struct MuxHello {
  uint8_t magic[16];
  uint64_t epoch;        // the sender's, random; a new one whenever it begins anew
  uint64_t echo;         // of the hello that this answers; 0: it asks for one
  uint16_t version_min;  // what the sender speaks
  uint16_t version_max;
  uint16_t version;     // an answer: what is spoken from now on; 0: none in common
  uint16_t text_bytes;  // an answer with version 0: a sentence
  char text[88];
};
static_assert(sizeof(MuxHello) == 128 && std::is_trivially_copyable_v<MuxHello>);

struct MuxCredit {
  uint64_t limit;  // bytes of data that may have been sent on the channel in all
};

// What may be sent on a new channel before the first credit.
constexpr uint64_t kMuxFirstCredit = 64 * 1024;
// No side grants more at once.
constexpr uint64_t kMuxMaxWindow = 16ull << 20;

}  // namespace gpupool::carriers
