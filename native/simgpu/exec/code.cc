#include "simgpu/exec/code.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace gpupool::simgpu::exec {

Code::~Code() {
  for (std::byte* w : free_) std::free(w);
}

std::byte* Code::take_window() const {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      std::byte* w = free_.back();
      free_.pop_back();
      return w;
    }
  }
  auto* w = static_cast<std::byte*>(std::aligned_alloc(64, (window_bytes + 63) / 64 * 64));
  if (!w) throw std::bad_alloc();
  std::memset(w, 0, window_bytes);
  for (const ConstantRow& c : constants) {
    for (int l = 0; l < kLanes; ++l) {
      std::byte* to = w + c.offset + static_cast<uint32_t>(l) * c.width;
      if (c.width <= 8) {
        std::memcpy(to, &c.value, c.width);
      } else {
        std::memcpy(to, &c.value, 8);
        std::memset(to + 8, 0, c.width - 8);
      }
    }
  }
  return w;
}

void Code::give_window(std::byte* window) const {
  std::lock_guard lock(mutex_);
  free_.push_back(window);
}

const Code* KernelCode::callee(uint32_t index, std::string* why) {
  std::lock_guard lock(mutex_);
  auto [it, fresh] = callees_.try_emplace(index);
  if (fresh) it->second.code = decode_function(*this, index, &it->second.why);
  if (!it->second.code) *why = it->second.why;
  return it->second.code.get();
}

ParameterPlaces place_parameters(const std::vector<ptx::Parameter>& returns,
                                 const std::vector<ptx::Parameter>& parameters) {
  ParameterPlaces p;
  auto place = [&](const ptx::Parameter& x) {
    const uint32_t alignment = x.alignment < 4 ? 4 : x.alignment;
    p.bytes = (p.bytes + alignment - 1) / alignment * alignment;
    const uint32_t at = p.bytes;
    uint32_t bytes = static_cast<uint32_t>(x.bytes);
    if (x.space == ptx::Space::kReg) bytes = x.type == ptx::Type::kPred ? 4 : bytes < 2 ? 2 : bytes;
    p.bytes += bytes;
    return at;
  };
  for (const ptx::Parameter& x : returns) p.returns.push_back(place(x));
  for (const ptx::Parameter& x : parameters) p.parameters.push_back(place(x));
  p.bytes = (p.bytes + kGranule - 1) / kGranule * kGranule;
  return p;
}

}  // namespace gpupool::simgpu::exec
