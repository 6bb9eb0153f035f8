# ruff: noqa: S101 - this module is made of assertions
"""Cases of the broker port: what is published arrives."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import uuid4

from idemp.broker.port import Ack
from idemp.messages import Message
from idemp.testing.broker_bench import Bench, comparable, round_trip
from idemp.testing.cases.broker import BrokerSuite


class PublishingCases(BrokerSuite):
    """Confirms, bytes, routes, order."""

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
        assert round_trip(bench, message) == comparable(message, message)

    def test_falsy_values_survive(self, bench: Bench) -> None:
        """0, "", False, None and empty containers are values like others."""
        headers = {"zero": 0, "null": 0.0, "empty": "", "no": False, "nothing": None, "list": [], "dict": {}}
        message = Message(body=b"0", type="t", message_id=str(uuid4()), correlation_id="", headers=headers, priority=0)
        assert round_trip(bench, message) == comparable(message, message)

    def test_absent_values_stay_absent(self, bench: Bench) -> None:
        """Nobody invents a type, a correlation id or a place for answers."""
        message = Message(body=b"{}", message_id=str(uuid4()))
        assert round_trip(bench, message) == comparable(message, message)

    def test_large_body(self, bench: Bench) -> None:
        """1 MiB arrives byte for byte, or what the transport says it takes."""
        body = (bytes(range(256)) * (self.largest_body // 256 + 1))[: self.largest_body]
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

    def test_delayed_outputs_wait(self, bench: Bench) -> None:
        """They are confirmed at once, and arrive after their delay at the earliest; others pass."""
        since = time.monotonic()
        late, now = (bench.output(Message(body=body), delayed=body == b"late") for body in (b"late", b"now"))
        assert bench.publish(late, now) == [None, None]
        receiver = bench.receiver()
        assert [delivery.message.body for delivery in bench.drain(receiver, 2)] == [b"now", b"late"]
        assert time.monotonic() - since >= bench.delay.total_seconds() - 0.05, "it came too early"
        receiver.close()
        bench.stays_empty()

    def test_order_of_one_publisher(self, bench: Bench) -> None:
        """Messages of one publisher arrive in its order, within and across calls."""
        publisher = bench.publisher()
        bodies = [str(number).encode() for number in range(60)]
        for start in range(0, 60, 20):
            outputs = [bench.output(Message(body=body)) for body in bodies[start : start + 20]]
            assert publisher.publish(outputs, bench.patience) == [None] * 20
        assert [delivery.message.body for delivery in bench.drain(bench.receiver(), 60)] == bodies
