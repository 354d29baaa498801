#include "simgpu/machine/description.h"

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <stdexcept>

#define TOML_EXCEPTIONS 1
// A file that the parser did not expect is wrong, and no reason to end the process. (Some of its
// assertions are in noexcept functions: about itself, not the file.)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wterminate"
#define TOML_ASSERT(condition)                                                 \
  do {                                                                         \
    if (!(condition)) throw std::runtime_error("it cannot be parsed as TOML"); \
  } while (false)
#include <toml++/toml.h>
#pragma GCC diagnostic pop

namespace gpupool::simgpu {
namespace {

constexpr size_t kLongestName = 95;  // of a card, as NVML can give it
constexpr std::string_view kEmptyKernels = " [EMPTY KERNELS]";

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int64_t integer(const toml::table& table, const char* key, int64_t otherwise, int64_t least,
                int64_t most) {
  const toml::node* node = table.get(key);
  if (!node) return otherwise;
  auto value = node->value_exact<int64_t>();
  if (!value) throw Wrong(std::string("'") + key + "' is not an integer");
  if (*value < least || *value > most) {
    throw Wrong(std::string("'") + key + "' is " + std::to_string(*value) + ", but must be from " +
                std::to_string(least) + " to " + std::to_string(most));
  }
  return *value;
}

std::string text(const toml::table& table, const char* key, const std::string& otherwise) {
  const toml::node* node = table.get(key);
  if (!node) return otherwise;
  auto value = node->value_exact<std::string>();
  if (!value) throw Wrong(std::string("'") + key + "' is not a string");
  return *value;
}

void check_keys(const toml::table& table, const std::set<std::string>& known, const char* where) {
  for (const auto& [key, node] : table) {
    if (!known.count(std::string(key.str()))) {
      throw Wrong("unknown key '" + std::string(key.str()) + "' in " + where);
    }
  }
}

uint64_t mix(uint64_t value) {  // splitmix64's finaliser
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

std::array<uint8_t, 16> derived_uuid(const std::string& host, size_t index) {
  std::array<uint8_t, 16> out{};
  for (int half = 0; half < 2; ++half) {
    uint64_t hash = mix(half * 0x51ull + index);
    for (unsigned char c : "gpupool simulated GPU of " + host) hash = mix(hash ^ c);
    for (int i = 0; i < 8; ++i) out[half * 8 + i] = static_cast<uint8_t>(hash >> (8 * i));
  }
  out[6] = (out[6] & 0x0F) | 0x80;  // version 8 (RFC 9562): a custom derivation
  out[8] = (out[8] & 0x3F) | 0x80;
  return out;
}

std::array<uint8_t, 16> parsed_uuid(std::string value) {
  if (value.rfind("GPU-", 0) == 0) value = value.substr(4);
  std::string digits;
  for (char c : value) {
    if (c != '-') digits += c;
  }
  if (digits.size() != 32 ||
      digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    throw Wrong("'uuid' is not a UUID: " + value);
  }
  std::array<uint8_t, 16> out{};
  for (size_t i = 0; i < 16; ++i) {
    out[i] = static_cast<uint8_t>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
  }
  return out;
}

// What a card of this compute capability has, as the CUDA programming guide's table of technical
// specifications gives it.
void set_capability(GpuDescription& gpu, const std::string& capability) {
  DeviceModel& m = gpu.model;
  if (capability == "8.0") {
    m.cc_major = 8, m.cc_minor = 0, m.multiprocessors = 108;
    m.max_threads_per_sm = 2048, m.max_blocks_per_sm = 32;
    m.shared_per_block_optin = 163 * 1024, m.shared_per_sm = 164 * 1024;
    m.clock_khz = 1410000;
    gpu.pci_device_id = 0x20B210DE;
  } else if (capability == "8.6") {
    m.cc_major = 8, m.cc_minor = 6, m.multiprocessors = 84;
    m.max_threads_per_sm = 1536, m.max_blocks_per_sm = 16;
    m.shared_per_block_optin = 99 * 1024, m.shared_per_sm = 100 * 1024;
    m.clock_khz = 1740000;
    gpu.pci_device_id = 0x223510DE;
    gpu.l2_cache_bytes = 6u << 20, gpu.memory_bus_bits = 384, gpu.memory_clock_khz = 7251000;
    gpu.power_limit_mw = 300000;
  } else if (capability == "7.5") {
    m.cc_major = 7, m.cc_minor = 5, m.multiprocessors = 40;
    m.max_threads_per_sm = 1024, m.max_blocks_per_sm = 16;
    m.shared_per_block_optin = 64 * 1024, m.shared_per_sm = 64 * 1024;
    m.clock_khz = 1590000;
    gpu.pci_device_id = 0x1EB810DE;
    gpu.l2_cache_bytes = 4u << 20, gpu.memory_bus_bits = 256, gpu.memory_clock_khz = 5001000;
    gpu.power_limit_mw = 70000;
  } else {
    throw Wrong("'compute_capability' is \"" + capability +
                "\", but the simulator knows \"7.5\", \"8.0\" and \"8.6\"");
  }
}

GpuDescription read_gpu(const toml::table& table, const std::string& host, size_t index) {
  check_keys(table,
             {"name", "memory_mib", "compute_capability", "multiprocessors", "clock_khz", "uuid",
              "serial", "pci", "numa_node", "count", "context_memory_mib", "shared_per_block_kib",
              "ecc", "power_limit_w"},
             "[[gpu]]");
  GpuDescription gpu;
  set_capability(gpu, text(table, "compute_capability", "8.0"));
  gpu.memory_bytes = static_cast<uint64_t>(integer(table, "memory_mib", 81920, 64, 8 << 20)) << 20;
  gpu.name = text(table, "name",
                  "gpupool simulated GPU " + std::to_string(gpu.memory_bytes >> 30) + "GiB");
  if (gpu.name.empty() || gpu.name.size() > kLongestName)
    throw Wrong("'name' must have 1 to 95 bytes");
  gpu.context_bytes = static_cast<uint64_t>(integer(table, "context_memory_mib", 0, 0, 4096)) << 20;
  gpu.model.multiprocessors =
      static_cast<int>(integer(table, "multiprocessors", gpu.model.multiprocessors, 1, 1024));
  gpu.model.clock_khz =
      static_cast<uint32_t>(integer(table, "clock_khz", gpu.model.clock_khz, 1000, 10000000));
  gpu.power_limit_mw = static_cast<uint32_t>(
      integer(table, "power_limit_w", gpu.power_limit_mw / 1000, 1, 10000) * 1000);
  int64_t shared = integer(table, "shared_per_block_kib", gpu.model.shared_per_block_optin / 1024,
                           48, gpu.model.shared_per_sm / 1024);
  gpu.model.shared_per_block_optin = static_cast<uint32_t>(shared) * 1024;
  gpu.numa_node = static_cast<int>(integer(table, "numa_node", -1, -1, 1023));
  if (const toml::node* ecc = table.get("ecc")) {
    auto value = ecc->value_exact<bool>();
    if (!value) throw Wrong("'ecc' is not true or false");
    gpu.ecc = *value;
  }
  std::string uuid = text(table, "uuid", "");
  gpu.uuid = uuid.empty() ? derived_uuid(host, index) : parsed_uuid(uuid);
  char serial[32];
  snprintf(serial, sizeof serial, "SIM%02X%02X%02X%02X%04zu", gpu.uuid[0], gpu.uuid[1], gpu.uuid[2],
           gpu.uuid[3], index);
  gpu.serial = text(table, "serial", serial);
  if (gpu.serial.size() > 29) throw Wrong("'serial' is longer than 29 bytes");
  std::string pci = text(table, "pci", "");
  if (pci.empty()) {
    gpu.pci_bus = static_cast<uint32_t>(1 + index);
  } else {
    unsigned function = 0;
    int used = 0;
    if (sscanf(pci.c_str(), "%x:%x:%x.%x%n", &gpu.pci_domain, &gpu.pci_bus, &gpu.pci_device,
               &function, &used) != 4 ||
        static_cast<size_t>(used) != pci.size() || function != 0 || gpu.pci_domain > 0xFFFF ||
        gpu.pci_bus > 0xFF || gpu.pci_device > 0x1F) {
      throw Wrong("'pci' is \"" + pci + "\", but must look like \"0000:01:00.0\"");
    }
  }
  return gpu;
}

MachineDescription read_machine(const std::string& path) {
  toml::table file = toml::parse_file(path);
  check_keys(file,
             {"host", "driver_version", "cuda_version", "kernel_instruction_limit",
              "kernel_time_limit_ms", "gpu"},
             "the file");
  MachineDescription machine;
  machine.path = path;
  char name[256] = "localhost";
  gethostname(name, sizeof name - 1);
  std::string host = text(file, "host", name);
  const char* empty_kernels = getenv("GPUPOOL_SIMGPU_EMPTY_KERNELS");
  machine.empty_kernels = empty_kernels && *empty_kernels && strcmp(empty_kernels, "0") != 0;
  machine.driver_version = text(file, "driver_version", machine.driver_version);
  if (machine.driver_version.size() > 79) throw Wrong("'driver_version' is longer than 79 bytes");
  machine.cuda_version = static_cast<int>(integer(file, "cuda_version", 13000, 11000, 13990));
  machine.kernel_instruction_limit =
      static_cast<uint64_t>(integer(file, "kernel_instruction_limit", 0, 0, INT64_MAX));
  machine.kernel_time_limit_ms =
      static_cast<uint64_t>(integer(file, "kernel_time_limit_ms", 0, 0, 86'400'000));
  const toml::node* gpus = file.get("gpu");
  if (!gpus) return machine;  // a machine without any card is a machine
  const toml::array* list = gpus->as_array();
  if (!list) throw Wrong("'gpu' must be a list of tables: [[gpu]]");
  std::set<std::string> places, uuids;
  for (const toml::node& node : *list) {
    const toml::table* table = node.as_table();
    if (!table) throw Wrong("'gpu' must be a list of tables: [[gpu]]");
    int64_t count = integer(*table, "count", 1, 1, 16);
    if (count > 1 && (table->get("pci") || table->get("uuid") || table->get("serial"))) {
      throw Wrong("'pci', 'uuid' and 'serial' belong to one card: leave out 'count'");
    }
    for (int64_t i = 0; i < count; ++i) {
      if (machine.gpus.size() == 16) throw Wrong("more than 16 cards");
      GpuDescription gpu = read_gpu(*table, host, machine.gpus.size());
      if (!places.insert(gpu.pci_bus_id()).second) {
        throw Wrong("two cards have the PCI address " + gpu.pci_bus_id());
      }
      if (!uuids.insert(gpu.uuid_text()).second) {
        throw Wrong("two cards have the UUID " + gpu.uuid_text());
      }
      // Whoever sees results of this machine shall see that they may be no results.
      if (machine.empty_kernels) {
        gpu.name = gpu.name.substr(0, kLongestName - kEmptyKernels.size());
        gpu.name += kEmptyKernels;
      }
      machine.gpus.push_back(std::move(gpu));
    }
  }
  return machine;
}

}  // namespace

std::string GpuDescription::uuid_text() const {
  char out[48];
  const uint8_t* u = uuid.data();
  snprintf(out, sizeof out,
           "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
           u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
           u[15]);
  return out;
}

std::string GpuDescription::pci_bus_id() const {
  char out[32];
  snprintf(out, sizeof out, "%04x:%02x:%02x.0", pci_domain, pci_bus, pci_device);
  return out;
}

MachineResult load_machine(const std::string& beside) {
  MachineResult result;
  const char* named = getenv("GPUPOOL_SIMGPU_MACHINE");
  std::string path = named && *named ? named : beside + "/machine.toml";
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    result.error =
        "The machine file " + path + " does not exist; GPUPOOL_SIMGPU_MACHINE names one.";
    return result;
  }
  try {
    result.machine = read_machine(path);
  } catch (const toml::parse_error& wrong) {
    result.error = "The machine file " + path + " is not valid TOML (line " +
                   std::to_string(wrong.source().begin.line) +
                   "): " + std::string(wrong.description()) + ".";
  } catch (const std::exception& wrong) {
    result.error = "The machine file " + path + " is wrong: " + wrong.what() + ".";
  }
  return result;
}

std::string library_directory(const void* symbol) {
  Dl_info info;
  if (!dladdr(symbol, &info) || !info.dli_fname) return "";
  std::error_code error;
  auto path = std::filesystem::canonical(info.dli_fname, error);
  return error ? "" : path.parent_path().string();
}

std::string state_directory() {
  const char* named = getenv("GPUPOOL_SIMGPU_STATE_DIR");
  return named && *named ? named : "/dev/shm/gpupool-simgpu-shared";
}

}  // namespace gpupool::simgpu
