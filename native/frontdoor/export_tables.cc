// cuGetExportTable: the private tables that the CUDA runtime and NVIDIA's libraries ask for. What
// each slot has to do was found by watching those clients; doc/interoperability.md has the list.
#include <stdio.h>
#include <string.h>

#include <atomic>
#include <iterator>
#include <utility>

#include "api/cuda_abi.h"
#include "frontdoor/context_storage.h"
#include "frontdoor/hooks.h"
#include "frontdoor/log.h"
#include "frontdoor/selftest.h"

#define GPUPOOL_EXPORT extern "C" __attribute__((visibility("default"))) CUresult

namespace gpupool::frontdoor {
namespace {

using Slot = const void*;

template <typename F>
Slot slot(F* function) {
  return reinterpret_cast<Slot>(function);
}

enum TableNumber {
  kRuntime,
  kToolsHooks,
  kToolsTls,
  kToolsContext,
  kChecks,
  kSelfTest,
  kTma,
  kToolsModule
};
constexpr const char* kTableNames[] = {"CUDART_INTERFACE", "TOOLS_RUNTIME_CALLBACK_HOOKS",
                                       "TOOLS_TLS",        "TOOLS_CONTEXT",
                                       "CONTEXT_CHECKS",   "INTEGRITY_CHECK",
                                       "1734dc26",         "TOOLS_MODULE"};

// A slot that nobody is known to need. That it is called is worth knowing when a client fails.
template <int table, int index>
CUresult unknown_slot() {
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    log(LogLevel::kInfo, "private table %s: slot %d was called and is not supported",
        kTableNames[table], index);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Slot 0 of a table is its size in bytes; the functions follow.
template <int table, size_t slots>
struct Table {
  Slot entries[slots];

  Table() { fill(std::make_index_sequence<slots>()); }

  template <size_t... index>
  void fill(std::index_sequence<index...>) {
    ((entries[index] = slot(&unknown_slot<table, static_cast<int>(index)>)), ...);
    entries[0] = reinterpret_cast<Slot>(sizeof entries);
  }
};

CUresult succeed() { return CUDA_SUCCESS; }

// --- CUDART_INTERFACE
CUresult runtime_primary_context(CUcontext* context, int device) {
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return primary_context_handle(device, context);
}

CUresult runtime_load_module(CUmodule* module, const void* wrapper, void*, void*, int) {
  return cuModuleLoadData(module, wrapper);
}

// --- TOOLS_RUNTIME_CALLBACK_HOOKS: arrays of "enabled" flags of the profiling interface, all off.
// They are indexed by its callback numbers; too short an array reads as "on".
uint32_t g_callbacks_enabled[1024];
uint32_t g_domains_enabled[14];

CUresult hooks_callbacks(void** buffer, size_t* count) {
  *buffer = g_callbacks_enabled;
  *count = std::size(g_callbacks_enabled);
  return CUDA_SUCCESS;
}

CUresult hooks_domains(void** buffer, size_t* count) {
  *buffer = g_domains_enabled;
  *count = std::size(g_domains_enabled);
  return CUDA_SUCCESS;
}

// --- TOOLS_TLS
CUresult tls_current_context(CUcontext* context) { return cuCtxGetCurrent(context); }

// --- TOOLS_CONTEXT
CUresult tools_context_id(CUcontext context, unsigned long long* id) {
  return cuCtxGetId(context, id);
}

uint64_t g_stream_object[64];

CUresult tools_stream_object(CUcontext, CUstream, void** object) {
  *object = g_stream_object;
  return CUDA_SUCCESS;
}

CUresult tools_stream_value(CUcontext, void*, uint64_t* value) {
  *value = 0;
  return CUDA_SUCCESS;
}

// --- CONTEXT_CHECKS
CUresult checks_context(CUcontext, uint32_t* first, void**) {
  *first = 0;
  return CUDA_SUCCESS;
}

// --- TOOLS_MODULE: calls back for each function of the module until the client takes one; says
// whether it did (a boolean, not a CUresult).
using ModuleVisitor = int (*)(void* user, CUfunction function, void* unused);

int tools_visit_module(CUcontext, CUmodule module, ModuleVisitor visit, void* user) {
  unsigned count = 0;
  if (cuModuleGetFunctionCount(&count, module) != CUDA_SUCCESS || count == 0) return 0;
  auto* functions = new CUfunction[count];
  int taken = 0;
  if (cuModuleEnumerateFunctions(functions, count, module) == CUDA_SUCCESS) {
    for (unsigned i = 0; i < count && taken == 0; ++i)
      taken = visit(user, functions[i], nullptr) == 0;
  }
  delete[] functions;
  return taken;
}

struct Tables {
  Table<kRuntime, 13> runtime;
  Table<kToolsHooks, 7> tools_hooks;
  Table<kToolsTls, 4> tools_tls;
  Table<kToolsContext, 95> tools_context;
  Table<kChecks, 4> checks;
  Table<kSelfTest, 3> self_test_table;
  Table<kTma, 16> tma;  // cuBLASLt crashes without it and goes on when every slot refuses
  Table<kToolsModule, 16> tools_module;
  // The one table without a size.
  Slot storage[4] = {slot(&storage_put), slot(&storage_delete), slot(&storage_get), slot(&succeed)};

  Tables() {
    runtime.entries[2] = slot(&runtime_primary_context);
    runtime.entries[6] = slot(&runtime_load_module);
    runtime.entries[7] = slot(&succeed);
    runtime.entries[12] = slot(&succeed);
    tools_hooks.entries[2] = slot(&hooks_callbacks);
    tools_hooks.entries[6] = slot(&hooks_domains);
    tools_tls.entries[2] = slot(&tls_current_context);
    tools_context.entries[4] = slot(&tools_context_id);
    tools_context.entries[39] = slot(&tools_stream_value);
    tools_context.entries[51] = slot(&tools_stream_object);
    checks.entries[2] = slot(&checks_context);
    checks.entries[3] = slot(&succeed);
    self_test_table.entries[1] = slot(&self_test);
    tools_module.entries[7] = slot(&tools_visit_module);
    set_self_test_tables(runtime.entries, self_test_table.entries);
  }
};

// All copies of the runtime in a process get the same tables, until the process ends.
const Tables& tables() {
  static const Tables* const instance = new Tables;
  return *instance;
}

struct KnownTable {
  const char* uuid;
  Slot (*get)();  // nullptr: known, and clients do well without it
};

const KnownTable kKnown[] = {
    {"6bd5fb6c-5bf4-e74a-8987-d93912fd9df9", [] { return Slot(tables().runtime.entries); }},
    {"a094798c-2e74-2e74-93f2-0800200c0a66", [] { return Slot(tables().tools_hooks.entries); }},
    {"42d85a81-23f6-cb47-8298-f6e78a3aecdc", [] { return Slot(tables().tools_tls.entries); }},
    {"21318c60-9714-3248-8ca6-41ff7324c8f2", [] { return Slot(tables().tools_context.entries); }},
    {"c693336e-1121-df11-a8c3-68f355d89593", [] { return Slot(tables().storage); }},
    {"263e8860-7cd2-6143-92f6-bbd5006dfa7e", [] { return Slot(tables().checks.entries); }},
    {"d4082055-bde6-704b-8d34-ba123c66e1f2", [] { return Slot(tables().self_test_table.entries); }},
    {"1734dc26-800d-4745-8726-c0f1e7dd8bca", [] { return Slot(tables().tma.entries); }},
    {"6e163fbe-b958-444d-835c-e182aff1991e", [] { return Slot(tables().tools_module.entries); }},
    {"f8cff951-2146-8b4e-b9e2-fb469e7c0dd9", nullptr},
    {"da9151d3-3ae6-cc41-a5c0-4f26d533e328", nullptr},
};

constexpr size_t kUuidText = 37;

void write_uuid(const CUuuid& uuid, char (&text)[kUuidText]) {
  char* out = text;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) *out++ = '-';
    out += snprintf(out, 3, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
}

}  // namespace
}  // namespace gpupool::frontdoor

GPUPOOL_EXPORT cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  using namespace gpupool::frontdoor;
  if (ppExportTable == nullptr || pExportTableId == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *ppExportTable = nullptr;
  char uuid[kUuidText];
  write_uuid(*pExportTableId, uuid);
  for (const KnownTable& known : kKnown) {
    if (strcmp(known.uuid, uuid) != 0) continue;
    if (known.get == nullptr) return CUDA_ERROR_NOT_FOUND;
    *ppExportTable = known.get();
    return CUDA_SUCCESS;
  }
  log(LogLevel::kWarning,
      "a client asked for the private table %s, which this library does not know; if the client "
      "fails, this may"
      " be why",
      uuid);
  return CUDA_ERROR_NOT_FOUND;
}
