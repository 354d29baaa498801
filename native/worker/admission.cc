#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/admission.h"

#include <string.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "frontdoor/cubin.h"
#include "frontdoor/images.h"
#include "frontdoor/ptx_scan.h"
#include "wire/messages.h"

namespace gpupool::worker {
namespace {

using frontdoor::Bytes;
using frontdoor::ImageKind;

std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// What is behind the first NUL is no text.
void end_text(std::vector<uint8_t>* bytes) {
  bytes->erase(std::find(bytes->begin(), bytes->end(), 0), bytes->end());
  bytes->push_back(0);
}

bool sound_cubin(Bytes bytes) {
  return frontdoor::read_cubin_header(bytes) && frontdoor::elf_is_sound(bytes);
}

// An archive of object files ("!<arch>\n", then headers of 60 bytes in front of each member).
bool sound_archive(Bytes bytes) {
  constexpr std::string_view kMagic = "!<arch>\n";
  constexpr size_t kHeader = 60, kSizeAt = 48, kSizeDigits = 10;
  if (!text_of(bytes).starts_with(kMagic)) return false;
  Bytes rest = bytes.subspan(kMagic.size());
  while (!rest.empty()) {
    if (rest.size() < kHeader || rest[58] != '`' || rest[59] != '\n') return false;
    const std::string_view name = text_of(rest.first(16));
    std::string_view digits = text_of(rest.subspan(kSizeAt, kSizeDigits));
    digits = digits.substr(0, digits.find_last_not_of(' ') + 1);
    uint64_t size = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
    if (error != std::errc() || end != digits.data() + digits.size()) return false;
    rest = rest.subspan(kHeader);
    if (size > rest.size()) return false;
    // "/" and "//" are the archive's own tables; all else is an object file.
    const bool table = name.starts_with("/ ") || name.starts_with("// ") ||
                       name.starts_with("/SYM64/") || name.starts_with("__.SYMDEF");
    if (!table && !frontdoor::elf_is_sound(rest.first(size))) return false;
    rest = rest.subspan(std::min<uint64_t>(size + size % 2, rest.size()));
  }
  return true;
}

// The device's code of a fat binary: machine code first, then PTX.
CUresult open_fatbin(Bytes bytes, int major, int minor, const std::function<bool(uint64_t)>& take,
                     std::vector<LinkInput>* inputs) {
  frontdoor::Image image;
  if (const CUresult e = frontdoor::open_bounded(bytes, &image)) return e;
  if (image.kind != ImageKind::kFatbin) return CUDA_ERROR_INVALID_IMAGE;
  for (const bool cubin : {true, false}) {
    const frontdoor::Selection selection{major, minor, cubin, !cubin};
    const frontdoor::Candidate* best = nullptr;
    if (frontdoor::select(image.parts[0], selection, &best) != CUDA_SUCCESS) continue;
    if (best->raw_bytes > wire::kMaxImageBytes || !take(best->raw_bytes)) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    LinkInput input{cubin ? CU_JIT_INPUT_CUBIN : CU_JIT_INPUT_PTX, {}};
    if (const CUresult e = frontdoor::extract(*best, wire::kMaxImageBytes, &input.bytes)) return e;
    if (!cubin) end_text(&input.bytes);
    if (cubin && !sound_cubin(input.bytes)) return CUDA_ERROR_INVALID_IMAGE;
    inputs->push_back(std::move(input));
  }
  return inputs->empty() ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
}

}  // namespace

CUresult admit_image(std::vector<uint8_t> bytes, Code* code) {
  *code = {};
  frontdoor::ProgramInfo info;
  switch (frontdoor::classify({bytes.data(), bytes.size()})) {
    case ImageKind::kPtx:
      code->ptx = true;
      end_text(&bytes);
      code->variables_known =
          frontdoor::scan_ptx(text_of({bytes.data(), bytes.size() - 1}), &info, &code->why);
      code->variable_bytes = info.variable_bytes;
      break;
    case ImageKind::kElf:
      if (!sound_cubin(bytes) || !frontdoor::scan_cubin(bytes, &info)) {
        code->why = "the cubin is broken";
        return CUDA_ERROR_INVALID_IMAGE;
      }
      code->variables_known = true;
      code->variable_bytes = info.variable_bytes;
      break;
    default:
      code->why = "the image is neither PTX nor a cubin";
      return CUDA_ERROR_INVALID_IMAGE;
  }
  code->bytes = std::move(bytes);
  return CUDA_SUCCESS;
}

CUresult admit_link_input(CUjitInputType type, std::vector<uint8_t> bytes, int major, int minor,
                          const std::function<bool(uint64_t)>& take,
                          std::vector<LinkInput>* inputs) {
  inputs->clear();
  const Bytes view(bytes);
  switch (type) {
    case CU_JIT_INPUT_PTX:
      end_text(&bytes);
      break;
    case CU_JIT_INPUT_CUBIN:
    case CU_JIT_INPUT_OBJECT:
      switch (frontdoor::classify(view)) {
        case ImageKind::kElf:
          if (type == CU_JIT_INPUT_CUBIN ? !sound_cubin(view) : !frontdoor::elf_is_sound(view)) {
            return CUDA_ERROR_INVALID_IMAGE;
          }
          break;
        case ImageKind::kPtx:  // what some drivers' links make
          end_text(&bytes);
          break;
        case ImageKind::kFatbin:
          return open_fatbin(view, major, minor, take, inputs);
        default:
          return CUDA_ERROR_INVALID_IMAGE;
      }
      break;
    case CU_JIT_INPUT_FATBINARY:
      return open_fatbin(view, major, minor, take, inputs);
    case CU_JIT_INPUT_LIBRARY:
      if (!sound_archive(view)) return CUDA_ERROR_INVALID_IMAGE;
      break;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;  // NVVM, deprecated; and what is not known here
  }
  inputs->push_back({type, std::move(bytes)});
  return CUDA_SUCCESS;
}

}  // namespace gpupool::worker
