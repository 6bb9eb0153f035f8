"""The link to the broker is cut, or the process is killed, at each point between COMMIT and the end of the ack."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from idemp import Outcome
from idemp.testing import FaultProxy, Trigger
from tests.faults.shop import ACK, COMMIT, COMMITTED, EFFECT, PUBLISH, SOON, STOCK, Shop
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from tests.faults.processes import Processes

OUTPUTS = 4
Fault = Callable[[], object]
Point = Callable[[FaultProxy, Fault], Trigger]

# Publishes go one by one here, so that "k of n" is exact.
BEFORE_THE_ACK: dict[str, Point] = {
    "after COMMIT before dispatch": lambda line, do: line.when(PUBLISH, do),
    "after 1 of 4 outputs": lambda line, do: line.when(PUBLISH, do, nth=2),
    "after 3 of 4 outputs": lambda line, do: line.when(PUBLISH, do, nth=4),
    "sent, first confirm lost": lambda line, do: line.when(ACK, do, direction="to_client"),
    "sent, last confirm lost": lambda line, do: line.when(ACK, do, direction="to_client", nth=4),
    "all confirmed, not acked": lambda line, do: line.when(ACK, do),
}
ACK_SENT: Point = lambda line, do: line.when(ACK, do, before=False, answer_within=0.05)  # noqa: E731

# The COMMIT that follows the effect; names and heartbeats have theirs, too.
COMMIT_SENT: Point = lambda line, do: line.when(EFFECT, lambda: line.when(COMMIT, do))  # noqa: E731
COMMIT_ANSWERED: Point = lambda line, do: line.when(  # noqa: E731
    EFFECT, lambda: line.when(COMMITTED, do, direction="to_client")
)


@pytest.fixture
def sold(shop: Shop) -> Shop:
    """One message waits."""
    shop.sell("sale", to=[STOCK] * OUTPUTS)
    return shop


@pytest.mark.parametrize("reset", mostly_slow([False, True]), ids=["end", "reset"])
@pytest.mark.parametrize("point", BEFORE_THE_ACK)
def test_link_cut_then_redelivery(sold: Shop, point: str, reset: bool) -> None:
    trigger = BEFORE_THE_ACK[point](sold.to_broker, lambda: sold.to_broker.cut(reset=reset))
    sold.work(lambda: trigger.triggered and sold.consumer.lost > 0)
    assert sold.effects() == {"sale": 1}
    sold.work()
    assert len(sold.consumer.outcomes) >= 2, "it was delivered again"
    assert sold.consumer.outcomes[-1] is Outcome.REDISPATCHED
    assert min(sold.all_is_well().values()) >= 1


@pytest.mark.parametrize("point", BEFORE_THE_ACK)
def test_link_cut_then_relay(sold: Shop, point: str) -> None:
    """No redelivery comes before the relay has sent all; the one that comes then is harmless."""
    trigger = BEFORE_THE_ACK[point](sold.to_broker, sold.to_broker.cut)
    sold.consumer.step()
    sold.consumer.keep_alive()
    assert trigger.wait_triggered(SOON)
    sold.consumer.die()
    assert sold.pending() == list(range(OUTPUTS)), "nothing was recorded"
    assert sold.relay().confirmed == OUTPUTS
    assert sold.pending() == []
    assert {str(id_) for id_ in sold.expected("sale")} == {message.message_id for message in sold.arrived()}
    sold.reborn()
    sold.work()
    sold.all_is_well()


def test_recorded_then_cut_before_the_ack(sold: Shop) -> None:
    sold.reborn(marks=1)
    trigger = sold.to_broker.cut_when(ACK)
    sold.work(lambda: trigger.triggered)
    assert sold.pending() == []
    sold.work()
    assert sold.consumer.outcomes[-1] is Outcome.REDISPATCHED
    assert set(sold.all_is_well().values()) == {2}


def test_ack_sent_then_cut(sold: Shop) -> None:
    """It has arrived: nothing comes again."""
    trigger = ACK_SENT(sold.to_broker, sold.to_broker.cut)
    assert sold.consumer.step() is Outcome.HANDLED
    sold.consumer.keep_alive()
    assert trigger.wait_triggered(SOON)
    sold.work()
    assert sold.consumer.outcomes == [Outcome.HANDLED]
    assert set(sold.all_is_well().values()) == {1}


@pytest.mark.parametrize("point", BEFORE_THE_ACK)
def test_process_killed(sold: Shop, processes: Processes, point: str) -> None:
    """SIGKILL of a real process at that moment; another one goes on."""
    killed(sold, processes, BEFORE_THE_ACK[point])
    assert sold.effects() == {"sale": 1}
    assert sold.pending() == list(range(OUTPUTS))
    sold.work()
    assert sold.consumer.outcomes == [Outcome.REDISPATCHED]
    sold.all_is_well()


def test_process_killed_after_it_recorded(sold: Shop, processes: Processes) -> None:
    killed(sold, processes, BEFORE_THE_ACK["all confirmed, not acked"], marks=1)
    assert sold.pending() == []
    sold.work()
    assert sold.consumer.outcomes == [Outcome.REDISPATCHED]
    assert set(sold.all_is_well().values()) == {2}


def test_process_killed_after_the_ack(sold: Shop, processes: Processes) -> None:
    """Its marks are lost, and no redelivery comes: a relay sends all again, under the same ids."""
    killed(sold, processes, ACK_SENT)
    assert sold.pending() == list(range(OUTPUTS))
    assert sold.left() == 0
    assert sold.relay().confirmed == OUTPUTS
    assert set(sold.all_is_well().values()) == {2}
    assert sold.consumer.outcomes == []


@pytest.mark.parametrize("committed", [False, True], ids=["not committed", "committed"])
def test_process_killed_in_its_commit(sold: Shop, processes: Processes, committed: bool) -> None:
    point = COMMIT_ANSWERED if committed else COMMIT_SENT
    killed(sold, processes, point, line=sold.to_database)
    assert sold.effects() == ({"sale": 1} if committed else {})
    assert sold.arrived() == []
    sold.work()
    assert sold.consumer.outcomes[-1] is (Outcome.REDISPATCHED if committed else Outcome.HANDLED)
    assert set(sold.all_is_well().values()) == {1}


def killed(shop: Shop, processes: Processes, point: Point, *, line: FaultProxy | None = None, marks: int = 50) -> None:
    """A process dies there, and its links with it."""
    line = line or shop.to_broker
    with processes.running(shop, marks=marks) as process:

        def die() -> None:
            process.kill()
            line.cut()

        point(line, die)
        process.begin()
        process.ended()
