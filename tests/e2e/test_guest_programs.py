"""Unmodified programs in virtual machines: libvirt, gpupoold, the port, the guest's package."""

from __future__ import annotations

import os
import signal

import libvirt
import pytest

from tests.e2e.guest import (
    NO_HOST,
    NO_PORT,
    Loop,
    computes,
    its_session,
    run,
    sessions,
    wait_status,
)
from tests.e2e.host import Host, Machine, free_port, sized, until
from tests.e2e.looks import gone, whole


@pytest.mark.parametrize("machine_type", ["pc", "q35"])
def test_an_unmodified_program_computes(host, name, guest_image, machine_type):
    machine = host.start(name, sized(25, 2048), machine=machine_type, image=guest_image)
    guest = whole(host, machine)
    sentence = wait_status(machine, 0)
    [piece] = host.pool.ctl_json("slice", "list")
    assert sentence == f"GPU: slice {piece['name']}, 2048 MiB, 25 % of a GPU"
    computes(machine)
    loop = Loop(machine)
    session = its_session(host, guest)
    assert session["carrier"] == "ivshmem"
    assert (session["pid"], session["program"]) == (loop.pid, "loop")
    assert whole(host, machine)["sessions"] == 1
    run(machine, f"kill {loop.pid}")
    until(lambda: not sessions(host, guest), "the end of its session")
    # Who is not in the group is told so, and has no device.
    code, sentence = run(machine, "su plain -c 'gpupool-guest status'")
    assert code == 7 and "not in the group gpupool" in sentence
    code, output = run(machine, "su plain -c 'memory info'")
    assert code != 0 and "CUDA_ERROR_NO_DEVICE" in output
    machine.domain.destroy()
    gone(host, name, guest["region"])


def test_a_slice_comes_to_a_running_machine_and_goes(host, name, guest_image):
    size = ("--compute", "10", "--memory", "512")
    host.pool.ctl("slice", "create", "--name", "hot", *size, check=True)
    machine = host.start(name, image=guest_image)
    assert "there is no port" in wait_status(machine, NO_PORT)
    code, output = run(machine, "memory info")
    assert code != 0 and "CUDA_ERROR_NO_DEVICE" in output
    for _ in range(2):
        guest = host.pool.ctl_json("guest", "attach", name, "--slice", "hot")
        assert guest["problem"] == ""
        assert wait_status(machine, 0) == "GPU: slice hot, 512 MiB, 10 % of a GPU"
        computes(machine)
        loop = Loop(machine)
        session = its_session(host, guest)
        used = host.pool.ctl("guest", "detach", name)
        assert used.returncode == 5 and "has 1 running session" in used.stderr
        assert loop.runs()
        host.pool.ctl("guest", "detach", name, "--force", check=True)
        loop.fails()
        gone(host, name, guest["region"])
        assert not os.path.exists(f"/proc/{session['worker_pids'][0]}")
        assert "there is no port" in wait_status(machine, NO_PORT)
        code, output = run(machine, "memory info")
        assert code != 0 and "CUDA_ERROR_NO_DEVICE" in output


def test_the_guest_boots_again_while_a_program_runs(host, name, guest_image):
    machine = host.start(name, sized(), image=guest_image)
    before = whole(host, machine)
    wait_status(machine, 0)
    for boot_again in (lambda: machine.send("reboot -f"), lambda: machine.domain.reset()):
        Loop(machine)
        session = its_session(host, before)
        boot_again()
        until(lambda: not sessions(host, before), "the session ends with the boot that it was of")
        [worker] = session["worker_pids"]
        until(lambda w=worker: not os.path.exists(f"/proc/{w}"), "the end of its worker")
        wait_status(machine, 0)
        computes(machine)
    after = whole(host, machine)
    assert after["lease"] == before["lease"] and after["epoch"] >= before["epoch"] + 2
    machine.domain.destroy()
    gone(host, name, after["region"])


def test_qemu_is_killed_while_a_program_runs(host, name, guest_image):
    machine = host.start(name, sized(), image=guest_image)
    guest = whole(host, machine)
    wait_status(machine, 0)
    Loop(machine)
    session = its_session(host, guest)
    os.kill(machine.pid, signal.SIGKILL)
    gone(host, name, guest["region"])
    assert sessions(host, guest) == []
    [worker] = session["worker_pids"]
    until(lambda: not os.path.exists(f"/proc/{worker}"), "the end of its worker")
    # It starts once more, and works.
    machine.domain.create()
    machine = Machine(host, name)
    guest = whole(host, machine)
    wait_status(machine, 0)
    computes(machine)
    machine.domain.destroy()
    gone(host, name, guest["region"])


def test_a_pause_and_restarts_of_the_daemons_disturb_no_program(host, name, guest_image):
    machine = host.start(name, sized(), image=guest_image)
    guest = whole(host, machine)
    wait_status(machine, 0)
    loop = Loop(machine)
    session = its_session(host, guest)
    machine.domain.suspend()
    host.pool.end_daemon(signal.SIGKILL)
    host.pool.start_daemon()
    machine.domain.resume()
    assert whole(host, machine)["lease"] == guest["lease"]
    assert loop.runs()
    machine.close()
    host.stop_libvirtd()
    host.start_libvirtd()
    whole(host, machine)
    assert loop.runs()
    assert [s["id"] for s in sessions(host, guest)] == [session["id"]]
    # The broker's end is the end of all sessions, and of nothing else.
    host.pool.end_broker(signal.SIGKILL)
    loop.fails()
    assert "does not serve it" in wait_status(machine, NO_HOST)
    host.pool.start_broker()
    wait_status(machine, 0)
    computes(machine)
    machine.domain.destroy()
    gone(host, name, guest["region"])


def test_what_carries_a_program_ends(host, name, guest_image):
    """Its worker, and the guest's service: a CUDA error each time, and the host is clean."""
    machine = host.start(name, sized(), image=guest_image)
    guest = whole(host, machine)
    wait_status(machine, 0)
    loop = Loop(machine)
    session = its_session(host, guest)
    os.kill(session["worker_pids"][0], signal.SIGKILL)
    loop.fails()
    until(lambda: not sessions(host, guest), "the session's end")
    computes(machine)
    loop = Loop(machine)
    machine.sh("killall -9 gpupool-guest")  # is started again at once
    loop.fails()
    until(lambda: not sessions(host, guest), "the session's end")
    wait_status(machine, 0)
    computes(machine)
    # Where nobody starts it again and the program waits, the port says that it is unused.
    loop = Loop(machine)
    machine.sh(f"killall -STOP rc.local; kill -STOP {loop.pid}; killall -9 gpupool-guest")
    until(lambda: not sessions(host, guest), "the session's end")
    machine.sh(f"kill -CONT {loop.pid}; killall -CONT rc.local")
    loop.fails()
    wait_status(machine, 0)
    computes(machine)
    machine.domain.destroy()
    gone(host, name, guest["region"])


def test_a_save_ends_a_program_and_a_restored_machine_has_a_gpu(host, name, guest_image):
    machine = host.start(name, sized(), image=guest_image)
    before = whole(host, machine)
    wait_status(machine, 0)
    loop = Loop(machine)
    machine.close()
    machine.domain.managedSave()
    gone(host, name, before["region"])
    machine.domain.create()
    loop.fails()
    after = whole(host, machine)
    wait_status(machine, 0)
    computes(machine)
    machine.domain.destroy()
    gone(host, name, after["region"])


def test_a_live_migration_while_a_program_runs(host, name, guest_image):
    machine = host.start(name, sized(), machine="q35", image=guest_image)
    before = whole(host, machine)
    wait_status(machine, 0)
    loop = Loop(machine)
    session = its_session(host, before)
    machine.close()
    with Host(guest_image) as other:
        flags = libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PERSIST_DEST
        to = {libvirt.VIR_MIGRATE_PARAM_URI: f"tcp://127.0.0.1:{free_port()}"}
        machine.domain.migrate3(other.connection, to, flags)
        moved = Machine(other, name)
        after = whole(other, moved)
        loop.fails(moved)
        until(lambda: not sessions(host, before), "the end of the session at the source")
        [worker] = session["worker_pids"]
        until(lambda: not os.path.exists(f"/proc/{worker}"), "the end of its worker")
        wait_status(moved, 0)
        computes(moved)
        Loop(moved)
        session = its_session(other, after)
        assert session["carrier"] == "ivshmem"
        moved.close()
        moved.domain.destroy()
        gone(other, name, after["region"])
