// alloca, stacksave and stackrestore: the part of a frame in local memory that grows while the
// function runs. Its end is a row of the function's own, from which calls place their frames.
#include <algorithm>
#include <bit>

#include "simgpu/exec/code.h"
#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::Op;
using ptx::OperandKind;
using ptx::Type;

namespace {

template <class T>
T* row(Warp& w, uint32_t offset) {
  return reinterpret_cast<T*>(w.rows + offset);
}

uint64_t frame_end(const Warp& w) {
  return uint64_t{w.frame->local_base} + w.frame->code->frame_bytes;
}

// d = where the frame ends.
const Instruction* start(Warp& w, const Instruction* i) {
  uint64_t* end = row<uint64_t>(w, i->d);
  for (uint32_t m = w.mask; m; m &= m - 1) end[__builtin_ctz(m)] = frame_end(w);
  return i + 1;
}

// d = b bytes at the end in row c, a multiple of `count`.
const Instruction* allocate(Warp& w, const Instruction* i) {
  const uint64_t* bytes = row<const uint64_t>(w, i->b);
  uint64_t *d = row<uint64_t>(w, i->d), *end = row<uint64_t>(w, i->c);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const uint64_t alignment = static_cast<uint64_t>(i->immediate);
    const uint64_t at = (end[l] + alignment - 1) & ~(alignment - 1);
    if (at > w.local_bytes || bytes[l] > w.local_bytes - at)
      return fault_at(w, i, FaultKind::kLaunchFailed, l, 0, 0, false,
                      "stack overflow (CU_LIMIT_STACK_SIZE)");
    d[l] = at;
    end[l] = at + bytes[l];
  }
  return i + 1;
}

// Row c, the end, = b.
const Instruction* restore(Warp& w, const Instruction* i) {
  const uint64_t* saved = row<const uint64_t>(w, i->b);
  uint64_t* end = row<uint64_t>(w, i->c);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (saved[l] < frame_end(w) || saved[l] > w.local_bytes)
      return fault_at(w, i, FaultKind::kIllegalAddress, l, saved[l], 0, false,
                      "stackrestore of something that stacksave of this call didn't give");
    end[l] = saved[l];
  }
  return i + 1;
}

}  // namespace

// Emits the row's start where the function needs one.
void Decoder::start_stack() {
  for (const ptx::Instruction& i : body_.instructions)
    code_->moves_stack |= i.op == Op::kAlloca || i.op == Op::kStackrestore;
  for (const ptx::Instruction& i : body_.instructions) {
    if (stack_ || (!code_->moves_stack && i.op != Op::kStacksave)) continue;
    stack_ = add_row(8);
    emit(start, stack_);
  }
}

void Decoder::stack(Modifiers& m) {
  const Op o = current_->op;
  const Type t = m.take_type();
  if (t != Type::kU32 && t != Type::kU64) refuse("the type isn't known here");
  auto wide = [&](const ptx::Operand& x) { return widened(source(x, t)); };
  auto result = [&](uint32_t row64) {
    const uint32_t d = target(op(0), ptx::bytes_of(t));
    if (t == Type::kU64) {
      emit(set_.move(8), d, row64);
    } else {
      emit(set_.unpack(8, 4, 0), d, row64);
    }
  };
  if (o == Op::kStacksave) {
    count(1, 1);
    return result(stack_);
  }
  if (o == Op::kStackrestore) {
    count(1, 1);
    emit(restore, 0, 0, wide(op(0)), stack_);
    return;
  }
  count(2, 3);
  uint64_t alignment = 8;
  if (current_->operand_count == 3) {
    if (op(2).kind != OperandKind::kImmediate) refuse("the alignment isn't a number");
    alignment = op(2).bits;
    if (!std::has_single_bit(alignment) || alignment > (1u << 23))
      refuse("the alignment isn't a power of two");
  }
  const uint32_t bytes = wide(op(1));
  const uint32_t d = t == Type::kU64 ? target(op(0), 8) : temp(8);
  emit(allocate, d, 0, bytes, stack_).immediate = static_cast<int64_t>(alignment);
  if (t == Type::kU32) emit(set_.unpack(8, 4, 0), target(op(0), 4), d);
}

}  // namespace gpupool::simgpu::exec
