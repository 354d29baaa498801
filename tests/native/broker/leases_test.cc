#include "broker/leases.h"

#include <gtest/gtest.h>

#include "broker/loop.h"

namespace gpupool::broker {
namespace {

Push a_push(uint64_t generation, int leases, uint64_t memory = 1000) {
  Push push;
  push.set_generation(generation);
  push.add_gpus()->set_uuid("GPU-1");
  for (int i = 0; i < leases; i++) {
    auto* lease = push.add_leases();
    lease->set_id(std::string(16, static_cast<char>('a' + i)));
    lease->set_key(std::string(32, 'k'));
    auto* slice = lease->add_slices();
    slice->set_id(std::string(16, static_cast<char>('A' + i)));
    slice->set_gpu_uuid("GPU-1");
    slice->set_memory_bytes(memory);
    slice->mutable_worker();
  }
  return push;
}

wire::Uuid id_of(char c) {
  wire::Uuid id;
  id.fill(static_cast<uint8_t>(c));
  return id;
}

class Leases : public testing::Test {
 protected:
  Leases()
      : table(loop,
              [this](const wire::Uuid& id, const std::string&, bool) { ended.push_back(id); }) {}

  Applied apply(const Push& push) {
    std::string why;
    auto desired = check_push(push, &why);
    EXPECT_TRUE(desired) << why;
    Applied applied;
    table.apply(*desired, &applied);
    return applied;
  }

  EventLoop loop;
  std::vector<wire::Uuid> ended;
  LeaseTable table;
};

TEST_F(Leases, AddsKeepsAndRemoves) {
  apply(a_push(1, 2));
  EXPECT_EQ(table.leases().size(), 2u);
  apply(a_push(2, 2));
  EXPECT_TRUE(ended.empty());
  apply(a_push(3, 1));
  EXPECT_EQ(ended, std::vector<wire::Uuid>{id_of('b')});
  EXPECT_NE(table.find(id_of('a')), nullptr);
  EXPECT_EQ(table.find(id_of('b')), nullptr);
}

TEST_F(Leases, ASliceKeepsItsAccountInAnotherLease) {
  apply(a_push(1, 1));
  Charge worker;
  auto account = table.find(id_of('a'))->slices[0].account;  // a worker that is about to end
  ASSERT_TRUE(account->charge(worker, 600));
  apply(a_push(2, 0));
  Push push = a_push(3, 1);
  push.mutable_leases(0)->set_id(std::string(16, 'z'));
  apply(push);
  const auto& slice = table.find(id_of('z'))->slices[0];
  EXPECT_EQ(slice.account->used(), 600u);
  account->close(worker);
  EXPECT_EQ(slice.account->used(), 0u);
}

TEST_F(Leases, OnAnotherGpuTheAccountIsNew) {
  apply(a_push(1, 1));
  Charge worker;
  auto account = table.find(id_of('a'))->slices[0].account;
  ASSERT_TRUE(account->charge(worker, 600));
  Push push = a_push(2, 1);
  push.add_gpus()->set_uuid("GPU-2");
  push.mutable_leases(0)->mutable_slices(0)->set_gpu_uuid("GPU-2");
  apply(push);
  EXPECT_EQ(ended, std::vector<wire::Uuid>{id_of('a')});  // its programs see another card
  EXPECT_EQ(table.find(id_of('a'))->slices[0].account->used(), 0u);
}

TEST_F(Leases, ShrinkingBelowWhatIsUsedIsTold) {
  apply(a_push(1, 1));
  Charge worker;
  auto account = table.find(id_of('a'))->slices[0].account;
  ASSERT_TRUE(account->charge(worker, 600));
  const Applied applied = apply(a_push(2, 1, 599));
  ASSERT_EQ(applied.refused_size(), 1);
  EXPECT_EQ(applied.refused(0).id(), std::string(16, 'A'));
  EXPECT_EQ(account->limit(), 1000u);
  EXPECT_EQ(apply(a_push(3, 1, 600)).refused_size(), 0);
  EXPECT_EQ(account->limit(), 600u);
}

TEST(CheckPush, RefusesAStateThatContradictsItself) {
  std::string why;
  EXPECT_TRUE(check_push(a_push(1, 3), &why));
  EXPECT_FALSE(check_push(a_push(0, 1), &why));
  Push twice = a_push(1, 2);
  twice.mutable_leases(1)->set_id(twice.leases(0).id());
  EXPECT_FALSE(check_push(twice, &why));
  Push shared = a_push(1, 2);
  shared.mutable_leases(1)->mutable_slices(0)->set_id(shared.leases(0).slices(0).id());
  EXPECT_FALSE(check_push(shared, &why));
  Push foreign = a_push(1, 1);
  foreign.clear_gpus();
  EXPECT_FALSE(check_push(foreign, &why));
}

TEST(Sockets, NamesAreUniqueAndNoPaths) {
  const auto refused = [](const std::string& first, const std::string& second, uint32_t uid) {
    Push push = a_push(1, 2);
    push.mutable_leases(0)->mutable_socket()->set_name(first);
    push.mutable_leases(1)->mutable_socket()->set_name(second);
    push.mutable_leases(1)->mutable_socket()->set_uid(uid);
    std::string why;
    return !check_push(push, &why);
  };
  EXPECT_FALSE(refused("GPU-1", "GPU-2", 1000));
  EXPECT_TRUE(refused("GPU-1", "GPU-1", 1000));
  EXPECT_TRUE(refused("GPU-1", "", 1000));
  EXPECT_TRUE(refused("GPU-1", "..", 1000));
  EXPECT_TRUE(refused("GPU-1", "a/b", 1000));
  EXPECT_TRUE(refused("GPU-1", std::string("a\0b", 3), 1000));
  EXPECT_TRUE(refused("GPU-1", std::string(65, 'a'), 1000));
  EXPECT_TRUE(refused("GPU-1", "GPU-2", 0xffffffff));  // "leave it" to chown
}

}  // namespace
}  // namespace gpupool::broker
