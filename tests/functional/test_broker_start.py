"""How the broker starts and what it says when it cannot."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.functional import namespaces
from tests.functional.broker_host import BrokerHost, Session, broker_program, make_lease
from tests.functional.pool import wait_for

USAGE, DISK, SOCKET = 2, 4, 5


def run(*arguments: object, **options) -> tuple[int, str]:
    """Runs the broker where it ends by itself: status and what it said."""
    done = subprocess.run(
        [str(broker_program()), *map(str, arguments)],
        text=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **options,
    )
    return done.returncode, done.stderr


@pytest.fixture
def host(tmp_path: Path) -> BrokerHost:
    return BrokerHost(tmp_path)


def test_usage(tmp_path: Path) -> None:
    assert run()[0] == USAGE
    assert run("--run-dir", tmp_path, "--no-such-option")[0] == USAGE
    assert run("--run-dir", tmp_path, "extra")[0] == USAGE
    status, said = run("--run-dir", tmp_path, "--worker", tmp_path / "missing")
    assert status == USAGE and "missing" in said


def test_a_second_broker(host: BrokerHost) -> None:
    with host:
        assert host.process is not None
        status, said = run(*host.command()[1:])
        assert status == SOCKET
        assert str(host.process.pid) in said and said.count("\n") == 1
        assert host.connectable()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_nobody_else_takes_the_lock() -> None:
    """A lock needs no more than the right to read; whoever held it would keep every broker out."""
    root = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    root.chmod(0o755)  # so that it is the file's mode that decides
    host = BrokerHost(root)
    host.run_dir.mkdir()
    (host.run_dir / "broker.lock").touch(0o644)  # of an earlier release
    for _ in range(2):
        with host:

            def take() -> str:
                with (host.run_dir / "broker.lock").open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return "taken"

            said = namespaces.in_child(take, enter=lambda: namespaces.become(30001))
            assert said.startswith("PermissionError")
            for path in host.run_dir.iterdir():
                shared = path.stat().st_mode & 0o077
                # Everybody connects to the one, and passes through the other.
                expected = {"session.sock": 0o066, "slices": 0o011}.get(path.name, 0)
                assert shared == expected, path.name
    shutil.rmtree(root)


@pytest.mark.parametrize("name", ["session.sock", "broker.sock"])
def test_a_socket_in_use(host: BrokerHost, name: str) -> None:
    host.run_dir.mkdir()
    kind = socket.SOCK_STREAM if name == "session.sock" else socket.SOCK_SEQPACKET
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(host.run_dir / name))
        other.listen()
        status, said = run(*host.command()[1:])
    assert status == SOCKET
    assert name in said and said.count("\n") == 1


def test_stale_sockets_are_replaced(host: BrokerHost) -> None:
    host.start()
    assert host.process is not None
    assert host.stop(signal.SIGKILL) == -signal.SIGKILL
    assert (host.run_dir / "session.sock").exists()
    with host:
        lease = make_lease()
        host.push(lease)
        Session(host.client_lease(lease)).close()


def test_something_else_in_the_socket_s_place(host: BrokerHost) -> None:
    host.run_dir.mkdir()
    (host.run_dir / "session.sock").write_text("mine")
    status, said = run(*host.command()[1:])
    assert status == SOCKET and "session.sock" in said
    assert (host.run_dir / "session.sock").read_text() == "mine"


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "no" / "parent"):
        status, said = run("--run-dir", wrong, "--worker", "/bin/true")
        assert status == DISK and str(wrong) in said and said.count("\n") == 1


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    status, said = run("--run-dir", tmp_path / ("x" * 120), "--worker", "/bin/true")
    assert status == USAGE and "107" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=64k,nr_inodes=64,mode=755 none "$1" || exit 77
        dd if=/dev/zero of="$1/filler" bs=1k 2>/dev/null
        exec "$2" --run-dir "$1" --worker /bin/true
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), str(broker_program())],
        text=True,
        capture_output=True,
        timeout=60,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no right to mount")
    assert done.returncode == DISK, done.stderr
    assert "make room" in done.stderr and done.stderr.count("\n") == 1


def test_too_few_descriptors_to_start(host: BrokerHost) -> None:
    status, said = run(*host.command()[1:], preexec_fn=lambda: _limit_files(7))
    assert status == SOCKET
    assert "ulimit -n" in said and said.count("\n") == 1


def test_out_of_descriptors_while_it_runs(host: BrokerHost) -> None:
    with host:
        assert host.process is not None
        lease = make_lease()
        host.push(lease)
        with Session(host.client_lease(lease)) as beside:
            assert beside.ask("query")[0] == 1
            used = len(list(Path(f"/proc/{host.process.pid}/fd").iterdir()))
            _limit_files(used + 4, host.process.pid)
            held = [socket.socket(socket.AF_UNIX) for _ in range(20)]
            for each in held:
                each.connect(str(host.run_dir / "session.sock"))
            wait_for("a word about it", lambda: "ulimit -n" in host.log())
            assert f"user {os.geteuid()} holds most: 6 of " in host.log()
            assert beside.ask("query")[0] == 1
            for each in held:
                each.close()
            _limit_files(4096, host.process.pid)
            Session(host.client_lease(lease)).close()


def _limit_files(count: int, pid: int = 0) -> None:
    import resource

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, max(count, 4096) if pid else count))


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_strangers_do_not_push(host: BrokerHost) -> None:
    with host:
        (host.run_dir / "broker.sock").chmod(0o666)
        for directory in (host.root, *host.root.parents):
            if directory != Path("/") and directory.stat().st_uid == os.getuid():
                directory.chmod(directory.stat().st_mode | 0o011)
        child = subprocess.run(
            [
                "setpriv",
                "--reuid",
                "65534",
                "--clear-groups",
                "/usr/bin/python3",
                "-c",
                "import socket, sys\n"
                "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
                "s.connect(sys.argv[1]); s.settimeout(20)\n"
                "sys.exit(0 if s.recv(100) == b'' else 9)",
                str(host.run_dir / "broker.sock"),
            ],
            timeout=60,
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stderr
        wait_for("a word about it", lambda: "65534" in host.log())


def test_nonsense_on_the_broker_socket(host: BrokerHost) -> None:
    with host:
        lease = make_lease()
        host.push(lease)
        with Session(host.client_lease(lease)) as session:
            assert host.channel is not None
            host.channel.socket.send(b"\xff" * 100)
            with pytest.raises((EOFError, ConnectionResetError)):
                while True:
                    host.channel.receive()
            assert session.ask("query")[0] == 1
            host.connect()
            host.push(lease)
            assert session.ask("query")[0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_that_others_can_change(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)
    link = tmp_path / "link"
    link.symlink_to(foreign)
    for path in (foreign, link):
        status, said = run("--run-dir", path)
        assert status == SOCKET and "belongs to user 65534" in said, said
    everybodys = tmp_path / "everybodys"
    everybodys.mkdir()
    everybodys.chmod(0o777)
    status, said = run("--run-dir", everybodys)
    assert status == SOCKET and "can be written by everybody" in said, said
