"""Where the native parts (broker, worker, client library, coverage) are installed, and what both
gpupoold and its clients must know by name.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

#: what programs load, and the names without a version that linkers, Numba and others look for
CLIENT_LIBRARIES = {
    "libcuda.so.1": "libcuda.so.1",
    "libcuda.so": "libcuda.so.1",
    "libnvidia-ml.so.1": "libnvidia-ml.so.1",
    "libnvidia-ml.so": "libnvidia-ml.so.1",
}
#: below run_dir: the interface again, which only root and gpupoold's own user reach
ROOT_SOCKET = "private/ctl.sock"
#: names another prefix with bin/, client/, simgpu/, quiet/ and share/ (development and tests)
ENVIRONMENT = "GPUPOOL_NATIVE_DIR"


def native_directory() -> Path:
    """The prefix of the native parts: $GPUPOOL_NATIVE_DIR, else inside this package."""
    override = os.environ.get(ENVIRONMENT)
    if override:
        return Path(override).resolve()
    return Path(__file__).resolve().parent / "_native"


def client_directory() -> Path:
    """The directory of the client's libraries."""
    return native_directory() / "client"


def search_directory(run_dir: str) -> Path:
    """For LD_LIBRARY_PATH: where programs find the client's libraries under all their names.

    A wheel can't hold links. Where one is missing, links to the libraries are made in
    `run_dir`/client. (A copy would not do: a process that finds both names of a library must get
    one.)
    """
    client = client_directory()
    if all((client / name).exists() for name in CLIENT_LIBRARIES):
        return client
    links = Path(run_dir) / "client"
    try:
        links.mkdir(mode=0o755, exist_ok=True)
        for name, library in CLIENT_LIBRARIES.items():
            link = links / name
            if link.is_symlink() and link.readlink() == client / library:
                continue
            fresh = links / f".{name}.{os.getpid()}.{threading.get_ident()}"
            fresh.symlink_to(client / library)
            fresh.replace(link)
    except OSError:
        return client
    return links


def coverage_file() -> Path:
    """The generated coverage of the driver API, JSON."""
    return native_directory() / "share" / "coverage.json"
