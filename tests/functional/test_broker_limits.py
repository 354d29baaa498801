"""The broker alone: one lease, one address or a slow gpupoold does not take it from the others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.leases import broker_pb2 as pb
from tests.functional import wire
from tests.functional.broker_host import BrokerHost, Session, alive, make_lease
from tests.functional.pool import wait_for
from tests.functional.wire import DEVICE, Connection, Lease, Refused

LIMIT = 6


@pytest.fixture
def host(tmp_path: Path) -> Iterator[BrokerHost]:
    with BrokerHost(tmp_path) as own:
        own.settings.tcp_listen = "127.0.0.1:0"
        yield own


def open_until_refused(known: Lease) -> Refused:
    """Opens and closes sessions as fast as it goes."""
    for _ in range(20_000):
        try:
            Session(known).close()
        except Refused as refused:
            return refused
    raise AssertionError("20000 sessions and no refusal")


# ---- How fast a lease opens what ----------------------------------------------------------------


def test_a_lease_that_opens_sessions_in_a_loop_is_slowed_down(host: BrokerHost) -> None:
    hasty, other = make_lease(), make_lease()
    host.push(hasty, other)
    known = host.client_lease(hasty)
    refused = open_until_refused(known)
    assert refused.code == LIMIT
    assert "opens sessions too fast: 100 a second" in str(refused)
    for _ in range(200):
        with contextlib.suppress(Refused):
            Session(known).close()
    lines = [line for line in host.log().splitlines() if "too fast" in line]
    assert 1 <= len(lines) < 20, lines  # some seconds' refusals are one line
    with Session(host.client_lease(other)) as session:
        assert session.ask("query")[0] == 1

    def opens() -> bool:
        with contextlib.suppress(Refused):
            Session(known).close()
            return True
        return False

    wait_for("the lease to be served again", opens)


def test_a_session_that_connects_to_its_device_in_a_loop_is_slowed_down(host: BrokerHost) -> None:
    lease = make_lease()
    host.push(lease)
    known = host.client_lease(lease)
    with Session(known) as session:
        for _ in range(20_000):
            # A device that is not there, since workers start slowly.
            with Connection(known) as connection, pytest.raises(Refused) as refused:
                connection.open(purpose=DEVICE, session=session.control.session, device=5)
            if refused.value.code == LIMIT:
                break
        assert "opens connections to its devices too fast: 100 a second" in str(refused.value)


# ---- gpupoold reads slowly ----------------------------------------------------------------------


def test_answers_go_ahead_of_events_and_the_oldest_events_are_dropped(host: BrokerHost) -> None:
    leases = [make_lease() for _ in range(14)]
    host.push(*leases)
    channel = host.channel
    assert channel is not None
    channel.events.clear()
    for lease in leases:  # and nobody reads
        known = host.client_lease(lease)
        for _ in range(450):
            Session(known).close()
    with Session(host.client_lease(leases[0])) as last:
        [answer] = channel.ask(pb.ToBroker(query=pb.Query()))
        assert [s.id for s in answer.state.sessions] == [last.control.session]
        before = len(channel.events)  # what the kernel had taken by then

        def is_last(event: pb.SessionOpened) -> bool:
            return event.session.id == last.control.session

        numbers = [event.sequence for event in channel.events]
        opened = None
        while opened is None:
            event = channel.receive().event
            numbers.append(event.sequence)
            if event.WhichOneof("what") == "session_opened" and is_last(event.session_opened):
                opened = event
        assert before < len(numbers)
        gaps = [b - a - 1 for a, b in itertools.pairwise(numbers) if b != a + 1]
        assert len(gaps) >= 1 and all(gap > 0 for gap in gaps)
        assert "events were dropped" in host.log()
        assert channel.state().sessions  # the connection is the same


# ---- Addresses ----------------------------------------------------------------------------------


def test_one_address_does_not_take_the_half_open_places_of_others(host: BrokerHost) -> None:
    host.settings.max_half_open = 16
    host.push(lease := make_lease())
    known = host.client_lease(lease)
    with contextlib.ExitStack() as stack:

        def silent(source: str = "") -> Connection:
            return stack.enter_context(Connection(known, tcp=bool(source), source=source))

        others = [silent("127.0.0.3"), silent("127.0.0.1"), silent()]
        flood = [silent("127.0.0.2") for _ in range(60)]
        with Session(known) as session:  # all that came before has been looked at
            assert session.ask("query")[0] == 1
        wait_for("the flood's end", lambda: sum(map(alive, flood)) <= 4)
        assert all(map(alive, others))
        assert alive(flood[-1])
        assert "the oldest of address 127.0.0.2 is closed" in host.log()


def test_many_addresses_do_not_take_the_places_of_users(host: BrokerHost) -> None:
    host.settings.max_half_open = 16
    host.push(lease := make_lease())
    known = host.client_lease(lease)
    with contextlib.ExitStack() as stack:
        users = [stack.enter_context(Connection(known)) for _ in range(6)]
        flood = [
            stack.enter_context(Connection(known, tcp=True, source=f"127.0.1.{number}"))
            for number in range(1, 61)
        ]
        wait_for("the flood's end", lambda: sum(map(alive, flood)) <= 8)
        assert all(map(alive, users))


class ShortOfDescriptors(BrokerHost):
    """Its broker may have 400 descriptors, of which one address gets a quarter."""

    def command(self) -> list[str]:
        return ["prlimit", "--nofile=400:400", *super().command()]


def test_one_address_does_not_take_all_descriptors(tmp_path: Path) -> None:
    with ShortOfDescriptors(tmp_path) as host, contextlib.ExitStack() as stack:
        host.settings.tcp_listen = "127.0.0.1:0"
        host.push(lease := make_lease())  # of no user
        known = host.client_lease(lease)

        def opened(source: str) -> Connection:
            return stack.enter_context(Connection(known, tcp=True, source=source).open())

        for _ in range(100):
            opened("127.0.0.2")
        with pytest.raises(Refused, match=r"address 127\.0\.0\.2 hold 100 of .* 400") as refused:
            opened("127.0.0.2")
        assert refused.value.code == LIMIT
        opened("127.0.0.3")


# ---- Who waits for the driver -------------------------------------------------------------------


def proven(lease: Lease) -> Connection:
    """A client that waits for its welcome."""
    connection = Connection(lease)
    body = connection.hello(purpose=wire.SESSION)
    connection.send_raw(wire.encode_frame(wire.HELLO, body))
    nonce = connection.receive_frame().body[8:40]
    proof = wire.hmac.digest(lease.key, b"gpupool client 1" + nonce + body, "sha256")
    connection.send_raw(wire.encode_frame(wire.PROOF, proof))
    return connection


def test_one_lease_does_not_keep_others_from_waiting_for_the_driver(tmp_path: Path) -> None:
    with BrokerHost(tmp_path) as host:
        assert host.worker is not None
        host.worker.write_text(host.worker.read_text().replace("exec ", "sleep 5\nexec "))
        hasty, other = make_lease(max_sessions=3), make_lease()
        host.push(hasty, other)
        known = host.client_lease(hasty)
        # Who has gone does not count.
        for _ in range(100):
            proven(known).close()
        waiting = [proven(known) for _ in range(3)]
        with pytest.raises(Refused, match="too many clients wait") as refused:
            proven(known).receive_frame()
        assert refused.value.code == LIMIT
        with Session(host.client_lease(other)) as session:
            assert session.ask("query")[0] == 1
        for connection in waiting:
            assert connection.receive_frame().kind == wire.WELCOME
            connection.close()
