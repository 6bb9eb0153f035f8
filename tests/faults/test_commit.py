"""COMMIT is sent and its answer does not come: the link to PostgreSQL is cut on its way there, or on its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from idemp import Outcome
from idemp.errors import AlreadyHandled, CommitUnknown
from tests.faults.shop import COMMIT, COMMITTED, EFFECT, SOON, STOCK, Shop

if TYPE_CHECKING:
    from idemp.testing import Trigger

Cut = Callable[[Shop], "Trigger"]

LOST: dict[str, Cut] = {
    "it did not commit": lambda shop: shop.to_database.cut_when(COMMIT),
    "it committed": lambda shop: shop.to_database.cut_when(COMMITTED, direction="to_client"),
    "it committed, reset": lambda shop: shop.to_database.cut_when(COMMITTED, direction="to_client", reset=True),
}


@pytest.mark.parametrize("lost", LOST)
def test_runs_again_and_ends_right(shop: Shop, lost: str) -> None:
    """In the handler's own COMMIT; the delivery is not even given back."""
    shop.sell("sale", to=[STOCK] * 3)
    cut: list[Trigger] = []
    shop.to_database.when(EFFECT, lambda: cut.append(LOST[lost](shop)))
    assert shop.consumer.step() is (Outcome.HANDLED if lost == "it did not commit" else Outcome.REDISPATCHED)
    assert cut[0].wait_triggered(SOON)
    assert set(shop.all_is_well().values()) == {1}


def test_time_and_again(shop: Shop) -> None:
    """The delivery runs twice, then it comes back, and others are handled meanwhile."""
    shop.sell("sale")
    cuts = 0

    def cut() -> None:
        nonlocal cuts
        cuts += 1
        shop.to_database.cut()
        if cuts < 6:
            shop.to_database.when(EFFECT, lambda: shop.to_database.when(COMMIT, cut))

    shop.to_database.when(EFFECT, lambda: shop.to_database.when(COMMIT, cut))
    for expected in [Outcome.RETRIED] * 3 + [Outcome.HANDLED]:
        assert shop.consumer.step() is expected
        shop.pass_delays()
    assert cuts == 6
    assert set(shop.all_is_well().values()) == {1}


@pytest.mark.parametrize("lost", LOST)
def test_the_error_says_that_nobody_knows(shop: Shop, lost: str) -> None:
    """Where it reaches the caller: an initiation. Run again under its id it is done once."""
    with pytest.raises(CommitUnknown) as unknown, shop.app.initiate("request") as unit:
        unit.send({"n": 0}, to=STOCK, type="stock.Reserve")
        trigger = LOST[lost](shop)
    assert trigger.wait_triggered(SOON)
    assert unknown.value.committed == "unknown"
    assert "unknown" in str(unknown.value)
    if lost == "it did not commit":
        with shop.app.initiate("request") as unit:
            unit.send({"n": 0}, to=STOCK, type="stock.Reserve")
    else:
        with pytest.raises(AlreadyHandled) as handled, shop.app.initiate("request"):
            pass
        assert len(handled.value.outputs) == 1
    assert shop.relay().confirmed == 1
    assert len(shop.arrived()) == 1
