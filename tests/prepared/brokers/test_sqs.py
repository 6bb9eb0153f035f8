"""Prepared messages whose home is SQS alone, as Moto's server speaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import boto3
import pytest

from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.prepared.carried import Carried
from idemp.prepared.port import Decision, Prepared, State
from idemp.prepared.sqs import SqsHome
from idemp.prepared.sqs.home import NOTED_SECONDS
from idemp.prepared.sqs.queue import LARGEST, SqsQueue
from idemp.prepared.sqs.wire import KEPT_FREE, packed, size_of
from idemp.testing.prepared_conformance import PreparedHomeConformance, make_prepared
from idemp.testing.proxy import FaultProxy
from tests.servers.documents import Moto, session

pytestmark = pytest.mark.slow

AT_ONCE = timedelta(0)
LEASE = timedelta(hours=1)

Open = Callable[..., SqsHome]


@pytest.fixture
def open_home(moto: Moto, unique_name: str) -> Iterator[Open]:
    """Opens the test's home once more."""
    with ExitStack() as stack:

        def opened(at: str = moto.url, **options: Any) -> SqsHome:
            options = {"session": session(), "wait": AT_ONCE, **options}
            return stack.enter_context(closing(SqsHome(unique_name, endpoint=at, **options)))

        yield opened


@pytest.fixture
def home(open_home: Open) -> SqsHome:
    home = open_home()
    home.verify()
    return home


class TestConformance(PreparedHomeConformance):
    later: ClassVar[timedelta] = timedelta(minutes=15)

    @pytest.fixture(autouse=True)
    def opening(self, open_home: Open) -> None:
        self.open_home = open_home

    def reopen(self, home: SqsHome) -> SqsHome:
        return self.open_home()


def test_queues_with_other_attributes_are_refused(home: SqsHome, open_home: Open) -> None:
    home.verify()
    SqsQueue(home._client, f"{home._name}-x-ops", {"MessageRetentionPeriod": 60}).declare()
    with pytest.raises(ConfigurationError, match="exists with other attributes"):
        SqsHome(f"{home._name}-x", endpoint=home._client.meta.endpoint_url, session=session()).verify()
    with pytest.raises(
        ConfigurationError, match=r"There is no queue missing-prepared. Make it: `SqsHome\(...\).verify"
    ):
        SqsHome("missing", endpoint=home._client.meta.endpoint_url, session=session()).prepare(make_prepared(), AT_ONCE)
    for name in ("orders.eu", "x" * 72):
        with pytest.raises(ConfigurationError, match="can't be called"):
            SqsHome(name, session=session())
    with pytest.raises(ConfigurationError, match="at most 15 minutes"):
        home.prepare(make_prepared(), timedelta(minutes=15, seconds=1))


def test_what_was_decided_is_not_checked(home: SqsHome, open_home: Open) -> None:
    """The producer notes what it published or rolled back; a checker ends it unasked, each copy of it."""
    published, rolled_back, other = [make_prepared() for _ in range(3)]
    for prepared in (published, published, rolled_back, other):
        home.prepare(prepared, AT_ONCE)
    home.decide(published, Decision.COMMIT, LEASE)
    home.published(published)
    home.decide(rolled_back, Decision.ROLLBACK, LEASE)
    home._notes.send("of a stranger", {})
    home.decide(other, Decision.COMMIT, LEASE)
    checker = open_home()
    assert [taken.id for taken in checker.take(10, LEASE)] == [other.id], "it is not published yet"
    assert checker._waiting.receive(10, hidden=60) == []
    assert checker._notes.receive(10, hidden=60) == []
    home.prepare(published, AT_ONCE)
    assert checker.take(10, LEASE) == []


def test_notes_are_forgotten(home: SqsHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is used anew, long after its barrier was purged, is no copy of what was decided then."""
    prepared, now = make_prepared(), [1000.0]
    monkeypatch.setattr("idemp.prepared.sqs.home.monotonic", lambda: now[0])
    home.published(prepared)
    assert home.take(10, LEASE) == []
    home.prepare(prepared, AT_ONCE)
    assert home.take(10, LEASE) == []
    now[0] += NOTED_SECONDS + 1
    home.prepare(prepared, AT_ONCE)
    assert [taken.id for taken in home.take(10, LEASE)] == [prepared.id]


@pytest.mark.parametrize(
    "body", [b"", b"=", b"\x00\xff", '{\t"é": "\U0001f40d"}\r\n'.encode(), "\ufffe".encode(), b"\x0b"]
)
def test_any_body(home: SqsHome, body: bytes) -> None:
    prepared = with_body(body)
    home.prepare(prepared, AT_ONCE)
    (taken,) = home.take(10, LEASE)
    assert (taken.output, taken.fingerprint) == (prepared.output, prepared.fingerprint)


def test_as_large_as_sqs_takes(home: SqsHome) -> None:
    """With every copy that may be made of it; a byte more is refused before any work is done."""
    small = with_body(b"a")
    beside = size_of(*packed(Carried(small))) - 1
    largest = with_body(b"a" * (LARGEST - KEPT_FREE - beside), small.id)
    home.prepare(largest, AT_ONCE)
    (taken,) = home.take(10, LEASE)
    for reason in ("e" * 10_000, "é" * 10_000, "\x00" * 10_000, "\U0001f40d" * 10_000):
        assert LARGEST - KEPT_FREE < size_of(*packed(Carried(largest, 10**9, reason))) <= LARGEST
        home.postpone(taken, reason, AT_ONCE, checked=True)
        (taken,) = home.take(10, LEASE)
    home.park(taken, reason)
    assert home.find(largest.id).prepared.output == largest.output
    with pytest.raises(BrokerError, match=rf"SQS takes {LARGEST}, .*The database was not committed"):
        home.prepare(with_body(largest.message.body + b"a", small.id), AT_ONCE)


def test_strangers_are_set_aside(home: SqsHome, caplog: pytest.LogCaptureFixture) -> None:
    home._waiting.send("?", {"a": "b"})
    prepared = make_prepared()
    home.prepare(prepared, AT_ONCE)
    assert [taken.id for taken in home.take(10, LEASE)] == [prepared.id]
    assert [record.event for record in caplog.records if record.levelname == "ERROR"] == ["prepared_unreadable"]
    assert home.browse(None, 10) == []
    (kept,) = home._parked.receive(10, hidden=60)
    assert (kept.text, kept.attributes) == ("?", {"a": "b"})


def test_by_hand(home: SqsHome, open_home: Open) -> None:
    """Whoever has nothing in hand parks what is due; more than SQS gives at once, and nothing else."""
    made = [make_prepared() for _ in range(12)]
    for prepared in made:
        home.prepare(prepared, AT_ONCE)
    assert open_home().park(made[7], "by hand")
    assert home.find(made[7].id).state is State.PARKED
    assert len(home.browse(State.PREPARED, 100)) == 11
    assert len(home.browse(None, 5)) == 5
    assert len(home.take(100, LEASE)) == 11
    assert not home.park(made[8], "by hand"), "a checker has it"


def test_sqs_away(home: SqsHome, moto: Moto, open_home: Open) -> None:
    """Nothing hangs, nothing tells the secrets, and what has no answer may be done again."""
    prepared = make_prepared()
    host, port = moto.url.removeprefix("http://").split(":")
    with FaultProxy(host, int(port)) as proxy:
        far = open_home(proxy.through(moto.url), timeout=timedelta(seconds=1))
        far.prepare(prepared, AT_ONCE)
        (taken,) = far.take(10, LEASE)
        proxy.refuse()
        proxy.cut()
        for use in (lambda: far.prepare(prepared, AT_ONCE), lambda: far.published(taken), lambda: far.take(1, LEASE)):
            with pytest.raises(BrokerUnavailable) as away:
                use()
        proxy.heal()
        trigger = proxy.cut_when(b"200", direction="to_client", before=True)
        far.prepare(prepared, AT_ONCE)
        assert trigger.wait_triggered(5), "the answer was lost, and boto3 asked again"
        assert {copy.id for copy in home.take(10, LEASE)} == {prepared.id}
        far.published(taken)
    assert "not-so-secret" not in f"{away.value} {far!r} {far.place}"
    with pytest.raises(ConfigurationError, match="No client for SQS"):
        SqsHome("orders", session=boto3.Session(), endpoint="nowhere")


def with_body(body: bytes, id: Any = None) -> Prepared:
    prepared = make_prepared(id)
    return Prepared.of(replace(prepared.output, message=replace(prepared.message, body=body)))
