"""What the broker last said about sessions and memory accounts."""

from __future__ import annotations

import threading
import uuid

from gpupoold.leases import broker_pb2 as pb
from gpupoold.model import Session, printable

UNKNOWN_UID = 0xFFFFFFFF


def text_of(identity: bytes) -> str:
    """16 bytes as a UUID's text."""
    return str(uuid.UUID(bytes=identity)) if len(identity) == 16 else identity.hex()


def session_of(state: pb.SessionState) -> Session:
    """The model of one session."""
    return Session(
        id=text_of(state.id),
        lease_id=text_of(state.lease),
        pid=state.pid,
        uid=None if state.uid == UNKNOWN_UID else state.uid,
        program=printable(state.program),
        carrier=state.carrier,
        started_at=state.opened_unix_ns / 1e9,
        memory_used_bytes=sum(worker.memory_bytes for worker in state.workers),
        worker_pids=tuple(worker.pid for worker in state.workers),
    )


class SessionBook:
    """Thread-safe; the broker's thread writes, requests read.

    Sessions are kept as they came: there may be thousands a second, and few are ever looked at.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[bytes, pb.SessionState] = {}
        self._used: dict[str, int] = {}  # virtual uuid without "GPU-" -> bytes
        self._device_problems: dict[str, str] = {}  # GPU uuid -> sentence
        self._snapshots: dict[str, bytes] = {}  # GPU uuid -> what clients are told

    def clear(self) -> None:
        """Nothing is known any more."""
        with self._lock:
            self._sessions = {}
            self._used = {}
            self._device_problems = {}
            self._snapshots = {}

    def take_state(self, state: pb.State) -> None:
        """Replaces all by the truth."""
        sessions = {entry.id: entry for entry in state.sessions}
        used = {text_of(entry.id): entry.used_bytes for entry in state.slices}
        problems = {entry.uuid: entry.sentence for entry in state.devices if not entry.ready}
        snapshots = {entry.uuid: entry.snapshot for entry in state.devices if entry.ready}
        with self._lock:
            self._snapshots = snapshots
            self._sessions = sessions
            self._used = used
            self._device_problems = problems

    def take_event(self, event: pb.Event) -> None:
        """Follows what happens between two states."""
        what = event.WhichOneof("what")
        with self._lock:
            if what == "session_opened":
                session = event.session_opened.session
                self._sessions[session.id] = session
            elif what == "session_ended":
                self._sessions.pop(event.session_ended.session, None)
            elif what == "slice_usage":
                self._used[text_of(event.slice_usage.slice)] = event.slice_usage.used_bytes

    def sessions(self) -> list[Session]:
        """All sessions, oldest first."""
        with self._lock:
            states = list(self._sessions.values())
        return sorted(map(session_of, states), key=lambda s: (s.started_at, s.id))

    def used_bytes(self, virtual_uuid: str) -> int:
        """What is charged to a slice."""
        with self._lock:
            return self._used.get(virtual_uuid.removeprefix("GPU-"), 0)

    def device_problem(self, gpu_uuid: str) -> str:
        """Why the broker cannot use a card; empty: it can, or has not looked yet."""
        with self._lock:
            return self._device_problems.get(gpu_uuid, "")

    def snapshot(self, gpu_uuid: str) -> bytes:
        """What the broker tells clients of a card; empty: it cannot use it, or has not looked."""
        with self._lock:
            return self._snapshots.get(gpu_uuid, b"")

    def count(self, lease_id: str) -> int:
        """How many sessions a lease has."""
        lease = uuid.UUID(lease_id).bytes
        with self._lock:
            return sum(state.lease == lease for state in self._sessions.values())
