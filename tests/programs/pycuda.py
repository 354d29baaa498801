"""Builds pycuda from its source package, without CURAND and OpenGL, into the programs' cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.programs.toolchain import Compiler, ToolchainError

VERSION = "2026.1"


def build_pycuda(compiler: Compiler) -> Path:
    """The folder to put on PYTHONPATH. Raises ToolchainError with the end of the build's output."""
    target = compiler.cache / f"pycuda-{VERSION}-{sys.version_info.major}{sys.version_info.minor}"
    if target.exists():
        return target
    compiler.cache.mkdir(parents=True, exist_ok=True)
    toolkit = compiler.toolkit
    with tempfile.TemporaryDirectory(dir=compiler.cache) as scratch:
        settings = Path(scratch) / ".aksetup-defaults.py"
        stub = compiler.driver_stub().parent
        link = Path(scratch) / "libcuda.so"
        link.symlink_to(stub / "libcuda.so.1")
        settings.write_text(
            f"CUDA_ROOT = {str(toolkit.nvcc.parent.parent)!r}\n"
            f"CUDA_INC_DIR = [{str(toolkit.include)!r}]\n"
            f"CUDADRV_LIB_DIR = [{scratch!r}]\n"
            "CUDADRV_LIBNAME = ['cuda']\n"
            "CUDA_ENABLE_GL = False\nCUDA_ENABLE_CURAND = False\n"
        )
        out = Path(scratch) / "site"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-binary",
                "pycuda",
                "--target",
                str(out),
                f"pycuda=={VERSION}",
            ],
            env={**os.environ, "HOME": scratch},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ToolchainError(f"pycuda {VERSION} was not built:\n{done.stderr[-3000:]}")
        os.replace(out, target)
    return target
