// setp, set, selp, slct.
#include "exec_test_support.h"

namespace gpupool::simgpu {
namespace {

struct Kind {
  const char* name;
  int bits;
  enum { kUnsigned, kSigned, kFloat } kind;
};
const Kind kKinds[] = {{"u16", 16, Kind::kUnsigned}, {"s16", 16, Kind::kSigned},
                       {"u32", 32, Kind::kUnsigned}, {"s32", 32, Kind::kSigned},
                       {"u64", 64, Kind::kUnsigned}, {"s64", 64, Kind::kSigned},
                       {"f32", 32, Kind::kFloat},    {"f64", 64, Kind::kFloat}};

int64_t sext(uint64_t v, int bits) { return static_cast<int64_t>(v << (64 - bits)) >> (64 - bits); }

// -1, 0, 1, or 2: unordered.
int order(const Kind& k, uint64_t a, uint64_t b) {
  auto three = [](auto x, auto y) { return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2; };
  switch (k.kind) {
    case Kind::kUnsigned:
      return three(a, b);
    case Kind::kSigned:
      return three(sext(a, k.bits), sext(b, k.bits));
    default:
      return k.bits == 32 ? three(f32(a), f32(b)) : three(f64(a), f64(b));
  }
}

bool holds(const std::string& op, int o) {
  if (op == "eq") return o == 0;
  if (op == "ne") return o == -1 || o == 1;
  if (op == "lt" || op == "lo") return o == -1;
  if (op == "le" || op == "ls") return o == -1 || o == 0;
  if (op == "gt" || op == "hi") return o == 1;
  if (op == "ge" || op == "hs") return o == 1 || o == 0;
  if (op == "equ") return o == 0 || o == 2;
  if (op == "neu") return o != 0;
  if (op == "ltu") return o == -1 || o == 2;
  if (op == "leu") return o != 1;
  if (op == "gtu") return o == 1 || o == 2;
  if (op == "geu") return o != -1;
  if (op == "num") return o != 2;
  return o == 2;  // nan
}

std::vector<std::string> operators(const Kind& k) {
  std::vector<std::string> v = {"eq", "ne", "lt", "le", "gt", "ge"};
  if (k.kind == Kind::kUnsigned) v.insert(v.end(), {"lo", "ls", "hi", "hs"});
  if (k.kind == Kind::kFloat)
    v.insert(v.end(), {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  return v;
}

std::vector<uint64_t> values(const Kind& k) {
  if (k.kind != Kind::kFloat) return integer_values(k.bits);
  return k.bits == 32 ? f32_values() : f64_values();
}

bool combine_bool(const std::string& op, bool a, bool b) {
  return op == "and" ? a && b : op == "or" ? a || b : a != b;
}

TEST(ExecCompare, Setp) {
  for (const Kind& k : kKinds) {
    const Inputs in = combine(values(k), values(k), {0}, 200);
    for (const std::string& op : operators(k))
      check_instruction("setp." + op + "." + k.name + " po, ra, rb;", {1, k.bits, k.bits, 0}, in,
                        [=](auto a, auto b, auto) { return holds(op, order(k, a, b)); });
  }
  for (int bits : {16, 32, 64})
    check_instruction("setp.ne.b" + std::to_string(bits) + " po, ra, rb;", {1, bits, bits, 0},
                      combine(integer_values(bits), integer_values(bits)),
                      [](auto a, auto b, auto) { return a != b; });
  // .ftz: a subnormal equals zero.
  check_instruction("setp.eq.ftz.f32 po, ra, rb;", {1, 32, 32, 0},
                    {{1, 0, 0}, {0x807fffff, 0, 0}, {0x00800000, 0, 0}, {1, 2, 0}},
                    [](auto a, auto, auto) { return (a & 0x7fffffff) < 0x00800000; });
  check_instruction("setp.eq.f32 po, ra, rb;", {1, 32, 32, 0},
                    {{1, 0, 0}, {0x80000000, 0, 0}, {0x7fc00000, 0x7fc00000, 0}, {2, 2, 0}},
                    [](auto a, auto b, auto) { return f32(a) == f32(b); });
}

TEST(ExecCompare, SetpWithBooleanAndPair) {
  const Kind k{"s32", 32, Kind::kSigned};
  const Inputs in = combine(integer_values(32), integer_values(32), {0, 1}, 200);
  for (std::string op : {"lt", "eq"}) {
    for (std::string boolean : {"and", "or", "xor"}) {
      for (bool negated : {false, true}) {
        const std::string head = "setp." + op + "." + boolean + ".s32 ";
        const std::string tail = std::string(", ra, rb, ") + (negated ? "!" : "") + "pc;";
        check_instruction(head + "po" + tail, {1, 32, 32, 1}, in, [=](auto a, auto b, auto c) {
          return combine_bool(boolean, holds(op, order(k, a, b)), (c != 0) != negated);
        });
        check_instruction(head + "p0|po" + tail, {1, 32, 32, 1}, in, [=](auto a, auto b, auto c) {
          return combine_bool(boolean, !holds(op, order(k, a, b)), (c != 0) != negated);
        });
      }
    }
  }
}

TEST(ExecCompare, Set) {
  for (const Kind& k : kKinds) {
    const Inputs in = combine(values(k), values(k), {0, 1}, 100);
    for (std::string type : {"u32", "s32", "f32"}) {
      const uint64_t yes = type == "f32" ? 0x3f800000 : 0xffffffff;
      check_instruction(
          "set.le." + type + "." + k.name + " ro, ra, rb;", {32, k.bits, k.bits, 1}, in,
          [=](auto a, auto b, auto) { return holds("le", order(k, a, b)) ? yes : 0; });
      check_instruction("set.gt.xor." + type + "." + k.name + " ro, ra, rb, pc;",
                        {32, k.bits, k.bits, 1}, in, [=](auto a, auto b, auto c) {
                          return holds("gt", order(k, a, b)) != (c != 0) ? yes : 0;
                        });
    }
  }
}

TEST(ExecCompare, SelpAndSlct) {
  for (int bits : {16, 32, 64}) {
    const std::string n = std::to_string(bits);
    const Inputs in = combine(integer_values(bits), integer_values(bits), {0, 1}, 100);
    check_instruction("selp.b" + n + " ro, ra, rb, pc;", {bits, bits, bits, 1}, in,
                      [](auto a, auto b, auto c) { return c ? a : b; });
    check_instruction("selp.b" + n + " ro, ra, 7, !pc;", {bits, bits, bits, 1}, in,
                      [](auto a, auto, auto c) { return c ? 7 : a; });
    check_instruction("slct.b" + n + ".s32 ro, ra, rb, rc;", {bits, bits, bits, 32},
                      combine({1, ~0ull}, {2, 5}, integer_values(32), 100),
                      [](auto a, auto b, auto c) { return c >> 31 & 1 ? b : a; });
    check_instruction("slct.b" + n + ".f32 ro, ra, rb, rc;", {bits, bits, bits, 32},
                      combine({1, ~0ull}, {2, 5}, f32_values(), 100),
                      [](auto a, auto b, auto c) { return f32(c) >= 0 ? a : b; });
  }
  check_instruction(
      "slct.ftz.u32.f32 ro, ra, rb, rc;", {}, combine({1}, {2}, f32_values(), 50),
      [](auto a, auto b, auto c) { return (c & 0x7fffffff) < 0x00800000 || f32(c) >= 0 ? a : b; });
}

}  // namespace
}  // namespace gpupool::simgpu
