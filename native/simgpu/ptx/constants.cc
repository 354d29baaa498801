#include "simgpu/ptx/constants.h"

#include <bit>
#include <string>

namespace gpupool::simgpu::ptx {
namespace {

constexpr int kMaxDepth = 64;  // nesting of expressions: hostile text must not exhaust the stack

struct Operator {
  int precedence;  // 0: none
  char a, b;
};

Operator binary_operator(const Token& t) {
  if (t.kind == TokenKind::kWord && t.text == "%") return {10, '%', 0};
  if (t.kind != TokenKind::kPunct) return {0, 0, 0};
  const char a = t.punct, b = t.punct2;
  if (b == 0) {
    switch (a) {
      case '*':
      case '/':
        return {10, a, b};
      case '+':
      case '-':
        return {9, a, b};
      case '<':
      case '>':
        return {7, a, b};
      case '&':
        return {5, a, b};
      case '^':
        return {4, a, b};
      case '|':
        return {3, a, b};
      default:
        return {0, 0, 0};
    }
  }
  if ((a == '<' && b == '<') || (a == '>' && b == '>')) return {8, a, b};
  if ((a == '<' || a == '>') && b == '=') return {7, a, b};
  if ((a == '=' || a == '!') && b == '=') return {6, a, b};
  if (a == '&' && b == '&') return {2, a, b};
  if (a == '|' && b == '|') return {1, a, b};
  return {0, 0, 0};
}

class Parser {
 public:
  explicit Parser(Lexer& lexer) : lexer_(lexer) {}

  Constant conditional(int depth) {
    Constant c = binary(1, depth);
    if (!lexer_.token().is('?')) return c;
    lexer_.advance();
    check(depth);
    Constant yes = conditional(depth + 1);
    lexer_.expect(':');
    Constant no = conditional(depth + 1);
    return truth(c) ? yes : no;
  }

  Constant binary(int least, int depth) {
    check(depth);
    Constant left = unary(depth + 1);
    for (;;) {
      const Operator op = binary_operator(lexer_.token());
      if (op.precedence < least || op.precedence == 0) return left;
      lexer_.advance();
      Constant right = binary(op.precedence + 1, depth + 1);
      left = apply(op, left, right);
    }
  }

  Constant unary(int depth) {
    check(depth);
    const Token& t = lexer_.token();
    if (t.is('-')) {
      lexer_.advance();
      Constant c = unary(depth + 1);
      switch (c.kind) {
        case Constant::Kind::kInteger:
          c.bits = 0 - c.bits;
          c.is_unsigned = false;
          break;
        case Constant::Kind::kFloat32:
          c.bits ^= 0x80000000u;
          break;
        case Constant::Kind::kFloat64:
          c.bits ^= 0x8000000000000000ull;
          break;
      }
      return c;
    }
    if (t.is('+')) {
      lexer_.advance();
      return unary(depth + 1);
    }
    if (t.is('~') || t.is('!')) {
      const bool invert = t.is('~');
      lexer_.advance();
      Constant c = unary(depth + 1);
      if (invert) {
        c.bits = ~integer(c);
      } else {
        c = {Constant::Kind::kInteger, false, truth(c) ? 0u : 1u};
      }
      return c;
    }
    if (t.is('(')) {
      lexer_.advance();
      if (lexer_.token().dot("s64") || lexer_.token().dot("u64")) {
        const bool is_unsigned = lexer_.token().dot("u64");
        lexer_.advance();
        lexer_.expect(')');
        Constant c = unary(depth + 1);
        integer(c);
        c.is_unsigned = is_unsigned;
        return c;
      }
      Constant c = conditional(depth + 1);
      lexer_.expect(')');
      return c;
    }
    return literal();
  }

 private:
  Constant literal() {
    const Token& t = lexer_.token();
    Constant c;
    switch (t.kind) {
      case TokenKind::kInteger:
        c = {Constant::Kind::kInteger, t.is_unsigned, t.bits};
        break;
      case TokenKind::kFloat32:
        c = {Constant::Kind::kFloat32, false, t.bits};
        break;
      case TokenKind::kFloat64:
        c = {Constant::Kind::kFloat64, false, t.bits};
        break;
      case TokenKind::kWord:
        if (t.text != "WARP_SZ") lexer_.fail_here();
        c = {Constant::Kind::kInteger, false, 32};
        break;
      default:
        lexer_.fail_here();
    }
    lexer_.advance();
    return c;
  }

  void check(int depth) {
    if (depth > kMaxDepth) lexer_.fail("Constant expression is nested too deeply");
  }

  uint64_t integer(const Constant& c) {
    if (c.kind != Constant::Kind::kInteger) lexer_.fail("Integer constant expression expected");
    return c.bits;
  }

  bool truth(const Constant& c) { return integer(c) != 0; }

  static double to_double(const Constant& c) {
    switch (c.kind) {
      case Constant::Kind::kFloat32:
        return std::bit_cast<float>(static_cast<uint32_t>(c.bits));
      case Constant::Kind::kFloat64:
        return std::bit_cast<double>(c.bits);
      default:
        return c.is_unsigned ? static_cast<double>(c.bits)
                             : static_cast<double>(static_cast<int64_t>(c.bits));
    }
  }

  Constant apply(Operator op, const Constant& l, const Constant& r) {
    if (l.kind != Constant::Kind::kInteger || r.kind != Constant::Kind::kInteger) {
      const double a = to_double(l), b = to_double(r);
      double v = 0;
      if (op.b != 0) lexer_.fail("Integer constant expression expected");
      switch (op.a) {
        case '+':
          v = a + b;
          break;
        case '-':
          v = a - b;
          break;
        case '*':
          v = a * b;
          break;
        case '/':
          v = a / b;
          break;
        default:
          lexer_.fail("Integer constant expression expected");
      }
      return {Constant::Kind::kFloat64, false, std::bit_cast<uint64_t>(v)};
    }
    const uint64_t a = l.bits, b = r.bits;
    const bool u = l.is_unsigned || r.is_unsigned;
    const int64_t sa = static_cast<int64_t>(a), sb = static_cast<int64_t>(b);
    auto result = [&](uint64_t bits) { return Constant{Constant::Kind::kInteger, u, bits}; };
    auto boolean = [](bool v) { return Constant{Constant::Kind::kInteger, false, v ? 1u : 0u}; };
    if (op.b == 0) {
      switch (op.a) {
        case '+':
          return result(a + b);
        case '-':
          return result(a - b);
        case '*':
          return result(a * b);
        case '&':
          return result(a & b);
        case '^':
          return result(a ^ b);
        case '|':
          return result(a | b);
        case '<':
          return boolean(u ? a < b : sa < sb);
        case '>':
          return boolean(u ? a > b : sa > sb);
        default:
          break;
      }
      if (b == 0) lexer_.fail("Division by zero in a constant expression");
      const bool divide = op.a == '/';
      if (u) return result(divide ? a / b : a % b);
      if (sb == -1) return result(divide ? 0 - a : 0);
      return result(static_cast<uint64_t>(divide ? sa / sb : sa % sb));
    }
    switch (op.a) {
      case '<':
        if (op.b == '=') return boolean(u ? a <= b : sa <= sb);
        return {Constant::Kind::kInteger, l.is_unsigned, b > 63 ? 0 : a << b};
      case '>':
        if (op.b == '=') return boolean(u ? a >= b : sa >= sb);
        if (l.is_unsigned) return {Constant::Kind::kInteger, true, b > 63 ? 0 : a >> b};
        return {Constant::Kind::kInteger, false, static_cast<uint64_t>(sa >> (b > 63 ? 63 : b))};
      case '=':
        return boolean(a == b);
      case '!':
        return boolean(a != b);
      case '&':
        return boolean(a && b);
      default:
        return boolean(a || b);
    }
  }

  Lexer& lexer_;
};

}  // namespace

bool starts_constant(const Token& t) {
  switch (t.kind) {
    case TokenKind::kInteger:
    case TokenKind::kFloat32:
    case TokenKind::kFloat64:
      return true;
    case TokenKind::kWord:
      return t.text == "WARP_SZ";
    case TokenKind::kPunct:
      return t.is('-') || t.is('+') || t.is('~') || t.is('!') || t.is('(');
    default:
      return false;
  }
}

Constant parse_constant(Lexer& lexer) { return Parser(lexer).conditional(0); }

int64_t parse_integer(Lexer& lexer, int64_t low, int64_t high, const char* what) {
  const Constant c = parse_constant(lexer);
  const int64_t v = static_cast<int64_t>(c.bits);
  if (c.kind != Constant::Kind::kInteger || v < low || v > high || (c.is_unsigned && v < 0))
    lexer.fail(std::string(what) + " out of range");
  return v;
}

int64_t parse_offset(Lexer& lexer) {
  uint64_t sum = 0;
  while (lexer.token().is('+') || lexer.token().is('-')) {
    const bool minus = lexer.token().is('-');
    lexer.advance();
    const Constant c = Parser(lexer).binary(10, 0);
    if (c.kind != Constant::Kind::kInteger) lexer.fail("Address offset must be an integer");
    sum = minus ? sum - c.bits : sum + c.bits;
  }
  return static_cast<int64_t>(sum);
}

}  // namespace gpupool::simgpu::ptx
