// Loads, stores, moves, generic addresses and atomic operations.
#include <algorithm>

#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

int64_t sext(uint64_t v, int bits) { return static_cast<int64_t>(v << (64 - bits)) >> (64 - bits); }

// Where a thread's 24 bytes of operands lie, in each space. `p` ends up in u0.
struct Place {
  const char* space;
  std::string prologue;
};
std::vector<Place> places() {
  const std::string slot =
      "mov.u32 t0, %tid.x; mul.lo.u32 t0, t0, 32; cvt.u64.u32 u0, t0; mov.u64 u1, ";
  return {{"global", "mov.u64 u0, %d3;"},
          {"", "mov.u64 u0, %d3;"},
          {"shared",
           ".shared .align 16 .b8 sm[4096]; " + slot +
               "sm; add.u64 u0, u0, u1;\n"
               "st.shared.u64 [u0], ra; st.shared.u64 [u0+8], rb; st.shared.u64 [u0+16], rc;"},
          {"local",
           ".local .align 16 .b8 lm[32]; mov.u64 u0, lm;\n"
           "st.local.v2.u64 [u0], {ra, rb}; st.local.u64 [lm+16], rc;"},
          {"", ".shared .align 16 .b8 sm[4096]; " + slot +
                   "sm; add.u64 u0, u0, u1; cvta.shared.u64 u0, u0;\n"
                   "st.u64 [u0], ra; st.u64 [u0+8], rb; st.u64 [u0+16], rc;"},
          {"",
           ".local .align 16 .b8 lm[32]; mov.u64 u0, lm; cvta.local.u64 u0, u0;\n"
           "st.u64 [u0], ra; st.u64 [u0+8], rb; st.u64 [u0+16], rc;"}};
}

std::string dotted(const char* space) { return *space ? std::string(".") + space : ""; }

TEST(ExecMemory, LoadsExtendToTheRegister) {
  const Inputs in = combine(integer_values(64), {0x8070605040302010}, {3}, 100);
  for (const Place& p : places()) {
    for (auto [type, bits, is_signed] :
         std::vector<std::tuple<const char*, int, bool>>{{"u8", 8, false},
                                                         {"s8", 8, true},
                                                         {"b8", 8, false},
                                                         {"u16", 16, false},
                                                         {"s16", 16, true},
                                                         {"u32", 32, false},
                                                         {"s32", 32, true},
                                                         {"b64", 64, false},
                                                         {"u64", 64, false}}) {
      for (int reg : {16, 32, 64}) {
        if (reg < bits) continue;
        check_instruction(
            "{ " + p.prologue + " ld" + dotted(p.space) + "." + type + " ro, [u0+" +
                std::to_string(bits / 8) + "]; }",
            {reg, 64, 64, 64}, in,
            [bits = bits, is_signed = is_signed](auto a, auto b, auto) {
              const uint64_t v = (bits == 64 ? b : a >> bits) & mask_of(bits);
              return is_signed ? static_cast<uint64_t>(sext(v, bits)) : v;
            },
            Compare::kBits, false);
      }
    }
  }
}

TEST(ExecMemory, StoresWriteTheLowBytes) {
  const Inputs in = combine(integer_values(64), {0x1122334455667788}, {0}, 100);
  for (const Place& p : places()) {
    if (std::string(p.space) == "global" || p.prologue == "mov.u64 u0, %d3;")
      continue;  // would write the inputs
    for (int bits : {8, 16, 32, 64})
      check_instruction(
          "{ " + p.prologue + " st" + dotted(p.space) + ".b" + std::to_string(bits) +
              " [u0+8], ra; ld" + dotted(p.space) + ".u64 ro, [u0+8]; }",
          {64, 64, 64, 64}, in,
          [bits](auto a, auto b, auto) { return (b & ~mask_of(bits)) | (a & mask_of(bits)); },
          Compare::kBits, false);
  }
}

TEST(ExecMemory, Vectors) {
  const Inputs in = combine(integer_values(64), integer_values(64), {0}, 100);
  for (const Place& p : places()) {
    check_instruction(
        "{ " + p.prologue + " ld" + dotted(p.space) +
            ".v2.u64 {u2, u3}, [u0]; sub.u64 ro, u2, u3; }",
        {64, 64, 64, 64}, in, [](auto a, auto b, auto) { return a - b; }, Compare::kBits, false);
    check_instruction(
        "{ " + p.prologue + " ld" + dotted(p.space) +
            ".v4.u32 {t1, t2, t3, t4}, [u0]; shl.b32 t2, t2, 1; shl.b32 t3, t3, 2;\n"
            "shl.b32 t4, t4, 3; add.u32 t1, t1, t2; add.u32 t3, t3, t4; add.u32 ro, t1, t3; }",
        {32, 64, 64, 64}, in,
        [](auto a, auto b, auto) {
          return (a & 0xffffffff) + ((a >> 32) << 1) + ((b & 0xffffffff) << 2) + ((b >> 32) << 3);
        },
        Compare::kBits, false);
    check_instruction(
        "{ " + p.prologue + " ld" + dotted(p.space) +
            ".v4.s8 {t1, t2, t3, t4}, [u0+4]; add.s32 t1, t1, t2; mad.lo.s32 t1, t3, 1000, t1;\n"
            "mad.lo.s32 ro, t4, 100000, t1; }",
        {32, 64, 64, 64}, in,
        [](auto a, auto, auto) {
          auto byte = [&](int n) { return sext(a >> (8 * n) & 0xff, 8); };
          return uint64_t(byte(4) + byte(5) + byte(6) * 1000 + byte(7) * 100000);
        },
        Compare::kBits, false);
    check_instruction(
        "{ " + p.prologue + " ld" + dotted(p.space) +
            ".v2.b16 {h0, _}, [u0+4]; cvt.u32.u16 ro, h0; }",
        {32, 64, 64, 64}, in, [](auto a, auto, auto) { return a >> 32 & 0xffff; }, Compare::kBits,
        false);
  }
}

TEST(ExecMemory, MovesPackAndUnpack) {
  const Inputs in = combine(integer_values(64), integer_values(64), {0}, 100);
  check_instruction(
      "{ mov.b64 {t0, t1}, ra; mov.b64 ro, {t1, t0}; }", {64, 64, 0, 0}, in,
      [](auto a, auto, auto) { return a << 32 | a >> 32; }, Compare::kBits, false);
  check_instruction(
      "{ mov.b32 {h0, h1}, ra; mov.b32 ro, {h1, h0}; }", {32, 32, 0, 0}, in,
      [](auto a, auto, auto) { return a << 16 | a >> 16; }, Compare::kBits, false);
  check_instruction(
      "{ mov.b64 {h0, h1, h2, h3}, ra; mov.b64 ro, {h3, h2, h1, h0}; }", {64, 64, 0, 0}, in,
      [](auto a, auto, auto) {
        return a << 48 | (a & 0xffff0000) << 16 | (a >> 16 & 0xffff0000) | a >> 48;
      },
      Compare::kBits, false);
  check_instruction(
      "{ mov.b64 {_, t1}, ra; mov.u32 ro, t1; }", {32, 64, 0, 0}, in,
      [](auto a, auto, auto) { return a >> 32; }, Compare::kBits, false);
}

TEST(ExecMemory, IsspacepAndCvta) {
  check_instruction(
      "{ .shared .b32 sm; .local .b32 lm; mov.u64 u0, sm; cvta.shared.u64 u0, u0; mov.u64 u1, lm; "
      "cvta.local.u64 u1, u1;\n"
      "isspacep.shared p0, u0; isspacep.local p1, u1; isspacep.global p2, %d3; isspacep.shared p3, "
      "u1; isspacep.global p4, u0;\n"
      "selp.u32 ro, 1, 0, p0; selp.u32 t0, 2, 0, p1; or.b32 ro, ro, t0; selp.u32 t0, 4, 0, p2; "
      "or.b32 ro, ro, t0;\n"
      "selp.u32 t0, 8, 0, p3; or.b32 ro, ro, t0; selp.u32 t0, 16, 0, p4; or.b32 ro, ro, t0;\n"
      "cvta.to.shared.u64 u2, u0; mov.u64 u3, sm; setp.eq.u64 p5, u2, u3; selp.u32 t0, 32, 0, p5; "
      "or.b32 ro, ro, t0; }",
      {}, combine({0}, {0}, {0}, 40), [](auto, auto, auto) { return 1 + 2 + 4 + 32; },
      Compare::kBits, false);
}

// ---------------------------------------------------------------- atomics

// ro = 3 * old + new, so that one number tells both.
void check_atomic(const std::string& op, const std::string& type, int bits, const Inputs& in,
                  const Reference& next, Compare compare = Compare::kBits, bool cas = false) {
  const std::string b = std::to_string(bits);
  for (const Place& p : places()) {
    if (std::string(p.space) == "local" || p.prologue.find("lm") != std::string::npos) continue;
    const std::string space = dotted(p.space), t = bits == 64 ? "u" : "t";
    const std::string operands = cas ? "[u0], " + t + "5, " + t + "6" : "[u0], " + t + "5";
    std::string text = "{ " + p.prologue + " ld" + space + ".b" + b + " " + t + "5, [u0+8]; ld" +
                       space + ".b" + b + " " + t + "6, [u0+16];\n";
    text += "atom" + space + "." + op + "." + type + " " + t + "7, " + operands + ";\n";
    text += "ld" + space + ".b" + b + " " + t + "4, [u0]; mul.lo.u" + b + " " + t + "7, " + t +
            "7, 3; add.u" + b + " ro, " + t + "7, " + t + "4; }";
    check_instruction(
        text, {bits, 64, 64, 64}, in,
        [=](auto a, auto b, auto c) {
          const uint64_t old = a & mask_of(bits);
          return 3 * old + next(old, b & mask_of(bits), c & mask_of(bits));
        },
        compare, false);
  }
}

TEST(ExecAtomics, OldValueAndResult) {
  for (int bits : {32, 64}) {
    const Inputs in = combine(integer_values(bits), integer_values(bits), {0, 5, ~0ull}, 200);
    const std::string u = "u" + std::to_string(bits), s = "s" + std::to_string(bits),
                      b = "b" + std::to_string(bits);
    check_atomic("add", u, bits, in, [](auto a, auto b, auto) { return a + b; });
    check_atomic("and", b, bits, in, [](auto a, auto b, auto) { return a & b; });
    check_atomic("or", b, bits, in, [](auto a, auto b, auto) { return a | b; });
    check_atomic("xor", b, bits, in, [](auto a, auto b, auto) { return a ^ b; });
    check_atomic("exch", b, bits, in, [](auto, auto b, auto) { return b; });
    check_atomic(
        "cas", b, bits, in, [](auto a, auto b, auto c) { return a == b ? c : a; }, Compare::kBits,
        true);
    check_atomic("min", u, bits, in, [](auto a, auto b, auto) { return std::min(a, b); });
    check_atomic("max", u, bits, in, [](auto a, auto b, auto) { return std::max(a, b); });
    check_atomic("min", s, bits, in,
                 [bits](auto a, auto b, auto) { return sext(a, bits) < sext(b, bits) ? a : b; });
    check_atomic("max", s, bits, in,
                 [bits](auto a, auto b, auto) { return sext(a, bits) > sext(b, bits) ? a : b; });
  }
  const Inputs in = combine(integer_values(32), integer_values(32), {0}, 200);
  check_atomic("add", "s32", 32, in, [](auto a, auto b, auto) { return a + b; });
  check_atomic("inc", "u32", 32, in, [](auto a, auto b, auto) { return a >= b ? 0 : a + 1; });
  check_atomic("dec", "u32", 32, in,
               [](auto a, auto b, auto) { return a == 0 || a > b ? b : a - 1; });
}

TEST(ExecAtomics, FloatAdd) {
  Inputs in32, in64;
  std::mt19937 r(3);
  for (int i = 0; i < 500; ++i) {
    in32.push_back({bits32(float(r()) / 1000), bits32(-float(r()) / 7), 0});
    in64.push_back({bits64(double(r()) / 1000), bits64(-double(r()) / 7), 0});
  }
  check_atomic("add", "f32", 32, in32,
               [](auto a, auto b, auto) { return bits32(f32(a) + f32(b)); });
  check_atomic("add", "f64", 64, in64,
               [](auto a, auto b, auto) { return bits64(f64(a) + f64(b)); });
}

TEST(ExecAtomics, ManyThreadsOnOneAddress) {
  Device d(
      ".visible .entry k(.param .u64 p)\n{\n.reg .b32 r<8>; .reg .b64 d<4>; .reg .f32 f; .reg .f64 "
      "e; .reg .pred q;\n"
      ".shared .align 8 .b64 s[2];\n"
      "ld.param.u64 d0, [p]; mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x;\n"
      "setp.eq.u32 q, r0, 0; @q st.shared.u64 [s], 0; bar.sync 0;\n"
      "atom.global.add.u32 r2, [d0], 1; red.global.add.u64 [d0+8], 3; red.global.max.u32 [d0+16], "
      "r0;\n"
      "mov.f32 f, 0f3F800000; red.global.add.f32 [d0+20], f; mov.f64 e, 0d3FE0000000000000; "
      "atom.add.f64 e, [d0+24], e;\n"
      "red.shared.add.u64 [s], 1; bar.sync 0; @!q bra END; ld.shared.u64 d1, [s]; "
      "atom.global.min.u64 d2, [d0+32], d1;\n"
      "END: ret;\n}\n");
  ASSERT_TRUE(d.program) << d.why;
  struct Result {
    uint32_t count, pad;
    uint64_t threes;
    uint32_t max;
    float f;
    double e;
    uint64_t min;
  };
  auto* p = d.array<Result>(1);
  p->min = ~0ull;
  auto fault = d.launch("k", 40, 100, Device::Arguments().add(p));
  ASSERT_FALSE(fault) << fault->what;
  EXPECT_EQ(p->count, 4000u);
  EXPECT_EQ(p->threes, 12000u);
  EXPECT_EQ(p->max, 99u);
  EXPECT_EQ(p->f, 4000.0f);
  EXPECT_EQ(p->e, 2000.0);
  EXPECT_EQ(p->min, 100u);
}

// Bytes after the source's size become zero, and nothing after them is touched: the source ends
// with its allocation.
TEST(ExecMemory, AsynchronousCopyOfFewerBytes) {
  for (const uint32_t bytes : {4u, 8u, 16u}) {
    for (uint32_t size = 0; size <= bytes; ++size) {
      const std::string n = std::to_string(bytes);
      Device d(
          ".visible .entry k(.param .u64 from, .param .u64 to, .param .u32 n)\n{\n"
          ".shared .align 16 .b8 s[16]; .reg .b32 r<8>; .reg .b64 d<4>; .reg .b16 h;\n"
          "ld.param.u64 d0, [from]; ld.param.u64 d1, [to]; ld.param.u32 r0, [n]; mov.u32 r1, "
          "s;\n"
          "mov.u32 r2, -1; st.shared.v4.b32 [r1], {r2, r2, r2, r2};\n" +
          std::string(bytes == 16 ? "cp.async.cg" : "cp.async.ca") + ".shared.global [r1], [d0], " +
          n +
          ", r0;\n"
          "cp.async.wait_all; ld.shared.v4.b32 {r2, r3, r4, r5}, [r1];\n"
          "st.global.v4.b32 [d1], {r2, r3, r4, r5}; ret;\n}\n");
      ASSERT_TRUE(d.program) << d.why;
      auto* to = d.array<uint8_t>(16);
      // The last bytes of an allocation.
      auto* block = d.array<uint8_t>(64 + size);
      for (uint32_t k = 0; k < 64 + size; ++k) block[k] = static_cast<uint8_t>(k + 1);
      auto fault = d.launch("k", 1, 1, Device::Arguments().add(block + 64).add(to).add(size));
      ASSERT_FALSE(fault) << fault->what << " " << size << " of " << bytes;
      for (uint32_t k = 0; k < 16; ++k) {
        const uint32_t want = k >= bytes ? 255 : k < size ? 64 + k + 1 : 0;
        ASSERT_EQ(to[k], want) << "byte " << k << ", " << size << " of " << bytes;
      }
    }
  }
}

TEST(ExecAtomics, TicketsAreDistinct) {
  Device d(
      ".visible .entry k(.param .u64 c, .param .u64 o)\n{\n.reg .b32 r; .reg .b64 d<4>;\n"
      "ld.param.u64 d0, [c]; ld.param.u64 d1, [o]; atom.global.add.u32 r, [d0], 1; mul.wide.u32 "
      "d2, r, 4;\n"
      "add.u64 d1, d1, d2; st.global.u32 [d1], 1; ret;\n}\n");
  ASSERT_TRUE(d.program) << d.why;
  auto* counter = d.array<uint32_t>(1);
  auto* out = d.array<uint32_t>(5000);
  auto fault = d.launch("k", 50, 100, Device::Arguments().add(counter).add(out));
  ASSERT_FALSE(fault) << fault->what;
  EXPECT_EQ(std::count(out, out + 5000, 1u), 5000);
}

}  // namespace
}  // namespace gpupool::simgpu
