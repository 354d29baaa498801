"""The region's file: who may open it, its header, and whose file is removed."""

from __future__ import annotations

import os
import stat
import struct
import uuid

import pytest

from gpupoold.guests.region import RegionError, Regions

LEASE = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
OTHER = "99999999-bbbb-4ccc-8ddd-eeeeeeeeeeee"


@pytest.fixture
def regions(root):
    return Regions("/run/gpupool", 1, "", str(root))


def test_the_file_has_size_mode_and_memory(regions, root):
    path, inode = regions.make("gpupool-x", LEASE)
    found = os.stat(path)
    assert path == str(root / "gpupool-x") and found.st_ino == inode
    assert found.st_size == 1 << 20 and found.st_blocks * 512 >= 1 << 20  # none is missing later
    assert stat.S_IMODE(found.st_mode) == 0o660


def test_the_header_is_as_documented(regions):
    path, inode = regions.make("gpupool-x", LEASE)
    assert regions.write_header(path, inode, LEASE, 7)
    with open(path, "rb") as stream:
        data = stream.read(64)
    assert data[:8] == b"GPPREGN1" and data[16:32] == uuid.UUID(LEASE).bytes
    assert struct.unpack_from("<Q", data, 8) == (7,)
    assert struct.unpack_from("<IIQ", data, 48) == (1, 4096, 1 << 20)
    assert regions.is_current(path, inode, LEASE, 7)
    assert not regions.is_current(path, inode, LEASE, 8)
    assert not regions.is_current(path, inode, OTHER, 7)
    regions.write_header(path, inode, LEASE, 7, ended=True)
    with open(path, "rb") as stream:
        assert struct.unpack_from("<I", stream.read(64), 48) == (2,)


def test_a_link_or_file_that_lies_there_is_never_written_to(regions, root):
    victim = root / "victim"
    victim.write_text("mine")
    (root / "gpupool-x").symlink_to(victim)
    path, inode = regions.make("gpupool-x", LEASE)
    assert victim.read_text() == "mine" and not os.path.islink(path)
    os.unlink(path)
    os.symlink(victim, path)
    assert not regions.write_header(path, inode, LEASE, 2)
    assert victim.read_text() == "mine"


def test_only_the_file_that_was_made_is_removed(regions):
    path, first = regions.make("gpupool-x", LEASE)
    keep = os.open(path, os.O_RDONLY)  # as QEMU does
    _, second = regions.make("gpupool-x", OTHER)
    regions.remove(path, first)
    assert os.stat(path).st_ino == second
    regions.remove(path, second)
    assert not os.path.exists(path)
    regions.remove(path, second)
    os.close(keep)


def test_leftovers_of_this_gpupoold_alone_are_swept(regions, root):
    mine, _ = regions.make("gpupool-a", LEASE)
    known, _ = regions.make("gpupool-b", LEASE)
    foreign, _ = Regions("/run/other", 1, "", str(root)).make("gpupool-c", LEASE)
    (root / "gpupool-d").write_text("short")
    assert regions.remove_strangers({known}) == [mine]
    assert os.path.exists(known) and os.path.exists(foreign) and (root / "gpupool-d").exists()


def test_what_goes_wrong_is_said_and_leaves_nothing(root):
    with pytest.raises(RegionError, match="no group nobody-has-this"):
        Regions("/run/x", 1, "nobody-has-this", str(root)).make("gpupool-x", LEASE)
    assert os.listdir(root) == []
    with pytest.raises(RegionError, match="cannot be made"):
        Regions("/run/x", 1, "", str(root / "missing")).make("gpupool-x", LEASE)
