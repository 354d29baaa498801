// Integer instructions against references written from the PTX ISA's pseudo-code.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

using u128 = unsigned __int128;
using s128 = __int128;

int64_t sext(uint64_t v, int bits) { return static_cast<int64_t>(v << (64 - bits)) >> (64 - bits); }

struct Kind {
  const char* name;
  int bits;
  bool is_signed;
};
const Kind kAll[] = {{"u16", 16, false}, {"s16", 16, true},  {"u32", 32, false},
                     {"s32", 32, true},  {"u64", 64, false}, {"s64", 64, true}};

// Operand as a wide signed number.
s128 value(const Kind& k, uint64_t v) { return k.is_signed ? s128(sext(v, k.bits)) : s128(v); }

std::string op(const std::string& name, const Kind& k) { return name + "." + k.name + " "; }

TEST(ExecInteger, AddSubMul) {
  for (const Kind& k : kAll) {
    const Shape s{k.bits, k.bits, k.bits, k.bits};
    const Inputs in = combine(integer_values(k.bits), integer_values(k.bits));
    check_instruction(op("add", k) + "ro, ra, rb;", s, in,
                      [](auto a, auto b, auto) { return a + b; });
    check_instruction(op("sub", k) + "ro, ra, rb;", s, in,
                      [](auto a, auto b, auto) { return a - b; });
    check_instruction(op("mul.lo", k) + "ro, ra, rb;", s, in,
                      [](auto a, auto b, auto) { return a * b; });
    check_instruction(op("mul.hi", k) + "ro, ra, rb;", s, in, [k](auto a, auto b, auto) {
      return k.is_signed ? uint64_t((value(k, a) * value(k, b)) >> k.bits)
                         : uint64_t((u128(a) * u128(b)) >> k.bits);
    });
    if (k.bits < 64)
      check_instruction(op("mul.wide", k) + "ro, ra, rb;", {2 * k.bits, k.bits, k.bits, 0}, in,
                        [k](auto a, auto b, auto) { return uint64_t(value(k, a) * value(k, b)); });
  }
  auto clamp = [](int64_t v) {
    return uint64_t(std::min<int64_t>(std::max<int64_t>(v, INT32_MIN), INT32_MAX));
  };
  const Inputs in = combine(integer_values(32), integer_values(32));
  check_instruction("add.sat.s32 ro, ra, rb;", {}, in,
                    [&](auto a, auto b, auto) { return clamp(sext(a, 32) + sext(b, 32)); });
  check_instruction("sub.sat.s32 ro, ra, rb;", {}, in,
                    [&](auto a, auto b, auto) { return clamp(sext(a, 32) - sext(b, 32)); });
}

TEST(ExecInteger, MulAdd) {
  for (const Kind& k : kAll) {
    const Shape s{k.bits, k.bits, k.bits, k.bits};
    const std::vector<uint64_t> c = {0,          1,          0x7fff, 0x8000,
                                     0x7fffffff, 0x80000000, ~0ull,  1ull << 63};
    const Inputs in = combine(integer_values(k.bits), integer_values(k.bits), c);
    check_instruction(op("mad.lo", k) + "ro, ra, rb, rc;", s, in,
                      [](auto a, auto b, auto c) { return a * b + c; });
    check_instruction(op("mad.hi", k) + "ro, ra, rb, rc;", s, in, [k](auto a, auto b, auto c) {
      return (k.is_signed ? uint64_t((value(k, a) * value(k, b)) >> k.bits)
                          : uint64_t((u128(a) * u128(b)) >> k.bits)) +
             c;
    });
    if (k.bits < 64)
      check_instruction(
          op("mad.wide", k) + "ro, ra, rb, rc;", {2 * k.bits, k.bits, k.bits, 2 * k.bits}, in,
          [k](auto a, auto b, auto c) { return uint64_t(value(k, a) * value(k, b)) + c; });
    check_instruction(op("sad", k) + "ro, ra, rb, rc;", s, in, [k](auto a, auto b, auto c) {
      return c + (value(k, a) < value(k, b) ? b - a : a - b);
    });
  }
  const Inputs in =
      combine(integer_values(32), integer_values(32), {0, 1, 0x7fffffff, 0x80000000, ~0ull});
  check_instruction("mad.hi.sat.s32 ro, ra, rb, rc;", {}, in, [](auto a, auto b, auto c) {
    const int64_t v = ((sext(a, 32) * sext(b, 32)) >> 32) + sext(c, 32);
    return uint64_t(std::min<int64_t>(std::max<int64_t>(v, INT32_MIN), INT32_MAX));
  });
  // mul24: the low or high 32 of the 48 bits of a product of 24-bit operands.
  check_instruction("mul24.lo.u32 ro, ra, rb;", {}, in,
                    [](auto a, auto b, auto) { return (a & 0xffffff) * (b & 0xffffff); });
  check_instruction("mul24.hi.u32 ro, ra, rb;", {}, in,
                    [](auto a, auto b, auto) { return ((a & 0xffffff) * (b & 0xffffff)) >> 16; });
  check_instruction("mul24.lo.s32 ro, ra, rb;", {}, in,
                    [](auto a, auto b, auto) { return uint64_t(sext(a, 24) * sext(b, 24)); });
  check_instruction("mul24.hi.s32 ro, ra, rb;", {}, in, [](auto a, auto b, auto) {
    return uint64_t((sext(a, 24) * sext(b, 24)) >> 16);
  });
  check_instruction("mad24.lo.s32 ro, ra, rb, rc;", {}, in,
                    [](auto a, auto b, auto c) { return uint64_t(sext(a, 24) * sext(b, 24)) + c; });
}

TEST(ExecInteger, DivRem) {
  for (const Kind& k : kAll) {
    const Shape s{k.bits, k.bits, k.bits, 0};
    Inputs in;
    for (auto& x : combine(integer_values(k.bits), integer_values(k.bits)))
      if ((x[1] & mask_of(k.bits)) != 0) in.push_back(x);
    check_instruction(op("div", k) + "ro, ra, rb;", s, in,
                      [k](auto a, auto b, auto) { return uint64_t(value(k, a) / value(k, b)); });
    check_instruction(op("rem", k) + "ro, ra, rb;", s, in,
                      [k](auto a, auto b, auto) { return uint64_t(value(k, a) % value(k, b)); });
    // By zero: unspecified, but no fault.
    std::string error;
    EXPECT_FALSE(
        run_instruction(op("div", k) + "ro, ra, rb;", s, {{5, 0, 0}, {0, 0, 0}}, false, &error)
            .empty());
    EXPECT_FALSE(
        run_instruction(op("rem", k) + "ro, ra, rb;", s, {{5, 0, 0}, {0, 0, 0}}, false, &error)
            .empty());
  }
}

TEST(ExecInteger, MinMaxAbsNeg) {
  for (const Kind& k : kAll) {
    const Shape s{k.bits, k.bits, k.bits, 0};
    const Inputs in = combine(integer_values(k.bits), integer_values(k.bits));
    check_instruction(op("min", k) + "ro, ra, rb;", s, in,
                      [k](auto a, auto b, auto) { return value(k, a) < value(k, b) ? a : b; });
    check_instruction(op("max", k) + "ro, ra, rb;", s, in,
                      [k](auto a, auto b, auto) { return value(k, a) > value(k, b) ? a : b; });
    if (!k.is_signed) continue;
    check_instruction(op("abs", k) + "ro, ra;", s, in,
                      [k](auto a, auto, auto) { return value(k, a) < 0 ? 0 - a : a; });
    check_instruction(op("neg", k) + "ro, ra;", s, in, [](auto a, auto, auto) { return 0 - a; });
  }
}

TEST(ExecInteger, Logic) {
  for (int bits : {16, 32, 64}) {
    const Shape s{bits, bits, bits, 0};
    const std::string t = ".b" + std::to_string(bits) + " ";
    const Inputs in = combine(integer_values(bits), integer_values(bits), {0}, 300);
    check_instruction("and" + t + "ro, ra, rb;", s, in, [](auto a, auto b, auto) { return a & b; });
    check_instruction("or" + t + "ro, ra, rb;", s, in, [](auto a, auto b, auto) { return a | b; });
    check_instruction("xor" + t + "ro, ra, rb;", s, in, [](auto a, auto b, auto) { return a ^ b; });
    check_instruction("not" + t + "ro, ra;", s, in, [](auto a, auto, auto) { return ~a; });
    check_instruction("cnot" + t + "ro, ra;", s, in,
                      [](auto a, auto, auto) { return uint64_t(a == 0); });
  }
  const Inputs in = combine({0, 1}, {0, 1}, {0}, 0);
  const Shape p{1, 1, 1, 0};
  check_instruction("and.pred po, pa, pb;", p, in, [](auto a, auto b, auto) { return a & b; });
  check_instruction("or.pred po, pa, pb;", p, in, [](auto a, auto b, auto) { return a | b; });
  check_instruction("xor.pred po, pa, pb;", p, in, [](auto a, auto b, auto) { return a ^ b; });
  check_instruction("not.pred po, pa;", p, in, [](auto a, auto, auto) { return !a; });
  check_instruction("mov.pred po, pa;", p, in, [](auto a, auto, auto) { return a; });
  for (int table : {0x00, 0xff, 0x80, 0xfe, 0x96, 0xe8, 0xca, 0x1a, 0x3c}) {
    check_instruction("lop3.b32 ro, ra, rb, rc, " + std::to_string(table) + ";", {},
                      combine(integer_values(32), integer_values(32), {0, ~0ull, 0x12345678}, 200),
                      [table](auto a, auto b, auto c) {
                        uint64_t d = 0;
                        for (int i = 0; i < 32; ++i) {
                          const int n =
                              int(a >> i & 1) << 2 | int(b >> i & 1) << 1 | int(c >> i & 1);
                          d |= uint64_t(table >> n & 1) << i;
                        }
                        return d;
                      });
  }
}

TEST(ExecInteger, ShiftsClampTheAmount) {
  for (int bits : {16, 32, 64}) {
    const Shape s{bits, bits, 32, 0};
    const Inputs in = combine(integer_values(bits), integer_values(32));
    const std::string n = std::to_string(bits);
    check_instruction("shl.b" + n + " ro, ra, rb;", s, in,
                      [bits](auto a, auto b, auto) { return b >= uint64_t(bits) ? 0 : a << b; });
    check_instruction("shr.u" + n + " ro, ra, rb;", s, in,
                      [bits](auto a, auto b, auto) { return b >= uint64_t(bits) ? 0 : a >> b; });
    check_instruction("shr.b" + n + " ro, ra, rb;", s, in,
                      [bits](auto a, auto b, auto) { return b >= uint64_t(bits) ? 0 : a >> b; });
    check_instruction("shr.s" + n + " ro, ra, rb;", s, in, [bits](auto a, auto b, auto) {
      return uint64_t(sext(a, bits) >> std::min<uint64_t>(b, bits - 1));
    });
  }
  const Inputs in = combine(integer_values(32), integer_values(32), integer_values(32), 500);
  auto pair = [](uint64_t a, uint64_t b) { return b << 32 | a; };
  for (bool wrap : {false, true}) {
    const std::string m = wrap ? ".wrap.b32 ro, ra, rb, rc;" : ".clamp.b32 ro, ra, rb, rc;";
    auto amount = [wrap](uint64_t c) { return wrap ? c & 31 : std::min<uint64_t>(c, 32); };
    check_instruction("shf.l" + m, {}, in,
                      [=](auto a, auto b, auto c) { return (pair(a, b) << amount(c)) >> 32; });
    check_instruction("shf.r" + m, {}, in,
                      [=](auto a, auto b, auto c) { return pair(a, b) >> amount(c); });
  }
}

TEST(ExecInteger, BitCounting) {
  for (int bits : {32, 64}) {
    const std::string n = std::to_string(bits);
    const Inputs in = combine(integer_values(bits));
    const Shape s{32, bits, 0, 0};
    check_instruction("popc.b" + n + " ro, ra;", s, in,
                      [](auto a, auto, auto) { return std::popcount(a); });
    check_instruction("clz.b" + n + " ro, ra;", s, in,
                      [bits](auto a, auto, auto) { return std::countl_zero(a) - (64 - bits); });
    check_instruction("brev.b" + n + " ro, ra;", {bits, bits, 0, 0}, in,
                      [bits](auto a, auto, auto) {
                        uint64_t d = 0;
                        for (int i = 0; i < bits; ++i) d |= (a >> i & 1) << (bits - 1 - i);
                        return d;
                      });
    for (bool is_signed : {false, true}) {
      for (bool shift : {false, true}) {
        check_instruction(std::string("bfind") + (shift ? ".shiftamt" : "") +
                              (is_signed ? ".s" : ".u") + n + " ro, ra;",
                          s, in, [=](auto a, auto, auto) -> uint64_t {
                            if (is_signed && sext(a, bits) < 0) a = ~a & mask_of(bits);
                            uint64_t d = 0xffffffff;
                            for (int i = bits - 1; i >= 0; --i)
                              if (a >> i & 1) {
                                d = i;
                                break;
                              }
                            if (shift && d != 0xffffffff) d = bits - 1 - d;
                            return d;
                          });
      }
    }
  }
  check_instruction(
      "fns.b32 ro, ra, rb, rc;", {},
      combine(integer_values(32), {0, 1, 5, 16, 31}, {0, 1, 2, 3, 9, 31, ~0ull, ~1ull, ~6ull}, 0),
      [](auto mask, auto base, auto c) -> uint64_t {
        const int offset = static_cast<int32_t>(c);
        if (offset == 0) return mask >> base & 1 ? base : 0xffffffff;
        int count = std::abs(offset) - 1;
        for (int pos = int(base); pos >= 0 && pos < 32; pos += offset > 0 ? 1 : -1) {
          if (!(mask >> pos & 1)) continue;
          if (count-- == 0) return pos;
        }
        return 0xffffffff;
      });
}

TEST(ExecInteger, BitFields) {
  const std::vector<uint64_t> amounts = {0,  1,  2,  5,  8,  15,  16,  30,  31,   32,
                                         33, 40, 63, 64, 65, 255, 256, 257, 0x120};
  for (int bits : {32, 64}) {
    const std::string n = std::to_string(bits);
    const Inputs in = combine(integer_values(bits), amounts, amounts, 500);
    for (bool is_signed : {false, true}) {
      check_instruction((is_signed ? "bfe.s" : "bfe.u") + n + " ro, ra, rb, rc;",
                        {bits, bits, 32, 32}, in, [=](auto a, auto b, auto c) {
                          const int msb = bits - 1, pos = b & 0xff, len = c & 0xff;
                          const uint64_t fill =
                              !is_signed || len == 0 ? 0 : a >> std::min(pos + len - 1, msb) & 1;
                          uint64_t d = 0;
                          for (int i = 0; i <= msb; ++i)
                            d |= (i < len && pos + i <= msb ? a >> (pos + i) & 1 : fill) << i;
                          return d;
                        });
    }
    // bfi takes four operands: the length is an immediate here, the position a register.
    for (int len : {0, 1, 7, 8, 31, 32, 33, 64, 255}) {
      check_instruction("bfi.b" + n + " ro, ra, rb, rc, " + std::to_string(len) + ";",
                        {bits, bits, bits, 32},
                        combine(integer_values(bits), {0, ~0ull, 0x123456789abcdef0}, amounts, 200),
                        [=](auto a, auto b, auto c) {
                          const int msb = bits - 1, pos = c & 0xff;
                          uint64_t f = b;
                          for (int i = 0; i < len && pos + i <= msb; ++i)
                            f = (f & ~(1ull << (pos + i))) | (a >> i & 1) << (pos + i);
                          return f;
                        });
    }
  }
  for (bool clamp : {false, true}) {
    const std::string m = clamp ? ".clamp" : ".wrap";
    const Inputs in = combine(integer_values(32), integer_values(32), {0}, 500);
    check_instruction("bmsk" + m + ".b32 ro, ra, rb;", {}, in,
                      [=](auto a, auto b, auto) -> uint64_t {
                        const uint32_t a1 = a & 31, b1 = b & 31, sum = a1 + b1;
                        uint32_t mask0 = ~0u << a1, mask1 = sum < 32 ? ~0u << sum : 0;
                        if (clamp && a >= 32) mask0 = 0;
                        if (clamp && b >= 32) mask1 = 0;
                        return mask0 & ~mask1;
                      });
    for (bool is_signed : {false, true}) {
      check_instruction("szext" + m + (is_signed ? ".s32" : ".u32") + " ro, ra, rb;", {}, in,
                        [=](auto a, auto b, auto) -> uint64_t {
                          const uint32_t b1 = b & 31;
                          const bool large = clamp && b >= 32;
                          const uint32_t mask = large ? 0 : ~0u << b1;
                          const bool sign = b1 != 0 && !large && is_signed && (a >> (b1 - 1) & 1);
                          return (a & ~mask) | (sign ? mask : 0);
                        });
    }
  }
}

TEST(ExecInteger, BytePermutation) {
  const Inputs in =
      combine({0x03020100, 0x83828180, 0x12345678, ~0ull}, {0x07060504, 0x87868584, 0x9abcdef0},
              {0, 1, 2, 3, 0x3210, 0x7654, 0x0123, 0xfedc, 0x8888, 0xba98, 0x4567, 0xffff});
  auto byte = [](uint64_t a, uint64_t b, int n) { return (b << 32 | a) >> (8 * (n & 7)) & 0xff; };
  check_instruction("prmt.b32 ro, ra, rb, rc;", {}, in, [=](auto a, auto b, auto c) {
    uint64_t d = 0;
    for (int i = 0; i < 4; ++i) {
      uint64_t v = byte(a, b, c >> (4 * i) & 7);
      if (c >> (4 * i) & 8) v = v & 0x80 ? 0xff : 0;
      d |= v << (8 * i);
    }
    return d;
  });
  // From the table of the ISA: byte i of the result for selector s.
  const std::pair<const char*, std::function<int(int, int)>> modes[] = {
      {"f4e", [](int i, int s) { return s + i; }},
      {"b4e", [](int i, int s) { return s - i; }},
      {"rc8", [](int, int s) { return s; }},
      {"ecl", [](int i, int s) { return std::max(i, s); }},
      {"ecr", [](int i, int s) { return std::min(i, s); }},
      {"rc16", [](int i, int s) { return (s & 1) * 2 + (i & 1); }}};
  for (auto& [mode, choose] : modes) {
    auto f = choose;
    check_instruction(std::string("prmt.b32.") + mode + " ro, ra, rb, rc;", {}, in,
                      [=](auto a, auto b, auto c) {
                        uint64_t d = 0;
                        for (int i = 0; i < 4; ++i) d |= byte(a, b, f(i, c & 3)) << (8 * i);
                        return d;
                      });
  }
}

TEST(ExecInteger, DotProducts) {
  const Inputs in = combine(integer_values(32), integer_values(32), {0, 1, 0x80000000, ~0ull}, 500);
  for (bool sa : {false, true}) {
    for (bool sb : {false, true}) {
      const std::string t = std::string(sa ? ".s32" : ".u32") + (sb ? ".s32" : ".u32");
      auto part = [](uint64_t v, int shift, int bits, bool s) -> int64_t {
        const uint64_t x = v >> shift & mask_of(bits);
        return s ? sext(x, bits) : int64_t(x);
      };
      check_instruction("dp4a" + t + " ro, ra, rb, rc;", {}, in, [=](auto a, auto b, auto c) {
        int64_t d = int64_t(c);
        for (int i = 0; i < 4; ++i) d += part(a, 8 * i, 8, sa) * part(b, 8 * i, 8, sb);
        return uint64_t(d);
      });
      for (bool hi : {false, true}) {
        check_instruction(std::string("dp2a.") + (hi ? "hi" : "lo") + t + " ro, ra, rb, rc;", {},
                          in, [=](auto a, auto b, auto c) {
                            int64_t d = int64_t(c);
                            for (int i = 0; i < 2; ++i)
                              d += part(a, 16 * i, 16, sa) * part(b, 8 * i + (hi ? 16 : 0), 8, sb);
                            return uint64_t(d);
                          });
      }
    }
  }
}

// PTX ISA, "SIMD Video Instructions".
TEST(ExecInteger, AbsoluteDifferencesOfParts) {
  const Inputs in = combine(integer_values(32), integer_values(32), {0, 1, 0x80000000, ~0ull}, 500);
  for (int bits : {8, 16}) {
    const std::string name = bits == 8 ? "vabsdiff4" : "vabsdiff2";
    for (bool sa : {false, true}) {
      for (bool sb : {false, true}) {
        const std::string t = std::string(".u32") + (sa ? ".s32" : ".u32") + (sb ? ".s32" : ".u32");
        auto difference = [=](uint64_t a, uint64_t b, int at) {
          const uint64_t x = a >> at & mask_of(bits), y = b >> at & mask_of(bits);
          const int64_t d = (sa ? sext(x, bits) : int64_t(x)) - (sb ? sext(y, bits) : int64_t(y));
          return uint64_t(d < 0 ? -d : d);
        };
        check_instruction(name + t + " ro, ra, rb, rc;", {}, in, [=](auto a, auto b, auto) {
          uint64_t d = 0;
          for (int at = 0; at < 32; at += bits) d |= (difference(a, b, at) & mask_of(bits)) << at;
          return d;
        });
        check_instruction(name + t + ".add ro, ra, rb, rc;", {}, in, [=](auto a, auto b, auto c) {
          uint64_t d = c;
          for (int at = 0; at < 32; at += bits) d += difference(a, b, at);
          return d;
        });
      }
    }
  }
}

TEST(ExecInteger, CarryChains) {
  const Inputs in = combine(integer_values(64), integer_values(64));
  check_instruction(
      "{ .reg .b32 al, ah, bl, bh, dl, dh; mov.b64 {al, ah}, ra; mov.b64 {bl, bh}, rb;\n"
      "add.cc.u32 dl, al, bl; addc.u32 dh, ah, bh; mov.b64 ro, {dl, dh}; }",
      {64, 64, 64, 0}, in, [](auto a, auto b, auto) { return a + b; }, Compare::kBits, false);
  check_instruction(
      "{ .reg .b32 al, ah, bl, bh, dl, dh; mov.b64 {al, ah}, ra; mov.b64 {bl, bh}, rb;\n"
      "sub.cc.u32 dl, al, bl; subc.u32 dh, ah, bh; mov.b64 ro, {dl, dh}; }",
      {64, 64, 64, 0}, in, [](auto a, auto b, auto) { return a - b; }, Compare::kBits, false);
  // 64 x 64 -> the high 64 bits of 128, with mad.cc and madc.
  check_instruction(
      "{ .reg .b32 al, ah, bl, bh, r0, r1, r2, r3; mov.b64 {al, ah}, ra; mov.b64 {bl, bh}, rb;\n"
      "mul.lo.u32 r0, al, bl; mul.hi.u32 r1, al, bl; mov.b32 r3, 0;\n"
      "mad.lo.cc.u32 r1, al, bh, r1; madc.hi.u32 r2, al, bh, 0;\n"
      "mad.lo.cc.u32 r1, ah, bl, r1; madc.hi.cc.u32 r2, ah, bl, r2; addc.u32 r3, 0, 0;\n"
      "mad.lo.cc.u32 r2, ah, bh, r2; madc.hi.u32 r3, ah, bh, r3; mov.b64 ro, {r2, r3}; }",
      {64, 64, 64, 0}, in, [](auto a, auto b, auto) { return uint64_t((u128(a) * b) >> 64); },
      Compare::kBits, false);
  // 128-bit sum and difference; the result is the high half, with the carry out in addc.cc.
  check_instruction(
      "add.cc.u64 u0, ra, rb; addc.cc.u64 u1, ra, 0; addc.u64 ro, u1, 0;", {64, 64, 64, 0}, in,
      [](auto a, auto b, auto) {
        const u128 s = u128(a) + b;
        const u128 t = u128(a) + uint64_t(s >> 64);
        return uint64_t(t) + uint64_t(t >> 64);
      },
      Compare::kBits, false);
  check_instruction(
      "sub.cc.u32 t0, ra, rb; subc.cc.u32 t1, rb, ra; subc.u32 ro, t1, t0;", {32, 32, 32, 0},
      combine(integer_values(32), integer_values(32)),
      [](auto a, auto b, auto) {
        const uint64_t t0 = (a - b) & 0xffffffff, borrow0 = a < b;
        const s128 t1 = s128(b) - s128(a) - s128(borrow0);
        return uint64_t(t1) - t0 - (t1 < 0);
      },
      Compare::kBits, false);
}

}  // namespace
}  // namespace gpupool::simgpu
