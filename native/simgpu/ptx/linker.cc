// Joins units: which definition each name of each unit stands for.
#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <unordered_set>

#include "simgpu/ptx/declarations.h"
#include "simgpu/ptx/grid_runtime.h"
#include "simgpu/ptx/program.h"

namespace gpupool::simgpu::ptx {
namespace {

constexpr int kMaxVersion = 909;  // 100 * major + minor
constexpr uint64_t kMaxConstantBytes = 64 * 1024;
constexpr size_t kEagerTextBytes = 1024 * 1024;  // larger texts: bodies on first use only
constexpr size_t kMaxErrors = 50;

struct BuiltinName {
  const char* name;
  Builtin builtin;
};
constexpr BuiltinName kBuiltins[] = {
    {"vprintf", Builtin::kVprintf},
    {"malloc", Builtin::kMalloc},
    {"free", Builtin::kFree},
    {"__assertfail", Builtin::kAssertFail},
    {"cudaCGGetIntrinsicHandle", Builtin::kCgGetIntrinsicHandle},
    // The device runtime's: programs that link with it may name them without calling them.
    {"cudaDeviceSynchronize", Builtin::kOther},
    {"__cudaDeviceSynchronizeDeprecationAvoidance", Builtin::kOther},
    {"cudaGetParameterBuffer", Builtin::kOther},
    {"cudaGetParameterBufferV2", Builtin::kOther},
    {"cudaLaunchDevice", Builtin::kOther},
    {"cudaLaunchDeviceV2", Builtin::kOther},
    {"__cudaCDP2GetParameterBufferV2", Builtin::kOther},
    {"__cudaCDP2LaunchDeviceV2", Builtin::kOther},
    {"cudaGetLastError", Builtin::kOther},
    {"cudaPeekAtLastError", Builtin::kOther},
    {"cudaGetErrorString", Builtin::kOther},
    {"cudaGetErrorName", Builtin::kOther},
    {"cudaGetDevice", Builtin::kOther},
    {"cudaGetDeviceCount", Builtin::kOther},
    {"cudaDeviceGetAttribute", Builtin::kOther},
    {"cudaFuncGetAttributes", Builtin::kOther},
    {"cudaMalloc", Builtin::kOther},
    {"cudaFree", Builtin::kOther},
    {"cudaStreamCreateWithFlags", Builtin::kOther},
    {"cudaStreamDestroy", Builtin::kOther},
    {"cudaEventCreateWithFlags", Builtin::kOther},
    {"cudaEventRecord", Builtin::kOther},
    {"cudaEventDestroy", Builtin::kOther},
    {"cudaStreamWaitEvent", Builtin::kOther},
    {"cudaMemcpyAsync", Builtin::kOther},
    {"cudaMemsetAsync", Builtin::kOther},
    {"cudaOccupancyMaxActiveBlocksPerMultiprocessor", Builtin::kOther},
    {"cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", Builtin::kOther},
};

Builtin builtin_named(std::string_view name) {
  for (const BuiltinName& b : kBuiltins)
    if (name == b.name) return b.builtin;
  return Builtin::kNone;
}

bool name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '$' || c == '%';
}

// Adds the names in a function's body that are among `wanted`, comments left aside.
void add_mentioned(std::string_view text, const std::unordered_set<std::string_view>& wanted,
                   std::unordered_set<std::string_view>* found) {
  size_t at = 0;
  while (at < text.size()) {
    if (text[at] == '/' && text.substr(at, 2) == "//") {
      at = std::min(text.find('\n', at), text.size());
    } else if (!name_char(text[at])) {
      ++at;
    } else {
      const size_t begin = at;
      while (at < text.size() && name_char(text[at])) ++at;
      const auto it = wanted.find(text.substr(begin, at - begin));
      if (it != wanted.end()) found->insert(*it);
    }
  }
}

uint32_t layout_bytes(const std::vector<Parameter>& parameters) {
  uint32_t end = 0;
  for (const Parameter& p : parameters)
    if (p.space == Space::kParam) end = std::max(end, p.offset + static_cast<uint32_t>(p.bytes));
  return end;
}

}  // namespace

class Linker {
 public:
  Linker(const DeviceModel& device, std::shared_ptr<MemorySpace> memory)
      : device_(device), program_(new LinkedProgram) {
    program_->memory_ = std::move(memory);
  }

  LinkResult run(const std::vector<SourceText>& sources) {
    if (sources.empty()) error(LoadStatus::kInvalidPtx, {}, 0, "No PTX input");
    for (const SourceText& s : sources) parse(s);
    if (ok() && needs_grid_runtime()) parse({"device runtime", std::string(kGridRuntime)});
    if (ok()) collect();
    if (ok()) choose();
    if (ok()) define_functions();
    if (ok()) define_variables();
    if (ok()) define_aliases();
    if (ok()) import();
    if (ok()) initialise();
    if (ok()) parse_bodies();
    LinkResult result;
    result.status = status_;
    result.log = std::move(log_);
    if (ok()) {
      result.program = std::move(program_);
    } else {
      result.log += "ptxas fatal   : Ptx assembly aborted due to errors\n";
    }
    return result;
  }

 private:
  using Symbol = LinkedProgram::Symbol;

  // All declarations of one name in one unit.
  struct Name {
    bool is_function = false;
    bool entry = false;
    Linkage linkage = Linkage::kStatic;  // of the definition, or of the declarations
    size_t declaration = 0;              // the definition, or the first declaration
    bool defined = false;
    bool wins = false;  // defined, and not displaced by another unit's definition
  };
  struct Winner {
    size_t unit;
    const std::string* name;
    Linkage linkage;
  };

  bool ok() const { return status_ == LoadStatus::kOk; }

  void error(LoadStatus status, std::string_view file, uint32_t line, const std::string& message) {
    if (ok()) status_ = status;
    if (++errors_ > kMaxErrors) return;
    log_ += "ptxas ";
    log_ += file.empty() ? "application ptx input" : file;
    if (line != 0) log_ += ", line " + std::to_string(line);
    log_ += "; error   : " + message + "\n";
  }

  bool needs_grid_runtime() const {
    for (const auto& unit : program_->units_) {
      for (const FunctionDeclaration& f : unit->functions) {
        if (!f.defined && f.linkage == Linkage::kExtern &&
            std::find(std::begin(kGridFunctions), std::end(kGridFunctions), f.name) !=
                std::end(kGridFunctions))
          return true;
      }
    }
    return false;
  }

  void parse(const SourceText& source) {
    const std::string file = source.name.empty() ? "application ptx input" : source.name;
    std::unique_ptr<Unit> unit;
    try {
      unit = parse_unit(file, source.ptx);
    } catch (const ParseError& e) {
      return error(LoadStatus::kInvalidPtx, file, e.line, e.message);
    } catch (const std::bad_alloc&) {
      return error(LoadStatus::kOutOfMemory, file, 0, "Out of memory");
    }
    if (unit->version_major * 100 + unit->version_minor > kMaxVersion) {
      return error(LoadStatus::kUnsupportedPtxVersion, file, 0,
                   "Unsupported .version " + std::to_string(unit->version_major) + "." +
                       std::to_string(unit->version_minor));
    }
    const int capability = device_.cc_major * 10 + device_.cc_minor;
    const std::string target = "sm_" + std::to_string(unit->target) + unit->target_suffix;
    if (unit->target > capability) {
      return error(LoadStatus::kInvalidPtx, file, 0,
                   "SM version specified by .target (" + target +
                       ") is higher than the device's (" + std::to_string(device_.cc_major) + "." +
                       std::to_string(device_.cc_minor) + ")");
    }
    if ((unit->target_suffix == "a" && unit->target != capability) ||
        (unit->target_suffix == "f" && unit->target / 10 != device_.cc_major)) {
      return error(LoadStatus::kInvalidPtx, file, 0,
                   ".target " + target + " doesn't run on a device of compute capability " +
                       std::to_string(device_.cc_major) + "." + std::to_string(device_.cc_minor));
    }
    text_bytes_ += unit->text.size();
    program_->units_.push_back(std::move(unit));
  }

  void collect() {
    names_.resize(program_->units_.size());
    order_.resize(program_->units_.size());
    for (size_t u = 0; u < program_->units_.size(); ++u) {
      const Unit& unit = *program_->units_[u];
      auto add = [&](const std::string& text, bool is_function, size_t index, bool entry,
                     Linkage linkage, bool defined, uint32_t line) {
        auto [it, is_new] = names_[u].try_emplace(text);
        Name& name = it->second;
        if (is_new) {
          order_[u].push_back(&it->first);
          name = {is_function, entry, linkage, index, defined, false};
          return;
        }
        if (name.is_function != is_function || (name.defined && defined)) {
          return error(LoadStatus::kInvalidPtx, unit.file, line,
                       std::string("Duplicate definition of ") +
                           (is_function ? "function" : "variable") + " '" + text + "'");
        }
        // The definition's linkage counts, unless only a declaration before it has one.
        if (defined) {
          if (linkage == Linkage::kStatic || linkage == Linkage::kExtern)
            linkage = name.linkage == Linkage::kExtern ? Linkage::kVisible : name.linkage;
          name = {is_function, entry, linkage, index, true, false};
        } else if (name.defined && name.linkage == Linkage::kStatic) {
          name.linkage = linkage == Linkage::kExtern ? Linkage::kVisible : linkage;
        }
      };
      for (size_t i = 0; i < unit.functions.size(); ++i) {
        const FunctionDeclaration& f = unit.functions[i];
        add(f.name, true, i, f.entry, f.linkage, f.defined, f.line);
      }
      for (size_t i = 0; i < unit.variables.size(); ++i) {
        const VariableDeclaration& v = unit.variables[i];
        if (v.unsized && v.linkage != Linkage::kExtern && v.space != Space::kShared)
          error(LoadStatus::kInvalidPtx, unit.file, v.line,
                "Variable '" + v.name + "' has no size");
        add(v.name, false, i, false, v.linkage, v.linkage != Linkage::kExtern, v.line);
      }
    }
  }

  // Which definition of each shared name is the program's.
  void choose() {
    for (size_t u = 0; u < names_.size(); ++u) {
      for (const std::string* text : order_[u]) {
        Name& name = names_[u][*text];
        if (!name.defined) continue;
        if (name.linkage == Linkage::kExtern) name.linkage = Linkage::kVisible;
        if (name.linkage == Linkage::kStatic) {
          name.wins = true;
          continue;
        }
        auto [it, is_new] = winners_.try_emplace(*text, Winner{u, text, name.linkage});
        if (is_new) {
          name.wins = true;
          continue;
        }
        Winner& other = it->second;
        Name& other_name = names_[other.unit][*text];
        if (other_name.is_function != name.is_function) {
          error(LoadStatus::kInvalidPtx, program_->units_[u]->file, 0,
                "'" + *text + "' is a function here and a variable in " +
                    program_->units_[other.unit]->file);
          continue;
        }
        if (name.linkage == Linkage::kVisible && other.linkage == Linkage::kVisible) {
          error(LoadStatus::kInvalidPtx, program_->units_[u]->file, 0,
                "Multiple definition of '" + *text + "', first in " +
                    program_->units_[other.unit]->file);
          continue;
        }
        bool better = name.linkage == Linkage::kVisible;
        if (name.linkage == Linkage::kCommon && other.linkage == Linkage::kCommon) {
          // The largest of the common ones.
          better =
              declared_variable(u, name).bytes > declared_variable(other.unit, other_name).bytes;
        }
        if (better) {
          other_name.wins = false;
          name.wins = true;
          other = {u, text, name.linkage};
        }
      }
    }
  }

  const VariableDeclaration& declared_variable(size_t unit, const Name& name) const {
    return program_->units_[unit]->variables[name.declaration];
  }

  void define_functions() {
    program_->unit_symbols_.resize(names_.size());
    for (size_t u = 0; u < names_.size(); ++u) {
      for (const std::string* text : order_[u]) {
        const Name& name = names_[u][*text];
        if (!name.is_function || !name.wins) continue;
        const FunctionDeclaration& d = program_->units_[u]->functions[name.declaration];
        Function f;
        f.name = d.name;
        f.entry = d.entry;
        f.noreturn = d.noreturn;
        f.parameters = d.parameters;
        f.returns = d.returns;
        f.parameter_bytes = layout_bytes(d.parameters);
        f.return_bytes = layout_bytes(d.returns);
        std::copy(d.required_block, d.required_block + 3, f.required_block);
        std::copy(d.max_block, d.max_block + 3, f.max_block);
        f.max_registers = d.max_registers;
        f.min_blocks = d.min_blocks;
        f.linkage = name.linkage;
        f.unit = static_cast<int>(u);
        f.declaration = name.declaration;
        const Symbol symbol{SymbolKind::kFunction, program_->function_count()};
        if (f.entry) program_->kernels_.push_back(symbol.index);
        program_->functions_.push_back(std::move(f));
        publish(u, *text, name, symbol);
      }
    }
  }

  void define_variables() {
    for (size_t u = 0; u < names_.size(); ++u) {
      for (const std::string* text : order_[u]) {
        const Name& name = names_[u][*text];
        if (name.is_function || !name.wins) continue;
        const VariableDeclaration& d = declared_variable(u, name);
        Variable v{d.name,    d.space,   d.type, name.linkage,       d.bytes, d.alignment,
                   d.unsized, d.managed, 0,      static_cast<int>(u)};
        if (!program_->allocate(&v)) {
          return error(LoadStatus::kOutOfMemory, program_->units_[u]->file, d.line,
                       "Out of memory for variable '" + d.name + "' of " + std::to_string(d.bytes) +
                           " bytes");
        }
        publish(u, *text, name, add_variable(std::move(v)));
        defined_variables_.push_back({u, &d});
      }
    }
    const uint64_t constant_bytes = program_->constant_bytes();
    if (constant_bytes > kMaxConstantBytes) {
      error(LoadStatus::kInvalidPtx, program_->units_[0]->file, 0,
            "Too much constant data (" + std::to_string(constant_bytes) + " bytes, at most " +
                std::to_string(kMaxConstantBytes) + ")");
    }
  }

  Symbol add_variable(Variable v) {
    return {SymbolKind::kVariable, program_->append(std::move(v))};
  }

  void publish(size_t unit, const std::string& text, const Name& name, Symbol symbol) {
    program_->unit_symbols_[unit][text] = symbol;
    if (name.linkage != Linkage::kStatic) program_->exported_[text] = symbol;
  }

  void define_aliases() {
    for (size_t u = 0; u < names_.size(); ++u) {
      for (const AliasDeclaration& alias : program_->units_[u]->aliases) {
        auto& symbols = program_->unit_symbols_[u];
        auto target = symbols.find(alias.target);
        const std::string& file = program_->units_[u]->file;
        if (target == symbols.end() || target->second.kind != SymbolKind::kFunction) {
          error(LoadStatus::kInvalidPtx, file, alias.line,
                "Alias '" + alias.name + "' of '" + alias.target +
                    "', which is not a function of this file");
          continue;
        }
        auto declared = names_[u].find(alias.name);
        if (declared != names_[u].end() && declared->second.defined) {
          error(LoadStatus::kInvalidPtx, file, alias.line,
                "Duplicate definition of function '" + alias.name + "'");
          continue;
        }
        const Symbol symbol = target->second;
        symbols[alias.name] = symbol;
        if (declared != names_[u].end() && declared->second.linkage != Linkage::kStatic)
          program_->exported_.emplace(alias.name, symbol);
      }
    }
  }

  // Names that a unit uses but doesn't define, and definitions that others displaced.
  void import() {
    for (size_t u = 0; u < names_.size(); ++u) {
      for (const std::string* text : order_[u]) {
        const Name& name = names_[u][*text];
        auto& symbols = program_->unit_symbols_[u];
        if (name.wins || symbols.contains(*text)) continue;
        auto exported = program_->exported_.find(*text);
        if (exported != program_->exported_.end()) {
          if ((exported->second.kind == SymbolKind::kFunction) != name.is_function) {
            error(LoadStatus::kInvalidPtx, program_->units_[u]->file, 0,
                  "'" + *text + "' is declared as a " +
                      (name.is_function ? "function but defined as a variable"
                                        : "variable but defined as a function"));
            continue;
          }
          symbols[*text] = exported->second;
          continue;
        }
        if (name.is_function) {
          import_function(u, *text, name);
        } else {
          import_variable(u, *text, name);
        }
      }
    }
  }

  void import_function(size_t u, const std::string& text, const Name& name) {
    const Unit& unit = *program_->units_[u];
    const FunctionDeclaration& d = unit.functions[name.declaration];
    const Builtin builtin = name.entry ? Builtin::kNone : builtin_named(text);
    if (builtin == Builtin::kNone) {
      if (used(u, text))
        error(LoadStatus::kUnresolvedSymbol, unit.file, d.line,
              "Unresolved extern function '" + text + "'");
      return;
    }
    Function f;
    f.name = text;
    f.builtin = builtin;
    f.noreturn = builtin == Builtin::kAssertFail;
    f.parameters = d.parameters;
    f.returns = d.returns;
    f.parameter_bytes = layout_bytes(d.parameters);
    f.return_bytes = layout_bytes(d.returns);
    f.linkage = Linkage::kExtern;
    const Symbol symbol{SymbolKind::kFunction, program_->function_count()};
    program_->functions_.push_back(std::move(f));
    program_->unit_symbols_[u][text] = symbol;
    program_->exported_[text] = symbol;
  }

  void import_variable(size_t u, const std::string& text, const Name& name) {
    const Unit& unit = *program_->units_[u];
    const VariableDeclaration& d = declared_variable(u, name);
    if (d.space == Space::kShared && d.unsized) {  // dynamic shared memory
      Variable v{d.name, d.space, d.type, Linkage::kExtern,   0, d.alignment,
                 true,   false,   0,      static_cast<int>(u)};
      program_->unit_symbols_[u][text] = add_variable(std::move(v));
      return;
    }
    if (used(u, text))
      error(LoadStatus::kUnresolvedSymbol, unit.file, d.line,
            "Unresolved extern variable '" + text + "'");
  }

  // Whether a unit names something that it declares and doesn't define. The text is searched once,
  // for all such names.
  bool used(size_t u, const std::string& text) {
    used_.resize(names_.size());
    if (!used_[u]) {
      used_[u].emplace();
      const Unit& unit = *program_->units_[u];
      std::unordered_set<std::string_view> wanted;
      for (const std::string* name : order_[u])
        if (!names_[u][*name].defined) wanted.insert(*name);
      for (const FunctionDeclaration& f : unit.functions) {
        if (f.defined)
          add_mentioned(std::string_view(unit.text).substr(f.body_begin, f.body_end - f.body_begin),
                        wanted, &*used_[u]);
      }
      for (const VariableDeclaration& v : unit.variables)
        for (const SymbolInitialiser& s : v.symbols)
          if (auto it = wanted.find(s.symbol); it != wanted.end()) used_[u]->insert(*it);
    }
    return used_[u]->contains(text);
  }

  void initialise() {
    for (size_t i = 0; i < defined_variables_.size(); ++i) {
      auto [u, declaration] = defined_variables_[i];
      const std::string message = program_->initialise(program_->variables_[i], *declaration);
      if (!message.empty())
        error(LoadStatus::kInvalidPtx, program_->units_[u]->file, declaration->line, message);
    }
    for (uint32_t k : program_->kernels_)
      program_->kernels_by_name_.try_emplace(program_->functions_[k].name, k);
    // From here on bodies may be parsed.
    while (program_->bodies_.size() < program_->functions_.size()) program_->bodies_.emplace_back();
  }

  void parse_bodies() {
    if (program_->memory_ && text_bytes_ > kEagerTextBytes) return;
    for (uint32_t f = 0; f < program_->function_count(); ++f) {
      const Function& function = program_->functions_[f];
      if (function.unit < 0) continue;
      const auto& lazy = program_->parsed(f);
      if (!lazy.body && !lazy.uncertain)
        error(LoadStatus::kInvalidPtx, program_->units_[function.unit]->file, lazy.error_line,
              lazy.error);
      // Of a large text that is only checked the bodies aren't kept, which take far more memory.
      if (text_bytes_ > kEagerTextBytes) program_->bodies_[f].body.reset();
    }
  }

  const DeviceModel& device_;
  std::shared_ptr<LinkedProgram> program_;
  LoadStatus status_ = LoadStatus::kOk;
  std::string log_;
  size_t errors_ = 0;
  size_t text_bytes_ = 0;
  std::vector<std::unordered_map<std::string, Name>> names_;  // by unit
  std::vector<std::vector<const std::string*>> order_;        // names in the order of the text
  std::vector<std::optional<std::unordered_set<std::string_view>>> used_;  // by unit
  std::unordered_map<std::string, Winner> winners_;
  std::vector<std::pair<size_t, const VariableDeclaration*>> defined_variables_;
};

LinkResult LinkedProgram::link(const std::vector<SourceText>& sources, const DeviceModel& device,
                               std::shared_ptr<MemorySpace> memory) {
  return Linker(device, std::move(memory)).run(sources);
}

}  // namespace gpupool::simgpu::ptx
