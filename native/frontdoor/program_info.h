// What a client has to know of device code to check a launch and to pass its arguments on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpupool::frontdoor {

struct ParameterLayout {
  uint32_t offset = 0;  // in the kernel's parameter block
  uint32_t bytes = 0;
};

struct KernelLayout {
  std::string name;
  std::vector<ParameterLayout> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t max_threads[3] = {0, 0, 0};       // .maxntid; 0: not given
  uint32_t required_threads[3] = {0, 0, 0};  // .reqntid; 0: not given
  uint32_t static_shared_bytes = 0;          // of a cubin's kernel; 0 for PTX
  uint32_t registers = 0;                    // of a cubin's kernel; 0 for PTX
};

struct GlobalLayout {
  std::string name;
  uint64_t bytes = 0;
  bool constant = false;
  bool managed = false;
};

struct ProgramInfo {
  int architecture = 0;  // 10 * major + minor that the code was made for
  std::vector<KernelLayout> kernels;
  std::vector<GlobalLayout> globals;
  // Device memory that all variables take together, at least: of every scope, each in units of 512
  // bytes or its alignment; UINT64_MAX when it is beyond all numbers.
  uint64_t variable_bytes = 0;

  // After kernels was filled: lets kernel() find them.
  void index_kernels() {
    by_name.resize(kernels.size());
    for (uint32_t i = 0; i < by_name.size(); ++i) by_name[i] = i;
    std::stable_sort(by_name.begin(), by_name.end(),
                     [this](uint32_t a, uint32_t b) { return kernels[a].name < kernels[b].name; });
  }
  const KernelLayout* kernel(std::string_view name) const {
    const auto at = std::lower_bound(
        by_name.begin(), by_name.end(), name,
        [this](uint32_t i, std::string_view wanted) { return kernels[i].name < wanted; });
    return at != by_name.end() && kernels[*at].name == name ? &kernels[*at] : nullptr;
  }

  std::vector<uint32_t> by_name;  // indices of kernels
};

constexpr uint32_t kMaxParameterBytes = 32764;  // CUDA's largest parameter block
constexpr size_t kMaxKernels = 1u << 16;        // in one program
constexpr size_t kMaxGlobals = 1u << 16;

}  // namespace gpupool::frontdoor
