"""A virtual machine whose root attacks the host harms itself and nobody else."""

from __future__ import annotations

import pytest

from tests.e2e.guest import Loop, computes, its_session, run, sessions, wait_status
from tests.e2e.host import Host, Machine, sized, until
from tests.e2e.looks import events, whole

SECONDS = 3
FIRST_SLOT = 65536  # of the shared memory; before it lies what gpupoold writes
#: the memory of the ivshmem device, and its size
MEMORY = "for d in /sys/bus/pci/devices/*; do [ $(cat $d/device) = 0x1110 ] && echo $d; done"


class Hostile:
    """What its root does in a machine."""

    def __init__(self, host: Host, machine: Machine) -> None:
        self.host, self.machine = host, machine
        self.lease = whole(host, machine)["lease"]
        found = machine.sh("dirname $(grep -l org.gpupool.0 /sys/class/virtio-ports/*/name)")
        self.port = "/dev/" + found.rpartition("/")[2]
        self.memory = machine.sh(MEMORY) + "/resource2"
        self.bytes = int(machine.sh(f"stat -c %s {self.memory}"))

    def attack(self, words: str) -> None:
        """Until it has ended."""
        code, output = run(self.machine, f"hostile {words}")
        assert code == 0 and output.startswith("wrote "), output

    def at_the_port(self, words: str) -> None:
        """In place of the machine's service, which is started again afterwards."""
        self.machine.sh("killall -STOP rc.local; killall -9 gpupool-guest; sleep 0.2")
        try:
            self.attack(words)
        finally:
            self.machine.sh("killall -CONT rc.local")

    def write(self, words: str, first: int) -> None:
        """Into the shared memory."""
        self.attack(f"{words} {self.memory} {self.bytes} {first} {SECONDS}")

    def end_of(self, session: str) -> str:
        """Why it ended, once it has."""

        def look() -> list[str]:
            ended = events(self.host, "session.ended", "")
            return [event["text"] for event in ended if event["data"]["session"] == session]

        [why] = until(look, "the session's end")
        return why

    def recovers(self) -> None:
        """Nothing of the attack stays."""
        wait_status(self.machine, 0)
        until(lambda: not sessions(self.host, {"lease": self.lease}), "the end of its sessions")
        computes(self.machine)


@pytest.fixture
def two(host, name, guest_image):
    """A machine that attacks, and one that works all the time and is right to the end."""
    control, other = (
        host.start(f"{name}-{role}", sized(25, 1024), image=guest_image)
        for role in ("control", "hostile")
    )
    for machine in (control, other):
        wait_status(machine, 0)
    broker = host.pool.broker.pid
    guest = whole(host, control)
    steady = Loop(control)
    session = its_session(host, guest)
    yield Hostile(host, other)
    assert steady.runs(), steady.output()
    now = its_session(host, guest)
    assert (now["id"], now["worker_pids"]) == (session["id"], session["worker_pids"])
    assert host.pool.broker.pid == broker and host.pool.broker.poll() is None
    run(control, f"kill {steady.pid}")


def test_a_hostile_machine_harms_only_itself(two: Hostile) -> None:
    host, machine = two.host, two.machine

    # Into the slot of a program that works: everything, and only what the host goes by.
    for words in ("scribble", "positions", "scribble", "positions"):
        loop = Loop(machine)
        session = its_session(host, {"lease": two.lease})
        assert session["carrier"] == "ivshmem"
        two.write(words, FIRST_SLOT)
        if words == "positions":
            loop.fails()
        run(machine, f"kill -9 {loop.pid}")  # otherwise it may not have noticed
        why = two.end_of(session["id"])
        assert why if words == "scribble" else "written" in why, why
        two.recovers()

    # What gpupoold wrote there, too.
    two.write("scribble", 0)
    two.recovers()

    two.at_the_port(f"noise {two.port} {SECONDS}")
    two.recovers()
    two.at_the_port(f"mute {two.port} {SECONDS}")
    two.recovers()

    # Its service stands still while programs of the machine work, and come.
    loop = Loop(machine)
    machine.sh("killall -STOP gpupool-guest")
    code, output = run(machine, f"timeout {SECONDS} memory info")
    assert code != 0, output
    machine.sh("killall -CONT gpupool-guest")
    assert loop.runs(), loop.output()
    run(machine, f"kill {loop.pid}")
    two.recovers()
