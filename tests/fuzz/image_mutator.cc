// Mutations of containers: a field of a header gets a value that is nearly right, an entry's code
// is unpacked, changed and packed again in another way.
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using Random = std::minstd_rand;
using Blob = std::vector<uint8_t>;

constexpr size_t kHeader = 16, kEntry = 64;
constexpr size_t kMaxCode = 64 * 1024;

template <typename T>
T get(const Blob& blob, size_t at) {
  T value{};
  if (at + sizeof value <= blob.size()) memcpy(&value, &blob[at], sizeof value);
  return value;
}

template <typename T>
void put(Blob& blob, size_t at, T value) {
  if (at + sizeof value <= blob.size()) memcpy(&blob[at], &value, sizeof value);
}

// A size or offset in or about an image of this size.
uint64_t near(uint64_t old, size_t size, Random& random) {
  const uint64_t values[] = {0,
                             1,
                             old - 1,
                             old + 1,
                             old * 2,
                             old / 2,
                             size,
                             size - 1,
                             size + 1,
                             size - kHeader,
                             0x7f,
                             0xff,
                             0x7fff,
                             0xffff,
                             INT32_MAX,
                             uint64_t{INT32_MAX} + 1,
                             UINT32_MAX,
                             uint64_t{UINT32_MAX} + 1,
                             INT64_MAX,
                             UINT64_MAX,
                             uint64_t{0} - size,
                             random() % (size + 1)};
  return values[random() % std::size(values)];
}

void change_field(Blob& blob, size_t begin, size_t end, Random& random) {
  end = std::min(end, blob.size());
  if (begin + 8 > end) return;
  const size_t at = begin + random() % ((end - begin) / 2) * 2;
  switch (random() % 3) {
    case 0:
      return put(blob, at,
                 static_cast<uint16_t>(near(get<uint16_t>(blob, at), blob.size(), random)));
    case 1:
      return put(blob, at,
                 static_cast<uint32_t>(near(get<uint32_t>(blob, at), blob.size(), random)));
    default:
      return put(blob, at, near(get<uint64_t>(blob, at), blob.size(), random));
  }
}

Blob unpack(const uint8_t* stored, size_t bytes, uint64_t raw, uint64_t flags) {
  Blob code(std::min<uint64_t>(raw, kMaxCode));
  if ((flags & 0x8000) != 0) {
    const size_t written = ZSTD_decompress(code.data(), code.size(), stored, bytes);
    code.resize(ZSTD_isError(written) ? 0 : written);
  } else if ((flags & 0x2000) != 0) {
    const int written = LZ4_decompress_safe(reinterpret_cast<const char*>(stored),
                                            reinterpret_cast<char*>(code.data()),
                                            static_cast<int>(bytes), static_cast<int>(code.size()));
    code.resize(written < 0 ? 0 : static_cast<size_t>(written));
  } else {
    code.assign(stored, stored + bytes);
  }
  return code;
}

// One entry's code changed and packed in some way; all sizes are right again.
void change_code(Blob& blob, Random& random) {
  std::vector<size_t> entries;
  size_t at = kHeader;
  while (at + kEntry <= blob.size()) {
    const uint64_t header = get<uint32_t>(blob, at + 4), payload = get<uint64_t>(blob, at + 8);
    if (header < kEntry || payload > blob.size() || header + payload > blob.size() - at) break;
    entries.push_back(at);
    at += header + payload;
  }
  if (entries.empty()) return;
  at = entries[random() % entries.size()];
  const size_t header = get<uint32_t>(blob, at + 4), payload = get<uint64_t>(blob, at + 8);
  const uint32_t compressed = get<uint32_t>(blob, at + 16);
  uint64_t flags = compressed != 0 ? get<uint64_t>(blob, at + 40) : 0;
  Blob code =
      unpack(&blob[at + header], compressed != 0 ? std::min<size_t>(compressed, payload) : payload,
             get<uint64_t>(blob, at + 56), flags);
  const size_t room = code.size() + 256;
  size_t bytes = code.size();
  code.resize(room);
  bytes = LLVMFuzzerMutate(code.data(), bytes, room);
  code.resize(bytes);
  Blob packed = code;
  flags = 0x11;
  switch (random() % 3) {
    case 0:
      break;
    case 1:
      flags |= 0x8000;
      packed.resize(ZSTD_compressBound(code.size()));
      packed.resize(ZSTD_compress(packed.data(), packed.size(), code.data(), code.size(), 1));
      break;
    default:
      flags |= 0x2000;
      packed.resize(static_cast<size_t>(LZ4_compressBound(static_cast<int>(code.size()))));
      packed.resize(static_cast<size_t>(LZ4_compress_default(
          reinterpret_cast<const char*>(code.data()), reinterpret_cast<char*>(packed.data()),
          static_cast<int>(code.size()), static_cast<int>(packed.size()))));
  }
  const auto stored = static_cast<uint32_t>(packed.size());
  packed.resize((packed.size() + 7) / 8 * 8);
  put<uint64_t>(blob, at + 8, packed.size());
  put<uint32_t>(blob, at + 16, flags == 0x11 ? 0 : stored);
  put<uint64_t>(blob, at + 40, flags);
  put<uint64_t>(blob, at + 56, code.size());
  const auto begin = blob.begin() + static_cast<long>(at + header);
  const auto behind = blob.erase(begin, begin + static_cast<long>(payload));
  blob.insert(behind, packed.begin(), packed.end());
  put<uint64_t>(blob, 8, blob.size() - kHeader);
}

void mutate(Blob& blob, Random& random) {
  const uint32_t magic = get<uint32_t>(blob, 0);
  if (magic == 0xBA55ED50) {
    switch (random() % 3) {
      case 0:
        return change_field(blob, 0, kHeader + kEntry, random);
      case 1: {  // the same in some entry
        const size_t at = blob.size() < kHeader ? 0 : random() % (blob.size() / 8) * 8;
        return change_field(blob, at, at + kEntry, random);
      }
      default:
        return change_code(blob, random);
    }
  }
  if (magic == 0x464C457F) {
    const size_t sections = get<uint64_t>(blob, 40), segments = get<uint64_t>(blob, 32);
    switch (random() % 4) {
      case 0:
        return change_field(blob, 0, 64, random);
      case 1:
        return sections < blob.size() ? change_field(blob, sections, blob.size(), random) : void();
      case 2:
        return segments < blob.size() ? change_field(blob, segments, segments + 400, random)
                                      : void();
      default:
        return change_field(blob, 0, blob.size(), random);
    }
  }
  change_field(blob, 0, blob.size(), random);
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  Random random(seed | 1);
  if (random() % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  Blob blob(data, data + size);
  for (unsigned n = 1 + random() % 2; n > 0; --n) mutate(blob, random);
  const size_t kept = std::min(blob.size(), max_size);
  if (kept != 0) memcpy(data, blob.data(), kept);
  return kept;
}
