"""Prepared messages in two queues of SQS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import time_machine
from moto import mock_aws
from sqlalchemy import select

from idemp import ConfigurationError
from idemp.errors import Unavailable
from idemp.messages import Output
from idemp.prepared import BarrierMissed, Prepared, sqs
from idemp.prepared.sqs import SqsHome
from idemp.sql.broker import SqlBroker
from idemp.testing import CrashPoints
from idemp.testing.homes import HomeConformance
from tests.prepared import SINK, TYPE, Shop, order
from tests.prepared.test_prepared import STEPS, Oracle
from tests.servers.moto import Moto, client
from tests.test_kills import run_until, some, watch
from tests.worker.test_loop import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def pass_time() -> Iterator[Callable[[float], None]]:
    """Moto's queues are in this process, and go by its clock."""
    with mock_aws(), time_machine.travel("2026-01-01 00:00", tick=True) as clock:
        yield lambda seconds: clock.shift(timedelta(seconds=seconds))


class TestSqs(HomeConformance):
    @pytest.fixture
    def open_home(self, pass_time: Any) -> Callable[[], SqsHome]:
        SqsHome("orders", client()).create()
        return lambda: SqsHome("orders", client())


@pytest.fixture
def begin(url: str, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def begin(**options: Any) -> Shop:
        made.append(Shop(url, f"sqlite:///{tmp_path}/shop.db", **options))
        return made[-1].create()

    yield begin
    for each in made:
        each.close()


def test_what_is_asked_for_too_often_is_parked_in_the_tables(
    begin: Callable[..., Shop], pass_time: Callable[[float], None]
) -> None:
    home = SqsHome("orders", client())
    home.create()
    oracle = Oracle(*["unknown"] * 4)
    shop = begin(checker=oracle, checks=3, home=home)
    with shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1"):
        pass
    for _ in range(3):
        assert shop.messages.table.find() == []
        pass_time(61)
        assert shop.messages.check() == 1
    pass_time(61)
    assert (shop.messages.check(), oracle.answers) == (0, [])
    (parked,) = shop.messages.table.find()
    assert (parked.key, parked.state) == ("1", "parked")
    oracle.answers = ["commit"]
    shop.messages.table.resume([parked.id])
    shop.messages.check()
    assert (list(shop.published()), shop.waiting()) == (["1"], 0)


def test_what_no_queue_takes_is_an_output_in_the_tables(begin: Callable[..., Shop], pass_time: Callable[[float], None]) -> None:
    """By its producer, and by a checker: each ends it in SQS, where it would be gone after 14 days."""
    home = SqsHome("orders", client())
    home.create()
    shop, places = begin(home=home), {"1": "nowhere", "2": "away"}
    assert shop.messages.prepare({"order_id": "1"}, to=places["1"], type=TYPE, key="1").submit(lambda session: None)
    preparation = shop.messages.prepare({"order_id": "2"}, to=places["2"], type=TYPE, key="2")
    preparation.__enter__()  # of a producer that dies behind its COMMIT
    with shop.engine.begin() as connection:
        preparation.pass_barrier(connection)
    pass_time(61)
    assert (shop.messages.check(), shop.waiting()) == (1, 2)
    pass_time(61)
    assert shop.messages.check() == 0  # nothing is left in SQS
    for place in places.values():
        SqlBroker(shop.database, "late").declare(place, [])
    shop.relay()
    message = shop.database.tables.message
    with shop.database.queue_engine.connect() as connection:
        assert sorted(connection.scalars(select(message.c.queue))) == ["away", "nowhere"]
    assert shop.waiting() == 0


def test_a_block_that_passes_no_barrier_is_parked_in_the_tables(
    begin: Callable[..., Shop], pass_time: Callable[[float], None]
) -> None:
    home = SqsHome("orders", client())
    home.create()
    shop = begin(home=home)
    with pytest.raises(BarrierMissed), shop.messages.prepare({"order_id": "1"}, to=SINK, type=TYPE, key="1"):
        pass
    pass_time(61)
    assert (shop.messages.check(), [each.state for each in shop.messages.table.find(["1"])]) == (0, ["parked"])


def test_work_is_not_begun_without_a_home(begin: Callable[..., Shop], pass_time: Callable[[float], None]) -> None:
    shop = begin(home=SqsHome("nowhere", client()))
    with pytest.raises(Unavailable, match="nothing was committed"):
        shop.place("1")
    home = SqsHome("orders", client())
    home.create()
    large = begin(home=home)
    with pytest.raises(Unavailable, match="send message"):
        large.messages.prepare({"text": "x" * 2_000_000}, to=SINK, type=TYPE).submit(
            lambda session: session.execute(order.insert(), {"id": "1"})
        )
    with pytest.raises(ConfigurationError, match="900 seconds at most"):
        home.prepare(Prepared("orders", "1", Output("1", "send", "", SINK, {}, b"{}")), 901)
    assert shop.orders() == []


def test_a_home_that_goes_away_behind_the_commit(
    begin: Callable[..., Shop], pass_time: Callable[[float], None], monkeypatch: Any
) -> None:
    home = SqsHome("orders", client())
    home.create()
    shop = begin(home=home)

    def end(prepared: Prepared) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(home, "end", end)
        assert shop.place("1")
    assert (shop.orders(), list(shop.published())) == (["1"], ["1"])
    pass_time(61)
    assert (shop.messages.check(), shop.messages.check()) == (1, 0)  # sent again, under the same id
    (ids,) = shop.published().values()
    assert len(ids) == 1


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Moto(tmp_path_factory.mktemp("moto") / "node") as server:
        yield server.url


WAIT = 1


def live(points: CrashPoints, url: str, shop_url: str, queues: tuple[str, str], story: str, key: str) -> None:
    """The body of a process: a producer, or a checker."""
    sqs.LEASE = WAIT
    home = SqsHome(queues[0], client(queues[1]))
    shop = Shop(url, shop_url, home=home, check_after=WAIT)
    watch(points, {**STEPS, SqsHome: ("prepare", "lease", "end")})
    if story == "produce":
        shop.place(key)
    else:
        wait_for(lambda: count(shop, ""))
        shop.messages.check()


@pytest.mark.parametrize("story", ["produce", "check"])
def test_a_process_is_killed_at_each_step(
    begin: Callable[..., Shop], moto: str, url: str, tmp_path: Path, story: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqs, "LEASE", WAIT)
    shop_url = f"sqlite:///{tmp_path}/shop.db"
    for at in some(4):
        home = SqsHome(f"{story}-{at}", client(moto))
        home.create()
        shop = begin(home=home, check_after=WAIT)
        key = f"key {at}"
        if story == "check":  # a producer has died behind its COMMIT
            with shop.engine.begin() as connection:
                preparation = shop.messages.prepare({"order_id": key}, to=SINK, type=TYPE, key=key)
                preparation.__enter__()
                preparation.pass_barrier(connection)
                connection.execute(order.insert(), {"id": key})
        name = run_until(at, live, url, shop_url, (home.names[0].removesuffix("-prepared"), moto), story, key)
        for _ in range(2):  # it may look between a delay and its end
            wait_for(partial(done, shop))
        assert (key in shop.orders()) == (key in shop.published()), name
        assert all(len(ids) == 1 for ids in shop.published().values()), name
        if not name:
            break
    assert at > 5


def done(shop: Shop) -> bool:
    """Check; return whether nothing is left in the queue of prepared messages."""
    return shop.messages.check() == 0 and not any(count(shop, which) for which in ("", "Delayed", "NotVisible"))


def count(shop: Shop, which: str) -> int:
    home: Any = shop.messages.home
    name = f"ApproximateNumberOfMessages{which}"
    return int(home._on(home.names[0], "get_queue_attributes", AttributeNames=[name])["Attributes"][name])
