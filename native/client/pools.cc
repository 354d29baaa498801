#define GPUPOOL_CUDA_ABI_EXACT 1
#include "client/pools.h"

#include <algorithm>

#include "client/log.h"
#include "client/pool_space.h"

namespace gpupool::client {

struct PoolState {
  Device* device = nullptr;
  CUmemoryPool handle = nullptr;
  uint64_t max_bytes = 0;
  bool standard = false;
  bool destroyed = false;
  PoolSpace space;
  uint64_t threshold = 0;
  PoolStatistics numbers;
  std::atomic<int> reuse[3]{1, 1, 1};
};

namespace {

constexpr uint64_t kGranule = 2 * 1024 * 1024;
constexpr uint64_t kSmall = 1024 * 1024;         // up to this size allocations share a chunk
constexpr uint64_t kMostAtOnce = 16 * kGranule;  // of a chunk for small allocations

struct Live {
  std::shared_ptr<PoolState> pool;
  uint64_t bytes = 0;  // asked for
};

struct Pools {
  std::mutex lock;
  Table<Pool, Kind::kPool> table;
  std::map<const Device*, Pool*> standard, current;
  std::vector<std::shared_ptr<PoolState>> all;  // with memory, or known to the program
  std::map<uint64_t, Live> live;
  std::atomic<uint64_t> time{1};
  std::atomic<bool> used{false};
};

Pools& pools() {
  static auto* const instance = new Pools;
  return *instance;
}

PoolSpace::StreamKey key_of(const Stream* stream) {
  return stream == nullptr ? uint64_t{1} : stream->handle;
}

Context* context_of(const PoolSpace::Chunk& chunk) {
  return const_cast<Context*>(static_cast<const Context*>(chunk.owner));
}

// With the lock held. The worker keeps what work that was submitted may still touch.
bool give_back(PoolState& pool, uint64_t keep, bool pending) {
  const auto chunks = pool.space.release(keep, pending);
  for (const auto& chunk : chunks) free_device(context_of(chunk), chunk.base);
  pool.numbers.reserved = pool.space.reserved();
  return !chunks.empty();
}

// With the lock held: a destroyed pool ends with its last allocation.
void end_if_unused(const std::shared_ptr<PoolState>& pool) {
  if (!pool->destroyed || pool->numbers.used != 0) return;
  give_back(*pool, 0, true);
  std::erase(pools().all, pool);
}

CUresult request(Context* context, uint64_t bytes, uint64_t* address) {
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(Operation::kMemAllocV2), context->wire_id(), 8,
      [bytes](wire::Encoder& encoder) { encoder.scalar(bytes); }, &call);
  if (result != CUDA_SUCCESS) return result;
  wire::Decoder decoder = call.decoder();
  *address = decoder.scalar();
  const Device& device = *context->device;
  if (!decoder.ok() || *address < device.arena_base ||
      *address - device.arena_base > device.arena_bytes - bytes) {
    log(Level::kError, "the worker gave an address that cannot be right");
    return CUDA_ERROR_UNKNOWN;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult allocate_device(Context* context, uint64_t bytes, uint64_t* address, bool may_reclaim) {
  // Answered without asking only where it can never be: a slice may have grown meanwhile.
  if (bytes > context->device->arena_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = request(context, bytes, address);
  if (result == CUDA_ERROR_OUT_OF_MEMORY && may_reclaim && reclaim_pools(context->device)) {
    result = request(context, bytes, address);
  }
  return settle(context, result);
}

bool reclaim_pools(const Device* device) {
  std::lock_guard guard(pools().lock);
  bool any = false;
  for (const auto& pool : pools().all) {
    if (pool->device == device) any = give_back(*pool, 0, true) || any;
  }
  return any;
}

void free_device(Context* context, uint64_t address) {
  Channel::Post post(channel_of(context), op(Operation::kMemFreeV2), context->wire_id(), 8);
  post.encoder().scalar(address);
}

// ---- Pools ------------------------------------------------------------------------------------

Pool* create_pool(Device* device, uint64_t max_bytes) {
  Pool* pool = pools().table.allocate();
  if (pool == nullptr) return nullptr;
  auto state = std::make_shared<PoolState>();
  state->device = device;
  state->handle = reinterpret_cast<CUmemoryPool>(pool->handle);
  state->max_bytes = max_bytes;
  pool->context = nullptr;
  pool->state = state;
  {
    std::lock_guard guard(pools().lock);
    pools().all.push_back(std::move(state));
  }
  pools().table.publish(pool);
  return pool;
}

bool destroy_pool(CUmemoryPool handle) {
  Pool* pool = find_pool(handle);
  if (pool == nullptr || pool->state->standard) return false;
  const std::shared_ptr<PoolState> state = pool->state;
  if (!pools().table.retire(pool)) return false;
  std::lock_guard guard(pools().lock);
  std::erase_if(pools().current, [pool](const auto& entry) { return entry.second == pool; });
  state->destroyed = true;
  end_if_unused(state);
  return true;
}

Pool* find_pool(CUmemoryPool handle) {
  return pools().table.find(reinterpret_cast<uint64_t>(handle));
}

Pool* default_pool(Device* device) {
  {
    std::lock_guard guard(pools().lock);
    const auto found = pools().standard.find(device);
    if (found != pools().standard.end()) return found->second;
  }
  Pool* made = create_pool(device, 0);
  if (made == nullptr) return nullptr;
  made->state->standard = true;
  std::lock_guard guard(pools().lock);
  const auto [entry, fresh] = pools().standard.emplace(device, made);
  if (!fresh) {  // another thread was faster
    std::erase(pools().all, made->state);
    pools().table.retire(made);
  }
  return entry->second;
}

Pool* current_pool(Device* device) {
  {
    std::lock_guard guard(pools().lock);
    const auto found = pools().current.find(device);
    if (found != pools().current.end()) return found->second;
  }
  return default_pool(device);
}

bool set_current_pool(Device* device, Pool* pool) {
  if (pool->state->device != device) return false;
  std::lock_guard guard(pools().lock);
  pools().current[device] = pool;
  return true;
}

Device* device_of(const Pool* pool) { return pool->state->device; }

// ---- Allocating and freeing -------------------------------------------------------------------

CUresult allocate_from(Pool* pool, Context* context, const Stream* stream, uint64_t bytes,
                       uint64_t* address) {
  const std::shared_ptr<PoolState> state = pool->state;
  if (bytes > context->device->arena_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t least = (bytes + kGranule - 1) / kGranule * kGranule;
  pools().used.store(true, std::memory_order_relaxed);
  std::unique_lock guard(pools().lock);
  while (!state->space.take(context, key_of(stream), bytes, address)) {
    // A pool of many small allocations grows in larger steps.
    const uint64_t reserved = state->space.reserved();
    uint64_t chunk = least;
    if (bytes <= kSmall) {
      chunk = std::clamp(reserved / 4 / kGranule * kGranule, kGranule, kMostAtOnce);
    }
    if (state->max_bytes != 0) {
      if (reserved + least > state->max_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
      chunk = std::min(chunk, (state->max_bytes - reserved) / kGranule * kGranule);
    }
    // Others go on meanwhile: the worker may wait for the device before it has the memory.
    guard.unlock();
    uint64_t base = 0;
    CUresult result = allocate_device(context, chunk, &base, chunk == least);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && chunk != least) {
      chunk = least;
      result = allocate_device(context, chunk, &base);
    }
    if (result != CUDA_SUCCESS) return result;
    guard.lock();
    state->space.add({base, chunk, context});
    state->numbers.reserved = state->space.reserved();
    state->numbers.reserved_high = std::max(state->numbers.reserved_high, state->numbers.reserved);
  }
  Range range;
  range.base = *address;
  range.bytes = bytes;
  range.type = Range::Type::kPool;
  range.context = context;
  range.pool = state->handle;
  if (!Process::get().ranges.add(range)) {
    state->space.give(*address, PoolSpace::kAnyStream, 0);
    log(Level::kError, "the worker gave memory that is in use already");
    return CUDA_ERROR_UNKNOWN;
  }
  pools().live[*address] = {state, bytes};
  state->numbers.used += bytes;
  state->numbers.used_high = std::max(state->numbers.used_high, state->numbers.used);
  return CUDA_SUCCESS;
}

bool free_to_pool(uint64_t address, Context* context, const Stream* stream) {
  std::lock_guard guard(pools().lock);
  const auto found = pools().live.find(address);
  if (found == pools().live.end()) return false;
  if (!Process::get().ranges.remove(address, Range::Type::kPool)) return false;
  const Live live = found->second;
  pools().live.erase(found);
  const uint64_t key = context == nullptr ? PoolSpace::kAnyStream : key_of(stream);
  live.pool->space.give(address, key, pools().time.load(std::memory_order_relaxed));
  live.pool->numbers.used -= live.bytes;
  end_if_unused(live.pool);
  return true;
}

// ---- What pools say and keep ------------------------------------------------------------------

PoolStatistics statistics(const Pool* pool) {
  std::lock_guard guard(pools().lock);
  return pool->state->numbers;
}

void reset_high(const Pool* pool, CUmemPool_attribute attribute) {
  std::lock_guard guard(pools().lock);
  PoolStatistics& numbers = pool->state->numbers;
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) {
    numbers.reserved_high = numbers.reserved;
  } else {
    numbers.used_high = numbers.used;
  }
}

uint64_t release_threshold(const Pool* pool) {
  std::lock_guard guard(pools().lock);
  return pool->state->threshold;
}

void set_release_threshold(const Pool* pool, uint64_t bytes) {
  std::lock_guard guard(pools().lock);
  pool->state->threshold = bytes;
}

std::atomic<int>& reuse_flag(const Pool* pool, CUmemPool_attribute attribute) {
  return pool->state->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
}

void trim(Pool* pool, uint64_t keep) {
  std::lock_guard guard(pools().lock);
  give_back(*pool->state, keep, false);
}

uint64_t pool_time() {
  if (!pools().used.load(std::memory_order_relaxed)) return 0;
  return pools().time.fetch_add(1, std::memory_order_relaxed);
}

namespace {
void note(Context* context, PoolSpace::StreamKey key, uint64_t time) {
  if (time == 0) return;
  std::lock_guard guard(pools().lock);
  for (const auto& pool : pools().all) {
    if (pool->device != context->device) continue;
    pool->space.observed(context, key, time);
    if (pool->space.reserved() > pool->threshold) give_back(*pool, pool->threshold, false);
  }
}
}  // namespace

void pool_observed(Context* context, const Stream* stream, uint64_t time) {
  note(stream == nullptr ? context : stream->context, key_of(stream), time);
}

void pool_observed_all(Context* context, uint64_t time) {
  note(context, PoolSpace::kAnyStream, time);
}

void drop_pool_memory_of(const Context* context) {
  if (!pools().used.load(std::memory_order_relaxed)) return;
  std::lock_guard guard(pools().lock);
  for (auto at = pools().live.begin(); at != pools().live.end();) {
    // Ranges of the context are gone already, or go with it.
    const auto range = Process::get().ranges.find(at->first);
    if (range && range->context != context) {
      ++at;
      continue;
    }
    at->second.pool->numbers.used -= at->second.bytes;
    at = pools().live.erase(at);
  }
  for (const auto& pool : pools().all) {
    pool->space.drop(context);
    pool->numbers.reserved = pool->space.reserved();
  }
  std::erase_if(pools().all,
                [](const auto& pool) { return pool->destroyed && pool->numbers.used == 0; });
}

}  // namespace gpupool::client
