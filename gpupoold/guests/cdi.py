"""CDI specifications: what a container runtime does for `--device gpupool/slice=NAME`.

Pure functions; the format is https://github.com/cncf-tags/container-device-interface, SPEC.md. A
specification names the slice's directory and the client libraries, and holds no secret.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

from gpupoold.model import Slice
from gpupoold.slices.planning import is_reserved

KIND = "gpupool/slice"
#: where the client library looks; kSliceDirectory in native/wire/handshake.h
CONTAINER_DIRECTORY = "/run/gpupool/slice"
#: a device's name; a digit at its beginning is allowed since 0.5.0
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_OLD, _DIGITS = "0.3.0", "0.5.0"


def device_names(piece: Slice) -> list[str]:
    """The names of a slice's device: its virtual UUID, and its own name if CDI allows that.

    A name that may be another slice's UUID (an older gpupoold took such) is left out: two devices
    of one name make both unusable.
    """
    names = [piece.virtual_uuid]
    if _NAME.fullmatch(piece.name) and not is_reserved(piece.name):
        names.insert(0, piece.name)
    return names


def _mount(host: str, container: str, *options: str) -> dict[str, Any]:
    return {
        "hostPath": host,
        "containerPath": container,
        "options": ["bind", "ro", "nosuid", "nodev", *options],
    }


def check_directory(run_dir: str, directory: str) -> None:
    """Raises OSError if anybody but root and this user could exchange what lies at `directory`.

    Root's container runtime mounts what is there. One that is missing is no danger: only the broker
    can make it, as long as the directories above are its own.
    """
    path = run_dir
    for name in os.path.relpath(directory, run_dir).split(os.sep):
        path = os.path.join(path, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode):
            reason = "it is not a directory"
        elif found.st_uid not in (0, os.geteuid()):
            reason = f"it belongs to user {found.st_uid}"
        elif found.st_mode & 0o022:
            # Also an access control list gives nobody more than the group's bits.
            reason = "others may write to it"
        else:
            continue
        raise PermissionError(errno.EPERM, f"containers are not given it: {reason}", path)


def specification(
    piece: Slice, socket_directory: str, libraries: Sequence[tuple[str, str]], into: Sequence[str]
) -> dict[str, Any]:
    """The specification of one slice.

    libraries: (file of the host, name in the container). into: directories of the container.
    """
    mounts = [
        _mount(host, os.path.join(directory, name))
        for directory in into
        for host, name in libraries
    ]
    # The directory, not the socket in it: that is another one after a restart of the broker.
    mounts.append(_mount(socket_directory, CONTAINER_DIRECTORY, "noexec"))
    names = device_names(piece)
    return {
        "cdiVersion": _DIGITS if any(name[0].isdigit() for name in names) else _OLD,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": {"mounts": mounts}} for name in names],
    }


def text_of(spec: dict[str, Any]) -> str:
    """The file's content."""
    return json.dumps(spec, indent=2) + "\n"
