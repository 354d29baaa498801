"""The daemon's interface and gpupoolctl, with a driver and a broker of the test's making."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gpupoold
from gpupoold import errors, paths
from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.api import peers
from gpupoold.api.peers import Claim
from gpupoold.api.server import ApiServer
from gpupoold.cli.main import cli, main
from gpupoold.errors import SocketError

from .fakes import gpu
from .test_pool import Host, session_of, until

#: of the package that is tested; the current directory may hold sources
PACKAGES = str(Path(gpupoold.__file__).parents[1])


class Served(Host):
    """A host with its interface."""

    def __init__(self, root: Path, **options: str) -> None:
        super().__init__(root, **options)
        self.claim = Claim(self.settings.api_socket)
        os.makedirs(self.settings.private_dir, 0o700)
        self.api = ApiServer(self.settings, self.pool, self.claim.socket)
        self.api.start()
        self.address = f"unix:{self.settings.api_socket}"

    def stop(self) -> None:
        self.api.stop()
        self.claim.close()
        super().stop()

    def ctl(self, *arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
        """gpupoolctl as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "gpupoold.cmd.ctl", *arguments],
            env={**os.environ, "GPUPOOL_CONNECT": self.address, "PYTHONPATH": PACKAGES},
            capture_output=True,
            text=True,
            timeout=60,
            **{"cwd": "/", **keywords},
        )

    def json(self, *arguments: str):
        done = self.ctl("--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def served(root):
    made = Served(root)
    yield made
    made.stop()
    made.broker.close()


@pytest.fixture(scope="module")
def shared():
    """A host with the slice "a", for tests that change nothing."""
    root = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    made = Served(root)
    made.json("slice", "create", "--name", "a", "--compute", "25", "--memory", "4096")
    yield made
    made.stop()
    made.broker.close()
    shutil.rmtree(root)


def test_what_every_command_prints_as_json(served):
    cards = served.json("gpu", "list")
    assert [card["uuid"] for card in cards] == [gpu(0).uuid, gpu(1).uuid]
    assert {
        "uuid": gpu(0).uuid,
        "name": "Test GPU",
        "memory_mib": 81920,
        "compute_capability": "9.0",
        "mode": "shared",
        "health": "ok",
        "drained": False,
        "memory_free_mib": 81920 - 2048,
    }.items() <= cards[0].items()
    made = served.json(
        "slice", "create", "--name", "a", "--compute", "25", "--memory", "4096",
        "--mode", "elastic", "--priority", "0",
    )  # fmt: skip
    assert {
        "name": "a",
        "kind": "shared",
        "gpu_uuid": gpu(0).uuid,
        "compute_percent": 25,
        "memory_mib": 4096,
        "mode": "elastic",
        "priority": 0,
        "enforced_by": "none",
        "memory_used_mib": 0,
        "sessions": 0,
    }.items() <= made.items()
    assert served.json("slice", "show", "a") == made
    assert served.json("slice", "list") == [made]
    assert served.json("gpu", "show", "0")["memory_allocated_mib"] == 4096
    leases = served.json("lease", "list")
    assert leases[0]["slices"] == ["a"] and leases[0]["id"] == made["lease"]
    assert served.json("lease", "show", made["lease"][:8]) == leases[0]
    assert "key" not in leases[0]
    view = served.pool.slice(served_caller(), "a")
    served.broker.state.sessions.append(session_of(served, view, used=1))
    sessions = served.json("session", "list")
    assert [(s["slice"], s["pid"], s["memory_used_mib"]) for s in sessions] == [
        ("a", os.getpid(), 1)
    ]
    assert served.json("session", "kill", sessions[0]["id"])["id"] == sessions[0]["id"]
    del served.broker.state.sessions[:]
    topology = served.json("topology")["gpus"]
    assert [(g["pci_address"], g["numa_node"]) for g in topology] == [
        ("00000000:01:00.0", 0),
        ("00000000:02:00.0", 1),
    ]
    assert served.json("slice", "resize", "a", "--memory", "5000")["memory_mib"] == 5000
    assert served.json("gpu", "drain", "0")["drained"] is True
    assert served.json("gpu", "undrain", "0")["drained"] is False
    assert served.json("slice", "delete", "a") == {"deleted": "a"}
    kinds = [
        json.loads(line)["kind"] for line in served.ctl("--json", "events").stdout.splitlines()
    ]
    for kind in ("gpu.added", "slice.created", "slice.resized", "gpu.drained", "slice.deleted"):
        assert kind in kinds


def served_caller():
    from gpupoold.model import Caller

    return Caller(os.geteuid(), os.getpid(), True)


def test_tables_for_people(served):
    served.json("slice", "create", "--name", "a", "--compute", "25", "--memory", "4096")
    for command, words in (
        (("gpu", "list"), ["UUID", gpu(1).uuid, "25 %", "ok"]),
        (("gpu", "show", "1"), ["uuid", gpu(1).uuid]),
        (("slice", "list"), ["ENFORCED BY", "none", "4096", gpu(0).uuid]),
        (("slice", "show", "a"), ["compute_percent", "25"]),
        (("lease", "list"), ["owner", "a"]),
        (("session", "list"), ["there are no sessions"]),
        (("topology",), ["NUMA", "00000000:02:00.0"]),
        (("events",), ["slice.created"]),
    ):
        done = served.ctl(*command)
        assert done.returncode == 0, done.stderr
        for word in words:
            assert word in done.stdout, (command, done.stdout)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["slice", "show", "nothere"], 3, "no slice nothere"),
        (["slice", "delete", "nothere"], 3, "no slice"),
        (["gpu", "show", "GPU-ffff"], 3, "no GPU"),
        (["lease", "show", "nothere"], 3, "no lease"),
        (["session", "kill", "nothere"], 3, "no session"),
        (["run", "--slice", "nothere", "--", "true"], 3, "no slice"),
        (["slice", "create", "--name", "b", "--compute", "1", "--memory", "999999"], 4, "no GPU"),
        (["run", "--compute", "1", "--memory", "999999", "--", "true"], 4, "no GPU has"),
        (["slice", "create", "--name", "a", "--compute", "1", "--memory", "1"], 5, "already"),
        (["slice", "create", "--name", "b", "--compute", "0", "--memory", "1"], 2, "compute"),
        (["slice", "create", "--name", "b", "--compute", "1.5", "--memory", "1"], 2, "compute"),
        (["slice", "create", "--name", "b", "--compute", "1", "--memory", "0"], 2, "memory"),
        (["slice", "create", "--name", "-b", "--compute", "1", "--memory", "1"], 2, "name"),
        (["slice", "create", "--name", "b c", "--compute", "1", "--memory", "1"], 2, "name"),
        (["slice", "create", "--compute", "1", "--memory", "1"], 2, "--name"),
        (["slice", "resize", "a"], 2, "--compute"),
        (["slice", "create", "--name", "b", "--kind", "mig", "--profile", "1g.10gb",
          "--compute", "1", "--memory", "1"], 1, "not in this release"),
        (["slice", "create", "--name", "b", "--kind", "whole", "--compute", "1", "--memory", "1"],
         1, "not in this release"),
        (["guest", "attach", "vm"], 2, "Missing option '--slice'"),
        (["guest", "attach", "vm", "--slice", "a"], 5, "[libvirt] uri is not set"),
        (["guest", "detach", "vm"], 5, "[libvirt] uri is not set"),
        (["guest", "list"], 5, "[libvirt] uri is not set"),
        (["run", "--", "true"], 2, "--slice"),
        (["run", "--compute", "1", "--", "true"], 2, "--memory"),
        (["run", "--slice", "a", "--memory", "1", "--compute", "1", "--", "true"], 2, "--slice"),
        (["run", "--slice", "a"], 2, "COMMAND"),
        (["run", "--slice", "a", "--", "no-such-program"], 127, "no such program"),
        (["run", "--slice", "a", "--", "/etc/passwd"], 126, "not an executable"),
        (["nonsense"], 2, "nonsense"),
        (["--connect", "localhost:5000", "gpu", "list"], 2, "unix:PATH"),
        (["--connect", "unix:/nowhere/x.sock", "gpu", "list"], 6, "no such socket"),
    ],
)  # fmt: skip
def test_errors_and_their_exit_status(shared, arguments, status, words):
    done = shared.ctl(*arguments)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert [view.piece.name for view in shared.pool.slices(served_caller())] == ["a"]


def test_a_socket_that_nobody_serves(root):
    Claim(str(root / "x.sock")).close(remove=False)
    done = subprocess.run(
        [sys.executable, "-m", "gpupoold.cmd.ctl", "--connect", f"unix:{root}/x.sock", "gpu",
         "list"], capture_output=True, text=True, cwd="/",
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip
    assert done.returncode == errors.EXIT_UNREACHABLE
    assert "nobody listens" in done.stderr


def test_options_come_before_and_command_lines_are_kept_whole(served, root, monkeypatch):
    native = root / "native"
    (native / "client").mkdir(parents=True)
    (native / "client" / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv(paths.ENVIRONMENT, str(native))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/one:/two")
    script = (
        "import json,os,sys; f=os.environ['GPUPOOL_LEASE_FILE']; "
        "print(json.dumps([sys.argv[1:], os.environ['LD_LIBRARY_PATH'], os.getpid(), "
        "json.load(open(f))['lease'], f])); sys.exit(37)"
    )
    done = served.ctl(
        "run", "--compute", "5", "--memory", "64", "--", sys.executable, "-c", script, "--json",
        "-x", "a b", "",
    )  # fmt: skip
    assert done.returncode == 37, done.stderr
    arguments, libraries, pid, lease, file = json.loads(done.stdout)
    assert arguments == ["--json", "-x", "a b", ""]
    first, *others = libraries.split(":")
    assert others == ["/one", "/two"]
    for name in ("libcuda.so", "libcuda.so.1"):
        assert os.path.samefile(os.path.join(first, name), native / "client" / "libcuda.so.1")
    lease_push = served.broker.wait_push(lambda push: bool(push.leases)).leases[0]
    assert lease_push.process.pid == pid and lease_push.id.hex() == lease.replace("-", "")
    until(lambda: not served.pool.store.slices())
    until(lambda: not os.path.exists(file))


def test_a_program_that_is_killed_passes_its_signal_on(served, root, monkeypatch):
    native = root / "native"
    (native / "client").mkdir(parents=True)
    (native / "client" / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv(paths.ENVIRONMENT, str(native))
    done = served.ctl("run", "--compute", "5", "--memory", "64", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == -signal.SIGKILL
    until(lambda: not served.pool.store.slices())


def test_an_installation_without_the_client_library_says_so(served, root, monkeypatch):
    monkeypatch.setenv(paths.ENVIRONMENT, str(root / "empty"))
    done = served.ctl("run", "--compute", "5", "--memory", "64", "--", "true")
    assert done.returncode == 1 and "libcuda.so.1 is missing" in done.stderr
    until(lambda: not served.pool.store.slices())


def test_arguments_of_any_bytes_and_size_get_a_sentence(served):
    for arguments, status, words in (
        (("slice", "show", b"\xff"), 2, "not valid UTF-8"),
        (("slice", "show", "x" * 10_000), 3, "x..."),
        (("slice", "show", "a\nb"), 3, "a"),
        (("events", "--limit", "99999999999999"), 2, "--limit"),
        (("events", "--after", "99999999999999999999"), 2, "--after"),
        (("run", "--slice", "", "--", "true"), 2, "--slice needs a name"),
        (("slice", "create", "--name", "z", "--compute", "1_0", "--memory", "1"), 2, "'1_0'"),
        (("slice", "create", "--name", "z", "--compute", "1", "--memory", "\u0663"), 2, "whole"),
        (("slice", "create", "--name", "z", "--compute", " 5", "--memory", "1"), 2, "' 5'"),
        (("run", "--slice", "a\nb", "--", "true"), 3, "a"),
        (("run", "--slice", "a", "--", "no\nsuch"), 127, "no?such"),
    ):
        done = served.ctl(*arguments)
        assert (done.returncode, words in done.stderr) == (status, True), (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        if status not in (2,):
            assert done.stderr.count("\n") == 1, done.stderr


def test_a_program_with_arguments_that_are_no_text(served, root, monkeypatch):
    (root / "native" / "client").mkdir(parents=True)
    (root / "native" / "client" / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv(paths.ENVIRONMENT, str(root / "native"))
    served.json("slice", "create", "--name", "a", "--compute", "5", "--memory", "64")
    done = served.ctl("run", "--slice", "a", "--", "test", b"\xff", "=", b"\xff")
    assert done.returncode == 0, done.stderr


def test_output_that_cannot_be_written(served):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gpupoold.cmd.ctl", "--connect", served.address, "gpu", "list"],
            env={**os.environ, "PYTHONPATH": PACKAGES}, stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, cwd="/", check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "gpupoolctl: the output cannot be written: No space left on device\n"


def test_numbers_at_their_ends(served):
    stub = pb_grpc.PoolStub(grpc.insecure_channel(served.address))
    most = (1 << 64) - 1
    for request in (
        pb.CreateSliceRequest(name="a", compute_percent=1, memory_mib=most),
        pb.CreateSliceRequest(name="a", compute_percent=(1 << 32) - 1, memory_mib=1),
        pb.CreateSliceRequest(
            name="a", compute_percent=1, memory_mib=1, priority=-(1 << 31), has_priority=True
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.CreateSlice(request, timeout=10)
        assert caught.value.code().name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
    assert list(stub.WatchEvents(pb.WatchEventsRequest(after_id=most), timeout=10)) == []


def test_a_connection_without_a_descriptor_left_is_not_counted_for_ever(served, monkeypatch):
    made = socket.socket

    def refuse(*arguments, **keywords):
        if keywords.get("fileno") is not None:  # accept() makes its object so
            return made(*arguments, **keywords)
        monkeypatch.setattr(peers.socket, "socket", made)
        raise OSError(errno.EMFILE, "Too many open files")

    with made(socket.AF_UNIX) as client:
        monkeypatch.setattr(peers.socket, "socket", refuse)
        client.connect(served.settings.api_socket)
        client.settimeout(10)
        assert client.recv(1) == b""  # closed, instead of left hanging
    assert not served.api._gate._open
    assert served.json("slice", "list") == []


def test_a_full_disk_is_not_called_a_socket_in_use(tmp_path):
    full = peers.not_made("/x", OSError(errno.ENOSPC, "No space left on device"))
    assert (type(full), full.exit_status) == (errors.StateError, 4)
    other = peers.not_made("/x", OSError(errno.EACCES, "Permission denied"))
    assert (type(other), other.exit_status) == (errors.SocketError, 5)


def never():
    """A request that is opened and never made."""
    threading.Event().wait(30)
    yield b""


def test_requests_that_are_opened_and_never_made_hold_nobody_up(served):
    count = served.settings.worker_threads + 8
    channels = [
        grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(16)
    ]
    methods = (
        "/gpupool.v1.Pool/ListSlices",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/gpupool.v1.Pool/WatchEvents",
    )
    assert methods[0].split("/")[1] == pb.DESCRIPTOR.services_by_name["Pool"].full_name
    calls = [
        channels[i % len(channels)].stream_stream(method)(never())
        for method in methods
        for i in range(count)
    ]
    try:
        stub = pb_grpc.PoolStub(grpc.insecure_channel(served.address))
        for _ in range(3):
            assert list(stub.ListSlices(pb.ListSlicesRequest(), timeout=10).slices) == []
    finally:
        for call in calls:
            call.cancel()
        for channel in channels:
            channel.close()


def test_events_are_followed_until_the_daemon_ends(served):
    follower = subprocess.Popen(
        [sys.executable, "-m", "gpupoold.cmd.ctl", "--json", "--connect", served.address, "events",
         "--follow"], stdout=subprocess.PIPE, text=True, cwd="/",
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip
    try:
        assert follower.stdout is not None
        seen = []
        made = False
        for line in follower.stdout:
            seen.append(json.loads(line))
            if not made:
                made = True
                served.json("slice", "create", "--name", "a", "--compute", "1", "--memory", "1")
            if seen[-1]["kind"] == "slice.created":
                break
        assert [entry["id"] for entry in seen] == sorted({entry["id"] for entry in seen})
    finally:
        follower.kill()
        follower.wait()


def nobody() -> dict:
    """Keywords of subprocess to be another user; skips where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    user = pwd.getpwnam("nobody")
    keywords = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    try:
        subprocess.run(
            [sys.executable, "-c", "import gpupoold.cmd.ctl, grpc"],
            env={**os.environ, "PYTHONPATH": PACKAGES}, capture_output=True, cwd="/", check=True,
            **keywords,
        )  # fmt: skip
    except (subprocess.CalledProcessError, PermissionError):
        pytest.skip("other users cannot read this Python or the sources")
    return {**keywords, "cwd": "/"}


def test_another_user_is_known_by_the_kernel(served, root):
    as_nobody = nobody()
    root.chmod(0o755)
    served.json("slice", "create", "--name", "roots", "--compute", "1", "--memory", "1")
    made = served.ctl(
        "--json", "slice", "create", "--name", "mine", "--compute", "1", "--memory", "1",
        **as_nobody,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["owner"] == "nobody"
    listed = json.loads(served.ctl("--json", "slice", "list", **as_nobody).stdout)
    assert [entry["name"] for entry in listed] == ["mine"]
    for arguments in (
        ["slice", "show", "roots"],
        ["slice", "delete", "--force", "roots"],
        ["slice", "resize", "roots", "--memory", "5"],
        ["gpu", "drain", "0"],
        ["run", "--slice", "roots", "--", "true"],
    ):
        done = served.ctl(*arguments, **as_nobody)
        assert done.returncode == errors.EXIT_NOT_PERMITTED, (arguments, done.stderr)
    assert [e["name"] for e in served.json("slice", "list")] == ["roots", "mine"]
    assert served.ctl("slice", "delete", "mine", **as_nobody).returncode == 0


def test_a_lease_file_is_for_its_user_alone(served, root, monkeypatch):
    as_nobody = nobody()
    root.chmod(0o755)
    native = root / "native"
    (native / "client").mkdir(parents=True)
    (native / "client" / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv(paths.ENVIRONMENT, str(native))
    script = "stat -c '%a %U' $GPUPOOL_LEASE_FILE; head -c 1 $GPUPOOL_LEASE_FILE; ls " + str(
        root / "run" / "leases"
    )
    done = served.ctl(
        "run", "--compute", "1", "--memory", "1", "--", "sh", "-c", script, **as_nobody
    )
    assert done.stdout == "600 nobody\n{", done.stderr
    until(lambda: not served.pool.store.slices())


def test_health_and_reflection(served):
    with grpc.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "gpupool.v1.Pool", "gpupool.broker"):
            until(
                lambda service=service: stub.Check(
                    health_pb2.HealthCheckRequest(service=service)
                ).status == health_pb2.HealthCheckResponse.SERVING
            )  # fmt: skip
        served.end_broker()
        until(
            lambda: (
                stub.Check(health_pb2.HealthCheckRequest(service="gpupool.broker")).status
                == health_pb2.HealthCheckResponse.NOT_SERVING
            )
        )
        served.start_broker()
        from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = [entry.name for entry in next(replies).list_services_response.service]
        assert "gpupool.v1.Pool" in names and "grpc.health.v1.Health" in names


def test_the_private_socket_does_not_know_its_callers(served):
    """Who gets there without the gate is refused, although only gpupoold's own user can."""
    private = os.path.join(served.settings.private_dir, "api.sock")
    assert stat.S_IMODE(os.stat(served.settings.private_dir).st_mode) == 0o700
    with grpc.insecure_channel(f"unix:{private}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.PoolStub(channel).ListGpus(pb.ListGpusRequest(), timeout=10)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_many_clients_at_once(served):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with grpc.insecure_channel(
                served.address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                stub = pb_grpc.PoolStub(channel)
                made = stub.CreateSlice(
                    pb.CreateSliceRequest(name=f"n{number}", compute_percent=1, memory_mib=1),
                    timeout=60,
                )
                stub.DeleteSlice(pb.DeleteSliceRequest(name=made.id), timeout=60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert served.pool.store.slices() == []


def test_garbage_on_the_public_socket_disturbs_nobody(served):
    for data in (
        b"",
        b"\0" * 100,
        os.urandom(5000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
    ):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(served.settings.api_socket)
        connection.sendall(data)
        connection.settimeout(5)
        connection.close()
    idle = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for connection in idle:
        connection.connect(served.settings.api_socket)
    assert len(served.json("gpu", "list")) == 2
    for connection in idle:
        connection.close()


def test_a_user_with_too_many_connections_is_refused_and_others_are_not(root):
    as_nobody = nobody()
    root.chmod(0o755)
    served = Served(root, api_max_connections_per_user="3")
    try:
        holder = subprocess.Popen(
            [sys.executable, "-c",
             "import socket,sys,time\n"
             "held=[]\n"
             "for n in range(3):\n"
             "  s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); held.append(s)\n"
             "print('held', flush=True); sys.stdin.read()", served.settings.api_socket],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **as_nobody,
        )  # fmt: skip
        assert holder.stdout.readline() == "held\n"
        until(lambda: served.api._gate._open.total() == 3)
        done = served.ctl("gpu", "list", **as_nobody)
        assert done.returncode == errors.EXIT_UNREACHABLE
        assert len(served.json("gpu", "list")) == 2
        holder.communicate()
        until(lambda: served.ctl("gpu", "list", **as_nobody).returncode == 0)
    finally:
        served.stop()
        served.broker.close()


def test_sockets_are_claimed_once(root):
    path = str(root / "x.sock")
    first = Claim(path)
    with pytest.raises(SocketError, match=f"in use by process {os.getpid()}"):
        Claim(path)
    os.unlink(path)  # even then there is one owner
    with pytest.raises(SocketError, match="in use by a process that is starting or ending"):
        Claim(path)
    first.close()
    second = Claim(path)
    second.close(remove=False)  # as a killed daemon leaves it
    third = Claim(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
    os.unlink(path + ".lock")
    with pytest.raises(SocketError, match="in use by process"):
        Claim(path)
    third.close()
    assert not os.path.exists(path)
    Path(path).write_text("precious")
    with pytest.raises(SocketError, match="not a socket"):
        Claim(path)
    assert Path(path).read_text() == "precious"
    with pytest.raises(SocketError, match="cannot be made"):
        Claim(str(root / "nothere" / "x.sock"))


def test_the_coverage_is_shown(root, monkeypatch):
    monkeypatch.setenv(paths.ENVIRONMENT, str(root))
    runner = CliRunner()
    with pytest.raises(SystemExit) as caught:
        main(["api"])
    assert caught.value.code == 1
    (root / "share").mkdir()
    coverage = {
        "functions": [
            {"name": "cuMemAlloc_v2", "class": "sync"},
            {"name": "cuGraphicsMapResources", "class": "unsupported", "why": "no graphics"},
        ]
    }
    (root / "share" / "coverage.json").write_text(json.dumps(coverage))
    text = runner.invoke(cli, ["api"]).output
    assert "cuMemAlloc_v2" in text and "no graphics" in text
    assert "2 functions: 1 sync, 1 unsupported" in text
    shown = json.loads(runner.invoke(cli, ["--json", "api", "--class", "sync"]).output)
    assert [entry["name"] for entry in shown["functions"]] == ["cuMemAlloc_v2"]


def test_help_needs_neither_grpc_nor_the_daemon():
    code = (
        "import sys; from gpupoold.cli.main import cli\n"
        "from click.testing import CliRunner\n"
        "r = CliRunner().invoke(cli, ['--help']); assert r.exit_code == 0, r.output\n"
        "assert 'session' in r.output\n"
        "assert not {'grpc', 'rich', 'google.protobuf'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
