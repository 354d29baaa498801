"""cuda-bindings: NVRTC compiles C++ to PTX, the driver module loads and launches it."""

import ctypes
import sys

import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = b"""
extern "C" __global__ void powers(const double* in, double* out, int exponent, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double result = 1;
  for (int k = 0; k < exponent; ++k) result *= in[i];
  out[i] = result;
}
"""


def check(result):
    """The values of a call of cuda-bindings; an error ends the program."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{status!r}")
    return values[0] if len(values) == 1 else values


def compile_ptx(major: int, minor: int) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"powers.cu", 0, [], []))
    options = [f"--gpu-architecture=compute_{major}{minor}".encode()]
    try:
        check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    except RuntimeError:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        print(log.decode(), file=sys.stderr)
        raise
    ptx = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx


def main() -> int:
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    attribute = driver.CUdevice_attribute
    major = check(
        driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    )
    minor = check(
        driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    )
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    module = check(driver.cuModuleLoadData(compile_ptx(major, minor)))
    function = check(driver.cuModuleGetFunction(module, b"powers"))

    values = np.linspace(-2, 2, 1234)
    result = np.empty_like(values)
    source = check(driver.cuMemAlloc(values.nbytes))
    target = check(driver.cuMemAlloc(values.nbytes))
    check(driver.cuMemcpyHtoD(source, values, values.nbytes))
    arguments = (
        (int(source), int(target), 5, values.size),
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    )
    stream = check(driver.cuStreamCreate(0))
    check(
        driver.cuLaunchKernel(
            function, (values.size + 95) // 96, 1, 1, 96, 1, 1, 0, stream, arguments, 0
        )
    )
    check(driver.cuStreamSynchronize(stream))
    check(driver.cuMemcpyDtoH(result, target, result.nbytes))
    expected = values * values * values * values * values
    np.testing.assert_array_equal(result, expected)
    check(driver.cuStreamDestroy(stream))
    check(driver.cuMemFree(source))
    check(driver.cuMemFree(target))
    check(driver.cuModuleUnload(module))
    check(driver.cuDevicePrimaryCtxRelease(device))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
