"""Makes leases and runs."""

from __future__ import annotations

import time
import uuid

from gpupoold.leases.secrets import new_key
from gpupoold.model import Caller, Lease, LeaseKind, ProcessIdentity, Run


def new_lease(kind: LeaseKind, owner_uid: int, slice_id: str) -> Lease:
    """A lease of one slice, with a fresh key."""
    return Lease(str(uuid.uuid4()), kind, owner_uid, (slice_id,), time.time(), new_key())


def new_run(
    run_id: str, lease: Lease, caller: Caller, process: ProcessIdentity, command: str, path: str
) -> Run:
    """A process that was prepared for its program; `path` is its lease file."""
    return Run(run_id, lease.id, caller.uid, process, command, path, time.time())
