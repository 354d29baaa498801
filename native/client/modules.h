// Device code: modules, libraries, kernels and functions. A library is local until something of it
// is used in a context; then the one piece of code that fits the device is sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/state.h"
#include "frontdoor/images.h"
#include "frontdoor/program_info.h"

namespace gpupool::client {

// What a program says with CUjit_options, as far as it travels, and where logs are to go.
struct JitOptions {
  uint32_t max_registers = 0, threads_per_block = 0;
  int32_t optimization = -1;
  uint32_t debug_info = 0;
  char *info_log = nullptr, *error_log = nullptr;
  size_t info_room = 0, error_room = 0;
  void **info_size = nullptr, **error_size = nullptr;  // get the bytes that were written
  void** wall_time = nullptr;

  bool want_log() const { return info_log != nullptr || error_log != nullptr; }
};
CUresult parse_options(unsigned count, const CUjit_option* options, void** values, JitOptions* out);
void deliver_logs(const JitOptions& options, wire::Decoder& decoder, uint64_t* image_bytes);

// Code that fits one device. Usually one piece; several are linked before they are loaded.
struct Code {
  struct Piece {
    std::vector<uint8_t> bytes;
    bool ptx = false;
    bool has_ptx = false;  // machine code whose image has PTX for this device, too
  };
  std::vector<Piece> pieces;
  frontdoor::ProgramInfo info;
  bool info_known = false;  // false: only the driver can say what is in it
};
CUresult make_code(const frontdoor::Image& image, const Device& device, std::shared_ptr<Code>* out);
// After the driver said "no binary" to machine code that was made for the device (a simulated one
// can't execute it): true if make_code should be asked again.
bool take_ptx_instead(Device* device, const Code& code);

struct Module : Object {
  std::shared_ptr<Code> code;
  Library* library = nullptr;  // for which it was made; null: the program's own
  std::mutex lock;
  std::map<std::string, Function*> functions;
};

struct Library : Object {
  std::shared_ptr<frontdoor::Image> image;
  bool preserved = false;  // the image's memory stays: pieces are taken from it when needed
  JitOptions options;
  std::mutex lock;
  std::map<int, std::pair<CUresult, std::shared_ptr<Code>>> code;  // by device
  std::map<Context*, Module*> modules;
  std::map<std::string, Function*> kernels;
};

// A CUfunction (of a module, so of one context) or a CUkernel (of a library, for every context).
// They share a table, since programs pass kernels where functions are expected.
struct Function : Object {
  std::string name;
  Module* module = nullptr;    // of a CUfunction
  Library* library = nullptr;  // of a CUkernel

  // Of a CUfunction:
  std::vector<frontdoor::ParameterLayout> parameters;
  uint32_t parameter_bytes = 0;
  bool layout_known = false;
  uint32_t required_threads[3] = {0, 0, 0};  // .reqntid, 0: none
  uint32_t max_threads = 0;                  // .maxntid, 0: none
  int attributes[wire::kFunctionAttributes] = {};
  uint32_t attribute_mask = 0;
  std::mutex lock;
  std::map<std::pair<int, uint64_t>, int> occupancy;  // by block size and dynamic shared memory

  // Of a CUkernel:
  std::atomic<Function*> last{nullptr};  // the function of the context that used it last
  std::map<int, std::map<int, int>> set_attributes;  // by device: for contexts that come later
};

struct ModuleTables {
  Table<Module, Kind::kModule> modules;
  Table<Library, Kind::kLibrary> libraries;
  Table<Function, Kind::kFunction> functions;
};
ModuleTables& module_tables();

CUresult load_module(Context* context, std::shared_ptr<Code> code, const JitOptions& options,
                     Library* library, Module** out);
void unload_module(Module* module, bool tell_worker);
CUresult get_function(Module* module, const char* name, Function** out);
CUresult get_global(Module* module, const char* name, uint64_t* address, uint64_t* bytes);

CUresult library_code(Library* library, const Device& device, std::shared_ptr<Code>* out);
CUresult library_module(Library* library, Context* context, Module** out);

// The function behind a CUfunction or CUkernel in a context.
CUresult function_in(Context* context, CUfunction handle, Function** out);
CUresult refresh_attributes(Function* function);
// What CUDA reports of a launch at the call (api_launch.cc).
struct LaunchShape {
  const unsigned* grid;
  const unsigned* block;
  unsigned shared_bytes;
  bool cooperative;
};
CUresult check_launch(Context* context, Function* function, const LaunchShape& shape);
// Whether the context's device can launch a grid of such clusters of blocks.
CUresult check_cluster(const Context* context, const unsigned (&grid)[3],
                       const unsigned (&cluster)[3]);

}  // namespace gpupool::client
