#include <gtest/gtest.h>

#include "fixtures.h"
#include "frontdoor/cubin.h"
#include "frontdoor/ptx_scan.h"

namespace gpupool::frontdoor {
namespace {

const GlobalLayout* global(const ProgramInfo& info, std::string_view name) {
  for (const GlobalLayout& g : info.globals) {
    if (g.name == name) return &g;
  }
  return nullptr;
}

ProgramInfo scan(const std::string& body) {
  ProgramInfo info;
  std::string why;
  EXPECT_TRUE(scan_ptx(".version 8.3\n.target sm_80\n.address_size 64\n" + body, &info, &why))
      << why;
  return info;
}

std::string refusal(const std::string& text) {
  ProgramInfo info;
  std::string why;
  EXPECT_FALSE(scan_ptx(text, &info, &why));
  return why;
}

// Both samples were compiled from:
//   struct Large { char bytes[300]; };
//   __device__ int counter[10];  __constant__ float table[7];
//   saxpy(float, const float*, float*, int), __launch_bounds__(256)
//   by_value(char, Large, double), with 128 ints of shared memory
void expect_sample(const ProgramInfo& info) {
  ASSERT_EQ(info.kernels.size(), 2u);
  const KernelLayout* saxpy = info.kernel("saxpy");
  ASSERT_NE(saxpy, nullptr);
  ASSERT_EQ(saxpy->parameters.size(), 4u);
  const uint32_t offsets[] = {0, 8, 16, 24}, sizes[] = {4, 8, 8, 4};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(saxpy->parameters[i].offset, offsets[i]);
    EXPECT_EQ(saxpy->parameters[i].bytes, sizes[i]);
  }
  EXPECT_EQ(saxpy->parameter_bytes, 28u);
  EXPECT_EQ(saxpy->max_threads[0], 256u);
  const KernelLayout* by_value = info.kernel("by_value");
  ASSERT_NE(by_value, nullptr);
  ASSERT_EQ(by_value->parameters.size(), 3u);
  EXPECT_EQ(by_value->parameters[1].offset, 1u);
  EXPECT_EQ(by_value->parameters[1].bytes, 300u);
  EXPECT_EQ(by_value->parameters[2].offset, 304u);
  ASSERT_NE(global(info, "counter"), nullptr);
  EXPECT_EQ(global(info, "counter")->bytes, 40u);
  EXPECT_FALSE(global(info, "counter")->constant);
  ASSERT_NE(global(info, "table"), nullptr);
  EXPECT_EQ(global(info, "table")->bytes, 28u);
  EXPECT_TRUE(global(info, "table")->constant);
}

TEST(ScanPtx, ReadsWhatTheCompilerWrites) {
  const Blob text = sample("sample.ptx");
  ProgramInfo info;
  std::string why;
  ASSERT_TRUE(scan_ptx({reinterpret_cast<const char*>(text.data()), text.size()}, &info, &why))
      << why;
  EXPECT_EQ(info.architecture, 75);
  expect_sample(info);
}

TEST(ScanCubin, ReadsWhatTheCompilerWrites) {
  ProgramInfo info;
  ASSERT_TRUE(scan_cubin(sample("sample_sm86.cubin"), &info));
  EXPECT_EQ(info.architecture, 86);
  expect_sample(info);
  EXPECT_EQ(info.kernel("by_value")->static_shared_bytes, 512u);
  EXPECT_GT(info.kernel("saxpy")->registers, 0u);
}

TEST(ScanPtx, Parameters) {
  const ProgramInfo info = scan(R"(
.visible .entry k( // a comment with ) and {
  .param .u8 a, /* .param .u64 no, */
  .param .align 16 .b8 b[33],
  .param .u64 .ptr .global .align 128 c,
  .param .f16x2 d, .param .v4 .f32 e, .param .b32 f[0x3]
)
.maxntid 128, 2 .minnctapersm 1
.reqntid 8, 4, 2
{ .reg .b32 %r<2>; mov.u32 %r1, 1; { ret; } }
)");
  ASSERT_EQ(info.kernels.size(), 1u);
  const KernelLayout& k = info.kernels[0];
  const uint32_t offsets[] = {0, 16, 56, 64, 80, 96}, sizes[] = {1, 33, 8, 4, 16, 12};
  ASSERT_EQ(k.parameters.size(), 6u);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(k.parameters[i].offset, offsets[i]) << i;
    EXPECT_EQ(k.parameters[i].bytes, sizes[i]) << i;
  }
  EXPECT_EQ(k.parameter_bytes, 108u);
  EXPECT_EQ(k.max_threads[0], 128u);
  EXPECT_EQ(k.max_threads[1], 2u);
  EXPECT_EQ(k.max_threads[2], 1u);
  EXPECT_EQ(k.required_threads[2], 2u);
}

TEST(ScanPtx, LinkageAndOtherStatements) {
  const ProgramInfo info = scan(R"(
.file 1 "a { file.cu", 1234, 56
.pragma "nounroll";
.extern .func (.param .b32 r) f (.param .b64 p);
.func g(.param .b32 x) { ret; }
.extern .global .u32 elsewhere;
.extern .shared .align 4 .b8 dynamic[];
.weak .entry w() { // }
  .loc 1 2 3
  ret;
}
.entry without_parameters { ret; }
.visible .entry declared_only();
.section .debug_str { .b8 65, 0 }
.alias a, g;
)");
  ASSERT_EQ(info.kernels.size(), 2u);
  EXPECT_EQ(info.kernels[0].name, "w");
  EXPECT_EQ(info.kernels[1].name, "without_parameters");
  EXPECT_TRUE(info.globals.empty());
}

TEST(ScanPtx, NamesEndBeforeADirective) {
  const std::string head = ".version 8.3\n.target sm_80\n";
  EXPECT_NE(refusal(head + ".entry k.maxntid 1 () { ret; }"), "");
  EXPECT_NE(refusal(head + ".global .b8 a.b;"), "");
}

TEST(ScanPtx, Variables) {
  const ProgramInfo info = scan(R"(
.visible .global .align 8 .u64 pointer = generic(a);
.global .u32 a, b = 7, c[2][3];
.const .align 4 .b8 text[4] = {72, 105, 33, 0};
.global .align 4 .u32 sized[] = {1, 2, 3};
.visible .global .attribute(.managed) .align 4 .f32 m[5];
.global .v2 .f32 pairs[4];
)");
  const std::pair<const char*, uint64_t> expected[] = {{"pointer", 8}, {"a", 4},     {"b", 4},
                                                       {"c", 24},      {"text", 4},  {"sized", 12},
                                                       {"m", 20},      {"pairs", 32}};
  ASSERT_EQ(info.globals.size(), std::size(expected));
  for (auto [name, bytes] : expected) {
    ASSERT_NE(global(info, name), nullptr) << name;
    EXPECT_EQ(global(info, name)->bytes, bytes) << name;
  }
  EXPECT_TRUE(global(info, "text")->constant);
  EXPECT_TRUE(global(info, "m")->managed);
  EXPECT_FALSE(global(info, "pairs")->managed);
}

TEST(ScanPtx, SaysWhatItRefuses) {
  EXPECT_NE(refusal("nonsense").find("line 1"), std::string::npos);
  EXPECT_NE(refusal(".version 8.0\n.entry k() { ret; }").find(".target"), std::string::npos);
  EXPECT_NE(refusal(".version 8.0\n.target sm_80\n.entry k(.param .u64 a) {").find("k"),
            std::string::npos);
  EXPECT_NE(
      refusal(".version 8.0\n.target sm_80\n.entry k(.param .b8 a[99999999]) {}").find("large"),
      std::string::npos);
  EXPECT_NE(refusal(".version 8.0\n.target sm_80\n.global .b8 a[0xffffffffffff][0xffffffffffff];")
                .find("large"),
            std::string::npos);
}

// What the compiler allocates, however it is written.
TEST(ScanPtx, FindsTheMemoryOfAllVariables) {
  constexpr uint64_t kMib = 1 << 20;
  const std::pair<const char*, uint64_t> cases[] = {
      {".global .b8 big[1048576/2+(1<<19)];", kMib},
      {".global .b32 big[0x40000];", kMib},
      {".global .b8 big[04000000U];", kMib},
      {".global .b8 big[1024][1024];", kMib},
      {".global .align 16 .v4 .f32 big[65536];", kMib},
      {".global .align 4096 .b8 small;", 4096},
      {".entry k() { .global .align 4 .b8 big[1048576]; ret; }", kMib},
      {".func f() { ret; }\n.func g() { { .reg .b32 x; .global .b8 big[WARP_SZ*32768]; } ret; }",
       kMib},
      {".entry k() { /* } */ .global .b8 a[1]; { ret; } .const .b8 b[1]; }", 1024},
      {".entry k() { ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd1], %r1; ret; }", 0},
      {".extern .global .b8 elsewhere[1048576];", 0},
  };
  for (auto [text, bytes] : cases) EXPECT_EQ(scan(text).variable_bytes, bytes) << text;
}

TEST(ScanPtx, RefusesWhatItCouldMistake) {
  const std::string head = ".version 8.3\n.target sm_80\n";
  for (const char* text :
       {".global .b8 big[1-2];", ".global .b8 big[0xffffffffffffffff*2];",
        ".global .b8 big[1<<64];", ".global .b8 big[n];", ".global .b8 big[1==1];",
        ".global .b8 big[1/0];", ".entry k() { .global.b8 big[1048576]; ret; }",
        ".entry k() { ld .global.u32 %r1, [a]; }",
        ".pragma \"a\\\"; .global .b8 big[9]; .pragma \"b\";",
        ".entry k() { # /*\n .global .b8 big[9]; # */\n ret; }",
        ".entry k() { @@ /*\n .global .b8 big[9]; @@ */\n ret; }",
        ".global .b8 a[2] = {1, # /*\n 2}; .global .b8 big[9]; # */\n", "@@@"}) {
    EXPECT_NE(refusal(head + text), "") << text;
  }
  std::string nested = head + ".global .b8 big[";
  nested.append(200000, '(').append("1").append(200000, ')').append("];");
  EXPECT_NE(refusal(nested), "");
  std::string many = head;
  for (int i = 0; i < 65540; ++i) many += ".global .b8 v" + std::to_string(i) + ";\n";
  EXPECT_NE(refusal(many).find("too many"), std::string::npos);
}

TEST(Cubin, IsSoundOnlyIfEverythingLiesInIt) {
  const Blob good = sample("sample_sm86.cubin");
  ASSERT_TRUE(elf_is_sound(good));
  EXPECT_GE(cubin_variable_bytes(good), 68u) << "int counter[10] and float table[7]";
  EXPECT_LE(cubin_variable_bytes(good), 64u << 10);
  for (size_t bytes = 0; bytes < good.size(); bytes += 7) {
    Blob cut(good.begin(), good.begin() + static_cast<long>(bytes));
    EXPECT_FALSE(elf_is_sound(cut)) << bytes;
  }
  auto with = [&](size_t at, uint64_t value, size_t bytes) {
    Blob changed = good;
    memcpy(changed.data() + at, &value, bytes);
    return changed;
  };
  EXPECT_FALSE(elf_is_sound(with(40, 1ull << 40, 8))) << "e_shoff";
  EXPECT_FALSE(elf_is_sound(with(32, 1ull << 40, 8))) << "e_phoff";
  EXPECT_FALSE(elf_is_sound(with(58, 1, 2))) << "e_shentsize";
  EXPECT_FALSE(elf_is_sound(with(62, 0xfff0, 2))) << "e_shstrndx";
  uint64_t table = 0;
  uint16_t count = 0;
  memcpy(&table, good.data() + 40, 8);
  memcpy(&count, good.data() + 60, 2);
  for (uint16_t i = 1; i < count; ++i) {
    const size_t at = table + 64ull * i;
    EXPECT_FALSE(elf_is_sound(with(at, 0xffffffff, 4))) << "sh_name of " << i;
    EXPECT_FALSE(elf_is_sound(with(at + 40, 0xffff, 4))) << "sh_link of " << i;
    uint32_t type = 0;
    memcpy(&type, good.data() + at + 4, 4);
    if (type != 8) {  // SHT_NOBITS
      EXPECT_FALSE(elf_is_sound(with(at + 24, 1ull << 40, 8))) << "sh_offset of " << i;
      EXPECT_FALSE(elf_is_sound(with(at + 32, 1ull << 40, 8))) << "sh_size of " << i;
    }
    // Whatever a section is called: without bytes in the file it is memory of the device.
    Blob empty = with(at + 4, 8, 4);
    const uint64_t bytes = 1ull << 40;
    memcpy(empty.data() + at + 32, &bytes, 8);
    EXPECT_GE(cubin_variable_bytes(empty), bytes) << i;
  }
}

}  // namespace
}  // namespace gpupool::frontdoor
