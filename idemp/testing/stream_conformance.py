# ruff: noqa: S101, PLR2004 - this module is made of assertions
"""What every adapter of the stream port must do, as a pytest class: subclass it, and give it streams.

```python
class TestMyStreams(StreamConformance):
    @pytest.fixture
    def streams(self):
        return MyStreams("my://localhost")

    def reopen_streams(self, streams):
        return MyStreams("my://localhost")
```
"""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID, uuid4

import pytest

from idemp.errors import ConfigurationError, TransactionEnded, TransientStoreError, UnaddressableMessage
from idemp.identity import EffectiveId
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Mark, Verdict
from idemp.inbox.stream import AlreadyCommitted, Commit, StreamInbox, WrongVersion
from idemp.messages import OutputKind
from idemp.testing.cases.claims import ClaimCases
from idemp.testing.cases.instances import InstanceCases
from idemp.testing.cases.optimistic import OptimisticCases
from idemp.testing.cases.records import RecordCases
from idemp.testing.cases.resending import ResendingCases
from idemp.testing.store_bench import MESSAGE_TYPE, RELAY_AFTER, Background, Bench, make_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.inbox.port import Claim
    from idemp.inbox.stream import Streams
    from idemp.messages import Output
    from idemp.testing.clock import FakeClock

_MOMENT = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
_RACERS = 4


class StreamBench(Bench):
    """A `Bench` whose messages each have a stream of their own, named by their id.

    Example:
        >>> StreamBench.__mro__[1].__name__
        'Bench'
    """

    def claim(self, text: str | None = None, *, stream: str = "", **options: Any) -> Claim:
        """A claim of an id that nobody else uses, or of this one, about this stream."""
        made = super().claim(text, **options)
        return replace(made, entity=stream or str(made.id.key))


class PortCases:
    """What an adapter keeps, and which of its two keys it says was taken."""

    across_streams: ClassVar[bool] = True
    patience: ClassVar[float] = 30.0

    def reopen_streams(self, streams: Streams) -> Streams:
        """Another instance on the same data, as another process opens it."""
        return streams

    def make_commit(self, bench: Bench, stream: str, number: int = 1, first: int = 1, **changes: Any) -> Commit:
        """A commit of a message that nobody else has."""
        made: dict[str, Any] = {
            "stream": stream,
            "number": number,
            "first_version": first,
            "claim": bench.claim(stream=stream),  # type: ignore[call-arg]
            "committed_at": _MOMENT,
            "outputs": tuple(make_events(1)),
        }
        return Commit(**{**made, **changes})

    def test_appended_is_loaded_as_it_was(self, bench: Bench, streams: Streams) -> None:
        """Numbers, versions, ids, payload's digest, moment and outputs, from any instance, from any number on."""
        stream = f"order {uuid4()}"
        assert list(streams.load(stream)) == []
        first = self.make_commit(bench, stream, outputs=tuple(make_events(2, sent=2)))
        second = self.make_commit(bench, stream, 2, 3, outputs=())
        third = self.make_commit(bench, stream, 3, 3)
        third = replace(third, claim=replace(third.claim, fingerprint=None, position="topic/3#1201"))
        for commit in (first, second, third):
            streams.append(commit, pending=True)
        for seen in (streams, self.reopen_streams(streams)):
            for after in range(4):
                expected = [told(commit) for commit in (first, second, third)[after:]]
                assert [told(commit) for commit in seen.load(stream, after)] == expected
            found = seen.find(stream, third.claim.consumer, third.claim.id.key)
            assert found is not None
            assert told(found.commit) == told(third)
        versions = [event.version for commit in streams.load(stream) for event in commit.events]
        assert versions == [1, 2, 3]

    def test_last_is_the_last(self, bench: Bench, streams: Streams) -> None:
        """By itself, as it was appended, from any instance; of no other stream."""
        stream = f"order {uuid4()}"
        streams.append(self.make_commit(bench, f"{stream} and more"), pending=False)
        assert streams.last(stream) is None
        for number in range(1, 12):
            commit = self.make_commit(bench, stream, number, number)
            streams.append(commit, pending=True)
            for seen in (streams, self.reopen_streams(streams)):
                last = seen.last(stream)
                assert last is not None
                assert told(last) == told(commit)

    def test_overdue_are_those_that_wait_for_long(self, bench: Bench, streams: Streams) -> None:
        """Of the consumers that are asked for, with what pends of each, the oldest first, no more outputs than the limit."""
        made = [
            self.make_commit(
                bench, str(uuid4()), committed_at=_MOMENT - timedelta(minutes=age), outputs=tuple(make_events(2))
            )
            for age in (3, 9, 6)
        ]
        theirs = self.make_commit(bench, str(uuid4()), committed_at=_MOMENT - timedelta(hours=1))
        theirs = replace(theirs, claim=replace(theirs.claim, consumer=f"{bench.consumer}-other"))
        for commit in (*made, theirs):
            streams.append(commit, pending=True)
        young, oldest, old = made
        streams.confirm([Mark(oldest.claim, (oldest.outputs[0].id,))])

        def overdue(minutes: int, limit: int = 10, consumer: str = bench.consumer) -> list[tuple[str, set[UUID]]]:
            found = self.reopen_streams(streams).overdue([consumer], _MOMENT - timedelta(minutes=minutes), limit)
            for each in found:
                assert told(each.commit) in [told(commit) for commit in (*made, theirs)]
            return [(each.commit.stream, set(each.pending)) for each in found]

        ids = {commit.stream: {output.id for output in commit.outputs} for commit in (*made, theirs)}
        last = (oldest.stream, {oldest.outputs[1].id})
        assert overdue(10) == []
        assert overdue(9) == [last]
        assert overdue(6) == [last, (old.stream, ids[old.stream])]
        assert overdue(0) == [last, (old.stream, ids[old.stream]), (young.stream, ids[young.stream])]
        assert sum(len(pending) for _, pending in overdue(0, 2)) == 2
        assert overdue(0, 1) == [last]
        assert overdue(0, consumer=f"{bench.consumer}-other") == [(theirs.stream, ids[theirs.stream])]
        assert overdue(0, consumer=f"{bench.consumer}-nobody") == []

    def test_taken_number_is_a_conflict(self, bench: Bench, streams: Streams) -> None:
        """Another message was there first: nothing is appended, and it is no duplicate."""
        stream = str(uuid4())
        first, second = self.make_commit(bench, stream), self.make_commit(bench, stream)
        streams.append(first, pending=False)
        with pytest.raises(WrongVersion):
            streams.append(second, pending=True)
        assert [told(commit) for commit in streams.load(stream)] == [told(first)]
        assert streams.find(stream, second.claim.consumer, second.claim.id.key) is None
        streams.append(replace(second, number=2, first_version=2), pending=False)
        assert len(streams.load(stream)) == 2

    @pytest.mark.parametrize("number", [1, 2], ids=["number taken, too", "number free"])
    def test_taken_id_is_a_duplicate(self, bench: Bench, streams: Streams, number: int) -> None:
        """The same message was there first, whatever number it asks for; what it would send is not what was stored."""
        stream = str(uuid4())
        first = self.make_commit(bench, stream)
        awkward = EffectiveId(UUID(bytes=b"'\"\\ for key '" + bytes([number, 0, 255])), "an id that drivers quote")
        first = replace(first, claim=replace(first.claim, id=awkward))
        streams.append(first, pending=False)
        with pytest.raises(AlreadyCommitted):
            streams.append(replace(first, number=number, outputs=tuple(make_events(3))), pending=True)
        assert [told(commit) for commit in streams.load(stream)] == [told(first)]
        found = streams.find(stream, first.claim.consumer, first.claim.id.key)
        assert found is not None
        assert (told(found.commit), found.pending) == (told(first), frozenset())

    def test_ids_are_each_consumers_own(self, bench: Bench, streams: Streams) -> None:
        """One event, two consumers that write to one stream: each handles it."""
        stream, first = str(uuid4()), self.make_commit(bench, str(uuid4()))
        claim = replace(first.claim, consumer=f"{bench.consumer}-other")
        streams.append(replace(first, stream=stream), pending=False)
        streams.append(replace(first, stream=stream, number=2, first_version=2, claim=claim), pending=False)
        assert len(streams.load(stream)) == 2

    def test_an_id_is_known_in_other_streams(self, bench: Bench, streams: Streams) -> None:
        """A message that names another stream the second time, or whose policy does, is the same message."""
        if not self.across_streams:
            pytest.skip("its ids are unique in each stream")
        first, other = self.make_commit(bench, str(uuid4())), str(uuid4())
        streams.append(first, pending=False)
        found = streams.find(other, first.claim.consumer, first.claim.id.key)
        assert found is not None
        assert found.commit.stream == first.stream
        with pytest.raises(AlreadyCommitted):
            streams.append(replace(first, stream=other), pending=False)
        assert list(streams.load(other)) == []

    def test_streams_differ_in_each_character(self, bench: Bench, streams: Streams) -> None:
        """Case, accents and blanks count, and the last of the 255 bytes of a name."""
        unique = uuid4().hex[:8]
        names = [f"{unique} {name}" for name in ("order", "Order", "ordér", "or der", "' for key 'PRIMARY'", "o" * 246)]
        names.append(f"{names[-1][:-1]}p")
        for name in names:
            streams.append(self.make_commit(bench, name), pending=False)
        assert [len(streams.load(name)) for name in names] == [1] * len(names)
        for name in names:
            with pytest.raises(WrongVersion):
                streams.append(self.make_commit(bench, name), pending=False)

    @pytest.mark.parametrize("same", ["number", "id"])
    def test_of_several_at_once_one_succeeds(self, bench: Bench, streams: Streams, same: str) -> None:
        """At the same number, with different ids and with one; the others hear which it was."""
        stream, start = str(uuid4()), threading.Barrier(_RACERS)
        commits = [self.make_commit(bench, stream, outputs=tuple(make_events(1))) for _ in range(_RACERS)]
        if same == "id":
            commits = [replace(commit, claim=commits[0].claim) for commit in commits]

        def race(instance: Streams, commit: Commit) -> Callable[[], str]:
            def run() -> str:
                start.wait(self.patience)
                while True:
                    try:
                        instance.append(commit, pending=True)
                    except (WrongVersion, AlreadyCommitted) as error:
                        return type(error).__name__
                    except TransientStoreError:
                        continue
                    return "appended"

            return run

        instances = [self.reopen_streams(streams) if place % 2 else streams for place in range(_RACERS)]
        racers = [Background(race(*each)) for each in zip(instances, commits, strict=True)]
        answers = sorted(racer.result(self.patience) for racer in racers)
        lost = "WrongVersion" if same == "number" else "AlreadyCommitted"
        assert answers == sorted([lost] * (_RACERS - 1) + ["appended"])
        (there,) = streams.load(stream)
        found = streams.find(stream, there.claim.consumer, there.claim.id.key)
        assert found is not None
        assert found.pending == {output.id for output in there.outputs}, "what pends is the winner's"

    def test_confirms_are_of_exactly_those(self, bench: Bench, streams: Streams) -> None:
        """What pends is told with the commit; recording twice is harmless, and so is what nobody knows."""
        stream = str(uuid4())
        commit = self.make_commit(bench, stream, outputs=tuple(make_events(3)))
        kept = self.make_commit(bench, stream, 2, 4)
        before = streams.pending()
        streams.append(commit, pending=True)
        streams.append(kept, pending=False)
        ids = [output.id for output in commit.outputs]
        assert streams.pending().count == before.count + 3
        assert streams.pending().since == (min(before.since, _MOMENT) if before.since else _MOMENT)
        unknown = replace(commit.claim, consumer=f"{bench.consumer}-other")
        for _ in range(2):
            streams.confirm([Mark(commit.claim, (ids[1], uuid4())), Mark(unknown, (ids[0],)), Mark(kept.claim)])
            found = self.reopen_streams(streams).find(stream, commit.claim.consumer, commit.claim.id.key)
            assert found is not None
            assert found.pending == {ids[0], ids[2]}
        streams.confirm([Mark(commit.claim, tuple(ids))])
        streams.confirm([Mark(commit.claim)])
        assert streams.pending() == before


class StreamConformance(PortCases, ClaimCases, OptimisticCases, RecordCases, InstanceCases, ResendingCases):
    """All cases of the stream port, and those of the store port over a `StreamInbox` on it, with the other half in memory.

    A subclass gives the fixture `streams`: an adapter that is ready; and the method `reopen_streams(streams)`: another
    instance on the same data. It may give what `EntityStoreConformance` takes, and set:

    Attributes:
        across_streams: an id is known in whatever stream it was committed; where not, in each stream.

    Example:
        >>> [case for case in dir(StreamConformance) if case.startswith("test_taken")]
        ['test_taken_id_is_a_duplicate', 'test_taken_number_is_a_conflict']
    """

    asks_again = True

    @pytest.fixture
    def store(self, streams: Streams, clock: FakeClock) -> StreamInbox:
        """An inbox on the streams."""
        return StreamInbox(streams, InMemoryStore(clock), clock)

    def make_bench(self, store: Any, effects: Any, clock: FakeClock) -> Bench:
        """The store, with a consumer that nobody else uses."""
        made = super().make_bench(store, effects, clock)
        return StreamBench(**vars(made))

    def reopen(self, store: Any) -> StreamInbox:
        """Another inbox, on another instance of the streams."""
        made: StreamInbox = type(store)(self.reopen_streams(store.streams), store.beside, store.clock)
        return made

    def test_ids_differ_in_each_byte(self, bench: Bench) -> None:
        """One bit makes another message, wherever it stands."""
        key = uuid4().int
        ids = [UUID(int=number) for number in (key, *(key ^ 1 << place for place in (*range(0, 128, 8), 127)))]
        claims = [replace(bench.claim(), id=EffectiveId(id_, str(id_)), entity=str(uuid4())) for id_ in ids]
        outputs = [make_events(1) for _ in claims]
        for claim, own in zip(claims, outputs, strict=True):
            assert bench.handle(claim, own).verdict is Verdict.CLAIMED
        assert [[stored.output for stored in bench.look(claim).outputs] for claim in claims] == outputs

    def test_two_messages_of_one_stream(self, bench: Bench, store: StreamInbox) -> None:
        """Whoever commits second has decided on what is no longer so, is told, and leaves nothing."""
        one, other = (bench.claim(stream="order-7") for _ in range(2))  # type: ignore[call-arg]
        with store.begin([one]) as unit:
            unit.claim(one)
            bench.handle(other, make_events(2))
            unit.store_outputs(one, make_events(1), RELAY_AFTER)
            with pytest.raises(WrongVersion):
                unit.commit()
        assert bench.look(one).verdict is Verdict.CLAIMED
        bench.handle(one, make_events(1))
        stream = store.read("order-7")
        assert [commit.claim.id for commit in stream.commits[-2:]] == [other.id, one.id]
        assert [event.version for event in stream.events] == list(range(1, stream.version + 1))

    @pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
    def test_what_the_handler_saw_is_what_counts(self, bench: Bench, store: StreamInbox, late: bool) -> None:
        """A commit after the handler looked, and before the claim of a late one, makes it run again."""
        one, other = (bench.claim(stream="order-8") for _ in range(2))  # type: ignore[call-arg]
        with store.begin([one], late=late) as unit:
            if not late:
                unit.claim(one)
            seen = unit.session.version
            bench.handle(other, make_events(1))
            if late:
                assert unit.claim_and_store(one, (), RELAY_AFTER).verdict is Verdict.CLAIMED
            assert unit.session.version == seen
            with pytest.raises(WrongVersion):
                unit.commit()

    def test_what_needs_another_store_is_refused(self, bench: Bench) -> None:
        """Several messages in one unit, a message about nothing, and a name that a database would cut."""
        one, other = bench.claim(), bench.claim()
        with bench.store.begin([one, other]) as unit:
            with pytest.raises(ConfigurationError, match="2 messages"):
                unit.claim_all([one, other], timedelta(0))
            unit.claim(one)
            with pytest.raises(ConfigurationError, match="2 messages"):
                unit.store_outputs(other, (), RELAY_AFTER)
        with bench.store.begin() as unit:
            with pytest.raises(ConfigurationError, match="names no stream"):
                unit.claim(replace(one, entity=None))
            with pytest.raises(UnaddressableMessage, match="blank"):
                unit.claim(replace(one, entity="order-7 "))
            unit.commit()  # of nothing

    def test_refusal_that_was_swallowed_is_raised_at_commit(self, bench: Bench) -> None:
        """A handler's own commit or rollback is told at the latest here, and nothing is appended."""
        claim = bench.claim()
        with bench.store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, make_events(1), RELAY_AFTER)
            with pytest.raises(TransactionEnded):
                unit.session.commit()
            with pytest.raises(TransactionEnded):
                unit.commit()
        assert bench.look(claim).verdict is Verdict.CLAIMED

    def test_nothing_expires(self, bench: Bench, store: StreamInbox) -> None:
        """The stream is the record: no window, no cleaner, no relay."""
        claim, outputs, upkeep = bench.claim(), make_outputs(1), bench.store.upkeep
        bench.handle(claim, outputs)
        bench.consume(timedelta(minutes=10))
        bench.clock.advance(timedelta(days=400))
        assert upkeep.purge(bench.consumer, {MESSAGE_TYPE: timedelta(minutes=1)}, 100) == 0
        assert bench.pending(claim) == [outputs[0].id]
        assert bench.store.late_before(bench.consumer, timedelta(minutes=1)) < bench.clock.now() - timedelta(
            days=10_000
        )
        upkeep.beat("relay", relay=True, consumers=[])
        assert not bench.store.relay_alive()
        assert not store.beside.relay_alive(), "its database's other consumers would count on it"
        assert upkeep.pending_state().oldest_seconds > 0


def make_events(number: int = 1, *, sent: int = 0) -> list[Output]:
    """Outputs of one handling: so many that were published, and so many that were sent; with ids of their own.

    Example:
        >>> [output.kind.value for output in make_events(1, sent=1)]
        ['publish', 'send']
    """
    made = make_outputs(number + sent)
    events = [
        replace(each, kind=OutputKind.PUBLISH, exchange="idemp", routing_key="stock.Reserved") for each in made[:number]
    ]
    return events + made[number:]


def told(commit: Commit) -> tuple[Any, ...]:
    """What has to come back of a commit: all but how long its claim would have waited.

    Example:
        >>> told.__name__
        'told'
    """
    claim: Claim = replace(commit.claim, wait=timedelta(0), message_type="", entity=None)
    outputs: Sequence[Output] = tuple(commit.outputs)
    return commit.stream, commit.number, commit.first_version, claim, commit.committed_at, outputs
