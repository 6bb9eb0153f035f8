# ruff: noqa: S101 - this module is made of assertions
"""Cases of the broker port: how deliveries end."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from idemp.broker.port import Ack, Park, Release, Retry
from idemp.errors import IdempError
from idemp.messages import Message
from idemp.testing.broker_bench import Bench, comparable
from idemp.testing.cases.broker import BrokerSuite

if TYPE_CHECKING:
    from idemp.broker.port import Delivery


class SettlingCases(BrokerSuite):
    """Ack, retry, park, release, close, cancel."""

    # Settling

    def test_unsettled_returns_after_close(self, bench: Bench) -> None:
        """What a closed receiver held comes again, marked as redelivered, and is the same attempt."""
        (sent,) = bench.send(b"{}")
        first = bench.receiver()
        bench.next(first)
        first.close()
        again = bench.next(bench.receiver())
        assert (again.message.message_id, again.attempt) == (sent, 1)
        assert again.redelivered == self.tells_redelivered

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
        assert comparable(bench.drain(receiver, 1)[0].message, message) == comparable(message, message)

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
        assert comparable(found, message) == comparable(message, message)
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
        # In any order: one of them may have come back to this receiver first, when its ack had made room.
        assert {delivery.message.body for delivery in bench.drain(bench.receiver(), 2)} == {b"3", b"4"}
        receiver.close()
        receiver.cancel()
        bench.stays_empty()
        bench.becomes(f"{bench.queue}.dead", 1)
