// Tokens of PTX text, made one at a time without copying. Comments, line markers and debug
// directives that end with their line are dropped here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gpupool::simgpu::ptx {

enum class TokenKind : uint8_t {
  kEnd,
  kWord,     // identifier: letters, digits, _ $ %, not beginning with a digit
  kDot,      // .word or .word::word; text without the leading dot
  kInteger,  // bits; is_unsigned
  kFloat32,  // 0f...: bits
  kFloat64,  // 0d... or decimal: bits
  kString,   // text without the quotes, escapes left as they are
  kPunct,    // one character, or two of << >> && || == != <= >= @@
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  bool is_unsigned = false;
  char punct = 0;   // kPunct: first character
  char punct2 = 0;  // kPunct: second character or 0
  uint32_t line = 1;
  uint32_t begin = 0;  // offset in the text
  std::string_view text;
  uint64_t bits = 0;

  bool is(char c) const { return kind == TokenKind::kPunct && punct == c && punct2 == 0; }
  bool is(char a, char b) const { return kind == TokenKind::kPunct && punct == a && punct2 == b; }
  bool dot(std::string_view word) const { return kind == TokenKind::kDot && text == word; }
  bool word(std::string_view w) const { return kind == TokenKind::kWord && text == w; }
};

// Thrown by lexer and parsers, caught where a unit or a body is parsed.
struct ParseError {
  uint32_t line;
  std::string message;
};

class Lexer {
 public:
  Lexer(std::string_view text, size_t begin, size_t end, uint32_t line)
      : text_(text), at_(begin), end_(end), line_(line) {
    advance();
  }

  const Token& token() const { return token_; }
  // The token after the current one; the current one stays.
  const Token& peek();
  void advance();

  bool accept(char c) {
    if (!token_.is(c)) return false;
    advance();
    return true;
  }
  void expect(char c);
  std::string_view expect_word(const char* what);

  // The current token is '{': moves behind the matching '}' without making tokens. Gives the span,
  // braces included.
  void skip_braces(size_t* begin, size_t* end);
  // Drops tokens up to and including the next ';', or up to the next '}' or end.
  void skip_statement();
  // Drops what remains of the current token's line.
  void skip_line();

  [[noreturn]] void fail(const std::string& message) const;
  [[noreturn]] void fail_here() const;  // "Parsing error near '...': syntax error"

 private:
  void lex(Token* token);
  void lex_number(Token* token);
  void skip_blank();

  std::string_view text_;
  size_t at_;
  size_t end_;
  uint32_t line_;
  Token token_;
  Token next_;
  bool has_next_ = false;
};

// Text fit for a message: control characters replaced, at most 60 characters.
std::string printable(std::string_view text);

}  // namespace gpupool::simgpu::ptx
