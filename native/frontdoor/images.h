// The formats in which device code comes: fat binaries (with or without their wrapper), cubins,
// PTX.
//
// An image either is the calling program's own (a pointer without a length: what its sizes lead to
// is read where there is memory), or came from somewhere else: then every offset and size in it is
// checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

using Bytes = std::span<const uint8_t>;

enum class ImageKind {
  kUnknown,
  kWrapper,  // what nvcc's host code registers: points to one or more fat binaries
  kFatbin,
  kElf,     // a cubin
  kPtx,     // text
  kTileIr,  // a newer form of NVIDIA's; nothing here can use it
};

// By the first bytes.
ImageKind classify(Bytes start);

enum class CodeKind { kPtx, kCubin, kRelocatableCubin, kOther };
enum class Compression { kNone, kLz4, kZstd };

// One piece of code of an image, as it lies there.
struct Candidate {
  CodeKind kind = CodeKind::kOther;
  int architecture = 0;  // 10 * major + minor of its compute capability; 0: look into it
  Compression compression = Compression::kNone;
  Bytes stored;             // points into the image
  uint64_t raw_bytes = 0;   // size when decompressed
  std::string_view name;    // the source file's, if the image tells
  bool own_memory = false;  // nobody but the image says that `stored` is there
};

// A program: of each part one candidate is taken, and all that were taken are linked.
struct Image {
  ImageKind kind = ImageKind::kUnknown;
  std::vector<std::vector<Candidate>> parts;
};

constexpr uint64_t kMaxRawBytes = 512u << 20;  // of one decompressed piece of code
constexpr size_t kMaxCandidates = 4096;        // in one part
constexpr size_t kMaxParts = 4096;

// For a pointer of the program's own, as cuModuleLoadData and cuLibraryLoadData get it.
// CUDA_ERROR_INVALID_IMAGE: it is nothing known or contradicts itself.
CUresult open_trusted(const void* image, Image* result);

// For bytes from anywhere. Never reads outside of them. A wrapper is refused: it holds pointers.
CUresult open_bounded(Bytes image, Image* result);

// What the code is allowed to be.
struct Selection {
  int major = 0, minor = 0;  // the device's compute capability
  bool cubin = true, ptx = true;
};

// The best candidate of a part: a cubin of the same major and the highest not higher minor version,
// else the newest PTX that is not newer than the device. CUDA_ERROR_NO_BINARY_FOR_GPU: none fits.
CUresult select(const std::vector<Candidate>& part, const Selection& selection,
                const Candidate** best);

// The candidate's code, decompressed; PTX without the NULs at its end. At most `limit` bytes:
// CUDA_ERROR_OUT_OF_MEMORY if it is larger; CUDA_ERROR_INVALID_IMAGE if it is broken.
CUresult extract(const Candidate& candidate, uint64_t limit, std::vector<uint8_t>* code);

}  // namespace gpupool::frontdoor
