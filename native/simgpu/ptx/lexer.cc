#include "simgpu/ptx/lexer.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>

namespace gpupool::simgpu::ptx {
namespace {

enum : uint8_t { kBlank = 1, kNameStart = 2, kName = 4, kDigit = 8 };

constexpr std::array<uint8_t, 256> make_classes() {
  std::array<uint8_t, 256> c{};
  for (int i = 'a'; i <= 'z'; ++i) c[i] = kNameStart | kName;
  for (int i = 'A'; i <= 'Z'; ++i) c[i] = kNameStart | kName;
  for (int i = '0'; i <= '9'; ++i) c[i] = kName | kDigit;
  c['_'] = c['$'] = c['%'] = kNameStart | kName;
  c[' '] = c['\t'] = c['\r'] = c['\n'] = c['\f'] = c['\v'] = c['\0'] = kBlank;
  return c;
}
constexpr auto kClasses = make_classes();

uint8_t class_of(char c) { return kClasses[static_cast<uint8_t>(c)]; }

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  for (char c : text.substr(0, 60)) out += (c < 32 || c == 127) ? '?' : c;
  if (text.size() > 60) out += "...";
  return out;
}

void Lexer::fail(const std::string& message) const { throw ParseError{token_.line, message}; }

void Lexer::fail_here() const {
  if (token_.kind == TokenKind::kEnd) fail("Parsing error: unexpected end of file");
  std::string near = token_.kind == TokenKind::kDot ? "." : "";
  fail("Parsing error near '" + near + printable(token_.text) + "': syntax error");
}

void Lexer::expect(char c) {
  if (!accept(c)) fail_here();
}

std::string_view Lexer::expect_word(const char* what) {
  if (token_.kind != TokenKind::kWord) {
    if (token_.kind == TokenKind::kEnd) fail_here();
    fail(std::string("Parsing error near '") + printable(token_.text) + "': expected " + what);
  }
  std::string_view text = token_.text;
  advance();
  return text;
}

void Lexer::skip_blank() {
  while (at_ < end_) {
    char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
    } else if (class_of(c) & kBlank) {
      ++at_;
    } else if (c == '/' && at_ + 1 < end_ && text_[at_ + 1] == '/') {
      const void* eol = memchr(text_.data() + at_, '\n', end_ - at_);
      at_ = eol ? static_cast<const char*>(eol) - text_.data() : end_;
    } else if (c == '/' && at_ + 1 < end_ && text_[at_ + 1] == '*') {
      size_t close = text_.substr(0, end_).find("*/", at_ + 2);
      if (close == std::string_view::npos) throw ParseError{line_, "Unterminated comment"};
      for (size_t i = at_; i < close; ++i) line_ += text_[i] == '\n';
      at_ = close + 2;
    } else if (c == '#' || (c == '@' && at_ + 1 < end_ && text_[at_ + 1] == '@')) {
      // "# 12 file" of a preprocessor, "@@DWARF ..." of very old compilers.
      const void* eol = memchr(text_.data() + at_, '\n', end_ - at_);
      at_ = eol ? static_cast<const char*>(eol) - text_.data() : end_;
    } else {
      return;
    }
  }
}

void Lexer::advance() {
  if (has_next_) {
    token_ = next_;
    has_next_ = false;
  } else {
    lex(&token_);
  }
}

const Token& Lexer::peek() {
  if (!has_next_) {
    lex(&next_);
    has_next_ = true;
  }
  return next_;
}

void Lexer::lex(Token* token) {
  skip_blank();
  token->line = line_;
  token->begin = static_cast<uint32_t>(at_);
  token->is_unsigned = false;
  token->punct = token->punct2 = 0;
  if (at_ >= end_) {
    token->kind = TokenKind::kEnd;
    token->text = {};
    return;
  }
  const size_t begin = at_;
  const char c = text_[at_];
  const uint8_t cls = class_of(c);
  if (cls & kNameStart) {
    while (at_ < end_ && (class_of(text_[at_]) & kName)) ++at_;
    token->kind = TokenKind::kWord;
    token->text = text_.substr(begin, at_ - begin);
    return;
  }
  if (c == '.' && at_ + 1 < end_ && (class_of(text_[at_ + 1]) & kName)) {
    ++at_;
    for (;;) {
      while (at_ < end_ && (class_of(text_[at_]) & kName)) ++at_;
      if (at_ + 2 < end_ && text_[at_] == ':' && text_[at_ + 1] == ':' &&
          (class_of(text_[at_ + 2]) & kName)) {
        at_ += 2;
        continue;
      }
      break;
    }
    token->kind = TokenKind::kDot;
    token->text = text_.substr(begin + 1, at_ - begin - 1);
    return;
  }
  if (cls & kDigit) {
    lex_number(token);
    return;
  }
  if (c == '"') {
    ++at_;
    while (at_ < end_ && text_[at_] != '"') {
      if (text_[at_] == '\n') ++line_;
      if (text_[at_] == '\\' && at_ + 1 < end_) ++at_;
      ++at_;
    }
    if (at_ >= end_) throw ParseError{token->line, "Unterminated string"};
    token->kind = TokenKind::kString;
    token->text = text_.substr(begin + 1, at_ - begin - 1);
    ++at_;
    return;
  }
  token->kind = TokenKind::kPunct;
  token->punct = c;
  ++at_;
  if (at_ < end_) {
    const char d = text_[at_];
    if ((c == d && (c == '<' || c == '>' || c == '&' || c == '|' || c == '=')) ||
        (d == '=' && (c == '!' || c == '<' || c == '>'))) {
      token->punct2 = d;
      ++at_;
    }
  }
  token->text = text_.substr(begin, at_ - begin);
}

void Lexer::lex_number(Token* token) {
  const size_t begin = at_;
  auto finish = [&](TokenKind kind, uint64_t bits) {
    token->kind = kind;
    token->bits = bits;
    token->text = text_.substr(begin, at_ - begin);
    if (at_ < end_ && (class_of(text_[at_]) & kName)) {
      size_t stop = at_;
      while (stop < end_ && (class_of(text_[stop]) & kName)) ++stop;
      throw ParseError{line_, "Parsing error near '" +
                                  printable(text_.substr(begin, stop - begin)) + "': not a number"};
    }
  };
  const char c1 = at_ + 1 < end_ ? text_[at_ + 1] : '\0';
  if (text_[at_] == '0' && (c1 == 'f' || c1 == 'F' || c1 == 'd' || c1 == 'D')) {
    const bool single = c1 == 'f' || c1 == 'F';
    const int digits = single ? 8 : 16;
    at_ += 2;
    uint64_t value = 0;
    int count = 0;
    while (at_ < end_ && hex_digit(text_[at_]) >= 0 && count < digits) {
      value = value << 4 | static_cast<uint64_t>(hex_digit(text_[at_]));
      ++at_;
      ++count;
    }
    if (count != digits) throw ParseError{line_, "Floating-point literal with too few digits"};
    finish(single ? TokenKind::kFloat32 : TokenKind::kFloat64, value);
    return;
  }
  uint64_t value = 0;
  bool overflow = false;
  auto digits = [&](int base) {
    while (at_ < end_) {
      const int d = hex_digit(text_[at_]);
      if (d < 0 || d >= base) break;
      overflow |= value > (~uint64_t{0} - static_cast<uint64_t>(d)) / static_cast<uint64_t>(base);
      value = value * static_cast<uint64_t>(base) + static_cast<uint64_t>(d);
      ++at_;
    }
  };
  auto integer = [&] {
    if (overflow) throw ParseError{line_, "Integer literal doesn't fit into 64 bits"};
    if (at_ < end_ && (text_[at_] == 'U' || text_[at_] == 'u')) {
      token->is_unsigned = true;
      ++at_;
    }
    if (value > 0x7fffffffffffffffull) token->is_unsigned = true;
    finish(TokenKind::kInteger, value);
  };
  if (text_[at_] == '0' && (c1 == 'x' || c1 == 'X')) {
    at_ += 2;
    digits(16);
    if (at_ == begin + 2) throw ParseError{line_, "Hexadecimal literal without digits"};
    integer();
    return;
  }
  if (text_[at_] == '0' && (c1 == 'b' || c1 == 'B')) {
    at_ += 2;
    digits(2);
    if (at_ == begin + 2) throw ParseError{line_, "Binary literal without digits"};
    integer();
    return;
  }
  // Decimal, octal (leading 0) or a decimal floating-point literal.
  size_t stop = at_;
  while (stop < end_ && (class_of(text_[stop]) & kDigit)) ++stop;
  bool is_float = false;
  if (stop < end_ && text_[stop] == '.') {
    is_float = true;
    ++stop;
    while (stop < end_ && (class_of(text_[stop]) & kDigit)) ++stop;
  }
  if (stop < end_ && (text_[stop] == 'e' || text_[stop] == 'E')) {
    size_t s = stop + 1;
    if (s < end_ && (text_[s] == '+' || text_[s] == '-')) ++s;
    if (s < end_ && (class_of(text_[s]) & kDigit)) {
      is_float = true;
      while (s < end_ && (class_of(text_[s]) & kDigit)) ++s;
      stop = s;
    }
  }
  if (is_float) {
    double d = 0;
    auto [ptr, ec] = std::from_chars(text_.data() + at_, text_.data() + stop, d);
    if (ec == std::errc::result_out_of_range) {  // from_chars leaves d alone; strtod gives 0 or inf
      d = std::strtod(std::string(text_.substr(at_, stop - at_)).c_str(), nullptr);
    } else if (ec != std::errc() || ptr != text_.data() + stop) {
      throw ParseError{line_, "Malformed floating-point literal"};
    }
    at_ = stop;
    finish(TokenKind::kFloat64, std::bit_cast<uint64_t>(d));
    return;
  }
  digits(text_[at_] == '0' ? 8 : 10);
  integer();
}

void Lexer::skip_braces(size_t* begin, size_t* end) {
  // The current token is '{' and nothing behind it was lexed.
  *begin = token_.begin;
  const uint32_t first_line = token_.line;
  int depth = 1;
  while (at_ < end_) {
    const char c = text_[at_];
    if (c == '\n') {
      ++line_;
    } else if (c == '{') {
      ++depth;
    } else if (c == '}') {
      if (--depth == 0) {
        ++at_;
        *end = at_;
        advance();
        return;
      }
    } else if (c == '"') {
      ++at_;
      while (at_ < end_ && text_[at_] != '"' && text_[at_] != '\n') {
        if (text_[at_] == '\\' && at_ + 1 < end_ && text_[at_ + 1] != '\n') ++at_;
        ++at_;
      }
      if (at_ < end_ && text_[at_] == '\n') ++line_;
    } else if (c == '/' && at_ + 1 < end_ && (text_[at_ + 1] == '/' || text_[at_ + 1] == '*')) {
      skip_blank();
      continue;
    }
    ++at_;
  }
  throw ParseError{first_line, "Parsing error: '{' without '}'"};
}

void Lexer::skip_statement() {
  while (token_.kind != TokenKind::kEnd && !token_.is('}')) {
    const bool done = token_.is(';');
    advance();
    if (done) return;
  }
}

void Lexer::skip_line() {
  const uint32_t line = token_.line;
  while (token_.kind != TokenKind::kEnd && token_.line == line) advance();
}

}  // namespace gpupool::simgpu::ptx
