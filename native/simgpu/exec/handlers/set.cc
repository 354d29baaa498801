// The handlers of one ISA level, as the decoder gets them.
#include "simgpu/exec/handlers/rows.h"

#define GPUPOOL_JOIN2(a, b) a##b
#define GPUPOOL_JOIN(a, b) GPUPOOL_JOIN2(a, b)

namespace gpupool::simgpu::exec {

const HandlerSet& GPUPOOL_JOIN(GPUPOOL_ISA, _handlers)() {
  using namespace GPUPOOL_ISA;
  static const HandlerSet set = [] {
    HandlerSet s{};
    s.integer = integer_handler;
    s.carry = carry_handler;
    s.bits = bits_handler;
    s.floating = floating_handler;
    s.math = math_handler;
    s.setp = setp_handler;
    s.selp = selp_handler;
    s.slct = slct_handler;
    s.testp = testp_handler;
    s.extend = extend_handler;
    s.saturate = saturate_handler;
    s.saturate_unsigned = saturate_unsigned_handler;
    s.convert = convert_handler;
    s.half = half_handler;
    s.move = move_handler;
    s.predicate = predicate_handler;
    s.pack = pack_handler;
    s.unpack = unpack_handler;
    s.load = load_handler;
    s.store = store_handler;
    s.atomic = atomic_handler;
    s.warp = warp_handler;
    s.control = control_handler;
    s.special = special_handler;
    s.guarded[0] = run_guarded;
    s.guarded[1] = run_guarded_not;
    s.sign_mask = sign_mask;
    s.set_float = set_float;
    return s;
  }();
  return set;
}

}  // namespace gpupool::simgpu::exec
