// Operands of instructions: registers, immediates, addresses, groups.
#include <algorithm>

#include "simgpu/ptx/body.h"
#include "simgpu/ptx/constants.h"
#include "simgpu/ptx/types.h"

namespace gpupool::simgpu::ptx {
namespace {

constexpr int kMaxNesting = 4;  // [a, {b, c}]

// Digits 0 to 7, at most four, behind b or h; 0: something else.
uint64_t selector_bits(std::string_view s) {
  if (s.size() < 2 || s.size() > 5 || (s[0] != 'b' && s[0] != 'h')) return 0;
  uint64_t bits = 0;
  for (const char c : s.substr(1)) {
    if (c < '0' || c > '7') return 0;
    bits = bits << 4 | static_cast<uint64_t>(c - '0');
  }
  return bits | uint64_t{s.size() - 1} << 32 | static_cast<uint64_t>(s[0]) << 40;
}

Selector selector_named(std::string_view s) {
  static constexpr std::pair<std::string_view, Selector> kNames[] = {
      {"b0", Selector::kB0},   {"b1", Selector::kB1},   {"b2", Selector::kB2},
      {"b3", Selector::kB3},   {"h0", Selector::kH0},   {"h1", Selector::kH1},
      {"b10", Selector::kB10}, {"b21", Selector::kB21}, {"b32", Selector::kB32},
      {"b20", Selector::kB20}, {"b31", Selector::kB31}, {"b30", Selector::kB30},
  };
  for (auto [name, selector] : kNames)
    if (name == s) return selector;
  return selector_bits(s) ? Selector::kParts : Selector::kNone;
}

int component_named(std::string_view s) {
  if (s.size() != 1) return -1;
  switch (s[0]) {
    case 'x':
    case 'r':
      return 0;
    case 'y':
    case 'g':
      return 1;
    case 'z':
    case 'b':
      return 2;
    case 'w':
    case 'a':
      return 3;
    default:
      return -1;
  }
}

}  // namespace

// ---------------------------------------------------------------- operands

Operand BodyParser::group(OperandKind kind, const std::vector<Operand>& elements) {
  Operand o;
  o.kind = kind;
  o.first = static_cast<uint32_t>(body_->operands.size());
  o.count = static_cast<uint32_t>(elements.size());
  body_->operands.insert(body_->operands.end(), elements.begin(), elements.end());
  return o;
}

Operand BodyParser::label_operand() {
  Operand o;
  const uint32_t line = lexer_.token().line;
  scratch_uses_.push_back({scratch_.size(), {lexer_.expect_word("a label"), line, 0}});
  return o;
}

Operand BodyParser::constant() {
  const Constant c = parse_constant(lexer_);
  Operand o;
  switch (c.kind) {
    case Constant::Kind::kInteger:
      o.kind = OperandKind::kImmediate;
      break;
    case Constant::Kind::kFloat32:
      o.kind = OperandKind::kFloat32;
      break;
    case Constant::Kind::kFloat64:
      o.kind = OperandKind::kFloat64;
      break;
  }
  o.is_unsigned = c.is_unsigned;
  o.bits = c.bits;
  return o;
}

Operand BodyParser::operand(int depth) {
  if (depth > kMaxNesting) lexer_.fail("Operand is nested too deeply");
  const Token& t = lexer_.token();
  if (t.kind == TokenKind::kWord && t.text != "WARP_SZ") return name_operand(depth);
  if (t.is('{')) {
    lexer_.advance();
    std::vector<Operand> elements;
    while (!lexer_.token().is('}')) {
      elements.push_back(operand(depth + 1));
      if (elements.size() > kMaxOperands) lexer_.fail("Vector has too many elements");
      if (!lexer_.accept(',')) break;
    }
    lexer_.expect('}');
    return group(OperandKind::kVector, elements);
  }
  if (t.is('[')) return bracket(depth);
  if ((t.is('!') || t.is('-')) && lexer_.peek().kind == TokenKind::kWord &&
      lexer_.peek().text != "WARP_SZ") {
    lexer_.advance();
    Operand o = name_operand(depth);
    if (o.kind != OperandKind::kRegister) lexer_.fail_here();
    o.negated = true;
    return o;
  }
  if (starts_constant(t)) return constant();
  lexer_.fail_here();
}

Operand BodyParser::bracket(int depth) {
  lexer_.expect('[');
  const Token& t = lexer_.token();
  Operand first;
  if (t.kind == TokenKind::kWord && t.text != "WARP_SZ") {
    const uint32_t line = t.line;
    const std::string_view name = t.text;
    lexer_.advance();
    uint32_t index = kNoIndex;
    const Binding* b = find(name, &index);
    if (b && (b->kind == BindingKind::kRegister || b->kind == BindingKind::kNumbered)) {
      if (b->vector_width > 1) {
        const int component = t.kind == TokenKind::kDot ? component_named(t.text) : -1;
        if (component < 0 || component >= b->vector_width) lexer_.fail_here();
        lexer_.advance();
        index += static_cast<uint32_t>(component);
      }
      first.register_base = true;
      first.index = index;
    } else {
      first = symbol(name, line);
    }
    first.kind = OperandKind::kAddress;
    first.offset = parse_offset(lexer_);
  } else if (starts_constant(t)) {
    first = constant();
    if (first.kind != OperandKind::kImmediate) lexer_.fail("Address must be an integer");
    first.kind = OperandKind::kAddress;
  } else {
    lexer_.fail_here();
  }
  if (lexer_.accept(']')) return first;
  // [texture, sampler, {x, y}] and the like.
  std::vector<Operand> elements{first};
  while (lexer_.accept(',')) {
    elements.push_back(operand(depth + 1));
    if (elements.size() > kMaxOperands) lexer_.fail("Address has too many parts");
  }
  lexer_.expect(']');
  return group(OperandKind::kBracket, elements);
}

Operand BodyParser::register_operand(uint32_t index) {
  Operand o;
  o.kind = OperandKind::kRegister;
  o.index = index;
  return o;
}

void BodyParser::note_symbol(const Operand& o) {
  if (o.symbol == SymbolKind::kFunction && noted_callees_.insert(o.index).second)
    body_->callees.push_back(o.index);
  if (o.symbol == SymbolKind::kVariable && program_.variable(o.index).space == Space::kShared &&
      noted_shared_.insert(o.index).second) {
    body_->shared_variables.push_back(o.index);
  }
}

Operand BodyParser::symbol(std::string_view name, uint32_t line) {
  Operand o;
  o.kind = OperandKind::kSymbol;
  uint32_t unused = 0;
  if (const Binding* b = find(name, &unused)) {
    o.index = b->index;
    switch (b->kind) {
      case BindingKind::kLocal:
        o.symbol = SymbolKind::kLocal;
        break;
      case BindingKind::kParameter:
        o.symbol = SymbolKind::kParameter;
        break;
      case BindingKind::kReturn:
        o.symbol = SymbolKind::kReturn;
        break;
      case BindingKind::kVariable:
        o.symbol = SymbolKind::kVariable;
        break;
      default:
        throw ParseError{line, "'" + printable(name) + "' is a register"};
    }
  } else if (const LinkedProgram::Symbol* s = program_.find_symbol(function_.unit, name)) {
    o.symbol = s->kind;
    o.index = s->index;
  } else {
    throw ParseError{line, "Unknown symbol '" + printable(name) + "'"};
  }
  note_symbol(o);
  return o;
}

Operand BodyParser::name_operand(int depth) {
  const Token& t = lexer_.token();
  const uint32_t line = t.line;
  const std::string_view name = t.text;
  lexer_.advance();
  Operand o;
  uint32_t index = kNoIndex;
  if (name == "_") {
    o.kind = OperandKind::kSink;
  } else if (const Binding* b = find(name, &index);
             b && (b->kind == BindingKind::kRegister || b->kind == BindingKind::kNumbered)) {
    o = register_operand(index);
    if (b->vector_width > 1) {
      if (t.kind == TokenKind::kDot) {
        const int component = component_named(t.text);
        if (component < 0 || component >= b->vector_width) lexer_.fail_here();
        o.index += static_cast<uint32_t>(component);
        lexer_.advance();
      } else {
        std::vector<Operand> elements;
        for (uint32_t i = 0; i < b->vector_width; ++i)
          elements.push_back(register_operand(index + i));
        o = group(OperandKind::kVector, elements);
      }
    } else if (t.kind == TokenKind::kDot) {
      o.selector = selector_named(t.text);
      if (o.selector == Selector::kNone) lexer_.fail_here();
      o.bits = selector_bits(t.text);
      lexer_.advance();
    }
  } else if (auto special = b ? std::nullopt : special_named(name)) {
    o.kind = OperandKind::kSpecial;
    o.index = static_cast<uint32_t>(special->reg);
    if (special->vector && t.kind == TokenKind::kDot) {
      const int component = component_named(t.text);
      if (component < 0) lexer_.fail_here();
      o.component = static_cast<uint8_t>(component);
      lexer_.advance();
    } else if (!special->vector) {
      o.component = 0;
    }
  } else {
    o = symbol(name, line);
    o.offset = parse_offset(lexer_);
    return o;
  }
  if (depth <= 1 && t.is('|')) {
    lexer_.advance();
    std::vector<Operand> elements{o, operand(depth + 2)};
    for (const Operand& e : elements)
      if (e.kind != OperandKind::kRegister && e.kind != OperandKind::kSink) lexer_.fail_here();
    return group(OperandKind::kPair, elements);
  }
  return o;
}

}  // namespace gpupool::simgpu::ptx
