// From an image to the PTX in it, and the JIT's options.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <charconv>

#include "frontdoor/images.h"
#include "simgpu/driver/module.h"

namespace gpupool::simgpu {
namespace {

// A line of its own in front of each part of a linked program: "//@gpupool-part BYTES NAME".
constexpr std::string_view kLinked = "// gpupool linked program\n";
constexpr std::string_view kPart = "//@gpupool-part ";

}  // namespace

std::string join_parts(const std::vector<SourceText>& parts) {
  std::string text(kLinked);
  for (const SourceText& part : parts) {
    std::string name = part.name;
    std::replace_if(name.begin(), name.end(), [](char c) { return c == '\n' || c == '\0'; }, '_');
    text +=
        std::string(kPart) + std::to_string(part.ptx.size()) + " " + name + "\n" + part.ptx + "\n";
  }
  return text;
}

bool split_parts(std::string_view text, std::vector<SourceText>* parts) {
  if (!text.starts_with(kLinked)) return false;
  text.remove_prefix(kLinked.size());
  while (text.starts_with(kPart)) {
    text.remove_prefix(kPart.size());
    size_t bytes = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
    size_t line = text.find('\n');
    if (error != std::errc() || line == std::string_view::npos || *end != ' ' ||
        bytes > text.size() - line - 1) {
      return false;
    }
    std::string name(end + 1, text.data() + line);
    parts->push_back({name, std::string(text.substr(line + 1, bytes))});
    text.remove_prefix(line + 1 + bytes);
    if (text.starts_with('\n')) text.remove_prefix(1);
  }
  return !parts->empty();
}

CUresult read_image(const void* pointer, const DeviceModel& model,
                    std::vector<SourceText>* sources) {
  frontdoor::Image image;
  GPUPOOL_TRY(frontdoor::open_trusted(pointer, &image));
  frontdoor::Selection selection;
  selection.major = model.cc_major;
  selection.minor = model.cc_minor;
  selection.cubin = false;  // machine code of a real GPU can't be executed
  for (const auto& part : image.parts) {
    const frontdoor::Candidate* best = nullptr;
    // Of a program in parts (relocatable device code), those that don't fit are left out: the
    // device runtime brings one for other cards.
    if (frontdoor::select(part, selection, &best) != CUDA_SUCCESS) continue;
    std::vector<uint8_t> code;
    GPUPOOL_TRY(frontdoor::extract(*best, frontdoor::kMaxRawBytes, &code));
    std::string text(code.begin(), code.end());
    if (split_parts(text, sources)) continue;
    std::string name(best->name);
    if (name.empty()) name = "ptx input";
    sources->push_back({name, std::move(text)});
  }
  return sources->empty() ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
}

CUresult result_of(LoadStatus status) {
  switch (status) {
    case LoadStatus::kOk:
      return CUDA_SUCCESS;
    case LoadStatus::kUnsupportedPtxVersion:
      return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    case LoadStatus::kOutOfMemory:
      return CUDA_ERROR_OUT_OF_MEMORY;
    case LoadStatus::kNoKernelImage:
      return CUDA_ERROR_NO_BINARY_FOR_GPU;
    case LoadStatus::kInvalidPtx:
    case LoadStatus::kUnresolvedSymbol:
      break;
  }
  return CUDA_ERROR_INVALID_PTX;
}

CUresult load(const std::vector<SourceText>& sources, const DeviceModel& model,
              std::shared_ptr<MemorySpace> memory, std::shared_ptr<Program>* program,
              std::string* log) {
  LoadResult result = load_program(sources, model, std::move(memory));
  if (log) *log = result.log;
  *program = std::move(result.program);
  return result_of(result.status);
}

CUresult JitOptions::read(unsigned count, const CUjit_option* options, void** values) {
  if (count && (!options || !values)) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned number = unsigned(reinterpret_cast<uintptr_t>(values[i]));
    switch (int(options[i])) {
      case CU_JIT_INFO_LOG_BUFFER:
        info_.buffer = static_cast<char*>(values[i]);
        break;
      case CU_JIT_ERROR_LOG_BUFFER:
        error_.buffer = static_cast<char*>(values[i]);
        break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        info_.size = &values[i], info_.capacity = number;
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        error_.size = &values[i], error_.capacity = number;
        break;
      case CU_JIT_WALL_TIME:
        wall_time_value_ = &values[i];
        break;
      default:
        if (int(options[i]) < 0 || int(options[i]) >= int(CU_JIT_NUM_OPTIONS)) {
          return CUDA_ERROR_INVALID_VALUE;
        }
    }
  }
  return CUDA_SUCCESS;
}

void JitOptions::write_log(Log& log, const std::string& text) {
  size_t used = 0;
  if (log.buffer && log.capacity) {
    used = std::min<size_t>(text.size(), log.capacity - 1);
    memcpy(log.buffer, text.data(), used);
    log.buffer[used] = 0;
    if (used) ++used;  // the size that comes back counts the NUL, when something was written
  }
  if (log.size) *log.size = reinterpret_cast<void*>(used);
}

void JitOptions::write(const std::string& info, const std::string& errors) {
  write_log(info_, info);
  write_log(error_, errors);
  if (wall_time_value_) {
    float milliseconds = 0;
    memcpy(wall_time_value_, &milliseconds, sizeof milliseconds);
  }
}

CUresult read_file(const char* path, std::vector<char>* bytes) {
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  FILE* file = fopen(path, "rbe");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  char chunk[65536];
  size_t n;
  while ((n = fread(chunk, 1, sizeof chunk, file)) > 0)
    bytes->insert(bytes->end(), chunk, chunk + n);
  bool failed = ferror(file);
  fclose(file);
  bytes->push_back(0);
  return failed ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_SUCCESS;
}

}  // namespace gpupool::simgpu
