"""Follows libvirt and does what reconcile.py says, in a thread of its own.

That thread alone makes libvirt calls; requests hand it their work and wait for a bounded time.
What the hook asks is answered elsewhere, without libvirt and without this thread: libvirt answers
nothing about a domain while its hook runs.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from gpupoold.conf import Settings
from gpupoold.errors import Conflict, NotFound, NotPermitted, PoolError
from gpupoold.guests import reconcile as rules
from gpupoold.guests import request
from gpupoold.guests.connection import Hypervisor, HypervisorGone, Libvirt, Look
from gpupoold.guests.hook import HookServer
from gpupoold.guests.leases import GuestLeases
from gpupoold.guests.region import Regions
from gpupoold.guests.request import DomainXml, GuestRequest, Held, NovaInstance
from gpupoold.model import Caller, Guest
from gpupoold.pool import Pool

LOG = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0
DEBOUNCE_SECONDS = 0.05  # several events tell of one thing
UNSETTLED_SECONDS = 1.0  # a domain in the midst of something is looked at again
REQUEST_SECONDS = 25.0  # less than gpupoolctl waits
#: there where the host's kernel has vsock for virtual machines
VHOST_VSOCK = "/dev/vhost-vsock"
ROUNDS_MAX = 8


class GuestsUnavailable(PoolError):
    """libvirt is needed and does not answer."""

    status = "UNAVAILABLE"


@dataclass(frozen=True)
class GuestView:
    """A virtual machine's lease with what was last seen of the machine."""

    guest: Guest
    devices: tuple[str, ...]
    channel_path: str
    problem: str
    sessions: int
    nova: NovaInstance | None


class Guests:
    """The virtual machines of this host."""

    def __init__(
        self, settings: Settings, pool: Pool, hypervisor: Hypervisor | None = None
    ) -> None:
        """hypervisor: for tests. Raises ConfigurationError if libvirt-python is missing."""
        self._settings = settings
        self._pool = pool
        regions = Regions(
            settings.run_dir, settings.libvirt_region_mib, settings.libvirt_region_group
        )
        self.leases = GuestLeases(pool, regions, with_region=settings.libvirt_attach_devices)
        self._hook = HookServer(settings.hook_socket, self.on_hook)
        self._hypervisor: Hypervisor = hypervisor or Libvirt(
            settings.libvirt_uri, self.hint, settings.libvirt_qemu_pid_dir
        )
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._hints_lock = threading.Lock()
        self._hints: set[str] = set()
        self._booted: set[str] = set()
        self._unsettled: set[str] = set()
        self._no_vsock: set[str] = set()  # domains whose libvirt refused them the device
        self._seen: dict[str, DomainXml] = {}
        self._problems: dict[str, str] = {}  # by domain
        self.problem = "libvirt was not connected yet"
        self._thread = threading.Thread(target=self._run, name="guests", daemon=True)

    # ---- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to follow; raises SocketError if the hook's socket cannot be made."""
        self.leases.clean_up()
        self._hook.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends following; leases and devices stay. A call that libvirt holds is not waited for."""
        self._stopping = True
        self._hook.stop()
        self._wake.set()
        self._thread.join(timeout=3)
        if not self._thread.is_alive():
            self._hypervisor.close()

    def hint(self, domain_uuid: str, booted: bool = False) -> None:
        """Something may have happened to a domain ("": to the connection). From any thread."""
        with self._hints_lock:
            self._hints.add(domain_uuid)
            if booted:
                self._booted.add(domain_uuid)
        self._wake.set()

    def _run(self) -> None:
        next_full = 0.0
        while not self._stopping:
            try:
                self._connect()
            except HypervisorGone as error:
                if str(error) != self.problem:
                    LOG.warning("%s", error)
                self.problem = str(error)
                self._fail_jobs()
                next_full = 0.0
                self._wake.wait(RECONNECT_SECONDS)
                self._wake.clear()
                continue
            except Exception:
                LOG.exception("the connection to libvirt failed")
                time.sleep(RECONNECT_SECONDS)
                continue
            try:
                if time.monotonic() >= next_full:
                    self.reconcile_all()
                    next_full = time.monotonic() + self._settings.libvirt_interval
                self._work()
            except HypervisorGone as error:
                LOG.warning("%s", error)
                next_full = 0.0
            except Exception:
                LOG.exception("virtual machines were not looked at")
                time.sleep(RECONNECT_SECONDS)
            pause = next_full - time.monotonic()
            if self._unsettled:
                pause = min(pause, UNSETTLED_SECONDS)
            if pause > 0 and not self._stopping:
                self._wake.wait(pause)

    def _connect(self) -> None:
        self._hypervisor.connect()
        self.problem = ""

    def _fail_jobs(self) -> None:
        while not self._jobs.empty():
            future, _ = self._jobs.get()
            future.set_exception(GuestsUnavailable(self.problem))

    def _work(self) -> None:
        """What was handed over since the last look."""
        if self._wake.is_set():
            time.sleep(DEBOUNCE_SECONDS)
        self._wake.clear()
        with self._hints_lock:
            hints, self._hints = self._hints | self._unsettled, set()
            booted, self._booted = self._booted, set()
        self._unsettled = set()
        if "" in hints:  # the connection: whatever happened in between is looked at
            hints.discard("")
            self._hypervisor.connect()
            self.reconcile_all()
            hints.clear()
        for domain_uuid in booted:
            self._boot(domain_uuid)
        for domain_uuid in hints:
            self.reconcile(domain_uuid)
        while not self._jobs.empty():
            future, work = self._jobs.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _boot(self, domain_uuid: str) -> None:
        try:
            self.leases.rebooted(domain_uuid)
        except PoolError as error:
            LOG.error("the reboot of domain %s was not recorded: %s", domain_uuid, error)

    # ---- reconciliation (in the thread) ---------------------------------------------------------

    def reconcile_all(self) -> None:
        """Looks at every domain that is active or has something of ours."""
        known = {guest.domain_uuid for guest in self.leases.guests()}
        active = set(self._hypervisor.active())
        with self._hints_lock:
            self._seen = {name: xml for name, xml in self._seen.items() if name in active}
        for domain_uuid in sorted(known | active):
            self.reconcile(domain_uuid)

    def reconcile(self, domain_uuid: str) -> None:
        """Brings one domain to where it should be, as far as that goes now.

        Raises HypervisorGone; everything else becomes the domain's problem, and is tried again at
        the next look at all domains.
        """
        done: set[tuple[str, ...]] = set()
        not_attached = ""
        for _ in range(ROUNDS_MAX):
            try:
                actions = self._decide(domain_uuid)
                # Sessions are gone when the broker says so, which needs no further look.
                actions = [
                    action
                    for action in actions
                    if not isinstance(action, rules.EndSessions) or _kind(action) not in done
                ]
                fresh = [action for action in actions if _kind(action) not in done]
                for action in fresh:
                    done.add(_kind(action))
                    try:
                        self._do(action)
                    except HypervisorGone:
                        raise
                    except PoolError as error:
                        if not isinstance(action, rules.Attach):
                            raise
                        # Nothing else of the lease depends on this device.
                        not_attached = not_attached or str(error)
            except HypervisorGone:
                raise
            except PoolError as error:
                self._set_problem(domain_uuid, str(error))
                return
            if actions and not fresh:
                # It was done, and the look says it was not: a guest that keeps a device, say.
                self._set_problem(domain_uuid, not_attached or _left(actions[0]))
                return
            if not actions:
                break
        xml = self._seen.get(domain_uuid)
        self._set_problem(domain_uuid, xml.request_problem if xml is not None else "")

    def _decide(self, domain_uuid: str) -> list[rules.Action]:
        # The order matters: what is granted after this line is not judged by the look below.
        guests = [g for g in self.leases.guests() if g.domain_uuid == domain_uuid]
        leases = self.leases.lease_ids()
        carried = self.leases.carried(domain_uuid)
        look = self._hypervisor.look(domain_uuid)
        seen = self._take(domain_uuid, look)
        return rules.decide(
            seen,
            guests,
            leases,
            attach_devices=self._settings.libvirt_attach_devices,
            attach_vsock=self._can_vsock(domain_uuid),
            stale_headers=self.leases.stale_headers(guests),
            carried=carried,
        )

    def _take(self, domain_uuid: str, look: Look | None) -> rules.Seen | None:
        with self._hints_lock:
            if look is None:
                self._seen.pop(domain_uuid, None)
                self._no_vsock.discard(domain_uuid)
                return None
            self._seen[domain_uuid] = look.xml
        if not look.settled:
            self._unsettled.add(domain_uuid)
        xml = look.xml
        return rules.Seen(
            uuid=xml.uuid,
            name=xml.name,
            asks=xml.asks,
            request=xml.request,
            grant=xml.grant,
            channel=xml.channel.held,
            region=xml.region.held,
            crashed=look.crashed,
            settled=look.settled,
            port_path=xml.channel.path if xml.channel.held == Held.OURS else "",
            vsock=xml.vsock.held,
            vsock_cid=xml.vsock.cid,
            qemu=look.qemu,
            port_unused=xml.channel.held == Held.OURS and xml.channel.unused,
        )

    def _can_vsock(self, domain_uuid: str) -> bool:
        return (
            self._settings.vsock_port != 0
            and domain_uuid not in self._no_vsock
            and os.path.exists(VHOST_VSOCK)
        )

    def _attach_vsock(self, domain_uuid: str) -> None:
        try:
            self._hypervisor.attach(domain_uuid, request.vsock_xml())
        except HypervisorGone:
            raise
        except PoolError as error:  # the port serves without it
            self._no_vsock.add(domain_uuid)
            LOG.info("domain %s gets no vsock device: %s", domain_uuid, error)

    def _do(self, action: rules.Action) -> None:
        LOG.debug("doing %s", action)
        host = self._hypervisor
        match action:
            case rules.End(guest, why):
                self.leases.end(guest, why)
            case rules.Grant(seen):
                assert seen.request is not None
                self.leases.grant(seen.uuid, seen.name, seen.request)
            case rules.DropRequest(seen):
                host.set_metadata(seen.uuid, request.REQUEST_URI, request.REQUEST_PREFIX, None)
            case rules.Attach(seen, guest, "region"):
                size = self._settings.libvirt_region_mib
                # libvirt takes the first free port for itself.
                port = next(reversed(self._seen[seen.uuid].free_ports), None)
                host.attach(seen.uuid, request.region_xml(seen.uuid, size, port))
            case rules.Attach(seen, _, "vsock"):
                self._attach_vsock(seen.uuid)
            case rules.Attach(seen, _, _):
                if not self._seen[seen.uuid].has_serial:
                    raise PoolError(
                        "the virtual machine has no virtio-serial controller, and libvirt adds "
                        "none to a running one: give its definition "
                        "<controller type='virtio-serial'/>"
                    )
                host.attach(seen.uuid, request.channel_xml())
            case rules.Detach(seen, what):
                xml = self._seen[seen.uuid]
                device = {"region": xml.region, "vsock": xml.vsock, "channel": xml.channel}[what]
                host.detach(seen.uuid, device.xml)
            case rules.WriteGrant(seen, guest):
                virtual = next(
                    (
                        p.virtual_uuid
                        for p in self._pool.store.slices()
                        if p.name == guest.slice_name
                    ),
                    "",
                )
                element = request.grant_element(
                    guest.id, guest.slice_name, virtual, self._settings.host
                )
                host.set_metadata(seen.uuid, request.GRANT_URI, request.GRANT_PREFIX, element)
            case rules.RemoveGrant(seen):
                host.set_metadata(seen.uuid, request.GRANT_URI, request.GRANT_PREFIX, None)
            case rules.WriteHeader(guest):
                if not self.leases.write_header(guest):
                    raise PoolError(f"the region {guest.region_path} is gone")
            case rules.SetPort(guest, path, vsock_cid, qemu):
                self.leases.set_port(guest, path, vsock_cid, qemu)
            case rules.EndSessions(_, sessions):
                self.leases.end_sessions(sessions, "the guest's service has closed its port")
            case rules.Forget(guest):
                self.leases.forget(guest)

    def _set_problem(self, domain_uuid: str, problem: str) -> None:
        before = self._problems.get(domain_uuid, "")
        if problem == before:
            return
        if not problem:
            del self._problems[domain_uuid]
            return
        self._problems[domain_uuid] = problem
        LOG.warning("domain %s: %s", domain_uuid, problem)
        xml = self._seen.get(domain_uuid)
        if xml is not None and xml.asks and self.leases.live(domain_uuid) is None:
            self.leases.refused(domain_uuid, xml.name, problem)

    # ---- the hook (in its own thread, and without libvirt) --------------------------------------

    def on_hook(self, operation: str, xml: str) -> str:
        """libvirt's hook asks: empty, or why the domain must not start."""
        domain = request.read_domain(xml)
        if operation == "release":
            try:
                self.leases.end_of_domain(domain.uuid, "the virtual machine is off")
            finally:
                self.hint(domain.uuid)
            return ""
        if operation != "prepare" or not domain.asks:
            return ""
        why = domain.request_problem
        if domain.request is not None:
            try:
                self.leases.grant(domain.uuid, domain.name, domain.request, anew=True)
                self.hint(domain.uuid)
            except PoolError as error:
                why = str(error)
        if why:
            self.leases.refused(domain.uuid, domain.name, why)
        return why

    # ---- requests -------------------------------------------------------------------------------

    def _hand_over(self, what: str, work: Callable[[], Any]) -> Any:
        if self.problem:
            raise GuestsUnavailable(self.problem)
        future: Future[Any] = Future()
        self._jobs.put((future, work))
        self._wake.set()
        try:
            return future.result(REQUEST_SECONDS)
        except FutureTimeout:
            raise GuestsUnavailable(
                f"libvirt did not answer within {REQUEST_SECONDS:.0f} s; {what} goes on, and "
                "`guest list` shows what became of it"
            ) from None

    def attach(self, caller: Caller, wanted: str, slice_name: str) -> GuestView:
        """Gives a slice to a running domain, until it stops or the slice is detached.

        Raises NotFound, Conflict, NotPermitted, GuestsUnavailable.
        """
        if not caller.is_admin:
            raise NotPermitted("only root may give slices to virtual machines")
        view: GuestView = self._hand_over("attaching", lambda: self._attach(wanted, slice_name))
        return view

    def _attach(self, wanted: str, slice_name: str) -> GuestView:
        domain_uuid = self._hypervisor.find(wanted)
        look = self._hypervisor.look(domain_uuid)
        if look is None:
            raise Conflict(
                f"the virtual machine {wanted} is not running; a slice is attached to a running "
                "one, or asked for in the metadata of its definition"
            )
        live = self.leases.live(domain_uuid)
        if live is not None:
            raise Conflict(
                f"the virtual machine {look.xml.name} has slice {live.slice_name} already"
            )
        if look.xml.asks:
            raise Conflict(
                f"the virtual machine {look.xml.name} asks for a slice in its metadata already"
            )
        if look.xml.region.held == Held.OURS:
            raise Conflict(
                f"the virtual machine {look.xml.name} has not given back the region of its last "
                "slice yet; try again when its operating system runs"
            )
        host = self._hypervisor
        guest = self.leases.grant(domain_uuid, look.xml.name, GuestRequest(name=slice_name))
        try:
            # From here on the domain asks for the slice itself, also after a save or a migration.
            host.set_metadata(
                domain_uuid,
                request.REQUEST_URI,
                request.REQUEST_PREFIX,
                request.request_element(slice_name),
            )
            self.reconcile(domain_uuid)
            problem = self._problems.get(domain_uuid, "")
            if problem:
                host.set_metadata(domain_uuid, request.REQUEST_URI, request.REQUEST_PREFIX, None)
                self.reconcile(domain_uuid)
                raise PoolError(f"slice {slice_name} was not attached: {problem}")
        except HypervisorGone:
            raise  # the next look decides, by the metadata
        except PoolError:
            self.leases.end(guest, "it could not be attached")
            self.hint(domain_uuid)
            raise
        return self._view(self.leases.live(domain_uuid) or guest)

    def detach(self, caller: Caller, wanted: str, force: bool) -> GuestView:
        """Takes the slice from a running domain; with force, also from running programs.

        Raises NotFound, Conflict, NotPermitted, GuestsUnavailable.
        """
        if not caller.is_admin:
            raise NotPermitted("only root may take slices from virtual machines")
        self._pool.broker.refresh()
        view: GuestView = self._hand_over("detaching", lambda: self._detach(wanted, force))
        return view

    def _detach(self, wanted: str, force: bool) -> GuestView:
        domain_uuid = self._hypervisor.find(wanted)
        guest = self.leases.live(domain_uuid)
        if guest is None:
            raise NotFound(f"the virtual machine {wanted} has no slice")
        sessions = self._pool.book.count(guest.id)
        if sessions and not force:
            raise Conflict(
                f"slice {guest.slice_name} has {sessions} running "
                f"session{'s' if sessions > 1 else ''} in the virtual machine; end them first, or "
                "use --force"
            )
        if self._hypervisor.look(domain_uuid) is not None:
            self._hypervisor.set_metadata(
                domain_uuid, request.REQUEST_URI, request.REQUEST_PREFIX, None
            )
        self.reconcile(domain_uuid)
        ended = next((g for g in self.leases.guests() if g.id == guest.id), None)
        if ended is not None and ended.ended_at is None:
            raise PoolError(
                f"slice {guest.slice_name} was not detached: {self._problems.get(domain_uuid)}"
            )
        return self._view(ended or guest)

    def list(self, caller: Caller) -> list[GuestView]:
        """The virtual machines with slices of the caller (root: all)."""
        return [
            self._view(guest) for guest in self.leases.guests() if caller.may_use(guest.owner_uid)
        ]

    def _view(self, guest: Guest) -> GuestView:
        with self._hints_lock:
            xml = self._seen.get(guest.domain_uuid)
        devices = []
        if xml is not None:
            devices += ["channel"] if xml.channel.held != Held.NONE else []
            devices += ["region"] if xml.region.held != Held.NONE else []
            devices += ["vsock"] if xml.vsock.held != Held.NONE else []
        return GuestView(
            guest,
            tuple(devices),
            xml.channel.path if xml is not None else "",
            self._problems.get(guest.domain_uuid, ""),
            self._pool.book.count(guest.id),
            xml.nova if xml is not None else None,
        )


def _kind(action: rules.Action) -> tuple[str, ...]:
    """What the action does, whatever else was seen."""
    guest = getattr(action, "guest", None)
    return type(action).__name__, getattr(action, "what", ""), guest.id if guest else ""


def _left(action: rules.Action) -> str:
    """What did not come about although it was done."""
    match action:
        case rules.Detach(_, what):
            return f"its operating system has not given back the {what} yet"
        case rules.Attach(_, _, what):
            return f"libvirt attached the {what} and does not show it"
    return f"libvirt does not show the effect of {type(action).__name__}"
