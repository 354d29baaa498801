"""Builds the native parts with CMake and puts them into the package (gpupoold/_native)."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent
#: Kept between builds, so that a second build compiles only what changed.
NATIVE_BUILD = pathlib.Path(os.environ.get("GPUPOOL_NATIVE_BUILD", ROOT / "build" / "native"))


def _run(*command: str | os.PathLike[str]) -> None:
    print("+", *map(str, command), flush=True)
    try:
        subprocess.run([*map(str, command)], check=True, cwd=ROOT)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is not installed: install the packages that bindep.txt names")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, command))} failed with exit status {error.returncode}")


class BuildWithNative(build_py):
    """build_py, after the generated Python modules and together with the native parts."""

    def run(self) -> None:
        _run(sys.executable, ROOT / "tools" / "generate_protos.py")
        super().run()
        target = pathlib.Path(self.build_lib) / "gpupoold" / "_native"
        shutil.rmtree(target, ignore_errors=True)
        _run(
            "cmake",
            "-S", ROOT,
            "-B", NATIVE_BUILD,
            "-G", "Ninja",
            f"-DPython3_EXECUTABLE={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
        )  # fmt: skip
        _run("cmake", "--build", NATIVE_BUILD)
        _run(
            "cmake",
            "--install", NATIVE_BUILD,
            "--component", "native",
            "--prefix", target.resolve(),
            "--strip",
        )  # fmt: skip
        # A wheel can't hold links; it would hold copies, and a process could load both.
        for link in [path for path in target.rglob("*") if path.is_symlink()]:
            link.unlink()


class NativeDistribution(Distribution):
    """A distribution whose wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The native parts do not use Python's ABI: one wheel serves every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel},
    distclass=NativeDistribution,
)
