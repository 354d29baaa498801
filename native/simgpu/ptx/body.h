// Parses one function's body, with every name resolved against its scopes, its parameters and the
// program's symbols.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "simgpu/ptx/lexer.h"
#include "simgpu/ptx/program.h"

namespace gpupool::simgpu::ptx {

constexpr size_t kMaxOperands = 4096;   // of one instruction or group
constexpr int kLastKnownVersion = 900;  // PTX 9.0: every opcode up to here is in opcodes.inc

class BodyParser {
 public:
  BodyParser(LinkedProgram& program, uint32_t function);

  // Throws ParseError.
  std::unique_ptr<FunctionBody> parse();

  // After parse(), also after it threw: the text has something of a later PTX version in it, so an
  // error may be the parser's own.
  bool uncertain() const { return uncertain_; }

 private:
  enum class BindingKind : uint8_t { kRegister, kNumbered, kLocal, kParameter, kReturn, kVariable };
  struct Binding {
    BindingKind kind;
    uint8_t vector_width = 1;
    uint32_t index = 0;  // first register, local, parameter ...
    uint32_t count = 1;  // kNumbered
    uint32_t scope = 0;  // depth
    uint32_t shadowed = kNoIndex;
  };
  enum class LabelKind : uint8_t { kInstruction, kBranchTable, kCallTable, kPrototype };
  struct Label {
    LabelKind kind;
    uint32_t index;
  };
  struct LabelUse {
    std::string_view name;
    uint32_t line;
    uint32_t operand;           // index into operands, or
    uint32_t table = kNoIndex;  // a branch table and
    uint32_t entry = 0;         // its entry
  };
  struct Undo {
    std::string_view name;
    bool numbered;
    uint32_t binding;
  };
  struct Scope {
    size_t undo_begin = 0;
    std::vector<std::pair<std::string_view, Label>> labels;
    std::unordered_set<std::string_view> label_names;
    size_t uses_begin = 0;
    uint32_t param_base = 0;  // of the enclosing scope's call-sequence parameters
  };
  using Names = std::unordered_map<std::string_view, uint32_t>;

  void open_scope();
  void close_scope();
  void bind(std::string_view name, Binding binding, bool numbered);
  const Binding* find(std::string_view name, uint32_t* register_index) const;

  void statement();
  void directive();
  void declare_registers();
  void declare_variables(Space space);
  void label(std::string_view name);
  void branch_targets(std::string_view name);
  void call_targets(std::string_view name);
  void instruction();
  void call(Instruction& i);
  void finish(Instruction& i);

  Operand operand(int depth);
  Operand name_operand(int depth);
  Operand call_group(char open, char close);
  Operand bracket(int depth);
  Operand group(OperandKind kind, const std::vector<Operand>& elements);
  Operand constant();
  Operand symbol(std::string_view name, uint32_t line);
  Operand register_operand(uint32_t index);
  Operand label_operand();
  void note_symbol(const Operand& o);

  LinkedProgram& program_;
  const Function& function_;
  uint32_t function_index_;
  const Unit& unit_;
  const FunctionDeclaration& declaration_;
  Lexer lexer_;
  std::unique_ptr<FunctionBody> body_;
  std::vector<Binding> bindings_;
  Names names_, numbered_names_;
  std::vector<Undo> undo_;
  std::vector<Scope> scopes_;
  std::vector<LabelUse> uses_;
  std::vector<Operand> scratch_;
  std::vector<std::pair<size_t, LabelUse>> scratch_uses_;
  std::unordered_set<uint32_t> noted_callees_, noted_shared_, noted_taken_;
  uint32_t param_top_ = 0;
  bool uncertain_ = false;
};

}  // namespace gpupool::simgpu::ptx
