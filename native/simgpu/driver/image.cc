// From an image to the PTX in it, and the JIT's options.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "frontdoor/cubin.h"
#include "frontdoor/images.h"
#include "simgpu/driver/linked_text.h"
#include "simgpu/driver/module.h"
#include "simgpu/driver/stand_in.h"

namespace gpupool::simgpu {
namespace {

constexpr int kToldImages = 20;  // of a process

// Takes machine code where there is no PTX, and says so. CUDA_ERROR_NO_BINARY_FOR_GPU: nothing
// fits.
CUresult stand_in_for(const std::vector<frontdoor::Candidate>& part, const DeviceModel& model,
                      SourceText* source) {
  const frontdoor::Selection selection{model.cc_major, model.cc_minor, true, false};
  const frontdoor::Candidate* best = nullptr;
  GPUPOOL_TRY(frontdoor::select(part, selection, &best));
  std::vector<uint8_t> code;
  GPUPOOL_TRY(frontdoor::extract(*best, frontdoor::kMaxRawBytes, &code));
  frontdoor::ProgramInfo program;
  if (!frontdoor::scan_cubin(code, &program)) return CUDA_ERROR_INVALID_IMAGE;
  static std::atomic<int> told{0};
  if (++told <= kToldImages) {
    std::string line = "gpupool simulated GPU: an image without PTX: its " +
                       std::to_string(program.kernels.size()) + " kernels do nothing" +
                       (told == kToldImages ? "; further images are not told of\n" : "\n");
    ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
    (void)ignored;
  }
  *source = {"machine code", stand_in(program)};
  return CUDA_SUCCESS;
}

}  // namespace

uint32_t at_most(uint32_t a, uint32_t b) { return a && b ? std::min(a, b) : std::max(a, b); }

CUresult read_image(const void* pointer, const DeviceModel& model, const JitOptions& options,
                    std::vector<SourceText>* sources) try {
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
    if (frontdoor::select(part, selection, &best) != CUDA_SUCCESS) {
      if (!driver().machine.empty_kernels || options.prefer_ptx()) continue;
      SourceText source;
      CUresult status = stand_in_for(part, model, &source);
      if (status == CUDA_ERROR_NO_BINARY_FOR_GPU) continue;
      GPUPOOL_TRY(status);
      sources->push_back(std::move(source));
      continue;
    }
    std::vector<uint8_t> code;
    GPUPOOL_TRY(frontdoor::extract(*best, frontdoor::kMaxRawBytes, &code));
    std::string text(code.begin(), code.end());
    if (split_parts(text, sources)) continue;
    std::string name(best->name);
    if (name.empty()) name = "ptx input";
    sources->push_back({name, std::move(text)});
  }
  for (SourceText& source : *sources) {
    source.max_registers = at_most(source.max_registers, options.max_registers());
  }
  return sources->empty() ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
} catch (const std::bad_alloc&) {
  return CUDA_ERROR_OUT_OF_MEMORY;
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
              std::string* log) try {
  LoadResult result = load_program(sources, model, std::move(memory));
  if (log) *log = result.log;
  *program = std::move(result.program);
  return result_of(result.status);
} catch (const std::bad_alloc&) {
  return CUDA_ERROR_OUT_OF_MEMORY;
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
      case CU_JIT_MAX_REGISTERS:
        max_registers_ = number;
        break;
      case CU_JIT_FALLBACK_STRATEGY:
        prefer_ptx_ = number == unsigned(CU_PREFER_PTX);
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
