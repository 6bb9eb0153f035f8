# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""What every broker adapter must do, as a pytest class: subclass it, and give it a broker.

```python
class TestMyBroker(BrokerConformance):
    @pytest.fixture
    def broker(self):
        return MyBroker("my://localhost")
```
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import UUID, uuid4

import pytest

from idemp.broker.port import Ack, Binding, Park, Release, Retry, Topology
from idemp.errors import IdempError
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.broker.port import Broker, Delivery, Publisher, Receiver, Refusal


class Bench:
    """A broker with one queue of its own, and what a test needs to use it in few words.

    Args:
        broker: the broker under test.
        name: a prefix that nobody else uses.
        patience: seconds that something which must happen may take.
        quiet: seconds in which something that must not happen would have happened.
        delay: the delay, in seconds, that `Retry` asks for.

    Example:
        >>> from idemp.broker.memory import InMemoryBroker
        >>> with Bench(InMemoryBroker(), "docs", patience=5, quiet=0.1, delay=0.1) as bench:
        ...     sent = bench.send(b"one", b"two")
        ...     [bench.next(bench.receiver()).message.body for _ in range(2)]
        [b'one', b'two']
    """

    def __init__(self, broker: Broker, name: str, *, patience: float, quiet: float, delay: float) -> None:
        self.broker = broker
        self.queue = f"{name}.queue"
        self.other = f"{name}.other"
        self.exchange = f"{name}.events"
        self.patience = patience
        self.quiet = quiet
        self.delay = timedelta(seconds=delay)
        self.topology = Topology(
            exchange=self.exchange,
            queues=(self.queue, self.other),
            bindings=(
                Binding(self.queue, "orders.*"),
                Binding(self.other, "orders.Placed"),
                Binding(self.other, "stock.#"),
            ),
            delays=(delay,),
        )
        self._ordinals = count()
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self.broker.declare(self.topology)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def receiver(self, *, prefetch: int = 10, queue: str | None = None) -> Receiver:
        """A receiver that is closed at the end."""
        receiver = self.broker.receiver([queue or self.queue], prefetch=prefetch)
        self._closing.callback(receiver.close)
        return receiver

    def publisher(self) -> Publisher:
        """A publisher that is closed at the end."""
        publisher = self.broker.publisher()
        self._closing.callback(publisher.close)
        return publisher

    def output(self, message: Message, *, exchange: str = "", key: str | None = None, mandatory: bool = True) -> Output:
        """A message on its way, to the bench's queue if nothing else is said."""
        return Output(
            id=UUID(message.message_id) if message.message_id else uuid4(),
            ordinal=next(self._ordinals),
            kind=OutputKind.PUBLISH if exchange else OutputKind.SEND,
            exchange=exchange,
            routing_key=self.queue if key is None else key,
            message=message,
            mandatory=mandatory,
        )

    def publish(self, *outputs: Output) -> list[Refusal | None]:
        """Publish all in one call."""
        return self.publisher().publish(outputs, self.patience)

    def send(self, *bodies: bytes, queue: str | None = None) -> list[str]:
        """Confirmed messages with these bodies in a queue; returns their ids."""
        made = [Message(body=body, message_id=str(uuid4())) for body in bodies]
        answers = self.publish(*(self.output(message, key=queue) for message in made))
        assert answers == [None] * len(made), f"not confirmed: {answers}"
        return [str(message.message_id) for message in made]

    def next(self, receiver: Receiver) -> Delivery:
        """The next delivery, which has to come."""
        delivery = receiver.receive(self.patience)
        assert delivery is not None, f"nothing came within {self.patience} seconds"
        return delivery

    def drain(self, receiver: Receiver, number: int) -> list[Delivery]:
        """So many deliveries, each acked."""
        found = []
        for _ in range(number):
            found.append(self.next(receiver))
            receiver.settle(found[-1], Ack())
        return found

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so: brokers count late."""
        deadline = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < deadline, f"not within {self.patience} seconds: {what}"
            time.sleep(0.01)

    def becomes(self, queue: str, depth: int) -> None:
        """Wait until so many messages are ready."""
        self.eventually(lambda: self.broker.depth(queue) == depth, f"{depth} ready messages in {queue}")

    def stays_empty(self, queue: str | None = None) -> None:
        """Nothing is ready, and nothing comes to a new receiver."""
        receiver = self.receiver(queue=queue)
        assert receiver.receive(self.quiet) is None
        receiver.close()
        self.becomes(queue or self.queue, 0)


class BrokerConformance:
    """The cases. A subclass gives the fixture `broker`: a broker that nobody else uses.

    It may also give the fixture `name` (a prefix for queues and exchanges that nobody else uses), and set `patience`
    (seconds that something may take which must happen), `quiet` (seconds in which something that must not happen would
    have happened) and `delay` (seconds, for `Retry`).

    Example:
        >>> [case for case in dir(BrokerConformance) if "park" in case]
        ['test_park_goes_to_the_dead_letter_queue_intact']
    """

    patience: ClassVar[float] = 10.0
    quiet: ClassVar[float] = 0.3
    delay: ClassVar[float] = 0.5

    @pytest.fixture
    def name(self) -> str:
        """A prefix that nobody else uses."""
        return f"conformance-{uuid4().hex[:12]}"

    @pytest.fixture
    def bench(self, broker: Broker, name: str) -> Iterator[Bench]:
        """The broker, with queues declared."""
        with Bench(broker, name, patience=self.patience, quiet=self.quiet, delay=self.delay) as bench:
            yield bench

    # Publishing and arriving

    def test_publish_confirm_receive_ack(self, bench: Bench) -> None:
        """A confirmed message arrives once, as a first attempt, and is gone after its ack."""
        (sent,) = bench.send(b'{"n": 1}')
        receiver = bench.receiver()
        delivery = bench.next(receiver)
        assert (delivery.message.message_id, delivery.message.body) == (sent, b'{"n": 1}')
        assert (delivery.queue, delivery.attempt, delivery.redelivered) == (bench.queue, 1, False)
        receiver.settle(delivery, Ack())
        receiver.close()
        bench.stays_empty()

    def test_publish_nothing(self, bench: Bench) -> None:
        """No outputs, no answers."""
        assert bench.publish() == []

    def test_properties_headers_and_bytes_survive(self, bench: Bench) -> None:
        """Every field arrives as it was sent."""
        message = Message(
            body=bytes(range(256)),
            type="orders.Placed",
            message_id=str(uuid4()),
            content_type="application/vnd.shop+json; charset=utf-8",
            correlation_id="conversation 7",
            reply_to="answers.here",
            headers={"tenant": "münchen ✓", "big": 2**40, "price": 1.5, "yes": True, "deep": {"list": [1, "two", {}]}},
            timestamp=datetime(2024, 2, 29, 12, 30, 15, tzinfo=UTC),
            ttl=3600.0,
            priority=7,
        )
        assert _round_trip(bench, message) == _comparable(message, message)

    def test_falsy_values_survive(self, bench: Bench) -> None:
        """0, "", False, None and empty containers are values like others."""
        headers = {"zero": 0, "null": 0.0, "empty": "", "no": False, "nothing": None, "list": [], "dict": {}}
        message = Message(body=b"0", type="t", message_id=str(uuid4()), correlation_id="", headers=headers, priority=0)
        assert _round_trip(bench, message) == _comparable(message, message)

    def test_absent_values_stay_absent(self, bench: Bench) -> None:
        """Nobody invents a type, a correlation id or a place for answers."""
        message = Message(body=b"{}", message_id=str(uuid4()))
        assert _round_trip(bench, message) == _comparable(message, message)

    def test_large_body(self, bench: Bench) -> None:
        """1 MiB arrives byte for byte."""
        body = bytes(range(256)) * 4096
        bench.send(body)
        assert bench.drain(bench.receiver(), 1)[0].message.body == body

    def test_empty_body(self, bench: Bench) -> None:
        """No bytes are a body too."""
        bench.send(b"")
        assert bench.drain(bench.receiver(), 1)[0].message.body == b""

    def test_unroutable_mandatory_is_returned_and_others_go(self, bench: Bench) -> None:
        """What no queue takes is refused, alone."""
        outputs = [
            bench.output(Message(body=b"first")),
            bench.output(Message(body=b"no binding"), exchange=bench.exchange, key="nobody.Cares"),
            bench.output(Message(body=b"no queue"), key=f"{bench.queue}.missing"),
            bench.output(Message(body=b"last"), exchange=bench.exchange, key="orders.Shipped"),
        ]
        answers = bench.publish(*outputs)
        assert [answer and answer.kind for answer in answers] == [None, "returned", "returned", None]
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 2)] == [b"first", b"last"]
        bench.stays_empty()

    def test_unroutable_without_mandatory_is_fine(self, bench: Bench) -> None:
        """Nobody has to care about an event."""
        message = Message(body=b"{}")
        assert bench.publish(bench.output(message, exchange=bench.exchange, key="nobody.Cares", mandatory=False)) == [
            None
        ]

    def test_topic_bindings(self, bench: Bench) -> None:
        """Each queue gets what its bindings match, `*` for one word, `#` for any."""
        keys = ["orders.Placed", "orders.Shipped", "stock", "stock.eu.Low"]
        answers = bench.publish(
            *(bench.output(Message(body=key.encode()), exchange=bench.exchange, key=key) for key in keys)
        )
        assert answers == [None] * 4
        here = bench.drain(bench.receiver(), 2)
        there = bench.drain(bench.receiver(queue=bench.other), 3)
        assert [delivery.message.body for delivery in here] == [b"orders.Placed", b"orders.Shipped"]
        assert [delivery.message.body for delivery in there] == [b"orders.Placed", b"stock", b"stock.eu.Low"]
        bench.stays_empty()
        bench.stays_empty(bench.other)

    def test_topic_rules_reach_words_not_letters(self, bench: Bench) -> None:
        """`orders.*` takes neither two words nor none."""
        for key in ("orders", "orders.eu.Placed", "ordersX.Placed"):
            (answer,) = bench.publish(bench.output(Message(body=b"{}"), exchange=bench.exchange, key=key))
            assert answer is not None, f"{key} was routed"
            assert answer.kind == "returned"

    def test_order_of_one_publisher(self, bench: Bench) -> None:
        """Messages of one publisher arrive in its order, within and across calls."""
        publisher = bench.publisher()
        bodies = [str(number).encode() for number in range(60)]
        for start in range(0, 60, 20):
            outputs = [bench.output(Message(body=body)) for body in bodies[start : start + 20]]
            assert publisher.publish(outputs, bench.patience) == [None] * 20
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 60)] == bodies

    # Settling

    def test_unsettled_returns_after_close(self, bench: Bench) -> None:
        """What a closed receiver held comes again, marked as redelivered, and is the same attempt."""
        (sent,) = bench.send(b"{}")
        first = bench.receiver()
        bench.next(first)
        first.close()
        again = bench.next(bench.receiver())
        assert (again.message.message_id, again.redelivered, again.attempt) == (sent, True, 1)

    def test_ack_is_final(self, bench: Bench) -> None:
        """Acked messages do not come again, whatever happens to the others of their receiver."""
        bench.send(b"1", b"2", b"3")
        first = bench.receiver()
        held = [bench.next(first) for _ in range(3)]
        first.settle(held[1], Ack())
        first.close()
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 2)] == [b"1", b"3"]
        bench.stays_empty()

    @pytest.mark.parametrize("again", [Ack(), Park("Twice"), Release()], ids=["ack", "park", "release"])
    def test_settling_twice_affects_no_other(self, bench: Bench, again: Ack | Park | Release) -> None:
        """A second settlement is an error or nothing; the delivery that came next stays held, and comes back."""
        bench.send(b"1")
        receiver = bench.receiver()
        first = bench.next(receiver)
        receiver.settle(first, Ack())
        bench.send(b"2")
        bench.next(receiver)
        with suppress(IdempError):
            receiver.settle(first, again)
        receiver.close()
        assert bench.drain(bench.receiver(), 1)[0].message.body == b"2"
        bench.stays_empty()
        assert bench.broker.depth(f"{bench.queue}.dead") == 0

    @pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
    def test_retry_waits_and_lets_others_pass(self, bench: Bench, counted: bool) -> None:
        """It comes again after its delay at the earliest, as the next attempt if it counts; others come meanwhile."""
        bench.send(b"slow", b"behind")
        receiver = bench.receiver(prefetch=1)
        slow = bench.next(receiver)
        since = time.monotonic()
        receiver.settle(slow, Retry(bench.delay, counted=counted))
        (behind,) = bench.drain(receiver, 1)
        assert behind.message.body == b"behind"
        again = bench.next(receiver)
        assert time.monotonic() - since >= bench.delay.total_seconds() - 0.05, "it came too early"
        assert (again.message.message_id, again.message.body) == (slow.message.message_id, b"slow")
        assert again.attempt == (2 if counted else 1)
        receiver.settle(again, Ack())
        receiver.close()
        bench.stays_empty()

    def test_attempts_add_up(self, bench: Bench) -> None:
        """Counted retries count, uncounted ones in between do not."""
        bench.send(b"{}")
        receiver = bench.receiver()
        attempts = []
        for counted in (True, False, True):
            delivery = bench.next(receiver)
            attempts.append(delivery.attempt)
            receiver.settle(delivery, Retry(bench.delay, counted=counted))
        attempts.append(bench.drain(receiver, 1)[0].attempt)
        assert attempts == [1, 2, 2, 3]

    def test_retry_keeps_the_message(self, bench: Bench) -> None:
        """The copy has the same id, type, bytes and headers."""
        message = Message(body=b"\x00\xff", type="t", message_id=str(uuid4()), headers={"tenant": 0}, priority=3)
        assert bench.publish(bench.output(message)) == [None]
        receiver = bench.receiver()
        receiver.settle(bench.next(receiver), Retry(bench.delay, counted=True))
        assert _comparable(bench.drain(receiver, 1)[0].message, message) == _comparable(message, message)

    def test_park_goes_to_the_dead_letter_queue_intact(self, bench: Bench) -> None:
        """A parked message stands in `<queue>.dead` with its story, and does not come again."""
        dead = f"{bench.queue}.dead"
        message = Message(body=b"\x00bad", type="t", message_id=str(uuid4()), headers={"tenant": 0}, priority=3)
        assert bench.publish(bench.output(message)) == [None]
        receiver = bench.receiver()
        story = {"idemp-dead-reason": "Refuse", "idemp-dead-error": "no such customer", "idemp-dead-attempts": 3}
        receiver.settle(bench.next(receiver), Park("Refuse", story))
        receiver.close()
        bench.stays_empty()
        bench.becomes(dead, 1)
        (found,) = bench.broker.browse(dead, 10)
        assert _comparable(found, message) == _comparable(message, message)
        assert {name: found.headers.get(name) for name in story} == story

    def test_release_comes_back_at_once(self, bench: Bench) -> None:
        """A released message is for whoever asks next, and the same attempt."""
        (sent,) = bench.send(b"{}")
        first, second = bench.receiver(prefetch=1), bench.receiver(prefetch=1)
        for receiver in (first, second):
            if (delivery := receiver.receive(bench.patience / 4)) is not None:
                break
        else:
            pytest.fail("nobody got the message")
        other = second if receiver is first else first
        deadline = time.monotonic() + bench.patience
        held: Delivery | None = delivery
        while time.monotonic() < deadline:
            if held is not None:
                receiver.settle(held, Release())
            if (found := other.receive(0.2)) is not None:
                assert (found.message.message_id, found.attempt) == (sent, 1)
                return
            held = receiver.receive(0.05)  # a broker may offer it to the same receiver first
        pytest.fail("the other receiver did not get the message")

    def test_what_a_receiver_gives_back_can_come_to_itself(self, bench: Bench) -> None:
        """Also when it had seen that nothing else is there."""
        bench.send(b"{}")
        receiver = bench.receiver()
        for settlement in (Release(), Retry(bench.delay, counted=True), Ack()):
            delivery = bench.next(receiver)
            assert receiver.receive(0.05) is None
            receiver.settle(delivery, settlement)
        receiver.close()
        bench.stays_empty()

    @pytest.mark.parametrize("receivers", [1, 2], ids=["one receiver", "one after the other"])
    def test_close_ends_what_was_settled(self, bench: Bench, receivers: int) -> None:
        """Retried, parked, released and acked: whatever was still under way is done when `close` returns."""
        bench.send(*[b"{}"] * 20 * receivers)
        settlements = (Park("Refuse"), Ack(), Retry(bench.delay, counted=True), Park("Refuse"))
        for _ in range(receivers):
            receiver = bench.receiver(prefetch=20)
            for number, delivery in enumerate([bench.next(receiver) for _ in range(20)]):
                receiver.settle(delivery, settlements[number % 4])
            receiver.close()
        bench.becomes(f"{bench.queue}.dead", 10 * receivers)
        again = bench.drain(bench.receiver(), 5 * receivers)
        assert {delivery.attempt for delivery in again} == {2}
        bench.stays_empty()
        assert bench.broker.depth(f"{bench.queue}.dead") == 10 * receivers

    def test_cancel_takes_no_more(self, bench: Bench) -> None:
        """What was not handed out is there for others at once; what was is settled as ever; it can be said twice."""
        bench.send(b"1", b"2", b"3", b"4")
        receiver = bench.receiver(prefetch=10)
        held = [bench.next(receiver), bench.next(receiver)]
        for _ in range(2):
            canceller = threading.Thread(target=receiver.cancel)
            canceller.start()
            canceller.join()
        bench.becomes(bench.queue, 2)
        assert receiver.receive(self.quiet) is None
        receiver.settle(held[0], Ack())
        receiver.settle(held[1], Park("Refuse"))
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 2)] == [b"3", b"4"]
        receiver.close()
        receiver.cancel()
        bench.stays_empty()
        bench.becomes(f"{bench.queue}.dead", 1)

    # Sharing

    def test_prefetch_bounds_what_one_receiver_holds(self, bench: Bench) -> None:
        """No more than `prefetch` are out of the queue; the others are for others."""
        bench.send(b"1", b"2", b"3", b"4", b"5")
        greedy = bench.receiver(prefetch=2)
        held = [bench.next(greedy) for _ in range(2)]
        bench.becomes(bench.queue, 3)
        assert greedy.receive(self.quiet) is None
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 3)] == [b"3", b"4", b"5"]
        assert [delivery.message.body for delivery in held] == [b"1", b"2"]

    def test_settling_makes_room(self, bench: Bench) -> None:
        """With one message settled the next one comes."""
        bench.send(b"1", b"2")
        receiver = bench.receiver(prefetch=1)
        first = bench.next(receiver)
        assert receiver.receive(self.quiet) is None
        receiver.settle(first, Ack())
        assert bench.next(receiver).message.body == b"2"

    def test_two_receivers_share_without_overlap(self, bench: Bench) -> None:
        """Each message goes to one of them."""
        sent = bench.send(*(str(number).encode() for number in range(40)))
        receivers = [bench.receiver(prefetch=5), bench.receiver(prefetch=5)]
        found: list[list[str | None]] = [[], []]
        deadline = time.monotonic() + bench.patience
        while len(found[0]) + len(found[1]) < 40:
            assert time.monotonic() < deadline, "not all messages came"
            for receiver, ids in zip(receivers, found, strict=True):
                if (delivery := receiver.receive(0.1)) is not None:
                    receiver.settle(delivery, Ack())
                    ids.append(delivery.message.message_id)
        assert sorted(map(str, found[0] + found[1])) == sorted(sent)
        assert all(found), "one of them got nothing"
        bench.stays_empty()

    def test_one_receiver_of_two_queues(self, bench: Bench) -> None:
        """A receiver can consume several queues, and says where a delivery came from."""
        bench.send(b"here")
        bench.send(b"there", queue=bench.other)
        receiver = bench.broker.receiver([bench.queue, bench.other], prefetch=10)
        try:
            found = {delivery.queue: delivery.message.body for delivery in bench.drain(receiver, 2)}
        finally:
            receiver.close()
        assert found == {bench.queue: b"here", bench.other: b"there"}

    # Looking and taking

    def test_browse_takes_nothing(self, bench: Bench) -> None:
        """Browsed messages are still there for receivers, in their order."""
        bench.send(b"1", b"2", b"3")
        bench.becomes(bench.queue, 3)
        assert [message.body for message in bench.broker.browse(bench.queue, 2)] == [b"1", b"2"]
        bench.becomes(bench.queue, 3)
        assert len(bench.broker.browse(bench.queue, 10)) == 3
        bench.becomes(bench.queue, 3)
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 3)] == [b"1", b"2", b"3"]

    def test_take_removes_what_is_accepted(self, bench: Bench) -> None:
        """Accepted messages are gone, the others are back after the `with` block."""
        bench.send(b"1", b"2", b"3")
        bench.becomes(bench.queue, 3)
        with bench.broker.take(bench.queue, None, 10) as taken:
            assert [message.body for message in taken.messages] == [b"1", b"2", b"3"]
            taken.accept(1)
        bench.becomes(bench.queue, 2)
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 2)] == [b"1", b"3"]
        bench.stays_empty()

    def test_take_by_id(self, bench: Bench) -> None:
        """Only wanted messages are taken, the others stay."""
        ids = bench.send(b"1", b"2", b"3", b"4")
        bench.becomes(bench.queue, 4)
        with bench.broker.take(bench.queue, [ids[2], ids[0], "unknown"], 10) as taken:
            assert [message.body for message in taken.messages] == [b"1", b"3"]
            for index in range(2):
                taken.accept(index)
        bench.becomes(bench.queue, 2)
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 2)] == [b"2", b"4"]
        bench.stays_empty()

    def test_take_keeps_to_its_limit(self, bench: Bench) -> None:
        """No more than asked for are taken."""
        bench.send(b"1", b"2", b"3")
        bench.becomes(bench.queue, 3)
        with bench.broker.take(bench.queue, None, 2) as taken:
            assert [message.body for message in taken.messages] == [b"1", b"2"]
            taken.accept(0)
            taken.accept(1)
        bench.becomes(bench.queue, 1)

    def test_take_gives_back_after_an_error(self, bench: Bench) -> None:
        """An error in the `with` block passes, and what was not accepted is back."""
        bench.send(b"1", b"2")
        bench.becomes(bench.queue, 2)

        def fail() -> None:
            with bench.broker.take(bench.queue, None, 10) as taken:
                taken.accept(0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert bench.drain(bench.receiver(), 1)[0].message.body == b"2"
        bench.stays_empty()

    def test_depth_counts_what_is_ready(self, bench: Bench) -> None:
        """Messages in the hands of consumers don't count."""
        assert bench.broker.depth(bench.queue) == 0
        bench.send(b"1", b"2", b"3")
        bench.becomes(bench.queue, 3)
        receiver = bench.receiver(prefetch=1)
        bench.next(receiver)
        bench.becomes(bench.queue, 2)
        receiver.close()
        bench.becomes(bench.queue, 3)

    # Living

    def test_declare_twice_is_harmless(self, bench: Bench) -> None:
        """Declaring again keeps messages, and doubles no binding."""
        bench.send(b"before")
        bench.broker.declare(bench.topology)
        assert bench.publish(bench.output(Message(body=b"after"), exchange=bench.exchange, key="orders.Shipped")) == [
            None
        ]
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 2)] == [b"before", b"after"]
        bench.stays_empty()

    def test_keep_alive_from_another_thread(self, bench: Bench) -> None:
        """It disturbs neither a delivery that is held, nor receiving, settling and publishing."""
        bench.send(b"held", *[b"more"] * 20)
        receiver, publisher = bench.receiver(), bench.publisher()
        with _calling(receiver.keep_alive, publisher.keep_alive) as calls:
            held = bench.next(receiver)
            before = calls()
            bench.eventually(lambda: calls() > before + 3, "three more rounds of keep_alive")
            bench.drain(receiver, 20)
            assert publisher.publish([bench.output(Message(body=b"last"))], bench.patience) == [None]
            bench.drain(receiver, 1)
            receiver.settle(held, Ack())
        receiver.close()
        receiver.keep_alive()
        bench.stays_empty()

    def test_receive_returns_none_after_its_timeout(self, bench: Bench) -> None:
        """Not much earlier, and not never."""
        receiver = bench.receiver()
        since = time.monotonic()
        assert receiver.receive(0.3) is None
        assert 0.25 <= time.monotonic() - since < 0.3 + bench.patience

    def test_receive_wakes_for_a_new_message(self, bench: Bench) -> None:
        """A waiting receiver gets what is published meanwhile, long before its timeout."""
        receiver = bench.receiver()
        assert receiver.receive(0.05) is None
        sender = threading.Timer(0.1, bench.send, args=(b"{}",))
        since = time.monotonic()
        sender.start()
        delivery = receiver.receive(bench.patience * 10)
        waited = time.monotonic() - since
        sender.join()
        assert delivery is not None
        assert waited < bench.patience

    def test_close_twice_is_harmless(self, bench: Bench) -> None:
        """Receivers and publishers can be closed again, also if they never did anything."""
        bench.send(b"{}")
        receiver, publisher = bench.receiver(), bench.publisher()
        bench.next(receiver)
        for _ in range(2):
            receiver.close()
            publisher.close()
        assert bench.drain(bench.receiver(), 1)[0].message.body == b"{}"


@contextmanager
def _calling(*functions: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Call functions again and again in a thread; gives the number of rounds, and fails if one raised."""
    stop, rounds, errors = threading.Event(), count(1), list[BaseException]()
    done = [0]

    def run() -> None:
        try:
            while not stop.wait(0.005):
                for function in functions:
                    function()
                done[0] = next(rounds)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: done[0]
    finally:
        stop.set()
        thread.join()
    assert not errors, f"keep_alive raised {errors[0]!r}"


def _round_trip(bench: Bench, message: Message) -> dict[str, Any]:
    assert bench.publish(bench.output(message)) == [None]
    return _comparable(bench.drain(bench.receiver(), 1)[0].message, message)


def _comparable(message: Message, sent: Message) -> dict[str, Any]:
    """All fields, told apart by type too; of the headers those that were sent, as adapters may add theirs."""
    names: Sequence[str] = [name for name in message.headers if name in sent.headers]
    headers = {name: json.dumps(message.headers[name], sort_keys=True) for name in sorted(names)}
    fields = (
        "body",
        "type",
        "message_id",
        "content_type",
        "correlation_id",
        "reply_to",
        "timestamp",
        "ttl",
        "priority",
    )
    return {"headers": headers, **{name: getattr(message, name) for name in fields}}
