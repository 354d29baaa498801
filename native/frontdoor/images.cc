#include "frontdoor/images.h"

#include <lz4.h>
#include <string.h>
#include <zstd.h>

#include <algorithm>

#include "frontdoor/cubin.h"
#include "frontdoor/own_memory.h"
#include "frontdoor/ptx_scan.h"

namespace gpupool::frontdoor {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243B1;
constexpr uint32_t kFatbinMagic = 0xBA55ED50;

// nvcc's wrapper. Version 2 (relocatable device code): `parts` is an array of fat binaries that
// ends with a null pointer, all of which are linked.
struct Wrapper {
  uint32_t magic, version;
  const void* fatbin;
  const void* const* parts;
};
static_assert(sizeof(Wrapper) == 24);

struct FatbinHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // that follow the header
};
static_assert(sizeof(FatbinHeader) == 16);

struct EntryHeader {
  uint16_t kind;  // EntryKind
  uint16_t version;
  uint32_t header_bytes;      // where the payload begins; it grew over the years
  uint64_t payload_bytes;     // padded to 8
  uint32_t compressed_bytes;  // 0: not compressed
  uint32_t options_offset;
  uint16_t minor, major;
  uint32_t architecture;
  uint32_t name_offset, name_bytes;
  uint64_t flags;
  uint64_t zero;
  uint64_t raw_bytes;
};
static_assert(sizeof(EntryHeader) == 64);

enum EntryKind : uint16_t { kEntryPtx = 1, kEntryElf = 2 };
constexpr uint64_t kFlagLz4 = 0x2000, kFlagZstd = 0x8000;

template <typename T>
bool read(Bytes data, size_t at, T* value) {
  if (at > data.size() || data.size() - at < sizeof *value) return false;
  memcpy(value, data.data() + at, sizeof *value);
  return true;
}

// `own`: the program's own memory, which may end before the data does.
CUresult read_fatbin(Bytes data, bool own, std::vector<Candidate>* part) {
  FatbinHeader header;
  if (!read(data, 0, &header) || header.magic != kFatbinMagic ||
      header.header_bytes < sizeof header || header.header_bytes > data.size() ||
      header.bytes > data.size() - header.header_bytes) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  Bytes rest = data.subspan(header.header_bytes, header.bytes);
  while (rest.size() >= sizeof(EntryHeader)) {
    EntryHeader entry;
    if (own && !can_read(rest.data(), sizeof entry)) return CUDA_ERROR_INVALID_IMAGE;
    read(rest, 0, &entry);
    if (entry.header_bytes < sizeof entry || entry.header_bytes > rest.size() ||
        entry.payload_bytes > rest.size() - entry.header_bytes || part->size() >= kMaxCandidates) {
      return CUDA_ERROR_INVALID_IMAGE;
    }
    Candidate candidate;
    candidate.own_memory = own;
    candidate.kind = entry.kind == kEntryPtx   ? CodeKind::kPtx
                     : entry.kind == kEntryElf ? CodeKind::kCubin
                                               : CodeKind::kOther;
    candidate.architecture = entry.architecture <= 10000 ? static_cast<int>(entry.architecture) : 0;
    candidate.stored = rest.subspan(entry.header_bytes, entry.payload_bytes);
    candidate.raw_bytes = entry.payload_bytes;
    if (entry.compressed_bytes != 0 && (entry.flags & (kFlagLz4 | kFlagZstd)) != 0) {
      if (entry.compressed_bytes > entry.payload_bytes) return CUDA_ERROR_INVALID_IMAGE;
      candidate.stored = candidate.stored.first(entry.compressed_bytes);
      candidate.compression =
          (entry.flags & kFlagZstd) != 0 ? Compression::kZstd : Compression::kLz4;
      candidate.raw_bytes = entry.raw_bytes;
    }
    if (entry.name_bytes != 0 && entry.name_offset <= entry.header_bytes &&
        entry.name_bytes <= entry.header_bytes - entry.name_offset &&
        (!own || can_read(rest.data() + entry.name_offset, entry.name_bytes))) {
      const char* name = reinterpret_cast<const char*>(rest.data()) + entry.name_offset;
      candidate.name = std::string_view(name, strnlen(name, entry.name_bytes));
    }
    part->push_back(candidate);
    rest = rest.subspan(entry.header_bytes + entry.payload_bytes);
  }
  return CUDA_SUCCESS;
}

CUresult read_trusted_fatbin(const void* fatbin, std::vector<Candidate>* part) {
  FatbinHeader header;
  if (fatbin == nullptr || !can_read(fatbin, sizeof header)) return CUDA_ERROR_INVALID_IMAGE;
  memcpy(&header, fatbin, sizeof header);
  if (header.magic != kFatbinMagic || header.bytes > kMaxOffset) return CUDA_ERROR_INVALID_IMAGE;
  return read_fatbin({static_cast<const uint8_t*>(fatbin), header.header_bytes + header.bytes},
                     true, part);
}

Candidate elf_candidate(Bytes elf) {
  Candidate candidate;
  candidate.kind = CodeKind::kCubin;
  candidate.stored = elf;
  candidate.raw_bytes = elf.size();
  if (auto header = read_cubin_header(elf)) {
    candidate.architecture = header->architecture;
    if (header->relocatable) candidate.kind = CodeKind::kRelocatableCubin;
  } else {
    candidate.kind = CodeKind::kOther;
  }
  return candidate;
}

Candidate ptx_candidate(Bytes text) {
  Candidate candidate;
  candidate.kind = CodeKind::kPtx;
  candidate.stored = text;
  candidate.raw_bytes = text.size();
  return candidate;
}

// The beginning of the candidate's code, at most kLook bytes: choosing one must not unpack them
// all.
constexpr size_t kLook = 64 * 1024;
bool look_into(const Candidate& candidate, std::vector<uint8_t>* start) {
  const Bytes stored = candidate.stored;
  const size_t bytes = std::min<uint64_t>(candidate.raw_bytes, kLook);
  const uint64_t needed = candidate.compression == Compression::kNone ? bytes : stored.size();
  if (candidate.own_memory && !can_read(stored.data(), needed)) return false;
  start->resize(bytes);
  switch (candidate.compression) {
    case Compression::kNone:
      start->assign(stored.begin(), stored.begin() + static_cast<long>(bytes));
      return true;
    case Compression::kLz4: {
      if (stored.size() > INT32_MAX) return false;
      const int size = static_cast<int>(bytes);
      const int written = LZ4_decompress_safe_partial(reinterpret_cast<const char*>(stored.data()),
                                                      reinterpret_cast<char*>(start->data()),
                                                      static_cast<int>(stored.size()), size, size);
      if (written < 0) return false;
      start->resize(static_cast<size_t>(written));
      return true;
    }
    case Compression::kZstd: {
      ZSTD_DCtx* context = ZSTD_createDCtx();
      if (context == nullptr) return false;
      ZSTD_inBuffer in{stored.data(), stored.size(), 0};
      ZSTD_outBuffer out{start->data(), bytes, 0};
      size_t left = 1;
      while (out.pos < out.size && in.pos < in.size && left != 0 && !ZSTD_isError(left)) {
        left = ZSTD_decompressStream(context, &out, &in);
      }
      ZSTD_freeDCtx(context);
      start->resize(out.pos);
      return !ZSTD_isError(left);
    }
  }
  return false;
}

// The architecture of PTX text and whether it is bound to just that one (sm_90a), from .target.
bool ptx_target(const Candidate& candidate, int* architecture, bool* exact) {
  std::vector<uint8_t> text;
  if (!look_into(candidate, &text)) return false;
  const PtxTarget target =
      scan_ptx_target({reinterpret_cast<const char*>(text.data()), text.size()});
  *architecture = target.architecture;
  *exact = target.exact;
  return target.architecture != 0;
}

bool cubin_is_exact(const Candidate& candidate) {
  std::vector<uint8_t> start;
  if (!look_into(candidate, &start)) return true;
  auto header = read_cubin_header(start);
  return !header || header->exact;
}

}  // namespace

ImageKind classify(Bytes start) {
  uint32_t magic = 0;
  if (read(start, 0, &magic)) {
    if (magic == kWrapperMagic) return ImageKind::kWrapper;
    if (magic == kFatbinMagic) return ImageKind::kFatbin;
    if (magic == 0x464C457F) return ImageKind::kElf;
  }
  if (start.size() >= 7 && memcmp(start.data(), "\x7fTileIR", 7) == 0) return ImageKind::kTileIr;
  // PTX begins with a comment, white space or a directive.
  for (uint8_t c : start) {
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') continue;
    return c == '.' || c == '/' ? ImageKind::kPtx : ImageKind::kUnknown;
  }
  return ImageKind::kUnknown;
}

CUresult open_trusted(const void* image, Image* result) {
  *result = {};
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // Text may be shorter than the longest magic; a NUL ends it. No magic has a NUL in it.
  const auto* start = static_cast<const uint8_t*>(image);
  const size_t length = text_length(static_cast<const char*>(image));
  if (length == SIZE_MAX && !can_read(image, 1)) return CUDA_ERROR_INVALID_VALUE;
  size_t known = std::min<size_t>(length, 64);
  if (length == SIZE_MAX)
    while (!can_read(image, known)) --known;
  result->kind = classify({start, known});
  switch (result->kind) {
    case ImageKind::kWrapper: {
      Wrapper wrapper;
      if (!can_read(image, sizeof wrapper)) return CUDA_ERROR_INVALID_IMAGE;
      memcpy(&wrapper, image, sizeof wrapper);
      if (wrapper.version == 1) {
        return read_trusted_fatbin(wrapper.fatbin, &result->parts.emplace_back());
      }
      if (wrapper.version != 2 || wrapper.parts == nullptr) return CUDA_ERROR_INVALID_IMAGE;
      for (const auto* at = reinterpret_cast<const uint8_t*>(wrapper.parts);; at += sizeof(void*)) {
        const void* part;
        if (!can_read(at, sizeof part)) return CUDA_ERROR_INVALID_IMAGE;
        memcpy(&part, at, sizeof part);
        if (part == nullptr) break;
        if (result->parts.size() >= kMaxParts) return CUDA_ERROR_INVALID_IMAGE;
        CUresult error = read_trusted_fatbin(part, &result->parts.emplace_back());
        if (error != CUDA_SUCCESS) return error;
      }
      return result->parts.empty() ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
    }
    case ImageKind::kFatbin:
      return read_trusted_fatbin(image, &result->parts.emplace_back());
    case ImageKind::kElf: {
      const size_t bytes = trusted_cubin_bytes(image);
      if (bytes == 0) return CUDA_ERROR_INVALID_IMAGE;
      result->parts.push_back({elf_candidate({start, bytes})});
      result->parts[0][0].own_memory = true;
      return CUDA_SUCCESS;
    }
    case ImageKind::kPtx:
      if (length == SIZE_MAX) return CUDA_ERROR_INVALID_IMAGE;
      result->parts.push_back({ptx_candidate({start, length})});
      return CUDA_SUCCESS;
    case ImageKind::kTileIr:
      result->parts.emplace_back();
      return CUDA_SUCCESS;
    case ImageKind::kUnknown:
      break;
  }
  return CUDA_ERROR_INVALID_IMAGE;
}

CUresult open_bounded(Bytes image, Image* result) {
  *result = {};
  result->kind = classify(image);
  switch (result->kind) {
    case ImageKind::kFatbin:
      return read_fatbin(image, false, &result->parts.emplace_back());
    case ImageKind::kElf:
      if (!read_cubin_header(image)) return CUDA_ERROR_INVALID_IMAGE;
      result->parts.push_back({elf_candidate(image)});
      return CUDA_SUCCESS;
    case ImageKind::kPtx:
      result->parts.push_back({ptx_candidate(image)});
      return CUDA_SUCCESS;
    case ImageKind::kTileIr:
      result->parts.emplace_back();
      return CUDA_SUCCESS;
    case ImageKind::kWrapper:
    case ImageKind::kUnknown:
      break;
  }
  return CUDA_ERROR_INVALID_IMAGE;
}

CUresult select(const std::vector<Candidate>& part, const Selection& selection,
                const Candidate** best) {
  *best = nullptr;
  const int device = 10 * selection.major + selection.minor;
  int best_architecture = -1;
  for (const Candidate& candidate : part) {
    if (!selection.cubin ||
        (candidate.kind != CodeKind::kCubin && candidate.kind != CodeKind::kRelocatableCubin)) {
      continue;
    }
    const int architecture = candidate.architecture;
    if (architecture / 10 != selection.major || architecture > device ||
        architecture <= best_architecture)
      continue;
    if (architecture != device && cubin_is_exact(candidate)) continue;
    best_architecture = architecture;
    *best = &candidate;
  }
  if (*best != nullptr) return CUDA_SUCCESS;
  for (const Candidate& candidate : part) {
    if (!selection.ptx || candidate.kind != CodeKind::kPtx) continue;
    int architecture = candidate.architecture;
    bool exact = false;
    // An entry's header gives the architecture; only the text says whether it is bound to it.
    if (architecture == 0 ||
        (architecture >= 90 && architecture != device && architecture > best_architecture)) {
      if (!ptx_target(candidate, &architecture, &exact)) {
        // Broken text: let the compiler say what is wrong with it, if there is nothing better.
        architecture = 0;
      }
    }
    if (architecture > device || architecture <= best_architecture ||
        (exact && architecture != device))
      continue;
    best_architecture = architecture;
    *best = &candidate;
  }
  return *best != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

CUresult extract(const Candidate& candidate, uint64_t limit, std::vector<uint8_t>* code) {
  code->clear();
  if (candidate.raw_bytes > limit) return CUDA_ERROR_OUT_OF_MEMORY;
  const Bytes stored = candidate.stored;
  if (candidate.own_memory && !can_read(stored.data(), stored.size()))
    return CUDA_ERROR_INVALID_IMAGE;
  switch (candidate.compression) {
    case Compression::kNone:
      code->assign(stored.begin(), stored.end());
      break;
    case Compression::kLz4: {
      // LZ4 can't expand by more than 255; a larger claim would only cost memory.
      if (stored.size() > INT32_MAX || candidate.raw_bytes > INT32_MAX ||
          candidate.raw_bytes / 256 > stored.size()) {
        return CUDA_ERROR_INVALID_IMAGE;
      }
      code->resize(candidate.raw_bytes);
      const int written = LZ4_decompress_safe(
          reinterpret_cast<const char*>(stored.data()), reinterpret_cast<char*>(code->data()),
          static_cast<int>(stored.size()), static_cast<int>(code->size()));
      if (written < 0) {
        code->clear();
        return CUDA_ERROR_INVALID_IMAGE;
      }
      code->resize(written);
      break;
    }
    case Compression::kZstd: {
      if (ZSTD_getFrameContentSize(stored.data(), stored.size()) != candidate.raw_bytes) {
        return CUDA_ERROR_INVALID_IMAGE;
      }
      code->resize(candidate.raw_bytes);
      const size_t written =
          ZSTD_decompress(code->data(), code->size(), stored.data(), stored.size());
      if (ZSTD_isError(written) || written != code->size()) {
        code->clear();
        return CUDA_ERROR_INVALID_IMAGE;
      }
      break;
    }
  }
  if (candidate.kind == CodeKind::kPtx) {
    while (!code->empty() && code->back() == 0) code->pop_back();
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::frontdoor
