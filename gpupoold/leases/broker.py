"""The connection to the broker: pushes the desired state, asks, and hears what happens.

A lost connection is made again a few times a second, and the whole state is pushed anew.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpupoold.errors import BrokerUnavailable, Conflict, NotFound, PoolError
from gpupoold.leases import broker_pb2 as pb
from gpupoold.leases.desired import Desired, lease_messages, push_messages, settings_message

LOG = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.2
HELLO_SECONDS = 5.0
ANSWER_SECONDS = 10.0
PACKET_MAX = 65536


class Listener(Protocol):
    """What the pool does with the broker's news. Called in the connection's thread."""

    def desired(self) -> Desired:
        """The state to push now."""

    def broker_state(self, state: pb.State) -> None:
        """The truth about sessions and accounts, after connecting and to each query."""

    def broker_event(self, event: pb.Event) -> None:
        """Something happened."""

    def broker_applied(self, applied: pb.Applied) -> None:
        """A pushed state is in force."""

    def broker_connected(self, hello: pb.Hello, restarted: bool) -> None:
        """The connection stands; restarted: all earlier sessions are gone."""

    def broker_disconnected(self, why: str) -> None:
        """The connection is lost."""


@dataclass
class _Pending:
    done: threading.Event = field(default_factory=threading.Event)
    answers: list[pb.Answer] = field(default_factory=list)
    lost: str = ""


class _Gaps:
    """Finds events that the broker dropped; one question at a time makes up for them."""

    def __init__(self) -> None:
        self.asked = 0  #: the request that is not answered yet
        self._last = 0
        self._again = False

    def must_ask(self, sequence: int) -> bool:
        """Takes the number of an event; whether the state has to be asked for now."""
        missing = sequence - self._last - 1 if self._last else 0
        self._last = sequence
        if missing <= 0:
            return False
        LOG.warning("the broker dropped %d events; asking it for its state", missing)
        if self.asked:  # and what it answers may be older than what is missing
            self._again = True
            return False
        return True

    def must_ask_again(self, answered: int) -> bool:
        """Takes the number of an answered request; whether more was lost since it was asked."""
        if answered != self.asked:
            return False
        self.asked = 0
        again, self._again = self._again, False
        return again


class BrokerClient:
    """Safe to use from several threads."""

    def __init__(self, path: str, listener: Listener) -> None:
        self._path = path
        self._listener = listener
        self._socket: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._pending_lock = threading.Lock()
        self._states: dict[int, pb.State] = {}
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._instance = b""
        self._ready = threading.Event()
        self.problem = "not connected yet"
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    # ---- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def stop(self) -> None:
        """Closes the connection; the broker goes on with what it has."""
        self._stop.set()
        self._drop()
        self._thread.join(timeout=5)

    @property
    def connected(self) -> bool:
        """Whether the state was pushed on a connection that stands."""
        return self._ready.is_set()

    def wait_connected(self, seconds: float) -> bool:
        """Waits until connected; False after `seconds`."""
        return self._ready.wait(seconds)

    def _drop(self) -> None:
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        said = ""
        while not self._stop.is_set():
            try:
                self._converse()
                why = "the broker closed the connection"
            except FileNotFoundError:
                why = f"{self._path} does not exist: is gpupool-broker running?"
            except ConnectionRefusedError:
                why = f"nobody listens on {self._path}: is gpupool-broker running?"
            except (OSError, ValueError) as error:
                why = f"{self._path}: {error}"
            except Exception as error:
                LOG.exception("the broker's connection failed")
                why = f"{self._path}: {error}"
            was_ready = self._ready.is_set()
            self._ready.clear()
            self.problem = why
            self._fail_pending(why)
            if self._stop.is_set():
                break
            if was_ready:
                LOG.warning("lost the broker: %s", why)
                self._listener.broker_disconnected(why)
            elif why != said:
                LOG.warning("no broker: %s", why)
            said = why
            self._stop.wait(RECONNECT_SECONDS)

    def _converse(self) -> None:
        """One connection, from hello to its end."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._path)
            connection.settimeout(HELLO_SECONDS)
            hello = self._receive(connection)
            if hello is None:
                return
            if hello.WhichOneof("what") != "hello":
                raise ValueError("the broker did not say hello")
            connection.settimeout(None)
            restarted = self._instance not in (b"", hello.hello.instance)
            self._instance = hello.hello.instance
            self._states.clear()
            self._socket = connection
            if hello.hello.events_lost:
                LOG.warning("the broker lost %d events", hello.hello.events_lost)
            self._listener.broker_connected(hello.hello, restarted)
            pushed, _ = self._send_push()
            asked, _ = self._send(query=pb.Query())
            waiting = {pushed, asked}
            gaps = _Gaps()
            while (message := self._receive(connection)) is not None:
                what = message.WhichOneof("what")
                if what == "event":
                    self._listener.broker_event(message.event)
                    if gaps.must_ask(message.event.sequence):
                        gaps.asked, _ = self._send(query=pb.Query())
                elif what == "answer":
                    self._take_answer(message.answer)
                    if not message.answer.more:
                        waiting.discard(message.answer.request)
                        if gaps.must_ask_again(message.answer.request):
                            gaps.asked, _ = self._send(query=pb.Query())
                    if not waiting and not self._ready.is_set():
                        self.problem = ""
                        self._ready.set()
        finally:
            self._socket = None
            connection.close()

    @staticmethod
    def _receive(connection: socket.socket) -> pb.FromBroker | None:
        data = connection.recv(PACKET_MAX)
        if not data:
            return None
        message = pb.FromBroker()
        try:
            message.ParseFromString(data)
        except Exception as error:
            raise ValueError(f"the broker sent something else than a message: {error}") from None
        return message

    def _take_answer(self, answer: pb.Answer) -> None:
        if answer.HasField("state"):  # a long one comes in parts
            state = self._states.setdefault(answer.request, pb.State())
            state.MergeFrom(answer.state)
            if not answer.more:
                self._listener.broker_state(self._states.pop(answer.request))
        if answer.HasField("applied"):
            self._listener.broker_applied(answer.applied)
        with self._pending_lock:
            pending = self._pending.get(answer.request)
            if pending is not None and not answer.more:
                del self._pending[answer.request]
        if pending is not None:
            pending.answers.append(answer)
            if not answer.more:
                pending.done.set()
        if answer.code != pb.OK:
            LOG.info("the broker refused request %d: %s", answer.request, answer.sentence)

    def _fail_pending(self, why: str) -> None:
        with self._pending_lock:
            lost, self._pending = list(self._pending.values()), {}
        for pending in lost:
            pending.lost = why
            pending.done.set()

    # ---- requests -------------------------------------------------------------------------------

    def _send(self, **what: object) -> tuple[int, _Pending]:
        number = next(self._numbers)
        pending = _Pending()
        with self._pending_lock:
            self._pending[number] = pending
        with self._send_lock:
            self._send_locked(pb.ToBroker(request=number, **what))  # type: ignore[arg-type]
        return number, pending

    def _send_locked(self, message: pb.ToBroker) -> None:
        connection = self._socket
        if connection is None:
            raise BrokenPipeError("not connected")
        data = message.SerializeToString()
        if len(data) > PACKET_MAX:
            raise ValueError(f"a message of {len(data)} bytes does not fit a packet")
        connection.sendall(data)

    def _send_push(self) -> tuple[int, _Pending]:
        number = next(self._numbers)
        pending = _Pending()
        with self._pending_lock:
            self._pending[number] = pending
        # Read and sent under one lock: generations arrive in their order.
        with self._send_lock:
            desired = self._listener.desired()
            for push in push_messages(
                desired.generation,
                settings_message(desired.settings, desired.driver_version),
                desired.gpu_uuids,
                lease_messages(desired),
            ):
                self._send_locked(pb.ToBroker(request=0 if push.more else number, push=push))
        return number, pending

    def _wait(self, number: int, pending: _Pending, seconds: float) -> list[pb.Answer]:
        if not pending.done.wait(seconds):
            with self._pending_lock:
                self._pending.pop(number, None)
            raise BrokerUnavailable(f"the broker did not answer within {seconds:.0f} s")
        if pending.lost:
            raise BrokerUnavailable(f"the broker went away: {pending.lost}")
        answer = pending.answers[-1]
        if answer.code == pb.OK:
            return pending.answers
        sentence = answer.sentence or pb.Code.Name(answer.code)
        if answer.code == pb.NOT_FOUND:
            raise NotFound(sentence)
        if answer.code == pb.CONFLICT:
            raise Conflict(sentence)
        raise PoolError(f"the broker refused: {sentence}")

    def _ask(
        self, send: Callable[[], tuple[int, _Pending]], seconds: float = ANSWER_SECONDS
    ) -> list[pb.Answer]:
        if not self._ready.is_set():
            raise BrokerUnavailable(f"the broker is not connected: {self.problem}")
        try:
            number, pending = send()
        except OSError as error:
            raise BrokerUnavailable(f"the broker went away: {error}") from None
        return self._wait(number, pending, seconds)

    def push(self, seconds: float = ANSWER_SECONDS) -> pb.Applied:
        """Pushes the state of now and waits until it is in force.

        Raises BrokerUnavailable, or PoolError when the broker refuses the state.
        """
        return self._ask(self._send_push, seconds)[-1].applied

    def query(self, seconds: float = ANSWER_SECONDS) -> None:
        """Asks what is going on; the listener has heard it when this returns."""
        self._ask(lambda: self._send(query=pb.Query()), seconds)

    def kill_session(self, session: bytes, why: str) -> None:
        """Ends a session; raises NotFound if there is none."""
        self._ask(lambda: self._send(kill_session=pb.KillSession(session=session, why=why)))

    def resize_slice(self, virtual_uuid: bytes, memory_bytes: int, compute_percent: int) -> None:
        """Takes a new size into force; raises Conflict if more memory is in use."""
        message = pb.ResizeSlice(
            slice=virtual_uuid, memory_bytes=memory_bytes, compute_percent=compute_percent
        )
        self._ask(lambda: self._send(resize_slice=message))
