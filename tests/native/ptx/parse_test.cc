// The grammar of functions' bodies. Expected values are the PTX ISA's.
#include <bit>

#include "ptx_test_support.h"

namespace gpupool::simgpu::ptx {
namespace {

std::vector<std::string> mods(const Instruction& i) {
  std::vector<std::string> out;
  for (Mod m : i.mods()) out.push_back(text_of(m));
  return out;
}

TEST(PtxParse, InstructionWithGuardModifiersAndImmediates) {
  OneKernel k(
      ".reg .pred %p<3>; .reg .f32 %f<4>; .reg .b64 %rd<2>;\n"
      "@!%p2 fma.rn.ftz.sat.f32 %f1, %f2, 0f3FC00000, -1.5;\n"
      "ld.global.nc.L1::no_allocate.v2.f32 {%f0, _}, [%rd1+-8];\n"
      "setp.lt.and.f32 %p0|%p1, %f0, %f1, !%p2;\n");
  ASSERT_TRUE(k.body) << k.log;
  const Instruction& fma = k.at(0);
  EXPECT_EQ(fma.op, Op::kFma);
  EXPECT_EQ(mods(fma), (std::vector<std::string>{"rn", "ftz", "sat", "f32"}));
  EXPECT_TRUE(fma.guard_negated);
  EXPECT_EQ(k.body->register_name(fma.guard), "%p2");
  EXPECT_EQ(fma.line, 7u);
  EXPECT_EQ(k.operand(0, 2).kind, OperandKind::kFloat32);
  EXPECT_EQ(k.operand(0, 2).bits, 0x3FC00000u);
  EXPECT_EQ(k.operand(0, 3).kind, OperandKind::kFloat64);
  EXPECT_EQ(std::bit_cast<double>(k.operand(0, 3).bits), -1.5);
  EXPECT_EQ(k.body->spelling(fma), "fma.rn.ftz.sat.f32");
  EXPECT_EQ(k.body->statement(fma), "fma.rn.ftz.sat.f32 %f1, %f2, 0f3FC00000, -1.5;");

  EXPECT_EQ(mods(k.at(1)),
            (std::vector<std::string>{"global", "nc", "L1::no_allocate", "v2", "f32"}));
  const Operand& vector = k.operand(1, 0);
  ASSERT_EQ(vector.kind, OperandKind::kVector);
  EXPECT_EQ(k.body->elements_of(vector)[1].kind, OperandKind::kSink);
  const Operand& address = k.operand(1, 1);
  EXPECT_EQ(address.kind, OperandKind::kAddress);
  EXPECT_TRUE(address.register_base);
  EXPECT_EQ(address.offset, -8);

  const Operand& pair = k.operand(2, 0);
  ASSERT_EQ(pair.kind, OperandKind::kPair);
  EXPECT_EQ(k.body->register_name(k.body->elements_of(pair)[1].index), "%p1");
  EXPECT_TRUE(k.operand(2, 3).negated);
}

TEST(PtxParse, IntegerLiteralsAndConstantExpressions) {
  const std::pair<const char*, int64_t> cases[] = {
      {"42", 42},
      {"-42", -42},
      {"0x2A", 42},
      {"052", 42},
      {"0b101010", 42},
      {"42U", 42},
      {"(1+2)*3", 9},
      {"7/2", 3},
      {"-7/2", -3},
      {"-7 % 3", -1},
      {"1<<4|3", 19},
      {"~0", -1},
      {"!5", 0},
      {"!0", 1},
      {"3>2 ? 10 : 20", 10},
      {"-8>>1", -4},
      {"5&&0", 0},
      {"5||0", 1},
      {"2==2", 1},
      {"2!=2", 0},
      {"6^3", 5},
      {"6&3", 2},
      {"10-3-2", 5},
      {"WARP_SZ", 32},
      {"WARP_SZ*2", 64},
      {"(.u64)5", 5},
      {"0xFFFFFFFFFFFFFFFF", -1},
      {"-0x8000000000000000", INT64_MIN},
      {"0xFFFFFFFFFFFFFFFFU >> 60", 15},
      {"2 <= 2", 1},
      {"3 >= 4", 0},
  };
  for (auto [text, value] : cases) {
    OneKernel k(std::string(".reg .b64 r; mov.b64 r, ") + text + ";");
    ASSERT_TRUE(k.body) << text << ": " << k.log;
    EXPECT_EQ(k.operand(0, 1).kind, OperandKind::kImmediate) << text;
    EXPECT_EQ(static_cast<int64_t>(k.operand(0, 1).bits), value) << text;
  }
}

TEST(PtxParse, FloatLiterals) {
  const std::pair<const char*, double> doubles[] = {{"1.0", 1.0},
                                                    {"0.5", 0.5},
                                                    {"3.25e2", 325.0},
                                                    {"1e-3", 1e-3},
                                                    {"-2.5E+1", -25.0},
                                                    {"0d3FF8000000000000", 1.5},
                                                    {"0D4009000000000000", 3.125}};
  for (auto [text, value] : doubles) {
    OneKernel k(std::string(".reg .f64 d; mov.f64 d, ") + text + ";");
    ASSERT_TRUE(k.body) << text << ": " << k.log;
    ASSERT_EQ(k.operand(0, 1).kind, OperandKind::kFloat64) << text;
    EXPECT_EQ(std::bit_cast<double>(k.operand(0, 1).bits), value) << text;
  }
  OneKernel nan(".reg .f32 f; mov.f32 f, 0f7FC00001; mov.f32 f, -0F3f800000;");
  ASSERT_TRUE(nan.body) << nan.log;
  EXPECT_EQ(nan.operand(0, 1).bits, 0x7FC00001u);  // every bit is kept
  EXPECT_EQ(nan.operand(1, 1).bits, 0xBF800000u);
}

TEST(PtxParse, NumberedRegisters) {
  OneKernel k(
      ".reg .b32 %r<11>; .reg .b64 %rd<3>, x; .reg .b32 a1;\n"
      "mov.b32 %r10, %r0; mov.b64 %rd2, x; mov.b32 a1, %r9;");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.body->registers.size(), 11u + 3 + 1 + 1);
  EXPECT_EQ(k.reg(0, 0), "%r10");
  EXPECT_EQ(k.reg(0, 1), "%r0");
  EXPECT_EQ(k.reg(1, 1), "x");
  EXPECT_EQ(k.reg(2, 0), "a1");
  EXPECT_EQ(k.body->registers[k.operand(1, 0).index], Type::kB64);
  EXPECT_FALSE(OneKernel(".reg .b32 %r<11>; mov.b32 %r11, 0;").body);
  EXPECT_FALSE(OneKernel(".reg .b32 %r<11>; mov.b32 %r01, 0;").body);
}

// CUB's inline assembly declares the same name with other types in blocks that follow each other.
TEST(PtxParse, NamesOfInnerBlocksAreRegistersOfTheirOwn) {
  OneKernel k(
      ".reg .b32 r0; mov.b32 r0, 1;\n"
      "{ .reg .f32 r0; mov.f32 r0, 0f00000000; { .reg .f64 r0; mov.f64 r0, 1.0; } mov.f32 r0, 2.0; "
      "}\n"
      "{ .reg .f64 r0; mov.f64 r0, 1.0; }\n"
      "mov.b32 r0, 3;\n");
  ASSERT_TRUE(k.body) << k.log;
  auto type = [&](size_t i) { return k.body->registers[k.operand(i, 0).index]; };
  EXPECT_EQ(type(0), Type::kB32);
  EXPECT_EQ(type(1), Type::kF32);
  EXPECT_EQ(type(2), Type::kF64);
  EXPECT_EQ(type(3), Type::kF32);
  EXPECT_EQ(type(4), Type::kF64);
  EXPECT_EQ(k.operand(1, 0).index, k.operand(3, 0).index);
  EXPECT_EQ(k.operand(0, 0).index, k.operand(5, 0).index);
  EXPECT_NE(k.operand(2, 0).index, k.operand(4, 0).index);
}

TEST(PtxParse, InnerNumberedRangeShadowsOnlyItsNumbers) {
  OneKernel k(
      ".reg .b32 %r<10>; { .reg .b64 %r<2>; mov.b64 %r1, 0; mov.b32 %r5, 0; } mov.b32 %r1, 0;");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.body->registers[k.operand(0, 0).index], Type::kB64);
  EXPECT_EQ(k.body->registers[k.operand(1, 0).index], Type::kB32);
  EXPECT_EQ(k.operand(2, 0).index, 1u);
}

TEST(PtxParse, NamesEndWithTheirBlock) {
  OneKernel k("{ .reg .b32 x; mov.b32 x, 1; } mov.b32 x, 2;");
  EXPECT_FALSE(k.body);
  EXPECT_NE(k.log.find("Unknown symbol 'x'"), std::string::npos) << k.log;
}

TEST(PtxParse, LabelsForwardBackwardAndScoped) {
  OneKernel k(
      ".reg .pred p;\n"
      "L: { L: bra L; @p bra OUT; { bra.uni L; } }\n"  // 0 1 2
      "bra L;\n"                                       // 3
      "OUT: ret;\n"                                    // 4
      "$L__BB0_2: bra $L__BB0_2; bra END;\n"           // 5 6
      "END:\n");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.operand(0, 0).kind, OperandKind::kLabel);
  EXPECT_EQ(k.operand(0, 0).index, 0u);
  EXPECT_EQ(k.operand(1, 0).index, 4u);
  EXPECT_EQ(k.operand(2, 0).index, 0u);
  EXPECT_EQ(k.operand(3, 0).index, 0u);
  EXPECT_EQ(k.operand(5, 0).index, 5u);
  EXPECT_EQ(k.operand(6, 0).index, 7u);  // behind the last instruction
  EXPECT_FALSE(OneKernel("bra NOWHERE;").body);
  EXPECT_FALSE(OneKernel("{ IN: ret; } bra IN;").body);
  EXPECT_FALSE(OneKernel("A: ret; A: ret;").body);
}

TEST(PtxParse, BranchTable) {
  OneKernel k(
      ".reg .b32 r; ts: .branchtargets L1, L0, N<2>;\n"
      "brx.idx r, ts; L0: exit; L1: ret; N0: ret; N1: trap;");
  ASSERT_TRUE(k.body) << k.log;
  ASSERT_EQ(k.operand(0, 1).kind, OperandKind::kTable);
  EXPECT_EQ(k.body->branch_tables.at(k.operand(0, 1).index), (std::vector<uint32_t>{2, 1, 3, 4}));
}

TEST(PtxParse, SpecialRegistersAndVectorRegisters) {
  OneKernel k(
      ".reg .v4 .f32 v; .reg .b32 r; .reg .f32 f; .reg .v2 .u32 w<3>;\n"
      "mov.u32 r, %ctaid.y; mov.u32 r, %laneid; mov.u32 r, %envreg2; mov.f32 f, v.z;\n"
      "mov.v4.f32 v, {f, f, f, f}; mov.b32 w2.y, 0; mov.u32 r, %pm3;");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.operand(0, 1).kind, OperandKind::kSpecial);
  EXPECT_EQ(static_cast<SpecialRegister>(k.operand(0, 1).index), SpecialRegister::kCtaid);
  EXPECT_EQ(k.operand(0, 1).component, 1);
  EXPECT_EQ(static_cast<SpecialRegister>(k.operand(1, 1).index), SpecialRegister::kLaneid);
  EXPECT_EQ(k.operand(2, 1).index, static_cast<uint32_t>(SpecialRegister::kEnvreg0) + 2);
  EXPECT_STREQ(text_of(static_cast<SpecialRegister>(k.operand(2, 1).index)), "%envreg2");
  EXPECT_EQ(k.operand(3, 1).index, 2u);
  ASSERT_EQ(k.operand(4, 0).kind, OperandKind::kVector);
  EXPECT_EQ(k.body->elements_of(k.operand(4, 0))[3].index, 3u);
  EXPECT_EQ(k.operand(5, 0).index, 4u + 1 + 1 + 2 * 2 + 1);
}

TEST(PtxParse, AddressForms) {
  OneKernel k(
      ".reg .b64 d; .reg .b32 r; .local .align 8 .b8 depot[24]; .shared .b32 s[4];\n"
      "ld.param.u64 d, [p]; ld.param.u32 r, [p+4]; ld.param.u32 r, [d]; ld.local.u32 r, "
      "[depot+8];\n"
      "ld.shared.u32 r, [s+4]; ld.global.u32 r, [g-4]; ld.const.u32 r, [16]; mov.u64 d, g+12;\n"
      "mov.u64 d, depot; st.global.u32 [d], r;",
      ".global .u32 g[8];\n", ".param .u64 p");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.operand(0, 1).symbol, SymbolKind::kParameter);
  EXPECT_EQ(k.operand(1, 1).offset, 4);
  EXPECT_TRUE(k.operand(2, 1).register_base);
  EXPECT_EQ(k.operand(3, 1).symbol, SymbolKind::kLocal);
  EXPECT_EQ(k.operand(4, 1).symbol, SymbolKind::kVariable);
  EXPECT_EQ(k.program->variable(k.operand(4, 1).index).space, Space::kShared);
  EXPECT_EQ(k.operand(5, 1).offset, -4);
  EXPECT_EQ(k.operand(6, 1).symbol, SymbolKind::kNone);
  EXPECT_FALSE(k.operand(6, 1).register_base);
  EXPECT_EQ(k.operand(6, 1).offset, 16);
  EXPECT_EQ(k.operand(7, 1).kind, OperandKind::kSymbol);
  EXPECT_EQ(k.operand(7, 1).offset, 12);
  EXPECT_EQ(k.body->local_bytes, 24u);
  EXPECT_EQ(k.body->local_alignment, 8u);
  ASSERT_EQ(k.body->shared_variables.size(), 1u);
  EXPECT_TRUE(OneKernel(".reg .b64 d; mov.b64 d, p;", "", ".param .u64 p").body);
}

TEST(PtxParse, TextureAndTensorOperands) {
  OneKernel k(
      ".reg .f32 f<8>; .reg .b64 t; .reg .b32 r<4>;\n"
      "tex.2d.v4.f32.f32 {f0,f1,f2,f3}, [t, {f4, f5}];\n"
      "tex.1d.v4.s32.s32 {r0,r1,r2,r3}, [tx, smp, {r0}];\n"
      "suld.b.2d.v2.b32.trap {r0,r1}, [t, {r2, r3}];");
  EXPECT_FALSE(k.body) << "tx and smp are not declared";
  OneKernel ok(
      ".reg .f32 f<8>; .reg .b64 t; .reg .b32 r<4>;\n"
      "tex.2d.v4.f32.f32 {f0,f1,f2,f3}, [t, {f4, f5}];\n"
      "tex.1d.v4.s32.s32 {r0,r1,r2,r3}, [tx, smp, {r0}];\n"
      "suld.b.2d.v2.b32.trap {r0,r1}, [t, {r2, r3}];",
      ".global .texref tx;\n.global .samplerref smp = { addr_mode_0 = wrap, filter_mode = nearest "
      "};\n");
  ASSERT_TRUE(ok.body) << ok.log;
  const Operand& bracket = ok.operand(0, 1);
  ASSERT_EQ(bracket.kind, OperandKind::kBracket);
  EXPECT_TRUE(ok.body->elements_of(bracket)[0].register_base);
  EXPECT_EQ(ok.body->elements_of(ok.body->elements_of(bracket)[1]).size(), 2u);
  EXPECT_EQ(mods(ok.at(2)), (std::vector<std::string>{"b", "2d", "v2", "b32", "trap"}));
  EXPECT_EQ(ok.at(2).modifiers[1], Mod::kDim2d);
}

TEST(PtxParse, VideoSelectorsAndNegatedOperands) {
  OneKernel k(
      ".reg .b32 r<4>; vadd.s32.u32.s32.sat r0, r1.b2, r2.h1; vmad.s32.s32.s32 r0, r1, r2, -r3;");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.operand(0, 1).selector, Selector::kB2);
  EXPECT_EQ(k.operand(0, 2).selector, Selector::kH1);
  EXPECT_TRUE(k.operand(1, 3).negated);
}

const char kCallee[] =
    ".func (.param .b32 out) f(.param .b64 a, .param .align 8 .b8 s[12]) { ret; }\n"
    ".func (.reg .b32 out) g(.reg .b32 a, .reg .f64 b) { mov.b32 out, a; ret; }\n"
    ".func h() { ret; }\n";

TEST(PtxParse, CallsAreNormalised) {
  OneKernel k(
      ".reg .b32 r; .reg .b64 d; .reg .f64 e;\n"
      "{ .param .b64 param0; .param .align 8 .b8 param1[12]; .param .b32 retval0;\n"
      "st.param.b64 [param0+0], d; call.uni (retval0), f, (param0, param1);\n"
      "ld.param.b32 r, [retval0+0]; }\n"
      "{ .param .b64 param0; .param .b32 retval0;\n"
      "prototype_0 : .callprototype (.param .b32 _) _ (.param .b64 _, .param .align 16 .b8 _[16]) "
      ".noreturn;\n"
      "call (retval0), d, (param0), prototype_0; }\n"
      "call h; call (r), g, (r, 1.0);\n"
      "tgt: .calltargets f, h; call d, tgt;",
      kCallee);
  ASSERT_TRUE(k.body) << k.log;
  const Instruction& direct = k.at(1);
  EXPECT_EQ(direct.op, Op::kCall);
  EXPECT_TRUE(direct.has(Mod::kUni));
  ASSERT_EQ(direct.operand_count, 4);
  EXPECT_EQ(k.body->elements_of(k.operand(1, 0)).size(), 1u);
  EXPECT_EQ(k.operand(1, 1).symbol, SymbolKind::kFunction);
  EXPECT_EQ(k.program->function(k.operand(1, 1).index).name, "f");
  EXPECT_EQ(k.body->elements_of(k.operand(1, 2))[1].symbol, SymbolKind::kLocal);
  EXPECT_EQ(k.operand(1, 3).kind, OperandKind::kNone);

  EXPECT_EQ(k.operand(3, 1).kind, OperandKind::kRegister);
  ASSERT_EQ(k.operand(3, 3).kind, OperandKind::kPrototype);
  const Prototype& prototype = k.body->prototypes.at(k.operand(3, 3).index);
  EXPECT_TRUE(prototype.noreturn);
  ASSERT_EQ(prototype.parameters.size(), 2u);
  EXPECT_EQ(prototype.parameters[1].bytes, 16u);
  EXPECT_EQ(prototype.parameters[1].offset, 16u);

  EXPECT_EQ(k.operand(4, 0).kind, OperandKind::kList);
  EXPECT_EQ(k.operand(4, 0).count, 0u);
  EXPECT_EQ(k.body->elements_of(k.operand(5, 2))[1].kind, OperandKind::kFloat64);
  EXPECT_EQ(k.operand(6, 3).kind, OperandKind::kTable);
  EXPECT_EQ(k.body->call_tables.at(k.operand(6, 3).index).size(), 2u);
  EXPECT_TRUE(k.body->calls_indirectly);

  // Sequences that follow each other share the frame's space; names repeat.
  EXPECT_EQ(k.body->locals.size(), 5u);
  EXPECT_EQ(k.body->param_bytes, 24u);
  EXPECT_EQ(k.body->locals[3].offset, 0u);
  EXPECT_EQ(k.body->locals[2].offset, 20u);
  EXPECT_EQ(k.body->callees.size(), 3u);
  EXPECT_TRUE(k.body->address_taken.empty());
}

TEST(PtxParse, RegisterParametersOfFunctions) {
  LinkResult r = link_texts({kCallee});
  ASSERT_TRUE(r.program) << r.log;
  for (uint32_t f = 0; f < r.program->function_count(); ++f) {
    if (r.program->function(f).name != "g") continue;
    const FunctionBody* body = r.program->body(f, nullptr);
    ASSERT_TRUE(body);
    EXPECT_EQ(body->parameter_registers, (std::vector<uint32_t>{0, 1}));
    EXPECT_EQ(body->return_registers, (std::vector<uint32_t>{2}));
    EXPECT_EQ(body->registers[1], Type::kF64);
  }
}

TEST(PtxParse, KernelDirectivesAndParameterLayout) {
  LinkResult r = link_texts(
      {".visible .entry k(.param .u8 a, .param .align 16 .b8 b[20], .param .u64 .ptr .global "
       ".align 32 c,\n"
       " .param .f32 d) .maxntid 128, 2 .minnctapersm 3 .maxnreg 40 .someday 7, 8 { ret; }\n"
       ".entry q() .reqntid 64 { ret; }"});
  ASSERT_TRUE(r.program) << r.log;
  const Function& k = r.program->function(r.program->find_kernel("k"));
  ASSERT_EQ(k.parameters.size(), 4u);
  EXPECT_EQ(k.parameters[0].offset, 0u);
  EXPECT_EQ(k.parameters[1].offset, 16u);
  EXPECT_EQ(k.parameters[1].bytes, 20u);
  EXPECT_EQ(k.parameters[2].offset, 40u);
  EXPECT_EQ(k.parameters[2].alignment, 8u);  // 32 is the pointee's
  EXPECT_EQ(k.parameters[3].offset, 48u);
  EXPECT_EQ(k.parameter_bytes, 52u);
  EXPECT_EQ(k.max_block[0], 128u);
  EXPECT_EQ(k.max_block[1], 2u);
  EXPECT_EQ(k.max_block[2], 1u);
  EXPECT_EQ(k.min_blocks, 3u);
  EXPECT_EQ(k.max_registers, 40u);
  EXPECT_EQ(r.program->function(r.program->find_kernel("q")).required_block[0], 64u);
}

TEST(PtxParse, DebugDirectivesCommentsAndPragmasAreTolerated) {
  OneKernel k(
      ".loc 1 12 3, function_name $L__info_string0, inlined_at 1 5 3\n"
      "// comment } {\n/* } */ .pragma \"nounroll\";\n"
      "ret; // end\n.loc 1 13 1\n",
      ".file 1 \"a.cu\", 12, 34\n.section .debug_str { .b8 65,66,0 // }\n }\n.pragma \"x\";\n");
  ASSERT_TRUE(k.body) << k.log;
  EXPECT_EQ(k.body->instructions.size(), 1u);
}

TEST(PtxParse, UnknownOpcodesFailTheLoadOnlyWhenTheVersionIsKnown) {
  OneKernel k(".reg .b32 r; addd.s32 r, r, r;");
  EXPECT_FALSE(k.program);
  EXPECT_NE(k.log.find("Not a name of any known instruction: 'addd'"), std::string::npos) << k.log;
  EXPECT_NE(k.log.find("line 6"), std::string::npos) << k.log;

  LinkResult later = LinkedProgram::link(
      {{"n.ptx",
        ".version 9.5\n.target sm_80\n.address_size 64\n.entry k() { .reg .b32 r; "
        "frobnicate.b32.new r, r <> r; ret; }\n.entry ok() { ret; }"}},
      DeviceModel{}, std::make_shared<TestMemory>());
  ASSERT_TRUE(later.program) << later.log;
  std::string why;
  EXPECT_FALSE(later.program->body(later.program->find_kernel("k"), &why));
  EXPECT_NE(why.find("n.ptx(4)"), std::string::npos) << why;
  EXPECT_TRUE(later.program->body(later.program->find_kernel("ok"), &why));
}

TEST(PtxParse, EveryOpcodeAndModifierHasItsText) {
  for (int i = 1; i < static_cast<int>(Op::kCount); ++i)
    EXPECT_STRNE(text_of(static_cast<Op>(i)), "?");
  EXPECT_EQ(type_of(Mod::kF32), Type::kF32);
  EXPECT_EQ(type_of(Mod::kRn), Type::kNone);
  EXPECT_EQ(space_of(Mod::kSharedCta), Space::kShared);
  EXPECT_EQ(space_of(Mod::kParamEntry), Space::kParam);
  EXPECT_EQ(bytes_of(Type::kB128), 16u);
  EXPECT_STREQ(text_of(Mod::kPropagateNan), "NaN");
  EXPECT_STREQ(text_of(Mod::kCompareNan), "nan");
}

}  // namespace
}  // namespace gpupool::simgpu::ptx
