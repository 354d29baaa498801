// Branches, barriers, calls and guards: what changes the flow.
#include "simgpu/exec/code.h"
#include "simgpu/exec/handlers/rows.h"

namespace gpupool::simgpu::exec::GPUPOOL_ISA {
namespace {

inline Ins jump(Warp& w, Ins i) {
  count_run(w, i);
  Ins to = i + i->target;
  w.run_start = to;
  if (i->target <= 0 && (w.budget <= 0 || --w.backward_left <= 0)) return end_slice(w, to);
  return to;
}
Ins bra(Warp& w, Ins i) { return jump(w, i); }
template <bool kNot>
Ins bra_if(Warp& w, Ins i) {
  uint32_t p = bits_of(row<const int32_t>(w, i->a));
  if (kNot) p = ~p;
  const uint32_t taken = p & w.mask;
  if (taken == w.mask) return jump(w, i);
  if (!taken) return i + 1;
  return split_branch(w, i, taken);
}
Ins brx(Warp& w, Ins i) {
  const Code& code = *w.frame->code;
  const std::vector<int32_t>& table = code.branch_tables[size_t(i->target)];
  const uint32_t* index = row<const uint32_t>(w, i->a);
  const int32_t here = int32_t(i - code.instructions.data());
  int32_t targets[kLanes];
  for (uint32_t m = w.mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (index[l] >= table.size())
      return fault_at(w, i, FaultKind::kInvalidPc, l, index[l], 0, false,
                      "the index is outside the branch table");
    targets[l] = table[index[l]] - here;
  }
  return split_targets(w, i, targets);
}
Ins trap(Warp& w, Ins i) { return fault_at(w, i, FaultKind::kLaunchFailed, "trap"); }
Ins nothing(Warp&, Ins i) { return i + 1; }
Ins fence(Warp&, Ins i) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return i + 1;
}
Ins nanosleep(Warp& w, Ins i) {
  const uint32_t* a = row<const uint32_t>(w, i->a);
  uint32_t longest = 0;
  for (uint32_t m = w.mask; m; m &= m - 1)
    longest = a[__builtin_ctz(m)] > longest ? a[__builtin_ctz(m)] : longest;
  return sleep_lanes(w, i, longest);
}
template <BarrierKind kKind>
Ins bar(Warp& w, Ins i) {
  const int first = __builtin_ctz(w.mask);
  const uint32_t id = row<const uint32_t>(w, i->a)[first];
  const uint32_t threads = i->b ? row<const uint32_t>(w, i->b)[first] : 0;
  const uint32_t p = i->c ? bits_of(row<const int32_t>(w, i->c)) & w.mask : 0;
  return block_barrier(w, i, kKind, id, threads, p);
}
Ins bar_warp(Warp& w, Ins i) {
  const uint32_t need = row<const uint32_t>(w, i->a)[__builtin_ctz(w.mask)];
  if ((need & w.alive & ~w.mask) == 0) return i + 1;
  return park_warp_barrier(w, i, need);
}

inline Ins guarded(Warp& w, Ins i, uint32_t pass) {
  const uint32_t before = w.mask;
  pass &= before;
  if (pass == before) return i->inner(w, i);
  if (!pass) return i + 1;
  const uint32_t waiting = w.waiting;
  w.mask = pass;
  w.waiting = ~uint32_t{0};
  Ins next = i->inner(w, i);
  w.mask = before;
  w.waiting = waiting;
  return next;
}

}  // namespace

Ins run_guarded(Warp& w, Ins i) { return guarded(w, i, bits_of(row<const int32_t>(w, i->guard))); }
Ins run_guarded_not(Warp& w, Ins i) {
  return guarded(w, i, ~bits_of(row<const int32_t>(w, i->guard)));
}

Handler control_handler(Op op, Mod mode, bool negated) {
  switch (op) {
    case Op::kBra:
      if (mode == Mod::kUni) return bra;
      return negated ? bra_if<true> : bra_if<false>;
    case Op::kBrx:
      return brx;
    case Op::kExit:
      return exit_lanes;
    case Op::kRet:
      return return_lanes;
    case Op::kCall:
      return call_function;
    case Op::kTrap:
      return trap;
    case Op::kBrkpt:
      return trap;
    case Op::kMembar:
      return fence;
    case Op::kPrefetch:
      return nothing;
    case Op::kNanosleep:
      return nanosleep;
    case Op::kBar:
      switch (mode) {
        case Mod::kSync:
          return bar<BarrierKind::kSync>;
        case Mod::kArrive:
          return bar<BarrierKind::kArrive>;
        case Mod::kPopc:
          return bar<BarrierKind::kPopc>;
        case Mod::kAnd:
          return bar<BarrierKind::kAnd>;
        case Mod::kOr:
          return bar<BarrierKind::kOr>;
        case Mod::kWarp:
          return bar_warp;
        default:
          return nullptr;
      }
    default:
      return nullptr;
  }
}

}  // namespace gpupool::simgpu::exec::GPUPOOL_ISA
