"""A program that asks NVML and says what it hears, as JSON. With a number of MiB it takes that much
of each device first; it ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import pynvml as nv


def take(mib: int) -> None:
    """Memory of every device, by the driver API."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    for ordinal in range(count.value):
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib << 20))


def heard() -> dict:
    """What NVML tells."""
    nv.nvmlInit()
    devices = []
    for index in range(nv.nvmlDeviceGetCount()):
        handle = nv.nvmlDeviceGetHandleByIndex(index)
        memory = nv.nvmlDeviceGetMemoryInfo(handle)
        second = nv.nvmlDeviceGetMemoryInfo(handle, version=nv.nvmlMemory_v2)
        assert (memory.total, memory.used, memory.free) == (second.total, second.used, second.free)
        pci = nv.nvmlDeviceGetPciInfo(handle)
        uuid = nv.nvmlDeviceGetUUID(handle)
        assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByUUID(uuid)) == index
        assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByPciBusId(pci.busId)) == index
        assert nv.nvmlDeviceGetMigMode(handle) == [0, 0]
        assert not nv.nvmlDeviceIsMigDeviceHandle(handle)
        refused = {}
        for ask in (
            nv.nvmlDeviceGetFanSpeed,
            nv.nvmlDeviceGetPowerUsage,
            nv.nvmlDeviceGetSerial,
            nv.nvmlDeviceGetMinorNumber,
        ):
            try:
                ask(handle)
                refused[ask.__name__] = 0
            except nv.NVMLError as error:
                refused[ask.__name__] = error.value
        devices.append(
            {
                "name": nv.nvmlDeviceGetName(handle),
                "uuid": uuid,
                "pci": pci.busId,
                "capability": nv.nvmlDeviceGetCudaComputeCapability(handle),
                "total": memory.total,
                "used": memory.used,
                "processes": [
                    [process.pid, process.usedGpuMemory]
                    for process in nv.nvmlDeviceGetComputeRunningProcesses(handle)
                ],
                "graphics": len(nv.nvmlDeviceGetGraphicsRunningProcesses(handle)),
                "busy": nv.nvmlDeviceGetUtilizationRates(handle).gpu,
                "refused": refused,
            }
        )
    names = {}
    for pid in {process[0] for device in devices for process in device["processes"]} | {1}:
        try:
            names[pid] = nv.nvmlSystemGetProcessName(pid)
        except nv.NVMLError as error:
            names[pid] = error.value
    versions = [nv.nvmlSystemGetDriverVersion(), nv.nvmlSystemGetCudaDriverVersion()]
    nv.nvmlShutdown()
    return {"pid": os.getpid(), "devices": devices, "names": names, "versions": versions}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take(int(sys.argv[1]))
    print(json.dumps(heard()), flush=True)
    sys.stdin.read()
