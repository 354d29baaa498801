"""Entry points that become one of the native programs."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from gpupoold import paths


def _become(name: str) -> NoReturn:
    program = paths.native_directory() / "bin" / name
    try:
        os.execv(program, [str(program), *sys.argv[1:]])  # noqa: S606
    except OSError as error:
        print(f"{name}: {program} cannot be executed: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def broker() -> NoReturn:
    """gpupool-broker: same process id, same arguments."""
    _become("gpupool-broker")
