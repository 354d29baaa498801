"""The connection to libvirt: looks, changes, and hints from events.

Every call may block (libvirt answers nothing about a domain while a hook of it runs), so only the
thread of the guests' manager makes them. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpupoold.errors import ConfigurationError, NotFound, PoolError
from gpupoold.guests.request import DomainXml, read_domain
from gpupoold.leases import processes
from gpupoold.model import ProcessIdentity

LOG = logging.getLogger(__name__)

KEEPALIVE_SECONDS, KEEPALIVE_COUNT = 5, 3
QEMU_PIDS = "/run/libvirt/qemu"  # of the system's libvirt


class HypervisorError(PoolError):
    """libvirt refused something."""

    status = "UNKNOWN"


class HypervisorGone(PoolError):
    """The connection is lost."""

    status = "UNAVAILABLE"


@dataclass(frozen=True)
class Look:
    """A domain that is active. crashed, settled, qemu: as in reconcile.Seen."""

    xml: DomainXml
    crashed: bool = False
    settled: bool = True
    qemu: ProcessIdentity | None = None


class Hypervisor(Protocol):
    """What the manager needs; raises HypervisorError and HypervisorGone."""

    def connect(self) -> None:
        """Connects, if the connection does not stand; raises HypervisorGone."""

    def close(self) -> None:
        """Ends the connection."""

    def active(self) -> list[str]:
        """The UUIDs of all active domains."""

    def look(self, domain_uuid: str) -> Look | None:
        """One domain; None if it is not active."""

    def find(self, wanted: str) -> str:
        """The UUID of the domain of this name or UUID; raises NotFound."""

    def attach(self, domain_uuid: str, xml: str) -> None:
        """Attaches a device to the running domain."""

    def detach(self, domain_uuid: str, xml: str) -> None:
        """Asks the running domain to give a device back."""

    def set_metadata(self, domain_uuid: str, uri: str, prefix: str, element: str | None) -> None:
        """Sets the live metadata element of a namespace; None removes it."""


#: uuid of the domain an event was about ("": the connection), and whether its guest booted again
Hint = Callable[[str, bool], None]


class _EventLoop:
    """libvirt's event loop: one per process, for all connections."""

    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def start(cls, libvirt: Any) -> None:
        """Starts it once; it ends with the process. Before the first connection is opened."""
        with cls._lock:
            if cls._thread is not None:
                return
            libvirt.virEventRegisterDefaultImpl()
            cls._thread = threading.Thread(
                target=cls._run, args=(libvirt,), name="libvirt-events", daemon=True
            )
            cls._thread.start()

    @staticmethod
    def _run(libvirt: Any) -> None:
        while True:
            try:
                libvirt.virEventRunDefaultImpl()
            except Exception:
                LOG.exception("libvirt's event loop failed")
                threading.Event().wait(1)


def load_libvirt() -> Any:
    """The Python module; raises ConfigurationError with what to install."""
    try:
        import libvirt
    except ImportError as error:
        raise ConfigurationError(
            f"[libvirt] uri is set, and the Python package libvirt-python cannot be loaded "
            f"({error}): install it (pip install 'gpupool[libvirt]'), or unset the option"
        ) from None
    return libvirt


def qemu_process(name: str, domain_uuid: str, directory: str = QEMU_PIDS) -> ProcessIdentity | None:
    """The process that runs the domain, by libvirt's file; None where it cannot be told."""
    try:
        pid = int((Path(directory) / f"{name}.pid").read_text())
        process = processes.identify(pid)
        # A file of another time may name anybody's process.
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return process if domain_uuid.encode() in words else None


class Libvirt:
    """One libvirt; implements Hypervisor."""

    def __init__(self, uri: str, hint: Hint, qemu_pid_dir: str = QEMU_PIDS) -> None:
        """`hint` is called in any thread. Raises ConfigurationError without libvirt-python."""
        self._uri = uri
        self._hint = hint
        self._qemu_pid_dir = qemu_pid_dir
        self._libvirt = load_libvirt()
        # Its own messages on standard error would repeat what the exceptions say.
        self._libvirt.registerErrorHandler(lambda context, error: None, None)
        _EventLoop.start(self._libvirt)
        self._connection: Any = None
        self._lost = False

    # ---- life -----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Raises HypervisorGone."""
        if self._connection is not None and not self._lost and self._is_alive():
            return
        self.close()
        libvirt = self._libvirt
        try:
            connection = libvirt.open(self._uri)
            self._connection = connection
            self._lost = False
            with contextlib.suppress(libvirt.libvirtError):  # some drivers have none
                connection.registerCloseCallback(self._closed, None)
            with contextlib.suppress(libvirt.libvirtError):
                connection.setKeepAlive(KEEPALIVE_SECONDS, KEEPALIVE_COUNT)
            self._register(connection)
        except libvirt.libvirtError as error:
            self.close()
            raise HypervisorGone(f"libvirt cannot be reached at {self._uri}: {error}") from None
        LOG.info("connected to libvirt at %s", self._uri)

    def _register(self, connection: Any) -> None:
        libvirt = self._libvirt
        kinds: list[tuple[int, Callable[..., None]]] = [
            (libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, lambda c, d, *rest: self._tell(d)),
            (libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, lambda c, d, *rest: self._tell(d, booted=True)),
            (libvirt.VIR_DOMAIN_EVENT_ID_METADATA_CHANGE, lambda c, d, *rest: self._tell(d)),
            (libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, lambda c, d, *rest: self._tell(d)),
        ]
        for kind, callback in kinds:
            try:
                connection.domainEventRegisterAny(None, kind, callback, None)
            except libvirt.libvirtError as error:
                if kind == libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE:
                    raise
                LOG.info("no events of kind %d from %s: %s", kind, self._uri, error)

    def _tell(self, domain: Any, booted: bool = False) -> None:
        try:
            self._hint(domain.UUIDString(), booted)
        except self._libvirt.libvirtError as error:
            LOG.warning("an event of libvirt was not understood: %s", error)

    def _closed(self, connection: Any, reason: int, opaque: Any) -> None:
        if connection is self._connection or self._connection is None:
            self._lost = True
        self._hint("", False)

    def _is_alive(self) -> bool:
        try:
            return bool(self._connection.isAlive())
        except self._libvirt.libvirtError:
            return False

    def close(self) -> None:
        """Ends the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(self._libvirt.libvirtError):
                connection.unregisterCloseCallback()
            with contextlib.suppress(self._libvirt.libvirtError):
                connection.close()

    # ---- calls ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calls(self, what: str) -> Any:
        if self._connection is None:
            raise HypervisorGone(f"libvirt is not connected: {what}")
        try:
            yield self._connection
        except self._libvirt.libvirtError as error:
            if self._lost or not self._is_alive():
                raise HypervisorGone(f"libvirt went away: {what}: {error}") from None
            raise HypervisorError(f"{what}: {error}") from None

    def active(self) -> list[str]:
        """The UUIDs of all active domains."""
        with self._calls("the domains cannot be listed") as connection:
            flag = self._libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
            return [domain.UUIDString() for domain in connection.listAllDomains(flag)]

    def _domain(self, connection: Any, domain_uuid: str) -> Any:
        try:
            return connection.lookupByUUIDString(domain_uuid)
        except self._libvirt.libvirtError as error:
            if error.get_error_code() == self._libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise

    def look(self, domain_uuid: str) -> Look | None:
        """One domain; None if it is not active."""
        libvirt = self._libvirt
        with self._calls(f"domain {domain_uuid} cannot be looked at") as connection:
            domain = self._domain(connection, domain_uuid)
            try:
                if domain is None or not domain.isActive():
                    return None
                qemu = qemu_process(domain.name(), domain_uuid, self._qemu_pid_dir)
                state, reason = domain.state()
                text = domain.XMLDesc()
                if not domain.isActive():  # else the XML may be that of the next start
                    return None
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise
            settled = state in (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_BLOCKED) or (
                state == libvirt.VIR_DOMAIN_PAUSED and reason == libvirt.VIR_DOMAIN_PAUSED_USER
            )
            if settled:
                with contextlib.suppress(libvirt.libvirtError):  # the test driver has no jobs
                    settled = domain.jobInfo()[0] == libvirt.VIR_DOMAIN_JOB_NONE
            xml = read_domain(text)
            if qemu != qemu_process(
                xml.name, domain_uuid, self._qemu_pid_dir
            ):  # then the XML may be of either
                qemu = None
            return Look(xml, state == libvirt.VIR_DOMAIN_CRASHED, settled, qemu)

    def find(self, wanted: str) -> str:
        """The UUID of the domain of this name or UUID; raises NotFound."""
        libvirt = self._libvirt
        with self._calls(f"domain {wanted} cannot be found") as connection:
            for lookup in (connection.lookupByName, connection.lookupByUUIDString):
                try:
                    identity: str = lookup(wanted).UUIDString()
                    return identity
                except libvirt.libvirtError as error:
                    if error.get_error_code() not in (
                        libvirt.VIR_ERR_NO_DOMAIN,
                        libvirt.VIR_ERR_INVALID_ARG,
                        libvirt.VIR_ERR_INTERNAL_ERROR,  # not the form of a UUID
                    ):
                        raise
        raise NotFound(f"libvirt at {self._uri} has no domain {wanted}")

    @contextlib.contextmanager
    def _active_domain(self, domain_uuid: str, what: str) -> Any:
        with self._calls(what) as connection:
            domain = self._domain(connection, domain_uuid)
            if domain is None:
                raise HypervisorError(f"{what}: the domain is gone")
            yield domain

    def attach(self, domain_uuid: str, xml: str) -> None:
        """Attaches a device to the running domain."""
        with self._active_domain(domain_uuid, "the device was not attached") as domain:
            domain.attachDeviceFlags(xml, self._libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def detach(self, domain_uuid: str, xml: str) -> None:
        """Asks the running domain to give a device back."""
        with self._active_domain(domain_uuid, "the device was not detached") as domain:
            domain.detachDeviceFlags(xml, self._libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def set_metadata(self, domain_uuid: str, uri: str, prefix: str, element: str | None) -> None:
        """Sets the live metadata element of a namespace; None removes it."""
        libvirt = self._libvirt
        with self._active_domain(domain_uuid, "the metadata was not written") as domain:
            domain.setMetadata(
                libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                element,
                prefix if element is not None else None,
                uri,
                libvirt.VIR_DOMAIN_AFFECT_LIVE,
            )
