"""pycuda: its import needs 143 symbols of libcuda.so.1; a context, PTX, a launch, event times."""

import sys

import numpy as np
import pycuda.driver as cuda

PTX = b"""
.version 6.5
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 twice_data, .param .u32 twice_n)
{
  .reg .pred %p<2>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [twice_data];
  ld.param.u32 %r1, [twice_n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra done;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r5, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.u32 %r6, [%rd4];
  shl.b32 %r7, %r6, 1;
  st.global.u32 [%rd4], %r7;
done:
  ret;
}
\0"""


def main() -> int:
    cuda.init()
    assert cuda.Device.count() >= 1
    device = cuda.Device(0)
    assert device.name()
    context = device.make_context()
    try:
        module = cuda.module_from_buffer(PTX)
        twice = module.get_function("twice")
        values = np.arange(1000, dtype=np.int32)
        memory = cuda.mem_alloc(values.nbytes)
        cuda.memcpy_htod(memory, values)
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        twice(memory, np.uint32(values.size), block=(128, 1, 1), grid=(8, 1))
        end.record()
        end.synchronize()
        assert begin.time_till(end) >= 0
        result = np.empty_like(values)
        cuda.memcpy_dtoh(result, memory)
        np.testing.assert_array_equal(result, values * 2)
        memory.free()
    finally:
        context.pop()
        context.detach()
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
