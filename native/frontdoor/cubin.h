// What can be read from a cubin (an ELF file for the GPU) without knowing its instructions: its
// architecture, its kernels with their parameters, its variables. Bounds-checked throughout.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "frontdoor/program_info.h"

namespace gpupool::frontdoor {

struct CubinHeader {
  int architecture = 0;      // 10 * major + minor
  bool exact = false;        // runs on this very compute capability only (sm_90a)
  bool relocatable = false;  // has to be linked first
};

// std::nullopt: not a 64-bit CUDA ELF file.
std::optional<CubinHeader> read_cubin_header(std::span<const uint8_t> elf);

// The length of a cubin that lies in the program's own memory, from its headers; 0: not a cubin.
size_t trusted_cubin_bytes(const void* elf);

// False: the file is broken. Of a broken file nothing is returned.
bool scan_cubin(std::span<const uint8_t> elf, ProgramInfo* info);

// True if every table, section, string, symbol and relocation that the file names lies in it, so
// that a reader that trusts the file stays inside. For CUDA's files, and host objects for a linker.
bool elf_is_sound(std::span<const uint8_t> elf);

// Device memory that loading the file takes for variables, at least: by its sections and by its
// segments, whichever is more, whatever its symbols say.
uint64_t cubin_variable_bytes(std::span<const uint8_t> elf);

}  // namespace gpupool::frontdoor
