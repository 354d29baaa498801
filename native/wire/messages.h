// Bodies of the hand-written operations: those that are more than one call of the driver with plain
// parameters. The others' bodies are generated: each parameter takes 8 bytes, in order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "wire/frame.h"
#include "wire/operations.h"

namespace gpupool::wire {

// What hand-written operations carry, by operation (wire/operations.h); "waits" has a reply:
//
//   kCtxCreateV4         waits: ContextCreate -> ContextCreated; also for primary contexts
//   kCtxDestroyV2        Handle
//   kCtxSynchronize      waits
//   kMemAllocV2          waits: u64 bytes -> u64 address
//   kMemFreeV2           u64 address
//   kMemGetInfoV2        waits: -> u64 free, u64 total
//   kMemcpyHtoDAsyncV2   CopyToDevice, then the data, inline or as bulk; every copy to the device
//   kMemcpyDtoHAsyncV2   waits: CopyFromDevice -> the data as bulk, in one or more replies
//   kMemcpy2DAsyncV2     CopyRows: within the device
//   kModuleLoadDataEx    waits: ModuleLoad, image as bulk -> CompileLogs, texts
//   kModuleUnload        Handle
//   kModuleGetFunction   waits: FunctionGet, name -> FunctionInfo, FunctionParameter[]
//   kModuleGetGlobalV2   waits: Handle of the module, u64 length, name -> u64 address, u64 bytes
//   kFuncGetAttribute    waits: Handle -> FunctionInfo without parameters
//   kStreamCreateWithPriority  StreamCreate
//   kStreamDestroyV2     Handle
//   kStreamSynchronize   waits: Handle
//   kStreamQuery         waits: Handle
//   kEventCreate         Handle, u64 flags
//   kEventDestroyV2      Handle
//   kEventSynchronize    waits: Handle
//   kEventQuery          waits: Handle
//   kLaunchKernel        Launch, parameters; every launch
//   kLaunchHostFunc      HostFunctionLaunch; answered by kHostFunctionDone when it was called
//   kHostFunctionDone    u64 number, the data of a pulled copy as bulk; in a frame of its own
//   kPulledCopy          CopyToDevice with flags 0 and the number in `reserved`, at most
//                        kMaxBulkSegment bytes; called like a function
//   kOccupancyMaxActiveClusters, kOccupancyMaxPotentialClusterSize
//                        waits: Launch without parameters -> u64
//   kLinkCreateV2        Handle, LinkOptions
//   kLinkAddDataV2       waits: LinkAdd, name, data as bulk -> CompileLogs, texts
//   kLinkComplete        waits: Handle -> CompileLogs, texts; the image as bulk
//   kLinkDestroy         Handle
//   kMemAddressReserve   waits: u64 bytes, alignment, wanted address -> u64 address
//   kMemAddressFree      waits: u64 address, bytes
//   kMemCreate           waits: Handle, u64 bytes
//   kMemRelease          waits: Handle
//   kMemMap              waits: u64 address, bytes, offset; Handle
//   kMemUnmap            waits: u64 address, bytes
//   kMemSetAccess        waits: u64 address, bytes, CUmemAccess_flags
//   kGraphInstantiateWithFlags  waits: GraphDefine, nodes as bulk (wire/graph_nodes.h)
//   kGraphExecUpdateV2   GraphDefine, nodes with their index as bulk or inline
//   kGraphExecDestroy    Handle
//   kGraphLaunch         Handle of the executable, Handle of the stream
//   kGraphUpload         the same

struct ContextCreate {
  Handle context;
  uint32_t flags;        // CUctx_flags
  uint32_t primary;      // 1: the device's primary context
  uint64_t arena_base;   // the arena for this device's addresses; the first answer that accepts one
  uint64_t arena_bytes;  // fixes it for the session
};
struct ContextCreated {
  uint64_t arena_accepted;  // 0: propose another one; the context was not created
  uint64_t arena_base;      // what is in force
  uint64_t arena_bytes;
};

enum CopyFlags : uint32_t {
  kCopyInline = 1,       // the data follow in the command, not as bulk
  kCopySynchronous = 2,  // later work on any stream comes after the copy
};
struct CopyToDevice {
  uint64_t destination;
  uint64_t bytes;  // of the data: width * height
  uint64_t pitch;  // of the destination, 0: one row
  uint64_t width;  // bytes of a row; the data are packed
  Handle stream;
  uint32_t flags;  // CopyFlags
  uint32_t reserved;
};
struct CopyFromDevice {
  uint64_t source;
  uint64_t bytes;
  uint64_t pitch;
  uint64_t width;
  Handle stream;
  uint64_t reserved;
};

struct CopyRows {
  uint64_t destination, destination_pitch;
  uint64_t source, source_pitch;
  uint64_t width, height;  // bytes, rows
  Handle stream;
};

struct ModuleLoad {
  Handle module;
  uint64_t image_bytes;        // sum of the bulk segments of this command and those that follow
  uint32_t max_registers;      // CU_JIT_MAX_REGISTERS, 0: not set
  uint32_t threads_per_block;  // CU_JIT_THREADS_PER_BLOCK, 0: not set
  int32_t optimization;        // CU_JIT_OPTIMIZATION_LEVEL, -1: not set
  // bit 0: CU_JIT_GENERATE_DEBUG_INFO, bit 1: CU_JIT_GENERATE_LINE_INFO, bit 2: the client has PTX
  // as well (CU_PREFER_PTX), if this machine code does not fit
  uint32_t debug_info;
  uint32_t want_log;      // 1: the answer carries the compiler's logs
  uint32_t more_follows;  // 1: the image goes on in the next kModuleLoad of this module, and
                          // this one is not answered
};

constexpr uint32_t kFunctionAttributes = 16;  // CUfunction_attribute 0 to 15
struct FunctionGet {
  Handle module;
  Handle function;
  uint64_t name_bytes;  // the name follows
};
struct FunctionInfo {
  int32_t attributes[kFunctionAttributes];
  uint32_t attribute_mask;    // bit: the driver knew this attribute
  uint32_t parameter_count;   // FunctionParameters that follow
  uint32_t parameters_known;  // 0: this driver cannot say; the image has to
  uint32_t reserved;
};
struct FunctionParameter {
  uint32_t offset;
  uint32_t bytes;
};

struct StreamCreate {
  Handle stream;
  uint32_t flags;
  int32_t priority;
};

enum LaunchFlags : uint32_t {
  kLaunchCooperative = 1,
};
struct Launch {
  Handle function;
  Handle stream;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  uint32_t flags;            // LaunchFlags
  uint32_t cluster[3];       // 0: none
  uint32_t parameter_bytes;  // they follow, laid out as the kernel takes them
};

struct GraphDefine {
  Handle executable;
  uint64_t bytes;         // of the nodes that come with this command
  uint32_t count;         // of nodes in all commands of this graph or update
  uint32_t more_follows;  // as in ModuleLoad
};
struct HostFunctionLaunch {
  Handle stream;
  uint32_t number;       // the client's, for the call
  uint32_t with_status;  // 1: called after an error too (cuStreamAddCallback)
};
struct HostFunctionCall {
  uint32_t number;
  int32_t status;    // CUresult of the stream's context
  uint32_t refused;  // 1: it will not be called, and `status` says why
  uint32_t reserved;
};

struct LinkOptions {
  uint32_t max_registers;
  uint32_t threads_per_block;
  int32_t optimization;
  uint32_t debug_info;
  uint32_t want_log;
  uint32_t reserved;
};
struct LinkAdd {
  Handle link;
  uint64_t bytes;  // of the data
  uint32_t type;   // CUjitInputType
  uint32_t name_bytes;
  uint32_t more_follows;  // as in ModuleLoad
  uint32_t reserved;
};

static_assert(sizeof(ContextCreate) == 32 && sizeof(CopyToDevice) == 48 &&
              sizeof(CopyFromDevice) == 48);
static_assert(sizeof(ModuleLoad) == 40 && sizeof(FunctionInfo) == 80 && sizeof(Launch) == 64);
static_assert(sizeof(LinkAdd) == 32 && sizeof(LinkOptions) == 24 && sizeof(StreamCreate) == 16);

constexpr uint64_t kMaxImageBytes = 256ull * 1024 * 1024;  // of one image or of one link input
constexpr uint32_t kMaxParameterBytes = 32764;             // of one launch
constexpr uint32_t kMaxNameBytes = 64 * 1024;              // mangled names can be long
constexpr uint32_t kMaxLogBytes = 64 * 1024;

// Body of the replies of kModuleLoad, kLinkAdd and kLinkComplete.
struct CompileLogs {
  uint64_t image_bytes;  // kLinkComplete: follows as bulk; else 0
  uint32_t info_bytes;   // then the texts: info, error
  uint32_t error_bytes;
};

}  // namespace gpupool::wire
