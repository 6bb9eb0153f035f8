"""What a handling reads of its stream: as much of a long one as of a short one."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStreams, create_engine_safely
from idemp.inbox.stream import Event, InMemoryStreams, Stream, StreamInbox, StreamSession, WrongVersion
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import RELAY_AFTER, NoEffects
from idemp.testing.stream_conformance import StreamBench, make_events
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SHORT, LONG = 10, 200


@dataclass
class Reading:
    """Streams that count what is read of them."""

    inner: Any
    counted: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self.inner, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            found = answer(*arguments, **options)
            self.counted["calls"] += 1
            if name in {"load", "last"}:
                self.counted["commits"] += len(found) if name == "load" else found is not None
            return found

        return counting


@dataclass
class Service:
    inbox: StreamInbox
    counted: Counter[str]

    def __post_init__(self) -> None:
        clock = self.inbox.clock
        assert isinstance(clock, FakeClock)
        self.bench = StreamBench(self.inbox, NoEffects(), clock, "shop", asks_again=False, patience=60)

    def handle(self, look: Callable[[StreamSession], object] = lambda session: None, stream: str = "A-1") -> None:
        claim = self.bench.claim(stream=stream)
        with self.inbox.begin([claim]) as unit:
            unit.claim(claim)
            look(unit.session)
            unit.store_outputs(claim, make_events(1), RELAY_AFTER)
            unit.commit()

    def cost(self, look: Callable[[StreamSession], object]) -> dict[str, int]:
        self.counted.clear()
        self.handle(look)
        return dict(self.counted)


@contextmanager
def serving(kind: str) -> Iterator[Service]:
    clock, counted = FakeClock(), Counter[str]()
    if kind == "memory":
        yield Service(StreamInbox(Reading(InMemoryStreams(), counted), InMemoryStore(clock), clock), counted)
        return
    engine = create_engine_safely("sqlite://")
    make_tables(engine)

    @event.listens_for(engine, "before_cursor_execute")
    def count(*_: Any) -> None:
        counted["statements"] += 1

    yield Service(StreamInbox(Reading(SqlStreams(engine), counted), InMemoryStore(clock), clock), counted)
    engine.dispose()


@pytest.fixture(params=["memory", "sqlite"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with serving(request.param) as made:
        yield made


def count_events(state: int, event: Event) -> int:
    FOLDED.append(event.version)
    return state + 1


FOLDED: list[int] = []


@dataclass
class Account:
    """Equal to each other one."""

    limit: int = field(compare=False)


LOOKS: dict[str, Callable[[StreamSession], object]] = {
    "nothing": lambda session: None,
    "version": lambda session: session.version,
    "events": lambda session: len(session.events),
    "fold": lambda session: session.fold(count_events, 0),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_long_stream_costs_a_handling_as_much_as_a_short_one(service: Service, look: str) -> None:
    for _ in range(SHORT):
        service.handle(LOOKS[look])
    of_short = service.cost(LOOKS[look])
    for _ in range(LONG - SHORT):
        service.handle(LOOKS[look])
    FOLDED.clear()
    of_long = service.cost(LOOKS[look])
    assert of_long == of_short
    assert service.inbox.read("A-1").number == LONG + 2
    assert of_long["commits"] <= 2, "the last one that was known, and the one since"
    assert len(FOLDED) == (1 if look == "fold" else 0)


@pytest.mark.parametrize("look", ["nothing", "version"])
def test_a_new_process_reads_the_last_commit_alone(service: Service, look: str) -> None:
    """If its handler does not ask for the others."""
    for _ in range(SHORT):
        service.handle()
    other = Service(StreamInbox(service.inbox.streams, service.inbox.beside, service.inbox.clock), service.counted)
    assert other.cost(LOOKS[look])["commits"] == 1


@pytest.mark.parametrize("look", ["events", "fold"])
def test_a_new_process_reads_all_commits_once(service: Service, look: str) -> None:
    for _ in range(SHORT):
        service.handle()
    other = Service(StreamInbox(service.inbox.streams, service.inbox.beside, service.inbox.clock), service.counted)
    assert other.cost(LOOKS[look])["commits"] == 1 + SHORT
    assert other.cost(LOOKS[look])["commits"] == 2


def test_what_others_append_is_seen(service: Service) -> None:
    """Each handling begins with a look at what came since, and sees neither more nor less."""
    other = StreamInbox(service.inbox.streams, service.inbox.beside, service.inbox.clock)
    others = Service(other, service.counted)
    for length in range(1, 30):
        (service if length % 3 else others).handle()
        for each in (service, others):
            stream = each.inbox.read("A-1")
            assert [stream.number, stream.version, stream.fold(count_events, 0), len(stream.events)] == [length] * 4
            assert [commit.number for commit in stream.commits] == list(range(1, length + 1))


def test_what_is_appended_after_the_claim_is_not_seen(service: Service) -> None:
    """Also if the handler asks for its events later: they are those of the version that it was claimed at."""
    for _ in range(3):
        service.handle()
    other = StreamInbox(service.inbox.streams, service.inbox.beside, service.inbox.clock)
    claim = service.bench.claim(stream="A-1")
    with other.begin([claim]) as unit:
        unit.claim(claim)
        service.handle()
        session = unit.session
        assert (session.version, len(session.events), session.fold(count_events, 0)) == (3, 3, 3)
        assert [event.version for event in session.events] == [1, 2, 3]
        with pytest.raises(WrongVersion):
            unit.commit()
    assert other.read("A-1").version == 4


def test_another_database_behind_the_same_object_is_noticed(service: Service) -> None:
    """Restored or emptied: what is known of its streams counts for nothing."""
    for _ in range(5):
        service.handle()
    assert service.inbox.read("A-1").fold(count_events, 0) == 5
    assert len(service.inbox.read("A-1").events) == 5
    for length in (7, 5, 5, 3, 0, 1):
        with serving("memory") as elsewhere:
            for _ in range(length):
                claim = elsewhere.bench.claim(stream="A-1")
                with elsewhere.inbox.begin([claim]) as unit:
                    unit.claim(claim)
                    unit.store_outputs(claim, make_events(2), RELAY_AFTER)
                    unit.commit()
            service.inbox.streams.inner = elsewhere.inbox.streams  # type: ignore[attr-defined]
            for _ in range(2):
                stream = service.inbox.read("A-1")
                assert (stream.number, stream.version) == (length, 2 * length)
                assert (stream.fold(count_events, 0), len(stream.events)) == (2 * length, 2 * length)


def test_many_streams_are_not_all_kept(service: Service) -> None:
    """The process keeps so many commits, of the streams that were used last; what it forgot it reads again."""
    from idemp.inbox.stream.known import KnownCommits

    known = KnownCommits(service.inbox.streams, most=10)
    for stream in "abc":
        for _ in range(6):
            service.handle(stream=stream)
        assert len(known.read(stream).events) == 6
    for stream, costs in (("c", 1), ("a", 7), ("a", 1), ("c", 7)):
        service.counted.clear()
        assert len(known.read(stream).events) == 6
        assert service.counted["commits"] == costs, stream
    for _ in range(20):
        service.handle(stream="c")
    service.counted.clear()
    assert [len(known.read("c").events) for _ in range(2)] == [26, 26]
    assert service.counted["commits"] == 21 + 1, "the one that was used last is kept, however long it is"


def test_what_a_handler_changes_it_changes_for_itself(service: Service) -> None:
    """Events, states and initial states: later handlings of the process begin with what was appended."""
    for _ in range(3):
        service.handle()
    for _ in range(2):
        stream = service.inbox.read("A-1")
        state = stream.fold(collect, {"all": []})
        assert [each["n"] for each in state["all"]] == [0, 0, 0]
        state["all"].clear()
        for each in (*stream.events, *(event_ for commit in stream.commits for event_ in commit.events)):
            each.data["n"] = 7
        service.inbox.read("A-1").fold(collect, {"all": []})["all"].append("mine")


def collect(state: dict[str, list[Any]], event: Event) -> dict[str, list[Any]]:
    state["all"].append(event.data)
    return state


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not me")


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise TypeError("not me")

    __hash__ = None  # type: ignore[assignment]


def keep(state: Any, event: Event) -> Any:
    FOLDED.append(event.version)
    return state


def keep_limit(state: Account, event: Event) -> Account:
    FOLDED.append(event.version)
    return state


def keep_total(state: dict[str, Any], event: Event) -> dict[str, Any]:
    FOLDED.append(event.version)
    return state


def test_folds_that_can_not_be_kept_see_all_events(service: Service) -> None:
    """Other initial states, functions that are not the same ones each time, and states that can't be copied."""
    for _ in range(3):
        service.handle()

    def inner(state: int, event: Event) -> int:
        return count_events(state, event)

    for function, initials in (
        (count_events, (0, 5, 0.0, True)),
        (lambda state, event: count_events(state, event), (0, 0)),  # noqa: PLW0108 - that is the point
        (inner, (0, 0)),
        (keep, (Uncopied(), Uncopied(), Incomparable(), Incomparable())),
        (keep_limit, (Account(500), Account(100))),
        (keep_total, ({"total": 0}, {"total": 0.0}, {"total": False})),
    ):
        for initial in initials:
            FOLDED.clear()
            service.inbox.read("A-1").fold(function, initial)  # type: ignore[arg-type]
            assert FOLDED == [1, 2, 3], (function, initial)


def test_a_stream_of_a_users_own_needs_no_memory() -> None:
    assert Stream("A-1").fold(count_events, 3) == 3
