"""Makes the broker's desired state, and the packets that carry it, from gpupoold's state."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpupoold.conf import Settings
from gpupoold.leases import broker_pb2 as pb
from gpupoold.model import (
    Borrowed,
    BorrowedState,
    Guest,
    Lease,
    LeaseKind,
    Lent,
    Run,
    Slice,
    SliceMode,
)
from gpupoold.slices.identity import parse_pci_address

#: a packet of the broker's socket has at most 64 KiB; this much is filled
PACKET_BYTES = 60_000


@dataclass(frozen=True)
class Desired:
    """One generation of the whole state."""

    generation: int
    settings: Settings
    gpu_uuids: tuple[str, ...]
    slices: Mapping[str, Slice]
    leases: Sequence[Lease]
    runs: Sequence[Run]
    guests: Sequence[Guest] = ()
    driver_version: str = ""
    borrowed: Mapping[str, Borrowed] = field(default_factory=dict)  # by slice
    lent: Mapping[str, Lent] = field(default_factory=dict)  # by lease


def virtual_uuid_bytes(text: str) -> bytes:
    """The 16 bytes of "GPU-<uuid>"."""
    return uuid.UUID(text.removeprefix("GPU-")).bytes


def settings_message(settings: Settings, driver_version: str) -> pb.Settings:
    """What concerns the broker of the settings and of the driver."""
    relay = None
    if settings.certificate_file:
        relay = pb.RelaySettings(
            host=settings.host,
            certificate_file=settings.certificate_file,
            key_file=settings.key_file,
            ca_file=settings.ca_file,
            listen=settings.relay_listen,
            interruption_ms=settings.interruption * 1000,
        )
    return pb.Settings(
        relay=relay,
        driver_directory=settings.driver_directory,
        worker_user=settings.worker_user,
        tcp_listen=settings.broker_tcp_listen,
        warm_workers=settings.warm_workers,
        warm_context=settings.warm_context,
        max_sessions_per_lease=settings.max_sessions_per_lease,
        max_half_open=settings.max_half_open,
        worker_log_bytes=settings.worker_log_bytes,
        kill_grace_ms=settings.kill_grace_ms,
        worker_host_memory_mib=settings.worker_host_memory,
        rings=settings.rings,
        regions=settings.regions,
        spinners=settings.spinners,
        vsock_port=settings.vsock_port,
        cgroup_parent=settings.cgroup_parent,
        no_seccomp=settings.disable_seccomp,
        worker_environment=settings.worker_environment,
        driver_version=driver_version,
    )


def _slice_message(piece: Slice, borrowed: Borrowed | None) -> pb.Slice:
    domain, bus, device = parse_pci_address(piece.pci_address)
    message = pb.Slice(
        id=virtual_uuid_bytes(piece.virtual_uuid),
        name=piece.name,
        gpu_uuid=piece.gpu_uuid,
        pci_domain=domain,
        pci_bus=bus,
        pci_device=device,
        memory_bytes=piece.memory_mib << 20,
        compute_percent=piece.compute_percent,
        mode=pb.ELASTIC if piece.mode == SliceMode.ELASTIC else pb.HARD,
        priority=piece.priority,
    )
    if borrowed is None or borrowed.grant is None:
        message.worker.SetInParent()
        return message
    grant = borrowed.grant
    message.relay.peer = borrowed.host
    message.relay.address = grant.address
    message.relay.lease = uuid.UUID(grant.lease_id).bytes
    message.relay.key = grant.key
    message.relay.snapshot = grant.snapshot
    return message


def _is_there(piece: Slice, present: set[str], borrowed: Mapping[str, Borrowed]) -> bool:
    """Whether its card is here, or its host has given it."""
    if not piece.host:
        return piece.gpu_uuid in present
    entry = borrowed.get(piece.id)
    return entry is not None and entry.state == BorrowedState.HELD


def lease_messages(desired: Desired) -> Iterator[pb.Lease]:
    """Each lease whose cards are all there."""
    present = set(desired.gpu_uuids)
    runs = {run.lease_id: run for run in desired.runs}
    guests = {guest.id: guest for guest in desired.guests}
    for lease in desired.leases:
        pieces = [desired.slices[slice_id] for slice_id in lease.slice_ids]
        if not pieces or not all(_is_there(piece, present, desired.borrowed) for piece in pieces):
            continue
        message = pb.Lease(
            id=uuid.UUID(lease.id).bytes,
            key=lease.key,
            consumer=f"user {lease.owner_uid}",
            slices=[_slice_message(piece, desired.borrowed.get(piece.id)) for piece in pieces],
            uid=lease.owner_uid,
        )
        if lease.kind == LeaseKind.OWNER and desired.settings.cdi_dir:
            message.socket.name = pieces[0].virtual_uuid
            message.socket.uid = lease.owner_uid
        if lease.id in desired.lent:
            lent = desired.lent[lease.id]
            message.peer = lent.peer
            # What one host may hold of the broker's descriptors, and not what root may.
            message.ClearField("uid")
            message.consumer = f"host {lent.peer}: {lent.consumer}"
        if lease.id in guests:
            message.consumer = f"virtual machine {guests[lease.id].domain_name}"
            message.port = guests[lease.id].port_path
            qemu = guests[lease.id].qemu
            if desired.settings.vsock_port and guests[lease.id].vsock_cid and qemu is not None:
                message.vsock_cid = guests[lease.id].vsock_cid
                message.process.pid = qemu.pid
                message.process.start_time = qemu.start_ticks
            if desired.settings.regions and guests[lease.id].region_path:
                message.region.path = guests[lease.id].region_path
                message.region.inode = guests[lease.id].region_inode
                message.region.bytes = desired.settings.libvirt_region_mib << 20
        if lease.kind == LeaseKind.RUN:
            run = runs.get(lease.id)
            if run is None:  # its end was seen: the lease is about to go
                continue
            message.consumer = f"process {run.process.pid} of user {run.uid}"
            message.process.pid = run.process.pid
            message.process.start_time = run.process.start_ticks
        yield message


def push_messages(
    generation: int,
    settings: pb.Settings,
    gpu_uuids: Iterable[str],
    leases: Iterable[pb.Lease],
    limit: int = PACKET_BYTES,
) -> list[pb.Push]:
    """The packets of one generation, each below `limit` bytes; the last has more = false."""
    current = pb.Push(
        generation=generation, settings=settings, gpus=[pb.Gpu(uuid=name) for name in gpu_uuids]
    )
    pushes = [current]
    size = current.ByteSize()
    for lease in leases:
        needed = lease.ByteSize() + 8
        if size + needed > limit:
            current.more = True
            current = pb.Push(generation=generation)
            pushes.append(current)
            size = current.ByteSize()
        current.leases.append(lease)
        size += needed
    return pushes
