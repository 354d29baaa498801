// Device code in a container, or a cubin: what the client and the simulated driver read from the
// program's own memory, what a worker admits from a tenant, and what a driver takes apart again.
#include "frontdoor/images.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "frontdoor/cubin.h"
#include "frontdoor/ptx_scan.h"
#include "simgpu/driver/linked_text.h"
#include "worker/admission.h"

namespace gpupool {
namespace {

using frontdoor::Bytes;

constexpr size_t kMaxImage = 128 * 1024;
constexpr uint64_t kMaxCode = 4 << 20;  // of a candidate, is unpacked
constexpr int kSelections[][2] = {{7, 5}, {8, 0}, {8, 6}, {9, 0}, {12, 0}};

void check(bool right, const char* what) {
  if (right) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void read_code(Bytes code) {
  frontdoor::ProgramInfo info;
  if (frontdoor::scan_cubin(code, &info)) {
    for (const auto& kernel : info.kernels)
      for (const auto& p : kernel.parameters)
        check(p.offset + p.bytes <= frontdoor::kMaxParameterBytes, "a parameter beyond the block");
  }
  (void)frontdoor::elf_is_sound(code);
  (void)frontdoor::cubin_variable_bytes(code);
  std::string why;
  if (!frontdoor::scan_ptx(text_of(code), &info, &why)) check(!why.empty(), "no reason");
}

void read_candidates(const frontdoor::Image& image) {
  for (const auto& part : image.parts) {
    for (const auto& numbers : kSelections) {
      const frontdoor::Selection selection{numbers[0], numbers[1], true, true};
      const frontdoor::Candidate* best = nullptr;
      if (frontdoor::select(part, selection, &best) != CUDA_SUCCESS) continue;
      std::vector<uint8_t> code;
      const CUresult result = frontdoor::extract(*best, kMaxCode, &code);
      check(result == CUDA_SUCCESS || code.empty(), "code in spite of an error");
      check(code.size() <= kMaxCode, "more code than the limit");
      if (result == CUDA_SUCCESS) read_code(code);
    }
  }
}

// An image that ends where memory ends, as the program's own. What its sizes lead to must not be
// something of the sanitizer's, so that there is nothing for a long way.
class Edge {
  static constexpr size_t kNothing = size_t{1} << 40;

 public:
  Edge() {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    room_ = (kMaxImage / page_ + 1) * page_;
    void* at = mmap(nullptr, room_ + kNothing, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(at != MAP_FAILED && mprotect(at, room_, PROT_READ | PROT_WRITE) == 0, "no memory");
    begin_ = static_cast<uint8_t*>(at);
  }
  void* put(Bytes bytes) {
    uint8_t* at = begin_ + room_ - bytes.size();
    if (!bytes.empty()) memcpy(at, bytes.data(), bytes.size());
    return at;
  }

 private:
  size_t page_, room_;
  uint8_t* begin_;
};

void trusted(Bytes bytes) {
  static Edge edge;
  if (bytes.size() < 4) return;
  auto* at = static_cast<uint8_t*>(edge.put(bytes));
  if (frontdoor::classify(bytes) == frontdoor::ImageKind::kWrapper) {
    // Its pointers lead back into the image; the list of parts ends with the null pointer there.
    if (bytes.size() < 48) return;
    uint64_t words[4] = {reinterpret_cast<uint64_t>(at + 48), reinterpret_cast<uint64_t>(at + 24),
                         reinterpret_cast<uint64_t>(at + 48), 0};
    memcpy(at + 8, words, sizeof words);
  }
  frontdoor::Image image;
  if (frontdoor::open_trusted(at, &image) == CUDA_SUCCESS) read_candidates(image);
}

// What a worker would hand to its driver has to be sound.
void admitted(Bytes bytes) {
  worker::Code code;
  if (worker::admit_image({bytes.begin(), bytes.end()}, &code) == CUDA_SUCCESS) {
    check(!code.ptx || (!code.bytes.empty() && code.bytes.back() == 0), "text without an end");
    check(code.ptx || frontdoor::elf_is_sound(code.bytes), "an unsound cubin");
  } else {
    check(!code.why.empty(), "refused without a reason");
  }
  for (const CUjitInputType type : {CU_JIT_INPUT_PTX, CU_JIT_INPUT_CUBIN, CU_JIT_INPUT_OBJECT,
                                    CU_JIT_INPUT_FATBINARY, CU_JIT_INPUT_LIBRARY}) {
    uint64_t taken = 0;
    const auto take = [&taken](uint64_t more) {
      if (more > kMaxCode) return false;
      taken += more;
      return true;
    };
    std::vector<worker::LinkInput> inputs;
    const auto result =
        worker::admit_link_input(type, {bytes.begin(), bytes.end()}, 8, 0, take, &inputs);
    check((result == CUDA_SUCCESS) == !inputs.empty() || result != CUDA_SUCCESS, "no input");
    uint64_t held = 0;
    for (const auto& input : inputs) held += input.bytes.size();
    check(held <= taken + bytes.size() + 2, "more memory than was asked for");
  }
}

void linked_text(std::string_view text) {
  std::vector<simgpu::SourceText> parts;
  if (!simgpu::split_parts(text, &parts)) {
    check(parts.empty(), "a part of what can't be taken apart");
    parts.push_back({"a", std::string(text), 7});
    parts.push_back({"", "", 0});
  }
  const std::string joined = simgpu::join_parts(parts);
  std::vector<simgpu::SourceText> again;
  check(simgpu::split_parts(joined, &again), "what was joined can't be taken apart");
  check(again.size() == parts.size(), "another number of parts");
  for (size_t i = 0; i < parts.size(); ++i) check(again[i].ptx == parts[i].ptx, "another text");
}

}  // namespace
}  // namespace gpupool

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool;
  if (size > kMaxImage) return 0;
  const Bytes bytes(data, size);
  frontdoor::Image image;
  if (frontdoor::open_bounded(bytes, &image) == CUDA_SUCCESS) read_candidates(image);
  read_code(bytes);
  admitted(bytes);
  trusted(bytes);
  linked_text(text_of(bytes));
  return 0;
}
