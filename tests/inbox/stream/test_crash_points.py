"""The process dies at one point of a handling that appends to a stream; then the message comes again. All promises hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest

from idemp import Outcome
from idemp.broker.port import Retry
from idemp.errors import ConfigurationError, HandlerError
from idemp.inbox.resending import SPREAD
from idemp.testing.crash_points import CRASH_POINTS
from tests.house import sale
from tests.inbox.stream.house import STREAM, StreamHouse, memory_house, sql_house
from tests.protocol.test_crash_points import all_is_well, crash_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp import Context
    from idemp.testing.faulty import CommitFault

OUTPUTS = 3  # an event, and two that are sent
OF_LATE = {"claim and store"}
OF_EARLY = {"claim", "store"}
ELSEWHERE = {"handler", "settle", "record"}
Claim = Literal["early", "late"]
POINTS = [
    (claim, point.name, point.committed)
    for claim, others in (("early", OF_LATE), ("late", OF_EARLY))
    for point in CRASH_POINTS
    if point.call not in {*others, *ELSEWHERE}
]


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest) -> Iterator[StreamHouse]:
    """A service without handlers yet."""
    if request.param == "memory":
        yield memory_house()
        return
    with sql_house() as made:
        yield made


@pytest.mark.parametrize(("claim", "point", "committed"), POINTS)
def test_redelivery_mends_a_death(house: StreamHouse, claim: Claim, point: str, committed: bool) -> None:
    house.sells(claim=claim)
    crash_at(house, point)
    with house.crashing():
        house.deliver()
    sent = OUTPUTS if point == "after publish" else 0
    assert (house.sales(), house.pending(), len(house.sent())) == (int(committed), OUTPUTS * committed, sent)
    assert house.relay().taken == 0, "nobody but the redelivery sends"
    assert house.deliver() is (Outcome.REDISPATCHED if committed else Outcome.HANDLED)
    all_is_well(house, OUTPUTS)


@pytest.mark.parametrize("sent", range(OUTPUTS))
def test_death_after_some_of_the_outputs(house: StreamHouse, sent: int) -> None:
    house.sells(redispatch="pending")
    house.script.crash_after_outputs = sent
    with house.crashing():
        house.deliver()
    assert house.deliver() is Outcome.REDISPATCHED
    all_is_well(house, OUTPUTS)


@pytest.mark.parametrize("point", ["before record", "after record"])
def test_death_while_recording(house: StreamHouse, point: str) -> None:
    house.sells(redispatch="pending")
    house.deliver()
    crash_at(house, point)
    with house.crashing():
        house.worker().dispatcher.flush()
    assert house.deliver() is (Outcome.REDISPATCHED if point == "before record" else Outcome.SKIPPED)
    all_is_well(house, OUTPUTS)


def test_death_between_ack_and_record_without_a_redelivery(house: StreamHouse) -> None:
    """The message does not come again: some worker's relay sends the outputs once more, and they no longer pend."""
    house.sells()
    house.deliver()
    crash_at(house, "before record")
    with house.crashing():
        house.worker().dispatcher.flush()
    upkeep = house.app.store.upkeep
    upkeep.beat("another worker", relay=True, consumers=["shop"])
    house.clock.advance(SPREAD)
    assert (upkeep.pending_count(), house.relay().confirmed, upkeep.pending_count()) == (OUTPUTS, OUTPUTS, 0)
    assert house.sent()[:OUTPUTS] == house.sent()[OUTPUTS:]
    all_is_well(house, OUTPUTS)


@pytest.mark.parametrize("claim", ["early", "late"])
@pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed", "transient", "away"])
def test_append_without_an_answer(house: StreamHouse, fault: CommitFault, claim: Claim) -> None:
    """The delivery runs again by itself, and the commit id tells which way it went."""
    house.sells(claim=claim)
    house.script.commit_faults = [fault]
    assert house.deliver() is (Outcome.REDISPATCHED if fault == "lost, committed" else Outcome.HANDLED)
    all_is_well(house, OUTPUTS)


def test_without_confirms_the_delivery_is_not_acked(house: StreamHouse) -> None:
    """There is no relay that it could be left to, even if one lives beside it."""
    house.sells()
    house.app.store.upkeep.beat("relay", relay=True, consumers=["shop"])
    house.script.answers = ["nacked"] * OUTPUTS
    outcome, settlement = house.handle()
    assert outcome is Outcome.PENDING
    assert isinstance(settlement, Retry)
    assert not settlement.counted
    assert house.deliver() is Outcome.REDISPATCHED
    all_is_well(house, OUTPUTS)


@pytest.mark.parametrize("claim", ["early", "late"])
@pytest.mark.parametrize("same", [True, False], ids=["the same message", "another message"])
def test_somebody_appends_while_the_handler_runs(house: StreamHouse, claim: Claim, same: bool) -> None:
    """The same message elsewhere: its outputs count. Another one: the handler runs again, on the stream as it is now."""
    house.sells(claim=claim)
    message, meanwhile = sale("sale-1"), sale("sale-1" if same else "sale-2")
    _when_committing(house, lambda: house.deliver(meanwhile))
    assert house.deliver(message) is (Outcome.REDISPATCHED if same else Outcome.HANDLED)
    versions = [event.data["version"] for event in house.inbox.read(STREAM).events]
    assert versions == ([1] if same else [1, 2]), "decided on what was no longer so"
    ids = [commit.claim.id.text for commit in house.inbox.read(STREAM).commits]
    assert [id_.rpartition("sale-")[2] for id_ in ids] == (["1"] if same else ["2", "1"])


def _when_committing(house: StreamHouse, meanwhile: Callable[[], Any]) -> None:
    def death(_: str) -> None:
        house.script.crash_before = None
        meanwhile()

    house.script.die("before commit")
    house.script.death = death  # type: ignore[assignment]


def test_a_type_without_an_entity_is_refused_at_start(house: StreamHouse) -> None:
    house.sells(entity=None)
    with pytest.raises(ConfigurationError, match=r"'shop\.Sell' does not say which entity"):
        house.app.start()


def test_batches_are_refused_at_start(house: StreamHouse) -> None:
    house.sells(batch=10)
    with pytest.raises(ConfigurationError, match="batch=10"):
        house.app.start()


def test_handlers_that_are_not_opted_in_read(house: StreamHouse) -> None:
    """They have no commit id, so nothing of theirs is appended."""
    house.sells()
    house.deliver()
    seen = []

    def look(message: dict[str, Any], ctx: Context) -> None:
        seen.append(ctx.session.open(STREAM).version)  # type: ignore[attr-defined]
        with pytest.raises(HandlerError, match="no stream of its own"):
            _ = ctx.session.events  # type: ignore[attr-defined]
        ctx.publish({"seen": seen}, type="shop.Seen")

    house.app.handler(dict, type="shop.Look")(look)
    house._protocol = None
    assert house.deliver(sale("look", type="shop.Look")) is Outcome.HANDLED
    assert seen == [1]
    assert house.inbox.read(STREAM).version == 1


def test_initiations_are_refused(house: StreamHouse) -> None:
    with pytest.raises(ConfigurationError, match="initiation can't be had on"):
        house.app.run_once("request-1", lambda unit: None)
