"""Model to messages."""

from __future__ import annotations

import functools
import json
import pwd
from collections.abc import Mapping

from gpupoold.api import gpupool_pb2 as pb
from gpupoold.gpus.topology import Distance, Interface, PeerRoute, RdmaDevice, Topology
from gpupoold.guests.manager import GuestView
from gpupoold.leases.sessions import SessionBook
from gpupoold.model import Event, Lease, Lent, Run, Session, printable
from gpupoold.overview import GpuView, SliceView


@functools.lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    """The user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def mib(size: int) -> int:
    """Bytes as MiB, rounded up: what is in use never looks like nothing."""
    return -(-size // (1 << 20))


def gpu(view: GpuView, host: str) -> pb.Gpu:
    """One card of this host."""
    state, room = view.state, view.room
    return pb.Gpu(
        uuid=state.gpu.uuid,
        name=state.gpu.name,
        memory_mib=state.gpu.memory_mib,
        memory_reserved_mib=state.gpu.memory_mib - state.usable_mib,
        memory_allocated_mib=room.allocated_mib,
        memory_free_mib=room.free_mib,
        compute_allocated_percent=room.allocated_percent,
        compute_capability=state.gpu.compute_capability,
        mode=state.mode.value,
        health=state.health.value,
        health_reason=state.health_reason,
        drained=state.drained,
        pci_address=state.gpu.pci_address,
        numa_node=state.gpu.numa_node,
        index=state.gpu.index,
        slices=view.slices,
        sessions=view.sessions,
        cpu_affinity=state.gpu.cpu_affinity,
        host=host,
    )


def foreign_gpu(entry: pb.Gpu, host: str) -> pb.Gpu:
    """One card of another host, as that tells."""
    result = pb.Gpu()
    result.CopyFrom(entry)
    result.health_reason = printable(entry.health_reason)
    result.host = host
    return result


def _distances(distances: Mapping[str, Distance]) -> list[pb.GpuDistance]:
    return [pb.GpuDistance(gpu_uuid=uuid, distance=far) for uuid, far in distances.items()]


def _interface(entry: Interface) -> pb.NetworkInterface:
    return pb.NetworkInterface(
        name=entry.name,
        state=entry.state,
        mtu=entry.mtu,
        speed_mbps=entry.speed_mbps or 0,
        pci_address=entry.place.pci_address,
        numa_node=entry.place.numa_node,
        driver=entry.driver,
        addresses=entry.addresses,
        distances=_distances(entry.distances),
    )


def _rdma_device(entry: RdmaDevice) -> pb.RdmaDevice:
    return pb.RdmaDevice(
        name=entry.name,
        pci_address=entry.place.pci_address,
        numa_node=entry.place.numa_node,
        ports=[
            pb.RdmaPort(
                number=port.number,
                state=port.state,
                rate_gbps=port.rate_gbps,
                link_layer=port.link_layer,
                interfaces=port.interfaces,
            )
            for port in entry.ports
        ],
        distances=_distances(entry.distances),
    )


def _peer_route(entry: PeerRoute) -> pb.PeerRoute:
    return pb.PeerRoute(
        name=entry.name,
        address=entry.address,
        resolved=entry.resolved,
        interface=entry.interface,
        gateway=entry.gateway,
        source=entry.source,
        mtu=entry.mtu,
        problem=entry.problem,
        paths=[
            pb.GpuPath(
                gpu_uuid=path.gpu_uuid,
                interface=path.interface,
                rdma_device=path.rdma_device,
                rdma_port=path.rdma_port,
                distance=path.distance.value,
                why=path.why,
            )
            for path in entry.paths
        ],
    )


def topology(found: Topology) -> pb.Topology:
    """How this host is connected."""
    return pb.Topology(
        interfaces=[_interface(entry) for entry in found.interfaces],
        rdma_devices=[_rdma_device(entry) for entry in found.rdma_devices],
        peers=[_peer_route(entry) for entry in found.peers],
        problem=found.problem,
    )


def piece(view: SliceView, host: str) -> pb.Slice:
    """One slice; host: this one's name. Its compute share is recorded; nothing enforces it yet."""
    part = view.piece
    return pb.Slice(
        id=part.id,
        name=part.name,
        uuid=part.virtual_uuid,
        pci_address=part.pci_address,
        kind=part.kind.value,
        gpu_uuid=part.gpu_uuid,
        compute_percent=part.compute_percent,
        memory_mib=part.memory_mib,
        mode=part.mode.value,
        priority=part.priority,
        enforced_by="none",
        memory_used_mib=mib(view.used_bytes),
        sessions=view.sessions,
        owner_uid=part.owner_uid,
        owner=user_name(part.owner_uid),
        temporary=part.temporary,
        created_at=part.created_at,
        lease=view.lease.id if view.lease else "",
        gpu_health=view.gpu_health.value,
        host=part.host or host,
    )


def lease(
    entry: Lease,
    names: Mapping[str, str],
    book: SessionBook,
    runs: Mapping[str, Run],
    domain: str = "",
    lent: Lent | None = None,
) -> pb.Lease:
    """One lease; never its key."""
    run = runs.get(entry.id)
    return pb.Lease(
        id=entry.id,
        kind=entry.kind.value,
        owner_uid=entry.owner_uid,
        owner=user_name(entry.owner_uid),
        slices=[names[slice_id] for slice_id in entry.slice_ids if slice_id in names],
        sessions=book.count(entry.id),
        pid=run.process.pid if run else 0,
        created_at=entry.created_at,
        domain=domain,
        peer=lent.peer if lent else "",
        consumer=lent.consumer if lent else "",
    )


def guest(view: GuestView) -> pb.Guest:
    """One virtual machine."""
    entry = view.guest
    return pb.Guest(
        domain=entry.domain_name,
        uuid=entry.domain_uuid,
        slice=entry.slice_name,
        lease=entry.id,
        ended=entry.ended_at is not None,
        devices=view.devices,
        channel=view.channel_path,
        region=entry.region_path,
        epoch=entry.epoch,
        sessions=view.sessions,
        problem=view.problem,
        created_at=entry.created_at,
        nova_name=view.nova.name if view.nova else "",
        nova_project=view.nova.project_id if view.nova else "",
    )


def session(entry: Session, under: Lease, names: Mapping[str, str]) -> pb.Session:
    """One session."""
    message = pb.Session(
        id=entry.id,
        lease=entry.lease_id,
        slice=",".join(names[slice_id] for slice_id in under.slice_ids if slice_id in names),
        pid=entry.pid,
        program=entry.program,
        carrier=entry.carrier,
        started_at=entry.started_at,
        memory_used_mib=mib(entry.memory_used_bytes),
        worker_pids=entry.worker_pids,
    )
    if entry.uid is not None:
        message.uid = entry.uid
        message.has_uid = True
    return message


def event(entry: Event) -> pb.Event:
    """One event."""
    message = pb.Event(
        id=entry.id,
        time=entry.time,
        kind=entry.kind,
        subject=entry.subject,
        text=entry.text,
        data_json=json.dumps(entry.data),
    )
    if entry.owner_uid is not None:
        message.owner_uid = entry.owner_uid
        message.has_owner = True
    return message
