"""The broker's socket of a slice, by which containers come without a key: who may, and how long."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.leases import broker_pb2 as pb
from tests.functional import namespaces, wire
from tests.functional.broker_host import BrokerHost, make_lease
from tests.functional.pool import wait_for

OWNER, STRANGER = 30001, 30002
NAME = "GPU-00000000-1111-2222-3333-444444444444"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def host() -> Iterator[BrokerHost]:
    # Short, as a client in a container has it: the path of a socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    root.chmod(0o755)
    with BrokerHost(root) as own:
        yield own
    shutil.rmtree(root)


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
    outer = directory(host).parent.stat()
    assert (outer.st_uid, outer.st_mode & 0o777) == (OWNER, 0o700)
    inner = directory(host).stat()
    assert (inner.st_uid, inner.st_mode & 0o777) == (0, 0o755)


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
