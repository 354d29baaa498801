// Decoded functions: code, the layout of their register windows, call sites.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simgpu/exec/machine.h"
#include "simgpu/exec/video.h"
#include "simgpu/ptx/program.h"

namespace gpupool::simgpu::exec {

struct KernelCode;

struct ConstantRow {
  uint32_t offset = 0;
  uint32_t width = 4;  // bytes of an element
  uint64_t value = 0;
};

// Special registers that stay the same while a block runs.
struct SpecialRow {
  uint32_t offset = 0;
  ptx::SpecialRegister special = ptx::SpecialRegister::kCount;
  uint8_t component = 0;
  uint8_t width = 4;
  uint32_t pattern = 0;  // of these addresses, void when the row is filled again; 0: none
};

// A piece of parameter memory that a call copies between the two frames' local memory.
struct ParameterCopy {
  uint32_t caller = 0, callee = 0, bytes = 0;
};

struct CallSite {
  uint32_t function = ptx::kNoIndex;  // kNoIndex: through a pointer
  std::vector<ParameterCopy> arguments, results;
  std::vector<uint32_t> targets;  // allowed functions; empty: any
  uint32_t parameter_bytes = 0;   // of the callee's frame, as the caller understands it
  ptx::Builtin builtin = ptx::Builtin::kNone;
};

constexpr uint8_t kElsewhere = 31;

struct Code {
  std::string name;
  uint32_t function = 0;
  const ptx::FunctionBody* body = nullptr;
  KernelCode* kernel = nullptr;
  std::vector<Instruction> instructions;
  // Where lanes may wait, by instruction: a number for each basic block's start (several may share
  // one), kElsewhere for all other places.
  std::vector<uint8_t> stops;
  std::vector<CallSite> calls;
  std::vector<std::vector<int32_t>> branch_tables;  // instruction indices
  std::vector<VideoWork> videos;
  std::vector<ConstantRow> constants;
  std::vector<SpecialRow> specials;
  uint32_t window_bytes = 0;
  uint32_t live_words = 0;       // 32-bit registers alive at once, from the liveness
  uint32_t parameter_bytes = 0;  // at the start of the frame's local part (device functions)
  uint32_t frame_bytes = 0;      // of the frame's local part, all included
  uint32_t local_bytes = 0;      // of that, what the program declared
  bool moves_stack = false;      // alloca

  ~Code();
  std::byte* take_window() const;
  void give_window(std::byte* window) const;

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::byte*> free_;
};

// A kernel and the device functions it has called so far. Shared variables lie at offsets that
// differ between kernels, so each kernel decodes the functions for itself.
struct KernelCode {
  std::shared_ptr<ptx::LinkedProgram> program;
  uint32_t function = 0;
  ptx::SharedLayout shared;
  bool strict = false;  // the checks of strict mode are in its code
  std::unique_ptr<Code> entry;

  // Decoded at the first call; nullptr: refused (why).
  const Code* callee(uint32_t index, std::string* why);

 private:
  std::mutex mutex_;
  struct Slot {
    std::unique_ptr<Code> code;
    std::string why;
  };
  std::map<uint32_t, Slot> callees_;
};

// Decodes one function for a kernel. nullptr: `why` says which instruction isn't understood.
std::unique_ptr<Code> decode_function(KernelCode& kernel, uint32_t function, std::string* why);

// Where a call finds parameters in the callee's frame: results first, then arguments.
struct ParameterPlaces {
  std::vector<uint32_t> returns, parameters;
  uint32_t bytes = 0;
};
ParameterPlaces place_parameters(const std::vector<ptx::Parameter>& returns,
                                 const std::vector<ptx::Parameter>& parameters);

}  // namespace gpupool::simgpu::exec
