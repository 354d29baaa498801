// Attributes of a stream: hints of how caches and waiting threads should behave. They are kept for
// those who ask, and have no effect on results.
#pragma once

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

class StreamAttributes {
 public:
  CUresult set(CUstreamAttrID attribute, const CUstreamAttrValue& value) {
    switch (int(attribute)) {
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
        if (!(value.accessPolicyWindow.hitRatio >= 0 && value.accessPolicyWindow.hitRatio <= 1))
          return CUDA_ERROR_INVALID_VALUE;
        window_ = value.accessPolicyWindow;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        if (int(value.syncPolicy) < CU_SYNC_POLICY_AUTO ||
            int(value.syncPolicy) > CU_SYNC_POLICY_BLOCKING_SYNC)
          return CUDA_ERROR_INVALID_VALUE;
        policy_ = value.syncPolicy;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        domains_ = value.memSyncDomainMap;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        if (unsigned(value.memSyncDomain) > CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE)
          return CUDA_ERROR_INVALID_VALUE;
        domain_ = value.memSyncDomain;
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_INVALID_VALUE;  // a stream's priority is fixed when it is made
    }
  }

  CUresult get(CUstreamAttrID attribute, int priority, CUstreamAttrValue* value) const {
    switch (int(attribute)) {
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
        value->accessPolicyWindow = window_;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        value->syncPolicy = policy_;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        value->priority = priority;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        value->memSyncDomainMap = domains_;
        return CUDA_SUCCESS;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        value->memSyncDomain = domain_;
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }

 private:
  CUaccessPolicyWindow window_{};
  CUsynchronizationPolicy policy_ = CU_SYNC_POLICY_AUTO;
  CUlaunchMemSyncDomainMap domains_{0, 1};
  CUlaunchMemSyncDomain domain_ = CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT;
};

}  // namespace gpupool::frontdoor
