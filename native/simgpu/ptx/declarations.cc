#include "simgpu/ptx/declarations.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "simgpu/ptx/constants.h"
#include "simgpu/ptx/types.h"

namespace gpupool::simgpu::ptx {
namespace {

constexpr uint64_t kMaxAlignment = 1u << 20;
constexpr size_t kMaxDimensions = 16;
constexpr size_t kMaxParameters = 4096;
constexpr size_t kMaxDeclarations = 1u << 20;      // of functions, of variables: of a whole text
constexpr uint64_t kMaxParameterBytes = 1u << 20;  // of all together

uint32_t parse_alignment(Lexer& lexer) {
  const int64_t n = parse_integer(lexer, 1, kMaxAlignment, "Alignment");
  if ((n & (n - 1)) != 0) lexer.fail("Alignment must be a power of two");
  return static_cast<uint32_t>(n);
}

void skip_parentheses(Lexer& lexer) {
  if (!lexer.accept('(')) return;
  int depth = 1;
  while (depth > 0) {
    if (lexer.token().kind == TokenKind::kEnd) lexer.fail_here();
    if (lexer.token().is('(')) ++depth;
    if (lexer.token().is(')')) --depth;
    lexer.advance();
  }
}

// .attribute(.managed), .attribute(.unified(1, 2)); true: managed.
bool parse_attribute(Lexer& lexer) {
  bool managed = false;
  lexer.expect('(');
  for (;;) {
    if (lexer.token().kind != TokenKind::kDot) lexer.fail_here();
    managed |= lexer.token().text == "managed";
    lexer.advance();
    skip_parentheses(lexer);
    if (!lexer.accept(',')) break;
  }
  lexer.expect(')');
  return managed;
}

int vector_width(std::string_view word) {
  if (word == "v2") return 2;
  if (word == "v4") return 4;
  if (word == "v8") return 8;
  return 0;
}

// "[4][]": dimensions, 0 for an empty one (only the first may be). Returns the product of the
// others, checked against kMaxVariableBytes.
uint64_t parse_dimensions(Lexer& lexer, std::vector<uint64_t>* dimensions) {
  uint64_t product = 1;
  while (lexer.accept('[')) {
    if (dimensions->size() >= kMaxDimensions) lexer.fail("Too many dimensions");
    if (lexer.token().is(']')) {
      if (!dimensions->empty()) lexer.fail("Only the first dimension may be left out");
      dimensions->push_back(0);
    } else {
      const uint64_t n = static_cast<uint64_t>(
          parse_integer(lexer, 0, static_cast<int64_t>(kMaxVariableBytes), "Array dimension"));
      // An array of no elements is written [0] in some sources.
      if (n != 0 && product > kMaxVariableBytes / n) lexer.fail("Array is too large");
      product *= n;
      dimensions->push_back(n == 0 ? 0 : n);
      if (n == 0) product = 0;
    }
    lexer.expect(']');
  }
  return product;
}

// "= { addr_mode_0 = wrap, ... }" of sampler and texture references.
void skip_reference_initialiser(Lexer& lexer) {
  if (lexer.token().is('{')) {
    size_t begin, end;
    lexer.skip_braces(&begin, &end);
    return;
  }
  lexer.skip_statement();
}

void layout(Lexer& lexer, std::vector<Parameter>& parameters) {
  uint64_t at = 0;
  for (Parameter& p : parameters) {
    if (p.space != Space::kParam) continue;
    at = (at + p.alignment - 1) & ~uint64_t{p.alignment - 1};
    p.offset = static_cast<uint32_t>(at);
    at += p.bytes;
    if (at > kMaxParameterBytes) lexer.fail("Formal parameter space overflowed");
  }
}

Parameter parse_parameter(Lexer& lexer) {
  Parameter p;
  uint32_t width = 1;
  bool in_pointer = false;
  const Token& t = lexer.token();
  p.type = Type::kNone;
  p.alignment = 0;
  bool space_seen = false;
  while (t.kind == TokenKind::kDot) {
    const std::string_view word = t.text;
    const Space space = space_named(word);
    if (word == "align") {
      lexer.advance();
      const uint32_t alignment = parse_alignment(lexer);
      if (!in_pointer) p.alignment = alignment;  // behind .ptr it is the pointee's
      continue;
    }
    if (word == "ptr") {
      in_pointer = true;
    } else if (space != Space::kNone) {
      if (!in_pointer) {
        if (space_seen || (space != Space::kParam && space != Space::kReg)) lexer.fail_here();
        p.space = space;
        space_seen = true;
      }
    } else if (int w = vector_width(word)) {
      width = static_cast<uint32_t>(w);
    } else if (Type type = type_named(word); type != Type::kNone) {
      p.type = type;
    } else {
      lexer.fail_here();
    }
    lexer.advance();
  }
  if (!space_seen || p.type == Type::kNone) lexer.fail_here();
  p.name = lexer.expect_word("a parameter's name");
  std::vector<uint64_t> dimensions;
  const uint64_t elements = parse_dimensions(lexer, &dimensions);
  p.array = !dimensions.empty();
  p.unsized = p.array && dimensions[0] == 0;
  p.bytes = p.unsized ? 0 : elements * width * bytes_of(p.type);
  if (p.bytes > kMaxParameterBytes) lexer.fail("Parameter '" + p.name + "' is too large");
  if (p.alignment == 0) p.alignment = std::bit_ceil(width * bytes_of(p.type));
  return p;
}

class UnitParser {
 public:
  // A text ends at its first NUL, also where its size is given.
  UnitParser(Unit& unit)
      : unit_(unit), lexer_(unit.text, 0, std::min(unit.text.find('\0'), unit.text.size()), 1) {}

  void parse() {
    const Token& t = lexer_.token();
    while (t.kind != TokenKind::kEnd) {
      if (lexer_.accept(';')) continue;
      if (t.kind != TokenKind::kDot) lexer_.fail_here();
      if (!version_seen_ && t.text != "version") {
        if (t.text == "file" || t.text == "loc" || t.text == "pragma" || t.text == "section") {
        } else {
          lexer_.fail("Missing .version directive at start of file");
        }
      }
      statement(t.text);
    }
    if (!version_seen_) lexer_.fail("Missing .version directive at start of file");
    if (!target_seen_) lexer_.fail("Missing .target directive");
  }

 private:
  void statement(std::string_view word) {
    if (word == "version") return version();
    if (word == "target") return target();
    if (word == "address_size") {
      lexer_.advance();
      unit_.address_size = static_cast<int>(parse_integer(lexer_, 32, 64, "Address size"));
      if (unit_.address_size != 64) lexer_.fail("'.address_size 32' is not supported");
      return;
    }
    if (word == "file" || word == "loc") return lexer_.skip_line();
    if (word == "pragma") return lexer_.skip_statement();
    if (word == "section") {
      while (!lexer_.token().is('{')) {
        if (lexer_.token().kind == TokenKind::kEnd) lexer_.fail_here();
        lexer_.advance();
      }
      size_t begin, end;
      lexer_.skip_braces(&begin, &end);
      return;
    }
    if (word == "alias") {
      AliasDeclaration alias;
      alias.line = lexer_.token().line;
      lexer_.advance();
      alias.name = lexer_.expect_word("a function's name");
      lexer_.expect(',');
      alias.target = lexer_.expect_word("a function's name");
      lexer_.expect(';');
      unit_.aliases.push_back(std::move(alias));
      return;
    }
    Linkage linkage = Linkage::kStatic;
    while (lexer_.token().kind == TokenKind::kDot) {
      const std::string_view w = lexer_.token().text;
      Linkage l;
      if (w == "extern")
        l = Linkage::kExtern;
      else if (w == "visible")
        l = Linkage::kVisible;
      else if (w == "weak")
        l = Linkage::kWeak;
      else if (w == "common")
        l = Linkage::kCommon;
      else
        break;
      linkage = l;
      lexer_.advance();
    }
    const Token& t = lexer_.token();
    if (t.kind != TokenKind::kDot) lexer_.fail_here();
    if (t.text == "func" || t.text == "entry") {
      const bool entry = t.text == "entry";
      lexer_.advance();
      return function(entry, linkage);
    }
    const Space space = space_named(t.text);
    if (space == Space::kReg) lexer_.fail("Registers can't be declared at module scope");
    if (space == Space::kParam) lexer_.fail("Parameters can't be declared at module scope");
    if (space == Space::kNone) {
      if (linkage != Linkage::kStatic || !target_seen_) lexer_.fail_here();
      unknown_directive();
      return;
    }
    lexer_.advance();
    parse_variables(lexer_, space, linkage, &unit_.variables);
  }

  // A directive of a later PTX version: its line, and the semicolon if there is one.
  void unknown_directive() {
    const uint32_t line = lexer_.token().line;
    while (lexer_.token().kind != TokenKind::kEnd && lexer_.token().line == line) {
      if (lexer_.token().is('{')) {
        size_t begin, end;
        lexer_.skip_braces(&begin, &end);
        return;
      }
      const bool done = lexer_.token().is(';');
      lexer_.advance();
      if (done) return;
    }
  }

  void version() {
    const uint32_t line = lexer_.token().line;
    lexer_.advance();
    const Token t = lexer_.token();
    // "9.0" is lexed as a decimal literal; the digits matter ("4.10" isn't "4.1").
    const size_t dot = t.text.find('.');
    if (t.kind != TokenKind::kFloat64 || dot == std::string_view::npos)
      lexer_.fail("Malformed .version directive");
    auto number = [&](std::string_view digits) {
      int n = 0;
      for (char c : digits) {
        if (c < '0' || c > '9' || n > 1000) lexer_.fail("Malformed .version directive");
        n = n * 10 + (c - '0');
      }
      return n;
    };
    const int major = number(t.text.substr(0, dot)), minor = number(t.text.substr(dot + 1));
    if (version_seen_ && (major != unit_.version_major || minor != unit_.version_minor))
      throw ParseError{line, "Second .version directive"};
    unit_.version_major = major;
    unit_.version_minor = minor;
    version_seen_ = true;
    lexer_.advance();
  }

  void target() {
    do {
      lexer_.advance();
      const Token t = lexer_.token();
      std::string_view name = lexer_.expect_word("a target");
      if (name.starts_with("sm_") || name.starts_with("compute_")) {
        name.remove_prefix(name.find('_') + 1);
        int n = 0;
        while (!name.empty() && name[0] >= '0' && name[0] <= '9' && n < 10000) {
          n = n * 10 + (name[0] - '0');
          name.remove_prefix(1);
        }
        if (n == 0 || name.size() > 1)
          throw ParseError{t.line, "Unknown .target '" + printable(t.text) + "'"};
        unit_.target = n;
        unit_.target_suffix = name;
        target_seen_ = true;
      } else if (name == "debug") {
        unit_.debug = true;
      }  // texmode_unified, texmode_independent, map_f64_to_f32
    } while (lexer_.token().is(','));
    if (!target_seen_) lexer_.fail("Malformed .target directive");
  }

  void dimensions3(uint32_t out[3]) {
    for (int i = 0; i < 3; ++i) out[i] = 1;
    for (int i = 0; i < 3; ++i) {
      out[i] = static_cast<uint32_t>(parse_integer(lexer_, 1, 0x7fffffff, "Block dimension"));
      if (!lexer_.accept(',')) break;
    }
  }

  void function(bool entry, Linkage linkage) {
    FunctionDeclaration f;
    f.entry = entry;
    f.linkage = linkage;
    f.line = lexer_.token().line;
    auto attributes = [&] {
      while (lexer_.token().dot("attribute")) {
        lexer_.advance();
        parse_attribute(lexer_);
      }
    };
    attributes();
    if (!entry && lexer_.token().is('(')) f.returns = parse_parameters(lexer_);
    attributes();
    f.name = lexer_.expect_word(entry ? "a kernel's name" : "a function's name");
    f.parameters = parse_parameters(lexer_);
    if (entry) {
      for (const Parameter& p : f.parameters) {
        if (p.space != Space::kParam)
          lexer_.fail("Parameters of kernel '" + f.name + "' must be .param");
        if (p.unsized) lexer_.fail("Parameter of kernel '" + f.name + "' has no size");
      }
    }
    const Token& t = lexer_.token();
    while (t.kind == TokenKind::kDot) {
      const std::string_view word = t.text;
      lexer_.advance();
      if (word == "noreturn") {
        f.noreturn = true;
      } else if (word == "maxntid") {
        dimensions3(f.max_block);
      } else if (word == "reqntid") {
        dimensions3(f.required_block);
      } else if (word == "minnctapersm") {
        f.min_blocks = static_cast<uint32_t>(parse_integer(lexer_, 0, 0x7fffffff, ".minnctapersm"));
      } else if (word == "maxnreg") {
        f.max_registers = static_cast<uint32_t>(parse_integer(lexer_, 0, 0x7fffffff, ".maxnreg"));
      } else if (word == "pragma") {
        lexer_.skip_statement();
      } else if (word == "attribute") {
        parse_attribute(lexer_);
      } else {
        // Others, known (.maxnctapersm, .reqnctapercluster, .unique, .abi_preserve) or not, have
        // at most a list of numbers.
        while (starts_constant(t)) {
          if (t.is('(')) {
            skip_parentheses(lexer_);
          } else {
            parse_constant(lexer_);
          }
          if (!lexer_.accept(',')) break;
        }
      }
    }
    if (t.is('{')) {
      f.defined = true;
      f.body_line = t.line;
      lexer_.skip_braces(&f.body_begin, &f.body_end);
    } else {
      lexer_.expect(';');
    }
    if (unit_.functions.size() >= kMaxDeclarations) lexer_.fail("Too many functions");
    unit_.functions.push_back(std::move(f));
  }

  Unit& unit_;
  Lexer lexer_;
  bool version_seen_ = false;
  bool target_seen_ = false;
};

}  // namespace

std::vector<Parameter> parse_parameters(Lexer& lexer) {
  std::vector<Parameter> parameters;
  if (!lexer.accept('(')) return parameters;
  while (!lexer.token().is(')')) {
    if (parameters.size() >= kMaxParameters) lexer.fail("Too many parameters");
    parameters.push_back(parse_parameter(lexer));
    if (!lexer.accept(',')) break;
  }
  lexer.expect(')');
  layout(lexer, parameters);
  return parameters;
}

Prototype parse_prototype(Lexer& lexer) {
  Prototype p;
  p.returns = parse_parameters(lexer);
  lexer.expect_word("'_'");
  p.parameters = parse_parameters(lexer);
  while (!lexer.accept(';')) {
    if (lexer.token().kind == TokenKind::kEnd || lexer.token().is('}')) lexer.fail_here();
    if (lexer.token().dot("noreturn")) p.noreturn = true;
    lexer.advance();
  }
  return p;
}

void parse_variables(Lexer& lexer, Space space, Linkage linkage,
                     std::vector<VariableDeclaration>* out) {
  VariableDeclaration common;
  common.space = space;
  common.linkage = linkage;
  uint32_t alignment = 0;
  const Token& t = lexer.token();
  if (space == Space::kConst && t.is('[')) {  // a bank of PTX before 2.2
    lexer.advance();
    parse_integer(lexer, 0, 10, "Constant bank");
    lexer.expect(']');
  }
  while (t.kind == TokenKind::kDot) {
    const std::string_view word = t.text;
    if (word == "align") {
      lexer.advance();
      alignment = parse_alignment(lexer);
      continue;
    }
    if (word == "attribute") {
      lexer.advance();
      common.managed |= parse_attribute(lexer);
      continue;
    }
    if (int width = vector_width(word)) {
      common.vector_width = static_cast<uint8_t>(width);
    } else if (Type type = type_named(word); type != Type::kNone && type != Type::kPred) {
      common.type = type;
    } else {
      lexer.fail_here();
    }
    lexer.advance();
  }
  if (common.type == Type::kNone) lexer.fail_here();
  const uint32_t element = bytes_of(common.type) * common.vector_width;
  common.alignment = alignment ? alignment : std::bit_ceil(element);
  do {
    VariableDeclaration v = common;
    v.line = t.line;
    v.name = lexer.expect_word("a variable's name");
    const uint64_t inner = parse_dimensions(lexer, &v.dimensions);
    const bool open = !v.dimensions.empty() && v.dimensions[0] == 0;
    v.elements = open ? 0 : inner;
    if (lexer.accept('=')) {
      if (v.type == Type::kTexref || v.type == Type::kSamplerref || v.type == Type::kSurfref) {
        skip_reference_initialiser(lexer);
      } else {
        if (space != Space::kGlobal && space != Space::kConst)
          lexer.fail("Variable '" + v.name + "' of this state space can't be initialised");
        if (linkage == Linkage::kExtern)
          lexer.fail("External variable '" + v.name + "' can't be initialised");
        v.initialised = true;
        uint64_t given = parse_initialiser(lexer, &v);
        if (open) {
          uint64_t row = 1;
          for (size_t i = 1; i < v.dimensions.size(); ++i) row *= v.dimensions[i];
          given = (given + v.vector_width - 1) / v.vector_width;
          v.dimensions[0] = row == 0 ? 0 : (given + row - 1) / row;
          v.elements = v.dimensions[0] * row;
        }
      }
    }
    if (v.elements > kMaxVariableBytes / element)
      lexer.fail("Variable '" + v.name + "' is too large");
    v.unsized = open && !v.initialised;
    v.bytes = v.elements * element;
    if (out->size() >= kMaxDeclarations) lexer.fail("Too many variables");
    out->push_back(std::move(v));
  } while (lexer.accept(','));
  lexer.expect(';');
}

std::unique_ptr<Unit> parse_unit(std::string file, std::string text) {
  auto unit = std::make_unique<Unit>();
  while (!text.empty() && text.back() == '\0') text.pop_back();
  if (text.size() > 0x7fffffff) throw ParseError{0, "Text is larger than 2 GiB"};
  unit->file = std::move(file);
  unit->text = std::move(text);
  UnitParser(*unit).parse();
  return unit;
}

}  // namespace gpupool::simgpu::ptx
