"""Python programs in a virtual machine, with packages as a tenant would install them."""

from __future__ import annotations

import json
import re

from tests.e2e.disk import make_disk, python, python_command
from tests.e2e.guest import wait_status
from tests.e2e.host import sized, until
from tests.e2e.looks import gone, whole
from tests.programs.catalog import PYTHON_PROGRAMS

NUMBA = next(program for program in PYTHON_PROGRAMS if program.name == "numba_kernels")
#: numba-cuda names what compiles its kernels in an extra
DISTRIBUTIONS = (
    "numba-cuda",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-nvvm",
    "nvitop",
    "gpustat",
)

#: to the device and back, argument: MiB; prints "ok"
COPIES = """
import ctypes, os, sys

cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, f"{name}: {status}"

context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
size = ctypes.c_size_t(int(sys.argv[1]) << 20)
data, back = os.urandom(size.value), ctypes.create_string_buffer(size.value)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(pointer), size)
for _ in range(2):
    call("cuMemcpyHtoD_v2", pointer, data, size)
    call("cuMemcpyDtoH_v2", back, pointer, size)
    assert back.raw == data
print("ok")
"""


def test_numba_and_tools_that_show_nvml(host, name, guest_image):
    disk = make_disk(DISTRIBUTIONS)
    machine = host.start(name, sized(25, 2048), image=guest_image, disk=disk, memory=768)
    guest = whole(host, machine)
    wait_status(machine, 0)
    machine.sh(f"cat > /tmp/program.py <<'END'\n{NUMBA.source.read_text()}\nEND")
    code, output = python(machine, "-W", "ignore", "/tmp/program.py")
    assert NUMBA.problem(code, output + "\n") is None
    # Copies that are larger than all that waits on the way, by two programs at once.
    machine.sh(f"cat > /tmp/copies.py <<'END'\n{COPIES}\nEND")
    machine.sh(f"({python_command('/tmp/copies.py', '8')}) </dev/null >/tmp/other 2>&1 &")
    assert python(machine, "/tmp/copies.py", "8") == (0, "ok")
    until(lambda: machine.sh("cat /tmp/other") == "ok", "the other program's copies")
    # The tools name the slice's memory, and the guest's program as the guest knows it.
    machine.sh("sleep 1000 | nvml 512 >/tmp/held 2>&1 &")
    until(lambda: "waiting" in machine.sh("cat /tmp/held"), "a program holds memory")
    pid = int(machine.sh("pidof nvml"))
    code, output = python(machine, "-m", "gpustat", "--json")
    assert code == 0, output
    [gpu] = json.loads(output)["gpus"]
    [process] = gpu["processes"]
    assert (gpu["memory.used"], gpu["memory.total"]) == (512, 2048)
    assert (process["pid"], process["command"], process["gpu_memory_usage"]) == (pid, "nvml", 512)
    code, output = python(machine, "-m", "nvitop", "--once", "--ascii")
    assert code == 0, output
    assert "512.0MiB / 2048MiB" in output
    assert re.findall(r"\|\s+0\s+(\d+) C\s+root\s+(\S+)", output) == [(str(pid), "512.0MiB")]
    machine.domain.destroy()
    gone(host, name, guest["region"])
