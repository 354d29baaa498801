"""A file that one other user may read: processes of others ask the kernel who may what."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from gpupoold.access import let_read

USER, STRANGER = 30001, 30002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def may(path: str, word: str, uid: int, gid: int) -> bool:
    """Whether a process of these ids may: test(1) asks faccessat(2)."""
    command = ["test", word, path]
    done = subprocess.run(command, user=uid, group=gid, extra_groups=[], check=False, cwd="/")
    return done.returncode == 0


@pytest.fixture
def file(root):
    root.chmod(0o755)
    path = root / "file"
    path.write_text("secret")
    path.chmod(0o600)
    with path.open("r+") as opened:
        yield opened


@needs_root
def test_one_user_reads_and_nobody_else(file):
    let_read(file.fileno(), USER)
    assert may(file.name, "-r", USER, USER)
    assert not may(file.name, "-w", USER, USER)
    assert not may(file.name, "-x", USER, USER)
    for group in (0, USER, STRANGER):  # root's group is the file's
        assert not may(file.name, "-r", STRANGER, group)
    assert os.fstat(file.fileno()).st_uid == 0


@needs_root
def test_without_access_control_lists_the_user_gets_the_file(file, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "setxattr", refuse)
    let_read(file.fileno(), USER)
    assert may(file.name, "-r", USER, USER)
    assert not may(file.name, "-r", STRANGER, STRANGER)
