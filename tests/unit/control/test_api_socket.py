"""Who reaches the daemon's socket, who is turned away, and that nobody holds it up."""

from __future__ import annotations

import errno
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpupoold import errors, paths
from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.api import peers
from gpupoold.api.peers import Claim
from gpupoold.cli import context
from gpupoold.errors import SocketError

from .served import PACKAGES, Served
from .test_pool import ROOT, until, want


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
    # The gate counts it out just after it has closed it.
    assert until(lambda: not served.api._gate._open)
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
    # Nor can the user write to it: run_dir's room is everybody's. 640: the mask of the list.
    script = (
        "stat -c '%a %U' $GPUPOOL_LEASE_FILE; head -c 1 $GPUPOOL_LEASE_FILE; "
        "chmod 666 $GPUPOOL_LEASE_FILE; echo >> $GPUPOOL_LEASE_FILE; ls "
    ) + str(root / "run" / "leases")
    done = served.ctl(
        "run", "--compute", "1", "--memory", "1", "--", "sh", "-c", script, **as_nobody
    )
    assert done.stdout == "640 root\n{", done.stderr
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


def fill(path: str) -> list[socket.socket]:
    """Connects until the kernel takes no more."""
    held = []
    while True:
        connection = socket.socket(socket.AF_UNIX)
        held.append(connection)
        connection.setblocking(False)
        try:
            connection.connect(path)
        except BlockingIOError:
            return held


def test_a_client_waits_for_room_in_a_full_queue(served, monkeypatch):
    """As it is while somebody floods the socket: a new connection gets EAGAIN."""
    served.api.stop()
    os.unlink(served.settings.root_socket)
    served.claim.socket.listen(0)
    held = fill(served.settings.api_socket)
    cli = context.Cli(served.address, False)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            served.start_api()
            for connection in held:
                connection.close()
        time.sleep(seconds)

    monkeypatch.setattr(context, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert len(cli.call("ListGpus", pb.ListGpusRequest()).gpus) == 2
    assert len(pauses) >= 2
    served.pool.create_slice(ROOT, want("a"))
    [event] = cli.stream("WatchEvents", pb.WatchEventsRequest(limit=1))
    assert event.kind == "slice.created"
    cli.close()


def test_a_client_does_not_wait_for_ever(root, monkeypatch):
    claim = Claim(str(root / "x.sock"))
    claim.socket.listen(0)
    held = fill(claim.path)
    monkeypatch.setattr(context, "PATIENCE_SECONDS", 0.1)
    cli = context.Cli(f"unix:{claim.path}", False)
    with pytest.raises(context.CommandError, match="too many connections wait") as caught:
        cli.call("ListGpus", pb.ListGpusRequest())
    assert caught.value.exit_status == errors.EXIT_UNREACHABLE
    claim.close()
    for connection in held:
        connection.close()


def test_root_has_a_socket_that_nobody_else_reaches(served):
    path = served.settings.root_socket
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    os.rename(served.settings.api_socket, served.settings.api_socket + ".away")
    cli = context.Cli(served.address, False)
    assert len(cli.call("ListGpus", pb.ListGpusRequest()).gpus) == 2
    cli.close()
    os.rename(served.settings.api_socket + ".away", served.settings.api_socket)
    # A file that a killed gpupoold left there is not in the way.
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert len(served.json("gpu", "list")) == 2


def test_who_connects_too_often_is_turned_away_and_told_of_once(served, monkeypatch, caplog):
    monkeypatch.setattr(peers, "BURST", 5)
    monkeypatch.setattr(peers, "RATE", 0.001)
    admins, served.api._gate._admins = served.api._gate._admins, frozenset()
    closed = 0
    for number in range(100):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(served.settings.api_socket)
            connection.settimeout(0.1 if number < 5 else 10)
            try:
                closed += connection.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except TimeoutError:
                pass  # served: it waits for a request
    assert closed == 95
    said = [record.getMessage() for record in caplog.records if "refused" in record.message]
    assert said == [
        f"refused 1 connection of user {os.geteuid()}: too many are open, or were made at once"
    ]
    served.api._gate._admins = admins
    assert len(served.json("gpu", "list")) == 2  # root may as often as it likes


def test_refusals_are_told_in_one_line_for_many(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])
    refusals = peers.Refusals()
    for _ in range(1000):
        refusals.add(7)
    refusals.add(8)
    assert refusals.look() == peers.SAY_SECONDS
    now[0] += peers.SAY_SECONDS
    assert refusals.look() == peers.SAY_SECONDS  # as it goes on
    now[0] += peers.SAY_SECONDS
    assert refusals.look() is None
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == [
        "refused 1 connection of user 7",
        "refused 1 connection of user 8",
        "refused 999 connections of user 7",
    ]


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
