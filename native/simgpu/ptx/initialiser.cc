// Initialisers of variables: "{1, {2, 3}, symbol + 4, 0xff(symbol)}".
#include <algorithm>
#include <bit>
#include <cstring>

#include "simgpu/ptx/constants.h"
#include "simgpu/ptx/declarations.h"

namespace gpupool::simgpu::ptx {
namespace {

constexpr size_t kMaxSymbols = 1u << 22;  // each takes many times the memory of its text

class InitialiserParser {
 public:
  InitialiserParser(Lexer& lexer, VariableDeclaration& v) : lexer_(lexer), v_(v) {
    shape_ = v.dimensions;
    if (v.vector_width > 1) shape_.push_back(v.vector_width);
  }

  // The number of elements that were given, for arrays whose first dimension is left out.
  uint64_t parse() {
    if (lexer_.token().kind == TokenKind::kString) return string();
    if (lexer_.token().is('{')) {
      const bool open = !shape_.empty() && shape_[0] == 0;
      braces(0, 0, open ? kMaxVariableBytes : total());
    } else {
      scalar(0);
    }
    return last_;
  }

 private:
  uint64_t total() const {
    uint64_t n = 1;
    for (uint64_t d : shape_) n *= d;
    return n;
  }

  uint64_t stride(size_t level) const {
    uint64_t n = 1;
    for (size_t i = level + 1; i < shape_.size(); ++i) n *= shape_[i];
    return n;
  }

  void braces(size_t level, uint64_t base, uint64_t extent) {
    if (level > shape_.size()) lexer_.fail("Initialiser has more braces than dimensions");
    lexer_.expect('{');
    const uint64_t step = level < shape_.size() ? stride(level) : 1;
    uint64_t at = base;
    while (!lexer_.token().is('}')) {
      const bool nested = lexer_.token().is('{');
      if (nested && step > 1) at = base + (at - base + step - 1) / step * step;
      if (at >= base + extent) lexer_.fail("Too many initialisers for '" + v_.name + "'");
      if (nested) {
        braces(level + 1, at, step);
        at += step;
      } else {
        scalar(at++);
      }
      last_ = std::max(last_, at);
      if (!lexer_.accept(',')) break;
    }
    lexer_.expect('}');
  }

  void put(uint64_t element, uint64_t bits, bool negative) {
    const uint32_t size = bytes_of(v_.type);
    const uint64_t begin = element * size;
    if (v_.image.empty() || v_.image.back().position + v_.image.back().bytes.size() != begin)
      v_.image.push_back({begin, {}});
    std::vector<uint8_t>& run = v_.image.back().bytes;
    const size_t at = run.size();
    run.resize(at + size, negative ? 0xff : 0);
    memcpy(run.data() + at, &bits, size < 8 ? size : 8);
  }

  uint64_t string() {
    if (bytes_of(v_.type) != 1) lexer_.fail("A string initialises arrays of bytes only");
    uint64_t n = 0;
    for (char c : lexer_.token().text) put(n++, static_cast<uint8_t>(c), false);
    put(n++, 0, false);
    lexer_.advance();
    if (!shape_.empty() && shape_[0] != 0 && n > total()) lexer_.fail("String is too long");
    return n;
  }

  void scalar(uint64_t element) {
    const Token& t = lexer_.token();
    if (t.kind == TokenKind::kWord && t.text != "WARP_SZ") {
      symbol(element, 0);
      return;
    }
    const Constant c = parse_constant(lexer_);
    if (lexer_.token().is('(')) {  // 0xff00(symbol)
      if (c.kind != Constant::Kind::kInteger || c.bits == 0) lexer_.fail("Mask must not be 0");
      lexer_.advance();
      symbol(element, c.bits);
      lexer_.expect(')');
      return;
    }
    const bool to_float = v_.type == Type::kF32 || v_.type == Type::kF64;
    if (!to_float) {
      if (c.kind != Constant::Kind::kInteger && !is_untyped_bits(v_.type))
        lexer_.fail("Integer initialiser expected for '" + v_.name + "'");
      put(element, c.bits,
          c.kind == Constant::Kind::kInteger && !c.is_unsigned && static_cast<int64_t>(c.bits) < 0);
      return;
    }
    if (v_.type == Type::kF32 && c.kind == Constant::Kind::kFloat32) {
      put(element, c.bits, false);
      return;
    }
    double d = 0;
    switch (c.kind) {
      case Constant::Kind::kFloat32:
        d = std::bit_cast<float>(static_cast<uint32_t>(c.bits));
        break;
      case Constant::Kind::kFloat64:
        d = std::bit_cast<double>(c.bits);
        break;
      case Constant::Kind::kInteger:
        d = c.is_unsigned ? static_cast<double>(c.bits)
                          : static_cast<double>(static_cast<int64_t>(c.bits));
        break;
    }
    if (v_.type == Type::kF64) {
      put(element, std::bit_cast<uint64_t>(d), false);
    } else {
      put(element, std::bit_cast<uint32_t>(static_cast<float>(d)), false);
    }
  }

  void symbol(uint64_t element, uint64_t mask) {
    SymbolInitialiser s;
    s.position = element * bytes_of(v_.type);
    s.bytes = bytes_of(v_.type);
    s.mask = mask;
    s.line = lexer_.token().line;
    std::string_view name = lexer_.expect_word("a symbol");
    if (name == "generic" && lexer_.token().is('(')) {
      lexer_.advance();
      s.generic = true;
      s.symbol = lexer_.expect_word("a symbol");
      s.offset = parse_offset(lexer_);
      lexer_.expect(')');
    } else {
      s.symbol = name;
    }
    s.offset += parse_offset(lexer_);
    if (v_.symbols.size() >= kMaxSymbols) lexer_.fail("Too many addresses in an initialiser");
    v_.symbols.push_back(std::move(s));
  }

  Lexer& lexer_;
  VariableDeclaration& v_;
  std::vector<uint64_t> shape_;
  uint64_t last_ = 0;
};

}  // namespace

uint64_t parse_initialiser(Lexer& lexer, VariableDeclaration* variable) {
  return InitialiserParser(lexer, *variable).parse();
}

}  // namespace gpupool::simgpu::ptx
