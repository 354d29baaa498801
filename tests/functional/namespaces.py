"""Being somebody else for a moment: another user, or a process in namespaces as a container's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def unshare(flags: int) -> None:
    _check(_LIBC.unshare(flags))


def bind(source: Path, target: Path) -> None:
    """A bind mount that this mount namespace alone sees."""
    _check(_LIBC.mount(b"none", b"/", None, _REC | _PRIVATE, None))
    _check(_LIBC.mount(bytes(source), bytes(target), None, _BIND, None))


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def in_child(
    do: Callable[[], str], *, user_map: str = "", enter: Callable[[], None] | None = None
) -> str:
    """What `do` returns, or the class and text of its exception, in a child process.

    user_map: the lines of uid_map and gid_map that this process writes for the child after `enter`.
    """
    answer_in, answer_out = os.pipe()
    entered_in, entered_out = os.pipe()
    mapped_in, mapped_out = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            if enter is not None:
                enter()
            os.write(entered_out, b".")
            os.read(mapped_in, 1)
            text = do()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(answer_out, text.encode())
            os._exit(0)
    for fd in (answer_out, entered_out):
        os.close(fd)
    try:
        if os.read(entered_in, 1) and user_map:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{name}").write_text(user_map)
        os.write(mapped_out, b".")
        with contextlib.closing(open(answer_in, "rb", closefd=False)) as answer:
            return answer.read().decode()
    finally:
        for fd in (answer_in, entered_in, mapped_in, mapped_out):
            os.close(fd)
        os.waitpid(child, 0)
