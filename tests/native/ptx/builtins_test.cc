// printf's formatting, the device's heap, the message of a failed assertion.
#include "simgpu/ptx/builtins.h"

#include <random>

#include "ptx_test_support.h"

namespace gpupool::simgpu::ptx {
namespace {

// Device memory with a format, strings and an argument buffer.
class Printf {
 public:
  Printf() { buffer_ = memory_->allocate(256, 16); }
  ~Printf() {
    for (uint64_t a : strings_) memory_->release(a);
    memory_->release(buffer_);
  }

  uint64_t string(const std::string& s) {
    const uint64_t a = memory_->allocate(s.size() + 1, 1);
    memcpy(reinterpret_cast<void*>(a), s.c_str(), s.size() + 1);
    strings_.push_back(a);
    return a;
  }
  Printf& i32(uint32_t v) { return put(&v, 4); }
  Printf& i64(uint64_t v) { return put(&v, 8); }
  Printf& f64(double v) { return put(&v, 8); }

  PrintfResult run(const std::string& format) {
    ReadDevice read = [this](uint64_t a, void* to, uint64_t n) { return memory_->read(a, to, n); };
    return format_printf(string(format), buffer_, read);
  }
  std::string text(const std::string& format) { return run(format).text; }

 private:
  Printf& put(const void* value, size_t bytes) {
    used_ = (used_ + bytes - 1) & ~(bytes - 1);
    memcpy(reinterpret_cast<void*>(buffer_ + used_), value, bytes);
    used_ += bytes;
    return *this;
  }
  std::shared_ptr<TestMemory> memory_ = std::make_shared<TestMemory>();
  std::vector<uint64_t> strings_;
  uint64_t buffer_;
  size_t used_ = 0;
};

// Expected texts are the C library's for the same arguments.
TEST(PtxPrintf, Integers) {
  EXPECT_EQ(Printf().i32(-5).text("%d"), "-5");
  EXPECT_EQ(Printf().i32(-5).text("%i|"), "-5|");
  EXPECT_EQ(Printf().i32(-5).text("%u"), "4294967291");
  EXPECT_EQ(Printf().i32(255).text("%x"), "ff");
  EXPECT_EQ(Printf().i32(255).text("%#X"), "0XFF");
  EXPECT_EQ(Printf().i32(8).text("%o"), "10");
  EXPECT_EQ(Printf().i32(7).text("%05d"), "00007");
  EXPECT_EQ(Printf().i32(7).text("%-5d|"), "7    |");
  EXPECT_EQ(Printf().i32(7).text("%+d"), "+7");
  EXPECT_EQ(Printf().i32(7).text("%.3d"), "007");
  EXPECT_EQ(Printf().i32(0x12345).text("%hd"), std::to_string(0x2345));
  EXPECT_EQ(Printf().i32(0x1ff).text("%hhu"), "255");
  EXPECT_EQ(Printf().i64(uint64_t(-6)).text("%ld"), "-6");
  EXPECT_EQ(Printf().i64(1ull << 40).text("%lld"), "1099511627776");
  EXPECT_EQ(Printf().i64(~0ull).text("%llx"), "ffffffffffffffff");
  EXPECT_EQ(Printf().i64(12).text("%zu"), "12");
}

TEST(PtxPrintf, OtherConversions) {
  EXPECT_EQ(Printf().f64(1.5).text("%f"), "1.500000");
  EXPECT_EQ(Printf().f64(1.5).text("%8.2f|"), "    1.50|");
  EXPECT_EQ(Printf().f64(12345.678).text("%e"), "1.234568e+04");
  EXPECT_EQ(Printf().f64(0.0001).text("%g"), "0.0001");
  EXPECT_EQ(Printf().f64(1.0).text("%a"), "0x1p+0");
  EXPECT_EQ(Printf().i32('x').text("%c"), "x");
  EXPECT_EQ(Printf().i64(0x1234).text("%p"), "0x1234");
  EXPECT_EQ(Printf().text("100%%"), "100%");
  Printf s;
  EXPECT_EQ(s.i64(s.string("abc")).text("[%5s]"), "[  abc]");
  EXPECT_EQ(Printf().i64(0).text("%s"), "(null)");
}

TEST(PtxPrintf, ArgumentsAreNaturallyAligned) {
  Printf p;
  PrintfResult r = p.i32(1).f64(2.5).i32(3).i32(4).i64(5).run("%d %f %d %d %ld\n");
  EXPECT_EQ(r.text, "1 2.500000 3 4 5\n");
  EXPECT_EQ(r.arguments, 5);
}

TEST(PtxPrintf, StarTakesArguments) {
  EXPECT_EQ(Printf().i32(6).i32(42).text("%*d"), "    42");
  EXPECT_EQ(Printf().i32(-6).i32(42).text("%*d|"), "42    |");
  EXPECT_EQ(Printf().i32(8).i32(2).f64(3.14159).text("%*.*f"), "    3.14");
  EXPECT_EQ(Printf().i32(-1).f64(0.5).text("%.*f"), "0.500000");
  EXPECT_EQ(Printf().i32(8).i32(2).f64(3.14159).run("%*.*f").arguments, 3);
}

TEST(PtxPrintf, OddFormats) {
  EXPECT_EQ(Printf().text("%y %"), "%y %");
  EXPECT_EQ(Printf().i32(1).text("%99999999d").size(), 4096u);
  EXPECT_EQ(Printf().text(""), "");
  EXPECT_EQ(Printf().run("no arguments").arguments, 0);
  ReadDevice none = [](uint64_t, void*, uint64_t) { return false; };
  EXPECT_EQ(format_printf(0, 0, none).arguments, -1);
  EXPECT_TRUE(format_printf(0x1000, 0, none).fault);
  Printf bad;
  PrintfResult r = bad.i64(0x10).run("before %s after");
  EXPECT_TRUE(r.fault);
  EXPECT_EQ(r.fault_address, 0x10u);
}

TEST(PtxAssert, Message) {
  auto memory = std::make_shared<TestMemory>();
  auto text = [&](const char* s) {
    const uint64_t a = memory->allocate(strlen(s) + 1, 1);
    strcpy(reinterpret_cast<char*>(a), s);
    return a;
  };
  ReadDevice read = [&](uint64_t a, void* to, uint64_t n) { return memory->read(a, to, n); };
  const uint64_t a = text("x > 0"), f = text("test.cu"), g = text("void k()");
  const uint32_t block[3] = {1, 0, 0}, thread[3] = {31, 2, 0};
  EXPECT_EQ(assert_message(read, a, f, 19, g, block, thread),
            "test.cu:19: void k(): block: [1,0,0], thread: [31,2,0] Assertion `x > 0` failed.");
  for (uint64_t p : {a, f, g}) memory->release(p);
}

TEST(PtxHeap, AllocatesAlignedDisjointBlocksAndJoinsFreedOnes) {
  auto memory = std::make_shared<TestMemory>();
  {
    DeviceHeap heap(memory, 1024);
    EXPECT_EQ(heap.allocate(0), 0u);
    EXPECT_EQ(heap.allocate(1025), 0u);
    std::vector<uint64_t> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(heap.allocate(120));  // 128 each
    for (uint64_t b : blocks) {
      EXPECT_NE(b, 0u);
      EXPECT_EQ(b % 16, 0u);
      EXPECT_TRUE(memory->find(b + 119));
    }
    EXPECT_EQ(heap.allocate(1), 0u) << "full";
    EXPECT_EQ(heap.used_bytes(), 1024u);
    EXPECT_FALSE(heap.free(blocks[0] + 16));
    for (int i : {1, 3, 2, 0, 7, 5, 6, 4}) EXPECT_TRUE(heap.free(blocks[i]));
    EXPECT_FALSE(heap.free(blocks[0])) << "freed twice";
    EXPECT_TRUE(heap.free(0));
    EXPECT_EQ(heap.used_bytes(), 0u);
    const uint64_t whole = heap.allocate(1024);
    EXPECT_NE(whole, 0u);
  }  // ~TestMemory sees that the arena was given back
}

std::shared_ptr<TestMemory> no_memory() {
  auto memory = std::make_shared<TestMemory>();
  memory->limit_ = 0;
  return memory;
}

// Tells where it was asked for memory last.
struct ToldMemory : TestMemory {
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override {
    return last = TestMemory::allocate(bytes, alignment);
  }
  uint64_t last = 0;
};

TEST(PtxHeap, ReservesItsArenaOrSaysThatThereIsNoMemory) {
  auto memory = std::make_shared<TestMemory>();
  DeviceHeap heap(memory, 4096);
  EXPECT_TRUE(heap.reserve());
  EXPECT_NE(heap.allocate(4096), 0u);
  DeviceHeap none(memory, 0);
  EXPECT_TRUE(none.reserve());
  EXPECT_EQ(none.allocate(1), 0u);
  DeviceHeap too_large(no_memory(), 4096);
  EXPECT_FALSE(too_large.reserve());
}

std::string drained(PrintfBuffer& buffer) {
  std::string all;
  buffer.drain([&](std::string_view text) { all += text; });
  return all;
}

TEST(PtxPrintfBuffer, GivesBackWhatWasPutIn) {
  PrintfBuffer buffer(std::make_shared<TestMemory>(), 1 << 16);
  ASSERT_TRUE(buffer.reserved());
  EXPECT_EQ(drained(buffer), "");
  buffer.put("one\n");
  buffer.put("");
  buffer.put("two\n");
  EXPECT_EQ(drained(buffer), "one\ntwo\n");
  EXPECT_EQ(drained(buffer), "");
  std::string long_text(20'000, 'x');
  long_text += '\n';
  for (int round = 0; round < 20; ++round) {  // around the ring's end, and over many pieces
    buffer.put(long_text);
    buffer.put("end\n");
    ASSERT_EQ(drained(buffer), long_text + "end\n") << round;
  }
}

TEST(PtxPrintfBuffer, NewOutputOverwritesTheOldestCallByCall) {
  // A call takes its text and 4 bytes: 10 calls of 96 fit into 1000 bytes.
  PrintfBuffer buffer(std::make_shared<TestMemory>(), 1000);
  std::string expected;
  for (int i = 0; i < 57; ++i) {
    const std::string line =
        std::to_string(i) + std::string(95 - std::to_string(i).size(), '.') + "\n";
    buffer.put(line);
    if (i >= 47) expected += line;
  }
  EXPECT_EQ(drained(buffer), expected);
  // What is longer than the buffer is cut off.
  buffer.put(std::string(5000, 'a'));
  EXPECT_EQ(drained(buffer), std::string(996, 'a'));
}

TEST(PtxPrintfBuffer, WhatAProgramWritesOverItDoesNoHarm) {
  auto memory = std::make_shared<ToldMemory>();
  PrintfBuffer buffer(memory, 256);
  const uint64_t ring = memory->last;
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    buffer.put(std::string(random() % 60, 'b'));
    auto* bytes = reinterpret_cast<uint8_t*>(ring);
    for (int i = 0; i < 8; ++i) bytes[random() % 256] = static_cast<uint8_t>(random());
    if (round % 7 == 0) ASSERT_LE(drained(buffer).size(), 256u);
  }
}

TEST(PtxPrintfBuffer, SaysThatThereIsNoMemory) {
  PrintfBuffer buffer(no_memory(), 4096);
  EXPECT_FALSE(buffer.reserved());
  buffer.put("lost");
  EXPECT_EQ(drained(buffer), "");
}

// Expected texts are c++filt's.
TEST(PtxNames, AreDemangledWhereTheyAreMangled) {
  EXPECT_EQ(readable_name("store"), "store");
  EXPECT_EQ(readable_name("_Z5scaleIfEvPT_S0_i"), "void scale<float>(float*, float, int)");
  EXPECT_EQ(readable_name("_Z5checkPKiPi"), "check(int const*, int*)");
  EXPECT_EQ(readable_name("_Znonsense"), "_Znonsense");
}

}  // namespace
}  // namespace gpupool::simgpu::ptx
