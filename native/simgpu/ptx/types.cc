#include "simgpu/ptx/types.h"

#include <array>
#include <string>
#include <unordered_map>

namespace gpupool::simgpu::ptx {
namespace {

constexpr const char* kOpTexts[] = {
    "?",
#define GPUPOOL_PTX_OPCODE(name, text) text,
#include "simgpu/ptx/opcodes.inc"
#undef GPUPOOL_PTX_OPCODE
};

constexpr const char* kModTexts[] = {
    "?",
#define GPUPOOL_PTX_MODIFIER(name, text) text,
#include "simgpu/ptx/modifiers.inc"
#undef GPUPOOL_PTX_MODIFIER
};

struct SpecialText {
  const char* text;
  int components;
};
constexpr SpecialText kSpecialTexts[] = {
#define GPUPOOL_PTX_SPECIAL(name, text, components) {text, components},
#include "simgpu/ptx/special_registers.inc"
#undef GPUPOOL_PTX_SPECIAL
};

struct TypeText {
  Type type;
  const char* text;
  uint8_t bytes;
};
constexpr TypeText kTypes[] = {
    {Type::kPred, "pred", 1},       {Type::kB8, "b8", 1},
    {Type::kB16, "b16", 2},         {Type::kB32, "b32", 4},
    {Type::kB64, "b64", 8},         {Type::kB128, "b128", 16},
    {Type::kU8, "u8", 1},           {Type::kU16, "u16", 2},
    {Type::kU32, "u32", 4},         {Type::kU64, "u64", 8},
    {Type::kS8, "s8", 1},           {Type::kS16, "s16", 2},
    {Type::kS32, "s32", 4},         {Type::kS64, "s64", 8},
    {Type::kF16, "f16", 2},         {Type::kF16x2, "f16x2", 4},
    {Type::kBf16, "bf16", 2},       {Type::kBf16x2, "bf16x2", 4},
    {Type::kTf32, "tf32", 4},       {Type::kF32, "f32", 4},
    {Type::kF32x2, "f32x2", 8},     {Type::kF64, "f64", 8},
    {Type::kE4m3, "e4m3", 1},       {Type::kE5m2, "e5m2", 1},
    {Type::kE4m3x2, "e4m3x2", 2},   {Type::kE5m2x2, "e5m2x2", 2},
    {Type::kU16x2, "u16x2", 4},     {Type::kS16x2, "s16x2", 4},
    {Type::kU8x4, "u8x4", 4},       {Type::kS8x4, "s8x4", 4},
    {Type::kTexref, "texref", 8},   {Type::kSamplerref, "samplerref", 8},
    {Type::kSurfref, "surfref", 8},
};

const TypeText* find_type(Type type) {
  for (const TypeText& t : kTypes)
    if (t.type == type) return &t;
  return nullptr;
}

struct Tables {
  std::unordered_map<std::string_view, Op> ops;
  std::unordered_map<std::string_view, Mod> mods;
  std::unordered_map<std::string_view, Type> types;
  std::unordered_map<std::string_view, SpecialName> specials;
  std::array<Type, static_cast<size_t>(Mod::kCount)> mod_types{};
  std::array<Space, static_cast<size_t>(Mod::kCount)> mod_spaces{};
  std::array<std::string, 48> numbered;  // texts of %envreg and %pm

  Tables() {
    for (size_t i = 1; i < std::size(kOpTexts); ++i) ops[kOpTexts[i]] = static_cast<Op>(i);
    for (const TypeText& t : kTypes) types[t.text] = t.type;
    for (size_t i = 1; i < std::size(kModTexts); ++i) {
      mods[kModTexts[i]] = static_cast<Mod>(i);
      auto type = types.find(kModTexts[i]);
      if (type != types.end()) mod_types[i] = type->second;
      std::string_view text = kModTexts[i];
      mod_spaces[i] = space_named(text.substr(0, text.find(':')));
    }
    for (size_t i = 0; i < std::size(kSpecialTexts); ++i)
      specials[kSpecialTexts[i].text] = {static_cast<SpecialRegister>(i),
                                         kSpecialTexts[i].components > 1};
    const int first = static_cast<int>(SpecialRegister::kEnvreg0);
    for (int i = 0; i < 48; ++i) {
      std::string& text = numbered[i];
      if (i < 32) {
        text = "%envreg" + std::to_string(i);
      } else if (i < 40) {
        text = "%pm" + std::to_string(i - 32);
      } else {
        text = "%pm" + std::to_string(i - 40) + "_64";
      }
      specials[text] = {static_cast<SpecialRegister>(first + i), false};
    }
  }
};

const Tables& tables() {
  static const Tables t;
  return t;
}

template <class Map, class Value>
Value lookup(const Map& map, std::string_view text, Value missing) {
  auto it = map.find(text);
  return it == map.end() ? missing : it->second;
}

}  // namespace

const char* text_of(Op op) { return kOpTexts[static_cast<size_t>(op)]; }
const char* text_of(Mod mod) { return kModTexts[static_cast<size_t>(mod)]; }

const char* text_of(SpecialRegister special) {
  const size_t i = static_cast<size_t>(special);
  const size_t first = static_cast<size_t>(SpecialRegister::kEnvreg0);
  return i < first ? kSpecialTexts[i].text : tables().numbered[i - first].c_str();
}

const char* text_of(Type type) {
  const TypeText* t = find_type(type);
  return t ? t->text : "none";
}

const char* text_of(Space space) {
  static constexpr const char* kTexts[] = {"none",  "reg",   "const",  "global",
                                           "local", "param", "shared", "tex"};
  return kTexts[static_cast<size_t>(space)];
}

uint32_t bytes_of(Type type) {
  const TypeText* t = find_type(type);
  return t ? t->bytes : 0;
}

bool is_float(Type type) { return type >= Type::kF16 && type <= Type::kE5m2x2; }
bool is_signed_integer(Type type) {
  return (type >= Type::kS8 && type <= Type::kS64) || type == Type::kS16x2 || type == Type::kS8x4;
}
bool is_unsigned_integer(Type type) {
  return (type >= Type::kU8 && type <= Type::kU64) || type == Type::kU16x2 || type == Type::kU8x4;
}
bool is_untyped_bits(Type type) { return type >= Type::kB8 && type <= Type::kB128; }

Type type_of(Mod mod) { return tables().mod_types[static_cast<size_t>(mod)]; }
Space space_of(Mod mod) { return tables().mod_spaces[static_cast<size_t>(mod)]; }

Op op_of(std::string_view text) { return lookup(tables().ops, text, Op::kUnknown); }
Mod mod_of(std::string_view text) { return lookup(tables().mods, text, Mod::kUnknown); }
Type type_named(std::string_view text) { return lookup(tables().types, text, Type::kNone); }

Space space_named(std::string_view text) {
  if (text == "reg") return Space::kReg;
  if (text == "const") return Space::kConst;
  if (text == "global") return Space::kGlobal;
  if (text == "local") return Space::kLocal;
  if (text == "param") return Space::kParam;
  if (text == "shared") return Space::kShared;
  if (text == "tex") return Space::kTex;
  return Space::kNone;
}

std::optional<SpecialName> special_named(std::string_view text) {
  auto it = tables().specials.find(text);
  if (it == tables().specials.end()) return std::nullopt;
  return it->second;
}

}  // namespace gpupool::simgpu::ptx
