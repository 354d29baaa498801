// Programs: images and their source text, modules of a context, libraries and their kernels.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simgpu/driver/context.h"

namespace gpupool::simgpu {

class Library;
class Module;

// A kernel in one context: what a CUfunction is.
struct Function {
  Context* context = nullptr;
  Module* module = nullptr;
  std::shared_ptr<Program> program;
  int index = 0;
  std::string name;
  std::atomic<int> max_dynamic_shared{-1};  // -1: what the device gives without opting in
  std::atomic<int> carveout{-1};
  std::atomic<int> cache_config{0};

  // The decoded kernel. CUDA_ERROR_NOT_SUPPORTED, and a line on stderr: the simulator refuses it.
  CUresult info(const KernelInfo** info);
  int dynamic_limit(const KernelInfo& info) const;

 private:
  std::atomic<bool> said_{false};
};

// A line on stderr.
void say_refused(const std::string& kernel, const std::string& why);

class Module {
 public:
  Module(Context* context, std::shared_ptr<Program> program, Library* library)
      : context(context), program(std::move(program)), library(library) {}
  Context* const context;
  const std::shared_ptr<Program> program;
  Library* const library;  // null: loaded by itself
  std::shared_ptr<Function> function(int index);
  std::shared_ptr<Function> function(const std::string& name);  // null: no such kernel
  void forget_functions();

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Function>> functions_;
};

// A kernel of a library: what a CUkernel is. Usable wherever a CUfunction is.
struct Kernel {
  Library* library = nullptr;
  std::string name;
  std::mutex mutex;
  std::map<int, std::map<int, int>> attributes;  // by device ordinal: set attributes
  std::atomic<bool> said_refused{false};
  std::shared_ptr<Function> function(Context* context, CUresult* status);
};

class Library {
 public:
  // By 10 * major + minor of the compute capability: what a device of that kind executes.
  std::map<int, std::vector<SourceText>> sources;
  std::shared_ptr<Module> instance(Context* context, CUresult* status, std::string* log = nullptr);
  std::shared_ptr<Module> instance_or_null(Context* context);
  std::shared_ptr<Module> drop(Context* context);
  std::vector<std::shared_ptr<Module>> drop_all();
  // A program to ask for names, in the current context or, without one, in none.
  std::shared_ptr<Program> any_program(CUresult* status);
  std::shared_ptr<Kernel> kernel(const std::string& name);
  std::vector<std::shared_ptr<Kernel>> kernels(CUresult* status);

 private:
  std::mutex mutex_;
  std::map<Context*, std::shared_ptr<Module>> instances_;
  std::shared_ptr<Program> contextless_;
  std::map<std::string, std::shared_ptr<Kernel>> kernels_;
};

// The options of the JIT that matter here, and where its logs go.
class JitOptions {
 public:
  CUresult read(unsigned count, const CUjit_option* options, void** values);
  void write(const std::string& info, const std::string& errors);
  uint32_t max_registers() const { return max_registers_; }  // 0: not set
  // What is to be compiled is preferred to machine code that does not fit exactly.
  bool prefer_ptx() const { return prefer_ptx_; }

 private:
  struct Log {
    char* buffer = nullptr;
    void** size = nullptr;
    unsigned capacity = 0;
  };
  static void write_log(Log& log, const std::string& text);
  Log info_, error_;
  void** wall_time_value_ = nullptr;
  uint32_t max_registers_ = 0;
  bool prefer_ptx_ = false;
};

// The PTX of an image that a device of this kind executes, to be compiled with these options.
CUresult read_image(const void* image, const DeviceModel& model, const JitOptions& options,
                    std::vector<SourceText>* sources);
CUresult load(const std::vector<SourceText>& sources, const DeviceModel& model,
              std::shared_ptr<MemorySpace> memory, std::shared_ptr<Program>* program,
              std::string* log);
CUresult result_of(LoadStatus status);

uint32_t at_most(uint32_t a, uint32_t b);  // of two limits the tighter one; 0: none

CUresult read_file(const char* path, std::vector<char>* bytes);  // NUL-terminated

// A CUfunction, or a CUkernel in its place, for the current context.
CUresult find_function(CUfunction handle, Context* context, std::shared_ptr<Function>* function);

HandleTable<Module>& modules();
HandleTable<Function>& functions();
HandleTable<Library>& libraries();
HandleTable<Kernel>& kernel_handles();

}  // namespace gpupool::simgpu
