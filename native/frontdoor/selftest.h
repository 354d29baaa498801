// The answer to the CUDA runtime's self-test of its driver. See selftest.cc.
#pragma once

#include <cstdint>

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

// Slot 1 of the table that the runtime asks for it. `version`: the runtime's, counted up at each of
// three calls; `unix_seconds`: its clock; `result`: 16 bytes.
CUresult self_test(uint32_t version, uint64_t unix_seconds, uint64_t result[2]);

// The tables whose addresses are part of the answer; set once by export_tables.cc.
void set_self_test_tables(const void* runtime_table, const void* self_test_table);

}  // namespace gpupool::frontdoor
