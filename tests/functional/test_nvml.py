"""NVML on a slice: the bindings and the tools that people use."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from gpupoold import paths
from tests.functional.pool import Pool, wait_for
from tests.programs.toolchain import Compiler

PROGRAM = [sys.executable, str(Path(__file__).with_name("nvml_program.py"))]
MIB = 1 << 20
NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST = 3, 6, 15


def tool(name: str) -> str:
    path = Path(sysconfig.get_path("scripts")) / name
    assert path.exists(), f"{path}: tests/requirements-programs.txt is not installed"
    return str(path)


def heard(pool: Pool, slice_name: str, **options: Any) -> dict[str, Any]:
    done = pool.run(slice_name, PROGRAM, **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_the_slice_is_the_device(shared_pool: Pool, carrier: str) -> None:
    told = heard(shared_pool, "main", environment={"GPUPOOL_CARRIER": carrier})
    shown = shared_pool.ctl_json("slice", "show", "main")
    [device] = told["devices"]
    assert device["uuid"] == shown["uuid"]
    assert device["pci"].lower().endswith(shown["pci_address"].lower())
    assert device["total"] == 4096 * MIB
    assert (device["used"], device["processes"], device["graphics"]) == (0, [], 0)
    assert device["busy"] == 0
    assert (device["name"], device["capability"]) == ("gpupool simulated GPU 80GiB", [8, 0])
    # What is not measured, or the card's alone, is not made up.
    assert set(device["refused"].values()) == {NOT_SUPPORTED}
    driver = next(iter(shared_pool.ctl_json("gpu", "list")))
    assert driver["name"] == device["name"]
    assert told["versions"] == ["580.0.0", 13000]
    assert told["names"] == {"1": NOT_FOUND}  # a process, but none of the lease's


def test_cuda_and_nvml_tell_the_same(shared_pool: Pool) -> None:
    with shared_pool.started("main", [*PROGRAM, "300"]) as process:
        told = first_line(process)
        [device] = told["devices"]
        used = device["used"]
        assert 300 * MIB <= used < 4096 * MIB
        assert used == shared_pool.used_mib("main") * MIB
        assert device["processes"] == [[told["pid"], used]]
        assert Path(told["names"][str(told["pid"])]).resolve() == Path(sys.executable).resolve()
        # Another process of the same lease sees it, and is not listed itself: it has no context.
        [beside] = heard(shared_pool, "main")["devices"]
        assert (beside["used"], beside["processes"]) == (used, [[told["pid"], used]])
    wait_for("memory given back", lambda: shared_pool.used_mib("main") == 0)
    [after] = heard(shared_pool, "main")["devices"]
    assert (after["used"], after["processes"]) == (0, [])


def test_slices_of_one_card_do_not_see_each_other(pool: Pool) -> None:
    pool.slice("other", compute=10, memory=1024)
    with (
        pool.started("main", [*PROGRAM, "200"]) as one,
        pool.started("other", [*PROGRAM, "100"]) as two,
    ):
        first, second = first_line(one), first_line(two)
        for told, slice_name, total in ((first, "main", 4096), (second, "other", 1024)):
            [device] = heard(pool, slice_name)["devices"]
            assert device["total"] == total * MIB
            assert [pid for pid, _ in device["processes"]] == [told["pid"]]
            assert device["used"] == pool.used_mib(slice_name) * MIB
        # asked while the first's memory was taken already
        assert [pid for pid, _ in second["devices"][0]["processes"]] == [second["pid"]]
        uuids = [told["devices"][0]["uuid"] for told in (first, second)]
        assert len(set(uuids)) == 2
        foreign = (
            "import pynvml as nv, sys\n"
            "nv.nvmlInit()\n"
            "try: nv.nvmlDeviceGetHandleByUUID(sys.argv[1])\n"
            "except nv.NVMLError_NotFound: print('not found')\n"
            "try: nv.nvmlSystemGetProcessName(int(sys.argv[2]))\n"
            "except nv.NVMLError_NotFound: print('not found')\n"
        )
        done = pool.run("main", [sys.executable, "-c", foreign, uuids[1], str(second["pid"])])
        assert done.stdout.split("\n") == ["not found", "not found", ""], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_a_container_sees_its_own_pids(shared_pool: Pool) -> None:
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with shared_pool.started("main", [*PROGRAM, "50"]) as outside:
        host_pid = first_line(outside)["pid"]
        with shared_pool.started("main", [*apart, *PROGRAM, "100"]) as inside:
            holder = first_line(inside)
            assert holder["pid"] == 1
            assert [pid for pid, _ in holder["devices"][0]["processes"]] == [holder["pid"]]
            [device] = heard(shared_pool, "main")["devices"]
            pids = {pid for pid, _ in device["processes"]}
            assert len(pids) == 2 and host_pid in pids
            # Memory is the slice's, whoever asks.
            assert holder["devices"][0]["used"] == device["used"]
            assert sum(used for _, used in device["processes"]) == device["used"]


def nvml_alone(environment: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import pynvml as nv\n" + code],
        env={
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(paths.client_directory()),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


INIT = "try: nv.nvmlInit()\nexcept nv.NVMLError_DriverNotLoaded: print('no driver')"


def test_without_a_lease_there_is_no_driver() -> None:
    done = nvml_alone({}, INIT)
    assert (done.stdout, done.stderr) == ("no driver\n", "")
    done = nvml_alone({"GPUPOOL_LEASE_FILE": "/nonexistent/lease.json"}, INIT)
    assert done.stdout == "no driver\n"
    [line] = done.stderr.splitlines()  # said once, and why
    assert "/nonexistent/lease.json" in line


def test_nothing_is_told_before_init() -> None:
    code = (
        "nv._LoadNvmlLibrary()\n"
        "for ask in (nv.nvmlDeviceGetCount, nv.nvmlSystemGetDriverVersion, nv.nvmlShutdown,\n"
        "            nv.nvmlUnitGetCount, nv.nvmlSystemGetConfComputeState):\n"
        "    try: ask()\n"
        "    except nv.NVMLError_Uninitialized: print('uninitialised')\n"
    )
    assert nvml_alone({}, code).stdout.split() == ["uninitialised"] * 5


def test_the_end_of_the_lease_is_the_end_of_the_device(pool: Pool) -> None:
    code = (
        "import pynvml as nv, sys, time\n"
        "nv.nvmlInit()\n"
        "handle = nv.nvmlDeviceGetHandleByIndex(0)\n"
        "print(nv.nvmlDeviceGetMemoryInfo(handle).total, flush=True)\n"
        "sys.stdin.readline()\n"
        "time.sleep(0.1)\n"  # what was told a moment ago is told again
        "for _ in range(3):\n"
        "    try: nv.nvmlDeviceGetMemoryInfo(handle)\n"
        "    except nv.NVMLError as error: print(error.value)\n"
        "print(nv.nvmlDeviceGetName(handle))\n"
        "nv.nvmlShutdown()\n"
        "try: nv.nvmlInit()\n"
        "except nv.NVMLError_DriverNotLoaded: print('no driver')\n"
    )
    with pool.started("main", [sys.executable, "-c", code]) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == f"{4096 * MIB}\n"
        pool.ctl("slice", "delete", "main", "--force", check=True)
        process.stdin.write("\n")
        process.stdin.flush()
        lines = process.stdout.read().splitlines()
    said = [line for line in lines if line.startswith("gpupool[")]
    assert len(said) == 1 and "lease" in said[0]
    assert [line for line in lines if line not in said] == [
        *[str(GPU_IS_LOST)] * 3,
        "gpupool simulated GPU 80GiB",
        "no driver",
    ]


def test_a_restarted_broker_is_found_again(pool: Pool) -> None:
    code = (
        "import pynvml as nv, sys, time\n"
        "nv.nvmlInit()\n"
        "handle = nv.nvmlDeviceGetHandleByIndex(0)\n"
        "for _ in sys.stdin:\n"
        "    time.sleep(0.1)\n"
        "    try: print(nv.nvmlDeviceGetMemoryInfo(handle).total, flush=True)\n"
        "    except nv.NVMLError as error: print(-error.value, flush=True)\n"
    )

    def ask() -> int:
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        while True:
            line = process.stdout.readline()  # type: ignore[union-attr]
            if not line.startswith("gpupool["):
                return int(line)

    with pool.started("main", [sys.executable, "-c", code]) as process:
        assert ask() == 4096 * MIB
        assert pool.broker is not None
        pool.broker.send_signal(signal.SIGKILL)
        pool.broker.wait()
        assert ask() == -GPU_IS_LOST
        pool.start_broker()
        wait_for("the broker's state", lambda: ask() == 4096 * MIB)


def test_nvml_goes_on_in_a_forked_child(shared_pool: Pool) -> None:
    """Also when another thread of the parent is asking at that moment."""
    code = (
        "import os, pynvml as nv, signal, threading\n"
        "def poll():\n"
        "    while not done.is_set():\n"
        "        nv.nvmlInit(); nv.nvmlShutdown()\n"
        "done = threading.Event()\n"
        "thread = threading.Thread(target=poll)\n"
        "thread.start()\n"
        "for _ in range(30):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(20)\n"
        "        nv.nvmlLib = None; nv.libLoadLock = threading.Lock()\n"  # pynvml's own
        "        nv.nvmlInit()\n"
        "        handle = nv.nvmlDeviceGetHandleByIndex(0)\n"
        "        os._exit(nv.nvmlDeviceGetMemoryInfo(handle).total >> 30)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print(code)\n"
        "    if code != 4: break\n"
        "done.set(); thread.join()\n"
    )
    done = shared_pool.run("main", [sys.executable, "-c", code])
    assert done.stdout.split() == ["4"] * 30, done.stderr


BUSY = """
import json, pynvml as nv
nv.nvmlInit()
h = nv.nvmlDeviceGetHandleByIndex(0)
try:
    samples = [[s.pid, s.smUtil] for s in nv.nvmlDeviceGetProcessUtilization(h, 0)]
except nv.NVMLError_NotFound:
    samples = []
try:
    nv.nvmlDeviceGetProcessUtilization(h, 1 << 62)  # nothing is newer than that
    raise SystemExit("a sample of the future")
except nv.NVMLError_NotFound:
    pass
print(json.dumps([nv.nvmlDeviceGetUtilizationRates(h).gpu, samples]))
"""


def busy(pool: Pool, slice_name: str) -> tuple[int, dict[int, int]]:
    """The device's utilisation and that of the processes that had any, in percent."""
    done = pool.run(slice_name, [sys.executable, "-c", BUSY])
    assert done.returncode == 0, done.stderr
    device, samples = json.loads(done.stdout)
    return device, dict(samples)


def test_utilisation_is_that_of_the_lease(shared_pool: Pool, compiler: Compiler) -> None:
    shared_pool.slice("beside", compute=10, memory=512)
    try:
        assert busy(shared_pool, "main") == (0, {})
        with shared_pool.started("main", [str(compiler.driver("busy"))]) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            [session] = shared_pool.sessions()
            pid = session["pid"]
            wait_for("utilisation", lambda: busy(shared_pool, "main")[1].get(pid, 0) > 0, 30)
            device, samples = busy(shared_pool, "main")
            assert 0 < device <= 100 and set(samples) == {pid}
            # The card has no other work; the slice beside sees none of this.
            assert busy(shared_pool, "beside") == (0, {})
            done = shared_pool.run("main", [tool("gpustat"), "--json"])
            [shown] = json.loads(done.stdout)["gpus"]
            assert 0 < shown["utilization.gpu"] <= 100
        wait_for("no utilisation", lambda: busy(shared_pool, "main") == (0, {}), 30)
    finally:
        shared_pool.ctl("slice", "delete", "--force", "beside", check=True)


def test_gpustat_shows_the_slice(shared_pool: Pool) -> None:
    with shared_pool.started("main", [*PROGRAM, "100"]) as process:
        told = first_line(process)
        done = shared_pool.run("main", [tool("gpustat"), "--json"])
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        [card] = shown["gpus"]
        assert (card["uuid"], card["memory.total"]) == (told["devices"][0]["uuid"], 4096)
        assert card["memory.used"] == told["devices"][0]["used"] // MIB
        assert [entry["pid"] for entry in card["processes"]] == [told["pid"]]
        assert card["utilization.gpu"] == 0  # it waits
        assert shown["driver_version"] == "580.0.0"


def test_nvitop_shows_the_slice(shared_pool: Pool) -> None:
    with shared_pool.started("main", [*PROGRAM, "100"]) as process:
        told = first_line(process)
        done = shared_pool.run(
            "main", [tool("nvitop"), "--once"], environment={"COLUMNS": "120", "LINES": "50"}
        )
    assert done.returncode == 0, done.stderr
    used = told["devices"][0]["used"] // MIB
    assert re.search(rf"{used}(\.\d+)?MiB / 4096MiB", done.stdout), done.stdout
    assert told["devices"][0]["pci"] in done.stdout
    assert re.search(rf"\b{told['pid']}\b", done.stdout)
    assert "580.0.0" in done.stdout


@pytest.mark.parametrize("which", ["client", "simgpu"])
def test_every_function_of_the_bindings_is_there(which: str) -> None:
    import pynvml

    names = set(re.findall(r'FunctionPointer\("(nvml\w+)"', Path(pynvml.__file__).read_text()))
    assert len(names) > 300
    library = ctypes.CDLL(str(paths.native_directory() / which / "libnvidia-ml.so.1"))
    assert [name for name in sorted(names) if not hasattr(library, name)] == []


EVERY_FUNCTION = """
import ctypes, re, sys
import pynvml as nv
nv.nvmlInit()
card = nv.nvmlDeviceGetHandleByIndex(0)
library = ctypes.CDLL("libnvidia-ml.so.1")
names = set(re.findall(r'FunctionPointer\\("(nvml\\w+)"', open(nv.__file__).read()))
for name in sorted(names - {"nvmlInitWithFlags", "nvmlInit_v2", "nvmlShutdown", "nvmlErrorString"}):
    firsts = [None]
    if name.startswith("nvmlDevice") and not re.match("nvmlDeviceGet(Count|HandleBy)", name):
        firsts += [card, ctypes.c_void_p(0x1234)]
    for first in firsts:
        if getattr(library, name)(first, None, None, None, None, None) == 0:
            print(name, first)
"""


def test_null_pointers_and_strange_handles_are_errors(shared_pool: Pool) -> None:
    for done in (
        shared_pool.run("main", [sys.executable, "-c", EVERY_FUNCTION]),
        shared_pool.direct([sys.executable, "-c", EVERY_FUNCTION]),
    ):
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
