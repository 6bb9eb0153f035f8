"""Cases 25 and 25a: what a redelivery sends, and where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp import Outcome
from idemp.messages import REDISPATCHED_HEADER
from tests.house import House, sale

if TYPE_CHECKING:
    pass


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
    assert house.deliver(copy) is Outcome.REDISPATCHED
    assert [output.ordinal for output in house.publisher.sent] == [0, 2, 1]
