// Sessions and what they do right.
#include <random>

#include "session_fixture.h"
#include "worker/books.h"

namespace gpupool::test {
namespace {

using wire::Encoder;
using wire::Operation;

TEST(Session, CopiesThereAndBack) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  constexpr uint64_t kBytes = 3'000'017;
  uint64_t address = 0;
  ASSERT_EQ(served.allocate(kBytes, &address), CUDA_SUCCESS);
  EXPECT_GE(address, kArenaBase);
  EXPECT_LT(address, kArenaBase + kArenaBytes);
  std::vector<uint8_t> data(kBytes);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint8_t>(i * 7 + i / 999);
  std::vector<carriers::Part> parts;
  for (size_t at = 0; at < data.size(); at += 1 << 20) {
    parts.push_back({data.data() + at, std::min<size_t>(1 << 20, data.size() - at)});
  }
  const wire::CopyToDevice to{address, kBytes, 0, 0, {1, 0}, 0, 0};
  served.add(
      Operation::kMemcpyHtoDAsyncV2, sizeof to, false, [&](Encoder& e) { e.put(to); },
      static_cast<int>(parts.size()));
  ASSERT_TRUE(served.send(parts));
  const wire::CopyFromDevice from{address, kBytes, 0, 0, {1, 0}, 0};
  const uint64_t call = served.add(Operation::kMemcpyDtoHAsyncV2, sizeof from, true,
                                   [&](Encoder& e) { e.put(from); });
  ASSERT_TRUE(served.send());
  Reply reply;
  ASSERT_TRUE(served.wait(call, &reply));
  EXPECT_EQ(reply.status, CUDA_SUCCESS);
  EXPECT_EQ(reply.bulk, data);
  EXPECT_TRUE(served.events.empty());
}

TEST(Session, CopiesRows) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  uint64_t address = 0;
  ASSERT_EQ(served.allocate(100 * 64, &address), CUDA_SUCCESS);
  std::vector<uint8_t> packed(100 * 24);
  for (size_t i = 0; i < packed.size(); i++) packed[i] = static_cast<uint8_t>(i ^ (i >> 5));
  const wire::CopyToDevice to{address, packed.size(), 64, 24, {1, 0}, wire::kCopyInline, 0};
  served.add(Operation::kMemcpyHtoDAsyncV2, sizeof to + packed.size(), false, [&](Encoder& e) {
    e.put(to);
    e.raw(packed.data(), packed.size());
  });
  const wire::CopyFromDevice from{address, packed.size(), 64, 24, {1, 0}, 0};
  const uint64_t call = served.add(Operation::kMemcpyDtoHAsyncV2, sizeof from, true,
                                   [&](Encoder& e) { e.put(from); });
  ASSERT_TRUE(served.send());
  Reply reply;
  ASSERT_TRUE(served.wait(call, &reply));
  EXPECT_EQ(reply.status, CUDA_SUCCESS);
  EXPECT_EQ(reply.bulk, packed);
}

TEST(Session, ChargesBeforeItAllocatesAndGivesBack) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  uint64_t first = 0, second = 0;
  EXPECT_EQ(served.allocate(kMemory + 1, &first), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(served.allocate(1ull << 60, &first), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(served.allocate(kMemory, &first), CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), kMemory);
  EXPECT_EQ(served.allocate(1, &second), CUDA_ERROR_OUT_OF_MEMORY);
  served.add(Operation::kMemFreeV2, 8, false, [&](Encoder& e) { e.scalar(first); });
  EXPECT_EQ(served.allocate(kMemory, &second), CUDA_SUCCESS);
  EXPECT_EQ(served.end().end, worker::SessionEnd::kClientGone);
  EXPECT_EQ(served.account.used.load(), 0u);
}

CUresult set_limit(Served& served, int64_t limit, uint64_t value, uint32_t context = 1) {
  const uint64_t call = served.add(
      Operation::kCtxSetLimit, 16, true,
      [&](Encoder& e) {
        e.scalar(static_cast<uint64_t>(limit));
        e.scalar(value);
      },
      0, context);
  Reply reply;
  if (!served.send() || !served.wait(call, &reply)) return CUDA_ERROR_UNKNOWN;
  return reply.status;
}

TEST(Session, ChargesWhatALimitSetsAside) {
  constexpr uint64_t kMib = 1 << 20;
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  // The driver's own heap has 8 MiB, its buffer of printf 1 MiB: those are the context's.
  for (auto [limit, own] : {std::pair{CU_LIMIT_MALLOC_HEAP_SIZE, 8 * kMib},
                            std::pair{CU_LIMIT_PRINTF_FIFO_SIZE, kMib}}) {
    EXPECT_EQ(set_limit(served, limit, own), CUDA_SUCCESS);
    EXPECT_EQ(served.account.used.load(), 0u);
    EXPECT_EQ(set_limit(served, limit, own + 100 * kMib), CUDA_SUCCESS);
    EXPECT_EQ(served.account.used.load(), 100 * kMib);
    EXPECT_EQ(set_limit(served, limit, own + 300 * kMib), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(set_limit(served, limit, ~uint64_t{0}), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(served.account.used.load(), 100 * kMib);
    EXPECT_EQ(set_limit(served, limit, 0), CUDA_SUCCESS);
    EXPECT_EQ(served.account.used.load(), 0u);
  }
  // A thread's stack is not charged in advance. What is no limit of this driver's, or of CUDA's:
  EXPECT_EQ(set_limit(served, CU_LIMIT_STACK_SIZE, 64 << 10), CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 0u);
  EXPECT_EQ(set_limit(served, CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 1), CUDA_ERROR_UNSUPPORTED_LIMIT);
  EXPECT_EQ(set_limit(served, CU_LIMIT_MAX, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(set_limit(served, -1, 1), CUDA_ERROR_INVALID_VALUE);
  // A context gives back what its limits took, and so does the session.
  ASSERT_EQ(served.create_context(2), CUDA_SUCCESS);
  EXPECT_EQ(set_limit(served, CU_LIMIT_MALLOC_HEAP_SIZE, 108 * kMib, 2), CUDA_SUCCESS);
  EXPECT_EQ(set_limit(served, CU_LIMIT_MALLOC_HEAP_SIZE, 58 * kMib), CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 150 * kMib);
  const wire::Handle second{2, 1};
  const uint64_t call = served.add(
      Operation::kCtxDestroyV2, sizeof second, true, [&](Encoder& e) { e.handle(second); }, 0, 2);
  Reply reply;
  ASSERT_TRUE(served.send());
  ASSERT_TRUE(served.wait(call, &reply));
  EXPECT_EQ(served.account.used.load(), 50 * kMib);
  EXPECT_EQ(served.end().end, worker::SessionEnd::kClientGone);
  EXPECT_EQ(served.account.used.load(), 0u);
}

TEST(Session, SmallAllocationsShareMemoryAndDoNotOverlap) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  std::map<uint64_t, uint64_t> ranges;
  std::mt19937 random(5);
  for (int i = 0; i < 300; i++) {
    const uint64_t bytes = 1 + random() % 20000;
    uint64_t address = 0;
    ASSERT_EQ(served.allocate(bytes, &address), CUDA_SUCCESS);
    EXPECT_EQ(address % 256, 0u);
    const auto next = ranges.upper_bound(address);
    if (next != ranges.end()) {
      EXPECT_LE(address + bytes, next->first);
    }
    if (next != ranges.begin()) {
      const auto before = std::prev(next);
      EXPECT_LE(before->first + before->second, address);
    }
    ranges[address] = bytes;
    if (i % 3 == 2) {
      const auto victim = std::next(ranges.begin(), static_cast<long>(random() % ranges.size()));
      served.add(Operation::kMemFreeV2, 8, false, [&](Encoder& e) { e.scalar(victim->first); });
      ranges.erase(victim);
    }
  }
  EXPECT_LE(served.account.used.load(), 16u << 20);
  served.end();
  EXPECT_EQ(served.account.used.load(), 0u);
}

TEST(Session, UnknownOperationsAreNotSupportedAndNothingElse) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  const uint64_t call = served.add(uint16_t{0x7123}, 16, true, [](Encoder& e) {
    e.scalar(1);
    e.scalar(2);
  });
  ASSERT_TRUE(served.send());
  Reply reply;
  ASSERT_TRUE(served.wait(call, &reply));
  EXPECT_EQ(reply.status, CUDA_ERROR_NOT_SUPPORTED);
  // One with bulk data that is not answered: told as an event, its data skipped.
  std::vector<uint8_t> data(700'000, 5);
  served.add(uint16_t{0x7123}, 0, false, [](Encoder&) {}, 1);
  ASSERT_TRUE(served.send({{data.data(), data.size()}}));
  EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
  ASSERT_EQ(served.events.size(), 1u);
  EXPECT_EQ(served.events[0].kind, wire::EventKind::kAsyncError);
  uint64_t word;
  memcpy(&word, served.events[0].body.data(), 8);
  EXPECT_EQ(word, static_cast<uint64_t>(CUDA_ERROR_NOT_SUPPORTED) | uint64_t{0x7123} << 32);
}

TEST(Session, EveryHandleAndRangeIsChecked) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  uint64_t address = 0;
  ASSERT_EQ(served.allocate(4096, &address), CUDA_SUCCESS);
  auto result_of = [&](Operation operation, size_t bytes, auto&& fill, uint32_t context = 1) {
    const uint64_t call = served.add(operation, bytes, true, fill, 0, context);
    Reply reply;
    EXPECT_TRUE(served.send());
    EXPECT_TRUE(served.wait(call, &reply)) << served.refusal;
    return reply.status;
  };
  auto read = [&](uint64_t from, uint64_t bytes, uint64_t pitch, uint64_t width) {
    const wire::CopyFromDevice body{from, bytes, pitch, width, {1, 0}, 0};
    return result_of(Operation::kMemcpyDtoHAsyncV2, sizeof body, [&](Encoder& e) { e.put(body); });
  };
  EXPECT_EQ(read(address, 4096, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(read(address, 4097, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(address - 1, 1, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(address, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(address, ~0ull, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(0, 1, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(reinterpret_cast<uint64_t>(&served), 8, 0, 0), CUDA_ERROR_INVALID_VALUE)
      << "the worker's own memory";
  EXPECT_EQ(read(address, 128, 64, 64), CUDA_SUCCESS);
  EXPECT_EQ(read(address, 128, 63, 64), CUDA_ERROR_INVALID_VALUE) << "rows that overlap";
  EXPECT_EQ(read(address, 128, 4096, 64), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(address, 1 << 20, ~0ull / 2, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(address, 100, 64, 64), CUDA_ERROR_INVALID_VALUE) << "half a row";

  const wire::Handle stale{5, 9};
  EXPECT_EQ(result_of(Operation::kStreamSynchronize, 8, [&](Encoder& e) { e.handle(stale); }),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(result_of(Operation::kStreamSynchronize, 8, [&](Encoder& e) { e.handle({2, 0}); }),
            CUDA_ERROR_INVALID_HANDLE)
      << "the per-thread stream is the client's to resolve";
  EXPECT_EQ(result_of(Operation::kEventQuery, 8, [&](Encoder& e) { e.handle({~0u, ~0u}); }),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(result_of(Operation::kLinkComplete, 8, [&](Encoder& e) { e.handle(stale); }),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(
      result_of(Operation::kCtxSynchronize, 0, [](Encoder&) {}, 77), CUDA_ERROR_INVALID_CONTEXT);
  const wire::Launch launch{stale, {1, 0}, {1, 1, 1}, {1, 1, 1}, 0, 0, {0, 0, 0}, 0};
  EXPECT_EQ(result_of(Operation::kLaunchKernel, sizeof launch, [&](Encoder& e) { e.put(launch); }),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(result_of(Operation::kMemFreeV2, 8, [&](Encoder& e) { e.scalar(address + 8); }),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(result_of(Operation::kMemFreeV2, 8, [&](Encoder& e) { e.scalar(address); }),
            CUDA_SUCCESS);
  EXPECT_EQ(result_of(Operation::kMemFreeV2, 8, [&](Encoder& e) { e.scalar(address); }),
            CUDA_ERROR_INVALID_VALUE)
      << "freed twice";
  EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
}

TEST(Session, MemoryThatAProgramMapsIsCheckedAndCharged) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  constexpr uint64_t kUnit = 2 << 20;
  auto ask = [&](Operation operation, std::vector<uint64_t> words, uint64_t* answer = nullptr) {
    const uint64_t call = served.add(operation, words.size() * 8, true, [&](Encoder& e) {
      for (uint64_t word : words) e.scalar(word);
    });
    Reply reply;
    EXPECT_TRUE(served.send());
    EXPECT_TRUE(served.wait(call, &reply)) << served.refusal;
    if (answer != nullptr && reply.body.size() >= 8) memcpy(answer, reply.body.data(), 8);
    return reply.status;
  };
  const uint64_t first = 1 | 1ull << 32, second = 2 | 1ull << 32;  // handles
  uint64_t base = 0, taken = 0;
  EXPECT_EQ(ask(Operation::kMemAddressReserve, {kUnit + 1, 0, 0}), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(Operation::kMemAddressReserve, {kUnit, 3, 0}), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(Operation::kMemAddressReserve, {1ull << 45, 0, 0}), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(ask(Operation::kMemAddressReserve, {4 * kUnit, 8 * kUnit, 0}, &base), CUDA_SUCCESS);
  EXPECT_EQ(base % (8 * kUnit), 0u);
  ASSERT_EQ(served.allocate(kUnit, &taken), CUDA_SUCCESS);
  EXPECT_TRUE(taken + kUnit <= base || taken >= base + 4 * kUnit) << "addresses given twice";
  EXPECT_EQ(ask(Operation::kMemCreate, {first, kMemory}), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(ask(Operation::kMemCreate, {first, 2 * kUnit}), CUDA_SUCCESS);
  EXPECT_EQ(ask(Operation::kMemCreate, {first, kUnit}), CUDA_ERROR_INVALID_VALUE)
      << "handle in use";
  ASSERT_EQ(ask(Operation::kMemCreate, {second, kUnit}), CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 4 * kUnit);
  EXPECT_EQ(ask(Operation::kMemMap, {taken, kUnit, 0, first}), CUDA_ERROR_INVALID_VALUE)
      << "addresses that were not reserved for it";
  EXPECT_EQ(ask(Operation::kMemMap, {base, 4 * kUnit, 0, first}), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(Operation::kMemMap, {base + 3 * kUnit, 2 * kUnit, 0, first}),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(Operation::kMemMap, {base, kUnit, ~0ull - kUnit + 1, first}),
            CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(ask(Operation::kMemMap, {base, 2 * kUnit, 0, first}), CUDA_SUCCESS);
  EXPECT_EQ(ask(Operation::kMemMap, {base + kUnit, kUnit, 0, second}), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(ask(Operation::kMemMap, {base + 2 * kUnit, kUnit, 0, second}), CUDA_SUCCESS);
  auto read = [&](uint64_t from, uint64_t bytes) {
    const wire::CopyFromDevice body{from, bytes, 0, 0, {1, 0}, 0};
    const uint64_t call = served.add(Operation::kMemcpyDtoHAsyncV2, sizeof body, true,
                                     [&](Encoder& e) { e.put(body); });
    Reply reply;
    EXPECT_TRUE(served.send() && served.wait(call, &reply));
    return reply.status;
  };
  EXPECT_EQ(read(base, 8), CUDA_ERROR_INVALID_VALUE) << "no right to it yet";
  EXPECT_EQ(ask(Operation::kMemSetAccess, {base, 4 * kUnit, 3}), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(ask(Operation::kMemSetAccess, {base, 3 * kUnit, 3}), CUDA_SUCCESS);
  EXPECT_EQ(read(base + kUnit, 2 * kUnit), CUDA_SUCCESS) << "over two mappings";
  EXPECT_EQ(read(base + kUnit, 2 * kUnit + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(Operation::kMemAddressFree, {base, 4 * kUnit}), CUDA_ERROR_INVALID_VALUE)
      << "mapped";
  EXPECT_EQ(ask(Operation::kMemRelease, {first}), CUDA_SUCCESS);
  EXPECT_EQ(ask(Operation::kMemRelease, {first}), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(read(base, 8), CUDA_SUCCESS) << "a mapping keeps its memory";
  EXPECT_EQ(served.account.used.load(), 4 * kUnit);
  EXPECT_EQ(ask(Operation::kMemUnmap, {base, kUnit}), CUDA_ERROR_INVALID_VALUE) << "half a mapping";
  EXPECT_EQ(ask(Operation::kMemUnmap, {base, 2 * kUnit}), CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 2 * kUnit);
  served.end();
  EXPECT_EQ(served.account.used.load(), 0u);
}

// Loads a module from `image`; its handle is {index, 1}.
Reply load_image(Served& served, const std::string& image, uint32_t index) {
  std::vector<carriers::Part> parts;
  for (size_t at = 0; at < image.size(); at += wire::kMaxBulkSegment) {
    parts.push_back({const_cast<char*>(image.data()) + at,
                     std::min<size_t>(image.size() - at, wire::kMaxBulkSegment)});
  }
  const wire::ModuleLoad body{{index, 1}, image.size(), 0, 0, -1, 0, 1, 0};
  const uint64_t call = served.add(
      Operation::kModuleLoadDataEx, sizeof body, true, [&](Encoder& e) { e.put(body); },
      static_cast<int>(parts.size()));
  Reply reply;
  EXPECT_TRUE(served.send(parts));
  EXPECT_TRUE(served.wait(call, &reply)) << served.refusal;
  return reply;
}

constexpr char kHead[] = ".version 6.5\n.target sm_70\n.address_size 64\n";

TEST(Session, VariablesAreChargedHoweverTheyAreDeclared) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  const std::string large = std::to_string(kMemory / 2 + 1);
  const std::string kernel = ".visible .entry k() { ret; }\n";
  uint32_t index = 1;
  for (const std::string& text : {
           ".global .b8 big[" + large + "+" + large + "];" + kernel,
           ".global .b8 a[" + large + "], b[" + large + "];" + kernel,
           ".visible .entry k() { .global .b8 big[2*" + large + "]; ret; }\n",
       }) {
    EXPECT_EQ(load_image(served, kHead + text, index++).status, CUDA_ERROR_OUT_OF_MEMORY) << text;
    EXPECT_EQ(served.account.used.load(), 0u);
  }
  // A text of which the memory isn't known does not load.
  EXPECT_EQ(load_image(served, kHead + kernel + "@@@", index++).status, CUDA_ERROR_INVALID_PTX);
  ASSERT_EQ(load_image(served, kHead + (".global .b8 big[" + large + "];") + kernel, index).status,
            CUDA_SUCCESS);
  EXPECT_GE(served.account.used.load(), kMemory / 2);
  served.end();
  EXPECT_EQ(served.account.used.load(), 0u);
}

TEST(Session, ImagesThatPointOutsideOfThemselvesAreRefused) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  const uint64_t wrapper[] = {0x1'466243B1, 0x1000, 0}, parts[] = {0x2'466243B1, 0x1000, 0x1000};
  const uint64_t fatbin[] = {0x10'0001'BA55ED50, 1ull << 40};
  uint8_t elf[64] =
      "\x7f"
      "ELF\x02\x01\x01\x33\x07";
  elf[16] = 2, elf[18] = 190, elf[20] = 1, elf[40 + 5] = 1 /* e_shoff 2^40 */, elf[48] = 0x50;
  elf[58] = 64, elf[60] = 100;
  auto text = [](const void* from, size_t bytes) {
    return std::string(static_cast<const char*>(from), bytes);
  };
  uint32_t index = 1;
  for (const std::string& image :
       {text(wrapper, sizeof wrapper), text(parts, sizeof parts), text(fatbin, sizeof fatbin),
        text(elf, sizeof elf), text(wrapper, 4), std::string(100, '\0')}) {
    const Reply reply = load_image(served, image, index++);
    EXPECT_EQ(reply.status, CUDA_ERROR_INVALID_IMAGE);
    const auto logs = wire::Decoder(reply.body.data(), reply.body.size()).get<wire::CompileLogs>();
    EXPECT_GT(logs.error_bytes, 0u) << "why";
  }
  EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
}

// Sends the first MiB of an image that is said to have `bytes`.
bool begin_image(Served& served, uint32_t index, uint64_t bytes, bool last, Reply* reply) {
  static std::vector<uint8_t> piece(wire::kMaxBulkSegment);
  std::vector<carriers::Part> parts = {{piece.data(), piece.size()}};
  const wire::ModuleLoad body{{index, 1}, bytes, 0, 0, -1, 0, 0, last ? 0u : 1u};
  const uint64_t call = served.add(
      Operation::kModuleLoadDataEx, sizeof body, last, [&](Encoder& e) { e.put(body); }, 1);
  if (!served.send(parts)) return false;
  return !last || served.wait(call, reply);
}

TEST(Session, TheHostsMemoryIsBounded) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  Reply reply;
  // Images that never end: as many as there is room for, whatever is sent of them.
  for (uint32_t i = 1; i <= 64; i++) {
    ASSERT_TRUE(begin_image(served, i, wire::kMaxImageBytes, false, nullptr));
    ASSERT_EQ(served.synchronize(), CUDA_SUCCESS) << served.refusal;
  }
  EXPECT_GT(served.account.host_used.load(), 0u);
  EXPECT_LE(served.account.host_used.load(), kHostMemory);
  // What there is no room for is refused when it ends, and goes on being skipped until then.
  ASSERT_TRUE(begin_image(served, 64, wire::kMaxImageBytes, false, nullptr));
  ASSERT_TRUE(begin_image(served, 64, wire::kMaxImageBytes, true, &reply)) << served.refusal;
  EXPECT_EQ(reply.status, CUDA_ERROR_OUT_OF_MEMORY);
  // Room comes back with the modules.
  for (uint32_t i = 1; i <= 63; i++) {
    served.add(Operation::kModuleUnload, 8, false, [&](Encoder& e) { e.handle({i, 1}); });
  }
  ASSERT_TRUE(served.send());
  ASSERT_EQ(served.synchronize(), CUDA_SUCCESS);
  EXPECT_LE(served.account.host_used.load(), 64ull << 20);
  served.end();
}

TEST(Session, LinksAreBoundedLikeImages) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  static std::vector<uint8_t> piece(wire::kMaxBulkSegment);
  for (uint32_t i = 1; i <= 8; i++) {
    const wire::LinkOptions options{0, 0, -1, 0, 0, 0};
    const uint64_t made =
        served.add(Operation::kLinkCreateV2, 8 + sizeof options, true, [&](Encoder& e) {
          e.handle({i, 1});
          e.put(options);
        });
    Reply reply;
    ASSERT_TRUE(served.send() && served.wait(made, &reply)) << served.refusal;
    ASSERT_EQ(reply.status, CUDA_SUCCESS);
    const wire::LinkAdd body{{i, 1}, wire::kMaxImageBytes, CU_JIT_INPUT_PTX, 0, 1, 0};
    served.add(Operation::kLinkAddDataV2, sizeof body, false, [&](Encoder& e) { e.put(body); }, 1);
    ASSERT_TRUE(served.send({{piece.data(), piece.size()}}));
    ASSERT_EQ(served.synchronize(), CUDA_SUCCESS) << served.refusal;
    EXPECT_LE(served.account.host_used.load(), kHostMemory);
  }
  EXPECT_GT(served.account.host_used.load(), 0u);
  served.end();
}

TEST(Session, WhatTheDriverHoldsByItselfIsCharged) {
  ToldUsage usage;
  usage.held = 300ull << 20;  // the driver's own: the context
  Served served(kArenaBase, &usage);
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 0u);
  const std::string text = kHead + std::string(".visible .entry k() { ret; }\n");
  usage.held += 100ull << 20;
  ASSERT_EQ(load_image(served, text, 1).status, CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 100ull << 20);
  // More than the slice has room for: the module does not load.
  usage.held += kMemory;
  EXPECT_EQ(load_image(served, text, 2).status, CUDA_ERROR_OUT_OF_MEMORY);
  usage.held -= kMemory;
  // What goes back is the slice's again.
  usage.held -= 100ull << 20;
  ASSERT_EQ(load_image(served, text, 3).status, CUDA_SUCCESS);
  EXPECT_EQ(served.account.used.load(), 0u);
  // At a launch nothing can be refused any more: the session ends and says why.
  const wire::FunctionGet get{{3, 1}, {1, 1}, 1};
  uint64_t call = served.add(Operation::kModuleGetFunction, sizeof get + 8, true, [&](Encoder& e) {
    e.put(get);
    e.raw("k", 1);
  });
  Reply reply;
  ASSERT_TRUE(served.send() && served.wait(call, &reply)) << served.refusal;
  ASSERT_EQ(reply.status, CUDA_SUCCESS);
  usage.held += kMemory + (64ull << 20);
  const wire::Launch launch{{1, 1}, {1, 0}, {1, 1, 1}, {1, 1, 1}, 0, 0, {0, 0, 0}, 0};
  call =
      served.add(Operation::kLaunchKernel, sizeof launch, true, [&](Encoder& e) { e.put(launch); });
  ASSERT_TRUE(served.send());
  EXPECT_FALSE(served.wait(call, &reply));
  EXPECT_NE(served.refusal.find("slice"), std::string::npos) << served.refusal;
  EXPECT_EQ(served.end().end, worker::SessionEnd::kProtocolError);
}

// A slice that is full bears a little; that is given back, or charged as soon as there is room.
TEST(Session, WhatTheSliceBearsIsItsOwnAffair) {
  constexpr uint64_t kMib = 1 << 20;
  ToldUsage usage;
  CountingAccount account;
  worker::Books books(account, &usage);
  books.open();
  ASSERT_TRUE(account.charge(kMemory - 4 * kMib));  // by another session
  std::string why;
  usage.held = 10 * kMib;
  EXPECT_FALSE(books.settle());
  EXPECT_TRUE(books.settle_or_end(&why));
  EXPECT_EQ(account.borne.load(), 10 * kMib);
  usage.held = 16 * kMib;  // of which some has room
  EXPECT_TRUE(books.settle_or_end(&why));
  EXPECT_EQ(account.borne.load() + account.used.load(), kMemory - 4 * kMib + 16 * kMib);
  usage.held = 12 * kMib;
  EXPECT_TRUE(books.settle_or_end(&why));
  EXPECT_EQ(account.borne.load() + account.used.load(), kMemory - 4 * kMib + 12 * kMib);
  account.refund(kMemory - 16 * kMib);
  EXPECT_TRUE(books.settle());
  EXPECT_EQ(account.borne.load(), 0u);
  EXPECT_EQ(account.used.load(), 24 * kMib);
  // What another session's driver took leaves no room for this one's.
  ASSERT_TRUE(account.charge(kMemory - 24 * kMib));
  ASSERT_TRUE(account.bear(10 * kMib));
  usage.held = 20 * kMib;
  EXPECT_FALSE(books.settle_or_end(&why));
  EXPECT_NE(why.find("slice"), std::string::npos) << why;
  usage.held = 0;
  EXPECT_TRUE(books.settle());
  EXPECT_EQ(account.borne.load(), 10 * kMib);
  EXPECT_EQ(account.used.load(), kMemory - 12 * kMib);
}

// The driver takes the memory when the client has had its last answer.
TEST(Session, TheBooksAreKeptWhileTheClientIsSilent) {
  class LateUsage final : public worker::DeviceUsage {
   public:
    std::optional<uint64_t> bytes() override {
      return std::chrono::steady_clock::now() < late.load() ? 0 : 2 * kMemory;
    }
    std::atomic<std::chrono::steady_clock::time_point> late{
        std::chrono::steady_clock::time_point::max()};
  };
  LateUsage usage;
  Served served(kArenaBase, &usage);
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  usage.late = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  served.synchronize();
  while (served.read_frame()) {
  }
  EXPECT_NE(served.refusal.find("slice"), std::string::npos) << served.refusal;
  EXPECT_EQ(served.end().end, worker::SessionEnd::kProtocolError);
}

TEST(Session, ThereIsOnePrimaryContext) {
  Served served;
  ASSERT_EQ(served.create_context(1), CUDA_SUCCESS);
  const wire::ContextCreate body{{2, 1}, 0, 1, kArenaBase, kArenaBytes};
  const uint64_t call = served.add(
      Operation::kCtxCreateV4, sizeof body, true, [&](Encoder& e) { e.put(body); }, 0, 2);
  Reply reply;
  ASSERT_TRUE(served.send() && served.wait(call, &reply));
  EXPECT_EQ(reply.status, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(served.create_context(2), CUDA_SUCCESS) << "another one, that isn't primary";
}

}  // namespace
}  // namespace gpupool::test
