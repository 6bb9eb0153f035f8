"""The broker in memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Ack, Binding, Park, Release, Retry, Topology
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.testing.broker_conformance import BrokerConformance
from tests.broker.given import HandClock, output


class TestInMemoryBroker(BrokerConformance):
    delay = 0.1
    quiet = 0.1
    outlives_process = False

    @pytest.fixture
    def broker(self) -> InMemoryBroker:
        return InMemoryBroker()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def broker(clock: HandClock) -> InMemoryBroker:
    broker = InMemoryBroker(clock)
    broker.declare(Topology(exchange="events", queues=("q",)))
    return broker


def test_delays_pass_by_the_injected_clock(broker: InMemoryBroker, clock: HandClock) -> None:
    assert broker.publisher().publish([output(b"late", delay=3600), output(b"now")], 1) == [None, None]
    receiver = broker.receiver(["q"], prefetch=5)
    now = receiver.receive(1)
    assert now is not None
    assert now.message.body == b"now"
    receiver.settle(now, Retry(timedelta(hours=2), counted=True))
    clock.go(3599)
    assert receiver.receive(0) is None
    clock.go(1)
    late = receiver.receive(0)
    assert late is not None
    assert late.message.body == b"late"
    clock.go(3600)
    again = receiver.receive(0)
    assert again is not None
    assert (again.message.body, again.attempt) == (b"now", 2)
    assert again.message.headers["idemp-first-seen"] == "2025-01-01T00:00:00+00:00"


def test_retry_that_says_which_attempt_is_next(broker: InMemoryBroker, clock: HandClock) -> None:
    """Only where it counts; the time to live stays, though other brokers' copies have none."""
    sent = output()
    sent = replace(sent, message=replace(sent.message, ttl=30.0))
    assert broker.publisher().publish([sent], 1) == [None]
    receiver = broker.receiver(["q"], prefetch=5)
    for retry, attempt in [
        (Retry(timedelta(seconds=1), counted=True, attempt=5), 5),
        (Retry(timedelta(seconds=1), counted=False, attempt=9), 5),
        (Retry(timedelta(seconds=1), counted=True), 6),
    ]:
        delivery = receiver.receive(0)
        assert delivery is not None
        receiver.settle(delivery, retry)
        clock.go(1)
        again = receiver.receive(0)
        assert again is not None
        assert (again.attempt, again.message.ttl) == (attempt, 30.0)
        receiver.settle(again, Release())


def test_wake_lets_a_waiting_receiver_see_that_the_clock_was_moved(broker: InMemoryBroker, clock: HandClock) -> None:
    broker.publisher().publish([output(delay=3600)], 1)
    receiver = broker.receiver(["q"], prefetch=5)
    found = []
    thread = threading.Thread(target=lambda: found.append(receiver.receive(60)))
    thread.start()
    clock.go(3600)
    broker.wake()
    thread.join(30)
    assert not thread.is_alive()
    assert found[0] is not None


def test_join_waits_for_what_is_ready_held_and_delayed(broker: InMemoryBroker, clock: HandClock) -> None:
    assert broker.join(0)
    broker.publisher().publish([output(), output(delay=10)], 1)
    receiver = broker.receiver(["q"], prefetch=5)
    assert not broker.join(0), "one is ready"
    held = receiver.receive(1)
    assert held is not None
    assert not broker.join(0, delayed=False), "one is held"
    receiver.settle(held, Park("Refuse"))
    assert broker.join(0, delayed=False), "dead letters and delayed ones do not count"
    assert not broker.join(0.05), "one is delayed"
    clock.go(10)
    assert not broker.join(0, delayed=False), "it is ready now"
    delayed = receiver.receive(0)
    assert delayed is not None
    threading.Timer(0.05, receiver.settle, args=(delayed, Ack())).start()
    assert broker.join(30)
    assert broker.depth("q.dead") == 1


def test_threads_share_it(broker: InMemoryBroker) -> None:
    acked: list[bytes] = []
    done = threading.Event()

    def consume() -> None:
        receiver = broker.receiver(["q"], prefetch=3)
        while not done.is_set():
            if (delivery := receiver.receive(0.05)) is not None:
                acked.append(delivery.message.body)
                receiver.settle(delivery, Ack())
        receiver.close()

    def publish(start: int) -> None:
        for number in range(start, start + 200):
            broker.publisher().publish([output(str(number).encode())], 1)

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    publishers = [threading.Thread(target=publish, args=(start,)) for start in (0, 200)]
    for thread in consumers + publishers:
        thread.start()
    for thread in publishers:
        thread.join(60)
    assert broker.join(60)
    done.set()
    for thread in consumers:
        thread.join(60)
    assert sorted(map(int, acked)) == list(range(400))


def test_what_comes_back_keeps_its_place(broker: InMemoryBroker) -> None:
    broker.publisher().publish([output(str(number).encode()) for number in range(5)], 1)
    first = broker.receiver(["q"], prefetch=3)
    for _ in range(3):
        assert first.receive(1) is not None
    first.close()
    second = broker.receiver(["q"], prefetch=5)
    found = [second.receive(1) for _ in range(5)]
    assert [delivery and delivery.message.body for delivery in found] == [b"0", b"1", b"2", b"3", b"4"]


def test_headers_are_what_would_travel(broker: InMemoryBroker) -> None:
    headers: dict[str, object] = {"pair": (1, 2)}
    answers = broker.publisher().publish([output(headers=headers), output(headers={"bad": object()})], 1)
    headers["pair"] = "changed later"
    assert [answer and answer.kind for answer in answers] == [None, "unsendable"]
    assert [dict(message.headers) for message in broker.browse("q", 5)] == [{"pair": [1, 2]}]


def test_misuse_is_told(broker: InMemoryBroker) -> None:
    for call in (lambda: broker.depth("x"), lambda: broker.receiver(["x"], prefetch=1), lambda: broker.browse("x", 1)):
        with pytest.raises(ConfigurationError, match="'x' does not exist"):
            call()
    with pytest.raises(ConfigurationError, match="'x'"):
        broker.declare(Topology(exchange="events", queues=("y",), bindings=(Binding("x", "#"),)))
    broker.publisher().publish([output(), output()], 1)
    receiver = broker.receiver(["q"], prefetch=5)
    first, second = receiver.receive(1), receiver.receive(1)
    assert first is not None
    assert second is not None
    receiver.settle(first, Ack())
    with pytest.raises(BrokerError, match="settled before"):
        receiver.settle(first, Ack())
    receiver.close()
    with pytest.raises(BrokerUnavailable):
        receiver.settle(second, Ack())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(0)
    with broker.take("q", None, 5) as taken:
        taken.accept(0)
        with pytest.raises(BrokerError, match="accepted before"):
            taken.accept(0)
