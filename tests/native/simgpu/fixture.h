// Loads a PTX text of this directory and launches its kernels.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "host_memory.h"
#include "simgpu/exec/engine.h"
#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu {

class EngineTest : public ::testing::Test {
 protected:
  void load(const std::string& file) {
    std::ifstream in(file);
    ASSERT_TRUE(in.good()) << file;
    std::stringstream text;
    text << in.rdbuf();
    LoadResult r = load_program({{file, text.str()}}, device, memory);
    ASSERT_EQ(r.status, LoadStatus::kOk) << r.log;
    program = r.program;
  }

  template <class T>
  T* array(size_t n) {
    return reinterpret_cast<T*>(memory->allocate(n * sizeof(T), 256));
  }
  template <class T>
  T* copy(const std::vector<T>& v) {
    T* p = array<T>(v.size());
    std::memcpy(p, v.data(), v.size() * sizeof(T));
    return p;
  }

  struct Shape {
    uint32_t gx = 1, gy = 1, gz = 1, bx = 1, by = 1, bz = 1;
    uint32_t shared = 0;
    bool cooperative = false;
  };

  template <class... A>
  std::optional<Fault> launch(const std::string& name, Shape s, A... arguments) {
    Launch l;
    l.program = program;
    l.kernel = program->kernel_index(name);
    EXPECT_GE(l.kernel, 0) << name;
    l.grid[0] = s.gx, l.grid[1] = s.gy, l.grid[2] = s.gz;
    l.block[0] = s.bx, l.block[1] = s.by, l.block[2] = s.bz;
    l.dynamic_shared_bytes = s.shared;
    l.cooperative = s.cooperative;
    std::string why;
    const KernelInfo* info = program->kernel(l.kernel, &why);
    EXPECT_NE(info, nullptr) << why;
    if (!info) return Fault{FaultKind::kNotSupported};
    l.parameters.resize(info->parameter_bytes);
    size_t k = 0;
    (put(l, *info, k++, arguments), ...);
    LaunchHooks hooks;
    hooks.print = [this](std::string_view t) { printed += t; };
    hooks.checkpoint = [this] {
      ++checkpoints;
      return !cancel;
    };
    hooks.heap = &heap;
    counters = {};
    return run_launch(l, device, *memory, hooks, &counters);
  }
  template <class... A>
  void run(const std::string& name, Shape s, A... arguments) {
    const std::optional<Fault> f = launch(name, s, arguments...);
    ASSERT_FALSE(f) << f->what;
  }

  DeviceModel device;
  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();
  ptx::DeviceHeap heap{memory};
  std::shared_ptr<Program> program;
  std::string printed;
  int checkpoints = 0;
  bool cancel = false;
  LaunchCounters counters;

 private:
  template <class T>
  static void put(Launch& l, const KernelInfo& info, size_t k, const T& v) {
    ASSERT_LT(k, info.parameters.size());
    ASSERT_EQ(info.parameters[k].bytes, sizeof(T));
    std::memcpy(l.parameters.data() + info.parameters[k].offset, &v, sizeof(T));
  }
};

}  // namespace gpupool::simgpu
