"""Cases 25 and 25a: what a redelivery sends, and where it ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from idemp import Outcome
from idemp.broker.port import Ack, Retry
from idemp.messages import REDISPATCHED_HEADER
from idemp.settling import UNCONFIRMED_DELAY
from tests.house import House, sale

RELAY_AFTER = timedelta(seconds=30)


@pytest.mark.parametrize(("redispatch", "sent_again"), [("pending", 0), ("always", 3)])
@pytest.mark.parametrize("recorded", [False, True], ids=["not yet recorded", "recorded"])
def test_duplicate_after_full_dispatch(house: House, redispatch: str, sent_again: int, recorded: bool) -> None:
    """Case 25."""
    house.sells(outputs=3, redispatch=redispatch)
    house.deliver()
    if recorded:
        house.restart()
    outcome = house.deliver()
    assert outcome is (Outcome.REDISPATCHED if sent_again else Outcome.SKIPPED)
    assert len(house.sent()) == 3 + sent_again
    assert house.sent()[3:] == house.sent()[:sent_again]


@pytest.mark.parametrize("recorded", [False, True], ids=["not yet recorded", "recorded"])
def test_redispatched_copy_does_not_ripple(house: House, recorded: bool) -> None:
    house.sells(outputs=2)
    house.deliver()
    if recorded:
        house.restart()
    copy = sale(headers={REDISPATCHED_HEADER: 1})
    assert house.deliver(copy) is Outcome.SKIPPED
    assert len(house.sent()) == 2


def test_redispatched_copy_whose_outputs_wait_sends_those(house: House) -> None:
    """It may be the only copy there is: what is still unconfirmed goes out."""
    house.sells(outputs=3)
    house.script.answers = ["confirm", "nacked", "confirm"]
    copy = sale(headers={REDISPATCHED_HEADER: 1})
    assert house.deliver(copy) is Outcome.PENDING
    house.clock.advance(RELAY_AFTER)
    assert house.deliver(copy) is Outcome.REDISPATCHED
    assert [output.ordinal for output in house.publisher.sent] == [0, 2, 1]


class TestMarksInAnotherThread:
    """A copy reaches another thread than the one that has the confirms of its outputs, and has not recorded them yet."""

    def test_nothing_is_sent_again(self, any_house: House) -> None:
        house = any_house
        house.sells(outputs=2)
        assert house.deliver() is Outcome.HANDLED
        first, house._protocol = house.worker(), None
        copy = sale(headers={REDISPATCHED_HEADER: 1})
        assert house.handle(copy) == (Outcome.PENDING, Retry(UNCONFIRMED_DELAY, counted=False))
        assert len(house.sent()) == 2
        first.dispatcher.flush()
        assert house.handle(copy) == (Outcome.SKIPPED, Ack())
        assert len(house.sent()) == 2

    def test_copy_is_acked_where_a_relay_would_send_them(self, any_house: House) -> None:
        house = any_house
        house.sells(outputs=2)
        house.deliver()
        house._protocol = None
        house.app.store.upkeep.beat("relay", relay=True, consumers=[])
        assert house.handle(sale(headers={REDISPATCHED_HEADER: 1})) == (Outcome.PENDING, Ack())
        assert len(house.sent()) == 2

    def test_they_are_sent_again_once_they_are_due(self, any_house: House) -> None:
        """The other thread may have died with its marks."""
        house = any_house
        house.sells(outputs=2)
        house.deliver()
        house._protocol = None
        house.clock.advance(RELAY_AFTER)
        assert house.handle(sale(headers={REDISPATCHED_HEADER: 1})) == (Outcome.REDISPATCHED, Ack())
        assert len(house.sent()) == 4

    def test_relay_has_leased_them(self, any_house: House) -> None:
        house = any_house
        house.sells(outputs=2)
        house.deliver()
        house._protocol = None
        house.clock.advance(RELAY_AFTER)
        assert len(house.app.store.upkeep.take_pending(10, RELAY_AFTER)) == 2
        assert house.handle(sale(headers={REDISPATCHED_HEADER: 1}))[0] is Outcome.PENDING
        assert len(house.sent()) == 2

    def test_message_that_is_no_copy_is_redispatched_at_once(self, any_house: House) -> None:
        """It may be the redelivery after a death between COMMIT and dispatch."""
        house = any_house
        house.sells(outputs=2)
        house.deliver()
        house._protocol = None
        assert house.deliver() is Outcome.REDISPATCHED
        assert len(house.sent()) == 4
