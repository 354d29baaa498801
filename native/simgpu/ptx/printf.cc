// printf's formatting and the text of a failed assertion.
#include <cxxabi.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu::ptx {
namespace {

constexpr size_t kMaxString = 64 * 1024;
constexpr int kMaxField = 4096;       // of widths and precisions
constexpr size_t kMaxText = 1 << 20;  // of one call's output: the size of the default buffer
constexpr int kMaxArguments = 32;     // CUDA's own limit

// One conversion specification, as it is handed to snprintf.
struct Conversion {
  std::string flags;
  int width = -1, precision = -1;
  enum Length { kNone, kChar, kShort, kLong } length = kNone;
  char letter = 0;

  std::string pattern(const char* length_text) const {
    std::string p = "%" + flags;
    if (width >= 0) p += std::to_string(width);
    if (precision >= 0) p += "." + std::to_string(precision);
    return p + length_text + letter;
  }
};

template <class T>
void append(std::string* out, const std::string& pattern, T value) {
  char small[512];
  const int n = snprintf(small, sizeof small, pattern.c_str(), value);
  if (n < 0) return;
  if (static_cast<size_t>(n) < sizeof small) {
    out->append(small, n);
    return;
  }
  std::string large(static_cast<size_t>(n) + 1, '\0');
  snprintf(large.data(), large.size(), pattern.c_str(), value);
  out->append(large.data(), n);
}

class Formatter {
 public:
  Formatter(uint64_t arguments, const ReadDevice& read, PrintfResult* result)
      : at_(arguments), read_(read), result_(*result) {}

  void run(const std::string& format) {
    size_t i = 0;
    while (i < format.size() && result_.text.size() < kMaxText && !result_.fault) {
      const size_t percent = format.find('%', i);
      result_.text.append(format, i, percent - i);
      if (percent == std::string::npos) return;
      i = percent + 1;
      const size_t used = conversion(format, i);
      if (used == 0) {  // not a conversion: printed as it stands
        result_.text += '%';
      } else {
        i += used;
      }
    }
  }

 private:
  // Returns the number of characters after '%' that were used; 0: no valid conversion.
  size_t conversion(const std::string& f, size_t begin) {
    size_t i = begin;
    auto peek = [&] { return i < f.size() ? f[i] : '\0'; };
    if (peek() == '%') {
      result_.text += '%';
      return 1;
    }
    Conversion c;
    while (strchr("-+ #0", peek()) && peek()) {
      if (c.flags.find(peek()) == std::string::npos) c.flags += peek();
      ++i;
    }
    // A '*' takes an argument even if the conversion turns out to be unknown.
    auto number = [&](int* value) {
      if (peek() == '*') {
        ++i;
        *value = static_cast<int32_t>(argument(4));
        return;
      }
      int n = 0;
      bool any = false;
      while (peek() >= '0' && peek() <= '9') {
        n = std::min(n * 10 + (peek() - '0'), kMaxField);
        any = true;
        ++i;
      }
      if (any) *value = n;
    };
    number(&c.width);
    if (c.width < -1 || (c.width == -1 && f[i - 1] == '*')) {  // "*" with a negative argument
      c.flags += '-';
      c.width = c.width < -kMaxField ? kMaxField : -c.width;
    }
    c.width = std::min(c.width, kMaxField);
    if (peek() == '.') {
      ++i;
      c.precision = 0;
      number(&c.precision);
      if (c.precision < 0) c.precision = -1;
      c.precision = std::min(c.precision, kMaxField);
    }
    switch (peek()) {
      case 'h':
        c.length = Conversion::kShort;
        ++i;
        if (peek() == 'h') {
          c.length = Conversion::kChar;
          ++i;
        }
        break;
      case 'l':
        ++i;
        c.length = Conversion::kLong;
        if (peek() == 'l') ++i;
        break;
      case 'L':
      case 'q':
      case 'j':
      case 'z':
      case 't':
        c.length = Conversion::kLong;
        ++i;
        break;
      default:
        break;
    }
    c.letter = peek();
    ++i;
    std::string& out = result_.text;
    switch (c.letter) {
      case 'd':
      case 'i': {
        int64_t v = static_cast<int64_t>(argument(c.length == Conversion::kLong ? 8 : 4));
        if (c.length == Conversion::kNone) v = static_cast<int32_t>(v);
        if (c.length == Conversion::kShort) v = static_cast<int16_t>(v);
        if (c.length == Conversion::kChar) v = static_cast<int8_t>(v);
        append(&out, c.pattern("ll"), static_cast<long long>(v));
        break;
      }
      case 'u':
      case 'x':
      case 'X':
      case 'o': {
        uint64_t v = argument(c.length == Conversion::kLong ? 8 : 4);
        if (c.length == Conversion::kShort) v = static_cast<uint16_t>(v);
        if (c.length == Conversion::kChar) v = static_cast<uint8_t>(v);
        append(&out, c.pattern("ll"), static_cast<unsigned long long>(v));
        break;
      }
      case 'c': {
        const char ch = static_cast<char>(argument(4));
        if (ch != '\0') {
          append(&out, c.pattern(""), static_cast<int>(ch));
        } else {
          const size_t before = out.size();
          append(&out, c.pattern(""), 0);
          if (out.size() == before) out += '\0';
        }
        break;
      }
      case 'p':
        append(&out, c.pattern(""), reinterpret_cast<void*>(argument(8)));
        break;
      case 'f':
      case 'F':
      case 'e':
      case 'E':
      case 'g':
      case 'G':
      case 'a':
      case 'A': {
        const uint64_t bits = argument(8);
        double d;
        memcpy(&d, &bits, sizeof d);
        append(&out, c.pattern(""), d);
        break;
      }
      case 's': {
        const uint64_t address = argument(8);
        std::string s;
        if (result_.fault) break;
        if (address == 0) {
          s = "(null)";
        } else if (!read_string(address, kMaxString, read_, &s)) {
          result_.fault = true;
          result_.fault_address = address;
          break;
        }
        append(&out, c.pattern(""), s.c_str());
        break;
      }
      default:
        return 0;
    }
    return i - begin;
  }

  uint64_t argument(unsigned bytes) {
    if (result_.fault || result_.arguments >= kMaxArguments) return 0;
    at_ = (at_ + bytes - 1) & ~uint64_t{bytes - 1};
    uint64_t value = 0;
    if (!read_(at_, &value, bytes)) {
      result_.fault = true;
      result_.fault_address = at_;
      return 0;
    }
    at_ += bytes;
    ++result_.arguments;
    return value;
  }

  uint64_t at_;
  const ReadDevice& read_;
  PrintfResult& result_;
};

}  // namespace

bool read_string(uint64_t address, size_t limit, const ReadDevice& read, std::string* out) {
  out->clear();
  // In pieces that never go past the string's end by more than its own aligned 16 bytes; where
  // such a piece isn't readable as a whole, byte by byte.
  while (out->size() < limit) {
    char piece[16];
    const size_t want = 16 - (address & 15);
    if (read(address, piece, want)) {
      const void* nul = memchr(piece, 0, want);
      if (nul) {
        out->append(piece, static_cast<const char*>(nul) - piece);
        return true;
      }
      out->append(piece, want);
      address += want;
      continue;
    }
    for (size_t i = 0; i < want; ++i) {
      char c;
      if (!read(address, &c, 1)) return false;
      if (c == 0) return true;
      *out += c;
      ++address;
    }
  }
  return true;
}

PrintfResult format_printf(uint64_t format, uint64_t arguments, const ReadDevice& read) {
  PrintfResult result;
  std::string text;
  if (format == 0) {
    result.arguments = -1;
    return result;
  }
  if (!read_string(format, kMaxString, read, &text)) {
    result.arguments = -1;
    result.fault = true;
    result.fault_address = format;
    return result;
  }
  Formatter(arguments, read, &result).run(text);
  return result;
}

std::string readable_name(const std::string& name) {
  if (!name.starts_with("_Z")) return name;
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  if (!text) return name;
  std::string readable = text;
  std::free(text);
  return readable;
}

std::string assert_message(const ReadDevice& read, uint64_t message, uint64_t file, uint32_t line,
                           uint64_t function, const uint32_t block[3], const uint32_t thread[3]) {
  auto text = [&](uint64_t address) {
    std::string s;
    if (address == 0 || !read_string(address, 4096, read, &s)) s = "<unreadable>";
    return s;
  };
  auto triple = [](const uint32_t v[3]) {
    return "[" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) +
           "]";
  };
  return text(file) + ":" + std::to_string(line) + ": " + text(function) +
         ": block: " + triple(block) + ", thread: " + triple(thread) + " Assertion `" +
         text(message) + "` failed.";
}

PrintfBuffer::PrintfBuffer(std::shared_ptr<MemorySpace> memory, uint64_t bytes)
    : memory_(std::move(memory)), bytes_(std::max(bytes, 2 * kHeader)) {
  ring_ = reinterpret_cast<char*>(memory_->allocate(bytes_, 256));
}

PrintfBuffer::~PrintfBuffer() {
  if (ring_) memory_->release(reinterpret_cast<uint64_t>(ring_));
}

void PrintfBuffer::copy_in(uint64_t at, const void* from, uint64_t bytes) {
  at %= bytes_;
  const uint64_t first = std::min(bytes, bytes_ - at);
  memcpy(ring_ + at, from, first);
  memcpy(ring_, static_cast<const char*>(from) + first, bytes - first);
}

void PrintfBuffer::copy_out(uint64_t at, void* to, uint64_t bytes) const {
  at %= bytes_;
  const uint64_t first = std::min(bytes, bytes_ - at);
  memcpy(to, ring_ + at, first);
  memcpy(static_cast<char*>(to) + first, ring_, bytes - first);
}

uint64_t PrintfBuffer::drop_header() {
  uint32_t length = 0;
  copy_out(begin_, &length, kHeader);
  begin_ = (begin_ + kHeader) % bytes_;
  used_ -= kHeader;
  return std::min<uint64_t>(length, used_);
}

void PrintfBuffer::put(std::string_view text) {
  std::lock_guard lock(mutex_);
  if (!ring_ || text.empty()) return;
  text = text.substr(0, bytes_ - kHeader);
  while (used_ + kHeader + text.size() > bytes_) {
    const uint64_t length = drop_header();
    begin_ = (begin_ + length) % bytes_;
    used_ -= length;
    if (used_ < kHeader) used_ = 0;  // its lengths were written over
  }
  const auto length = static_cast<uint32_t>(text.size());
  copy_in(begin_ + used_, &length, kHeader);
  copy_in(begin_ + used_ + kHeader, text.data(), text.size());
  used_ += kHeader + text.size();
}

void PrintfBuffer::drain(const std::function<void(std::string_view)>& write) {
  std::lock_guard lock(mutex_);
  char piece[4096];
  size_t filled = 0;
  while (used_ >= kHeader) {
    uint64_t left = drop_header();
    while (left) {
      const uint64_t n = std::min<uint64_t>(left, sizeof piece - filled);
      copy_out(begin_, piece + filled, n);
      begin_ = (begin_ + n) % bytes_;
      used_ -= n;
      left -= n;
      filled += n;
      if (filled == sizeof piece) {
        write({piece, filled});
        filled = 0;
      }
    }
  }
  used_ = 0;
  if (filled) write({piece, filled});
}

}  // namespace gpupool::simgpu::ptx
