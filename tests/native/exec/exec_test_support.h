// Runs small PTX kernels through the engine and compares each thread's result with a scalar
// reference that the test writes itself.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "simgpu/exec/engine.h"
#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu {

class HostMemory : public MemorySpace {
 public:
  ~HostMemory() override {
    for (auto& [address, bytes] : blocks_) free(reinterpret_cast<void*>(address));
  }
  std::optional<MemoryRange> find(uint64_t address) const override {
    std::lock_guard lock(mutex_);
    auto it = blocks_.upper_bound(address);
    if (it == blocks_.begin()) return std::nullopt;
    --it;
    if (address >= it->first + it->second) return std::nullopt;
    return MemoryRange{it->first, it->first + it->second, true};
  }
  uint64_t generation() const override { return generation_; }
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override {
    void* p = nullptr;
    if (posix_memalign(&p, alignment < 256 ? 256 : alignment, bytes) != 0) return 0;
    memset(p, 0, bytes);
    std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<uint64_t>(p)] = bytes;
    return reinterpret_cast<uint64_t>(p);
  }
  void release(uint64_t address) override {
    std::lock_guard lock(mutex_);
    ++generation_;
    if (blocks_.erase(address)) free(reinterpret_cast<void*>(address));
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> blocks_;
  uint64_t generation_ = 1;
};

// Loads one text and launches its kernels.
class Device {
 public:
  explicit Device(const std::string& text, bool with_header = true) {
    const std::string header = ".version 8.0\n.target sm_80\n.address_size 64\n";
    LoadResult r = load_program({{"test.ptx", (with_header ? header : "") + text}}, model, memory);
    program = r.program;
    why = r.log;
  }

  template <class T>
  T* array(size_t n) {
    return reinterpret_cast<T*>(memory->allocate(n * sizeof(T), 256));
  }

  struct Arguments {
    std::vector<uint8_t> bytes;
    template <class T>
    Arguments& add(T value) {
      bytes.resize((bytes.size() + sizeof(T) - 1) / sizeof(T) * sizeof(T));
      const size_t at = bytes.size();
      bytes.resize(at + sizeof(T));
      memcpy(bytes.data() + at, &value, sizeof(T));
      return *this;
    }
  };

  std::optional<Fault> launch(const std::string& kernel, uint32_t grid, uint32_t block,
                              const Arguments& arguments, uint32_t dynamic_shared = 0) {
    Launch l;
    l.program = program;
    if (!program) return Fault{FaultKind::kNotSupported, kernel, {}, {}, 0, 0, false, why};
    l.kernel = program->kernel_index(kernel);
    std::string reason;
    if (l.kernel < 0 || !program->kernel(l.kernel, &reason))
      return Fault{FaultKind::kNotSupported, kernel, {}, {}, 0, 0, false, reason};
    l.grid[0] = grid;
    l.block[0] = block;
    l.parameters = arguments.bytes;
    l.dynamic_shared_bytes = dynamic_shared;
    l.instruction_limit = instruction_limit;
    l.cooperative = cooperative;
    LaunchHooks hooks;
    hooks.checkpoint = [] { return true; };
    hooks.print = [this](std::string_view s) {
      std::lock_guard lock(output_mutex);
      output += s;
    };
    hooks.heap = &heap;
    return run_launch(l, model, *memory, hooks, &counters);
  }

  DeviceModel model;
  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();
  ptx::DeviceHeap heap{memory};
  std::shared_ptr<Program> program;
  std::string why, output;
  std::mutex output_mutex;
  LaunchCounters counters;
  uint64_t instruction_limit = 0;
  bool cooperative = false;
};

// ---------------------------------------------------------------- one instruction, many operands

enum class Compare { kBits, kF16, kF32, kF64 };  // of floats: any NaN equals any NaN

struct Shape {
  int out = 32, a = 32, b = 32, c = 32;  // bits of ro, ra, rb, rc; 1: a predicate po, pa, pb, pc
};

using Inputs = std::vector<std::array<uint64_t, 3>>;
using Reference = std::function<uint64_t(uint64_t, uint64_t, uint64_t)>;

inline uint64_t mask_of(int bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

inline bool is_nan(Compare c, uint64_t v) {
  switch (c) {
    case Compare::kF16:
      return (v & 0x7fff) > 0x7c00;
    case Compare::kF32:
      return (v & 0x7fffffff) > 0x7f800000;
    case Compare::kF64:
      return (v & 0x7fffffffffffffff) > 0x7ff0000000000000;
    default:
      return false;
  }
}

// Runs `text` (over ro, ra, rb, rc or po, pa, pb, pc) for all inputs. With `guard`, the text is one
// instruction that runs in every other thread; the others keep `kUntouched`.
constexpr uint64_t kUntouched = 0x5aa5c33c96695a5a;

inline std::vector<uint64_t> run_instruction(const std::string& text, const Shape& shape,
                                             const Inputs& inputs, bool guard, std::string* error) {
  std::string s =
      ".visible .entry k(.param .u64 in, .param .u64 out, .param .u32 n)\n{\n"
      ".reg .pred pguard, pend, pa, pb, pc, po, p<8>; .reg .b32 %i<8>, t<8>; .reg .b64 %d<8>, "
      "%v<4>, u<8>;\n"
      ".reg .b16 h<8>;\n";
  const int bits[4] = {shape.out, shape.a, shape.b, shape.c};
  const char* names[4] = {"o", "a", "b", "c"};
  for (int k = 0; k < 4; ++k)
    if (bits[k] > 1) s += ".reg .b" + std::to_string(bits[k]) + " r" + names[k] + ";\n";
  s += "mov.u32 %i0, %tid.x; mov.u32 %i1, %ctaid.x; mov.u32 %i2, %ntid.x;\n"
       "mad.lo.u32 %i3, %i1, %i2, %i0; ld.param.u32 %i4, [n]; setp.ge.u32 pend, %i3, %i4;\n"
       "@pend bra END;\n"
       "ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];\n"
       "mul.wide.u32 %d2, %i3, 32; add.u64 %d3, %d0, %d2; mul.wide.u32 %d4, %i3, 8; add.u64 %d5, "
       "%d1, %d4;\n"
       "ld.global.u64 %v1, [%d3]; ld.global.u64 %v2, [%d3+8]; ld.global.u64 %v3, [%d3+16];\n"
       "mov.u64 %v0, 0x5aa5c33c96695a5a;\n"
       "and.b32 %i5, %i3, 1; setp.ne.u32 pguard, %i5, 0;\n";
  for (int k = 0; k < 4; ++k) {
    const std::string v = "%v" + std::to_string(k), n = names[k];
    if (bits[k] == 1) s += "and.b64 u0, " + v + ", 1; setp.ne.u64 p" + n + ", u0, 0;\n";
    if (bits[k] == 16) s += "cvt.u16.u64 r" + n + ", " + v + ";\n";
    if (bits[k] == 32) s += "cvt.u32.u64 r" + n + ", " + v + ";\n";
    if (bits[k] == 64) s += "mov.u64 r" + n + ", " + v + ";\n";
  }
  s += (guard ? "@pguard " : "") + text + "\n";
  if (shape.out == 1) s += "selp.u64 %v0, 1, 0, po;\n";
  if (shape.out == 16) s += "cvt.u64.u16 %v0, ro;\n";
  if (shape.out == 32) s += "cvt.u64.u32 %v0, ro;\n";
  if (shape.out == 64) s += "mov.u64 %v0, ro;\n";
  s += "st.global.u64 [%d5], %v0;\nEND: ret;\n}\n";
  Device device(s);
  const uint32_t n = static_cast<uint32_t>(inputs.size());
  uint64_t* in = device.array<uint64_t>(inputs.size() * 4);
  uint64_t* out = device.array<uint64_t>(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) memcpy(in + 4 * i, inputs[i].data(), sizeof inputs[i]);
  auto fault =
      device.launch("k", (n + 127) / 128, 128, Device::Arguments().add(in).add(out).add(n));
  if (fault) {
    *error = fault->what;
    return {};
  }
  return std::vector<uint64_t>(out, out + n);
}

inline void check_instruction(const std::string& text, const Shape& shape, const Inputs& inputs,
                              const Reference& reference, Compare compare = Compare::kBits,
                              bool single = true) {
  for (int guard = 0; guard <= (single ? 1 : 0); ++guard) {
    std::string error;
    const std::vector<uint64_t> got = run_instruction(text, shape, inputs, guard, &error);
    if (got.empty()) {
      ADD_FAILURE() << text << ": " << error;
      return;
    }
    int shown = 0;
    size_t wrong = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& x = inputs[i];
      uint64_t want;
      bool untouched = guard && i % 2 == 0;
      if (untouched) {
        want = kUntouched & mask_of(shape.out);
      } else {
        want =
            reference(x[0] & mask_of(shape.a), x[1] & mask_of(shape.b), x[2] & mask_of(shape.c)) &
            mask_of(shape.out);
      }
      const bool same =
          want == got[i] || (!untouched && is_nan(compare, want) && is_nan(compare, got[i]));
      if (same) continue;
      ++wrong;
      if (++shown > 4) continue;
      ADD_FAILURE() << (guard ? "guarded " : "") << text << std::hex << "  a=0x"
                    << (x[0] & mask_of(shape.a)) << " b=0x" << (x[1] & mask_of(shape.b)) << " c=0x"
                    << (x[2] & mask_of(shape.c)) << ": got 0x" << got[i] << ", want 0x" << want;
    }
    if (wrong > 4) ADD_FAILURE() << text << ": " << wrong << " of " << inputs.size() << " wrong";
    if (wrong) return;
  }
}

// ---------------------------------------------------------------- operands

inline std::vector<uint64_t> integer_values(int bits) {
  std::vector<uint64_t> v = {0,
                             1,
                             2,
                             3,
                             5,
                             7,
                             8,
                             15,
                             16,
                             17,
                             31,
                             32,
                             33,
                             63,
                             64,
                             65,
                             127,
                             128,
                             255,
                             256,
                             0x5555555555555555,
                             0xaaaaaaaaaaaaaaaa,
                             0x8080808080808080,
                             ~0ull,
                             ~1ull};
  v.push_back(uint64_t{1} << (bits - 1));
  v.push_back((uint64_t{1} << (bits - 1)) - 1);
  v.push_back((uint64_t{1} << (bits - 1)) + 1);
  v.push_back(uint64_t{1} << (bits / 2));
  v.push_back((uint64_t{1} << (bits / 2)) - 1);
  return v;
}

inline std::vector<uint64_t> f32_values() {
  std::vector<uint64_t> v;
  for (uint32_t x :
       {0x00000000u, 0x00000001u, 0x007fffffu, 0x00800000u, 0x00800001u, 0x3f800000u,
        0x3f7fffffu, 0x3f800001u, 0x3f000000u, 0x3effffffu, 0x3f000001u, 0x3fc00000u,
        0x40200000u, 0x40490fdbu, 0x4b000000u, 0x4b800000u, 0x4f000000u, 0x4effffffu,
        0x4f800000u, 0x5f000000u, 0x5f800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u,
        0x7f800001u, 0x7fffffffu, 0x33800000u, 0x00400000u, 0x7e800000u, 0x01000000u}) {
    v.push_back(x);
    v.push_back(x | 0x80000000u);
  }
  return v;
}

inline std::vector<uint64_t> f64_values() {
  std::vector<uint64_t> v;
  for (double d : {0.0,
                   1.0,
                   0.5,
                   1.5,
                   2.5,
                   3.141592653589793,
                   4503599627370496.0,
                   9007199254740993.0,
                   2147483647.0,
                   2147483648.0,
                   4294967296.0,
                   9223372036854775808.0,
                   18446744073709551616.0,
                   1e308,
                   1e-308,
                   1e-320,
                   3.4028235677973366e38,
                   3.4028236e38,
                   1e-40,
                   1e-46,
                   0.49999999999999994,
                   1.0000000596046448})
    for (uint64_t sign : {0ull, 1ull << 63}) v.push_back(std::bit_cast<uint64_t>(d) | sign);
  for (uint64_t x :
       {0x0000000000000001ull, 0x000fffffffffffffull, 0x0010000000000000ull, 0x7fefffffffffffffull,
        0x7ff0000000000000ull, 0x7ff8000000000000ull, 0x7ff0000000000001ull}) {
    v.push_back(x);
    v.push_back(x | 1ull << 63);
  }
  return v;
}

inline std::vector<uint64_t> f16_values() {
  std::vector<uint64_t> v;
  for (uint32_t x : {0x0000u, 0x0001u, 0x03ffu, 0x0400u, 0x3c00u, 0x3bffu, 0x3c01u, 0x3800u,
                     0x3e00u, 0x4100u, 0x7bffu, 0x7c00u, 0x7e00u, 0x7c01u, 0x6400u, 0x1400u}) {
    v.push_back(x);
    v.push_back(x | 0x8000u);
  }
  return v;
}

// All combinations of the values, then random ones. Float operands: random bits and moderate sizes.
inline Inputs combine(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b = {0},
                      const std::vector<uint64_t>& c = {0}, int random = 1500,
                      Compare kind = Compare::kBits) {
  Inputs out;
  const size_t product = a.size() * b.size() * c.size();
  const size_t step = product > 40000 ? 7 : 1;  // 7: no divisor of the lists' sizes
  size_t count = 0;
  for (uint64_t x : a)
    for (uint64_t y : b)
      for (uint64_t z : c)
        if (count++ % step == 0) out.push_back({x, y, z});
  std::mt19937_64 r(a.size() * 31 + b.size() * 7 + c.size());
  for (int i = 0; i < random; ++i) {
    std::array<uint64_t, 3> x = {r(), r(), r()};
    if (i % 2) {
      for (uint64_t& v : x) {
        const double d = static_cast<double>(static_cast<int64_t>(v)) *
                         std::ldexp(1.0, static_cast<int>(r() % 40) - 70);
        if (kind == Compare::kF32) v = std::bit_cast<uint32_t>(static_cast<float>(d));
        if (kind == Compare::kF64) v = std::bit_cast<uint64_t>(d);
        if (kind == Compare::kBits) v >>= r() % 64;
      }
    }
    out.push_back(x);
  }
  return out;
}

inline float f32(uint64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
inline uint64_t bits32(float f) { return std::bit_cast<uint32_t>(f); }
inline double f64(uint64_t bits) { return std::bit_cast<double>(bits); }
inline uint64_t bits64(double d) { return std::bit_cast<uint64_t>(d); }

}  // namespace gpupool::simgpu
