#include "frontdoor/cubin.h"

#include <elf.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "frontdoor/own_memory.h"

namespace gpupool::frontdoor {
namespace {

constexpr uint16_t kMachineCuda = 190;

// Records of a .nv.info section: u8 format, u8 attribute, u16 value or size, then the payload.
enum InfoFormat : uint8_t { kNoValue = 1, kByteValue = 2, kHalfValue = 3, kSized = 4 };
enum InfoAttribute : uint8_t {
  kMaxThreads = 0x05,
  kRequiredThreads = 0x10,
  kParameter = 0x17,       // u32 index, u16 ordinal, u16 offset, u32 with the size above bit 18
  kParameterBytes = 0x19,  // of the whole block
};
constexpr uint32_t kMaxParameters = 4096;
constexpr uint8_t kEntryPoint = 0x10;        // in st_other
constexpr size_t kMaxNameBytes = 64 * 1024;  // a longer name is told by its beginning

// Sections may lie over one another, so that a short file has many long tables: a reader looks at
// no more bytes than a few files of this size have.
class Budget {
 public:
  explicit Budget(size_t file_bytes) : left_(4 * uint64_t{file_bytes} + 65536) {}
  bool take(uint64_t bytes) {
    if (bytes > left_) return false;
    left_ -= bytes;
    return true;
  }

 private:
  uint64_t left_;
};

class Elf {
 public:
  explicit Elf(std::span<const uint8_t> data) : data_(data) {}

  bool open() { return open_any() && header_.e_machine == kMachineCuda; }

  bool open_any() {
    if (!read(0, &header_) || memcmp(header_.e_ident, ELFMAG, SELFMAG) != 0 ||
        header_.e_ident[EI_CLASS] != ELFCLASS64 || header_.e_ident[EI_DATA] != ELFDATA2LSB) {
      return false;
    }
    sections_.resize(header_.e_shnum);
    for (size_t i = 0; i < sections_.size(); ++i) {
      if (header_.e_shentsize < sizeof(Elf64_Shdr) || header_.e_shoff > data_.size() ||
          !read(header_.e_shoff + i * header_.e_shentsize, &sections_[i])) {
        return false;
      }
    }
    return sections_.empty() || header_.e_shstrndx < sections_.size();
  }

  const Elf64_Ehdr& header() const { return header_; }
  const std::vector<Elf64_Shdr>& sections() const { return sections_; }
  std::string_view section_name(const Elf64_Shdr& section) const {
    return text(sections_[header_.e_shstrndx], section.sh_name);
  }

  std::span<const uint8_t> bytes(const Elf64_Shdr& section) const {
    if (section.sh_type == SHT_NOBITS || section.sh_offset > data_.size() ||
        section.sh_size > data_.size() - section.sh_offset) {
      return {};
    }
    return data_.subspan(section.sh_offset, section.sh_size);
  }

  bool segment(size_t index, Elf64_Phdr* segment) const {
    return header_.e_phentsize >= sizeof *segment && header_.e_phoff <= data_.size() &&
           read(header_.e_phoff + index * header_.e_phentsize, segment);
  }

  std::string_view text(const Elf64_Shdr& strings, uint64_t at) const {
    auto all = bytes(strings);
    if (at >= all.size()) return {};
    const char* start = reinterpret_cast<const char*>(all.data()) + at;
    return {start, strnlen(start, std::min(all.size() - at, kMaxNameBytes))};
  }

 private:
  template <typename T>
  bool read(uint64_t at, T* value) const {
    if (at > data_.size() || data_.size() - at < sizeof *value) return false;
    memcpy(value, data_.data() + at, sizeof *value);
    return true;
  }

  std::span<const uint8_t> data_;
  Elf64_Ehdr header_{};
  std::vector<Elf64_Shdr> sections_;
};

void read_three(std::span<const uint8_t> payload, uint32_t (&values)[3]) {
  memcpy(values, payload.data(), std::min(payload.size(), sizeof values));
}

bool read_kernel_info(std::span<const uint8_t> records, KernelLayout* kernel) {
  std::map<uint32_t, ParameterLayout> parameters;
  size_t at = 0;
  while (records.size() - at >= 4) {
    const uint8_t format = records[at], attribute = records[at + 1];
    uint16_t value;
    memcpy(&value, &records[at + 2], sizeof value);
    at += 4;
    if (format != kSized) {
      if (format < kNoValue || format > kHalfValue) return false;
      if (format == kHalfValue && attribute == kParameterBytes) kernel->parameter_bytes = value;
      continue;
    }
    if (value > records.size() - at) return false;
    const auto payload = records.subspan(at, value);
    at += value;
    if (attribute == kMaxThreads) read_three(payload, kernel->max_threads);
    if (attribute == kRequiredThreads) read_three(payload, kernel->required_threads);
    if (attribute == kParameter && value >= 12) {
      uint16_t ordinal, offset;
      uint32_t word;
      memcpy(&ordinal, &payload[4], sizeof ordinal);
      memcpy(&offset, &payload[6], sizeof offset);
      memcpy(&word, &payload[8], sizeof word);
      const uint32_t bytes = word >> 18;
      if (ordinal >= kMaxParameters || offset + bytes > kMaxParameterBytes) return false;
      parameters[ordinal] = {offset, bytes};
    }
  }
  uint32_t end = 0;
  for (const auto& [ordinal, parameter] : parameters) {
    if (ordinal != kernel->parameters.size()) return false;
    kernel->parameters.push_back(parameter);
    end = std::max(end, parameter.offset + parameter.bytes);
  }
  kernel->parameter_bytes = end;
  return true;
}

}  // namespace

std::optional<CubinHeader> read_cubin_header(std::span<const uint8_t> elf) {
  Elf64_Ehdr header;
  if (elf.size() < sizeof header) return std::nullopt;
  memcpy(&header, elf.data(), sizeof header);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_machine != kMachineCuda) {
    return std::nullopt;
  }
  CubinHeader result;
  // ABI version 8 (CUDA 13) has the architecture in bits 8 to 15, older ones in bits 0 to 7.
  const bool new_layout = header.e_ident[EI_ABIVERSION] >= 8;
  result.architecture =
      static_cast<int>(new_layout ? (header.e_flags >> 8) & 0xff : header.e_flags & 0xff);
  result.exact = (header.e_flags & (new_layout ? 0x8u : 0x800u)) != 0;
  result.relocatable = header.e_type == ET_REL;
  return result;
}

size_t trusted_cubin_bytes(const void* elf) {
  const auto* start = static_cast<const uint8_t*>(elf);
  Elf64_Ehdr header;
  if (!can_read(elf, sizeof header)) return 0;
  memcpy(&header, start, sizeof header);
  if (!read_cubin_header({start, sizeof header})) return 0;
  if (header.e_shoff > kMaxOffset || header.e_phoff > kMaxOffset) return 0;
  uint64_t end = sizeof header;
  end = std::max<uint64_t>(end, header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize);
  end = std::max<uint64_t>(end, header.e_phoff + uint64_t{header.e_phnum} * header.e_phentsize);
  if (header.e_shentsize < sizeof(Elf64_Shdr) && header.e_shnum != 0) return 0;
  if (!can_read(start + header.e_shoff, uint64_t{header.e_shnum} * header.e_shentsize)) return 0;
  for (uint16_t i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    memcpy(&section, start + header.e_shoff + uint64_t{i} * header.e_shentsize, sizeof section);
    if (section.sh_type == SHT_NOBITS) continue;
    if (section.sh_offset > kMaxOffset || section.sh_size > kMaxOffset) return 0;
    end = std::max<uint64_t>(end, section.sh_offset + section.sh_size);
  }
  return end;
}

bool scan_cubin(std::span<const uint8_t> data, ProgramInfo* info) {
  *info = {};
  Elf elf(data);
  if (!elf.open()) return false;
  ProgramInfo found;
  found.architecture = read_cubin_header(data)->architecture;
  found.variable_bytes = cubin_variable_bytes(data);
  Budget budget(data.size());
  std::map<std::string, KernelLayout, std::less<>> kernels;
  for (const Elf64_Shdr& section : elf.sections()) {
    const std::string_view name = elf.section_name(section);
    constexpr std::string_view kText = ".text.";
    if (section.sh_type != SHT_PROGBITS || !name.starts_with(kText)) continue;
    if (kernels.size() >= kMaxKernels || !budget.take(name.size())) return false;
    KernelLayout& kernel = kernels[std::string(name.substr(kText.size()))];
    kernel.name = name.substr(kText.size());
    kernel.registers = section.sh_info >> 24;
  }
  for (const Elf64_Shdr& section : elf.sections()) {
    const std::string_view name = elf.section_name(section);
    constexpr std::string_view kInfo = ".nv.info.", kShared = ".nv.shared.";
    if (name.starts_with(kInfo)) {
      auto kernel = kernels.find(name.substr(kInfo.size()));
      if (kernel == kernels.end()) continue;
      const auto records = elf.bytes(section);
      if (!budget.take(records.size()) || !read_kernel_info(records, &kernel->second)) return false;
    } else if (name.starts_with(kShared)) {
      auto kernel = kernels.find(name.substr(kShared.size()));
      if (kernel != kernels.end() && section.sh_size <= UINT32_MAX) {
        kernel->second.static_shared_bytes = static_cast<uint32_t>(section.sh_size);
      }
    }
  }
  // The symbol table tells kernels from device functions, and has the variables.
  std::map<std::string, bool, std::less<>> entries;
  for (const Elf64_Shdr& section : elf.sections()) {
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= elf.sections().size()) continue;
    const auto symbols = elf.bytes(section);
    const Elf64_Shdr& strings = elf.sections()[section.sh_link];
    if (!budget.take(symbols.size())) return false;
    for (size_t at = 0; symbols.size() - at >= sizeof(Elf64_Sym); at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      memcpy(&symbol, symbols.data() + at, sizeof symbol);
      const std::string_view name = elf.text(strings, symbol.st_name);
      if (!budget.take(name.size())) return false;
      if (name.empty() || symbol.st_shndx == SHN_UNDEF || symbol.st_shndx >= elf.sections().size())
        continue;
      const int type = ELF64_ST_TYPE(symbol.st_info);
      if (type == STT_FUNC && (symbol.st_other & kEntryPoint) != 0 && kernels.contains(name))
        entries.emplace(name, true);
      if (type != STT_OBJECT) continue;
      const std::string_view home = elf.section_name(elf.sections()[symbol.st_shndx]);
      const bool constant = home.starts_with(".nv.constant3");
      if (!constant && !home.starts_with(".nv.global")) continue;
      if (found.globals.size() >= kMaxGlobals) return false;
      found.globals.push_back({std::string(name), symbol.st_size, constant, false});
    }
  }
  for (auto& [name, kernel] : kernels) {
    if (entries.contains(name)) found.kernels.push_back(std::move(kernel));
  }
  found.index_kernels();
  *info = std::move(found);
  return true;
}

namespace {

// The names that a table of symbols has are within its table of strings, which ends with a NUL.
bool symbols_are_sound(const Elf& elf, const Elf64_Shdr& section) {
  const Elf64_Shdr& strings = elf.sections()[section.sh_link];
  const auto names = elf.bytes(strings);
  const auto symbols = elf.bytes(section);
  if (section.sh_entsize != sizeof(Elf64_Sym) || symbols.size() % sizeof(Elf64_Sym) != 0 ||
      strings.sh_type != SHT_STRTAB || section.sh_info > symbols.size() / sizeof(Elf64_Sym)) {
    return false;
  }
  for (size_t at = 0; at < symbols.size(); at += sizeof(Elf64_Sym)) {
    Elf64_Sym symbol;
    memcpy(&symbol, symbols.data() + at, sizeof symbol);
    if (symbol.st_name >= names.size()) return false;
    if (symbol.st_shndx >= SHN_LORESERVE || symbol.st_shndx == SHN_UNDEF) continue;
    if (symbol.st_shndx >= elf.sections().size()) return false;
    const Elf64_Shdr& home = elf.sections()[symbol.st_shndx];
    // Absolute addresses of a linked file are its sections' own; a size must fit all the same.
    if (symbol.st_size > home.sh_size) return false;
    if (elf.header().e_type == ET_REL && symbol.st_value > home.sh_size - symbol.st_size) {
      return false;
    }
  }
  return true;
}

template <typename Entry>
bool relocations_are_sound(const Elf& elf, const Elf64_Shdr& section) {
  const auto entries = elf.bytes(section);
  const Elf64_Shdr& symbols = elf.sections()[section.sh_link];
  if (section.sh_entsize != sizeof(Entry) || entries.size() % sizeof(Entry) != 0 ||
      section.sh_info >= elf.sections().size()) {
    return false;
  }
  const bool has_symbols = symbols.sh_type == SHT_SYMTAB || symbols.sh_type == SHT_DYNSYM;
  const uint64_t count = has_symbols ? symbols.sh_size / sizeof(Elf64_Sym) : 1;
  const uint64_t room = elf.sections()[section.sh_info].sh_size;
  for (size_t at = 0; at < entries.size(); at += sizeof(Entry)) {
    Entry entry;
    memcpy(&entry, entries.data() + at, sizeof entry);
    if (ELF64_R_SYM(entry.r_info) >= count) return false;
    if (section.sh_info != 0 && entry.r_offset >= room) return false;
  }
  return true;
}

void add(uint64_t* sum, uint64_t bytes) {
  if (__builtin_add_overflow(*sum, bytes, sum)) *sum = UINT64_MAX;
}

}  // namespace

bool elf_is_sound(std::span<const uint8_t> data) {
  Elf elf(data);
  if (!elf.open_any()) return false;
  const Elf64_Ehdr& header = elf.header();
  const auto& sections = elf.sections();
  if (sections.empty() && header.e_shoff != 0) return false;  // their number is elsewhere
  if (header.e_phnum == PN_XNUM) return false;
  for (size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    if (!elf.segment(i, &segment) || segment.p_offset > data.size() ||
        segment.p_filesz > data.size() - segment.p_offset) {
      return false;
    }
  }
  if (sections.empty()) return true;
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type == SHT_NULL) continue;
    if (section.sh_type != SHT_NOBITS &&
        (section.sh_offset > data.size() || section.sh_size > data.size() - section.sh_offset)) {
      return false;
    }
    if (section.sh_type == SHT_STRTAB && section.sh_size != 0 && elf.bytes(section).back() != 0) {
      return false;
    }
    if (section.sh_link >= sections.size()) return false;
  }
  const Elf64_Shdr& names = sections[header.e_shstrndx];
  if (names.sh_type != SHT_STRTAB) return false;
  Budget budget(data.size());
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_name >= names.sh_size) return false;
    const bool table = section.sh_type == SHT_SYMTAB || section.sh_type == SHT_DYNSYM ||
                       section.sh_type == SHT_RELA || section.sh_type == SHT_REL;
    if (table && !budget.take(section.sh_size)) return false;
    switch (section.sh_type) {
      case SHT_SYMTAB:
      case SHT_DYNSYM:
        if (!symbols_are_sound(elf, section)) return false;
        break;
      case SHT_RELA:
        if (!relocations_are_sound<Elf64_Rela>(elf, section)) return false;
        break;
      case SHT_REL:
        if (!relocations_are_sound<Elf64_Rel>(elf, section)) return false;
        break;
      default:
        break;
    }
  }
  return true;
}

uint64_t cubin_variable_bytes(std::span<const uint8_t> data) {
  Elf elf(data);
  if (!elf.open()) return UINT64_MAX;
  constexpr uint64_t kUnit = 512;
  constexpr uint64_t kMostShared = 256 * 1024;  // of one kernel, on any card
  uint64_t by_section = 0, by_segment = 0;
  for (const Elf64_Shdr& section : elf.sections()) {
    const std::string_view name = elf.section_name(section);
    if (name.starts_with(".nv.shared.") && section.sh_size <= kMostShared) continue;
    const bool variables = section.sh_type == SHT_NOBITS || name.starts_with(".nv.global") ||
                           name.starts_with(".nv.constant");
    if (!variables || section.sh_size == 0) continue;
    if (section.sh_size > UINT64_MAX - kUnit) return UINT64_MAX;
    add(&by_section, (section.sh_size + kUnit - 1) / kUnit * kUnit);
  }
  for (size_t i = 0; i < elf.header().e_phnum; ++i) {
    Elf64_Phdr segment;
    if (!elf.segment(i, &segment)) return UINT64_MAX;
    if (segment.p_type == PT_LOAD && segment.p_memsz > segment.p_filesz)
      add(&by_segment, segment.p_memsz - segment.p_filesz);
  }
  return std::max(by_section, by_segment);
}

}  // namespace gpupool::frontdoor
