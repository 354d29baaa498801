#include "frontdoor/visible_devices.h"

#include <gtest/gtest.h>

namespace gpupool::frontdoor {
namespace {

using Indices = std::vector<int>;

DeviceUuid uuid(uint8_t first, uint8_t second = 0) {
  DeviceUuid result{};
  result[0] = first, result[1] = second;
  return result;
}

TEST(VisibleDevices, FollowsCudasRules) {
  const std::vector<DeviceUuid> devices = {uuid(0xab), uuid(0xcd, 0x01), uuid(0xcd, 0x02)};
  EXPECT_EQ(visible_devices(nullptr, devices), (Indices{0, 1, 2}));
  EXPECT_EQ(visible_devices("", devices), Indices{});
  EXPECT_EQ(visible_devices("2,0", devices), (Indices{2, 0}));
  EXPECT_EQ(visible_devices("1, 0", devices), (Indices{1, 0}));
  EXPECT_EQ(visible_devices("0,7,1", devices), Indices{0});
  EXPECT_EQ(visible_devices("0,-1,1", devices), Indices{0});
  EXPECT_EQ(visible_devices("-1", devices), Indices{});
  EXPECT_EQ(visible_devices("1,1", devices), Indices{1});
  EXPECT_EQ(visible_devices("none", devices), Indices{});
  EXPECT_EQ(visible_devices("GPU-ab", devices), Indices{0});
  EXPECT_EQ(visible_devices("GPU-CD02,GPU-ab000000-0000", devices), (Indices{2, 0}));
  EXPECT_EQ(visible_devices("GPU-cd,0", devices), Indices{});  // ambiguous
  EXPECT_EQ(visible_devices("GPU-ff,0", devices), Indices{});
}

}  // namespace
}  // namespace gpupool::frontdoor
