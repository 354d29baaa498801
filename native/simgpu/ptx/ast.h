// What the parser makes of PTX text, with every name resolved: whoever decodes a function needs no
// symbol table. Declarations of a text are a Unit; a function's body is a FunctionBody, which is
// parsed when the function is first needed (LinkedProgram::body in program.h).
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gpupool::simgpu::ptx {

enum class Op : uint16_t {
  kUnknown,  // an opcode that no PTX version known here has; FunctionBody::spelling() shows it
#define GPUPOOL_PTX_OPCODE(name, text) name,
#include "simgpu/ptx/opcodes.inc"
#undef GPUPOOL_PTX_OPCODE
  kCount
};

// A word after the opcode: type, space, rounding, comparison, shape ... in the order of the text.
// "shared::cta" is one word. Enumerators: text in CamelCase (.shared::cta kSharedCta, .acq_rel
// kAcqRel, .2d kDim2d); .NaN is kPropagateNan, the comparison .nan kCompareNan.
enum class Mod : uint16_t {
  kUnknown,
#define GPUPOOL_PTX_MODIFIER(name, text) name,
#include "simgpu/ptx/modifiers.inc"
#undef GPUPOOL_PTX_MODIFIER
  kCount
};

enum class SpecialRegister : uint16_t {
#define GPUPOOL_PTX_SPECIAL(name, text, components) name,
#include "simgpu/ptx/special_registers.inc"
#undef GPUPOOL_PTX_SPECIAL
  kEnvreg0,              // %envreg0 .. %envreg31 follow one another
  kPm0 = kEnvreg0 + 32,  // %pm0 .. %pm7, and the same as 64 bit
  kPm0_64 = kPm0 + 8,
  kCount = kPm0_64 + 8
};

enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kB16,
  kB32,
  kB64,
  kB128,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kF16,
  kF16x2,
  kBf16,
  kBf16x2,
  kTf32,
  kF32,
  kF32x2,
  kF64,
  kE4m3,
  kE5m2,
  kE4m3x2,
  kE5m2x2,
  kU16x2,
  kS16x2,
  kU8x4,
  kS8x4,
  kTexref,
  kSamplerref,
  kSurfref,
};

enum class Space : uint8_t { kNone, kReg, kConst, kGlobal, kLocal, kParam, kShared, kTex };

enum class Linkage : uint8_t { kStatic, kVisible, kExtern, kWeak, kCommon };

const char* text_of(Op op);
const char* text_of(Mod mod);
const char* text_of(SpecialRegister special);
const char* text_of(Type type);
const char* text_of(Space space);

// Bytes of one element; 1 for predicates, 8 for texture, sampler and surface references.
uint32_t bytes_of(Type type);
bool is_float(Type type);  // f16 ... f64, packed forms included
bool is_signed_integer(Type type);
bool is_unsigned_integer(Type type);
bool is_untyped_bits(Type type);  // .b8 ... .b128
// The type or space that a modifier names; kNone if it names none.
Type type_of(Mod mod);
Space space_of(Mod mod);  // .shared::cta and .param::entry included

constexpr uint32_t kNoIndex = 0xffffffffu;

// ---------------------------------------------------------------- operands

enum class OperandKind : uint8_t {
  kNone,       // left out (an optional place, e.g. a call without prototype)
  kRegister,   // index: register; negated: !p; selector: .b0 .. .h1, .b7654 of video instructions;
               // bits: its digits, the last in the lowest 4 bits, their number << 32, letter << 40
  kImmediate,  // integer: bits (two's complement, 64 bits); is_unsigned if written with U or >
               // int64
  kFloat32,    // 0fXXXXXXXX: bits (32 of them)
  kFloat64,    // 0dXXXX or a decimal literal: bits (64)
  kSpecial,    // index: SpecialRegister; component 0..3 for .x .. .w; kWhole for the vector
  kSymbol,     // the address of symbol/index, plus offset. For mov, cvta, call targets ...
  kAddress,    // [register + offset], [symbol + offset] or [offset]
  kBracket,    // [a, {b, c}, d]: textures, surfaces, tensors; elements
  kVector,     // {a, b, c, d}: elements (kRegister, kImmediate, kSink ...)
  kPair,       // p|q: two elements
  kList,       // (a, b): two or more call arguments or results; elements
  kLabel,      // index: the instruction to go to (may be instructions.size(): the end)
  kTable,      // index: FunctionBody::branch_tables (brx.idx) or call_tables (call)
  kPrototype,  // index: FunctionBody::prototypes
  kSink,       // _
};

// What a name that isn't a register, label or special register stands for.
enum class SymbolKind : uint8_t {
  kNone,       // kAddress without a symbol
  kVariable,   // index: LinkedProgram::variable(): .global, .const, .shared (function scope too),
               // textures. The offset of a .shared variable depends on the kernel: SharedLayout.
  kLocal,      // index: FunctionBody::locals: .local variables and call-sequence .param variables
  kParameter,  // index: Function::parameters of the function itself
  kReturn,     // index: Function::returns of the function itself
  kFunction,   // index: LinkedProgram::function()
};

enum class Selector : uint8_t {
  kNone,
  kB0,
  kB1,
  kB2,
  kB3,
  kH0,
  kH1,
  kB10,
  kB21,
  kB32,
  kB20,
  kB31,
  kB30,
  kParts,  // any other; Operand::bits has all
};

constexpr uint8_t kWhole = 0xff;  // Operand::component: all components

struct Operand {
  OperandKind kind = OperandKind::kNone;
  SymbolKind symbol = SymbolKind::kNone;  // kSymbol, kAddress
  bool negated = false;                   // !p; -a where a form allows it
  bool register_base = false;             // kAddress: index is a register, not a symbol
  bool is_unsigned = false;               // kImmediate
  uint8_t component = kWhole;             // kSpecial
  Selector selector = Selector::kNone;    // kRegister
  uint32_t index = kNoIndex;
  uint32_t first = 0, count = 0;  // elements: FunctionBody::operands[first .. first+count)
  union {
    uint64_t bits = 0;  // immediates
    int64_t offset;     // kSymbol, kAddress
  };
};

// 'b' or 'h' of a register's selector; 0: it has none.
inline char selector_letter(const Operand& o) {
  return o.selector == Selector::kNone ? 0 : static_cast<char>(o.bits >> 40);
}

// ---------------------------------------------------------------- instructions

constexpr int kMaxModifiers = 14;

struct Instruction {
  Op op = Op::kUnknown;
  uint8_t modifier_count = 0;
  uint8_t operand_count = 0;
  bool guard_negated = false;
  uint32_t guard = kNoIndex;   // predicate register of @p; kNoIndex: none
  uint32_t first_operand = 0;  // FunctionBody::operands
  uint32_t line = 0;           // line of the text, from 1
  uint32_t text_begin = 0;     // opcode and modifiers as written: FunctionBody::spelling()
  uint16_t text_length = 0;
  Mod modifiers[kMaxModifiers] = {};

  std::span<const Mod> mods() const { return {modifiers, modifier_count}; }
  bool has(Mod mod) const {
    for (int i = 0; i < modifier_count; ++i)
      if (modifiers[i] == mod) return true;
    return false;
  }
};
// Operands stand in the order of the text. `call` is normalised to four: results (kList, maybe
// empty), target (kSymbol of a function or kRegister), arguments (kList, maybe empty), and
// kPrototype, kTable or kNone. Elements of these lists are kSymbol (SymbolKind::kLocal in .param
// space, or kParameter/kReturn), kRegister or immediates.

// ---------------------------------------------------------------- functions

struct Parameter {
  std::string name;
  Space space = Space::kParam;  // kParam, or kReg for functions
  Type type = Type::kB32;       // element type
  uint64_t bytes = 0;           // whole size, arrays included
  uint32_t alignment = 1;
  uint32_t offset = 0;   // natural layout: each at the next multiple of its alignment
  bool array = false;    // declared with []
  bool unsized = false;  // [] without a size: the variable part of a variadic function
  uint32_t register_index = kNoIndex;  // kReg: register of the body; filled with the body
};

struct LocalVariable {
  std::string name;
  Space space = Space::kLocal;  // kLocal or kParam
  Type type = Type::kB32;
  uint64_t bytes = 0;
  uint32_t alignment = 1;
  uint32_t offset = 0;  // kLocal: in the frame's local part; kParam: in the frame's parameter part.
                        // Call sequences that can't be alive together share the parameter part.
};

struct Prototype {
  std::vector<Parameter> returns, parameters;
  bool noreturn = false;
};

struct RegisterRange {    // registers that one declaration made
  std::string_view name;  // a name, or the prefix of numbered ones
  uint32_t first = 0, count = 1;
  bool numbered = false;
};

struct FunctionBody {
  std::vector<Type> registers;  // declared type of each register, scopes renamed apart
  std::vector<RegisterRange> register_ranges;
  std::vector<Instruction> instructions;
  std::vector<Operand> operands;  // of all instructions, and elements of groups
  std::vector<LocalVariable> locals;
  std::vector<std::vector<uint32_t>> branch_tables;  // instruction indices
  std::vector<std::vector<uint32_t>> call_tables;    // function indices
  std::vector<Prototype> prototypes;
  std::vector<uint32_t> callees;           // functions named anywhere in the body, each once
  std::vector<uint32_t> address_taken;     // those of them named elsewhere than as a call's target
  std::vector<uint32_t> shared_variables;  // .shared variables named in the body, each once
  bool calls_indirectly = false;           // a call whose target is a register
  uint32_t local_bytes = 0, local_alignment = 1;  // all .local variables
  uint32_t param_bytes = 0, param_alignment = 1;  // all call-sequence .param variables
  std::vector<uint32_t> parameter_registers;      // of .reg parameters: register, else kNoIndex
  std::vector<uint32_t> return_registers;         // of .reg results
  std::string_view text;                          // the unit's whole text
  std::deque<std::string> owned_names;            // names that don't stand in the text as such

  std::span<const Operand> operands_of(const Instruction& i) const {
    return {operands.data() + i.first_operand, i.operand_count};
  }
  std::span<const Operand> elements_of(const Operand& o) const {
    return {operands.data() + o.first, o.count};
  }
  std::string_view spelling(const Instruction& i) const {
    return text.substr(i.text_begin, i.text_length);
  }
  // The whole statement as written, on one line, at most `limit` characters: for messages.
  std::string statement(const Instruction& i, size_t limit = 160) const;
  std::string register_name(uint32_t index) const;
};

// ---------------------------------------------------------------- declarations of one text

// An address inside an initialiser. The rest of the initialiser is VariableDeclaration::image.
struct SymbolInitialiser {
  uint64_t position = 0;  // byte offset in the variable
  uint32_t bytes = 8;     // bytes written
  std::string symbol;     // a variable or a function
  int64_t offset = 0;     // added to the address
  bool generic = false;   // generic(symbol)
  uint64_t mask = 0;      // mask(symbol): the bits of the address taken, shifted down; 0: all
  uint32_t line = 0;
};

// Bytes of an initialiser that lie side by side. What is between two runs is zero, and takes no
// memory here: a short text can name elements far apart.
struct InitialiserRun {
  uint64_t position = 0;  // byte offset in the variable
  std::vector<uint8_t> bytes;
};

struct VariableDeclaration {
  std::string name;
  Linkage linkage = Linkage::kStatic;
  Space space = Space::kNone;
  Type type = Type::kNone;
  uint8_t vector_width = 1;
  uint64_t elements = 1;  // product of the dimensions
  std::vector<uint64_t> dimensions;
  uint64_t bytes = 0;
  uint32_t alignment = 1;
  bool unsized = false;  // extern array without a size: dynamic shared memory, or elsewhere
  bool managed = false;  // .attribute(.managed)
  bool initialised = false;
  std::vector<InitialiserRun> image;
  std::vector<SymbolInitialiser> symbols;
  uint32_t line = 0;
};

struct FunctionDeclaration {
  std::string name;
  Linkage linkage = Linkage::kStatic;
  bool entry = false;
  bool noreturn = false;
  bool defined = false;
  std::vector<Parameter> returns, parameters;
  uint32_t required_block[3] = {0, 0, 0};  // .reqntid; 0: none
  uint32_t max_block[3] = {0, 0, 0};       // .maxntid; 0: none
  uint32_t max_registers = 0;              // .maxnreg
  uint32_t min_blocks = 0;                 // .minnctapersm
  uint32_t line = 0;
  size_t body_begin = 0, body_end = 0;  // span in the text, braces included
  uint32_t body_line = 0;
};

struct AliasDeclaration {
  std::string name, target;
  uint32_t line = 0;
};

struct Unit {
  std::string file;                          // for messages
  std::string text;                          // kept: bodies are parsed from it later
  int version_major = 0, version_minor = 0;  // .version
  int target = 0;                            // 80 for sm_80
  std::string target_suffix;                 // "a", "f" or empty
  bool debug = false;                        // .target ..., debug
  int address_size = 32;
  std::vector<VariableDeclaration> variables;
  std::vector<FunctionDeclaration> functions;
  std::vector<AliasDeclaration> aliases;
};

}  // namespace gpupool::simgpu::ptx
