"""The libraries that are loaded into applications: what they export, need and bring along."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold import paths

SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
}


def readelf(option: str, library: Path) -> str:
    return subprocess.run(
        ["readelf", "--wide", option, str(library)], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module", params=["client", "simgpu", "quiet"])
def library(request: pytest.FixtureRequest) -> Path:
    return paths.native_directory() / request.param / "libcuda.so.1"


@pytest.fixture(scope="module", params=["client", "simgpu", "quiet"])
def nvml_library(request: pytest.FixtureRequest) -> Path:
    return paths.native_directory() / request.param / "libnvidia-ml.so.1"


@pytest.fixture(scope="module", params=["libcuda.so.1", "libnvidia-ml.so.1"])
def client_library(request: pytest.FixtureRequest) -> Path:
    return paths.client_directory() / request.param


def exported(library: Path) -> set[str]:
    names = set()
    for line in readelf("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK") and fields[6] != "UND":
            names.add(fields[7].partition("@")[0])
    return names


def test_exports_cuda_names_only(library: Path) -> None:
    names = exported(library)
    strangers = {name for name in names if not re.fullmatch(r"cu[A-Z]\w*", name)}
    assert not strangers
    assert len(names) > 600
    assert {"cuInit", "cuGetProcAddress_v2", "cuLaunchKernel_ptsz", "cuProfilerStart"} <= names


def test_exports_nvml_names_only(nvml_library: Path) -> None:
    names = exported(nvml_library)
    assert not {name for name in names if not re.fullmatch(r"nvml[A-Z]\w*", name)}
    assert len(names) > 400
    assert {"nvmlInit_v2", "nvmlErrorString", "nvmlDeviceGetNvLinkRemotePciInfo_v2"} <= names


def needs_the_system_only(library: Path) -> None:
    dynamic = readelf("--dynamic", library)
    assert set(re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic)) <= SYSTEM_LIBRARIES
    assert re.findall(r"\(SONAME\).*\[(.*?)\]", dynamic) == [library.name]


def test_needs_the_system_only(library: Path) -> None:
    needs_the_system_only(library)


def test_nvml_needs_the_system_only(nvml_library: Path) -> None:
    needs_the_system_only(nvml_library)


def test_client_loads_on_glibc_2_28(client_library: Path) -> None:
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", readelf("--version-info", client_library))
    assert versions
    assert max((int(major), int(minor)) for major, minor in versions) <= (2, 28)


def test_client_brings_nothing_into_the_application(client_library: Path) -> None:
    code = (
        "import ctypes, sys\n"
        "def loaded(): return {l.split()[-1] for l in open('/proc/self/maps') if '.so' in l}\n"
        "before = loaded()\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "getattr(library, sys.argv[2])(0)\n"
        "print(*sorted(loaded() - before), sep='\\n')\n"
    )
    init = {"libcuda.so.1": "cuInit", "libnvidia-ml.so.1": "nvmlInit_v2"}[client_library.name]
    done = subprocess.run(
        [sys.executable, "-c", code, str(client_library), init],
        capture_output=True,
        text=True,
        check=True,
    )
    brought = {Path(line).name for line in done.stdout.split()}
    assert brought - SYSTEM_LIBRARIES == {client_library.name}


def test_program_without_a_lease_is_told_so() -> None:
    """cuInit fails, as on a machine without a card, with one clear line."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cuInit(0))"
    library = paths.client_directory() / "libcuda.so.1"
    # GPUPOOL_LOG is not set: it is said without being asked for.
    environment = {"PATH": "/usr/bin:/bin", "GPUPOOL_LEASE_FILE": "/nonexistent/lease.json"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert int(done.stdout) in (100, 46, 999), done.stderr  # no device, unavailable, unknown
    assert "/nonexistent/lease.json" in done.stderr
