# ruff: noqa: S101 - this module is made of assertions
"""Cases of the broker port: what another instance finds, as a process has it that starts after another one ended."""

from __future__ import annotations

from idemp.broker.port import Park, Retry
from idemp.messages import Message
from idemp.testing.broker_bench import Bench
from idemp.testing.cases.broker import BrokerSuite


class ReopeningCases(BrokerSuite):
    """What a broker keeps is not its instance's own."""

    def test_reopened_has_every_message(self, bench: Bench) -> None:
        """Ready, unsettled, retried, delayed and dead ones, each as it was."""
        bench.send(b"parked", b"retried", b"held", b"ready")
        receiver = bench.receiver(prefetch=3)
        parked, retried, _ = (bench.next(receiver) for _ in range(3))
        receiver.settle(parked, Park("Refuse", {"idemp-dead-reason": "Refuse"}))
        receiver.settle(retried, Retry(bench.delay, counted=True))
        assert bench.publish(bench.output(Message(body=b"delayed"), delayed=True)) == [None]
        bench.close()
        with self.another(bench) as other:
            found = {delivery.message.body: delivery.attempt for delivery in other.drain(other.receiver(), 4)}
            assert found == {b"held": 1, b"ready": 1, b"retried": 2, b"delayed": 1}
            other.stays_empty()
            other.becomes(f"{other.queue}.dead", 1)
            (dead,) = other.broker.browse(f"{other.queue}.dead", 10)
            assert (dead.body, dead.headers.get("idemp-dead-reason")) == (b"parked", "Refuse")

    def test_reopened_has_its_topology(self, bench: Bench) -> None:
        """Nobody has to declare again; what one instance publishes reaches those who wait at another."""
        earlier = bench.receiver()
        with self.another(bench) as other:
            shipped = other.output(Message(body=b"shipped"), exchange=other.exchange, key="orders.Shipped")
            assert other.publish(shipped) == [None]
            assert [delivery.message.body for delivery in bench.drain(earlier, 1)] == [b"shipped"]
            other.becomes(other.queue, 0)
