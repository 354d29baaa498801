"""Directories that somebody else could change are not used."""

from __future__ import annotations

import os
import stat

import pytest

from gpupoold.directories import ForeignDirectory, own_directory

NOBODY = 65534


def mode_of(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_it_is_made_or_taken_with_its_mode(root):
    own_directory(str(root / "a" / "b"), 0o711)
    assert mode_of(root / "a" / "b") == 0o711
    own_directory(str(root / "a" / "b"), 0o700)
    assert mode_of(root / "a" / "b") == 0o700


def test_a_link_is_followed_only_where_an_operator_may_place_one(root):
    (root / "target").mkdir(mode=0o750)
    (root / "link").symlink_to(root / "target")
    with pytest.raises(ForeignDirectory, match="symbolic link"):
        own_directory(str(root / "link"), 0o700)
    assert mode_of(root / "target") == 0o750  # untouched
    own_directory(str(root / "link"), 0o700, may_be_link=True)
    assert mode_of(root / "target") == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("what", ["directory", "link", "target"])
def test_somebody_elses_is_refused(root, what):
    (root / "target").mkdir(mode=0o755)
    path = root / "target"
    if what != "directory":
        path = root / "link"
        path.symlink_to(root / "target")
    os.chown(root / "target" if what != "link" else path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ForeignDirectory) as caught:
        own_directory(str(path), 0o700, may_be_link=True)
    assert caught.value.filename == str(path)
    assert mode_of(root / "target") == 0o755
