// Mutations that keep PTX looking like PTX, so that fuzzing gets behind the parser: words are
// replaced by others of the same kind, lines are moved, instructions are made from the engine's own
// tables of opcodes and modifiers.
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using Random = std::minstd_rand;

constexpr std::string_view kOpcodes[] = {
#define GPUPOOL_PTX_OPCODE(name, text) text,
#include "simgpu/ptx/opcodes.inc"
#undef GPUPOOL_PTX_OPCODE
};
constexpr std::string_view kModifiers[] = {
#define GPUPOOL_PTX_MODIFIER(name, text) text,
#include "simgpu/ptx/modifiers.inc"
#undef GPUPOOL_PTX_MODIFIER
};
constexpr std::string_view kSpecials[] = {
#define GPUPOOL_PTX_SPECIAL(name, text, components) text,
#include "simgpu/ptx/special_registers.inc"
#undef GPUPOOL_PTX_SPECIAL
};
constexpr std::string_view kTypes[] = {"pred", "b8",  "b16",  "b32",   "b64",  "u8",    "u16",
                                       "u32",  "u64", "s8",   "s16",   "s32",  "s64",   "f16",
                                       "f32",  "f64", "b128", "f16x2", "bf16", "bf16x2"};
constexpr std::string_view kDirectives[] = {
    ".reg",     ".local",   ".shared",        ".global",      ".const",         ".param",
    ".entry",   ".func",    ".visible",       ".extern",      ".weak",          ".common",
    ".align",   ".pragma",  ".branchtargets", ".calltargets", ".callprototype", ".alias",
    ".maxntid", ".reqntid", ".minnctapersm",  ".maxnreg",     ".noreturn",      ".attribute",
    ".loc",     ".file",    ".section",       ".version",     ".target",        ".address_size"};
constexpr std::string_view kNumbers[] = {"0",
                                         "1",
                                         "-1",
                                         "2",
                                         "3",
                                         "4",
                                         "7",
                                         "8",
                                         "15",
                                         "16",
                                         "31",
                                         "32",
                                         "33",
                                         "63",
                                         "64",
                                         "65",
                                         "127",
                                         "128",
                                         "255",
                                         "256",
                                         "1024",
                                         "4095",
                                         "4096",
                                         "65535",
                                         "65536",
                                         "0x7fffffff",
                                         "0x80000000",
                                         "0xffffffff",
                                         "0x100000000",
                                         "0x7fffffffffffffff",
                                         "0x8000000000000000",
                                         "0xffffffffffffffff",
                                         "0f7f800000",
                                         "0fffc00000",
                                         "0f00000001",
                                         "0d7ff0000000000000",
                                         "0d8000000000000000",
                                         "1e400",
                                         "0.5",
                                         "WARP_SZ",
                                         "4294967295U"};
// Lines of which other mutations make more.
constexpr std::string_view kLines[] = {
    ".reg .b32 %x<8>;",
    ".reg .b64 %y<8>;",
    ".reg .pred %q<4>;",
    ".local .align 16 .b8 depot[64];",
    ".shared .align 16 .b8 tile[256];",
    ".extern .shared .align 16 .b8 dynamic[];",
    ".global .align 4 .b32 table[4] = {1, 2, 3, 4};",
    "bar.sync 0;",
    "barrier.sync 1, 32;",
    "bar.warp.sync 0xffffffff;",
    "shfl.sync.down.b32 %r1|%p1, %r2, 1, 31, -1;",
    "vote.sync.ballot.b32 %r1, %p1, -1;",
    "match.any.sync.b32 %r1, %r2, -1;",
    "redux.sync.add.s32 %r1, %r2, -1;",
    "atom.global.add.u32 %r1, [%rd1], 1;",
    "atom.shared.cas.b32 %r1, [tile], %r2, %r3;",
    "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+16];",
    "st.shared.v2.f32 [tile+8], {%f1, %f2};",
    "cp.async.ca.shared.global [%r1], [%rd1], 16;",
    "cp.async.wait_all;",
    "mbarrier.init.shared.b64 [tile], 32;",
    "cvta.to.global.u64 %rd1, %rd2;",
    "setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p1;",
    "@%p1 bra L1;",
    "@!%p1 exit;",
    "L1:",
    "ret;",
    "trap;",
    "nanosleep.u32 100;",
    "call.uni (%r1), f, (%r2);",
    "{ .param .b32 a0; st.param.b32 [a0], %r1; call.uni f, (a0); }",
    "t: .branchtargets L1, L1;",
    "brx.idx %r1, t;",
    "mov.u64 %rd1, f;",
    "alloca.u32 %r1, 64;",
    ".func (.param .b32 o) f(.param .b32 i) { .reg .b32 %r<2>; ld.param.b32 %r1, [i]; "
    "st.param.b32 [o], %r1; ret; }",
    ".visible .entry e(.param .u64 p, .param .u32 n) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [p]; "
    "st.global.u32 [%rd1], 1; ret; }",
};

template <typename T, size_t N>
const T& one_of(const T (&list)[N], Random& random) {
  return list[random() % N];
}

bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '$' || c == '%';
}

struct Word {
  size_t at, bytes;
};

std::vector<Word> words_of(std::string_view text) {
  std::vector<Word> words;
  for (size_t i = 0; i < text.size();) {
    if (!in_word(text[i])) {
      ++i;
      continue;
    }
    const size_t begin = i;
    while (i < text.size() && in_word(text[i])) ++i;
    words.push_back({begin, i - begin});
  }
  return words;
}

std::string_view other_word(std::string_view word, std::string_view text, bool after_dot,
                            const std::vector<Word>& words, Random& random) {
  if (after_dot && random() % 8 != 0)
    return random() % 2 != 0 ? one_of(kTypes, random) : one_of(kModifiers, random);
  const bool number = !word.empty() && word[0] >= '0' && word[0] <= '9';
  if (number && random() % 4 != 0) return one_of(kNumbers, random);
  for (std::string_view opcode : kOpcodes)
    if (opcode == word && random() % 8 != 0) return one_of(kOpcodes, random);
  switch (random() % 8) {
    case 0:
      return one_of(kSpecials, random);
    case 1:
      return one_of(kNumbers, random);
    default: {
      const Word& w = words[random() % words.size()];
      return text.substr(w.at, w.bytes);
    }
  }
}

size_t line_begin(std::string_view text, size_t at) {
  const size_t found = text.rfind('\n', at == 0 ? 0 : at - 1);
  return at == 0 || found == std::string_view::npos ? 0 : found + 1;
}

size_t line_end(std::string_view text, size_t at) {
  const size_t found = text.find('\n', at);
  return found == std::string_view::npos ? text.size() : found + 1;
}

std::string made_instruction(std::string_view text, const std::vector<Word>& words,
                             Random& random) {
  std::string line(one_of(kOpcodes, random));
  for (size_t n = random() % 3; n > 0; --n) line += "." + std::string(one_of(kModifiers, random));
  if (random() % 4 != 0) line += "." + std::string(one_of(kTypes, random));
  const size_t operands = random() % 5;
  for (size_t n = 0; n < operands; ++n) {
    line += n == 0 ? " " : ", ";
    std::string operand(words.empty() || random() % 8 == 0
                            ? one_of(kNumbers, random)
                            : text.substr(words[random() % words.size()].at, 0));
    if (operand.empty()) {
      const Word& w = words[random() % words.size()];
      operand = text.substr(w.at, w.bytes);
    }
    line += random() % 6 == 0 ? "[" + operand + "]" : operand;
  }
  return line + ";\n";
}

void mutate(std::string& text, Random& random) {
  const std::vector<Word> words = words_of(text);
  const size_t place = text.empty() ? 0 : random() % text.size();
  switch (random() % 12) {
    case 0:
    case 1:
    case 2:
    case 3:
      if (!words.empty()) {
        const Word w = words[random() % words.size()];
        const bool after_dot = w.at > 0 && text[w.at - 1] == '.';
        const std::string word = text.substr(w.at, w.bytes);
        text.replace(w.at, w.bytes, std::string(other_word(word, text, after_dot, words, random)));
      }
      break;
    case 4:
      if (!words.empty()) {  // one more modifier, or one less
        const Word w = words[random() % words.size()];
        if (random() % 3 != 0) {
          text.insert(w.at + w.bytes, "." + std::string(one_of(kModifiers, random)));
        } else if (w.at > 0 && text[w.at - 1] == '.') {
          text.erase(w.at - 1, w.bytes + 1);
        }
      }
      break;
    case 5:
      text.insert(line_begin(text, place), std::string(one_of(kLines, random)) + "\n");
      break;
    case 6:
      text.insert(line_begin(text, place), made_instruction(text, words, random));
      break;
    case 7: {  // a line twice, at another place
      const size_t begin = line_begin(text, place);
      const std::string line = text.substr(begin, line_end(text, place) - begin);
      text.insert(line_begin(text, text.empty() ? 0 : random() % text.size()), line);
      break;
    }
    case 8:
      text.erase(line_begin(text, place), line_end(text, place) - line_begin(text, place));
      break;
    case 9: {
      const std::string word(one_of(kDirectives, random));
      text.insert(words.empty() ? place : words[random() % words.size()].at, word + " ");
      break;
    }
    case 10: {
      static const char kMarks[] = "{}()[]<>.,;:|!@%-+*\"\\/\n";
      if (random() % 2 != 0 && place < text.size()) {
        text[place] = kMarks[random() % (sizeof kMarks - 1)];
      } else {
        text.insert(place, 1, kMarks[random() % (sizeof kMarks - 1)]);
      }
      break;
    }
    default:
      text.resize(place);
      break;
  }
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  Random random(seed | 1);
  if (random() % 8 == 0) return LLVMFuzzerMutate(data, size, max_size);
  std::string text(reinterpret_cast<const char*>(data), size);
  for (unsigned n = 1 + random() % 4; n > 0; --n) mutate(text, random);
  const size_t kept = std::min(text.size(), max_size);
  memcpy(data, text.data(), kept);
  return kept;
}

// Lines of both in turn.
extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* data1, size_t size1,
                                            const uint8_t* data2, size_t size2, uint8_t* out,
                                            size_t max_size, unsigned int seed) {
  Random random(seed | 1);
  std::string text(reinterpret_cast<const char*>(data1), size1);
  const std::string_view other(reinterpret_cast<const char*>(data2), size2);
  for (unsigned n = 1 + random() % 4; n > 0 && !other.empty(); --n) {
    const size_t begin = line_begin(other, random() % other.size());
    size_t end = begin;
    for (unsigned lines = 1 + random() % 8; lines > 0 && end < other.size(); --lines)
      end = line_end(other, end);
    text.insert(line_begin(text, text.empty() ? 0 : random() % text.size()),
                other.substr(begin, end - begin));
  }
  const size_t kept = std::min(text.size(), max_size);
  memcpy(out, text.data(), kept);
  return kept;
}
