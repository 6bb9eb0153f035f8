# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""Cases of the broker port: several receivers, and looking into queues."""

from __future__ import annotations

import threading
import time

import pytest

from idemp.broker.port import Ack
from idemp.messages import Message
from idemp.testing.broker_bench import Bench, calling
from idemp.testing.cases.broker import BrokerSuite


class SharingCases(BrokerSuite):
    """Prefetch, browsing, taking, declaring, living."""

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
        with calling(receiver.keep_alive, publisher.keep_alive) as calls:
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
        """Receivers and publishers can be closed again, also if they never did anything; nothing goes back twice."""
        bench.send(b"{}")
        receiver, publisher = bench.receiver(), bench.publisher()
        bench.next(receiver)
        for _ in range(2):
            receiver.close()
            publisher.close()
        assert bench.drain(bench.receiver(), 1)[0].message.body == b"{}"
        bench.stays_empty()
