"""gpupoold: runs in the foreground until SIGTERM or SIGINT.

Exit status: 0 after a signal, 2 configuration, 3 driver, 4 state or disk, 5 socket in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from types import FrameType

from gpupoold.directories import own_directory
from gpupoold.errors import StartError, StateError

LOG = logging.getLogger("gpupoold")


def _notify(message: str) -> None:
    """Tells systemd, if it started us with Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(address)
            sender.send(message.encode())
        except OSError as error:
            LOG.warning("systemd could not be told %s: %s", message, error)


def _make_directory(path: str, mode: int, *, may_be_link: bool = False) -> None:
    try:
        own_directory(path, mode, may_be_link=may_be_link)
    except OSError as error:
        from gpupoold.api.peers import not_made

        raise not_made(path, error) from None


def _raise_descriptor_limit() -> None:
    """Each connection takes two descriptors and each running program one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(arguments: list[str]) -> None:
    """Starts everything and waits for a signal; raises StartError."""
    from gpupoold import conf as configuration

    conf, settings = configuration.load(arguments)
    configuration.set_up_logging(conf)
    for sentence in configuration.unknown_options(conf):
        LOG.warning("%s; it has no effect", sentence)

    # The heavy parts are loaded when the configuration is known to be good.
    import gpupoold
    from gpupoold.api.peers import Claim
    from gpupoold.api.server import ApiServer
    from gpupoold.gpus import Driver
    from gpupoold.guests.containers import Containers, clean_up
    from gpupoold.guests.manager import Guests
    from gpupoold.hosts.borrowing import Borrowing
    from gpupoold.hosts.server import PeerServer
    from gpupoold.pool import Pool
    from gpupoold.store import Store

    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)

    _raise_descriptor_limit()
    _make_directory(settings.run_dir, 0o755, may_be_link=True)
    claim = Claim(settings.api_socket)
    root_claim: Claim | None = None
    store = Store(settings.database, settings.event_limit)
    driver = Driver(settings.driver_directory)
    try:
        _make_directory(settings.private_dir, 0o700)
        root_claim = Claim(settings.root_socket, 0o600)
        store.open()
        driver.open()
        pool = Pool(settings, store, driver)
        if settings.peers:
            pool.borrowing = Borrowing(pool)
            pool.after_slices_change.append(pool.borrowing.slices_changed)
        guests = Guests(settings, pool) if settings.libvirt_uri else None
        containers = Containers(settings, pool) if settings.cdi_dir else None
        try:
            pool.start()
        except OSError as error:
            raise StateError(f"state: {error.filename}: {error.strerror}") from None
        if guests is not None:
            guests.start()
        elif any(guest.ended_at is None for guest in store.guests()):
            LOG.warning(
                "virtual machines have leases and [libvirt] uri is not set: they keep them; "
                "`slice delete --force` ends one"
            )
        if containers is not None:
            containers.start()
        else:
            clean_up(settings)
        if pool.borrowing is not None:
            pool.borrowing.start()
        others = PeerServer(settings, pool) if settings.peer_listen else None
        if others is not None:
            others.start()
        api = ApiServer(settings, pool, (root_claim.socket, claim.socket), guests)
        api.start()
        LOG.info("gpupoold %s serves %s", gpupoold.version(), settings.api_socket)
        _notify("READY=1")
        stop.wait()
        _notify("STOPPING=1")
        LOG.info("gpupoold ends; running programs go on")
        api.stop()
        if others is not None:
            others.stop()
        if pool.borrowing is not None:
            pool.borrowing.stop()
        if guests is not None:
            guests.stop()
        if containers is not None:
            containers.stop()
        pool.stop()
    finally:
        claim.close()
        if root_claim is not None:
            root_claim.close()
        driver.close()
        store.close()


def main() -> None:
    """The console script."""
    from gpupoold.errors import EXIT_STATE, StateWriteFailed

    try:
        serve(sys.argv[1:])
    except StartError as error:
        print(f"gpupoold: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except StateWriteFailed as error:
        print(f"gpupoold: state: {error}", file=sys.stderr)
        sys.exit(EXIT_STATE)


if __name__ == "__main__":
    main()
