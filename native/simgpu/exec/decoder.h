// The decoder: from parsed PTX to instructions of the machine. Whatever it doesn't know in full —
// opcode, modifier, type, operand — makes it refuse the function, with the instruction's text.
#pragma once

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "simgpu/exec/code.h"
#include "simgpu/exec/fast_set.h"
#include "simgpu/exec/handler_set.h"
#include "simgpu/ptx/program.h"

namespace gpupool::simgpu::exec {

struct Refused {
  std::string why;
};

// ---- types (decode_arithmetic.cc, decode_compare.cc) ----
inline bool is_half(ptx::Type t) {
  return t == ptx::Type::kF16 || t == ptx::Type::kBf16 || t == ptx::Type::kF16x2 ||
         t == ptx::Type::kBf16x2;
}
// As half.cc reads them.
inline int64_t half_flags(const FloatMode& m, bool relu = false) {
  return m.ftz | m.sat << 1 | m.nan << 2 | m.xorsign << 3 | relu << 4;
}
// Bytes of an element of a register's row.
inline uint32_t width(ptx::Type t) { return ptx::bytes_of(t) > 2 ? ptx::bytes_of(t) : 2; }

// The modifiers of an instruction; each must be taken by somebody.
class Modifiers {
 public:
  explicit Modifiers(std::span<const ptx::Mod> mods) : mods_(mods) {}
  bool take(ptx::Mod mod);
  // The first of `choices` that is there, else kUnknown.
  ptx::Mod take_any(std::initializer_list<ptx::Mod> choices);
  ptx::Type take_type();     // the next type in order; kNone: no more
  ptx::Space take_space();   // the next state space; kNone: generic
  const char* left() const;  // text of one that nobody took; nullptr: all taken

 private:
  std::span<const ptx::Mod> mods_;
  uint32_t taken_ = 0;
};

class Decoder {
 public:
  Decoder(KernelCode& kernel, uint32_t function, const ptx::FunctionBody& body);
  std::unique_ptr<Code> decode();  // throws Refused

 private:
  struct Row {
    uint8_t width = 4;
    uint32_t offset = 0;
  };
  struct Address {
    Access access = Access::kGeneric;
    uint32_t row = 0;
    int64_t offset = 0;
  };

  struct Comparison {
    ptx::Mod compare = ptx::Mod::kUnknown;
    ptx::Op boolean = ptx::Op::kMov;  // kMov: not combined
    uint32_t third = 0;               // the predicate it is combined with
    ptx::Type type = ptx::Type::kNone;
    bool ftz = false;
  };

  [[noreturn]] void refuse(const std::string& what) const;

  // ---- rows (rows.cc) ----
  uint32_t add_row(uint32_t width);
  uint32_t temp(uint32_t width);  // until the end of this PTX instruction
  uint32_t constant(uint32_t width, uint64_t bits);
  uint32_t special(ptx::SpecialRegister special, uint32_t component, uint32_t width);
  uint32_t frame_base();  // 64 bits: the frame's place in local memory
  uint32_t register_width(uint32_t reg) const;
  uint32_t use(uint32_t reg);
  uint32_t define(uint32_t reg);
  void analyse();  // basic blocks and liveness
  void list_events();
  void place_rows();  // offsets for all rows
  // Nobody reads the register's value after PTX instruction k.
  bool dead_after(uint32_t reg, uint32_t k) const;
  uint32_t width_of_row(uint32_t row) const { return rows_[row].width; }

  // ---- operands ----
  const ptx::Operand& op(size_t k) const;
  void count(size_t least, size_t most) const;
  uint32_t source(const ptx::Operand& o, ptx::Type type);
  uint32_t source_width(const ptx::Operand& o, uint32_t width, ptx::Type type);
  uint32_t predicate(const ptx::Operand& o);
  uint32_t target(const ptx::Operand& o, uint32_t width);
  uint32_t target_predicate(const ptx::Operand& o);
  uint64_t literal(const ptx::Operand& o, ptx::Type type, uint32_t width) const;
  uint64_t symbol_address(const ptx::Operand& o, bool generic, bool* in_frame, ptx::Space* space);
  Address address(const ptx::Operand& o, ptx::Space space);
  uint32_t widened(uint32_t row);  // a 32-bit address as 64 bits

  // ---- emission ----
  Instruction& emit(Handler handler, uint32_t d = 0, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0,
                    uint32_t e = 0);
  Instruction& emit_control(Handler handler, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0);
  void branch_around();  // a guarded control instruction: skip it where the guard fails
  void finish_modifiers(const Modifiers& m) const;
  void needs(int capability) const;  // of the .target, as 80

  // ---- faster forms (fuse.cc) ----
  void use_patterns();  // for addresses of loads and stores
  void find_chains();   // of (load, load, fma)
  void finish_chains();
  void find_straight();   // arithmetic and branches that run in one loop
  void find_conflicts();  // which waiting lanes mind that a row is written whole
  // Registers that are never alive where lanes may wait.
  std::vector<bool> block_local_registers() const;
  std::vector<bool> nan_bits_seen() const;
  void note_memory(Access access, ptx::Type type, uint32_t width, bool store);

  // ---- strict mode (strict.h); nothing without it ----
  void check_access(const Address& a, uint64_t bytes, bool reads, bool writes);
  void check_members(uint32_t members);

  // ---- groups of opcodes ----
  void one();
  void arithmetic(Modifiers& m);
  void integer_arithmetic(Modifiers& m, ptx::Type type, ptx::Mod mode, bool sat);
  void carry(Modifiers& m);
  void divide(Modifiers& m);
  void math(Modifiers& m);
  void min_max(Modifiers& m);
  void neg_abs(Modifiers& m);
  void logic(Modifiers& m);
  void shift(Modifiers& m);
  void bit_field(Modifiers& m);
  void three_words(Modifiers& m);  // shf prmt lop3 dp4a dp2a sad mul24 mad24 fns
  void video(Modifiers& m);
  uint32_t video_source(const ptx::Operand& o, bool may_select, bool may_negate);
  std::vector<uint8_t> selected(const ptx::Operand& o, char letter, uint32_t most,
                                uint32_t limit) const;
  void stack(Modifiers& m);  // alloca stacksave stackrestore
  void start_stack();
  void setp(Modifiers& m);
  void set(Modifiers& m);
  Comparison take_comparison(Modifiers& m, ptx::Type result);
  uint32_t compared(const Comparison& c, ptx::Type type, uint32_t a, uint32_t b);
  uint32_t combined(const Comparison& c, uint32_t row);
  void select(Modifiers& m);
  void testp(Modifiers& m);
  void copysign(Modifiers& m);
  void mov(Modifiers& m);
  void move_parts(const ptx::Operand& d, const ptx::Operand& s, ptx::Type type);
  void cvt(Modifiers& m);
  void cvt_packed(ptx::Type to, ptx::Type from, ptx::Mod rounding, bool relu, bool satfinite);
  void cvt_pack(Modifiers& m);
  uint32_t limited(uint32_t row, ptx::Type type, bool relu, bool satfinite);
  void cvta(Modifiers& m);
  void isspacep(Modifiers& m);
  void load(Modifiers& m);
  void store(Modifiers& m);
  void cache_modifiers(Modifiers& m, bool* polls, bool load);
  void atom(Modifiers& m, bool result);
  void cp_async(Modifiers& m);
  void copies_arrive(Modifiers& m);
  void mbarrier(Modifiers& m);
  void mbarrier_at(const ptx::Operand& o, ptx::Space space, Handler handler, uint32_t d, uint32_t b,
                   int32_t flags);
  void prefetch(Modifiers& m);
  void bra(Modifiers& m);
  void brx(Modifiers& m);
  void call(Modifiers& m);
  void ret(Modifiers& m);
  void barrier(Modifiers& m);
  void warp(Modifiers& m);
  void fence(Modifiers& m);
  void nanosleep(Modifiers& m);
  void prologue();
  uint32_t frame_place(const ptx::Operand& o, uint32_t* bytes);  // of a parameter in the frame
  uint32_t anonymous_slot(uint32_t bytes);

  KernelCode& kernel_;
  ptx::LinkedProgram& program_;
  const ptx::Function& function_;
  const ptx::FunctionBody& body_;
  const HandlerSet& set_;
  std::unique_ptr<Code> code_;
  ParameterPlaces places_;
  uint32_t local_place_ = 0, param_place_ = 0, frame_end_ = 0;
  uint16_t next_slot_ = 0;

  const ptx::Instruction* current_ = nullptr;
  uint32_t index_ = 0;
  bool unguarded_ = false;  // a branch around has dealt with the guard

  std::vector<Row> rows_;
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> constants_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> specials_;
  std::vector<uint32_t> temps_used_;
  std::map<uint32_t, std::vector<uint32_t>> temps_free_;
  uint32_t frame_base_ = 0, carry_ = 0;
  uint32_t stack_ = 0;          // row of the stack's end, where the function moves or asks for it
  uint32_t frame_pattern_ = 0;  // row of the pattern of frame_base_
  struct Liveness {
    uint32_t n = 0;
    std::vector<bool> leader;
    std::vector<uint32_t> block_of, first;  // block of an instruction, first of a block
    size_t words = 0;
    std::vector<uint64_t> in, out;  // registers alive at a block's ends
  };
  Liveness liveness_;
  struct Event {
    uint32_t instruction;
    bool defines;
  };
  std::vector<Event> events_;  // of register r: from event_begin_[r] to event_begin_[r + 1]
  std::vector<size_t> event_begin_;
  std::vector<bool> block_local_;  // of block_local_registers()
  struct MemoryForm {              // a load or store of one element, without a guard
    uint32_t at = 0;               // code index
    Access access = Access::kGlobal;
    ptx::Type type = ptx::Type::kNone;
    uint32_t width = 4;
    bool store = false;
  };
  std::vector<MemoryForm> memory_forms_;
  std::vector<uint32_t> chains_;                       // code indices
  std::vector<std::vector<uint32_t>> uses_, defines_;  // registers, by PTX instruction
  std::vector<uint32_t> starts_;                       // PTX instruction -> code index
  std::vector<std::pair<uint32_t, uint32_t>> fixups_;  // code index -> PTX instruction
};

}  // namespace gpupool::simgpu::exec
