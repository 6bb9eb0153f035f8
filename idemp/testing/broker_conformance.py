"""Conformance suite of brokers. Subclass it in a test module and give its fixtures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from typing import Any, ClassVar, Final

import pytest

from idemp.context import EXCHANGE
from idemp.errors import Unavailable
from idemp.identity import ADDED
from idemp.messages import MAX_BODY_BYTES, Delivery, Output
from idemp.ports import Broker, Receiver
from idemp.testing.conformance import Age, Open, output

__all__ = ["BrokerConformance"]

PROPERTIES: Final = ("message_id", "type", "timestamp", "correlation_id", "reply_to", "content_type", "content_encoding")
LONG: Final = 100_000  # bytes of a body, of which a failure shows only the digest


def contents(messages: Iterable[Output | Delivery]) -> list[tuple[Any, ...]]:
    """Return the properties and bodies of messages, in the order of their ids, without the headers that a broker adds.

    Example:
        >>> contents([Delivery("stock", {"message_id": "7", "headers": {"x-delivery-count": 1}}, b"{}")])
        [('7', None, None, None, None, None, None, {}, b'{}')]
    """
    found = []
    for each in messages:
        headers = {name: value for name, value in each.properties.get("headers", {}).items() if not ADDED.fullmatch(name)}
        body = each.body if len(each.body) < LONG else sha256(each.body).hexdigest()
        found.append((*map(each.properties.get, PROPERTIES), headers, body))
    return sorted(found, key=lambda content: str(content[0]))


class BrokerConformance:
    """A broker delivers, takes and confirms.

    The fixture `open_broker(worker)` opens the broker. `lose()` loses all leases or connections, so that unacknowledged messages
    are delivered again. While the context manager `outage()` is open, the broker cannot be reached. `age(seconds)` lets leases age;
    it waits, unless a subclass overrides it.
    """

    lease: ClassVar[float]
    """Seconds for which a receiver holds a message without `keep_alive`; `math.inf` if it holds it as long as its connection."""
    keeps_order: ClassVar[bool] = True
    """Whether the messages of one publisher stay in their order."""
    flags_returned: ClassVar[bool] = False
    """Whether a message that a closed receiver gave back says that it was delivered before."""
    longest: ClassVar[int] = MAX_BODY_BYTES
    """Bytes of the longest body that the broker takes; a longer one may be refused."""
    patience: ClassVar[float] = 10.0
    """Seconds for which a test waits for a message that has to come."""
    pause: ClassVar[float] = 0.1
    """Seconds for which a test waits for a message that must not come."""
    queue: ClassVar[str] = "stock"

    @pytest.fixture
    def age(self) -> Age:
        """Let a number of seconds pass."""
        return time.sleep

    def send(self, broker: Broker, count: int = 1) -> list[Output]:
        """Declare the queue, send new messages to it and return them."""
        broker.declare(self.queue, ["shop.Reserve"])
        sent = [output(body=b"%d" % number) for number in range(count)]
        assert list(broker.publisher().publish(sent, self.patience)) == [None] * count
        return sent

    def receive(self, receiver: Receiver, count: int, *, limit: int = 100, seconds: float = math.inf) -> list[Delivery]:
        """Receive until there are enough messages, or until no more time is left."""
        deadline, found = time.monotonic() + min(seconds, self.patience), list[Delivery]()
        while len(found) < count and (rest := deadline - time.monotonic()) > 0:
            found += receiver.receive(limit, rest)
        return found

    # Publishing

    def test_messages_are_delivered_as_they_were_sent(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        texts = {"text": "ü\U0001f600\u2028\r\n\t\\:\0", "empty": "", "a:b\\ü": [1, {"x": [None, True]}], "n": -(2**40), "f": 0.5}
        whole = {**output().properties, "timestamp": 1_700_000_000, "correlation_id": "c:ü", "reply_to": "answers"}
        whole |= {"content_type": "application/json", "content_encoding": "utf-8", "headers": texts}
        bodies = ['{"a": "ü\U0001f600\u2028"}', r'{"a": "\u0000\u001f"}', '{"a":\r\n1}\n', " " * 70_000 + "1"]
        sent = [output(properties=whole), *(output(body=each.encode()) for each in bodies)]
        assert list(broker.publisher().publish(sent, self.patience)) == [None] * len(sent)
        found = self.receive(broker.receiver(self.queue), len(sent))
        assert contents(found) == contents(sent)
        assert {(each.queue, each.redelivered) for each in found} == {(self.queue, False)}

    def test_an_unusual_body_is_taken_whole_or_refused_as_its_own_fault(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        bodies = (b"\xff\x00", b"", "\ufffe".encode(), b"1" * (self.longest + 1), b"{}")
        sent = [output(body=each) for each in bodies]
        answers = broker.publisher().publish(sent, 3 * self.patience)
        assert [each for each in answers if each is not None and not each.own] == []
        assert answers[-1] is None
        taken = [each for each, answer in zip(sent, answers, strict=True) if answer is None]
        assert contents(self.receive(broker.receiver(self.queue), len(taken))) == contents(taken)

    def test_what_no_queue_takes_is_its_own_fault_and_holds_nobody_up(self, open_broker: Open) -> None:
        broker, sent = open_broker("a"), output()
        broker.declare(self.queue, [])
        outputs = [output(routing_key="nowhere"), sent, output(routing_key="nowhere", mandatory=False)]
        returned, taken, dropped = broker.publisher().publish(outputs, self.patience)
        assert returned is not None
        assert returned.own
        assert (taken, dropped) == (None, None)
        assert contents(self.receive(broker.receiver(self.queue), 1)) == contents([sent])

    def test_an_outage_is_no_fault_of_an_output(
        self, open_broker: Open, outage: Callable[[], AbstractContextManager[None]]
    ) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        publisher, sent = broker.publisher(), [output() for _ in range(3)]
        assert list(publisher.publish(sent[:1], self.patience)) == [None]  # it is connected
        with outage():
            refusals = [*publisher.publish(sent[1:2], 1.0), *publisher.publish(sent[1:], 1.0)]
        assert [each is not None and each.own for each in refusals] == [False] * 3
        assert None not in refusals
        assert list(publisher.publish(sent[1:], self.patience)) == [None, None]
        found = {each.properties["message_id"]: each for each in self.receive(broker.receiver(self.queue), 3)}
        assert contents(found.values()) == contents(sent)

    def test_messages_that_were_begun_to_be_sent_are_published_once(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        publisher, lists = broker.publisher(), [[output() for _ in range(2)] for _ in range(2)]
        for sent in lists:  # the second one by a connection that is open
            publisher.send(sent)
            assert list(publisher.publish(sent, self.patience)) == [None, None]
        receiver = broker.receiver(self.queue)
        found = [*self.receive(receiver, 4), *receiver.receive(100, self.pause)]
        assert contents(found) == contents([*lists[0], *lists[1]])

    # Queues

    def test_a_published_message_reaches_the_queues_of_its_type(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare("stock", ["shop.Order"])
        broker.declare("audit", ["shop.Order"])
        broker.declare("other", ["shop.Pay"])
        event = output(kind="publish", exchange=EXCHANGE, routing_key="shop.Order")
        assert list(broker.publisher().publish([event], self.patience)) == [None]
        for queue in ("stock", "audit"):
            assert contents(self.receive(broker.receiver(queue), 1)) == contents([event])
        assert list(broker.receiver("other").receive(10, self.pause)) == []

    def test_a_queue_that_is_declared_again_keeps_its_messages_and_bindings(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, ["shop.Order"])
        events = [output(kind="publish", exchange=EXCHANGE, routing_key="shop.Order") for _ in range(2)]
        assert list(broker.publisher().publish(events[:1], self.patience)) == [None]
        other = open_broker("b")  # of another release
        other.declare(self.queue, ["shop.Pay"])
        assert list(other.publisher().publish(events[1:], self.patience)) == [None]
        assert contents(self.receive(broker.receiver(self.queue), 2)) == contents(events)

    def test_there_is_a_queue_for_what_cannot_be_stored(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        assert list(broker.publisher().publish([output(routing_key=f"{self.queue}.unstorable")], self.patience)) == [None]

    # Receiving

    def test_acknowledged_messages_are_gone_and_others_come_back_flagged(
        self, open_broker: Open, lose: Callable[[], None]
    ) -> None:
        broker = open_broker("a")
        self.send(broker, 3)
        receiver = broker.receiver(self.queue)
        first, second, third = self.receive(receiver, 3)
        receiver.ack([first, third])
        lose()
        receiver = open_broker("b").receiver(self.queue)
        found = [*self.receive(receiver, 1), *receiver.receive(10, self.pause)]
        assert contents(found) == contents([second])
        assert found[0].redelivered

    def test_redelivered_messages_are_settled_one_by_one(self, open_broker: Open, lose: Callable[[], None]) -> None:
        sent = self.send(open_broker("a"), 3)
        assert len(self.receive(open_broker("a").receiver(self.queue), 3)) == 3
        lose()
        heir = open_broker("b").receiver(self.queue)
        settled = self.receive(heir, 1, limit=1)
        heir.ack(settled)
        lose()
        rest = self.receive(open_broker("c").receiver(self.queue), 2)
        assert contents([*settled, *rest]) == contents(sent)
        assert all(each.redelivered for each in rest)

    def test_a_receiver_goes_on_after_its_connection_was_lost(self, open_broker: Open, lose: Callable[[], None]) -> None:
        broker = open_broker("a")
        sent = self.send(broker)
        receiver, other = broker.receiver(self.queue), open_broker("b")
        assert len(self.receive(receiver, 1)) == 1
        lose()
        sent += self.send(other)
        found: dict[str, Delivery] = {}
        deadline = time.monotonic() + self.patience
        while len(found) < 2 and time.monotonic() < deadline:
            with suppress(Unavailable):
                found |= {each.properties["message_id"]: each for each in receiver.receive(10, self.patience)}
        assert contents(found.values()) == contents(sent)
        receiver.ack(list(found.values()))
        receiver.close()
        assert list(other.receiver(self.queue).receive(10, self.pause)) == []

    def test_messages_are_held_while_they_are_kept_alive(self, open_broker: Open, age: Age) -> None:
        self.send(open_broker("a"))
        holder, other = (open_broker(worker).receiver(self.queue) for worker in "ab")
        held = self.receive(holder, 1)
        for _ in range(3):
            age(0.6 * self.lease if self.lease < math.inf else 0.0)
            thread = threading.Thread(target=holder.keep_alive)
            thread.start()
            thread.join()
            assert list(other.receive(1, self.pause)) == []
        holder.ack(held)
        holder.close()
        assert list(other.receive(1, self.pause)) == []

    def test_a_receiver_holds_no_more_messages_than_its_prefetch(self, open_broker: Open) -> None:
        broker = open_broker("a")
        sent = self.send(broker, 4)
        receiver, found = broker.receiver(self.queue, 2), list[Delivery]()
        for _ in range(2):
            held = self.receive(receiver, 2)
            assert len(held) == 2
            assert list(receiver.receive(10, self.pause)) == []
            receiver.ack(held)
            found += held
        assert contents(found) == contents(sent)

    def test_a_closed_receiver_gives_back_its_messages_at_once(self, open_broker: Open) -> None:
        broker = open_broker("a")
        sent = {each.id: each for each in self.send(broker, 4)}
        receiver = broker.receiver(self.queue)
        (settled,), (held,) = (self.receive(receiver, 1, limit=1) for _ in range(2))
        receiver.ack([settled])
        receiver.close()
        del sent[settled.properties["message_id"]]
        found = self.receive(open_broker("b").receiver(self.queue), 3, seconds=self.lease / 2)
        assert contents(found) == contents(sent.values())
        flags = {each.properties["message_id"]: each.redelivered for each in found}
        assert flags[held.properties["message_id"]] == self.flags_returned

    def test_two_receivers_take_disjoint_messages(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        receivers = [open_broker(worker).receiver(self.queue) for worker in "bc"]
        assert [list(receiver.receive(4, self.pause)) for receiver in receivers] == [[], []]
        sent, taken = self.send(broker, 6), list[Delivery]()
        deadline = time.monotonic() + 3 * self.patience
        while len(taken) < len(sent) and time.monotonic() < deadline:
            taken += [each for receiver in receivers for each in receiver.receive(4, self.pause)]
        assert contents(taken) == contents(sent)

    def test_a_late_acknowledgement_changes_nothing(self, open_broker: Open, lose: Callable[[], None]) -> None:
        sent = self.send(open_broker("a"))
        late = open_broker("a").receiver(self.queue)
        first = self.receive(late, 1)
        lose()
        receiver = open_broker("a").receiver(self.queue)  # the same worker
        assert contents(self.receive(receiver, 1)) == contents(sent)
        with suppress(Unavailable):
            late.ack(first)
        lose()
        assert contents(self.receive(open_broker("b").receiver(self.queue), 1)) == contents(sent)

    def test_a_waiting_receiver_is_woken(self, open_broker: Open) -> None:
        broker = open_broker("a")
        broker.declare(self.queue, [])
        receiver = broker.receiver(self.queue)
        timer = threading.Timer(0.1, receiver.wake)
        timer.start()
        start = time.monotonic()
        assert list(receiver.receive(1, self.patience)) == []
        assert time.monotonic() - start < 0.8 * self.patience
        timer.join()

    def test_order_is_kept(self, open_broker: Open) -> None:
        if not self.keeps_order:
            pytest.skip("this broker keeps no order")
        sent = self.send(open_broker("a"), 50)
        receiver, found = open_broker("a").receiver(self.queue), list[Delivery]()
        while len(found) < len(sent) and (some := self.receive(receiver, 1)):
            receiver.ack(some)
            found += some
        assert [each.properties["message_id"] for each in found] == [each.id for each in sent]
