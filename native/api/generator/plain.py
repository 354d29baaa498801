"""Which functions cross the wire as they are: the client's and the worker's code is generated.

A function is plain if it is described as `async` or `sync`, creates and destroys nothing, all its
parameters are of kinds that travel in 8 bytes, and it isn't listed as written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from .description import Description, Function, Parameter

# Functions that would qualify, and why they are written by hand all the same.
BY_HAND = {
    "cuCtxSynchronize": "waits; the worker hands it to a thread of its own",
    "cuCtxSynchronize_v2": "as cuCtxSynchronize, for another context",
    "cuEventQuery": "in the context of the event",
    "cuEventSynchronize": "waits",
    "cuStreamQuery": "accepts the default streams",
    "cuStreamSynchronize": "waits",
    "cuFuncSetAttribute": "limits and cached attributes are checked by the client",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "cached by the client",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": "cached by the client",
}

# What the worker's hand-written code calls, beside the plain functions.
WORKER_CALLS = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxSetFlags_v2",
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxSetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuCtxSetLimit",
    "cuCtxGetStreamPriorityRange",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAllocationGranularity",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuModuleGetGlobal_v2",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncGetParamInfo",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
    "cuLaunchHostFunc",
    "cuStreamAddCallback",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cuOccupancyMaxActiveClusters",
    "cuOccupancyMaxPotentialClusterSize",
    "cuLinkCreate_v2",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkDestroy",
    "cuGraphCreate",
    "cuGraphDestroy",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddMemcpyNode",
    "cuGraphAddMemsetNode",
    "cuGraphAddEmptyNode",
    "cuGraphAddEventRecordNode",
    "cuGraphAddEventWaitNode",
    "cuGraphKernelNodeSetAttribute",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecDestroy",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
    "cuGraphExecEventRecordNodeSetEvent",
    "cuGraphExecEventWaitNodeSetEvent",
    "cuGraphNodeSetEnabled",
    "cuGraphLaunch",
    "cuGraphUpload",
]

PLAIN_KINDS = {"scalar", "size", "flags", "enum", "devptr", "stream", "event", "function"}


@dataclass(frozen=True)
class PlainFunction:
    """A function whose code is generated on both sides."""

    function: Function
    forward: str | None  # the client passes the call on to this function, with the null stream

    @property
    def in_params(self) -> list[Parameter]:
        """What travels to the worker, in order."""
        return [p for p in self.function.params if p.dir == "in"]

    @property
    def out_params(self) -> list[Parameter]:
        """What the reply holds, in order."""
        return [p for p in self.function.params if p.dir == "out"]

    @property
    def empty_when(self) -> str | None:
        """A C expression that is true if the call has nothing to do."""
        ranges = [p.bytes for p in self.function.params if p.kind == "devptr" and p.bytes]
        return f"({ranges[0]}) == 0" if ranges else None

    @property
    def stream(self) -> Parameter | None:
        """The stream that the function submits to, if it takes one."""
        return next((p for p in self.function.params if p.kind == "stream"), None)


def select(description: Description) -> list[PlainFunction]:
    """The plain functions, in the order of the description."""
    found = []
    for function in description.functions:
        if (
            function.cls not in ("async", "sync")
            or function.op is None
            or function.same_as is not None
            or function.creates is not None
            or function.destroys is not None
            or function.name in BY_HAND
            or any(p.kind not in PLAIN_KINDS for p in function.params)
            or any(p.dir == "inout" for p in function.params)
            or any(p.dir == "out" and function.cls == "async" for p in function.params)
        ):
            continue
        forward = None
        if function.per_thread == "ptds" and function.cls == "async":
            forward = _async_twin(description, function)
        found.append(PlainFunction(function, forward))
    return found


def _async_twin(description: Description, function: Function) -> str | None:
    for other in description.functions:
        if (
            other.base == function.base + "Async"
            and other.same_as is None
            and other.op is not None
            and other.params[:-1] == function.params
            and other.params[-1].kind == "stream"
        ):
            return other.name
    return None


def driver_functions(description: Description) -> list[Function]:
    """Every function of the driver that a worker calls, each once.

    Raises KeyError if one isn't described.
    """
    names = list(WORKER_CALLS)
    names += [p.function.name for p in select(description) if p.forward is None]
    return [description.function(name) for name in dict.fromkeys(names)]
