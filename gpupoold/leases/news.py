"""Turns the broker's news into stored events."""

from __future__ import annotations

from gpupoold.leases import broker_pb2 as pb
from gpupoold.leases.sessions import session_of, text_of
from gpupoold.store import Store


def record(store: Store, event: pb.Event) -> bool:
    """Stores what people want to know; False if this event is not for them."""
    what = event.WhichOneof("what")
    if what in (None, "slice_usage", "worker_started"):
        return False
    at = event.unix_ns / 1e9 if event.unix_ns else None
    if what == "device_probed":
        device = event.device_probed.device
        if device.ready:
            return False
        with store.change(new_generation=False) as change:
            change.event(
                "gpu.not_ready", device.uuid, f"the broker cannot use it: {device.sentence}", at=at
            )
        return True

    lease_bytes = (
        event.session_opened.session.lease
        if what == "session_opened"
        else getattr(event, what).lease
    )
    lease_id = text_of(lease_bytes)
    _, slices, leases, _ = store.snapshot()
    lease = next((lease for lease in leases if lease.id == lease_id), None)
    if lease is None and what == "lease_ended":
        return False  # the end of its process was seen here first and told as run.ended
    owner = lease.owner_uid if lease else 0  # of a lease that is gone: for root alone
    names = {piece.id: piece.name for piece in slices}
    subject = ",".join(names.get(slice_id, "?") for slice_id in lease.slice_ids) if lease else ""
    with store.change(new_generation=False) as change:
        if what == "session_opened":
            session = session_of(event.session_opened.session)
            change.event(
                "session.started",
                subject,
                f"{session.program or 'a program'} (process {session.pid}, {session.carrier})",
                owner_uid=owner,
                at=at,
                session=session.id,
                pid=session.pid,
                lease=lease_id,
            )
        elif what == "session_ended":
            change.event(
                "session.ended",
                subject,
                event.session_ended.why,
                owner_uid=owner,
                at=at,
                session=text_of(event.session_ended.session),
                lease=lease_id,
            )
        elif what == "worker_ended":
            if event.worker_ended.expected:
                return False
            change.event(
                "worker.failed",
                subject,
                event.worker_ended.why,
                owner_uid=owner,
                at=at,
                session=text_of(event.worker_ended.session),
                pid=event.worker_ended.pid,
            )
        elif what == "lease_ended":
            change.event(
                "lease.ended",
                subject,
                event.lease_ended.why,
                owner_uid=owner,
                at=at,
                lease=lease_id,
            )
        else:
            return False
    return True
