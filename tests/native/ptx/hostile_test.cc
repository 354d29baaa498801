// Text that no compiler wrote: every outcome is fine but a crash, a hang or a huge allocation.
#include <random>

#include "ptx_test_support.h"

namespace gpupool::simgpu::ptx {
namespace {

const char kSample[] =
    ".visible .global .align 8 .b8 a[16] = {1, 2, 0xff(v), generic(v)};\n.global .u64 v = a+4;\n"
    ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 p);\n"
    ".func (.reg .b32 o) g(.reg .b32 x) { add.s32 o, x, (1+2)*3; ret; }\n"
    ".alias h, g;\n"
    ".visible .entry k(.param .u64 p, .param .align 4 .b8 s[12]) .maxntid 32,1,1 {\n"
    " .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .v2 .f32 w; .local .b8 d[8];\n"
    " .shared .align 16 .b8 sh[64];\n"
    " ts: .branchtargets A, B; ld.param.u64 %rd1, [p+0]; @!%p1 bra A; brx.idx %r1, ts;\n"
    "A: { .param .b64 q; .param .b32 z; st.param.b64 [q], %rd1; call.uni (z), vprintf, (q, q); }\n"
    "B: pr: .callprototype (.reg .b32 _) _ (.reg .b32 _); call (%r1), %rd2, (%r2), pr;\n"
    " setp.eq.or.s32 %p1|%p2, %r1, -0x5, !%p1; tex.2d.v4.f32.s32 {w.x, w.y, _, _}, [%rd1, {%r1, "
    "%r2}];\n"
    " mov.u32 %r1, %tid.x; fma.rn.f32 w.x, 0f3F800000, 1.5e-3, w.y; /* c */ ret; // d\n}\n";

// Parses everything that can be parsed.
void digest(const std::string& text) {
  LinkResult r = LinkedProgram::link({{"h", text}}, DeviceModel{}, std::make_shared<TestMemory>());
  EXPECT_EQ(r.program == nullptr, r.status != LoadStatus::kOk);
  if (!r.program) {
    EXPECT_FALSE(r.log.empty());
    EXPECT_LT(r.log.size(), 100000u);
    return;
  }
  std::string why;
  for (uint32_t k : r.program->kernels()) r.program->shared_layout(k, &why);
}

TEST(PtxHostile, SampleItselfIsGood) {
  LinkResult r = link_texts({std::string(kSample)});
  EXPECT_FALSE(r.program);  // generic(v) doesn't fit a byte
  std::string good = kSample;
  good.replace(good.find(", generic(v)"), 12, ", 0xff(generic(v)+1)");
  r = link_texts({good});
  EXPECT_TRUE(r.program) << r.log;
}

TEST(PtxHostile, Truncated) {
  std::string text = kHeader + kSample;
  text.replace(text.find(", generic(v)"), 12, ", 3");
  for (size_t n = 0; n <= text.size(); ++n) digest(text.substr(0, n));
}

TEST(PtxHostile, Mutated) {
  std::string good = kHeader + kSample;
  good.replace(good.find(", generic(v)"), 12, ", 3");
  std::mt19937 random(12345);
  static const char kBytes[] = "{}()[]<>.,;:|!@%-+0123456789abf_\"\\/*\n \x80$";
  for (int round = 0; round < 4000; ++round) {
    std::string text = good;
    for (int n = 1 + random() % 4; n > 0; --n) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = kBytes[random() % (sizeof kBytes - 1)];
          break;
        case 1:
          text.erase(at, 1 + random() % 8);
          break;
        case 2:
          text.insert(at, 1, kBytes[random() % (sizeof kBytes - 1)]);
          break;
        default: {
          const size_t from = random() % text.size();
          text.insert(at, text.substr(from, random() % 40));
        }
      }
    }
    digest(text);
  }
}

TEST(PtxHostile, DeepNesting) {
  const int n = 100000;
  auto body = [](const std::string& s) {
    digest(kHeader + ".entry k() { .reg .b64 r; " + s + " }");
  };
  body(std::string(n, '{') + std::string(n, '}'));
  body("mov.b64 r, " + std::string(n, '(') + "1" + std::string(n, ')') + ";");
  body("mov.b64 r, " + std::string(n, '-') + "1;");
  body("mov.b64 r, " + std::string(n, '~') + "1;");
  body("mov.b64 r, " + std::string(n, '!') + "1;");
  body("mov.b64 r, " + std::string(n, '{') + "r" + std::string(n, '}') + ";");
  body("mov.b64 r, " + std::string(n, '[') + "r" + std::string(n, ']') + ";");
  std::string conditional = "mov.b64 r, ";
  for (int i = 0; i < n; ++i) conditional += "1?1:";
  body(conditional + "1;");
  std::string list = "mov.b64 {";
  for (int i = 0; i < n; ++i) list += "r,";
  body(list + "r}, 0;");
  std::string modifiers = "mov";
  for (int i = 0; i < n; ++i) modifiers += ".b64";
  body(modifiers + " r, 0;");
  digest(kHeader + ".global .b8 a[2] = " + std::string(n, '{') + "1" + std::string(n, '}') + ";");
  digest(kHeader + ".global .b8 a" + [&] {
    std::string s;
    for (int i = 0; i < n; ++i) s += "[2]";
    return s;
  }() + ";");
  digest(kHeader + ".global .attribute(.a(" + std::string(n, '(') + ") .b8 x;");
}

TEST(PtxHostile, HugeSizes) {
  for (const char* text :
       {".global .b8 a[0x7fffffffffffffff];", ".global .b8 a[0x100000][0x100000][0x100000];",
        ".global .b8 a[2][0x8000000000] = {{1},{2}};", ".shared .b8 a[0x7fffffff];",
        ".entry k(.param .b8 a[0x7fffffff]) { ret; }", ".entry k() { .reg .b32 r<0x7fffffff>; }",
        ".entry k() { .reg .v8 .b32 r<1048576>; }", ".entry k() { .local .b8 a[0x7fffffffff]; }",
        ".entry k() { .param .b8 a[0x7fffffff]; .param .b8 b[0x7fffffff]; }",
        ".entry k() { t: .branchtargets L<4000000000>; }", ".global .align 0x7fffffff .b8 a;",
        ".global .b8 a[99999999999999999999999];", ".entry k() .maxntid 99999999999 { ret; }",
        ".global .f32 a = 1e999999;", ".entry k() { .reg .b32 r99999999999999999999<2>; }"})
    digest(kHeader + text);
}

TEST(PtxHostile, ElementsFarApart) {
  auto memory = std::make_shared<TestMemory>();
  const std::string text = ".visible .global .u32 a[3][65536] = {{1}, {2, 3}};\n";
  LinkResult r = LinkedProgram::link({{"h", kHeader + text}}, DeviceModel{}, memory);
  ASSERT_TRUE(r.program) << r.log;
  const std::vector<InitialiserRun>& runs = r.program->unit(0).variables[0].image;
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].bytes.size() + runs[1].bytes.size(), 12u);
  const uint64_t at = r.program->global("a")->address;
  for (uint32_t i = 0; i < 3 * 65536; ++i) {
    uint32_t value = 0;
    ASSERT_TRUE(memory->read(at + 4 * i, &value, 4));
    ASSERT_EQ(value, i == 0 ? 1u : i == 65536 ? 2u : i == 65537 ? 3u : 0u) << i;
  }
}

TEST(PtxHostile, Bytes) {
  std::mt19937 random(99);
  for (int round = 0; round < 500; ++round) {
    std::string text = round % 2 ? kHeader : "";
    for (int n = random() % 300; n > 0; --n) text += static_cast<char>(random());
    digest(text);
  }
  digest(std::string(1000, '\0'));
  digest(std::string("\x7f"
                     "ELF") +
         std::string(60, '\0'));
}

}  // namespace
}  // namespace gpupool::simgpu::ptx
