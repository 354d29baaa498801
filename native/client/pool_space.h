// The bookkeeping of a memory pool: chunks of device memory, and which pieces of them are free for
// which stream. It neither allocates nor frees device memory, and it does not lock.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace gpupool::client {

class PoolSpace {
 public:
  // Who may use a piece: all chunks of an owner (a context) are apart from those of others.
  using Owner = const void*;
  // A stream of the owner; kAnyStream: no work that was submitted can touch the piece any more.
  using StreamKey = uint64_t;
  static constexpr StreamKey kAnyStream = 0;
  static constexpr uint64_t kAlignment = 512;

  struct Chunk {
    uint64_t base = 0, bytes = 0;
    Owner owner = nullptr;
  };

  static uint64_t rounded(uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // A piece of rounded(bytes) that work submitted to `stream` from now on may use: the smallest
  // that fits. False: there is none.
  bool take(Owner owner, StreamKey stream, uint64_t bytes, uint64_t* address);
  // A chunk that is not in use at all.
  void add(const Chunk& chunk);
  // The piece is free for what comes later in `stream` (kAnyStream: for everybody), at this time.
  // False: no piece that was taken begins there.
  bool give(uint64_t address, StreamKey stream, uint64_t time);
  // Somebody has seen that the stream (kAnyStream: every stream of the owner) has done all that was
  // submitted until `time`: what was given until then is free for everybody.
  void observed(Owner owner, StreamKey stream, uint64_t time);
  // Takes out chunks of which nothing is in use, until at most `keep` bytes are left; `pending`:
  // also those of which nobody knows yet whether their streams are done with them.
  std::vector<Chunk> release(uint64_t keep, bool pending);
  // Takes out all chunks of an owner; returns the bytes of the pieces that were in use.
  uint64_t drop(Owner owner);

  uint64_t reserved() const { return reserved_; }
  bool empty() const { return chunks_.empty(); }

 private:
  struct Piece {
    uint64_t bytes = 0;
    uint64_t chunk = 0;  // its base
    bool free = false;
    StreamKey stream = kAnyStream;
    uint64_t time = 0;
  };
  using Pieces = std::map<uint64_t, Piece>;
  using FreeKey = std::tuple<Owner, StreamKey, uint64_t, uint64_t>;  // …, bytes, address

  FreeKey key_of(Pieces::const_iterator piece) const;
  void add_free(Pieces::iterator piece);  // joins it with its neighbours

  std::map<uint64_t, Chunk> chunks_;
  Pieces pieces_;
  std::set<FreeKey> free_;
  uint64_t reserved_ = 0;
};

}  // namespace gpupool::client
