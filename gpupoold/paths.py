"""Where the native parts (broker, worker, client library, coverage) are installed."""

from __future__ import annotations

import os
import threading
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


def search_directory(run_dir: str) -> Path:
    """For LD_LIBRARY_PATH: where programs find the client library under both of its names.

    Linkers, Numba and others look for libcuda.so, which a wheel can't hold as a link. Where it is
    missing, links to the client library are made in `run_dir`/client. (A copy would not do: a
    process that finds both names must get one library.)
    """
    client = client_directory()
    if (client / "libcuda.so").exists():
        return client
    library = client / "libcuda.so.1"
    links = Path(run_dir) / "client"
    try:
        links.mkdir(mode=0o755, exist_ok=True)
        for name in ("libcuda.so.1", "libcuda.so"):
            link = links / name
            if link.is_symlink() and link.readlink() == library:
                continue
            fresh = links / f".{name}.{os.getpid()}.{threading.get_ident()}"
            fresh.symlink_to(library)
            fresh.replace(link)
    except OSError:
        return client
    return links


def coverage_file() -> Path:
    """The generated coverage of the driver API, JSON."""
    return native_directory() / "share" / "coverage.json"
