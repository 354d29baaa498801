#include "frontdoor/ptx_scan.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

namespace gpupool::frontdoor {
namespace {

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '$' || c == '%' || c == '.' || (c & 0x80) != 0;
}

// Words (with the dots that begin or join them), numbers, strings and single other characters.
class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text.substr(0, text.find('\0'))) { advance(); }

  std::string_view token() const { return token_; }
  bool at_end() const { return token_.empty(); }
  bool is(std::string_view expected) const { return token_ == expected; }

  void advance() {
    skip_space();
    const size_t start = start_ = at_;
    if (at_ >= text_.size()) {
      token_ = {};
      return;
    }
    if (text_[at_] == '"') {
      skip_string();
    } else if (is_word(text_[at_])) {
      ++at_;
      // A directive begins a new word, unless the dot is inside of a number or a name.
      while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    } else {
      look_for_line_comment();
      ++at_;
    }
    token_ = text_.substr(start, at_ - start);
  }

  bool accept(std::string_view expected) {
    if (token_ != expected) return false;
    advance();
    return true;
  }

  // With the current token an opening brace: to the token after its partner. False: there is none.
  bool skip_braces() {
    int depth = 1;
    while (at_ < text_.size()) {
      const size_t next = text_.find_first_of("{}\"/#@", at_);
      if (next == std::string_view::npos) break;
      at_ = next;
      const char c = text_[at_];
      if (c == '/') {
        const size_t before = at_;
        skip_space();
        if (at_ == before) ++at_;
      } else if (c == '"') {
        skip_string();
      } else if (c == '#' || c == '@') {
        look_for_line_comment();
        ++at_;
      } else {
        ++at_;
        depth += c == '{' ? 1 : -1;
        if (depth == 0) {
          advance();
          return true;
        }
      }
    }
    at_ = text_.size();
    token_ = {};
    return false;
  }

  // In a function's body, with the current token its opening brace or what follows a declaration:
  // to the next declaration of a variable, which becomes the current token, or, when `depth` is 0,
  // to the token after the body. False: the body does not end.
  bool next_in_body(int* depth) {
    if (*depth > 0) at_ = start_;
    if (*depth == 0) *depth = 1;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      switch (c) {
        case '{':
        case '}':
          ++at_;
          *depth += c == '{' ? 1 : -1;
          if (*depth == 0) {
            advance();
            return true;
          }
          break;
        case '"':
          skip_string();
          break;
        case '#':
        case '@':
          look_for_line_comment();
          ++at_;
          break;
        case '/': {
          const size_t before = at_;
          skip_space();
          if (at_ == before) ++at_;
          break;
        }
        case '.':
          if (!is_word(text_[at_ - 1]) &&
              (text_.substr(at_, 7) == ".global" || text_.substr(at_, 6) == ".const")) {
            advance();
            return true;
          }
          ++at_;
          break;
        default:
          ++at_;
      }
    }
    token_ = {};
    return false;
  }

  // A string with an escape or a line's end in it, or a line of a preprocessor or an old debugger
  // (# and @@): compilers differ about where it ends and whether a comment can begin in it.
  bool strange() const { return strange_; }

  void skip_line() {
    const size_t end = text_.find('\n', at_);
    at_ = end == std::string_view::npos ? text_.size() : end;
    advance();
  }

  int line() const {
    return 1 + static_cast<int>(
                   std::count(text_.begin(), text_.begin() + std::min(at_, text_.size()), '\n'));
  }

 private:
  void skip_string() {
    const size_t end = text_.find('"', at_ + 1);
    const std::string_view inside =
        text_.substr(at_ + 1, end == std::string_view::npos ? end : end - at_ - 1);
    strange_ = strange_ || inside.find_first_of("\\\n\r") != std::string_view::npos;
    at_ = end == std::string_view::npos ? text_.size() : end + 1;
  }

  void look_for_line_comment() {
    if (text_[at_] == '#' || text_.substr(at_, 2) == "@@") strange_ = true;
  }

  void skip_space() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v') {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.substr(at_, 2) == "/*") {
        const size_t end = text_.find("*/", at_ + 2);
        at_ = end == std::string_view::npos ? text_.size() : end + 2;
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  size_t at_ = 0, start_ = 0;  // behind and at the current token
  std::string_view token_;
  bool strange_ = false;
};

std::optional<uint64_t> number(std::string_view text) {
  int base = 10;
  if (text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  } else if (text.size() > 1 && text[0] == '0') {
    base = 8;
  }
  if (text.ends_with('U')) text.remove_suffix(1);
  uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Bytes of a fundamental type; 0: it is none.
uint32_t type_bytes(std::string_view type) {
  if (type == ".texref" || type == ".samplerref" || type == ".surfref") return 8;
  if (type == ".f16x2" || type == ".bf16x2") return 4;
  if (type == ".pred") return 1;
  if (type.size() < 3 || type[0] != '.') return 0;
  std::string_view bits = type.substr(2);
  if (type.starts_with(".bf")) {
    bits = type.substr(3);
  } else if (type[1] != 'b' && type[1] != 's' && type[1] != 'u' && type[1] != 'f') {
    return 0;
  }
  if (bits == "8") return 1;
  if (bits == "16") return 2;
  if (bits == "32") return 4;
  if (bits == "64") return 8;
  if (bits == "128") return 16;
  return 0;
}

// What a module-level variable or a parameter declares.
struct Declaration {
  std::string_view name;
  uint64_t bytes = 0;
  uint32_t alignment = 0;
  bool unsized = false;  // name[]: the initialiser gives the size
};

constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 40;
constexpr uint64_t kVariableUnit = 512;
constexpr int kMaxDepth = 64;  // of constant expressions

class Scanner {
 public:
  Scanner(std::string_view text, ProgramInfo* info) : lexer_(text), info_(info) {}

  bool run(std::string* why) {
    while (!lexer_.at_end() && ok_) statement();
    if (ok_ && target_.architecture == 0) fail("there is no .target");
    if (ok_ && lexer_.strange()) fail("something whose end is not certain is in it");
    if (!ok_ && why != nullptr) *why = why_;
    info_->architecture = target_.architecture;
    return ok_;
  }

  PtxTarget target_only() {
    while (!lexer_.at_end() && ok_ && target_.architecture == 0) statement();
    return target_;
  }

 private:
  void fail(const std::string& what) {
    if (!ok_) return;
    ok_ = false;
    why_ = "line " + std::to_string(lexer_.line()) + ": " + what;
  }

  void statement() {
    if (lexer_.accept(".visible") || lexer_.accept(".weak") || lexer_.accept(".common")) return;
    if (lexer_.accept(".extern")) {
      extern_ = true;
      return;
    }
    const bool is_extern = std::exchange(extern_, false);
    if (lexer_.accept(".version")) return version();
    if (lexer_.accept(".target")) return target();
    if (lexer_.accept(".address_size")) return lexer_.advance();
    if (lexer_.is(".file") || lexer_.is(".loc")) return lexer_.skip_line();
    if (lexer_.accept(".section")) return section();
    if (lexer_.accept(".entry")) return entry(is_extern);
    if (lexer_.accept(".func")) return skip_function();
    if (lexer_.accept(".global")) return variables(is_extern, false);
    if (lexer_.accept(".const")) return variables(is_extern, true);
    if (lexer_.is(".shared") || lexer_.is(".tex") || lexer_.is(".pragma") || lexer_.is(".alias") ||
        lexer_.is(".local")) {
      return skip_statement();
    }
    if (lexer_.accept(";")) return;
    fail("unexpected '" + std::string(lexer_.token().substr(0, 40)) + "'");
  }

  void version() {
    const std::string_view token = lexer_.token();
    const size_t dot = token.find('.');
    auto major = number(token.substr(0, dot));
    auto minor = dot == std::string_view::npos ? std::nullopt : number(token.substr(dot + 1));
    if (!major || !minor) return fail("the .version is no number");
    target_.version = static_cast<int>(*major * 10 + *minor);
    lexer_.advance();
  }

  void target() {
    do {
      std::string_view token = lexer_.token();
      if (token.starts_with("sm_") || token.starts_with("compute_")) {
        token.remove_prefix(token.find('_') + 1);
        if (token.ends_with('a')) target_.exact = true;
        // sm_100f: every device of the family; treated as exact, which is the safe side.
        if (token.ends_with('f')) target_.exact = true;
        if (target_.exact) token.remove_suffix(1);
        auto value = number(token);
        if (!value || *value > 10000) return fail("the .target is unknown");
        target_.architecture = static_cast<int>(*value);
      }
      lexer_.advance();
    } while (lexer_.accept(","));
  }

  void section() {
    while (!lexer_.at_end() && !lexer_.is("{")) lexer_.advance();
    if (!lexer_.skip_braces()) fail("a section does not end");
  }

  void skip_statement() {
    while (!lexer_.at_end() && !lexer_.is(";")) {
      if (lexer_.is("{")) {
        if (!lexer_.skip_braces()) return fail("an initialiser does not end");
      } else {
        lexer_.advance();
      }
    }
    lexer_.advance();
  }

  void skip_function() {
    while (!lexer_.at_end()) {
      if (lexer_.accept(";")) return;
      if (lexer_.is("{")) return body("a function does not end");
      lexer_.advance();
    }
    fail("a function does not end");
  }

  // What is declared in it takes memory like the module's own variables.
  void body(const std::string& without_end) {
    int depth = 0;
    do {
      if (!lexer_.next_in_body(&depth)) return fail(without_end);
      if (depth == 0) return;
      const bool constant = lexer_.is(".const");
      if (!lexer_.accept(".global") && !lexer_.accept(".const")) {
        return fail("'" + std::string(lexer_.token().substr(0, 40)) + "' may be a declaration");
      }
      variables(false, constant);
    } while (ok_);
  }

  // [.align N] .type [.ptr …] name [dimensions]; with the tokens of the state space taken already.
  bool declaration(Declaration* result) {
    uint32_t element = 0;
    uint64_t vector = 1;
    while (lexer_.token().starts_with('.')) {
      if (lexer_.accept(".align")) {
        auto value = number(lexer_.token());
        if (!value || *value == 0 || *value > 4096) return fail("an alignment is wrong"), false;
        result->alignment = static_cast<uint32_t>(*value);
        lexer_.advance();
      } else if (lexer_.accept(".ptr")) {
        // What a pointer points to: a space and an alignment, which are not the parameter's.
        while (lexer_.token().starts_with('.')) {
          if (lexer_.accept(".align"))
            lexer_.advance();
          else
            lexer_.advance();
        }
      } else if (lexer_.accept(".v2")) {
        vector = 2;
      } else if (lexer_.accept(".v4")) {
        vector = 4;
      } else if (lexer_.accept(".attribute")) {
        int depth = 0;
        do {
          if (lexer_.is("(")) ++depth;
          if (lexer_.is(")")) --depth;
          if (lexer_.is(".managed")) managed_ = true;
          lexer_.advance();
        } while (depth > 0 && !lexer_.at_end());
      } else {
        const uint32_t bytes = type_bytes(lexer_.token());
        if (bytes != 0) element = bytes;
        lexer_.advance();
      }
    }
    if (element == 0) return fail("a declaration has no type"), false;
    element_ = element * vector;
    return declarator(result);
  }

  // A constant expression of whole numbers that are not negative, up to an operator that binds less
  // tightly than `least`. nullopt: something else, or a sum or product beyond 64 bits.
  std::optional<uint64_t> expression(int least, int depth) {
    auto left = operand(depth);
    while (left) {
      char op = lexer_.token().size() == 1 ? lexer_.token()[0] : '\0';
      int binds = -1;
      if (op == '*' || op == '/') binds = 5;
      if (op == '+' || op == '-') binds = 4;
      if (op == '<' || op == '>') binds = 3;
      if (op == '&') binds = 2;
      if (op == '^') binds = 1;
      if (op == '|') binds = 0;
      if (binds < least) return left;
      lexer_.advance();
      // A shift; comparisons and logical operators are none of a size's.
      if (binds == 3 && !lexer_.accept(std::string_view(&op, 1))) return std::nullopt;
      const auto right = expression(binds + 1, depth + 1);
      if (!right) return right;
      uint64_t value = 0;
      bool wrong = false;
      if (op == '+') wrong = __builtin_add_overflow(*left, *right, &value);
      if (op == '-') wrong = __builtin_sub_overflow(*left, *right, &value);
      if (op == '*') wrong = __builtin_mul_overflow(*left, *right, &value);
      if (op == '/') wrong = *right == 0;
      if (op == '/' && !wrong) value = *left / *right;
      if (op == '<') wrong = *right > 63 || (*left << *right) >> *right != *left;
      if (op == '<' && !wrong) value = *left << *right;
      if (op == '>') wrong = *right > 63;
      if (op == '>' && !wrong) value = *left >> *right;
      if (op == '&') value = *left & *right;
      if (op == '^') value = *left ^ *right;
      if (op == '|') value = *left | *right;
      if (wrong || value > INT64_MAX) return std::nullopt;
      left = value;
    }
    return left;
  }

  std::optional<uint64_t> operand(int depth) {
    if (depth > kMaxDepth) return std::nullopt;
    std::optional<uint64_t> value;
    if (lexer_.accept("(")) {
      value = expression(0, depth + 1);
      if (!lexer_.accept(")")) return std::nullopt;
      return value;
    }
    value = lexer_.is("WARP_SZ") ? 32 : number(lexer_.token());
    if (value && *value > INT64_MAX) return std::nullopt;
    lexer_.advance();
    return value;
  }

  // For compilers a directive may follow a name without a space.
  std::string_view name() {
    const std::string_view found = lexer_.token();
    if (found.find('.') != std::string_view::npos) fail("a name has a dot in it");
    lexer_.advance();
    return found;
  }

  // name [dimensions], of elements of element_ bytes
  bool declarator(Declaration* result) {
    result->name = name();
    uint64_t bytes = element_;
    while (lexer_.accept("[")) {
      if (lexer_.accept("]")) {
        result->unsized = true;
        continue;
      }
      const auto value = expression(0, 0);
      if (!value || !lexer_.accept("]")) return fail("an array's size is wrong"), false;
      if (*value != 0 && bytes > kMaxVariableBytes / *value)
        return fail("an array is too large"), false;
      bytes *= *value;
    }
    result->bytes = bytes;
    if (result->alignment == 0) result->alignment = static_cast<uint32_t>(element_);
    return true;
  }

  void entry(bool is_extern) {
    KernelLayout kernel;
    kernel.name = name();
    if (lexer_.accept("(")) {
      uint64_t offset = 0;
      while (ok_ && !lexer_.accept(")")) {
        if (!lexer_.accept(".param")) return fail("a parameter list is wrong");
        Declaration parameter;
        if (!declaration(&parameter)) return;
        offset = (offset + parameter.alignment - 1) / parameter.alignment * parameter.alignment;
        if (parameter.unsized || offset + parameter.bytes > kMaxParameterBytes) {
          return fail("the parameters are too large");
        }
        kernel.parameters.push_back(
            {static_cast<uint32_t>(offset), static_cast<uint32_t>(parameter.bytes)});
        offset += parameter.bytes;
        if (!lexer_.accept(",") && !lexer_.is(")")) return fail("a parameter list is wrong");
      }
      kernel.parameter_bytes = static_cast<uint32_t>(offset);
    }
    while (!lexer_.at_end() && !lexer_.is("{") && !lexer_.is(";")) {
      if (lexer_.accept(".maxntid")) {
        shape(kernel.max_threads);
      } else if (lexer_.accept(".reqntid")) {
        shape(kernel.required_threads);
      } else {
        lexer_.advance();
      }
    }
    if (lexer_.accept(";")) return;  // a declaration only
    body("the kernel " + kernel.name + " does not end");
    if (!ok_ || is_extern) return;
    if (info_->kernels.size() >= kMaxKernels) return fail("there are too many kernels");
    info_->kernels.push_back(std::move(kernel));
  }

  void shape(uint32_t (&values)[3]) {
    for (uint32_t& value : values) value = 1;
    for (int i = 0; i < 3; ++i) {
      auto value = number(lexer_.token());
      if (!value || *value > UINT32_MAX) return fail("a block's shape is wrong");
      values[i] = static_cast<uint32_t>(*value);
      lexer_.advance();
      if (!lexer_.accept(",")) return;
    }
  }

  void variables(bool is_extern, bool constant) {
    managed_ = false;
    Declaration variable;
    if (!declaration(&variable)) return;
    for (;;) {
      if (lexer_.accept("=")) {
        const uint64_t elements = initialiser();
        if (variable.unsized &&
            variable.bytes > kMaxVariableBytes / std::max<uint64_t>(1, elements))
          return fail("an array is too large");
        if (variable.unsized) variable.bytes *= elements;
        variable.unsized = false;
      }
      if (!ok_) return;
      if (!is_extern && !variable.unsized) {
        if (info_->globals.size() >= kMaxGlobals) return fail("there are too many variables");
        info_->globals.push_back({std::string(variable.name), variable.bytes, constant, managed_});
        const uint64_t unit = std::max<uint64_t>(kVariableUnit, variable.alignment);
        const uint64_t bytes = std::max<uint64_t>(1, variable.bytes);
        // No variable is beyond kMaxVariableBytes, and there are at most kMaxGlobals.
        info_->variable_bytes += (bytes + unit - 1) / unit * unit;
      }
      if (!lexer_.accept(",")) break;
      variable = {};
      if (!declarator(&variable)) return;
    }
    if (!lexer_.accept(";")) fail("a variable's declaration is wrong");
  }

  // Skips it; the number of its outermost elements.
  uint64_t initialiser() {
    uint64_t elements = 1;
    int depth = 0;
    while (!lexer_.at_end()) {
      if (depth == 0 && (lexer_.is(",") || lexer_.is(";"))) return elements;
      if (lexer_.is("{") || lexer_.is("(")) ++depth;
      if (lexer_.is("}") || lexer_.is(")")) --depth;
      if (lexer_.is(",") && depth == 1) ++elements;
      lexer_.advance();
    }
    fail("an initialiser does not end");
    return 0;
  }

  Lexer lexer_;
  ProgramInfo* info_;
  PtxTarget target_;
  uint64_t element_ = 0;
  bool extern_ = false;
  bool managed_ = false;
  bool ok_ = true;
  std::string why_;
};

}  // namespace

PtxTarget scan_ptx_target(std::string_view text) {
  ProgramInfo ignored;
  return Scanner(text, &ignored).target_only();
}

bool scan_ptx(std::string_view text, ProgramInfo* info, std::string* why) {
  *info = {};
  ProgramInfo found;
  if (!Scanner(text, &found).run(why)) return false;
  found.index_kernels();
  *info = std::move(found);
  return true;
}

}  // namespace gpupool::frontdoor
