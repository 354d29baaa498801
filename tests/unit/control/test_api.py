"""gpupoolctl and the daemon's interface, with a driver and a broker of the test's making."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import grpc
import pytest
from click.testing import CliRunner

from gpupoold import errors, paths
from gpupoold.api import gpupool_pb2 as pb
from gpupoold.api import gpupool_pb2_grpc as pb_grpc
from gpupoold.api.peers import Claim
from gpupoold.cli.main import cli, main

from .fakes import gpu
from .served import PACKAGES
from .test_pool import session_of, until


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
