"""What producers and the checker do about prepared messages, on ports in memory."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from idemp import App
from idemp.errors import (
    ConfigurationError,
    InvalidId,
    OppositeDecision,
    PreparedConflict,
    RolledBack,
    StoreUnavailable,
    TransientStoreError,
    Undecided,
)
from idemp.prepared import Answer, InMemoryBarrier, InMemoryHome, PreparedMessages, State
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.prepared.conftest import Shop

RESERVE = {"sku": "A-1"}
WHERE: dict[str, Any] = {"to": "stock", "type": "stock.Reserve"}


class Unwell(Exception):
    pass


def fails(_: object) -> None:
    raise Unwell


def nothing(_: object) -> None:
    pass


class NoDecisions(InMemoryHome):
    """A home as a broker is one: it can't compare and set."""

    decides = False


def test_one_call_does_it_all(shop: Shop) -> None:
    done: list[object] = []
    id_ = shop.prepared.submit_after(done.append, RESERVE, key="order-7", **WHERE)
    assert shop.arrived() == [str(id_)]
    assert len(done) == 1
    (message,) = shop.broker.browse("stock", 10)
    assert (message.causation_id, message.correlation_id, message.body) == ("order-7", "order-7", b'{"sku":"A-1"}')
    assert shop.home.find(id_).state is State.PUBLISHED
    assert shop.later().taken == 0


def test_work_is_done_once_per_key(shop: Shop) -> None:
    """A producer that runs again, since it does not know how it ended, does nothing twice."""
    done: list[object] = []
    ids = {shop.prepared.submit_after(done.append, RESERVE, key="order-7", **WHERE) for _ in range(3)}
    assert len(done) == len(ids) == len(shop.arrived()) == 1
    with pytest.raises(PreparedConflict, match="order-7"):
        shop.prepared.submit_after(done.append, {"sku": "B-2"}, key="order-7", **WHERE)
    assert len(done) == 1


@pytest.mark.parametrize("deadlocks", [2, 3])
def test_work_that_lost_against_others_runs_again(shop: Shop, deadlocks: int) -> None:
    """Its key is not used up by that, unless it loses time and again."""
    runs: list[object] = []

    def work(session: object) -> None:
        runs.append(session)
        if len(runs) <= deadlocks:
            raise TransientStoreError("The test says: deadlock.")

    if deadlocks < 3:
        shop.prepared.submit_after(work, RESERVE, key="order-7", **WHERE)
    else:
        with pytest.raises(TransientStoreError):
            shop.prepared.submit_after(work, RESERVE, key="order-7", **WHERE)
    assert len(runs) == 3
    assert len(shop.arrived()) == int(deadlocks < 3)


def test_without_key_each_call_is_its_own(shop: Shop) -> None:
    ids = [shop.prepared.submit_after(nothing, RESERVE, **WHERE) for _ in range(2)]
    assert shop.arrived() == [str(id_) for id_ in ids]
    assert ids[0] != ids[1]


def test_work_that_fails_sends_nothing(shop: Shop) -> None:
    """And its key is used up: who comes later with it is told."""
    with pytest.raises(Unwell):
        shop.prepared.submit_after(fails, RESERVE, key="order-7", **WHERE)
    (record,) = shop.home.browse(State.ROLLED_BACK, 10)
    assert record.prepared.key == "order-7"
    with pytest.raises(RolledBack, match="another key"):
        shop.prepared.submit_after(nothing, RESERVE, key="order-7", **WHERE)
    assert shop.arrived() == []


async def later(_: object) -> None:
    pass


def yields(_: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize("work", [later, yields])
def test_work_that_was_only_begun_sends_nothing(shop: Shop, work: Any) -> None:
    """Calling it does nothing of it: the message would tell of work that nobody did."""
    with pytest.raises(ConfigurationError, match="plain function"):
        shop.prepared.submit_after(work, RESERVE, key="order-7", **WHERE)
    assert shop.arrived() == []
    assert len(shop.home.browse(State.ROLLED_BACK, 10)) == 1


@pytest.mark.parametrize("key", ["", " ", 7, True, "x" * 256])
def test_keys_that_can_not_be(shop: Shop, key: Any) -> None:
    """All that have an empty one would be the same message, and only the first of them sent."""
    with pytest.raises(InvalidId):
        shop.prepared.submit_after(nothing, RESERVE, key=key, **WHERE)


def test_published_to_subscribers_without_a_queue(shop: Shop) -> None:
    """As `Context.publish` does."""
    made = shop.prepared.make(RESERVE, type="stock.Reserve")
    assert (made.output.exchange, made.output.routing_key) == ("idemp", "stock.Reserve")


def test_one_key_is_one_id_in_any_form_on_the_wire(shop: Shop) -> None:
    """A CloudEvent carries a time of its own, and is the same message all the same."""
    with patch.object(
        type(shop.app), "settings", shop.app.settings.model_copy(update={"wire": "cloudevents-structured"})
    ):
        first = shop.prepared.make(RESERVE, key="order-7", **WHERE)
        shop.clock.advance(timedelta(seconds=5))
        second = shop.prepared.make(RESERVE, key="order-7", **WHERE)
    assert first.id == second.id
    assert first.message.body != second.message.body
    assert first.fingerprint == second.fingerprint


def test_left_without_a_word(shop: Shop) -> None:
    """The barrier knows which it was, and nobody has to wait for the checker."""
    with shop.prepared.prepare(RESERVE, **WHERE) as committed, shop.barrier.begin() as work:
        committed.pass_barrier(work)
    with shop.prepared.prepare(RESERVE, **WHERE) as nothing_done:
        pass
    assert shop.arrived() == [str(committed.id)]
    assert shop.home.find(nothing_done.id).state is State.ROLLED_BACK


def test_commit_before_the_works_commit_is_refused(shop: Shop) -> None:
    """The classical mistake: the message goes out, the transaction does not."""
    with shop.prepared.prepare(RESERVE, **WHERE) as half:
        with shop.barrier.begin() as work:
            half.pass_barrier(work)
            with pytest.raises(Undecided, match="in flight still"):
                half.commit()
        assert shop.arrived() == []
        assert half.commit() is True


def test_commit_without_work_is_refused(shop: Shop) -> None:
    with shop.prepared.prepare(RESERVE, **WHERE) as half, pytest.raises(OppositeDecision) as raised:
        half.commit()
    assert raised.value.committed == "no"
    assert shop.arrived() == []


def test_rollback_of_committed_work_is_refused(shop: Shop) -> None:
    with shop.prepared.prepare(RESERVE, **WHERE) as half:
        with shop.barrier.begin() as work:
            half.pass_barrier(work)
        with pytest.raises(OppositeDecision) as raised:
            half.rollback()
    assert raised.value.committed == "yes"
    assert shop.arrived() == [str(half.id)], "leaving the block finds it committed"


def test_decisions_may_be_repeated(shop: Shop) -> None:
    with shop.prepared.prepare(RESERVE, **WHERE) as half:
        with shop.barrier.begin() as work:
            half.pass_barrier(work)
        assert [half.commit() for _ in range(3)] == [True] * 3
    with shop.prepared.prepare(RESERVE, **WHERE) as other:
        for _ in range(3):
            other.rollback()
    assert shop.arrived() == [str(half.id)]


def test_decision_that_can_not_be_written(shop: Shop) -> None:
    """It is never swallowed, and says what the database did; then the checker decides, by the barrier."""
    with (
        patch.object(shop.home, "decide", side_effect=StoreUnavailable("The test says: away.")),
        pytest.raises(Undecided, match="the checker will decide") as raised,
    ):
        shop.prepared.submit_after(nothing, RESERVE, **WHERE)
    assert raised.value.committed == "yes"
    done = shop.later()
    assert (done.committed, done.published) == (1, 1)
    assert len(shop.arrived()) == 1


def test_broker_that_refuses(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Committed stays committed, and is tried again until a queue takes it."""
    id_ = shop.prepared.submit_after(nothing, RESERVE, to="nowhere", type="stock.Reserve")
    assert shop.home.find(id_).state is State.COMMITTED
    assert "prepared_unconfirmed" in [getattr(record, "event", None) for record in caplog.records]
    for attempts in range(3):
        done = shop.later()
        assert (done.taken, done.refused, done.committed) == (1, 1, 0)
        assert shop.home.find(id_).attempts == attempts + 1
    with patch.object(shop.prepared.publishers, "publish", return_value=[None]):
        assert shop.later().published == 1
    assert shop.home.find(id_).state is State.PUBLISHED


def test_published_and_not_noted(shop: Shop) -> None:
    """It goes out again, under the same id."""
    with patch.object(shop.home, "published", side_effect=StoreUnavailable("The test says: away.")):
        id_ = shop.prepared.submit_after(nothing, RESERVE, **WHERE)
    assert shop.later().published == 1
    assert shop.arrived() == [str(id_)] * 2


@pytest.mark.parametrize("said", [None, "unknown", Answer.UNKNOWN, "maybe", Unwell()])
def test_unknown_is_parked_in_the_end(open_shop: Callable[..., Shop], said: Any) -> None:
    """Neither dropped nor published; once it is resumed it is asked about again."""
    seen: list[Any] = []

    def checker(prepared: Any) -> Any:
        seen.append(prepared)
        if isinstance(said, Exception):
            raise said
        return said

    shop = open_shop(checker=checker, max_checks=3)
    with shop.prepared.prepare(RESERVE, key="order-7", **WHERE) as half:
        pass
    rounds = [shop.later() for _ in range(5)]
    assert [(done.unknown, done.parked) for done in rounds] == [(1, 0), (1, 0), (0, 1), (0, 0), (0, 0)]
    assert shop.home.find(half.id).state is State.PARKED
    assert "3 checks" in shop.home.find(half.id).reason
    assert {(each.key, each.message.body, each.message.type) for each in seen} == {
        ("order-7", b'{"sku":"A-1"}', "stock.Reserve")
    }
    assert shop.home.resume(half.id)
    assert shop.later().unknown == 1
    assert shop.arrived() == []


@pytest.mark.parametrize(("said", "state"), [("commit", State.PUBLISHED), (Answer.ROLLBACK, State.ROLLED_BACK)])
def test_checker_decides(open_shop: Callable[..., Shop], said: Any, state: State) -> None:
    shop = open_shop(checker=lambda _: said)
    with shop.prepared.prepare(RESERVE, **WHERE) as half:
        pass
    assert shop.prepared.run_once().taken == 0, "its producer has a minute"
    shop.later()
    assert shop.home.find(half.id).state is state
    assert shop.arrived() == ([str(half.id)] if state is State.PUBLISHED else [])


def test_outage_is_no_check(shop: Shop) -> None:
    """A checker that can't be asked burns nothing."""
    with patch.object(shop.barrier, "probe", side_effect=StoreUnavailable("The test says: away.")):
        with shop.prepared.prepare(RESERVE, **WHERE) as half:
            pass
        for _ in range(30):
            assert shop.later().unasked == 1
    assert shop.home.find(half.id).checks == 0
    assert shop.later().rolled_back == 1


def test_outage_is_met_once_a_round(shop: Shop) -> None:
    """Each question may take until a timeout; the others of the round wait as well."""
    for _ in range(3):
        shop.home.prepare(shop.prepared.make(RESERVE, **WHERE), timedelta(0))
    with patch.object(shop.barrier, "probe", side_effect=StoreUnavailable("The test says: away.")) as probe:
        assert shop.prepared.run_once().unasked == 3
    probe.assert_called_once()


@pytest.mark.parametrize("acked", [True, False])
def test_barrier_is_the_decision_where_the_home_can_not_decide(open_shop: Callable[..., Shop], acked: bool) -> None:
    """A copy that turns up after the producer published is not published again, if that could be noted."""
    shop = open_shop(home=NoDecisions)
    with patch.object(shop.home, "published"):  # a broker keeps its copy until a checker acks it
        id_ = shop.prepared.submit_after(nothing, RESERVE, **WHERE)
    if not acked:
        shop.barrier._settled.clear()
    assert shop.barrier.is_settled(id_) is acked
    shop.home._kept[id_].state = State.PREPARED  # all that a broker knows
    shop.later()
    assert shop.arrived() == [str(id_)] * (1 if acked else 2)
    assert shop.home.find(id_).state is State.PUBLISHED


def test_barrier_rows_outlive_their_messages(shop: Shop) -> None:
    """What is not final is never purged, nor is its barrier."""
    done = shop.prepared.submit_after(nothing, RESERVE, **WHERE)
    parked = shop.prepared.make(RESERVE, **WHERE)
    shop.home.prepare(parked, timedelta(0))
    with shop.barrier.begin() as work:
        shop.barrier.pass_(work, parked.id)
    shop.home.park(parked, "by hand")
    assert shop.prepared.purge() == 0
    shop.clock.advance(timedelta(days=8))
    assert shop.prepared.purge() == 1
    assert shop.home.find(done) is None
    assert shop.barrier.probe(done) is Answer.COMMIT
    shop.clock.advance(timedelta(days=400))
    assert shop.prepared.purge() == 1
    assert shop.barrier.probe(done) is Answer.ROLLBACK, "its row is gone"
    assert shop.barrier.probe(parked.id) is Answer.COMMIT
    shop.home.resume(parked.id)
    assert shop.later().published == 1


def test_runs_until_it_is_told(shop: Shop) -> None:
    stop = threading.Event()
    half = shop.prepared.make(RESERVE, **WHERE)
    shop.home.prepare(half, timedelta(0))

    def probe(_: object) -> Answer:
        stop.set()
        return Answer.COMMIT

    with patch.object(shop.barrier, "probe", side_effect=probe):
        shop.prepared.run(stop)
    assert shop.arrived() == [str(half.id)]


def test_home_that_is_away_is_waited_for(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """One line when it goes, one when it is back."""
    stop, answers = threading.Event(), [StoreUnavailable("away"), StoreUnavailable("away"), [], []]

    def take(*_: object, **__: object) -> Any:
        answer = answers.pop(0)
        if not answers:
            stop.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    caplog.set_level(logging.INFO, logger="idemp")
    with (
        patch.object(shop.home, "take", side_effect=take),
        patch.object(stop, "wait", side_effect=lambda _: stop.is_set()),
    ):
        shop.prepared.run(stop)
    assert [getattr(record, "event", None) for record in caplog.records] == ["prepared_home_away", "prepared_home_back"]


def test_barrier_that_is_away_is_not_taken_for_the_home(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Old rows wait for it; what is to be published does not."""
    stop, rounds = threading.Event(), [[], []]

    def take(*_: object, **__: object) -> Any:
        taken = rounds.pop(0)
        if not rounds:
            stop.set()
        return taken

    with (
        patch.object(shop.home, "take", side_effect=take),
        patch.object(shop.barrier, "purge", side_effect=StoreUnavailable("The test says: away.")) as purge,
        patch.object(stop, "wait", side_effect=lambda _: stop.is_set()),
    ):
        shop.prepared.run(stop)
    assert [getattr(record, "event", None) for record in caplog.records] == ["prepared_not_purged"]
    purge.assert_called_once()


def test_needless_is_said(open_shop: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """Where all share one database an initiation does it."""
    shop = open_shop()
    assert not shop.prepared.needless
    with (
        patch.object(type(shop.home), "place", "postgresql://db:5432/shop"),
        patch.object(type(shop.barrier), "place", "postgresql://db:5432/shop"),
        patch.object(type(shop.app.store), "place", "postgresql://db:5432/shop", create=True),
    ):
        assert shop.prepared.needless
        shop.prepared.verify()
    assert "app.initiate" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"home": NoDecisions()}, "needs a barrier"),
        ({"barrier": InMemoryBarrier(), "checker": lambda _: None}, "could disagree"),
        ({"max_checks": 0}, "max_checks=0"),
        ({"check_after": timedelta(seconds=-1)}, "check_after"),
        ({"lease": timedelta(seconds=1)}, "lease above the timeout"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    app = App("orders", broker="local://orders.db", database="sqlite://")
    with pytest.raises(ConfigurationError, match=words):
        PreparedMessages(app, options.pop("home", InMemoryHome()), **options)
    assert app.prepared is None


def test_one_of_them_an_app(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="already"):
        PreparedMessages(shop.app, InMemoryHome(), barrier=InMemoryBarrier())
    with pytest.raises(ConfigurationError, match="could disagree"):
        shop.prepared.checker(lambda _: None)


def test_somebody_has_to_decide(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(checker=None)
    with shop.prepared.prepare(RESERVE, **WHERE) as half:
        pass
    for use in (shop.prepared.verify, shop.later):  # checks must not be burnt on nobody
        with pytest.raises(ConfigurationError, match="neither barrier nor checker"):
            use()
    assert shop.home.find(half.id).checks == 0
    with pytest.raises(ConfigurationError, match="no barrier"):
        shop.prepared.submit_after(nothing, RESERVE, **WHERE)
    shop.prepared.checker(lambda _: "commit")
    shop.prepared.verify()


def test_ports_are_looked_at_before_their_first_use(shop: Shop) -> None:
    """Once: a broker makes its queues then."""
    with patch.object(shop.home, "verify") as verify:
        for _ in range(2):
            shop.prepared.submit_after(nothing, RESERVE, **WHERE)
    verify.assert_called_once_with()


def test_delay_is_the_homes_where_it_has_one(open_shop: Callable[..., Shop]) -> None:
    """A queue has one for all."""

    class OneDelay(InMemoryHome):
        check_after = timedelta(seconds=7)

    assert open_shop(home=OneDelay).prepared.check_after == timedelta(seconds=7)
    assert open_shop().prepared.check_after == timedelta(minutes=1)


def test_worker_runs_the_checker(shop: Shop) -> None:
    """And gives everything back at its end."""
    half = shop.prepared.make(RESERVE, **WHERE)
    with shop.barrier.begin() as work:
        shop.barrier.pass_(work, half.id)
    shop.home.prepare(half, timedelta(0))
    worker = Worker([shop.app], threads=1, relay=False)
    running = Background(worker.run)
    wait_until(shop.arrived, "the checker publishes it", seconds=10)
    worker.stop()
    running.result(10)
    assert shop.arrived() == [str(half.id)]
