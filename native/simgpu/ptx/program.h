// Texts linked into one program: symbols resolved across units, variables allocated and
// initialised, bodies parsed on demand. The engine's Program (exec/engine.h) wraps this.
//
// For the engine:
//   LinkResult r = LinkedProgram::link(sources, device, memory);   // memory nullptr: only check
//   r.program->function(i)      declaration of function i (kernels and device functions alike)
//   r.program->kernels()        indices of the entries, in the order of the source
//   r.program->body(i, &why)    the parsed body; nullptr: not parseable (why), extern, or built-in
//   r.program->variable(i)      what SymbolKind::kVariable names; .address for .global and .const
//   r.program->shared_layout(k) offsets of the .shared variables for a kernel and all it can reach
// A function pointer is function_address(i); function_of_address() gives the index back.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "simgpu/exec/engine.h"
#include "simgpu/ptx/ast.h"

namespace gpupool::simgpu::ptx {

// Functions that every program may call without defining them.
enum class Builtin : uint8_t {
  kNone,
  kVprintf,               // (.b64 format, .b64 arguments) -> .b32
  kMalloc,                // (.b64 bytes) -> .b64
  kFree,                  // (.b64 address)
  kAssertFail,            // (.b64 message, .b64 file, .b32 line, .b64 function, .b64 charSize)
  kCgGetIntrinsicHandle,  // (.b32 scope) -> .b64
  kOther,                 // a known name of the device runtime that isn't carried out
};

struct Function {
  std::string name;
  bool entry = false;
  bool noreturn = false;
  Builtin builtin = Builtin::kNone;  // set when no unit defines it
  std::vector<Parameter> parameters, returns;
  uint32_t parameter_bytes = 0;  // of .param parameters, natural layout
  uint32_t return_bytes = 0;
  uint32_t required_block[3] = {0, 0, 0};
  uint32_t max_block[3] = {0, 0, 0};
  uint32_t max_registers = 0, min_blocks = 0;
  Linkage linkage = Linkage::kStatic;
  int unit = -1;           // -1: built-in
  size_t declaration = 0;  // Unit::functions
};

struct Variable {
  std::string name;
  Space space = Space::kNone;  // kGlobal, kConst, kShared, kTex, kLocal (refused by decoders)
  Type type = Type::kNone;
  Linkage linkage = Linkage::kStatic;
  uint64_t bytes = 0;
  uint32_t alignment = 1;
  bool unsized = false;  // .extern .shared x[]: begins behind the static ones
  bool managed = false;
  uint64_t address = 0;  // kGlobal, kConst: where it lies; 0 when only checked
  int unit = -1;
};

// Where a kernel's .shared variables lie: those named by it and by all functions it may reach.
struct SharedLayout {
  struct Place {
    uint32_t variable = 0;
    uint32_t offset = 0;
  };
  std::vector<Place> places;    // sorted by variable
  uint32_t static_bytes = 0;    // dynamic shared memory begins at dynamic_offset
  uint32_t dynamic_offset = 0;  // static_bytes rounded up to the unsized variables' alignment
  bool uses_dynamic = false;
  uint32_t offset_of(uint32_t variable) const;  // kNoIndex: not reachable from this kernel
};

// A function's "address": never mapped, since it isn't canonical on x86-64.
constexpr uint64_t kFunctionAddressBase = 0x0000'8100'0000'0000;
constexpr uint64_t kFunctionAddressStep = 16;
constexpr uint64_t function_address(uint32_t index) {
  return kFunctionAddressBase + (index + uint64_t{1}) * kFunctionAddressStep;
}

class LinkedProgram;

struct LinkResult {
  LoadStatus status = LoadStatus::kOk;
  std::string log;
  std::shared_ptr<LinkedProgram> program;
};

class LinkedProgram {
 public:
  // Parses the declarations of all texts, resolves names, allocates and initialises variables.
  // With memory nullptr nothing is allocated. Bodies are parsed at once as long as the texts are
  // not large (or with memory nullptr), so that wrong text is refused here, as drivers do; a body
  // with something of a later PTX version in it only fails when it is used.
  // Errors are in the log, one a line, as a JIT would write them.
  static LinkResult link(const std::vector<SourceText>& sources, const DeviceModel& device,
                         std::shared_ptr<MemorySpace> memory);
  ~LinkedProgram();
  LinkedProgram(const LinkedProgram&) = delete;
  LinkedProgram& operator=(const LinkedProgram&) = delete;

  uint32_t function_count() const { return static_cast<uint32_t>(functions_.size()); }
  const Function& function(uint32_t index) const { return functions_[index]; }
  // kNoIndex: not a function's address.
  uint32_t function_of_address(uint64_t address) const;
  const std::vector<uint32_t>& kernels() const { return kernels_; }
  uint32_t find_kernel(std::string_view name) const;  // function index; kNoIndex: none

  // Parsed on first use; safe from several threads; stays valid as long as the program.
  // nullptr: a built-in or an undefined function, or `why` says what is wrong with the text.
  const FunctionBody* body(uint32_t function, std::string* why);

  const Variable& variable(uint32_t index) const;
  uint32_t variable_count() const;
  // Visible .global, .const and .managed variables by name, for cuModuleGetGlobal.
  std::optional<GlobalInfo> global(std::string_view name) const;
  std::vector<std::string> global_names() const;
  uint64_t constant_bytes() const;  // all .const variables

  // Parses what the kernel reaches. nullopt: some reachable body isn't parseable (why).
  std::optional<SharedLayout> shared_layout(uint32_t kernel, std::string* why);
  // The kernel and every function it may reach: by name, through a pointer anywhere, or a table.
  std::vector<uint32_t> reachable(uint32_t kernel, std::string* why);

  const Unit& unit(int index) const { return *units_[index]; }
  // "file.ptx(12)" for messages about an instruction of this function.
  std::string place(uint32_t function, uint32_t line) const;

 private:
  friend class Linker;
  friend class BodyParser;
  struct LazyBody {
    std::once_flag once;
    std::unique_ptr<FunctionBody> body;
    std::string error;
    uint32_t error_line = 0;
    bool uncertain = false;  // the error may be the parser's: the text is of a later PTX version
  };
  struct Symbol {
    SymbolKind kind = SymbolKind::kNone;
    uint32_t index = kNoIndex;
  };
  LinkedProgram() = default;
  const Symbol* find_symbol(int unit, std::string_view name) const;
  LazyBody& parsed(uint32_t function);
  // Allocates a .global or .const variable; false: out of memory.
  bool allocate(Variable* variable);
  // Writes its initialiser. Empty: done, else what is wrong with it.
  std::string initialise(const Variable& variable, const VariableDeclaration& declaration);
  // Takes it into variables_ and the indices over them; with variables_mutex_ held, or while
  // linking.
  uint32_t append(Variable v);
  void take_address(uint32_t function);
  // Functions that a call through a pointer may reach: whose address is taken anywhere.
  const std::vector<uint32_t>& pointer_targets();
  uint32_t add_function_scope_variable(const VariableDeclaration& declaration, int unit,
                                       std::string* error);

  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Function> functions_;
  std::deque<LazyBody> bodies_;
  std::vector<uint32_t> kernels_;
  std::unordered_map<std::string_view, uint32_t> kernels_by_name_;  // function indices
  std::vector<uint32_t> address_taken_;  // functions named in initialisers
  std::vector<bool> is_address_taken_;
  std::once_flag pointer_targets_once_;
  std::vector<uint32_t> pointer_targets_;
  struct NameHash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };
  using Symbols = std::unordered_map<std::string, Symbol, NameHash, std::equal_to<>>;
  std::vector<Symbols> unit_symbols_;  // what each unit sees: its own names and those it imports
  Symbols exported_;                   // names that units share
  mutable std::mutex variables_mutex_;
  std::deque<Variable> variables_;
  std::unordered_map<std::string_view, uint32_t>
      variables_by_name_;  // the first of .global, .const
  uint64_t constant_bytes_ = 0;
  std::shared_ptr<MemorySpace> memory_;
  std::vector<uint64_t> allocations_;
};

}  // namespace gpupool::simgpu::ptx
