"""COMMIT succeeds and the connection dies before the ack: a thousand times in a row, at every boundary in turn."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from typing import TYPE_CHECKING

import pytest

from idemp import Outcome
from tests.faults.shop import ACK, PUBLISH, STOCK, Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.testing import FaultProxy, Trigger

pytestmark = pytest.mark.slow

TIMES = 200

# Outputs and acks go over different connections: the publisher's outlives the loss of the consumer's.
BOUNDARIES: dict[str, Callable[[FaultProxy], Trigger]] = {
    "before publish": lambda line: line.cut_when(PUBLISH),
    "publish sent": lambda line: line.cut_when(PUBLISH, before=False, answer_within=0),
    "confirm lost": lambda line: line.cut_when(ACK, direction="to_client"),
    "before ack": lambda line: line.cut_when(ACK, only_there=True),
    "ack sent": lambda line: line.cut_when(ACK, before=False, answer_within=0, only_there=True),
}


@pytest.mark.timeout(900)  # a bound for crowded machines; it takes half a minute
def test_a_thousand_cuts(shop: Shop) -> None:
    """Effects exactly once, outputs at least once under one id with one body; each cut is a real one."""
    ids = [f"{boundary} {number}" for number in range(TIMES) for boundary in BOUNDARIES]
    for first in range(0, len(ids), 100):
        shop.sell(*ids[first : first + 100], to=[STOCK])
    boundaries = cycle(BOUNDARIES)
    cuts: Counter[str] = Counter()

    def arm() -> None:
        """A handler runs, for the first time: the line is cut after its COMMIT."""
        boundary = next(boundaries)
        cuts[boundary] += 1
        armed.append(BOUNDARIES[boundary](shop.to_broker))

    armed: list[Trigger] = []
    shop.in_handler = arm
    consumer = shop.reborn(shop.quick_app(), prefetch=1)
    shop.work(lambda: len(armed) == len(ids) and armed[-1].triggered)
    shop.work()
    assert cuts == dict.fromkeys(BOUNDARIES, TIMES)
    assert all(trigger.triggered for trigger in armed)
    shop.all_is_well()
    assert consumer.outcomes.count(Outcome.REDISPATCHED) >= 4 * TIMES, "all but those whose ack arrived came again"
