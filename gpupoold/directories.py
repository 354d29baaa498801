"""Directories that only gpupoold, and root, may change."""

from __future__ import annotations

import os
import stat

#: errno-less reasons end in this advice
ADVICE = "give it to the user that runs gpupoold, or name another directory"


class ForeignDirectory(OSError):
    """A directory, or a link to one, that belongs to somebody else; `strerror` is the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(0, f"{reason}; {ADVICE}", path)


def own_directory(path: str, mode: int, *, may_be_link: bool = False) -> None:
    """Makes the directory or takes the one that is there, with this mode.

    Whoever owns a directory can replace what lies in it: the owner must be this process's user or
    root. With `may_be_link` an operator's symbolic link is followed, if it belongs to one of them.
    Raises OSError, for instance ForeignDirectory.
    """
    os.makedirs(path, mode=mode, exist_ok=True)
    trusted = {0, os.geteuid()}
    own = os.lstat(path)
    if stat.S_ISLNK(own.st_mode) and not (may_be_link and own.st_uid in trusted):
        raise ForeignDirectory(path, "it is a symbolic link")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if may_be_link else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    try:
        found = os.fstat(fd)
        if found.st_uid not in trusted:
            raise ForeignDirectory(path, f"it belongs to user {found.st_uid}")
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)
