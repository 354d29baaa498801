"""libvirt's hook as libvirt runs it, and the socket that it asks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from gpupoold.guests.hook import HookServer

HOOK = Path(__file__).resolve().parents[3] / "etc" / "libvirt" / "hooks" / "qemu"
ASKS = (
    "<domain><name>vm</name><uuid>11111111-2222-4333-8444-555555555555</uuid><metadata>"
    "<g:slice xmlns:g='https://gpupool.example/xmlns/request/1' name='a'/></metadata></domain>"
)
ASKS_NOTHING = "<domain><name>vm</name><description>{}</description></domain>"


@pytest.fixture
def hook(root):
    """Runs the hook with a configuration whose run_dir is `root`."""
    text = HOOK.read_text()
    line = 'CONFIGURATION = "/etc/gpupoold/gpupoold.conf"'
    assert line in text
    conf = root / "gpupoold.conf"
    conf.write_text(f"[DEFAULT]\n# 50% of\nrun_dir = {root}\n[broker]\nworker_environment = a:%b\n")
    program = root / "hook"
    program.write_text(text.replace(line, f"CONFIGURATION = {str(conf)!r}"))
    program.chmod(0o755)

    def run(operation: str, xml: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [str(program), "vm", operation, "begin", "-"],
            input=xml,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/"},
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def asked(root):
    """A socket that answers with what the test puts into it; the questions so far."""
    questions: list[tuple[str, str]] = []
    answers = {"prepare": "", "release": ""}

    def answer(operation: str, xml: str) -> str:
        questions.append((operation, xml))
        return answers[operation]

    server = HookServer(str(root / "hook.sock"), answer)
    server.start()
    yield questions, answers
    server.stop()


def test_it_asks_and_passes_on_the_reason(hook, asked):
    questions, answers = asked
    assert hook("prepare", ASKS) == (0, "", "")
    answers["prepare"] = "no GPU has room\nfor it"
    assert hook("prepare", ASKS) == (1, "", "gpupool: no GPU has room?for it\n")
    assert hook("release", ASKS) == (0, "", "")
    assert questions == [("prepare", ASKS), ("prepare", ASKS), ("release", ASKS)]


def test_a_machine_that_asks_for_nothing_is_not_held_up(hook, asked):
    questions, _ = asked
    mentioned = ASKS_NOTHING.format("see https://gpupool.example/xmlns/request/1")
    for xml in (ASKS_NOTHING.format(""), mentioned):
        assert hook("prepare", xml) == (0, "", "")
    for operation in ("start", "started", "stopped", "reconnect", "migrate"):
        assert hook(operation, ASKS) == (0, "", "")
    assert questions == []


def test_without_gpupoold(hook, root):
    assert hook("prepare", ASKS_NOTHING.format("")) == (0, "", "")
    assert hook("release", ASKS) == (0, "", "")
    status, _, said = hook("prepare", ASKS)
    assert status == 1 and said.startswith(
        "gpupool: gpupoold does not run, or has no [libvirt] uri"
    )
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "hook.sock"))
    listener.close()
    status, _, said = hook("prepare", ASKS)
    assert status == 1 and "nobody listens" in said


def test_a_gpupoold_that_does_not_answer_is_not_waited_for(hook, root):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "hook.sock"))
    listener.listen()
    status, _, said = hook("prepare", ASKS)
    assert (status, said) == (1, "gpupool: gpupoold did not answer within 5 s\n")
    assert hook("release", ASKS) == (0, "", "")
    listener.close()


def test_a_question_that_is_none(asked, root):
    questions, _ = asked
    for sent in (b"", b"{", b"[]", b'{"version": 2}', b"\xff\xfe", b'{"version": 1}'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(root / "hook.sock"))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            reply = json.loads(connection.recv(65536))
        assert reply["ok"] is False and "not understood" in reply["why"], sent
    assert questions == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_only_root_may_ask(asked, root):
    questions, _ = asked
    assert (root / "hook.sock").stat().st_mode & 0o777 == 0o600
    (root / "hook.sock").chmod(0o666)
    root.chmod(0o755)
    script = (
        "import os, socket, sys; os.setuid(65534); c = socket.socket(socket.AF_UNIX);"
        "c.connect(sys.argv[1]); print(c.recv(1000).decode())"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-c", script, str(root / "hook.sock")], capture_output=True, text=True
    )
    assert "user 65534 may not ask" in done.stdout, done.stderr
    assert questions == []


def test_one_that_says_nothing_does_not_keep_out_the_others_for_long(asked, hook, root):
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(root / "hook.sock"))
    thread = threading.Thread(target=lambda: silent.recv(1))
    thread.start()
    assert hook("prepare", ASKS) == (0, "", "")
    thread.join(10)
    assert not thread.is_alive()
    silent.close()
