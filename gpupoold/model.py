"""The things gpupoold knows: GPUs, slices, leases, runs, sessions, events.

Memory is in MiB (2**20 bytes), compute in whole percent of one GPU, time in seconds since the
epoch.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Any

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
PRIORITY_DEFAULT = 5
PRIORITY_RANGE = (0, 10)


class GpuMode(enum.StrEnum):
    """How a card is divided; the operator sets it, a change needs an empty card."""

    SHARED = "shared"
    MIG = "mig"
    WHOLE = "whole"


class SliceKind(enum.StrEnum):
    """The kind of a slice is that of its card's mode."""

    SHARED = "shared"
    MIG = "mig"
    WHOLE = "whole"


class SliceMode(enum.StrEnum):
    """hard: never more than its share. elastic: its share guaranteed, idle time usable."""

    HARD = "hard"
    ELASTIC = "elastic"


class Health(enum.StrEnum):
    """ok and warning cards take slices; failed and missing ones take no new ones."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    MISSING = "missing"


class LeaseKind(enum.StrEnum):
    """owner: of a slice made by hand, all the owner's programs. run: of one process. vm: of one
    virtual machine. peer: of another host of the pool."""

    OWNER = "owner"
    RUN = "run"
    VM = "vm"
    PEER = "peer"


@dataclass(frozen=True)
class Gpu:
    """One physical (or simulated) device as the driver reports it."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    driver_reserved_mib: int
    compute_capability: str
    pci_address: str
    numa_node: int = -1
    cpu_affinity: str = ""


@dataclass(frozen=True)
class GpuState:
    """A GPU together with what gpupoold decided or found out about it."""

    gpu: Gpu
    mode: GpuMode = GpuMode.SHARED
    drained: bool = False
    health: Health = Health.OK
    health_reason: str = ""
    reserve_mib: int = 0

    @property
    def usable_mib(self) -> int:
        """What slices can be promised in all."""
        return max(0, self.gpu.memory_mib - self.gpu.driver_reserved_mib - self.reserve_mib)


@dataclass(frozen=True)
class Slice:
    """A part of one GPU."""

    id: str
    name: str
    kind: SliceKind
    gpu_uuid: str
    compute_percent: int
    memory_mib: int
    mode: SliceMode
    priority: int
    virtual_uuid: str
    pci_address: str
    owner_uid: int
    temporary: bool
    created_at: float
    host: str = ""  # another host of the pool, whose GPU it is of; empty: this one

    def summary(self) -> str:
        """What it is, for people."""
        where = f" of host {self.host}" if self.host else ""
        return (
            f"{self.compute_percent} % and {self.memory_mib} MiB of GPU {self.gpu_uuid}{where}, "
            f"{self.kind.value}, {self.mode.value}"
        )


class BorrowedState(enum.StrEnum):
    """asking: the other host was asked, or is about to be. lost: it does not know of it (any
    more)."""

    ASKING = "asking"
    HELD = "held"
    LOST = "lost"


@dataclass(frozen=True)
class Grant:
    """What another host gave with a slice. The key is never shown."""

    lease_id: str  # there
    address: str  # ADDRESS:PORT of its relays' door
    gpu_uuid: str
    key: bytes = field(repr=False, default=b"")
    snapshot: bytes = field(repr=False, default=b"")


@dataclass(frozen=True)
class Borrowed:
    """A slice here that is on another host."""

    slice_id: str
    host: str
    state: BorrowedState
    grant: Grant | None  # None while it is asked for


@dataclass(frozen=True)
class Lent:
    """A lease here that another host has."""

    lease_id: str
    peer: str
    consumer: str  # as that host says it, for people


@dataclass(frozen=True)
class Lease:
    """Slices granted to one consumer, with the key that proves it. The key is never shown."""

    id: str
    kind: LeaseKind
    owner_uid: int
    slice_ids: tuple[str, ...]
    created_at: float
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class ProcessIdentity:
    """A process for good: a pid that was given out again has another start time or boot."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True)
class Run:
    """A process that gpupoolctl run prepared; its lease file, and perhaps its slice, go with it."""

    id: str
    lease_id: str
    uid: int
    process: ProcessIdentity
    command: str
    lease_file: str
    created_at: float


@dataclass(frozen=True)
class Guest:
    """A virtual machine's lease, from its grant until nothing of it is left.

    `id` is the lease's. `owner_uid` gets the slice back unless it is `temporary`. `epoch` counts
    the boots of the virtual machine under this lease, from 1. The lease stands while `ended_at` is
    None; afterwards only devices and the region file are left to be removed. `port_path` is the
    host's socket of the guest's port, as it was last seen; `vsock_cid` its vsock context id.
    """

    id: str
    domain_uuid: str
    domain_name: str
    slice_name: str
    owner_uid: int
    temporary: bool
    region_path: str  # empty: none
    region_inode: int
    epoch: int
    created_at: float
    ended_at: float | None = None
    port_path: str = ""  # empty: none
    vsock_cid: int = 0  # 0: none
    qemu: ProcessIdentity | None = None  # that has the vsock_cid


@dataclass(frozen=True)
class Session:
    """One client process under a lease, as the broker reports it."""

    id: str
    lease_id: str
    pid: int
    uid: int | None
    program: str
    carrier: str
    started_at: float
    memory_used_bytes: int = 0
    worker_pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that happened, kept in a ring."""

    id: int
    time: float
    kind: str
    subject: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    owner_uid: int | None = None


def printable(text: str) -> str:
    """The text on one line and without control characters: it may be a tenant's."""
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class Caller:
    """Who makes a request, from the socket's peer credentials."""

    uid: int
    pid: int
    is_admin: bool

    def may_use(self, owner_uid: int) -> bool:
        """Whether the caller may see and use what belongs to `owner_uid`."""
        return self.is_admin or self.uid == owner_uid
