// Shared by the PTX tests: memory on the process's heap, and short ways to link a text.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simgpu/ptx/program.h"

namespace gpupool::simgpu::ptx {

class TestMemory : public MemorySpace {
 public:
  ~TestMemory() override { EXPECT_TRUE(blocks_.empty()) << "memory was not given back"; }

  std::optional<MemoryRange> find(uint64_t address) const override {
    std::lock_guard lock(mutex_);
    auto it = blocks_.upper_bound(address);
    if (it == blocks_.begin()) return std::nullopt;
    --it;
    if (address >= it->first + it->second) return std::nullopt;
    return MemoryRange{it->first, it->first + it->second, true};
  }
  uint64_t generation() const override { return 1; }
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override {
    if (bytes > limit_) return 0;
    void* p = nullptr;
    if (posix_memalign(&p, alignment < 16 ? 16 : alignment, bytes) != 0) return 0;
    memset(p, 0, bytes);
    std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<uint64_t>(p)] = bytes;
    return reinterpret_cast<uint64_t>(p);
  }
  void release(uint64_t address) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(blocks_.erase(address), 1u);
    ::free(reinterpret_cast<void*>(address));
  }

  bool read(uint64_t address, void* to, uint64_t bytes) const {
    auto range = find(address);
    if (!range || bytes > range->end - address) return false;
    memcpy(to, reinterpret_cast<void*>(address), bytes);
    return true;
  }

  uint64_t limit_ = uint64_t{1} << 30;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> blocks_;
};

inline const std::string kHeader = ".version 8.0\n.target sm_80\n.address_size 64\n";

inline LinkResult link_texts(const std::vector<std::string>& texts,
                             std::shared_ptr<MemorySpace> memory = std::make_shared<TestMemory>()) {
  std::vector<SourceText> sources;
  for (size_t i = 0; i < texts.size(); ++i)
    sources.push_back({"unit" + std::to_string(i) + ".ptx", kHeader + texts[i]});
  return LinkedProgram::link(sources, DeviceModel{}, std::move(memory));
}

// A program of one kernel `k` with this body, without its braces.
struct OneKernel {
  std::shared_ptr<LinkedProgram> program;
  const FunctionBody* body = nullptr;
  std::string log;

  explicit OneKernel(const std::string& text, const std::string& before = "",
                     const std::string& parameters = "") {
    LinkResult r =
        link_texts({before + ".visible .entry k(" + parameters + ")\n{\n" + text + "\n}\n"});
    log = r.log;
    program = r.program;
    if (program) body = program->body(program->find_kernel("k"), &log);
  }

  const Instruction& at(size_t i) const { return body->instructions.at(i); }
  const Operand& operand(size_t i, size_t o) const { return body->operands_of(at(i))[o]; }
  std::string reg(size_t i, size_t o) const { return body->register_name(operand(i, o).index); }
};

}  // namespace gpupool::simgpu::ptx
