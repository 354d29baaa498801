"""gpupoold: the daemon of a gpupool host, and gpupoolctl, its command line."""

from __future__ import annotations


def version() -> str:
    """The installed version, or "0+unknown" when run from a bare source tree."""
    from importlib import metadata

    try:
        return metadata.version("gpupool")
    except metadata.PackageNotFoundError:
        return "0+unknown"
