"""Messages of a key keep their order, whatever becomes of them; and no key waits for another."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator

from idemp import App, Context, Idempotent, Inbox, Key, Message, Outcome, Refuse
from idemp import consuming as consuming_module
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery, Retry
from idemp.consuming import Consuming, KeptAlive
from idemp.errors import ConfigurationError, GuaranteeError, StoreUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Claimed, Verdict
from idemp.messages import Output, OutputKind
from idemp.ordering import MOST_REMEMBERED, ORDERED_PREFETCH, Lines
from idemp.settings import Settings
from idemp.suspects import Turns
from idemp.telemetry import Telemetry, Watch
from idemp.testing import FakeClock
from idemp.testing.faulty import FaultyStore, FaultyUnit, Script
from idemp.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from idemp.broker.memory import MemoryReceiver
    from idemp.broker.port import Settlement
    from idemp.inbox.port import Claim
    from idemp.work import Work

QUEUE = "orders"
ENDS = {Outcome.HANDLED, Outcome.REDISPATCHED, Outcome.SKIPPED, Outcome.PARKED}

FAIL, IN_FLIGHT, AWAY, LOST, STOP, REFUSE = "fail", "in flight", "away", "lost", "stop", "refuse"
LOST_AND_FAIL = "lost and fail"
"""What may become of one run of a message: of the last two the worker loses its connection, or is told to end, in the
handler, which then goes on."""


class HastyClock:
    """Each look at it takes a second, so that nobody has to wait."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._seconds)

    def monotonic(self) -> float:
        self._seconds += 1
        return self._seconds


class When(threading.Event):
    """Is set when a condition holds, which must come to pass, and waits for nothing."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        super().__init__()
        self.holds = holds
        self._looks = iter(range(2000))

    def is_set(self) -> bool:
        assert next(self._looks, None) is not None, "it does not come to an end"
        return self.holds()

    def wait(self, timeout: float | None = None) -> bool:
        return self.holds()


@dataclass
class Sent:
    key: int
    fates: list[str] = field(default_factory=list)


class Broker(InMemoryBroker):
    """Knows its latest receiver."""

    latest: MemoryReceiver

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> MemoryReceiver:
        self.latest = super().receiver(queues, prefetch=prefetch)
        return self.latest


class Store(FaultyStore):
    """Is away, or has an id claimed by somebody else, where the message says so."""

    def __init__(self, fates: Callable[[str], list[str]]) -> None:
        super().__init__(InMemoryStore(), Script())
        self._fates = fates

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> FaultyUnit:
        fates = self._fates(claims[0].id.text.rpartition("#")[2]) if claims else []
        if fates[:1] == [AWAY]:
            del fates[0]
            raise StoreUnavailable("the test says: away")
        unit = super().begin(claims, late=late)
        if fates[:1] == [IN_FLIGHT]:
            del fates[0]
            return Elsewhere(unit, self.script)
        return unit


class Elsewhere(FaultyUnit):
    def claim(self, claim: Claim) -> Any:
        return Claimed(Verdict.IN_FLIGHT)


class Ends(Telemetry, Watch):
    """Which messages came to an end, in order."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell

    def watch(self, consumer: object) -> Watch:
        return Ends(self._tell)

    def decoded(self, work: Work) -> None:
        self._id = str(work.message.message_id)

    def ended(self, outcome: Outcome, settlement: Settlement | None) -> None:
        if outcome in ENDS:
            self._tell(self._id)


class Place:
    """An app on ports in memory, whose messages have fates of their own."""

    def __init__(self, sent: Sequence[Sent], clock: Any, *, cls: Any = dict, **policy: Any) -> None:
        self.sent = {str(UUID(int=number + 1)): each for number, each in enumerate(sent)}
        self.ended: dict[str, None] = {}
        self.runs: list[tuple[str, int]] = []
        self.broker = Broker(clock)
        self._stopping = False
        self.app = App(
            QUEUE,
            store=Store(lambda id_: self.sent[id_].fates),
            broker=self.broker,
            clock=clock,
            settings=Settings(),
            telemetry=Ends(self.ended.setdefault),
        )
        options = Idempotent(**{"ordered_by": "key", "attempts": 3, "retry_delays": ["10s"], **policy})
        self.app.handler(cls, type="t", policy=options)(self._handle)
        self.app.start()
        outputs = [
            Output(
                id=UUID(id_),
                ordinal=0,
                kind=OutputKind.SEND,
                exchange="",
                routing_key=QUEUE,
                message=Message(body=json.dumps({"key": each.key, "id": id_}).encode(), type="t", message_id=id_),
            )
            for id_, each in self.sent.items()
        ]
        assert self.broker.publisher().publish(outputs, 1) == [None] * len(outputs)

    def _handle(self, message: dict[str, Any], ctx: Context) -> None:
        id_ = str(ctx.message_id).rpartition("#")[2]  # what a key function reads is scoped by its type
        self.runs.append((id_, ctx.attempt))
        fates = self.sent[id_].fates
        fate = fates.pop(0) if fates else ""
        if fate == LOST_AND_FAIL:
            self.broker.latest.close()
        if fate in {FAIL, LOST_AND_FAIL}:
            raise ValueError(fate)
        if fate == REFUSE:
            raise Refuse(fate)
        if fate == LOST:
            self.broker.latest.close()
        if fate == STOP:
            self._stopping = True

    def work(self, until: Callable[[], bool]) -> None:
        """A worker after the other, until the condition holds."""
        while not until():
            self._stopping = False
            stop = When(lambda: self._stopping or until())
            consuming = Consuming(self.app, stop, KeptAlive(), Turns(solitary=True))
            consuming._protocol._pause = lambda seconds: None
            consuming.run()

    def by_key(self, ids: Sequence[str]) -> dict[int, list[str]]:
        keys: dict[int, list[str]] = defaultdict(list)
        for id_ in ids:
            keys[self.sent[id_].key].append(id_)
        return keys


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming_module, "_RECEIVE_SECONDS", 0.001)


UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Where messages are forgotten, each example takes seconds."""

MESSAGES = st.lists(
    st.builds(
        Sent,
        key=st.integers(0, 2),
        fates=st.lists(st.sampled_from([FAIL, IN_FLIGHT, AWAY, LOST, STOP, REFUSE]), max_size=4),
    ),
    min_size=1,
    max_size=10,
)


@given(MESSAGES, st.sampled_from(["early", "late"]))
@settings(max_examples=60, deadline=None, phases=UNSHRUNK)
def test_each_key_keeps_its_order(sent: list[Sent], claim: str) -> None:
    """Through failures, holders elsewhere, outages, lost connections and ends of the worker."""
    place = Place(sent, HastyClock(), claim=claim)
    place.work(lambda: place.broker.join(0))
    assert place.by_key(list(place.ended)) == place.by_key(list(place.sent))


@given(
    st.lists(st.builds(Sent, key=st.integers(0, 3), fates=st.just([])), min_size=1, max_size=12),
    st.sets(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from([[FAIL], [IN_FLIGHT]]),
)
@settings(max_examples=40, deadline=None, phases=UNSHRUNK)
def test_a_failing_key_holds_back_no_other(sent: list[Sent], failing: set[int], fate: list[str]) -> None:
    """While time stands still, all of the others are handled, and of a failing key nothing after its first message."""
    clock = FakeClock()
    for key in failing:
        first = next((each for each in sent if each.key == key), None)
        if first is not None:
            first.fates = list(fate)
    place = Place(sent, clock)
    others = [id_ for id_, each in place.sent.items() if each.key not in failing]
    looks = 0

    def all_that_can_be() -> bool:
        nonlocal looks
        looks += len(place.ended) >= len(others) and not place.broker.depth(QUEUE)
        return looks > 10

    place.work(all_that_can_be)
    assert list(place.ended) == others
    clock.advance(timedelta(seconds=10))
    place.work(lambda: place.broker.join(0))
    assert place.by_key(list(place.ended)) == place.by_key(list(place.sent))


def test_a_full_hand_takes_no_more() -> None:
    """What waits counts for `prefetch`: nothing else comes until one of them goes on, and then all do."""
    clock = FakeClock()
    waiting = [Sent(1) for _ in range(ORDERED_PREFETCH - 1)]
    place = Place([Sent(1, [FAIL]), *waiting, Sent(2)], clock)
    looks = iter(range(ORDERED_PREFETCH + 20))
    place.work(lambda: next(looks, None) is None)
    first, *others = place.sent
    assert place.runs == [(first, 1)]
    clock.advance(timedelta(seconds=10))
    place.work(lambda: place.broker.join(0))
    assert place.by_key([id_ for id_, _ in place.runs]) == {1: [first, first, *others[:-1]], 2: [others[-1]]}


def test_what_is_held_goes_with_its_connection() -> None:
    """It comes again, and as it came: from the hand it would be handled beside its redelivery."""
    place = Place([Sent(1, [FAIL]), Sent(1), Sent(2, [LOST])], HastyClock())
    place.work(lambda: place.broker.join(0))
    first, second, third = place.sent
    assert place.runs == [(first, 1), (third, 1), (first, 2), (second, 1)]


def test_attempts_outlive_connections() -> None:
    """Or a message would fail for ever whose attempts take longer than a connection lasts."""
    place = Place([Sent(1, [FAIL, LOST_AND_FAIL, FAIL]), Sent(1)], HastyClock())
    place.work(lambda: place.broker.join(0))
    first, second = place.sent
    assert place.runs == [(first, 1), (first, 2), (first, 3), (second, 1)]
    (parked,) = place.broker.browse(f"{QUEUE}.dead", 5)
    assert parked.message_id == first


def test_attempts_of_others_are_not_taken_for_its_own() -> None:
    """Only what comes again has some, and nothing that has ended; what is remembered has a bound."""
    clock = FakeClock()
    lines = Lines[Arrival](QUEUE, clock)

    def a_delivery(name: str, **told: Any) -> Delivery:
        return Delivery(message=Message(body=b"", message_id=name), queue=QUEUE, redelivered=True, **told)

    for number in range(MOST_REMEMBERED + 1):
        lines.hold(Arrival("", str(number).encode(), a_delivery(str(number))), Retry(timedelta(0), counted=True))
    lines.drop()
    again = a_delivery("1")
    assert lines.recalled(again).attempt == 2
    assert lines.recalled(replace(again, redelivered=False)).attempt == 1
    assert lines.recalled(replace(again, attempt=5)).attempt == 5
    assert lines.recalled(a_delivery("0")).attempt == 1, "the oldest one is forgotten"
    assert lines.recalled(replace(again, message=replace(again.message, body=b"another"))).attempt == 1
    arrival = Arrival("", b"1", again)
    lines.hold(arrival, Retry(timedelta(0), counted=True))
    assert lines.turn() is arrival
    lines.passed(arrival)
    assert lines.recalled(again).attempt == 1


@dataclass
class Arrival:
    name: str
    order: bytes | None
    delivery: Delivery = field(default_factory=lambda: Delivery(message=Message(body=b""), queue=QUEUE))


def test_attempts_are_counted_in_the_hand() -> None:
    """As the header of a copy would: by what the retry says; what does not count is counted apart."""
    clock = FakeClock()
    lines = Lines[Arrival](QUEUE, clock)
    arrival = Arrival("one", b"1")
    for retry, expected in (
        (Retry(timedelta(seconds=1), counted=True), (2, None)),
        (Retry(timedelta(seconds=1), counted=False), (2, 1)),
        (Retry(timedelta(seconds=1), counted=True, attempt=5), (5, 1)),
    ):
        lines.hold(arrival, retry)
        assert lines.turn() is None
        clock.advance(timedelta(seconds=1))
        assert lines.turn() is arrival
        assert (arrival.delivery.attempt, arrival.delivery.message.headers.get("idemp-deferred")) == expected
    lines.passed(arrival)
    assert not lines.join(Arrival("two", b"1"))


def test_waits_until_the_next_turn() -> None:
    clock = FakeClock()
    lines = Lines[Arrival](QUEUE, clock)
    assert lines.patience(0.25) == 0.25
    lines.hold(Arrival("slow", b"1"), Retry(timedelta(seconds=9), counted=True))
    lines.hold(Arrival("soon", b"2"), Retry(timedelta(seconds=3), counted=True))
    assert (lines.patience(60), lines.patience(0.25)) == (3, 0.25)
    clock.advance(timedelta(seconds=4))
    assert lines.patience(60) == 0
    assert [each.name for each in lines.drop()] == ["slow", "soon"]
    assert lines.patience(60) == 60


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"idempotent": False}, "opted in"),
        ({"batch": 10}, "batch"),
        ({"attempts": 20}, "0:16:21, .*fewer attempts"),  # 1 + 5 + 15 s, and 16 times a minute
        ({"attempts": 2, "retry_delays": ["10m"], "retry_jitter": 0.6}, "0:16:00"),
    ],
)
def test_policies_that_keep_no_order(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ordered_by.*{why}"):
        Idempotent(**{"ordered_by": "id", **options})
    assert Idempotent(ordered_by="id", attempts=2, retry_delays=["15m"]).ordered_by


def test_a_field_that_the_class_does_not_have() -> None:
    @dataclass
    class Place:
        order_id: int

    app = App(QUEUE, store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings())
    app.handler(Place, type="t", policy=Idempotent(ordered_by="order_no"))(lambda message: None)
    with pytest.raises(ConfigurationError, match=r"no field 'order_no'.*order_id"):
        app.start()


def test_a_queue_for_one_consumer_at_a_time_where_it_is_needed() -> None:
    app = App(QUEUE, store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings())
    app.handler(dict, type="a", policy=Idempotent())(lambda message: None)
    assert not app.topology().single_active
    app.handler(dict, type="b", policy=Idempotent(ordered_by="id"))(lambda message: None)
    assert app.topology().single_active


@pytest.mark.parametrize("broker", ["local://{}/broker.db", "redis://nowhere"])
def test_brokers_that_hand_messages_to_several(broker: str, tmp_path: Path) -> None:
    allowing = Settings(allow_at_most_once=True)
    app = App(QUEUE, store=InMemoryStore(), broker=broker.format(tmp_path), settings=allowing)
    app.handler(dict, type="t", policy=Idempotent(ordered_by="id"))(lambda message: None)
    with pytest.raises(GuaranteeError, match=r"'t' keep an order \(ordered_by\).*Use RabbitMQ"):
        app.start()


@pytest.mark.parametrize(
    ("subscribe", "policy", "refused"),
    [
        (True, {"ordered_by": "id"}, True),
        (False, {"ordered_by": "id"}, False),
        (True, {}, False),
    ],
)
def test_partitions_that_all_get_what_is_published(subscribe: bool, policy: dict[str, Any], refused: bool) -> None:
    """Each message would come to several queues, and each of them be first in one."""
    broker, store = InMemoryBroker(), InMemoryStore()
    apps = [
        App("billing", queue=f"billing.{number}", subscribe=subscribe, store=store, broker=broker, settings=Settings())
        for number in range(2)
    ]
    for app in apps:
        app.handler(dict, type="t", policy=Idempotent(**policy))(lambda message: None)
    worker = Worker(apps)
    worker.stop()
    if not refused:
        worker.run()
        return
    with pytest.raises(ConfigurationError, match=r"'billing'.*'billing.0', 'billing.1'.*subscribe=False"):
        worker.run()
    with pytest.raises(ConfigurationError):
        broker.depth("billing.0")  # nothing was declared


def test_wrapped_functions_hold_nothing() -> None:
    policy = Idempotent(ordered_by="id")
    with pytest.raises(ConfigurationError, match="ordered_by needs a worker"):
        Inbox(InMemoryStore()).wrap(lambda message: None, dict, type="t", consumer="c", policy=policy)


@pytest.mark.parametrize("body", [{}, {"key": None}, {"key": ""}, {"key": {"a": 1}}, {"key": 1.5}])
def test_a_message_that_nobody_can_order_is_parked(body: dict[str, Any]) -> None:
    place = Place([Sent(1)], HastyClock())
    message = Message(body=json.dumps(body).encode(), type="t", message_id="m")
    stray = Output(id=UUID(int=9), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=QUEUE, message=message)
    place.broker.publisher().publish([stray], 1)
    place.work(lambda: place.broker.join(0))
    (parked,) = place.broker.browse(f"{QUEUE}.dead", 5)
    assert (parked.message_id, parked.headers["idemp-dead-reason"]) == ("m", "UnorderableMessage")
    assert "ordered_by" in str(parked.headers["idemp-dead-error"])


class Away:
    """Raises at its first call, as what looks something up may; then it answers."""

    def __init__(self, field: str = "key") -> None:
        self.field = field
        self.calls = 0

    def look_up(self, message: dict[str, Any]) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("the lookup is away")
        return message[self.field]


class Doubtful(BaseModel):
    """Its validator raises at its first call what is no `MessageError`."""

    key: int
    away: ClassVar[Away]

    @model_validator(mode="before")
    @classmethod
    def _look_up(cls, values: dict[str, Any]) -> dict[str, Any]:
        cls.away.look_up(values)
        return values


def test_who_can_not_be_ordered_is_parked_at_once() -> None:
    """A copy in a delay tier would be overtaken by all others of its key."""
    place = Place([Sent(1), Sent(1), Sent(1)], HastyClock(), ordered_by=Away().look_up)
    place.work(lambda: place.broker.join(0))
    first, *others = place.sent
    assert place.runs == [(other, 1) for other in others]
    (parked,) = place.broker.browse(f"{QUEUE}.dead", 5)
    assert (parked.message_id, parked.headers["idemp-dead-reason"]) == (first, "UnorderableMessage")
    assert "the lookup is away" in str(parked.headers["idemp-dead-error"])


def test_who_has_no_id_for_now_is_waited_for() -> None:
    """Its order is known before its key is."""
    place = Place([Sent(1), Sent(1), Sent(2)], HastyClock(), key=Away("id").look_up)
    place.work(lambda: place.broker.join(0))
    first, second, third = place.sent
    assert place.runs == [(third, 1), (first, 2), (second, 1)]


def test_who_can_not_be_decoded_for_now_is_parked() -> None:
    """Nobody knows its order."""
    Doubtful.away = Away()
    place = Place([Sent(1), Sent(1)], HastyClock(), cls=Doubtful)
    place.work(lambda: place.broker.join(0))
    first, second = place.sent
    assert place.runs == [(second, 1)]
    (parked,) = place.broker.browse(f"{QUEUE}.dead", 5)
    assert (parked.message_id, parked.headers["idemp-dead-reason"]) == (first, "UnorderableMessage")


def test_one_order_for_all_types() -> None:
    """What counts is the value, not the type, nor how a model reads it."""
    by, message = Key.field("id"), Message(body=b"")
    text = "3b8d6b4e-6d3e-4d5c-9a7e-0d6d1f3f8b11"
    assert by.order(message, {"id": text}, "a") == by.order(message, {"id": UUID(text)}, "b")
    assert by.order(message, {"id": 7}, "a") == Key.field("no").order(message, {"no": "7"}, "b")
    both = Key.field("a", "b")
    assert both.order(message, {"a": "x", "b": "yz"}, "t") != both.order(message, {"a": "xy", "b": "z"}, "t")
