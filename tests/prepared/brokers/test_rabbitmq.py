"""Prepared messages whose home is RabbitMQ alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from idemp.broker.kombu import KombuBroker
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.messages import Message, Output, OutputKind
from idemp.prepared.port import Decision, State
from idemp.prepared.rabbitmq import LARGEST_TEXT, RabbitMQHome
from idemp.testing.prepared_conformance import PreparedHomeConformance, make_prepared
from idemp.testing.processes import wait_until
from idemp.testing.proxy import FaultProxy
from tests.broker.kombu.tools import raw_link
from tests.servers.given import GivenRabbitMQ
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.slow

DELAY = timedelta(seconds=0.2)
LEASE = timedelta(hours=1)

Open = Callable[..., RabbitMQHome]


@pytest.fixture(scope="module")
def url(rabbitmq: RabbitMQ | GivenRabbitMQ) -> Iterator[str]:
    """A vhost for all of this file; each test has queues of its own."""
    name = "idemp_test_prepared"
    yield rabbitmq.create_vhost(name)
    rabbitmq.delete_vhost(name)


@pytest.fixture
def open_home(url: str, unique_name: str) -> Iterator[Open]:
    """Opens the test's home once more."""
    with ExitStack() as stack:

        def opened(at: str = url, check_after: timedelta = DELAY) -> RabbitMQHome:
            return stack.enter_context(closing(RabbitMQHome(at, unique_name, check_after=check_after)))

        yield opened


@pytest.fixture
def home(open_home: Open) -> RabbitMQHome:
    return open_home()


class TestConformance(PreparedHomeConformance):
    soon: ClassVar[timedelta] = DELAY
    later: ClassVar[timedelta] = DELAY

    @pytest.fixture(autouse=True)
    def opening(self, open_home: Open) -> None:
        self.open_home = open_home

    def reopen(self, home: RabbitMQHome) -> RabbitMQHome:
        return self.open_home()


def test_queues_of_another_delay_are_refused(home: RabbitMQHome, open_home: Open) -> None:
    home.verify()
    home.verify()
    other = open_home(check_after=timedelta(seconds=5))
    for use in (other.verify, lambda: other.prepare(make_prepared(), other.check_after)):
        with pytest.raises(ConfigurationError, match=r"exists with other arguments.*Is check_after another one\?"):
            use()
    with pytest.raises(ConfigurationError, match="Give the home the same check_after"):
        home.prepare(make_prepared(), timedelta(seconds=5))
    home.prepare(make_prepared(), DELAY)


def test_what_a_cut_line_leaves_twice_meets_one_fate(url: str, open_home: Open) -> None:
    """The copy is confirmed, the ack is lost: both copies are there, and nothing is missing."""
    prepared = make_prepared()
    with proxy_to(url) as proxy:
        home = open_home(proxy.through(url))
        home.prepare(prepared, DELAY)
        taken = wait_for(home)[0]
        proxy.cut()
        home.postpone(taken, "nobody knows", DELAY, checked=True)
        copies = wait_for(home, 2)
        assert sorted(copy.checks for copy in copies) == [0, 1]
        assert [copy.output for copy in copies] == [prepared.output] * 2
        assert home.park(copies[0], "checked too often")
        assert home.park(copies[1], "checked too often")
        assert [record.prepared.id for record in home.browse(None, 10)] == [prepared.id]
        assert home.resume(prepared.id), "all copies, as one"
        assert home.find(prepared.id).state is State.PREPARED
        (last,) = wait_for(home)
        home.decide(last, Decision.ROLLBACK, LEASE)
        assert home.browse(None, 10) == []


def test_by_hand(home: RabbitMQHome, open_home: Open) -> None:
    """Whoever has nothing in hand parks what waits in either queue; what a checker has in its hands stays there."""
    waiting = open_home()
    for due in (False, True):
        prepared = make_prepared()
        home.prepare(prepared, DELAY)
        if due:
            wait_until(lambda: home._broker.depth(home._due) == 1, "it is due")
        assert waiting.park(prepared, "by hand")
        record = home.find(prepared.id)
        assert (record.state, record.reason) == (State.PARKED, "by hand")
    home.prepare(prepared, DELAY)
    (taken,) = wait_for(home)
    assert not waiting.park(prepared, "by hand")
    home.published(taken)


def test_strangers_are_set_aside(url: str, home: RabbitMQHome, caplog: pytest.LogCaptureFixture) -> None:
    prepared = make_prepared()
    home.prepare(prepared, DELAY)
    broker = KombuBroker(url)
    stranger = Message(body=b"?", message_id="m-1")
    with broker.publisher() as publisher:
        where = {"kind": OutputKind.SEND, "exchange": "", "routing_key": home._due}
        output = Output(id=prepared.id, ordinal=0, message=stranger, **where)
        assert publisher.publish([output], 5) == [None]
    assert [taken.id for taken in wait_for(home)] == [prepared.id]
    (dead,) = broker.browse(f"{home._due}.dead", 10)
    assert (dead.body, dead.headers["idemp-dead-reason"]) == (b"?", "NoPreparedMessage")
    assert {record.event for record in caplog.records if record.levelname == "ERROR"} == {"prepared_unreadable"}


def test_large_and_too_large(home: RabbitMQHome) -> None:
    prepared = make_prepared(sku="x" * 2_000_000)
    home.prepare(prepared, DELAY)
    assert wait_for(home)[0].output == prepared.output
    message = prepared.message.with_headers(note="x" * LARGEST_TEXT)
    too_large = replace(prepared, output=replace(prepared.output, message=message))
    with pytest.raises(BrokerError, match=f"RabbitMQ takes {LARGEST_TEXT}. The database was not committed"):
        home.prepare(too_large, DELAY)
    message = prepared.message.with_headers(note="x" * (LARGEST_TEXT - 1000))
    largest = replace(make_prepared(), output=replace(prepared.output, message=message))
    home.prepare(largest, DELAY)
    taken = wait_for(home)[0]
    home.postpone(taken, "é" * 1000, DELAY, checked=True)
    assert wait_for(home)[0].output == largest.output, "copies are a little larger"


def test_broker_away(url: str, open_home: Open) -> None:
    """Nothing hangs, nothing tells the password, and the same home goes on once the broker is back."""
    prepared = make_prepared()
    with proxy_to(url) as proxy:
        home = open_home(proxy.through(url).replace("guest:guest", "guest:hush-hush"))
        with pytest.raises(ConfigurationError) as refused:
            home.verify()
        home = open_home(proxy.through(url))
        home.prepare(prepared, DELAY)
        taken = wait_for(home)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(BrokerUnavailable) as away:
            home.prepare(make_prepared(), DELAY)
        with pytest.raises(BrokerUnavailable):
            home.take(10, LEASE)
        home.published(taken[0])
        proxy.heal()
        assert [taken.id for taken in wait_for(home)] == [prepared.id], "its end was not heard of"
        proxy.cut()
        assert [taken.id for taken in wait_for(home)] == [prepared.id], "an idle connection may be lost"
        shown = f"{refused.value} {away.value} {home!r} {home.place}"
        assert "hush-hush" not in shown
        assert "guest" not in shown


def test_queues_deleted_by_somebody(url: str, home: RabbitMQHome) -> None:
    """Nothing can bring back what was in them; the home goes on with new ones."""
    assert home.take(10, LEASE) == []
    with raw_link(url) as link:
        for queue in (home._waiting, home._due, home._parked):
            link.channel.queue_delete(queue)
    with pytest.raises(BrokerUnavailable, match="returned"):
        home.prepare(make_prepared(), DELAY)
    assert home.take(10, LEASE) == []
    prepared = make_prepared()
    home.prepare(prepared, DELAY)
    assert wait_for(home)[0].id == prepared.id


def test_no_rabbitmq_no_home() -> None:
    with pytest.raises(ConfigurationError, match="can't keep prepared messages"):
        RabbitMQHome(KombuBroker("redis://localhost", allow_at_most_once=True), "orders")
    for delay in (timedelta(0), timedelta(days=50)):
        with pytest.raises(ConfigurationError, match="can't wait"):
            RabbitMQHome("pyamqp://localhost", "orders", check_after=delay)


def proxy_to(url: str) -> FaultProxy:
    parts = urlsplit(url)
    return FaultProxy(parts.hostname or "", parts.port or 0)


def wait_for(home: RabbitMQHome, count: int = 1) -> list:
    """What is due, as soon as it is so many."""
    found: list = []

    def complete() -> bool:
        found.extend(home.take(10, LEASE))
        return len(found) >= count

    wait_until(complete, f"{count} are due")
    return found
