// Functions of the client in streams: a worker asks for them, and what a client may answer.
#include "session_fixture.h"

namespace gpupool::test {
namespace {

using wire::Encoder;
using wire::Operation;

uint64_t launch_function(Served& served, uint32_t number) {
  const wire::HostFunctionLaunch body{{1, 0}, number, 0};
  return served.add(Operation::kLaunchHostFunc, sizeof body, false,
                    [&](Encoder& e) { e.put(body); });
}

// Reads until the worker asks for a function; its number, or 0 if the session has ended.
wire::HostFunctionCall next_call(Served& served) {
  for (;;) {
    for (size_t i = 0; i < served.events.size(); i++) {
      if (served.events[i].kind != wire::EventKind::kHostCallback) continue;
      wire::HostFunctionCall call{};
      EXPECT_EQ(served.events[i].body.size(), sizeof call);
      memcpy(&call, served.events[i].body.data(), sizeof call);
      served.events.erase(served.events.begin() + static_cast<long>(i));
      return call;
    }
    if (!served.read_frame()) return {};
  }
}

bool answer(Served& served, uint32_t number, std::vector<uint8_t> data = {}) {
  served.add(
      Operation::kHostFunctionDone, 8, false, [&](Encoder& e) { e.scalar(number); },
      data.empty() ? 0 : 1);
  if (data.empty()) return served.send();
  return served.send({{data.data(), data.size()}});
}

// The quiet driver calls at once, from the session's own thread: what comes after has to wait, the
// answer must not.
TEST(Session, AnswersOfFunctionsOvertakeWhatWaitsForThem) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  launch_function(served, 7);
  const uint64_t call =
      served.add(Operation::kMemAllocV2, 8, true, [](Encoder& e) { e.scalar(1 << 20); });
  ASSERT_TRUE(served.send());
  for (int i = 0; i < 300; i++) launch_function(served, 100 + static_cast<uint32_t>(i));
  ASSERT_TRUE(served.send());
  EXPECT_EQ(next_call(served).number, 7u);
  EXPECT_TRUE(served.replies.empty()) << "it has not returned yet";
  ASSERT_TRUE(answer(served, 7));
  Reply reply;
  ASSERT_TRUE(served.wait(call, &reply));
  EXPECT_EQ(reply.status, CUDA_SUCCESS);
  for (uint32_t i = 0; i < 300; i++) {
    EXPECT_EQ(next_call(served).number, 100 + i);
    ASSERT_TRUE(answer(served, 100 + i));
  }
  EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
  // The session's own thread reads again.
  uint64_t address = 0;
  EXPECT_EQ(served.allocate(4096, &address), CUDA_SUCCESS);
}

TEST(Session, PulledCopiesGetTheDataOfTheirAnswer) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  constexpr uint64_t kBytes = 700'001;
  uint64_t address = 0;
  ASSERT_EQ(served.allocate(kBytes, &address), CUDA_SUCCESS);
  std::vector<uint8_t> data(kBytes);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint8_t>(i * 13 + i / 777);
  const wire::CopyToDevice pull{address, kBytes, 0, kBytes, {1, 0}, 0, 5};
  served.add(Operation::kPulledCopy, sizeof pull, false, [&](Encoder& e) { e.put(pull); });
  const wire::CopyFromDevice from{address, kBytes, 0, 0, {1, 0}, 0};
  const uint64_t call = served.add(Operation::kMemcpyDtoHAsyncV2, sizeof from, true,
                                   [&](Encoder& e) { e.put(from); });
  ASSERT_TRUE(served.send());
  EXPECT_EQ(next_call(served).number, 5u);
  ASSERT_TRUE(answer(served, 5, data));
  Reply reply;
  ASSERT_TRUE(served.wait(call, &reply));
  EXPECT_EQ(reply.status, CUDA_SUCCESS);
  EXPECT_EQ(reply.bulk, data);
  // A copy that cannot be: nobody is asked for its data.
  const wire::CopyToDevice wrong{address + 1, kBytes, 0, kBytes, {1, 0}, 0, 6};
  served.add(Operation::kPulledCopy, sizeof wrong, false, [&](Encoder& e) { e.put(wrong); });
  ASSERT_TRUE(served.send());
  const auto refused = next_call(served);
  EXPECT_EQ(refused.number, 6u);
  EXPECT_EQ(refused.refused, 1u);
  EXPECT_EQ(refused.status, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
}

TEST(Session, WrongAnswersAreRefusedOrIgnored) {
  {
    Served served;
    ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
    ASSERT_TRUE(answer(served, 99));             // nobody asked
    ASSERT_TRUE(answer(served, 98, {1, 2, 3}));  // nor for data
    EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
    launch_function(served, 7);
    launch_function(served, 8);
    ASSERT_TRUE(served.send());
    EXPECT_EQ(next_call(served).number, 7u);
    ASSERT_TRUE(answer(served, 8));  // not called yet: of no meaning
    ASSERT_TRUE(answer(served, 7));
    ASSERT_TRUE(answer(served, 7));
    EXPECT_EQ(next_call(served).number, 8u);
    ASSERT_TRUE(answer(served, 8));
    EXPECT_EQ(served.synchronize(), CUDA_SUCCESS);
  }
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  launch_function(served, 7);
  ASSERT_TRUE(served.send());
  EXPECT_EQ(next_call(served).number, 7u);
  ASSERT_TRUE(answer(served, 7, std::vector<uint8_t>(100)));  // a function takes no data
  while (served.refusal.empty() && served.read_frame()) {
  }
  EXPECT_EQ(served.end().end, worker::SessionEnd::kProtocolError);
}

// Functions that nobody ever answers: the session ends with its connection all the same.
TEST(Session, EndsWithFunctionsOutstanding) {
  Served served;
  ASSERT_EQ(served.create_context(), CUDA_SUCCESS);
  for (uint32_t i = 0; i < 40; i++) {
    for (uint32_t k = 0; k < 1000; k++) launch_function(served, i * 1000 + k);
    ASSERT_TRUE(served.send());
  }
  EXPECT_EQ(next_call(served).number, 0u);
  served.end();
  EXPECT_EQ(served.account.used.load(), 0u);
}

}  // namespace
}  // namespace gpupool::test
