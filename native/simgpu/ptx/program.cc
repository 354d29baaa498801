#include "simgpu/ptx/program.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "simgpu/ptx/body.h"

namespace gpupool::simgpu::ptx {

uint32_t SharedLayout::offset_of(uint32_t variable) const {
  auto it = std::lower_bound(places.begin(), places.end(), variable,
                             [](const Place& p, uint32_t v) { return p.variable < v; });
  return it != places.end() && it->variable == variable ? it->offset : kNoIndex;
}

LinkedProgram::~LinkedProgram() {
  for (uint64_t address : allocations_) memory_->release(address);
}

uint32_t LinkedProgram::function_of_address(uint64_t address) const {
  if (address <= kFunctionAddressBase) return kNoIndex;
  const uint64_t distance = address - kFunctionAddressBase;
  if (distance % kFunctionAddressStep != 0) return kNoIndex;
  const uint64_t index = distance / kFunctionAddressStep - 1;
  return index < functions_.size() ? static_cast<uint32_t>(index) : kNoIndex;
}

uint32_t LinkedProgram::find_kernel(std::string_view name) const {
  const auto found = kernels_by_name_.find(name);
  return found == kernels_by_name_.end() ? kNoIndex : found->second;
}

const LinkedProgram::Symbol* LinkedProgram::find_symbol(int unit, std::string_view name) const {
  const Symbols& symbols = unit_symbols_[unit];
  auto it = symbols.find(name);
  return it == symbols.end() ? nullptr : &it->second;
}

LinkedProgram::LazyBody& LinkedProgram::parsed(uint32_t function) {
  LazyBody& lazy = bodies_[function];
  std::call_once(lazy.once, [&] {
    const Function& f = functions_[function];
    if (f.unit < 0) {
      lazy.error = f.name + ": built-in function";
      return;
    }
    if (!units_[f.unit]->functions[f.declaration].defined) {
      lazy.error = f.name + ": function without a body";
      return;
    }
    BodyParser parser(*this, function);
    try {
      lazy.body = parser.parse();
    } catch (const ParseError& e) {
      lazy.error = e.message;
      lazy.error_line = e.line;
    } catch (const std::bad_alloc&) {
      lazy.error = f.name + ": out of memory";
    }
    lazy.uncertain = parser.uncertain();
  });
  return lazy;
}

const FunctionBody* LinkedProgram::body(uint32_t function, std::string* why) {
  LazyBody& lazy = parsed(function);
  if (!lazy.body && why) {
    *why = lazy.error;
    if (lazy.error_line != 0) {
      *why = place(function, lazy.error_line) + ": in function '" + functions_[function].name +
             "': " + lazy.error;
    }
  }
  return lazy.body.get();
}

std::string LinkedProgram::place(uint32_t function, uint32_t line) const {
  const int unit = functions_[function].unit;
  if (unit < 0) return "built-in";
  return units_[unit]->file + "(" + std::to_string(line) + ")";
}

const Variable& LinkedProgram::variable(uint32_t index) const {
  std::lock_guard lock(variables_mutex_);
  return variables_[index];
}

uint32_t LinkedProgram::variable_count() const {
  std::lock_guard lock(variables_mutex_);
  return static_cast<uint32_t>(variables_.size());
}

std::optional<GlobalInfo> LinkedProgram::global(std::string_view name) const {
  std::lock_guard lock(variables_mutex_);
  const Variable* found = nullptr;
  auto it = exported_.find(name);
  if (it != exported_.end() && it->second.kind == SymbolKind::kVariable) {
    found = &variables_[it->second.index];
  } else {
    // `static __device__` variables aren't .visible, but programs ask for them.
    auto named = variables_by_name_.find(name);
    if (named != variables_by_name_.end()) found = &variables_[named->second];
  }
  if (!found || (found->space != Space::kGlobal && found->space != Space::kConst))
    return std::nullopt;
  return GlobalInfo{found->address, found->bytes, found->space == Space::kConst, found->managed};
}

std::vector<std::string> LinkedProgram::global_names() const {
  std::lock_guard lock(variables_mutex_);
  std::vector<std::string> names;
  for (uint32_t i = 0; i < variables_.size(); ++i) {
    const Variable& v = variables_[i];
    if (v.space != Space::kGlobal && v.space != Space::kConst) continue;
    if (v.name.empty() || v.name[0] == '$') continue;  // strings of the compiler
    if (variables_by_name_.at(v.name) == i) names.push_back(v.name);
  }
  return names;
}

uint64_t LinkedProgram::constant_bytes() const {
  std::lock_guard lock(variables_mutex_);
  return constant_bytes_;
}

uint32_t LinkedProgram::append(Variable v) {
  const auto index = static_cast<uint32_t>(variables_.size());
  const Variable& kept = variables_.emplace_back(std::move(v));
  if (kept.space == Space::kConst) constant_bytes_ += kept.bytes;
  if (kept.space == Space::kGlobal || kept.space == Space::kConst)
    variables_by_name_.try_emplace(kept.name, index);
  return index;
}

void LinkedProgram::take_address(uint32_t function) {
  if (is_address_taken_.size() <= function) is_address_taken_.resize(functions_.size());
  if (is_address_taken_[function]) return;
  is_address_taken_[function] = true;
  address_taken_.push_back(function);
}

bool LinkedProgram::allocate(Variable* v) {
  if (!memory_ || (v->space != Space::kGlobal && v->space != Space::kConst)) return true;
  v->address = memory_->allocate(std::max<uint64_t>(v->bytes, 1), std::max(v->alignment, 8u));
  if (v->address == 0) return false;
  allocations_.push_back(v->address);
  return true;
}

std::string LinkedProgram::initialise(const Variable& v, const VariableDeclaration& declaration) {
  if (memory_ && v.address != 0) {
    for (const InitialiserRun& run : declaration.image) {
      if (run.position >= v.bytes) continue;
      memcpy(reinterpret_cast<void*>(v.address + run.position), run.bytes.data(),
             std::min<uint64_t>(run.bytes.size(), v.bytes - run.position));
    }
  }
  for (const SymbolInitialiser& s : declaration.symbols) {
    const Symbol* symbol = find_symbol(v.unit, s.symbol);
    if (!symbol) return "Unknown symbol '" + s.symbol + "' in the initialiser of '" + v.name + "'";
    uint64_t value = 0;
    if (symbol->kind == SymbolKind::kFunction) {
      value = function_address(symbol->index);
      take_address(symbol->index);
    } else {
      const Variable& target = variables_[symbol->index];
      if (target.space != Space::kGlobal && target.space != Space::kConst)
        return "Initialiser of '" + v.name + "' needs the address of '" + s.symbol +
               "', which is known at run time only";
      value = target.address;
    }
    value += static_cast<uint64_t>(s.offset);
    if (s.mask != 0) value = (value & s.mask) >> std::countr_zero(s.mask);
    const uint32_t bytes = std::min(s.bytes, 8u);
    if (s.mask == 0 && bytes < 8) return "An address doesn't fit an element of '" + v.name + "'";
    if (v.address == 0 || s.position + bytes > v.bytes) continue;
    memcpy(reinterpret_cast<void*>(v.address + s.position), &value, bytes);
  }
  return {};
}

uint32_t LinkedProgram::add_function_scope_variable(const VariableDeclaration& d, int unit,
                                                    std::string* error) {
  if (d.space == Space::kTex) {
    *error = "Texture '" + d.name + "' must be declared at module scope";
    return kNoIndex;
  }
  std::lock_guard lock(variables_mutex_);
  Variable v{d.name, d.space, d.type, Linkage::kStatic, d.bytes, d.alignment, d.unsized,
             false,  0,       unit};
  if (d.unsized && d.space != Space::kShared) {
    *error = "Variable '" + d.name + "' has no size";
    return kNoIndex;
  }
  if (!allocate(&v)) {
    *error = "Out of memory for variable '" + d.name + "'";
    return kNoIndex;
  }
  *error = initialise(v, d);
  if (!error->empty()) return kNoIndex;
  return append(std::move(v));
}

const std::vector<uint32_t>& LinkedProgram::pointer_targets() {
  std::call_once(pointer_targets_once_, [&] {
    std::vector<bool> seen(functions_.size());
    auto add = [&](uint32_t f) {
      if (!seen[f]) pointer_targets_.push_back(f);
      seen[f] = true;
    };
    for (uint32_t f = 0; f < functions_.size(); ++f) {
      if (functions_[f].unit < 0) continue;
      if (const FunctionBody* b = body(f, nullptr))
        for (uint32_t taken : b->address_taken) add(taken);
    }
    std::lock_guard lock(variables_mutex_);
    for (uint32_t taken : address_taken_) add(taken);
  });
  return pointer_targets_;
}

std::vector<uint32_t> LinkedProgram::reachable(uint32_t kernel, std::string* why) {
  std::vector<uint32_t> order{kernel};
  std::vector<bool> seen(functions_.size());
  seen[kernel] = true;
  auto add = [&](uint32_t f) {
    if (!seen[f]) {
      seen[f] = true;
      order.push_back(f);
    }
  };
  bool pointers_added = false;
  for (size_t i = 0; i < order.size(); ++i) {
    const uint32_t f = order[i];
    if (functions_[f].unit < 0) continue;
    const FunctionBody* b = body(f, why);
    if (!b) continue;
    for (uint32_t callee : b->callees) add(callee);
    if (b->calls_indirectly && !pointers_added) {
      pointers_added = true;
      for (uint32_t taken : pointer_targets()) add(taken);
    }
  }
  return order;
}

std::optional<SharedLayout> LinkedProgram::shared_layout(uint32_t kernel, std::string* why) {
  SharedLayout layout;
  uint64_t at = 0;
  uint32_t dynamic_alignment = 16;
  std::vector<uint32_t> unsized;
  std::vector<bool> placed(variable_count());
  for (uint32_t f : reachable(kernel, why)) {
    const FunctionBody* b = body(f, f == kernel ? why : nullptr);
    if (!b) {
      if (f == kernel) return std::nullopt;
      continue;  // the call of it is refused where it is decoded
    }
    for (uint32_t index : b->shared_variables) {
      if (index >= placed.size()) placed.resize(index + 1);
      if (placed[index]) continue;
      placed[index] = true;
      const Variable& v = variable(index);
      if (v.unsized) {
        unsized.push_back(index);
        dynamic_alignment = std::max(dynamic_alignment, v.alignment);
        continue;
      }
      at = (at + v.alignment - 1) & ~uint64_t{v.alignment - 1};
      layout.places.push_back({index, static_cast<uint32_t>(at)});
      at += v.bytes;
      if (at > 0x7fffffff) {
        if (why) *why = "Shared memory of kernel '" + functions_[kernel].name + "' is too large";
        return std::nullopt;
      }
    }
  }
  layout.static_bytes = static_cast<uint32_t>(at);
  layout.uses_dynamic = !unsized.empty();
  layout.dynamic_offset =
      static_cast<uint32_t>((at + dynamic_alignment - 1) & ~uint64_t{dynamic_alignment - 1});
  for (uint32_t index : unsized) layout.places.push_back({index, layout.dynamic_offset});
  std::sort(layout.places.begin(), layout.places.end(),
            [](const auto& a, const auto& b) { return a.variable < b.variable; });
  return layout;
}

}  // namespace gpupool::simgpu::ptx
