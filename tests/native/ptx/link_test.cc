// Module-level declarations, initialisers and linking of several texts.
#include <thread>

#include "ptx_test_support.h"

namespace gpupool::simgpu::ptx {
namespace {

// Keeps program and memory together, and reads variables.
struct Linked {
  LinkResult result;
  explicit Linked(const std::vector<std::string>& texts) : result(link_texts(texts)) {}

  template <class T>
  T read(const std::string& name, size_t index = 0) {
    auto info = result.program->global(name);
    EXPECT_TRUE(info) << name;
    T value{};
    if (!info || (index + 1) * sizeof(T) > info->bytes) {
      ADD_FAILURE() << name << " is too small";
      return value;
    }
    memcpy(&value, reinterpret_cast<void*>(info->address + index * sizeof(T)), sizeof(T));
    return value;
  }
  uint64_t address(const std::string& name) { return result.program->global(name)->address; }
  bool has(const std::string& text) const { return result.log.find(text) != std::string::npos; }
};

TEST(PtxLink, ScalarAndArrayInitialisers) {
  Linked l(
      {".visible .global .u32 a = 7;\n"
       ".visible .global .align 16 .b8 b[5] = {1, 0x2, -1};\n"
       ".visible .const .f32 c[3] = {1.5, 0f40000000, 3};\n"
       ".visible .global .f64 d[2] = {0d3FF0000000000000, 2.5};\n"
       ".visible .global .s16 e[2][3] = {{1,2},{3,4,5}};\n"
       ".visible .global .s16 f[2][3] = {1,2,3,4,5,6};\n"
       ".visible .global .v2 .u32 g[2] = {{1,2},{3,4}};\n"
       ".visible .global .u64 h = 0xFFFFFFFFFFFFFFFF;\n"
       ".visible .global .u16 i[] = {9, 8, 7};\n"
       ".visible .global .u32 j[2][2] = {{5},{6}}, k = 1+2*3;\n"
       ".visible .global .align 4 .u32 z;\n"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  EXPECT_EQ(l.read<uint32_t>("a"), 7u);
  EXPECT_EQ(l.read<uint8_t>("b", 1), 2);
  EXPECT_EQ(l.read<uint8_t>("b", 2), 0xff);
  EXPECT_EQ(l.read<uint8_t>("b", 4), 0);
  EXPECT_EQ(l.address("b") % 16, 0u);
  EXPECT_EQ(l.read<float>("c", 0), 1.5f);
  EXPECT_EQ(l.read<float>("c", 1), 2.0f);
  EXPECT_EQ(l.read<float>("c", 2), 3.0f);
  EXPECT_EQ(l.read<double>("d", 0), 1.0);
  EXPECT_EQ(l.read<double>("d", 1), 2.5);
  const int16_t e[] = {1, 2, 0, 3, 4, 5}, f[] = {1, 2, 3, 4, 5, 6};
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(l.read<int16_t>("e", i), e[i]);
    EXPECT_EQ(l.read<int16_t>("f", i), f[i]);
  }
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(l.read<uint32_t>("g", i), i + 1);
  EXPECT_EQ(l.read<uint64_t>("h"), ~uint64_t{0});
  EXPECT_EQ(l.result.program->global("i")->bytes, 6u);
  EXPECT_EQ(l.read<uint16_t>("i", 2), 7);
  EXPECT_EQ(l.read<uint32_t>("j", 2), 6u);
  EXPECT_EQ(l.read<uint32_t>("k"), 7u);
  EXPECT_EQ(l.read<uint32_t>("z"), 0u);
  EXPECT_TRUE(l.result.program->global("c")->constant);
  EXPECT_FALSE(l.result.program->global("a")->constant);
  EXPECT_EQ(l.result.program->constant_bytes(), 12u);
}

TEST(PtxLink, AddressesInInitialisers) {
  Linked l(
      {".visible .global .u32 x[4];\n"
       ".func f() { ret; }\n"
       ".visible .global .u64 p[4] = {x, x+8, generic(x), generic(x)+4};\n"
       ".visible .global .u64 t[2] = {0, f};\n"
       ".visible .global .u8 m[8] = {0xff(x), 0xff00(x), 0xff0000(x), 0xff000000(x), "
       "0xff00000000(x), 0xff0000000000(x), 0xff000000000000(x), "
       "0xff00000000000000(generic(x)+0)};\n"
       ".visible .global .u64 later = y;\n.visible .global .u32 y;\n"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  const uint64_t x = l.address("x");
  EXPECT_EQ(l.read<uint64_t>("p", 0), x);
  EXPECT_EQ(l.read<uint64_t>("p", 1), x + 8);
  EXPECT_EQ(l.read<uint64_t>("p", 2), x);
  EXPECT_EQ(l.read<uint64_t>("p", 3), x + 4);
  EXPECT_EQ(l.read<uint64_t>("m"), x);
  EXPECT_EQ(l.read<uint64_t>("later"), l.address("y"));
  const uint64_t f = l.read<uint64_t>("t", 1);
  const uint32_t index = l.result.program->function_of_address(f);
  ASSERT_NE(index, kNoIndex);
  EXPECT_EQ(l.result.program->function(index).name, "f");
  EXPECT_EQ(l.result.program->function_of_address(f + 1), kNoIndex);
  EXPECT_EQ(l.result.program->function_of_address(0), kNoIndex);
  EXPECT_EQ(l.result.program->function_of_address(f + 16 * 1000), kNoIndex);
}

TEST(PtxLink, WrongInitialisers) {
  for (const char* text :
       {".global .u32 a[2] = {1,2,3};", ".global .u32 a = {{{{1}}}};", ".shared .u32 a = 1;",
        ".extern .global .u32 a = 1;", ".global .u32 a = b;", ".global .u32 a[];",
        ".global .u32 p = 1/0;", ".shared .u32 s; .global .u64 a = s;",
        ".global .u32 x; .global .u32 a = x;", ".global .u32 a; .global .u32 a;",
        ".global .align 3 .u32 a;", ".global .pred a;", ".reg .b32 r;",
        ".global .u32 a[1099511627776][4];"}) {
    Linked l({text});
    EXPECT_EQ(l.result.status, LoadStatus::kInvalidPtx) << text;
    EXPECT_TRUE(l.has("error")) << text;
  }
}

TEST(PtxLink, ExternIsResolvedAcrossUnits) {
  Linked l(
      {".extern .func (.param .b32 r) add(.param .b32 a);\n.extern .global .u32 v;\n"
       ".visible .entry k() { .param .b32 a; .param .b32 r; .reg .b64 d; mov.u64 d, v; call (r), "
       "add, (a); ret; }",
       ".visible .func (.param .b32 r) add(.param .b32 a) { ret; }\n.visible .global .u32 v = 5;"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  std::string why;
  const FunctionBody* body = l.result.program->body(l.result.program->find_kernel("k"), &why);
  ASSERT_TRUE(body) << why;
  EXPECT_EQ(l.result.program->function(body->callees[0]).unit, 1);
  EXPECT_EQ(l.read<uint32_t>("v"), 5u);
}

TEST(PtxLink, StaticNamesDoNotClash) {
  Linked l(
      {".global .u32 s = 1;\n.func f() { ret; }\n.visible .global .u64 p = s;\n"
       ".visible .entry a() { call f; }",
       ".global .u32 s = 2;\n.func f() { ret; }\n.visible .global .u64 q = s;\n"
       ".visible .entry b() { call f; }"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  EXPECT_NE(l.read<uint64_t>("p"), l.read<uint64_t>("q"));
  EXPECT_EQ(*reinterpret_cast<uint32_t*>(l.read<uint64_t>("q")), 2u);
  auto& p = *l.result.program;
  const FunctionBody* a = p.body(p.find_kernel("a"), nullptr);
  const FunctionBody* b = p.body(p.find_kernel("b"), nullptr);
  EXPECT_NE(a->callees[0], b->callees[0]);
}

TEST(PtxLink, OtherUnitsDoNotSeeStaticNames) {
  Linked l(
      {".extern .global .u32 s;\n.entry k() { .reg .b64 d; mov.u64 d, s; }", ".global .u32 s;"});
  EXPECT_EQ(l.result.status, LoadStatus::kUnresolvedSymbol);
  EXPECT_TRUE(l.has("'s'")) << l.result.log;
}

TEST(PtxLink, UnresolvedFunctionIsAnErrorOnlyIfUsed) {
  EXPECT_TRUE(Linked({".extern .func f();\n.entry k() { // f\n ret; }"}).result.program);
  Linked l({".extern .func f();\n.entry k() { call f; ret; }"});
  EXPECT_EQ(l.result.status, LoadStatus::kUnresolvedSymbol);
  EXPECT_TRUE(l.has("Unresolved extern function 'f'")) << l.result.log;
  EXPECT_TRUE(l.has("unit0.ptx, line 4")) << l.result.log;
  EXPECT_EQ(link_texts({".extern .func f();\n.entry k() { call f; ret; }"}, nullptr).status,
            LoadStatus::kUnresolvedSymbol);
}

TEST(PtxLink, BuiltinsAreKnownNames) {
  Linked l(
      {".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n"
       ".extern .func (.param .b64 r) malloc(.param .b64 n);\n"
       ".entry k() { .param .b64 a; .param .b64 b; .param .b32 r; call (r), vprintf, (a, b); ret; "
       "}"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  auto& p = *l.result.program;
  const FunctionBody* body = p.body(p.find_kernel("k"), nullptr);
  ASSERT_TRUE(body);
  EXPECT_EQ(p.function(body->callees[0]).builtin, Builtin::kVprintf);
  EXPECT_EQ(p.body(body->callees[0], nullptr), nullptr);
  // A program's own function of that name comes first.
  Linked own({".visible .func free() { ret; } .entry k() { call free; ret; }"});
  ASSERT_TRUE(own.result.program) << own.result.log;
  EXPECT_EQ(own.result.program->function(0).builtin, Builtin::kNone);
}

TEST(PtxLink, DuplicatesWeakAndCommon) {
  Linked twice({".visible .func f() { ret; }", ".visible .func f() { ret; }"});
  EXPECT_EQ(twice.result.status, LoadStatus::kInvalidPtx);
  EXPECT_TRUE(twice.has("Multiple definition of 'f'")) << twice.result.log;

  Linked weak({".weak .global .u32 w = 1; .visible .global .u64 p = w;",
               ".visible .global .u32 w = 2;",
               ".weak .global .u32 w = 3; .visible .global .u64 q = w;"});
  ASSERT_TRUE(weak.result.program) << weak.result.log;
  EXPECT_EQ(weak.read<uint32_t>("w"), 2u);
  EXPECT_EQ(weak.read<uint64_t>("p"), weak.address("w"));
  EXPECT_EQ(weak.read<uint64_t>("q"), weak.address("w"));

  Linked first({".weak .global .u32 w = 1;", ".weak .global .u32 w = 2;"});
  ASSERT_TRUE(first.result.program) << first.result.log;
  EXPECT_EQ(first.read<uint32_t>("w"), 1u);

  Linked common({".common .global .u32 c;", ".common .global .u32 c[4];"});
  ASSERT_TRUE(common.result.program) << common.result.log;
  EXPECT_EQ(common.result.program->global("c")->bytes, 16u);

  Linked kernels({".weak .entry k() { ret; }", ".weak .entry k() { trap; }"});
  ASSERT_TRUE(kernels.result.program) << kernels.result.log;
  EXPECT_EQ(kernels.result.program->kernels().size(), 1u);

  Linked kinds({".visible .func f() { ret; }",
                ".extern .global .u32 f; .entry k() { .reg .b64 d; mov.u64 d, f; }"});
  EXPECT_EQ(kinds.result.status, LoadStatus::kInvalidPtx);
}

TEST(PtxLink, ForwardDeclarationsAndAliases) {
  Linked l(
      {".visible .func f(.param .b32 a);\n.visible .func al(.param .b32 a);\n"
       ".entry k() { .param .b32 a; call f, (a); call al, (a); ret; }\n"
       ".func f(.param .b32 a) { ret; }\n.alias al, f;\n",
       ".extern .func al(.param .b32 a);\n.entry q() { .param .b32 a; call al, (a); ret; }"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  auto& p = *l.result.program;
  EXPECT_EQ(p.body(p.find_kernel("k"), nullptr)->callees.size(), 1u);
  EXPECT_EQ(p.body(p.find_kernel("q"), nullptr)->callees,
            p.body(p.find_kernel("k"), nullptr)->callees);
  EXPECT_FALSE(Linked({".alias a, b;"}).result.program);
}

TEST(PtxLink, SharedLayoutFollowsTheCalls) {
  Linked l(
      {".shared .align 4 .b8 a[6];\n.shared .align 16 .b8 b[16];\n.shared .u32 unused[999];\n"
       ".extern .shared .align 32 .b8 dyn[];\n"
       ".func f() { .shared .f64 own; .reg .b64 d; mov.u64 d, own; mov.u64 d, b; ret; }\n"
       ".visible .entry k() { .reg .b32 r; mov.u32 r, a; mov.u32 r, dyn; call f; ret; }\n"
       ".visible .entry q() { .reg .b32 r; mov.u32 r, b; ret; }"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  auto& p = *l.result.program;
  std::string why;
  auto k = p.shared_layout(p.find_kernel("k"), &why);
  ASSERT_TRUE(k) << why;
  EXPECT_TRUE(k->uses_dynamic);
  EXPECT_EQ(k->places.size(), 4u);
  EXPECT_EQ(k->dynamic_offset % 32, 0u);
  // No two overlap and all are aligned.
  uint64_t sum = 0;
  for (const auto& place : k->places) {
    const Variable& v = p.variable(place.variable);
    EXPECT_EQ(place.offset % v.alignment, 0u) << v.name;
    if (v.unsized) continue;
    sum += v.bytes;
    EXPECT_LE(place.offset + v.bytes, k->static_bytes);
  }
  EXPECT_EQ(sum, 6u + 16 + 8);
  auto q = p.shared_layout(p.find_kernel("q"), &why);
  ASSERT_TRUE(q);
  EXPECT_EQ(q->static_bytes, 16u);
  EXPECT_FALSE(q->uses_dynamic);
}

TEST(PtxLink, IndirectCallsReachFunctionsWhoseAddressIsTaken) {
  Linked l(
      {".func f() { ret; }\n.func g() { ret; }\n.func h() { ret; }\n.global .u64 t = f;\n"
       ".visible .entry k() { .reg .b64 d; pr: .callprototype _ (); call d, pr; ret; }\n"
       ".visible .entry q() { .reg .b64 d; mov.u64 d, g; call h; ret; }"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  auto& p = *l.result.program;
  std::string why;
  std::vector<std::string> names;
  for (uint32_t f : p.reachable(p.find_kernel("k"), &why)) names.push_back(p.function(f).name);
  EXPECT_EQ(names, (std::vector<std::string>{"k", "g", "f"}));
}

TEST(PtxLink, VersionTargetAndAddressSize) {
  auto status = [](const std::string& text, std::string* log = nullptr) {
    LinkResult r = LinkedProgram::link({{"", text}}, DeviceModel{}, std::make_shared<TestMemory>());
    if (log) *log = r.log;
    return r.status;
  };
  std::string log;
  EXPECT_EQ(status(".version 8.0\n.target sm_80\n.address_size 64"), LoadStatus::kOk);
  EXPECT_EQ(status(".version 4.0\n.target sm_50"), LoadStatus::kOk);
  EXPECT_EQ(status(".version 9.5\n.target sm_75, debug\n.address_size 64"), LoadStatus::kOk);
  EXPECT_EQ(status(".version 10.1\n.target sm_80\n"), LoadStatus::kUnsupportedPtxVersion);
  EXPECT_EQ(status(".version 8.0\n.target sm_90\n", &log), LoadStatus::kInvalidPtx);
  EXPECT_NE(log.find("SM version"), std::string::npos) << log;
  EXPECT_EQ(status(".version 8.0\n.target sm_75a\n"), LoadStatus::kInvalidPtx);
  EXPECT_EQ(status(".version 8.0\n.target sm_80\n.address_size 32"), LoadStatus::kInvalidPtx);
  EXPECT_EQ(status(".version 8.0\n"), LoadStatus::kInvalidPtx);
  EXPECT_EQ(status(".target sm_80\n"), LoadStatus::kInvalidPtx);
  EXPECT_EQ(status("", &log), LoadStatus::kInvalidPtx);
  EXPECT_EQ(status("this is not ptx", &log), LoadStatus::kInvalidPtx);
  EXPECT_NE(log.find("ptxas application ptx input, line 1; error   : "), std::string::npos) << log;
  std::string nuls = ".version 8.0\n.target sm_80\n";
  nuls.append(3, '\0');
  EXPECT_EQ(status(nuls), LoadStatus::kOk);
}

TEST(PtxLink, MemoryLimits) {
  auto memory = std::make_shared<TestMemory>();
  memory->limit_ = 1024;
  LinkResult r = link_texts({".global .b8 small[8];\n.global .b8 big[4096];"}, memory);
  EXPECT_EQ(r.status, LoadStatus::kOutOfMemory);
  EXPECT_NE(r.log.find("'big'"), std::string::npos) << r.log;
  EXPECT_EQ(link_texts({".const .b8 c[65537];"}).status, LoadStatus::kInvalidPtx);
}

TEST(PtxLink, HostFindsStaticVariablesToo) {
  Linked l(
      {".global .u32 s = 4; .global .attribute(.managed) .u32 m = 6; .global .b8 $str[2] = "
       "\"a\";"});
  ASSERT_TRUE(l.result.program) << l.result.log;
  EXPECT_EQ(l.read<uint32_t>("s"), 4u);
  EXPECT_TRUE(l.result.program->global("m")->managed);
  EXPECT_FALSE(l.result.program->global("nothing"));
  EXPECT_EQ(l.result.program->global_names(), (std::vector<std::string>{"s", "m"}));
}

TEST(PtxLink, BodiesAreParsedOnceFromManyThreads) {
  std::string text;
  for (int i = 0; i < 50; ++i)
    text +=
        ".entry k" + std::to_string(i) + "() { .shared .u32 s; .reg .b32 r; mov.u32 r, s; ret; }\n";
  text.append(2 << 20, '\n');  // large: bodies are left for later
  Linked l({text});
  ASSERT_TRUE(l.result.program) << l.result.log;
  auto& p = *l.result.program;
  EXPECT_EQ(p.variable_count(), 0u);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (uint32_t k : p.kernels()) {
        std::string why;
        EXPECT_TRUE(p.shared_layout(k, &why)) << why;
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(p.variable_count(), 50u);
}

}  // namespace
}  // namespace gpupool::simgpu::ptx
