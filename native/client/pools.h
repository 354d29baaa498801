// Stream-ordered allocation. A pool is the client's: it gets chunks of device memory from the
// worker, which charges them to the slice, and hands out pieces of them without asking anybody.
// What is freed in a stream can be used again in that stream at once, and by others when somebody
// has waited for the stream.
#pragma once

#include <memory>

#include "client/state.h"

namespace gpupool::client {

struct PoolState;

struct Pool : Object {
  std::shared_ptr<PoolState> state;
};

struct PoolStatistics {
  uint64_t reserved = 0, reserved_high = 0, used = 0, used_high = 0;
};

// Device memory from the worker: one round trip; charged to the slice there. What the device's
// pools keep unused is given up first if there is no room (unless `reclaim` is false).
CUresult allocate_device(Context* context, uint64_t bytes, uint64_t* address, bool reclaim = true);
// Not answered; the memory goes when the work that was submitted before is over.
void free_device(Context* context, uint64_t address);

// Gives up what the device's pools keep unused; false: that is nothing.
bool reclaim_pools(const Device* device);

// A pool of the device; `max_bytes` 0: as much as the slice has. Null: too many.
Pool* create_pool(Device* device, uint64_t max_bytes);
// Its memory goes when the last allocation does. False: no such pool, or a device's default pool.
bool destroy_pool(CUmemoryPool handle);
Pool* find_pool(CUmemoryPool handle);  // null: no such pool
Pool* default_pool(Device* device);    // null: too many pools
Pool* current_pool(Device* device);
bool set_current_pool(Device* device, Pool* pool);  // false: the pool is another device's
Device* device_of(const Pool* pool);

CUresult allocate_from(Pool* pool, Context* context, const Stream* stream, uint64_t bytes,
                       uint64_t* address);
// Ends an allocation of a pool, behind what is in the stream; `context` null: behind nothing, the
// program knows that all is over. False: `address` is no allocation of a pool.
bool free_to_pool(uint64_t address, Context* context, const Stream* stream);

PoolStatistics statistics(const Pool* pool);
void reset_high(const Pool* pool, CUmemPool_attribute attribute);
uint64_t release_threshold(const Pool* pool);
void set_release_threshold(const Pool* pool, uint64_t bytes);
std::atomic<int>& reuse_flag(const Pool* pool, CUmemPool_attribute attribute);
void trim(Pool* pool, uint64_t keep);

// A time before a synchronising call, and that the call has succeeded: for one stream (null: the
// legacy default stream), or for all streams of a context.
uint64_t pool_time();
void pool_observed(Context* context, const Stream* stream, uint64_t time);
void pool_observed_all(Context* context, uint64_t time);

void drop_pool_memory_of(const Context* context);  // the worker has freed it

}  // namespace gpupool::client
