"""The simulated driver: what a program sees of it, and what processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).resolve().parent / "simgpu_scenarios.py"


class Machine:
    """A simulated machine of the test's own: its programs share one state directory."""

    def __init__(self, driver: Path, state: Path) -> None:
        self.environment = {
            **os.environ,
            "SIMGPU_DIRECTORY": str(driver),
            "GPUPOOL_SIMGPU_STATE_DIR": str(state),
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        self.environment.pop("GPUPOOL_SIMGPU_MACHINE", None)

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCENARIOS), *arguments],
            env={**self.environment, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **extra: str) -> tuple[str, str]:
        """Runs a scenario to its end, which must be a good one."""
        process = self.start(*arguments, **extra)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, f"{arguments}: {process.returncode}\n{out}\n{err}"
        return out, err


@pytest.fixture
def machine(simulated_driver: Path, tmp_path: Path) -> Machine:
    return Machine(simulated_driver, tmp_path / "state")


@pytest.mark.parametrize(
    "scenario",
    [
        "accounting",
        "copies",
        "virtual_memory",
        "streams",
        "threads",
        "errors_at_the_call",
        "jit_log",
        "primary",
        "pointers",
        "linking",
        "forked",
        "stuck",
    ],
)
def test_behaves_like_the_driver(machine: Machine, scenario: str) -> None:
    machine.run(scenario)


def test_faults_are_sticky_and_told(machine: Machine) -> None:
    _, err = machine.run("faults")
    assert "Invalid write of size 4 bytes (error 700)" in err
    assert "at kernel store\n" in err
    assert "by thread (0,0,0) in block (0,0,0)" in err
    assert "Misaligned write of size 4 bytes (error 716)" in err


def test_limits_of_a_context(machine: Machine) -> None:
    out, _ = machine.run("limits")
    assert out == "hello 1\nhello 4\nhello 3\n"


def test_deadlock_is_told(machine: Machine) -> None:
    _, err = machine.run("stuck")
    assert "deadlock: threads wait at a barrier for threads that never arrive" in err
    assert "at kernel stuck\n" in err


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ("kernel_instruction_limit = 1000000", "more instructions than the launch allows"),
        ("kernel_time_limit_ms = 300", "ran longer than the machine allows"),
    ],
)
def test_endless_kernels_are_stopped(
    machine: Machine, tmp_path: Path, limit: str, sentence: str
) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(f"{limit}\n[[gpu]]\n")
    _, err = machine.run("endless", GPUPOOL_SIMGPU_MACHINE=str(path))
    assert "Kernel stopped with error 702" in err and sentence in err


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6"])
def test_compute_capabilities(machine: Machine, tmp_path: Path, capability: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(f"[[gpu]]\ncompute_capability = '{capability}'\n")
    machine.run("capability", capability, GPUPOOL_SIMGPU_MACHINE=str(path))


def test_strict_mode(machine: Machine) -> None:
    assert machine.run("unwritten") == ("0\n", "")
    assert machine.run("unwritten", GPUPOOL_SIMGPU_STRICT="0") == ("0\n", "")
    out, err = machine.run("unwritten", GPUPOOL_SIMGPU_STRICT="1")
    assert out == "719\n"
    assert "a read of shared memory that the block has not written: ld.shared.u32" in err
    _, err = machine.run("unwritten_global", GPUPOOL_SIMGPU_STRICT="1")
    assert err.count("a read of device memory that nothing has written: ld.global.u32") == 4


def test_order_of_blocks(machine: Machine) -> None:
    """With one host thread it is the usual one, or the one that the shuffle's number decides."""

    def order(**variables: str) -> list[int]:
        return [
            int(n) for n in machine.run("order", GPUPOOL_SIMGPU_THREADS="1", **variables)[0].split()
        ]

    usual = list(range(40))
    assert order() == usual
    seven = order(GPUPOOL_SIMGPU_SHUFFLE="7")
    assert sorted(seven) == usual and seven != usual
    assert order(GPUPOOL_SIMGPU_SHUFFLE="7") == seven
    assert order(GPUPOOL_SIMGPU_SHUFFLE="8") not in (usual, seven)


def test_counters(machine: Machine) -> None:
    _, err = machine.run("counted", GPUPOOL_SIMGPU_COUNTERS="1")
    # 3 blocks of a whole warp and half of one, 4 instructions each.
    expected = (
        "gpupool-simgpu: store grid (3,1,1) block (48,1,1): 3 blocks, 24 warp instructions, "
        "576 thread instructions, lane use 75.0 %, "
    )
    assert expected in err, err


def test_printf_appears_at_synchronisation(machine: Machine) -> None:
    out, _ = machine.run("device_printf")
    assert out == "hello 42\nhello 43\n"


def test_memory_is_accounted_over_processes(machine: Machine) -> None:
    total = 81920
    assert machine.run("free_memory")[0] == f"{total}\n"
    holder = machine.start("hold", "3000")
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holding\n"
        assert machine.run("free_memory")[0] == f"{total - 3000}\n"
        machine.run("out_of_memory", str(total - 3000))
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert machine.run("free_memory")[0] == f"{total}\n"
        machine.run("accounting")
    finally:
        holder.kill()
        holder.communicate()


def test_killed_while_computing(machine: Machine) -> None:
    holder = machine.start("pause_long", "50000")
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "started\n"
        time.sleep(0.3)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        machine.run("small_kernels")
    finally:
        holder.kill()
        holder.communicate()


def test_contexts_take_turns(machine: Machine) -> None:
    """A small kernel does not wait for another process's long one to end, only for its turn."""
    holder = machine.start("pause_long", "5000")
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "started\n"
        machine.run("small_kernels")
        assert holder.poll() is None
        out, err = holder.communicate(timeout=60)
        assert holder.returncode == 0, err
        assert out == "ended\n"
    finally:
        holder.kill()
        holder.communicate()


def test_devices_and_their_choice(machine: Machine) -> None:
    both = machine.run("devices")[0].split()
    assert len(both) == 2 and both[0] != both[1]
    assert machine.run("devices")[0].split() == both
    assert machine.run("devices", CUDA_VISIBLE_DEVICES="1")[0].split() == [both[1]]
    assert machine.run("devices", CUDA_VISIBLE_DEVICES="1,0")[0].split() == both[::-1]
    assert machine.run("devices", CUDA_VISIBLE_DEVICES="")[0] == "error 100\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpu = 3\n", "must be a list of tables"),
        ("[[gpu]]\nmemory_mib = 'much'\n", "'memory_mib' is not an integer"),
        ("[[gpu]]\nmemory_mib = 1\n", "'memory_mib' is 1, but must be from 64"),
        ("[[gpu]]\ncompute_capability = '3.0'\n", "the simulator knows"),
        ("[[gpu]]\nmemmory_mib = 100\n", "unknown key 'memmory_mib'"),
        ("[[gpu]]\npci = 'x'\n", "'pci' is"),
        ("[[[", "cannot be parsed as TOML"),
        ("[[gpu]\n", "not valid TOML (line 1"),
    ],
)
def test_wrong_machine_file(machine: Machine, tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    out, err = machine.run("devices", GPUPOOL_SIMGPU_MACHINE=str(path))
    assert out == "error 3\n"
    assert str(path) in err and sentence in err
    assert err.count("\n") == 1


def test_missing_machine_file(machine: Machine) -> None:
    out, err = machine.run("devices", GPUPOOL_SIMGPU_MACHINE="/nowhere/machine.toml")
    assert out == "error 3\n"
    assert "/nowhere/machine.toml does not exist" in err


def test_another_machine(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("[[gpu]]\ncompute_capability = '7.5'\nmemory_mib = 16384\ncount = 3\n")
    assert len(machine.run("devices", GPUPOOL_SIMGPU_MACHINE=str(path))[0].split()) == 3
    out, _ = machine.run("free_memory", GPUPOOL_SIMGPU_MACHINE=str(path))
    assert out == "16384\n"
