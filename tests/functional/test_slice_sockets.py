"""The broker's socket of a slice, by which containers come without a key: who may, and how long."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpupoold.leases import broker_pb2 as pb
from tests.functional import namespaces, wire
from tests.functional.broker_host import BrokerHost, make_lease
from tests.functional.pool import wait_for

OWNER, STRANGER = 30001, 30002
NAME = "GPU-00000000-1111-2222-3333-444444444444"
ACL, DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def host() -> Iterator[BrokerHost]:
    # Short, as a client in a container has it: the path of a socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    root.chmod(0o755)
    with BrokerHost(root) as own:
        yield own
    shutil.rmtree(root)


def access_list(user: int, rights: int) -> bytes:
    """acl(5): the file's user rwx, this one these rights, nobody else any; as xattrs have it."""
    nobody = 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, rights, user), (4, 0, nobody), (16, rights, nobody)]
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry) for entry in [*entries, (32, 0, nobody)]
    )


def owned(owner: int = OWNER, name: str = NAME) -> pb.Lease:
    return make_lease(socket=pb.OwnSocket(name=name, uid=owner))


def directory(host: BrokerHost, name: str = NAME) -> Path:
    return host.run_dir / "slices" / name / "socket"


def knock(path: str | Path, *, lease: bytes = bytes(16), key: bytes = bytes(32)) -> str:
    """Opens a session through the socket in a directory, as the client does in a container."""
    with wire.Connection(wire.Lease(lease, key, f"{path}/session.sock", None)) as connection:
        connection.open()
        return "welcome"


def session_uids(host: BrokerHost) -> list[int]:
    assert host.channel is not None
    return [session.uid for session in host.channel.state().sessions]


def test_a_session_without_a_key_belongs_to_the_lease(host: BrokerHost) -> None:
    lease = owned(os.geteuid())
    host.push(lease)
    nameless = wire.Lease(bytes(16), bytes(32), f"{directory(host)}/session.sock", None)
    with wire.Connection(nameless).open() as control:
        assert host.channel is not None
        [state] = host.channel.state().sessions
        assert (state.lease, state.pid, state.uid) == (lease.id, os.getpid(), os.geteuid())
        # The data connection comes the same way, and the account is the slice's.
        with wire.open_device(nameless, control.session) as device:
            device.socket.sendall(b"charge 1048576\n")
            granted, _limit, used = device.socket.makefile().readline().split()
            assert (granted, used) == ("1", "1048576")
            [piece] = host.channel.state().slices
            assert (piece.id, piece.used_bytes) == (lease.slices[0].id, 1 << 20)
    wait_for("the session's end", lambda: not session_uids(host))


def test_the_socket_stands_for_one_lease_only(host: BrokerHost) -> None:
    mine, other = owned(os.geteuid()), make_lease()
    host.push(mine, other)
    for lease, key in ((mine.id, mine.key), (other.id, other.key), (mine.id, bytes(32))):
        with pytest.raises(wire.Refused) as refused:
            knock(directory(host), lease=lease, key=key)
        assert refused.value.code == wire.UNKNOWN_LEASE
    with pytest.raises(wire.Refused) as refused:
        knock(directory(host), key=mine.key)
    assert refused.value.code == wire.PROOF_WRONG
    # And no lease is called zero where everybody may come.
    with (
        pytest.raises(wire.Refused) as refused,
        wire.Connection(
            wire.Lease(bytes(16), bytes(32), str(host.run_dir / "session.sock"), None)
        ) as connection,
    ):
        connection.open()
    assert refused.value.code == wire.UNKNOWN_LEASE


def test_the_socket_goes_with_the_lease(host: BrokerHost) -> None:
    lease, other = owned(os.geteuid()), owned(os.geteuid(), "GPU-2")
    host.push(lease, other)
    assert knock(directory(host)) == knock(directory(host, "GPU-2")) == "welcome"
    host.push(other)
    assert [path.name for path in (host.run_dir / "slices").iterdir()] == ["GPU-2"]
    assert knock(directory(host, "GPU-2")) == "welcome"
    # Another lease of the same slice: the same place, and the new lease's account.
    newer = owned(os.geteuid(), "GPU-2")
    inode = directory(host, "GPU-2").stat().st_ino
    host.push(newer)
    assert directory(host, "GPU-2").stat().st_ino == inode
    nameless = wire.Lease(bytes(16), bytes(32), f"{directory(host, 'GPU-2')}/session.sock", None)
    with wire.Connection(nameless).open():
        assert host.channel is not None
        assert newer.id in [session.lease for session in host.channel.state().sessions]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stop", "kill"])
def test_the_next_broker_serves_the_same_directory(
    host: BrokerHost, number: signal.Signals
) -> None:
    """A container holds the directory: it must stay the one that the broker uses."""
    lease = owned(os.geteuid())
    host.push(lease, owned(os.geteuid(), "GPU-gone"))
    kept = os.open(directory(host), os.O_PATH)
    host.stop(number)
    with pytest.raises(OSError):
        knock(f"/proc/self/fd/{kept}")
    host.start()
    host.push(lease)
    assert knock(f"/proc/self/fd/{kept}") == "welcome"
    os.close(kept)
    assert [path.name for path in (host.run_dir / "slices").iterdir()] == [NAME]


def test_what_cannot_be_made_is_said_and_does_not_hurt(host: BrokerHost) -> None:
    (host.run_dir / "slices").mkdir()
    (host.run_dir / "slices" / NAME).write_text("not a directory")
    lease, other = owned(os.geteuid()), owned(os.geteuid(), "GPU-2")
    applied = host.push(lease, other)
    [refused] = applied.refused
    assert refused.id == lease.slices[0].id
    assert NAME in refused.sentence
    assert knock(directory(host, "GPU-2")) == "welcome"
    (host.run_dir / "slices" / NAME).unlink()
    assert not host.push(lease, other).refused
    assert knock(directory(host)) == "welcome"


@needs_root
def test_only_the_owner_and_root_pass(host: BrokerHost) -> None:
    host.push(owned())

    def as_user(uid: int) -> str:
        return namespaces.in_child(
            lambda: knock(directory(host)), enter=lambda: namespaces.become(uid)
        )

    assert as_user(OWNER) == "welcome"
    assert as_user(0) == "welcome"
    assert as_user(STRANGER).startswith("PermissionError")
    # root:root drwx--x---+: the mask is where the group's rights are shown.
    outer = directory(host).parent.stat()
    assert (outer.st_uid, outer.st_mode & 0o777) == (0, 0o710)
    inner = directory(host).stat()
    assert (inner.st_uid, inner.st_mode & 0o777) == (0, 0o755)
    # A group's right is not the owner's: somebody with root's group does not pass.
    assert namespaces.in_child(
        lambda: knock(directory(host)),
        enter=lambda: (os.setgroups([0]), os.setresgid(0, 0, 0), os.setresuid(*[STRANGER] * 3)),
    ).startswith("PermissionError")


ATTEMPTS: dict[str, Callable[[Path], object]] = {
    "rename": lambda outer: (outer / "socket").rename(outer / "moved"),
    "exchange": lambda outer: (outer / "link").symlink_to("/"),
    "fill": lambda outer: (outer / "fill").write_bytes(bytes(4096)),
    "directory": lambda outer: (outer / "more").mkdir(),
    "away": lambda outer: outer.rename(outer.parent / "moved"),
    "mode": lambda outer: outer.chmod(0o777),
    "owner": lambda outer: os.chown(outer, OWNER, OWNER),
    "list": lambda outer: os.setxattr(outer, ACL, access_list(OWNER, 7)),
    "default list": lambda outer: os.setxattr(outer, DEFAULT_ACL, access_list(OWNER, 7)),
    "in slices": lambda outer: (outer.parent / "fill").write_bytes(bytes(4096)),
    "in run_dir": lambda outer: (outer.parent.parent / "fill").write_bytes(bytes(4096)),
    "inner": lambda outer: (outer / "socket" / "fill").write_bytes(bytes(4096)),
    "inner mode": lambda outer: (outer / "socket").chmod(0o777),
    "socket": lambda outer: (outer / "socket" / "session.sock").unlink(),
    "socket mode": lambda outer: (outer / "socket" / "session.sock").chmod(0o600),
    "look": lambda outer: list(outer.iterdir()),
}


@needs_root
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_the_owner_changes_nothing_there(
    host: BrokerHost, attempt: Callable[[Path], object]
) -> None:
    """Root's container runtime mounts it by its path; and run_dir's room is everybody's."""
    host.push(owned())
    outer = directory(host).parent
    before = [(path, path.lstat().st_ino) for path in sorted((host.run_dir / "slices").rglob("*"))]
    said = namespaces.in_child(lambda: str(attempt(outer)), enter=lambda: namespaces.become(OWNER))
    assert said.startswith("PermissionError")
    found = sorted((host.run_dir / "slices").rglob("*"))
    assert [(path, path.lstat().st_ino) for path in found] == before


def plant(outer: Path, kind: str) -> None:
    """What a user could leave in a directory that an earlier release gave away."""
    inner = outer / "socket"
    if kind == "link":
        inner.rename(outer / "moved")
        inner.symlink_to("/")
    elif kind == "own directory":
        inner.rename(outer / "moved")
        inner.mkdir(0o777)
        (inner / "session.sock").symlink_to("/etc/passwd")
        os.chown(inner, OWNER, OWNER)
    elif kind == "file":
        (inner / "session.sock").unlink()
        inner.rmdir()
        inner.write_bytes(b"x")
    elif kind == "tree":
        deep = outer / "a" / "b" / "c"
        deep.mkdir(parents=True)
        (deep / "fill").write_bytes(bytes(4096))
        (deep / "link").symlink_to(outer.parent.parent.parent)
        for path in (outer / "a", *(outer / "a").rglob("*")):
            os.chown(path, OWNER, OWNER, follow_symlinks=False)
    elif kind == "lists":
        for path in (outer, inner):
            os.setxattr(path, ACL, access_list(OWNER, 7))
            os.setxattr(path, DEFAULT_ACL, access_list(OWNER, 7))


@needs_root
@pytest.mark.parametrize("kind", ["nothing", "link", "own directory", "file", "tree", "lists"])
@pytest.mark.parametrize("gone", [False, True], ids=["kept", "gone"])
def test_directories_of_an_earlier_release_are_repaired(
    host: BrokerHost, kind: str, gone: bool
) -> None:
    lease = owned()
    host.push(lease)
    outer = directory(host).parent
    inode = directory(host).stat().st_ino
    host.stop(signal.SIGKILL)
    os.removexattr(outer, ACL)
    outer.chmod(0o700)
    os.chown(outer, OWNER, 0)
    plant(outer, kind)
    untouched = host.root / "untouched"
    untouched.write_text("not the broker's")
    host.start()
    if gone:
        host.push()
        assert not outer.exists()
    else:
        assert not host.push(lease).refused
        assert sorted(path.name for path in outer.iterdir()) == ["socket"]
        assert [path.name for path in directory(host).iterdir()] == ["session.sock"]
        for path, mode in ((outer, 0o710), (directory(host), 0o755)):
            found = path.lstat()
            assert stat.S_ISDIR(found.st_mode)
            assert (found.st_uid, found.st_mode & 0o7777) == (0, mode)
            assert DEFAULT_ACL not in os.listxattr(path)
        assert os.getxattr(outer, ACL) == access_list(OWNER, 1)
        assert ACL not in os.listxattr(directory(host))
        if kind in ("nothing", "tree", "lists"):  # containers hold this one
            assert directory(host).stat().st_ino == inode
        assert knock(directory(host)) == "welcome"
    assert untouched.read_text() == "not the broker's"
    assert Path("/etc/passwd").stat().st_uid == 0


@needs_root
def test_a_foreign_directory_of_all_slices_is_not_used(host: BrokerHost) -> None:
    elsewhere = host.root / "elsewhere"
    (elsewhere / "keep").mkdir(parents=True)
    (host.run_dir / "slices").symlink_to(elsewhere)
    lease = owned()
    [refused] = host.push(lease).refused
    assert "slices is not a directory of the broker's user" in refused.sentence
    assert [path.name for path in elsewhere.iterdir()] == ["keep"]
    (host.run_dir / "slices").unlink()
    (host.run_dir / "slices").mkdir()
    os.chown(host.run_dir / "slices", OWNER, OWNER)
    assert len(host.push(lease).refused) == 1
    (host.run_dir / "slices").rmdir()
    assert not host.push(lease).refused


@needs_root
def test_another_owner_of_the_same_slice(host: BrokerHost) -> None:
    host.push(owned())
    host.push(owned(STRANGER))

    def as_user(uid: int) -> str:
        return namespaces.in_child(
            lambda: knock(directory(host)), enter=lambda: namespaces.become(uid)
        )

    assert as_user(STRANGER) == "welcome"
    assert as_user(OWNER).startswith("PermissionError")


@needs_root
def test_a_stranger_who_got_the_directory_is_refused(host: BrokerHost) -> None:
    """The kernel's word for who he is counts, even where he need not pass the owner's directory."""
    host.push(owned())
    held = os.open(directory(host), os.O_PATH)
    assert namespaces.in_child(
        lambda: knock(f"/proc/self/fd/{held}"), enter=lambda: namespaces.become(STRANGER)
    ) == (f"Refused: refused (3): this slice belongs to user {OWNER}, not to user {STRANGER}")
    os.close(held)


@needs_root
def test_any_user_of_a_container_passes(host: BrokerHost) -> None:
    """As podman by root with an image whose USER is another: root mounted the directory."""
    host.push(owned())
    target = host.root / "mounted"
    target.mkdir()

    def in_container() -> str:
        namespaces.unshare(namespaces.NEWNS)
        namespaces.bind(directory(host), target)
        namespaces.become(STRANGER)
        return knock(target)

    assert namespaces.in_child(in_container) == "welcome"
    assert not list(target.iterdir())  # it was mounted there and nowhere else


@needs_root
@pytest.mark.parametrize("user", [OWNER, STRANGER], ids=["owner", "stranger"])
def test_a_rootless_container_is_its_makers(host: BrokerHost, user: int) -> None:
    """A user namespace in which 5 is another user of the host, made by a user of the host."""
    host.push(owned())
    target = host.root / "mounted"
    target.mkdir()

    def enter() -> None:
        namespaces.become(user)
        # So that its maker may write the map: a process that changed users is root's in /proc.
        namespaces.unshare(namespaces.NEWUSER | namespaces.NEWNS)

    def in_container() -> str:
        os.setresuid(0, 0, 0)
        namespaces.bind(directory(host), target)
        os.setresuid(5, 5, 5)
        return knock(target)

    said = namespaces.in_child(in_container, enter=enter, user_map=f"0 {user} 1\n1 200000 65536\n")
    if user == OWNER:
        assert said == "welcome"
    else:
        assert said.startswith("PermissionError")
