/* Attributes, priorities and identities of streams; copies between contexts by descriptor. */
#include "common.h"

static void attributes(void) {
  CUstream first, second;
  CUstreamAttrValue value;
  int least, greatest, priority;
  unsigned long long ids[2];
  CHECK(cuCtxGetStreamPriorityRange(&least, &greatest));
  EXPECT(greatest < least);
  CHECK(cuStreamCreateWithPriority(&first, CU_STREAM_NON_BLOCKING, greatest));
  CHECK(cuStreamCreate(&second, CU_STREAM_DEFAULT));
  CHECK(cuStreamGetPriority(first, &priority));
  EXPECT(priority == greatest);
  CHECK(cuStreamGetAttribute(first, CU_STREAM_ATTRIBUTE_PRIORITY, &value));
  EXPECT(value.priority == greatest);
  CHECK(cuStreamGetId(first, &ids[0]));
  CHECK(cuStreamGetId(second, &ids[1]));
  EXPECT(ids[0] != ids[1]);
  CHECK(cuStreamGetAttribute(first, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  EXPECT(value.syncPolicy == CU_SYNC_POLICY_AUTO);
  value.syncPolicy = CU_SYNC_POLICY_YIELD;
  CHECK(cuStreamSetAttribute(first, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  value.syncPolicy = (CUsynchronizationPolicy)77;
  EXPECT(cuStreamSetAttribute(first, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value) ==
         CUDA_ERROR_INVALID_VALUE);
  memset(&value, 0, sizeof value);
  value.accessPolicyWindow.num_bytes = 4096;
  value.accessPolicyWindow.hitRatio = 0.5f;
  value.accessPolicyWindow.hitProp = CU_ACCESS_PROPERTY_STREAMING;
  CHECK(cuStreamSetAttribute(first, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &value));
  CHECK(cuStreamCopyAttributes(second, first));
  memset(&value, 0, sizeof value);
  CHECK(cuStreamGetAttribute(second, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  EXPECT(value.syncPolicy == CU_SYNC_POLICY_YIELD);
  CHECK(cuStreamGetAttribute(second, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &value));
  EXPECT(value.accessPolicyWindow.num_bytes == 4096 && value.accessPolicyWindow.hitRatio == 0.5f);
  EXPECT(cuStreamGetAttribute(first, CU_STREAM_ATTRIBUTE_PRIORITY, NULL) ==
         CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamDestroy(first));
  CHECK(cuStreamDestroy(second));
}

enum { kWidth = 12, kHeight = 5, kDepth = 3, kPitch = 64, kRows = 9 };

/* A box out of one pitched volume into another, in a second context of the device and back. */
static void boxes(CUcontext here) {
  CUcontext there;
  CUdeviceptr from, to;
  unsigned char host[kPitch * kRows * (kDepth + 1)], back[sizeof host];
  for (size_t i = 0; i < sizeof host; ++i) host[i] = (unsigned char)(i * 7 + i / 251);
  CHECK(cuMemAlloc(&from, sizeof host));
  CHECK(cuMemcpyHtoD(from, host, sizeof host));
  CHECK(cuCtxCreate(&there, NULL, 0, 0));
  CHECK(cuMemAlloc(&to, sizeof host));
  CHECK(cuMemsetD8(to, 0xEE, sizeof host));
  CHECK(cuCtxSynchronize());
  CHECK(cuCtxPopCurrent(NULL));
  CUDA_MEMCPY3D_PEER copy;
  memset(&copy, 0, sizeof copy);
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from;
  copy.srcContext = here;
  copy.srcXInBytes = 3;
  copy.srcY = 2;
  copy.srcZ = 1;
  copy.dstDevice = to;
  copy.dstContext = there;
  copy.dstXInBytes = 8;
  copy.dstY = 1;
  copy.srcPitch = copy.dstPitch = kPitch;
  copy.srcHeight = copy.dstHeight = kRows;
  copy.WidthInBytes = kWidth;
  copy.Height = kHeight;
  copy.Depth = kDepth;
  CHECK(cuMemcpy3DPeer(&copy));
  CHECK(cuMemcpy3DPeerAsync(&copy, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(back, to, sizeof back));
  for (int z = 0; z <= kDepth; ++z) {
    for (int y = 0; y < kRows; ++y) {
      for (int x = 0; x < kPitch; ++x) {
        const int inside = z < kDepth && y >= 1 && y < 1 + kHeight && x >= 8 && x < 8 + kWidth;
        const int source = ((z + 1) * kRows + y - 1 + 2) * kPitch + x - 8 + 3;
        EXPECT(back[(z * kRows + y) * kPitch + x] == (inside ? host[source] : 0xEE));
      }
    }
  }
  copy.srcContext = NULL;
  EXPECT(cuMemcpy3DPeer(&copy) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuMemFree(from));
  CHECK(cuCtxDestroy(there));
}

int main(void) {
  Session session = open_session();
  attributes();
  boxes(session.context);
  close_session(&session);
  return verdict_ok();
}
