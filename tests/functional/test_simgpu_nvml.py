"""NVML of the simulated machine, through the bindings that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCENARIOS = Path(__file__).resolve().parent / "simgpu_scenarios.py"

PROGRAM = """
import json, pynvml as nv
nv.nvmlInit()
cards = []
for i in range(nv.nvmlDeviceGetCount()):
    h = nv.nvmlDeviceGetHandleByIndex(i)
    memory = nv.nvmlDeviceGetMemoryInfo(h)
    second = nv.nvmlDeviceGetMemoryInfo(h, version=nv.nvmlMemory_v2)
    assert (memory.total, memory.used, memory.free) == (second.total, second.used, second.free)
    pci = nv.nvmlDeviceGetPciInfo(h)
    uuid = nv.nvmlDeviceGetUUID(h)
    assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByUUID(uuid)) == i
    assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByPciBusId(pci.busId)) == i
    assert nv.nvmlDeviceGetMigMode(h) == [0, 0]
    assert nv.nvmlDeviceGetUtilizationRates(h).gpu <= 100
    assert 0 < nv.nvmlDeviceGetTemperature(h, nv.NVML_TEMPERATURE_GPU) < 100
    assert 0 < nv.nvmlDeviceGetPowerUsage(h) <= nv.nvmlDeviceGetPowerManagementLimit(h)
    clock = nv.NVML_CLOCK_SM
    assert nv.nvmlDeviceGetClockInfo(h, clock) <= nv.nvmlDeviceGetMaxClockInfo(h, clock)
    try:
        nv.nvmlDeviceGetFanSpeed(h)
        raise SystemExit("a fan")
    except nv.NVMLError_NotSupported:
        pass
    cards.append({
        "name": nv.nvmlDeviceGetName(h), "uuid": uuid, "total": memory.total, "used": memory.used,
        "pci": pci.busId, "capability": nv.nvmlDeviceGetCudaComputeCapability(h),
        "processes": [[p.pid, p.usedGpuMemory] for p in nv.nvmlDeviceGetComputeRunningProcesses(h)],
    })
try:
    nv.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")
    raise SystemExit("a card that is not there")
except nv.NVMLError_NotFound:
    pass
version = [nv.nvmlSystemGetDriverVersion(), nv.nvmlSystemGetCudaDriverVersion()]
nv.nvmlShutdown()
print(json.dumps({"cards": cards, "version": version}))
"""


def query(environment: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nvml_and_driver_tell_the_same(simulated_driver: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(simulated_driver),
        "SIMGPU_DIRECTORY": str(simulated_driver),
        "GPUPOOL_SIMGPU_STATE_DIR": str(tmp_path / "state"),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment.pop("GPUPOOL_SIMGPU_MACHINE", None)
    told = query(environment)
    assert len(told["cards"]) == 2
    first = told["cards"][0]
    assert first["name"] == "gpupool simulated GPU 80GiB"
    assert (first["total"], first["used"], first["processes"]) == (80 << 30, 0, [])
    assert first["pci"] == "00000000:01:00.0" and first["capability"] == [8, 0]
    assert told["version"][1] == 13000

    uuids = subprocess.run(
        [sys.executable, str(SCENARIOS), "devices"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert [card["uuid"].removeprefix("GPU-").replace("-", "") for card in told["cards"]] == uuids

    holder = subprocess.Popen(
        [sys.executable, str(SCENARIOS), "hold", "512"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holding\n"
        card = query(environment)["cards"][0]
        assert card["used"] == 512 << 20
        assert card["processes"] == [[holder.pid, 512 << 20]]
        holder.kill()
        holder.wait()
        card = query(environment)["cards"][0]
        assert (card["used"], card["processes"]) == (0, [])
    finally:
        holder.kill()
        holder.communicate()
