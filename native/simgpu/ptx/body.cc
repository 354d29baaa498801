#include "simgpu/ptx/body.h"

#include <algorithm>
#include <limits>

#include "simgpu/ptx/constants.h"
#include "simgpu/ptx/declarations.h"
#include "simgpu/ptx/types.h"

namespace gpupool::simgpu::ptx {
namespace {

constexpr size_t kMaxScopes = 256;
constexpr uint32_t kMaxRegisters = 1u << 20;
constexpr size_t kMaxLocals = 1u << 20;
// Of a function. Each takes, in the end, many times the memory of its text.
constexpr size_t kMaxInstructions = 1u << 22;
constexpr size_t kMaxAllOperands = 1u << 24;

uint32_t align_up(uint64_t value, uint64_t alignment) {
  return static_cast<uint32_t>((value + alignment - 1) & ~(alignment - 1));
}

}  // namespace

BodyParser::BodyParser(LinkedProgram& program, uint32_t function)
    : program_(program),
      function_(program.function(function)),
      function_index_(function),
      unit_(program.unit(function_.unit)),
      declaration_(unit_.functions[function_.declaration]),
      lexer_(unit_.text, declaration_.body_begin, declaration_.body_end, declaration_.body_line),
      body_(std::make_unique<FunctionBody>()) {}

std::unique_ptr<FunctionBody> BodyParser::parse() {
  body_->text = unit_.text;
  const size_t bytes = declaration_.body_end - declaration_.body_begin;
  body_->instructions.reserve(bytes / 40);
  body_->operands.reserve(bytes / 14);
  scopes_.emplace_back();
  auto bind_parameters = [&](const std::vector<Parameter>& list, BindingKind kind,
                             std::vector<uint32_t>& registers) {
    for (uint32_t i = 0; i < list.size(); ++i) {
      registers.push_back(kNoIndex);
      if (list[i].name == "_") continue;
      if (list[i].space == Space::kReg) {
        const uint32_t first = static_cast<uint32_t>(body_->registers.size());
        body_->registers.push_back(list[i].type);
        body_->register_ranges.push_back({list[i].name, first, 1, false});
        registers.back() = first;
        bind(list[i].name, {BindingKind::kRegister, 1, first}, false);
      } else {
        bind(list[i].name, {kind, 1, i}, false);
      }
    }
  };
  bind_parameters(declaration_.parameters, BindingKind::kParameter, body_->parameter_registers);
  bind_parameters(declaration_.returns, BindingKind::kReturn, body_->return_registers);
  if (!lexer_.token().is('{')) lexer_.fail_here();
  while (lexer_.token().kind != TokenKind::kEnd) statement();
  if (scopes_.size() != 1) lexer_.fail_here();
  close_scope();
  if (!uses_.empty())
    throw ParseError{uses_[0].line, "Label '" + printable(uses_[0].name) + "' is not defined"};
  body_->instructions.shrink_to_fit();
  body_->operands.shrink_to_fit();
  return std::move(body_);
}

// ---------------------------------------------------------------- scopes

void BodyParser::open_scope() {
  if (scopes_.size() >= kMaxScopes) lexer_.fail("Blocks are nested too deeply");
  Scope& scope = scopes_.emplace_back();
  scope.undo_begin = undo_.size();
  scope.uses_begin = uses_.size();
  scope.param_base = param_top_;
}

void BodyParser::close_scope() {
  Scope& scope = scopes_.back();
  // Uses of this scope's labels are settled; others may belong to a scope around it.
  if (uses_.size() > scope.uses_begin) {
    std::unordered_map<std::string_view, Label> labels(scope.labels.begin(), scope.labels.end());
    size_t kept = scope.uses_begin;
    for (size_t u = scope.uses_begin; u < uses_.size(); ++u) {
      const LabelUse use = uses_[u];
      auto it = labels.find(use.name);
      if (it == labels.end()) {
        uses_[kept++] = use;
        continue;
      }
      const Label& label = it->second;
      if (use.table != kNoIndex) {
        if (label.kind != LabelKind::kInstruction)
          throw ParseError{use.line, "'" + printable(use.name) + "' is not a label"};
        body_->branch_tables[use.table][use.entry] = label.index;
        continue;
      }
      Operand& o = body_->operands[use.operand];
      o.index = label.index;
      switch (label.kind) {
        case LabelKind::kInstruction:
          o.kind = OperandKind::kLabel;
          break;
        case LabelKind::kPrototype:
          o.kind = OperandKind::kPrototype;
          break;
        case LabelKind::kBranchTable:
          o.kind = OperandKind::kTable;
          break;
        case LabelKind::kCallTable:
          o.kind = OperandKind::kTable;
          break;
      }
    }
    uses_.resize(kept);
  }
  for (size_t u = undo_.size(); u > scope.undo_begin; --u) {
    const Undo& undo = undo_[u - 1];
    Names& names = undo.numbered ? numbered_names_ : names_;
    const uint32_t shadowed = bindings_[undo.binding].shadowed;
    if (shadowed == kNoIndex) {
      names.erase(undo.name);
    } else {
      names[undo.name] = shadowed;
    }
  }
  undo_.resize(scope.undo_begin);
  param_top_ = scope.param_base;
  scopes_.pop_back();
}

void BodyParser::bind(std::string_view name, Binding binding, bool numbered) {
  binding.scope = static_cast<uint32_t>(scopes_.size());
  const uint32_t index = static_cast<uint32_t>(bindings_.size());
  Names& names = numbered ? numbered_names_ : names_;
  auto [it, is_new] = names.try_emplace(name, index);
  if (!is_new) {
    if (bindings_[it->second].scope == binding.scope)
      lexer_.fail("Duplicate definition of variable '" + printable(name) + "'");
    binding.shadowed = it->second;
    it->second = index;
  }
  bindings_.push_back(binding);
  undo_.push_back({name, numbered, index});
}

const BodyParser::Binding* BodyParser::find(std::string_view name, uint32_t* register_index) const {
  const Binding* found = nullptr;
  const char last = name.back();
  if (last >= '0' && last <= '9') {
    size_t digits = name.size();
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
    // "%r10" is register 10 of %r<>, or 0 of %r1<>: the longest run of digits comes first.
    for (size_t cut = digits; cut < name.size() && !found; ++cut) {
      if (name[cut] == '0' && cut + 1 < name.size()) continue;
      if (name.size() - cut > 7) continue;
      auto it = numbered_names_.find(name.substr(0, cut));
      if (it == numbered_names_.end()) continue;
      uint32_t number = 0;
      for (size_t i = cut; i < name.size(); ++i) number = number * 10 + (name[i] - '0');
      const Binding* b = &bindings_[it->second];
      while (number >= b->count && b->shadowed != kNoIndex) b = &bindings_[b->shadowed];
      if (number >= b->count) continue;
      found = b;
      *register_index = b->index + number * b->vector_width;
    }
  }
  auto it = names_.find(name);
  if (it != names_.end()) {
    const Binding* exact = &bindings_[it->second];
    if (!found || exact->scope >= found->scope) {
      found = exact;
      *register_index = exact->index;
    }
  }
  return found;
}

// ---------------------------------------------------------------- statements

void BodyParser::statement() {
  const Token& t = lexer_.token();
  switch (t.kind) {
    case TokenKind::kDot:
      return directive();
    case TokenKind::kWord:
      if (lexer_.peek().is(':')) {
        const std::string_view name = t.text;
        lexer_.advance();
        lexer_.advance();
        return label(name);
      }
      return instruction();
    case TokenKind::kPunct:
      if (t.is('{')) {
        // The function's own braces share the scope of its parameters.
        if (t.begin != declaration_.body_begin) open_scope();
        lexer_.advance();
        return;
      }
      if (t.is('}')) {
        if (scopes_.size() > 1) {
          close_scope();
        } else if (t.begin + 1 != declaration_.body_end) {
          lexer_.fail_here();
        }
        lexer_.advance();
        return;
      }
      if (t.is(';')) return lexer_.advance();
      if (t.is('@')) return instruction();
      break;
    default:
      break;
  }
  lexer_.fail_here();
}

void BodyParser::directive() {
  const Token& t = lexer_.token();
  if (t.text == "reg") return declare_registers();
  const Space space = space_named(t.text);
  if (space != Space::kNone) {
    lexer_.advance();
    return declare_variables(space);
  }
  if (t.text == "loc" || t.text == "file") return lexer_.skip_line();
  if (t.text == "pragma") return lexer_.skip_statement();
  if (t.text == "section") {
    while (!lexer_.token().is('{') && lexer_.token().kind != TokenKind::kEnd) lexer_.advance();
    if (lexer_.token().kind == TokenKind::kEnd) lexer_.fail_here();
    size_t begin, end;
    lexer_.skip_braces(&begin, &end);
    return;
  }
  // A directive of a later version: on its line, perhaps with a semicolon.
  uncertain_ = true;
  const uint32_t line = t.line;
  while (t.kind != TokenKind::kEnd && t.line == line && !t.is('}')) {
    const bool done = t.is(';');
    lexer_.advance();
    if (done) return;
  }
}

void BodyParser::declare_registers() {
  lexer_.advance();
  const Token& t = lexer_.token();
  uint8_t width = 1;
  Type type = Type::kNone;
  while (t.kind == TokenKind::kDot) {
    const std::string_view word = t.text;
    if (word == "v2" || word == "v4" || word == "v8") {
      width = static_cast<uint8_t>(word[1] - '0');
    } else if (word == "align") {
      lexer_.advance();
      parse_constant(lexer_);
      continue;
    } else if (type = type_named(word); type == Type::kNone) {
      lexer_.fail_here();
    }
    lexer_.advance();
  }
  if (type == Type::kNone) lexer_.fail_here();
  do {
    const std::string_view name = lexer_.expect_word("a register's name");
    uint32_t count = 1;
    bool numbered = false;
    if (lexer_.accept('<')) {
      if (!lexer_.token().is('>')) {
        // Not parse_constant(): it would take '>' for a comparison.
        const Token n = lexer_.token();
        if (n.kind != TokenKind::kInteger || n.bits > kMaxRegisters)
          lexer_.fail("Number of registers out of range");
        lexer_.advance();
        count = static_cast<uint32_t>(n.bits);
      }
      lexer_.expect('>');
      numbered = true;
    }
    const uint32_t first = static_cast<uint32_t>(body_->registers.size());
    if (uint64_t{first} + uint64_t{count} * width > kMaxRegisters)
      lexer_.fail("Function has too many registers");
    body_->registers.resize(first + count * width, type);
    body_->register_ranges.push_back({name, first, count * width, numbered});
    bind(name, {numbered ? BindingKind::kNumbered : BindingKind::kRegister, width, first, count},
         numbered);
  } while (lexer_.accept(','));
  lexer_.expect(';');
}

void BodyParser::declare_variables(Space space) {
  std::vector<VariableDeclaration> declared;
  size_t from = lexer_.token().begin;
  parse_variables(lexer_, space, Linkage::kStatic, &declared);
  for (VariableDeclaration& v : declared) {
    // The binding needs a name that lives as long as the text.
    const size_t at = unit_.text.find(v.name, from);
    from = at + v.name.size();
    const std::string_view name = std::string_view(unit_.text).substr(at, v.name.size());
    if (space == Space::kLocal || space == Space::kParam) {
      if (body_->locals.size() >= kMaxLocals) lexer_.fail("Function has too many variables");
      LocalVariable local{std::move(v.name), space, v.type, v.bytes, v.alignment, 0};
      if (local.bytes > 0x7fffffff) lexer_.fail("Variable '" + local.name + "' is too large");
      uint32_t& alignment =
          space == Space::kLocal ? body_->local_alignment : body_->param_alignment;
      uint32_t& top = space == Space::kLocal ? body_->local_bytes : param_top_;
      alignment = std::max(alignment, local.alignment);
      const uint64_t offset = align_up(top, local.alignment);
      if (offset + local.bytes > 0x7fffffff) lexer_.fail("Function's variables are too large");
      local.offset = static_cast<uint32_t>(offset);
      top = static_cast<uint32_t>(offset + local.bytes);
      if (space == Space::kParam) body_->param_bytes = std::max(body_->param_bytes, top);
      bind(name, {BindingKind::kLocal, 1, static_cast<uint32_t>(body_->locals.size())}, false);
      body_->locals.push_back(std::move(local));
      continue;
    }
    std::string error;
    const uint32_t index = program_.add_function_scope_variable(v, function_.unit, &error);
    if (index == kNoIndex) lexer_.fail(error);
    bind(name, {BindingKind::kVariable, 1, index}, false);
  }
}

void BodyParser::label(std::string_view name) {
  Scope& scope = scopes_.back();
  if (scope.label_names.size() >= kMaxInstructions) lexer_.fail("Function has too many labels");
  if (!scope.label_names.insert(name).second)
    lexer_.fail("Duplicate definition of label '" + printable(name) + "'");
  const Token& t = lexer_.token();
  Label label{LabelKind::kInstruction, static_cast<uint32_t>(body_->instructions.size())};
  if (t.dot("branchtargets")) {
    label = {LabelKind::kBranchTable, static_cast<uint32_t>(body_->branch_tables.size())};
    branch_targets(name);
  } else if (t.dot("calltargets")) {
    label = {LabelKind::kCallTable, static_cast<uint32_t>(body_->call_tables.size())};
    call_targets(name);
  } else if (t.dot("callprototype")) {
    label = {LabelKind::kPrototype, static_cast<uint32_t>(body_->prototypes.size())};
    lexer_.advance();
    body_->prototypes.push_back(parse_prototype(lexer_));
  }
  scope.labels.emplace_back(name, label);
}

void BodyParser::branch_targets(std::string_view) {
  lexer_.advance();
  const uint32_t table = static_cast<uint32_t>(body_->branch_tables.size());
  body_->branch_tables.emplace_back();
  do {
    const uint32_t line = lexer_.token().line;
    std::string_view name = lexer_.expect_word("a label");
    uint32_t count = 1;
    bool numbered = false;
    if (lexer_.accept('<')) {  // L<4>: L0, L1, L2, L3
      const Token n = lexer_.token();
      if (n.kind != TokenKind::kInteger || n.bits > 65536) lexer_.fail_here();
      lexer_.advance();
      lexer_.expect('>');
      count = static_cast<uint32_t>(n.bits);
      numbered = true;
    }
    for (uint32_t i = 0; i < count; ++i) {
      std::string_view target = name;
      if (numbered) {
        body_->owned_names.push_back(std::string(name) + std::to_string(i));
        target = body_->owned_names.back();
      }
      uses_.push_back(
          {target, line, 0, table, static_cast<uint32_t>(body_->branch_tables[table].size())});
      body_->branch_tables[table].push_back(kNoIndex);
    }
  } while (lexer_.accept(','));
  lexer_.expect(';');
}

void BodyParser::call_targets(std::string_view) {
  lexer_.advance();
  std::vector<uint32_t> table;
  do {
    const uint32_t line = lexer_.token().line;
    const Operand o = symbol(lexer_.expect_word("a function's name"), line);
    if (o.symbol != SymbolKind::kFunction) throw ParseError{line, "Not a function in .calltargets"};
    table.push_back(o.index);
  } while (lexer_.accept(','));
  lexer_.expect(';');
  body_->call_tables.push_back(std::move(table));
}

void BodyParser::instruction() {
  Instruction i;
  scratch_.clear();
  scratch_uses_.clear();
  if (lexer_.accept('@')) {
    i.guard_negated = lexer_.accept('!');
    const uint32_t line = lexer_.token().line;
    const std::string_view name = lexer_.expect_word("a predicate");
    const Binding* b = find(name, &i.guard);
    if (!b || (b->kind != BindingKind::kRegister && b->kind != BindingKind::kNumbered) ||
        body_->registers[i.guard] != Type::kPred)
      throw ParseError{line, "'" + printable(name) + "' is not a predicate register"};
  }
  const Token& t = lexer_.token();
  i.line = t.line;
  i.text_begin = t.begin;
  size_t text_end = t.begin + t.text.size();
  const std::string_view opcode = lexer_.expect_word("an instruction");
  i.op = op_of(opcode);
  if (i.op == Op::kUnknown) {
    // The list of opcodes is complete up to kLastKnownVersion.
    if (unit_.version_major * 100 + unit_.version_minor <= kLastKnownVersion)
      throw ParseError{i.line, "Not a name of any known instruction: '" + printable(opcode) + "'"};
    uncertain_ = true;
  }
  while (t.kind == TokenKind::kDot) {
    if (i.modifier_count == kMaxModifiers) lexer_.fail("Instruction has too many modifiers");
    const Mod mod = mod_of(t.text);
    uncertain_ |= mod == Mod::kUnknown;
    i.modifiers[i.modifier_count++] = mod;
    text_end = t.begin + 1 + t.text.size();
    lexer_.advance();
  }
  i.text_length = static_cast<uint16_t>(std::min<size_t>(text_end - i.text_begin, 0xffff));
  if (i.op == Op::kCall) {
    call(i);
  } else if (i.op == Op::kBra) {
    scratch_.push_back(label_operand());
  } else if (!t.is(';')) {
    do {
      scratch_.push_back(i.op == Op::kBrx && scratch_.size() == 1 ? label_operand() : operand(0));
      if (scratch_.size() > kMaxOperands) lexer_.fail("Instruction has too many operands");
    } while (lexer_.accept(','));
  }
  lexer_.expect(';');
  finish(i);
}

void BodyParser::finish(Instruction& i) {
  if (scratch_.size() > 255) lexer_.fail("Instruction has too many operands");
  if (body_->instructions.size() >= kMaxInstructions || body_->operands.size() >= kMaxAllOperands)
    lexer_.fail("Function is too long");
  for (size_t k = 0; k < scratch_.size(); ++k) {
    const Operand& o = scratch_[k];
    if (o.symbol != SymbolKind::kFunction || (i.op == Op::kCall && k == 1)) continue;
    if (noted_taken_.insert(o.index).second) body_->address_taken.push_back(o.index);
  }
  i.first_operand = static_cast<uint32_t>(body_->operands.size());
  i.operand_count = static_cast<uint8_t>(scratch_.size());
  body_->operands.insert(body_->operands.end(), scratch_.begin(), scratch_.end());
  for (auto& [position, use] : scratch_uses_) {
    use.operand = i.first_operand + static_cast<uint32_t>(position);
    uses_.push_back(use);
  }
  body_->instructions.push_back(i);
}

// call (results), target, (arguments), prototype-or-targets;
void BodyParser::call(Instruction& i) {
  scratch_.resize(4);
  scratch_[0].kind = scratch_[2].kind = OperandKind::kList;
  if (lexer_.token().is('(')) {
    scratch_[0] = call_group('(', ')');
    lexer_.expect(',');
  }
  scratch_[1] = operand(0);
  const Operand& target = scratch_[1];
  const bool direct = target.kind == OperandKind::kSymbol && target.symbol == SymbolKind::kFunction;
  if (!direct && target.kind != OperandKind::kRegister) {
    throw ParseError{i.line, "Target of call is neither a function nor a register"};
  }
  if (!direct) body_->calls_indirectly = true;
  if (!lexer_.accept(',')) return;
  if (lexer_.token().is('(')) {
    scratch_[2] = call_group('(', ')');
    if (!lexer_.accept(',')) return;
  }
  const uint32_t line = lexer_.token().line;
  scratch_uses_.push_back({3, {lexer_.expect_word("a prototype"), line, 0}});
}

Operand BodyParser::call_group(char open, char close) {
  lexer_.expect(open);
  std::vector<Operand> elements;
  while (!lexer_.token().is(close)) {
    elements.push_back(operand(1));
    if (elements.size() > kMaxOperands) lexer_.fail("Call has too many arguments");
    if (!lexer_.accept(',')) break;
  }
  lexer_.expect(close);
  return group(OperandKind::kList, elements);
}

}  // namespace gpupool::simgpu::ptx
