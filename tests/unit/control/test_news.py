"""A tenant that opens and closes sessions without end holds up neither gpupoold nor others."""

from __future__ import annotations

import uuid

from gpupoold.leases import broker_pb2 as pb
from gpupoold.leases.broker import _Gaps
from gpupoold.leases.inbox import CHURN_SECONDS, Inbox

from .test_pool import ALICE, Host, session_of, until, want

LEASE, OTHER = bytes([1]) * 16, bytes([2]) * 16


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(lease: bytes, number: int = 0) -> pb.Event:
    state = pb.SessionState(id=number.to_bytes(16, "big"), lease=lease)
    return pb.Event(session_opened=pb.SessionOpened(session=state))


def ended(lease: bytes, number: int = 0) -> pb.Event:
    return pb.Event(
        session_ended=pb.SessionEnded(session=number.to_bytes(16, "big"), lease=lease, why="x")
    )


def test_beyond_a_rate_a_leases_events_are_counted():
    clock = Clock()
    inbox = Inbox(burst=4, rate=2.0, clock=clock)
    for _ in range(100):
        inbox.put(opened(LEASE))
        inbox.put(ended(LEASE))
    inbox.put(pb.Event(worker_ended=pb.WorkerEnded(lease=LEASE, why="signal 9")))
    inbox.put(opened(OTHER))  # who is not so busy is told in full
    inbox.put(pb.Event(lease_ended=pb.LeaseEnded(lease=LEASE)))  # and what happens once
    news = inbox.take()
    kinds = [event.WhichOneof("what") for event in news.events]
    assert kinds == ["session_opened", "session_ended"] * 2 + ["session_opened", "lease_ended"]
    assert news.churns == []  # not yet: it goes on
    clock.now += 1  # two events' worth
    for number in range(3):
        inbox.put(ended(LEASE, number))
    assert [int.from_bytes(e.session_ended.session, "big") for e in inbox.take().events] == [0, 1]
    clock.now += CHURN_SECONDS
    [churn] = inbox.take().churns
    assert (churn.lease, churn.opened, churn.ended, churn.failed) == (LEASE, 98, 99, 1)
    inbox.close()
    assert inbox.take() is None


def test_what_is_kept_has_a_bound():
    inbox = Inbox(burst=1000, kept_max=10, clock=Clock())
    for number in range(30):
        inbox.put(opened(number.to_bytes(16, "big")))
        inbox.put(pb.Event(lease_ended=pb.LeaseEnded(lease=number.to_bytes(16, "big"))))
    inbox.close()
    news = inbox.take()
    assert len(news.events) == 20
    assert news.lost + len(news.churns) + len(news.events) == 60
    assert sum(churn.opened for churn in news.churns) == 25
    assert inbox.take() is None


def test_what_is_not_told_is_not_kept():
    inbox = Inbox()
    inbox.put(pb.Event(slice_usage=pb.SliceUsage()))
    inbox.put(pb.Event(worker_started=pb.WorkerStarted()))
    inbox.put(pb.Event(worker_ended=pb.WorkerEnded(lease=LEASE, expected=True)))
    inbox.close()
    assert inbox.take() is None


def test_answers_do_not_wait_for_events_to_be_stored(host: Host):
    """With the store held by a change, so that nothing can be stored, requests go on."""
    view = host.pool.create_slice(ALICE, want("a"))
    lease = uuid.UUID(view.lease.id).bytes
    client = host.pool.broker.client
    count = 5000
    with host.pool.store.change(new_generation=False):
        for number in range(count):
            host.broker.send(event=opened(lease, number))
            host.broker.send(event=ended(lease, number))
        client.query()
        client.push()
        assert host.pool.book.count(view.lease.id) == 0  # all was read
    told = host.restart().store.events()  # ending stores what there is
    [churn] = [event for event in told if event.kind == "session.churn"]
    assert (churn.subject, churn.owner_uid) == ("a", 1001)
    each = [event for event in told if event.kind in ("session.started", "session.ended")]
    assert churn.data["opened"] + churn.data["ended"] + len(each) == 2 * count
    assert f"{churn.data['opened']} more sessions opened" in churn.text


def test_the_last_news_of_a_lease_that_is_gone_are_its_owners(host: Host):
    view = host.pool.create_slice(ALICE, want("a"))
    state = session_of(host, view)
    host.broker.send(event=pb.Event(session_opened=pb.SessionOpened(session=state)))
    store = host.pool.store
    until(lambda: [e for e in store.events() if e.kind == "session.started"])
    host.pool.delete_slice(ALICE, "a", force=True)
    host.broker.send(
        event=pb.Event(
            session_ended=pb.SessionEnded(session=state.id, lease=state.lease, why="killed")
        )
    )
    event = until(lambda: [e for e in store.events() if e.kind == "session.ended"])[0]
    assert (event.subject, event.owner_uid) == ("a", 1001)


def test_events_that_the_broker_dropped_are_made_up_for_by_its_state(host: Host):
    view = host.pool.create_slice(ALICE, want("a"))
    lease = uuid.UUID(view.lease.id).bytes
    book = host.pool.book

    def numbered(number: int, event: pb.Event) -> pb.Event:
        event.sequence = number
        return event

    def queries() -> int:
        return sum(message.WhichOneof("what") == "query" for message in host.broker.requests)

    before = queries()
    host.broker.send(event=numbered(1, opened(lease, 1)))
    host.broker.send(event=numbered(2, opened(lease, 2)))
    until(lambda: book.count(view.lease.id) == 2)
    assert queries() == before
    # The ends of both, 3 and 4, are lost; the state in which they have ended has nothing.
    host.broker.send(event=numbered(5, opened(OTHER, 3)))
    until(lambda: book.count(view.lease.id) == 0)
    assert queries() == before + 1


def test_a_gap_while_the_state_is_asked_for_asks_once_more():
    gaps = _Gaps()
    assert not gaps.must_ask(7)  # the first of a connection, whose state is asked for anyway
    assert gaps.must_ask(9)
    gaps.asked = 20
    assert not gaps.must_ask(12)
    assert not gaps.must_ask(15)
    assert not gaps.must_ask_again(19)  # another request's answer
    assert gaps.must_ask_again(20)
    gaps.asked = 21
    assert not gaps.must_ask_again(21)
    assert gaps.must_ask(17)
