#include "client/pool_space.h"

#include <algorithm>
#include <iterator>

namespace gpupool::client {

PoolSpace::FreeKey PoolSpace::key_of(Pieces::const_iterator piece) const {
  return {chunks_.at(piece->second.chunk).owner, piece->second.stream, piece->second.bytes,
          piece->first};
}

void PoolSpace::add_free(Pieces::iterator piece) {
  auto joins = [&](Pieces::const_iterator other) {
    return other->second.free && other->second.chunk == piece->second.chunk &&
           other->second.stream == piece->second.stream;
  };
  auto join = [&](Pieces::iterator first, Pieces::iterator second) {
    first->second.bytes += second->second.bytes;
    first->second.time = std::max(first->second.time, second->second.time);
    pieces_.erase(second);
  };
  if (const auto next = std::next(piece); next != pieces_.end() && joins(next)) {
    free_.erase(key_of(next));
    join(piece, next);
  }
  if (piece != pieces_.begin()) {
    const auto before = std::prev(piece);
    if (joins(before)) {
      free_.erase(key_of(before));
      join(before, piece);
      piece = before;
    }
  }
  piece->second.free = true;
  free_.insert(key_of(piece));
}

bool PoolSpace::take(Owner owner, StreamKey stream, uint64_t bytes, uint64_t* address) {
  const uint64_t need = rounded(bytes);
  auto best = free_.end();
  for (const StreamKey whose : {stream, kAnyStream}) {
    const auto found = free_.lower_bound({owner, whose, need, 0});
    if (found == free_.end() || std::get<0>(*found) != owner || std::get<1>(*found) != whose) {
      continue;
    }
    if (best == free_.end() || std::get<2>(*found) < std::get<2>(*best)) best = found;
    if (whose == kAnyStream) break;
  }
  if (best == free_.end()) return false;
  const auto piece = pieces_.find(std::get<3>(*best));
  free_.erase(best);
  const uint64_t left = piece->second.bytes - need;
  if (left != 0) {
    Piece rest = piece->second;
    rest.bytes = left;
    const auto at = pieces_.emplace(piece->first + need, rest).first;
    free_.insert(key_of(at));
  }
  piece->second.bytes = need;
  piece->second.free = false;
  *address = piece->first;
  return true;
}

void PoolSpace::add(const Chunk& chunk) {
  chunks_[chunk.base] = chunk;
  reserved_ += chunk.bytes;
  Piece piece;
  piece.bytes = chunk.bytes;
  piece.chunk = chunk.base;
  add_free(pieces_.emplace(chunk.base, piece).first);
}

bool PoolSpace::give(uint64_t address, StreamKey stream, uint64_t time) {
  const auto piece = pieces_.find(address);
  if (piece == pieces_.end() || piece->second.free) return false;
  piece->second.stream = stream;
  piece->second.time = time;
  add_free(piece);
  return true;
}

void PoolSpace::observed(Owner owner, StreamKey stream, uint64_t time) {
  std::vector<uint64_t> done;
  for (auto at = free_.lower_bound({owner, stream == kAnyStream ? kAnyStream + 1 : stream, 0, 0});
       at != free_.end() && std::get<0>(*at) == owner; ++at) {
    if (stream != kAnyStream && std::get<1>(*at) != stream) break;
    const uint64_t address = std::get<3>(*at);
    if (pieces_.at(address).time <= time) done.push_back(address);
  }
  for (const uint64_t address : done) {
    const auto piece = pieces_.find(address);
    free_.erase(key_of(piece));
    piece->second.free = false;
    piece->second.stream = kAnyStream;
    add_free(piece);
  }
}

std::vector<PoolSpace::Chunk> PoolSpace::release(uint64_t keep, bool pending) {
  std::vector<Chunk> released;
  for (auto at = chunks_.begin(); at != chunks_.end() && reserved_ > keep;) {
    const Chunk chunk = at->second;
    const auto first = pieces_.find(chunk.base);
    auto end = first;
    bool unused = true;
    for (; end != pieces_.end() && end->second.chunk == chunk.base; ++end) {
      unused = unused && end->second.free && (pending || end->second.stream == kAnyStream);
    }
    if (!unused) {
      ++at;
      continue;
    }
    for (auto piece = first; piece != end; ++piece) free_.erase(key_of(piece));
    pieces_.erase(first, end);
    reserved_ -= chunk.bytes;
    at = chunks_.erase(at);
    released.push_back(chunk);
  }
  return released;
}

uint64_t PoolSpace::drop(Owner owner) {
  uint64_t in_use = 0;
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    if (chunks_.at(piece->second.chunk).owner != owner) {
      ++piece;
      continue;
    }
    if (piece->second.free) {
      free_.erase(key_of(piece));
    } else {
      in_use += piece->second.bytes;
    }
    piece = pieces_.erase(piece);
  }
  std::erase_if(chunks_, [&](const auto& entry) {
    if (entry.second.owner != owner) return false;
    reserved_ -= entry.second.bytes;
    return true;
  });
  return in_use;
}

}  // namespace gpupool::client
