// Builds fat binaries as nvcc lays them out, and reads the samples in data/.
#pragma once

#include <lz4.h>
#include <string.h>
#include <zstd.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace gpupool::frontdoor {

using Blob = std::vector<uint8_t>;

inline Blob sample(const std::string& name) {
  std::ifstream stream(std::string(GPUPOOL_TEST_DATA) + "/" + name, std::ios::binary);
  return Blob(std::istreambuf_iterator<char>(stream), {});
}

inline Blob bytes_of(const std::string& text) { return Blob(text.begin(), text.end()); }

enum class Packing { kPlain, kLz4, kZstd };

class FatbinBuilder {
 public:
  // kind: 1 PTX, 2 cubin. header_bytes: 64 or more, as different compilers write.
  FatbinBuilder& add(uint16_t kind, uint32_t architecture, const Blob& code, Packing packing,
                     uint32_t header_bytes = 64) {
    Blob payload = code;
    uint64_t flags = 0x11;
    if (packing == Packing::kZstd) {
      payload.resize(ZSTD_compressBound(code.size()));
      payload.resize(ZSTD_compress(payload.data(), payload.size(), code.data(), code.size(), 3));
      flags |= 0x8000;
    } else if (packing == Packing::kLz4) {
      payload.resize(LZ4_compressBound(static_cast<int>(code.size())));
      payload.resize(LZ4_compress_default(
          reinterpret_cast<const char*>(code.data()), reinterpret_cast<char*>(payload.data()),
          static_cast<int>(code.size()), static_cast<int>(payload.size())));
      flags |= 0x2000;
    }
    const uint32_t compressed =
        packing == Packing::kPlain ? 0 : static_cast<uint32_t>(payload.size());
    payload.resize((payload.size() + 7) / 8 * 8);
    put<uint16_t>(kind);
    put<uint16_t>(0x0101);
    put<uint32_t>(header_bytes);
    put<uint64_t>(payload.size());
    put<uint32_t>(compressed);
    put<uint32_t>(0);
    put<uint16_t>(3);
    put<uint16_t>(7);
    put<uint32_t>(architecture);
    put<uint32_t>(0);
    put<uint32_t>(0);
    put<uint64_t>(flags);
    put<uint64_t>(0);
    put<uint64_t>(packing == Packing::kPlain ? 0 : code.size());
    entries_.resize(entries_.size() + header_bytes - 64);
    entries_.insert(entries_.end(), payload.begin(), payload.end());
    return *this;
  }

  Blob build() const {
    Blob fatbin(16);
    const uint32_t magic = 0xBA55ED50;
    const uint16_t version = 1, header = 16;
    const uint64_t size = entries_.size();
    memcpy(&fatbin[0], &magic, 4);
    memcpy(&fatbin[4], &version, 2);
    memcpy(&fatbin[6], &header, 2);
    memcpy(&fatbin[8], &size, 8);
    fatbin.insert(fatbin.end(), entries_.begin(), entries_.end());
    return fatbin;
  }

 private:
  template <typename T>
  void put(T value) {
    const auto* start = reinterpret_cast<const uint8_t*>(&value);
    entries_.insert(entries_.end(), start, start + sizeof value);
  }
  Blob entries_;
};

}  // namespace gpupool::frontdoor
