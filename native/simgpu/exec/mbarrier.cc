// mbarrier objects: 64-bit counters of arrivals in shared memory. Decoding and execution; a block
// runs on one host thread, so plain operations do.
#include "simgpu/exec/decoder.h"

namespace gpupool::simgpu::exec {

using ptx::Mod;
using ptx::OperandKind;
using ptx::Space;
using ptx::Type;

namespace {

// The object, and the state that an arrival returns: threads expected each phase, arrivals and
// bytes that the phase still waits for, the phase's parity.
struct Object {
  explicit Object(uint64_t word)
      : expected(static_cast<uint32_t>(word & kCountMask)),
        pending(static_cast<uint32_t>(word >> 20 & kCountMask)),
        bytes(static_cast<int32_t>(word >> 40 << 11) >> 11),
        phase(word >> 63) {}
  uint64_t word() const {
    return expected | uint64_t{pending} << 20 |
           (static_cast<uint64_t>(bytes) & ((1u << 21) - 1)) << 40 | uint64_t{phase} << 63;
  }
  void settle() {
    if (pending || bytes) return;
    pending = expected;
    phase = !phase;
  }

  static constexpr uint32_t kCountMask = (1u << 20) - 1;
  uint32_t expected, pending;
  int32_t bytes;
  bool phase;
};

// Instruction::target
constexpr int32_t kIsGeneric = 1, kNoComplete = 2, kDrop = 4, kExpects = 8, kParity = 16;

template <class T>
T* row(Warp& w, uint32_t offset) {
  return reinterpret_cast<T*>(w.rows + offset);
}

// The object that the lane's address names; nullptr: a fault was recorded.
uint64_t* object_of(Warp& w, const Instruction* i, int lane) {
  const uint64_t address = row<const uint64_t>(w, i->a)[lane] + static_cast<uint64_t>(i->immediate);
  uint64_t at = address;
  if (i->target & kIsGeneric) at -= kSharedWindow;
  if (at >= w.shared_bytes || at + 8 > w.shared_bytes) {
    fault_at(w, i, FaultKind::kIllegalAddress, lane, address, 8, true,
             "an mbarrier object lies in the block's shared memory");
    return nullptr;
  }
  if (at % 8) {
    fault_at(w, i, FaultKind::kMisalignedAddress, lane, address, 8, true, "misaligned address");
    return nullptr;
  }
  return reinterpret_cast<uint64_t*>(w.shared + at);
}

// fn(object, lane) for each active lane; false: a fault was recorded.
template <class Fn>
const Instruction* each_object(Warp& w, const Instruction* i, Fn fn) {
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    uint64_t* p = object_of(w, i, l);
    if (!p) return i;
    if (const char* wrong = fn(*p, l))
      return fault_at(w, i, FaultKind::kIllegalInstruction, l, row<const uint64_t>(w, i->a)[l], 8,
                      true, wrong);
  }
  w.spin = 0;
  return i + 1;
}

const Instruction* init(Warp& w, const Instruction* i) {
  const uint32_t* count = row<const uint32_t>(w, i->b);
  return each_object(w, i, [&](uint64_t& word, int l) -> const char* {
    if (count[l] == 0 || count[l] > Object::kCountMask)
      return "an mbarrier expects between 1 and 1048575 arrivals";
    Object o(0);
    o.expected = o.pending = count[l];
    word = o.word();
    return nullptr;
  });
}

const Instruction* invalidate(Warp& w, const Instruction* i) {
  return each_object(w, i, [](uint64_t& word, int) -> const char* {
    word = 0;
    return nullptr;
  });
}

// d = the state before (0: not wanted); b: arrivals (0: one), or the bytes to expect.
const Instruction* arrive(Warp& w, const Instruction* i) {
  const uint32_t* operand = i->b ? row<const uint32_t>(w, i->b) : nullptr;
  uint64_t* state = i->d ? row<uint64_t>(w, i->d) : nullptr;
  return each_object(w, i, [&](uint64_t& word, int l) -> const char* {
    Object o(word);
    const bool expects = i->target & kExpects;
    const uint32_t count = operand && !expects ? operand[l] : 1;
    if (count > o.pending)
      return "more arrivals than the mbarrier's phase waits for, or it isn't initialised";
    if ((i->target & kNoComplete) && count == o.pending && o.bytes == 0)
      return "mbarrier.arrive.noComplete would complete the phase";
    if (state) state[l] = word;
    if (expects) o.bytes += static_cast<int32_t>(operand[l]);
    if (i->target & kDrop) o.expected -= count;
    o.pending -= count;
    o.settle();
    word = o.word();
    return nullptr;
  });
}

// target & kExpects: more bytes, else bytes that came.
const Instruction* count_bytes(Warp& w, const Instruction* i) {
  const uint32_t* bytes = row<const uint32_t>(w, i->b);
  return each_object(w, i, [&](uint64_t& word, int l) -> const char* {
    Object o(word);
    const int32_t n = static_cast<int32_t>(bytes[l]);
    if (i->target & kExpects) {
      o.bytes += n;
    } else {
      o.bytes -= n;
      o.settle();
    }
    word = o.word();
    return nullptr;
  });
}

// The copies are over when cp.async has run: what they would count and take back is nothing.
const Instruction* look(Warp& w, const Instruction* i) {
  return each_object(w, i, [](uint64_t&, int) -> const char* { return nullptr; });
}

const Instruction* wait(Warp& w, const Instruction* i) {
  const bool parity = i->target & kParity;
  int32_t* d = row<int32_t>(w, i->d);
  bool any = false;
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const uint64_t* p = object_of(w, i, l);
    if (!p) return i;
    const bool phase = parity ? row<const uint32_t>(w, i->b)[l] & 1
                              : Object(row<const uint64_t>(w, i->b)[l]).phase;
    const bool complete = Object(*p).phase != phase;
    d[l] = complete ? -1 : 0;
    any |= complete;
  }
  if (!any) return poll(w, i + 1);
  w.spin = 0;
  return i + 1;
}

const Instruction* pending_count(Warp& w, const Instruction* i) {
  const uint64_t* state = row<const uint64_t>(w, i->a);
  uint32_t* d = row<uint32_t>(w, i->d);
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    d[l] = Object(state[l]).pending;
  }
  return i + 1;
}

}  // namespace

void Decoder::needs(int capability) const {
  if (program_.unit(function_.unit).target < capability)
    refuse("this needs .target sm_" + std::to_string(capability) + " or above");
}

void Decoder::mbarrier_at(const ptx::Operand& o, Space space, Handler handler, uint32_t d,
                          uint32_t b, int32_t flags) {
  const Address a = address(o, space);
  if (space != Space::kShared && space != Space::kNone) refuse("an mbarrier is in shared memory");
  const bool generic = a.access == Access::kGeneric;
  if (!generic && a.access != Access::kShared32 && a.access != Access::kShared64)
    refuse("an mbarrier is in shared memory");
  Instruction& i = emit(handler, d, widened(a.row), b);
  i.immediate = a.offset;
  i.target = flags | (generic ? kIsGeneric : 0);
}

void Decoder::mbarrier(Modifiers& m) {
  const Mod what =
      m.take_any({Mod::kInit, Mod::kInval, Mod::kArrive, Mod::kArriveDrop, Mod::kTestWait,
                  Mod::kTryWait, Mod::kExpectTx, Mod::kCompleteTx, Mod::kPendingCount});
  needs(80);
  const bool expects = what != Mod::kExpectTx && m.take(Mod::kExpectTx);
  const bool no_complete = m.take(Mod::kNoComplete), parity = m.take(Mod::kParity);
  m.take_any({Mod::kAcquire, Mod::kRelease, Mod::kRelaxed});
  if (m.take_any({Mod::kCta, Mod::kCluster}) == Mod::kCluster) needs(90);
  if (m.take(Mod::kSharedCluster)) refuse("clusters aren't known");
  const Space space = m.take_space();
  if (m.take_type() != Type::kB64) refuse("the type isn't known here");
  const size_t n = current_->operand_count;
  switch (what) {
    case Mod::kInit:
      count(2, 2);
      return mbarrier_at(op(0), space, init, 0, source(op(1), Type::kU32), 0);
    case Mod::kInval:
      count(1, 1);
      return mbarrier_at(op(0), space, invalidate, 0, 0, 0);
    case Mod::kArrive:
    case Mod::kArriveDrop: {
      count(expects || no_complete ? 3 : 2, 3);
      if (expects) needs(90);
      const uint32_t b = n > 2 ? source(op(2), Type::kU32) : 0;
      if (b && !no_complete) needs(90);
      const uint32_t d = op(0).kind == OperandKind::kSink ? 0 : target(op(0), 8);
      return mbarrier_at(op(1), space, arrive, d, b,
                         (no_complete ? kNoComplete : 0) | (expects ? kExpects : 0) |
                             (what == Mod::kArriveDrop ? kDrop : 0));
    }
    case Mod::kTryWait:
      needs(90);
      [[fallthrough]];
    case Mod::kTestWait: {
      count(3, what == Mod::kTryWait ? 4 : 3);
      const uint32_t b = source(op(2), parity ? Type::kU32 : Type::kB64);
      if (n > 3) source(op(3), Type::kU32);  // for how long to wait at most: not at all
      return mbarrier_at(op(1), space, wait, target_predicate(op(0)), b, parity ? kParity : 0);
    }
    case Mod::kExpectTx:
    case Mod::kCompleteTx:
      needs(90);
      count(2, 2);
      return mbarrier_at(op(0), space, count_bytes, 0, source(op(1), Type::kU32),
                         what == Mod::kExpectTx ? kExpects : 0);
    case Mod::kPendingCount: {
      count(2, 2);
      const uint32_t a = source(op(1), Type::kB64);
      emit(pending_count, target(op(0), 4), a);
      return;
    }
    default:
      refuse("this operation on an mbarrier isn't known");
  }
}

// cp.async.mbarrier.arrive: an arrival when this thread's copies are over, which they are. Without
// .noinc the arrival was added to those that the phase waits for.
void Decoder::copies_arrive(Modifiers& m) {
  needs(80);
  if (!m.take(Mod::kArrive)) refuse("this copy isn't known");
  const bool counted = m.take(Mod::kNoinc);
  const Space space = m.take_space();
  if (m.take_type() != Type::kB64) refuse("the type isn't known here");
  count(1, 1);
  mbarrier_at(op(0), space, counted ? arrive : look, 0, 0, 0);
}

}  // namespace gpupool::simgpu::exec
