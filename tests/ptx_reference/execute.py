"""Runs a job on a libcuda.so.1: `python execute.py LIBCUDA JOB RESULT`.

A process of its own for each instruction-set level, which the library chooses once. The job is a
pickled list of {"text": PTX, "kernels": [(operands, results, rows)], "inputs": one array}, the
result a list of {"plain": array, "masked": array, "refused": [kernel numbers]}.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 128
CELL = 32
NOT_SUPPORTED = 801
ALL_LANES = 0xFFFFFFFF
#: Two launches that are complements of each other: no warp is whole in either.
MASKS = (0x0F3A55C9, ALL_LANES ^ 0x0F3A55C9)


class Device:
    """One context of the driver."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.call("cuInit", 0)
        context = c_void_p()
        self.call("cuCtxCreate_v2", byref(context), c_uint(0), c_int(0))

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: error {code}")

    def upload(self, data: np.ndarray[Any, Any]) -> c_uint64:
        address = c_uint64()
        data = np.ascontiguousarray(data)
        self.call("cuMemAlloc_v2", byref(address), c_size_t(max(data.nbytes, 8)))
        self.call("cuMemcpyHtoD_v2", address, c_void_p(data.ctypes.data), c_size_t(data.nbytes))
        return address

    def download(self, address: c_uint64, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        data = np.empty_like(like)
        self.call("cuMemcpyDtoH_v2", c_void_p(data.ctypes.data), address, c_size_t(data.nbytes))
        return data

    def free(self, *addresses: c_uint64) -> None:
        for address in addresses:
            self.call("cuMemFree_v2", address)


def launch(device: Device, function: c_void_p, rows: int, arguments: list[Any]) -> int:
    pointers = (c_void_p * len(arguments))(
        *[ctypes.cast(ctypes.pointer(a), c_void_p) for a in arguments]
    )
    shape = [c_uint(v) for v in (rows // BLOCK, 1, 1, BLOCK, 1, 1, 0)]
    return int(device.library.cuLaunchKernel(function, *shape, None, pointers, None))


def run(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    module = c_void_p()
    device.call("cuModuleLoadData", byref(module), job["text"].encode())
    kernels: list[tuple[int, int, int]] = job["kernels"]
    size = sum(results * rows for _, results, rows in kernels)
    inputs = device.upload(job["inputs"])
    pattern = np.zeros(size, np.uint64)
    plain, masked = device.upload(pattern), device.upload(pattern)
    cells = device.upload(np.zeros(max(rows for *_, rows in kernels) * CELL, np.uint8))
    refused = []
    at_input = at_output = 0
    for number, (operands, results, rows) in enumerate(kernels):
        function = c_void_p()
        device.call("cuModuleGetFunction", byref(function), module, f"k{number}".encode())
        for target, mask in ((plain, ALL_LANES), *((masked, m) for m in MASKS)):
            arguments = [
                c_uint64(inputs.value + 8 * at_input),
                c_uint64(target.value + 8 * at_output),
                cells,
                c_uint32(mask),
            ]
            code = launch(device, function, rows, arguments)
            if code == NOT_SUPPORTED:
                refused.append(number)
                break
            if code != 0:
                raise RuntimeError(f"kernel {number}: error {code}")
        at_input += operands * rows
        at_output += results * rows
    device.call("cuCtxSynchronize")
    result = {
        "plain": device.download(plain, pattern),
        "masked": device.download(masked, pattern),
        "refused": refused,
    }
    device.free(inputs, plain, masked, cells)
    device.call("cuModuleUnload", module)
    return result


def main() -> None:
    library, job, result = sys.argv[1:]
    device = Device(library)
    jobs = pickle.loads(Path(job).read_bytes())
    Path(result).write_bytes(pickle.dumps([run(device, j) for j in jobs]))


if __name__ == "__main__":
    main()
