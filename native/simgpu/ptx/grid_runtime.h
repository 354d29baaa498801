// What the device runtime's library has for the whole grid of a cooperative launch, as PTX of our
// own: it is linked to programs that declare one of these functions and bring no definition.
#pragma once

#include <string_view>

namespace gpupool::simgpu::ptx {

constexpr std::string_view kGridFunctions[] = {"cudaCGSynchronize", "cudaCGSynchronizeGrid",
                                               "cudaCGGetSize", "cudaCGGetRank"};

// The handle is the launch's workspace, which is zero when it begins, or 0 without a cooperative
// launch. Its first half belongs to barriers that programs compile themselves; ours counts, at byte
// 128, the arrivals of blocks for ever: a block goes on when all blocks of its round have arrived.
constexpr std::string_view kGridRuntime = R"(
.version 7.0
.target sm_70
.address_size 64

.weak .func (.param .b32 status) cudaCGSynchronize(.param .b64 handle, .param .b32 flags)
{
  .reg .pred %p, %first, %go;
  .reg .b32 %x, %y, %z;
  .reg .b64 %at, %blocks, %w, %ticket, %target, %arrived;
  ld.param.u64 %at, [handle];
  setp.eq.u64 %p, %at, 0;
  @%p bra NO_GRID;
  bar.sync 0;
  mov.u32 %x, %tid.x;
  mov.u32 %y, %tid.y;
  mov.u32 %z, %tid.z;
  or.b32 %x, %x, %y;
  or.b32 %x, %x, %z;
  setp.ne.u32 %first, %x, 0;
  @%first bra ARRIVED;
  mov.u32 %x, %nctaid.x;
  mov.u32 %y, %nctaid.y;
  mov.u32 %z, %nctaid.z;
  mul.wide.u32 %blocks, %x, %y;
  cvt.u64.u32 %w, %z;
  mul.lo.u64 %blocks, %blocks, %w;
  membar.gl;
  atom.global.add.u64 %ticket, [%at+128], 1;
  div.u64 %target, %ticket, %blocks;
  add.u64 %target, %target, 1;
  mul.lo.u64 %target, %target, %blocks;
WAIT:
  ld.volatile.global.u64 %arrived, [%at+128];
  setp.lt.u64 %go, %arrived, %target;
  @%go bra WAIT;
  membar.gl;
ARRIVED:
  bar.sync 0;
  st.param.b32 [status], 0;
  ret;
NO_GRID:
  st.param.b32 [status], 1;
  ret;
}

.weak .func (.param .b32 status) cudaCGSynchronizeGrid(.param .b64 handle, .param .b32 flags)
{
  .reg .b64 %at;
  .reg .b32 %flags, %status;
  ld.param.u64 %at, [handle];
  ld.param.u32 %flags, [flags];
  {
    .param .b32 result;
    .param .b64 first;
    .param .b32 second;
    st.param.b64 [first], %at;
    st.param.b32 [second], %flags;
    call.uni (result), cudaCGSynchronize, (first, second);
    ld.param.b32 %status, [result];
  }
  st.param.b32 [status], %status;
  ret;
}

.weak .func (.param .b32 status) cudaCGGetSize(.param .b64 threads, .param .b64 grids,
                                               .param .b64 handle)
{
  .reg .pred %p;
  .reg .b32 %n, %m;
  .reg .b64 %at;
  ld.param.u64 %at, [threads];
  setp.eq.u64 %p, %at, 0;
  @%p bra GRIDS;
  mov.u32 %n, %nctaid.x;
  mov.u32 %m, %nctaid.y;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %nctaid.z;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %ntid.x;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %ntid.y;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %ntid.z;
  mul.lo.u32 %n, %n, %m;
  st.u32 [%at], %n;
GRIDS:
  ld.param.u64 %at, [grids];
  setp.eq.u64 %p, %at, 0;
  @%p bra DONE;
  st.u32 [%at], 1;
DONE:
  st.param.b32 [status], 0;
  ret;
}

.weak .func (.param .b32 status) cudaCGGetRank(.param .b64 thread, .param .b64 grid,
                                               .param .b64 handle)
{
  .reg .pred %p;
  .reg .b32 %n, %m, %rank;
  .reg .b64 %at;
  ld.param.u64 %at, [thread];
  setp.eq.u64 %p, %at, 0;
  @%p bra GRID;
  mov.u32 %n, %ctaid.z;
  mov.u32 %m, %nctaid.y;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %ctaid.y;
  add.u32 %n, %n, %m;
  mov.u32 %m, %nctaid.x;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %ctaid.x;
  add.u32 %n, %n, %m;
  mov.u32 %m, %ntid.z;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %tid.z;
  add.u32 %n, %n, %m;
  mov.u32 %m, %ntid.y;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %tid.y;
  add.u32 %n, %n, %m;
  mov.u32 %m, %ntid.x;
  mul.lo.u32 %n, %n, %m;
  mov.u32 %m, %tid.x;
  add.u32 %n, %n, %m;
  st.u32 [%at], %n;
GRID:
  ld.param.u64 %at, [grid];
  setp.eq.u64 %p, %at, 0;
  @%p bra DONE;
  st.u32 [%at], 0;
DONE:
  st.param.b32 [status], 0;
  ret;
}
)";

}  // namespace gpupool::simgpu::ptx
