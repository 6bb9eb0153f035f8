"""The process dies before and after each call of a port, each request to the documents included; nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from idemp import Outcome
from idemp.testing.crash_points import Crash
from idemp.testing.faulty import CommitFault
from tests.house import sale
from tests.inbox.document.given import DocumentHouse
from tests.protocol.test_crash_points import all_is_well

WINDOW = timedelta(minutes=5)


def house(**policy: Any) -> DocumentHouse:
    made = DocumentHouse()
    made.sells(entity="sku", **policy)
    return made


def points(calls: int) -> Iterator[tuple[str, int]]:
    for number in range(1, calls + 1):
        yield "crash_before", number
        yield "crash_after", number


@pytest.mark.parametrize("claim", ["early", "late"])
@pytest.mark.parametrize("known", [False, True], ids=["first message", "later message"])
def test_dies_at_every_call(claim: str, known: bool) -> None:
    """Of a delivery, its dispatch and the recording of its confirms."""

    def ready() -> DocumentHouse:
        made = house(claim=claim)
        if known:
            made.documents.write("A-1", {"stock": 7}, None)
        return made

    whole = ready()
    whole.deliver()
    whole.worker().dispatcher.flush()
    calls = list(whole.script.calls)
    assert calls.count("write document") == 3, calls
    assert {"begin", "commit", "publish", "record", "read document"} <= set(calls)
    for when, number in points(len(calls)):
        dying = ready()
        setattr(dying.script, when, number)
        with dying.crashing():
            dying.deliver()
            dying.worker().dispatcher.flush()
        committed = dying.sales()
        again = dying.deliver()
        assert again is (Outcome.REDISPATCHED if committed else Outcome.HANDLED), f"{when} {calls[number - 1]}"
        all_is_well(dying)


@pytest.mark.parametrize("claim", ["early", "late"])
@pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed", "transient", "away"])
@pytest.mark.parametrize("write", [1, 2], ids=["outputs", "state"])
def test_write_without_an_answer(write: int, fault: CommitFault, claim: str) -> None:
    """The delivery runs again by itself; only the state's write can have committed it."""
    service = house(claim=claim)
    service.requests.write_faults = ["", fault] if write == 2 else [fault]
    committed = write == 2 and fault == "lost, committed"
    assert service.deliver() is (Outcome.REDISPATCHED if committed else Outcome.HANDLED)
    all_is_well(service)


def test_slow_write_that_wins_after_all() -> None:
    """The second attempt loses against it, and sends what the first one stored."""
    service = house()
    service.requests.write_faults = ["", "slow"]
    first = service.inbox.new_attempt

    def arriving() -> str:
        if service.requests.slow:
            service.requests.slow.pop()()
        return first()

    service.inbox.new_attempt = arriving  # type: ignore[method-assign]
    assert service.deliver() is Outcome.REDISPATCHED
    assert len(service.attempts()) == 2
    all_is_well(service)


def _expired() -> DocumentHouse:
    """An expired claim, the orphan of an attempt that lost, and one that still expects what is there."""
    service = house(retention="5m")
    service.app.store.upkeep.beat("w", relay=False, consumers=["shop"])
    service.requests.write_faults = ["", "lost, not committed"]
    service.deliver()
    service.worker().dispatcher.flush()
    service.documents.write("B-1", {"stock": 3}, None)
    service.script.die("after write document")
    with service.crashing():
        service.deliver(sale("sale-2", {"sku": "B-1"}))
    service.consume_for_ten_minutes()
    assert len(service.attempts()) == 3
    return service


def test_collector_dies_at_every_call() -> None:
    """Whoever comes after it finishes; the message's effect and its outputs are as they were."""
    whole = _expired()
    whole.script.clear()
    assert whole.inbox.purge("shop", {"shop.Sell": WINDOW}, 10) == 1
    calls = list(whole.script.calls)
    assert whole.attempts() == []
    assert calls.count("delete document") == 3
    for when, number in points(len(calls)):
        dying = _expired()
        dying.script.clear()
        setattr(dying.script, when, number)
        with pytest.raises(Crash):
            dying.inbox.purge("shop", {"shop.Sell": WINDOW}, 10)
        dying.script.clear()
        dying.inbox.purge("shop", {"shop.Sell": WINDOW}, 10)
        assert dying.attempts() == [], f"{when} {calls[number - 1]}"
        assert dying.sales() == 1
        found, fenced = dying.documents.read("A-1"), dying.documents.read("B-1")
        assert found is not None
        assert fenced is not None
        assert (found.body["idemp"]["shop"]["ids"], fenced.body) == ({}, {"stock": 3})
