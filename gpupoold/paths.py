"""Where the native parts (broker, worker, client library, coverage) are installed."""

from __future__ import annotations

import os
from pathlib import Path

#: names another prefix with bin/, client/, simgpu/, quiet/ and share/ (development and tests)
ENVIRONMENT = "GPUPOOL_NATIVE_DIR"


def native_directory() -> Path:
    """The prefix of the native parts: $GPUPOOL_NATIVE_DIR, else inside this package."""
    override = os.environ.get(ENVIRONMENT)
    if override:
        return Path(override).resolve()
    return Path(__file__).resolve().parent / "_native"


def client_directory() -> Path:
    """The directory of the client's libcuda.so.1."""
    return native_directory() / "client"


def coverage_file() -> Path:
    """The generated coverage of the driver API, JSON."""
    return native_directory() / "share" / "coverage.json"
