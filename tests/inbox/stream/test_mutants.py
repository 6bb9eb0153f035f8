"""Each case of `StreamConformance` that is about streams can fail: streams, or inboxes, with that fault are noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from idemp.identity import EffectiveId
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Claim, Claimed, Mark
from idemp.inbox.resending import Resending
from idemp.inbox.stream import AlreadyCommitted, Commit, Found, InMemoryStreams, StreamInbox, WrongVersion
from idemp.inbox.stream.inbox import StreamUpkeep
from idemp.inbox.stream.unit import StreamUnit
from idemp.messages import Output
from idemp.testing.cases.claims import ClaimCases
from idemp.testing.cases.instances import InstanceCases
from idemp.testing.cases.optimistic import OptimisticCases
from idemp.testing.cases.records import RecordCases
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import NoEffects
from idemp.testing.stream_conformance import PortCases, StreamConformance
from tests.testing.mutants import Mutant, Table, cases_of, failure

pytestmark = pytest.mark.slow

STREAMS, INBOXES = Table(), Table()
OF_ALL_STORES = set[str]().union(*map(cases_of, (ClaimCases, OptimisticCases, RecordCases, InstanceCases)))


class Quick(StreamConformance):
    patience = 2.0


def fails(case: str, store: StreamInbox, clock: FakeClock) -> BaseException | None:
    @contextmanager
    def fixtures() -> Iterator[Mapping[str, Any]]:
        yield {"store": store, "streams": store.streams, "bench": Quick().make_bench(store, NoEffects(), clock)}

    return failure(Quick(), case, fixtures)


# Streams --------------------------------------------------------------------------------------------------------------


@STREAMS.breaks("appended_is_loaded_as_it_was")
class CountsFromZero(InMemoryStreams):
    """`after` is a place in a list, one too far."""

    def load(self, stream: str, after: int = 0) -> Sequence[Commit]:
        return super().load(stream, max(0, after - 1))


@STREAMS.breaks("last_is_the_last")
class LastByText(InMemoryStreams):
    """Numbers are compared as texts: 9 is higher than 10."""

    def last(self, stream: str) -> Commit | None:
        return max(self.load(stream), key=lambda commit: str(commit.number), default=None)


@STREAMS.breaks("overdue_are_those_that_wait_for_long")
class OverdueOfAll(InMemoryStreams):
    """One consumer's worker sends what another one's broker is waiting for."""

    def overdue(self, consumers: Collection[str], before: datetime, limit: int) -> Sequence[Found]:
        return super().overdue({consumer for consumer, _, _ in self.unconfirmed}, before, limit)


@STREAMS.breaks("taken_number_is_a_conflict", "two_messages_of_one_stream", "what_the_handler_saw_is_what_counts")
class AnyVersion(InMemoryStreams):
    """What comes second is put behind what came first."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        super().append(replace(commit, number=len(self.load(commit.stream)) + 1), pending=pending)


@STREAMS.breaks("taken_id_is_a_duplicate")
class TakesIdsTwice(InMemoryStreams):
    """The number alone decides."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        self._ids.pop((commit.claim.consumer, commit.claim.id.key), None)
        super().append(commit, pending=pending)


@STREAMS.breaks("taken_id_is_a_duplicate", "of_several_at_once_one_succeeds")
class NumbersFirst(InMemoryStreams):
    """Whoever comes too late is told of another message, also where it was the same one."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        try:
            super().append(commit, pending=pending)
        except AlreadyCommitted:
            raise WrongVersion.of(commit) from None


@STREAMS.breaks("of_several_at_once_one_succeeds")
class LooksFirst(InMemoryStreams):
    """Between the look and the append others append."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        taken = [each.number for each in self.load(commit.stream)]
        time.sleep(0.05)
        if commit.number in taken:
            raise WrongVersion.of(commit)
        self.commits.setdefault(commit.stream, []).append(commit)


@STREAMS.breaks("ids_are_each_consumers_own")
class OneConsumer(InMemoryStreams):
    """Ids count for all consumers together."""

    def append(self, commit: Commit, *, pending: bool) -> None:
        super().append(replace(commit, claim=replace(commit.claim, consumer="all")), pending=pending)


@STREAMS.breaks("an_id_is_known_in_other_streams")
class EachForItself(InMemoryStreams):
    """Ids count in each stream, and it does not say so."""

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        found = super().find(stream, consumer, key)
        return found if found is not None and found.commit.stream == stream else None


@STREAMS.breaks("streams_differ_in_each_character")
class CaseBlind(InMemoryStreams):
    """As MySQL's default collations see it."""

    def load(self, stream: str, after: int = 0) -> Sequence[Commit]:
        return super().load(stream.lower(), after)

    def append(self, commit: Commit, *, pending: bool) -> None:
        super().append(replace(commit, stream=commit.stream.lower()), pending=pending)


@STREAMS.breaks("confirms_are_of_exactly_those")
class ConfirmsAll(InMemoryStreams):
    """One confirm is as good as all."""

    def confirm(self, marks: Sequence[Mark]) -> None:
        self.unconfirmed.clear()


@STREAMS.breaks("ids_differ_in_each_byte")
class ShortIds(InMemoryStreams):
    """The last byte is cut off."""

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        return super().find(stream, consumer, UUID(int=key.int >> 8))

    def append(self, commit: Commit, *, pending: bool) -> None:
        short = EffectiveId(UUID(int=commit.claim.id.key.int >> 8), commit.claim.id.text)
        super().append(replace(commit, claim=replace(commit.claim, id=short)), pending=pending)


# Inboxes --------------------------------------------------------------------------------------------------------------


def made_of(unit: type[StreamUnit]) -> type[StreamInbox]:
    class Inbox(StreamInbox):
        def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> StreamUnit:
            return unit(self.streams, self.clock, claims, late=late)

    Inbox.__doc__, Inbox.__name__ = unit.__doc__, unit.__name__
    return Inbox


class LooksAgain(StreamUnit):
    """The claim of a late handler reads what the handler did not see."""

    def claim(self, claim: Claim) -> Claimed:
        self.session.enter(str(claim.entity))
        return super().claim(claim)


INBOXES.breaks("what_the_handler_saw_is_what_counts")(made_of(LooksAgain))


class TakesSeveral(StreamUnit):
    """The last of several messages is committed, and the others are forgotten."""

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        return [self.claim(claim) for claim in claims]

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        self._claim = claim
        super().store_outputs(claim, outputs, relay_after)


INBOXES.breaks("what_needs_another_store_is_refused")(made_of(TakesSeveral))


class Forgives(StreamUnit):
    """A refusal that was swallowed is forgotten."""

    def flush(self) -> None:
        self.session.broken = None


INBOXES.breaks("refusal_that_was_swallowed_is_raised_at_commit")(made_of(Forgives))


@INBOXES.breaks("nothing_expires")
class PassesForARelay(StreamInbox):
    """Others on its database leave their outputs to it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

        class Upkeep(StreamUpkeep):
            def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
                self._beside.beat(worker, relay=relay, consumers=consumers)

        self.upkeep = Upkeep(self.streams, self.beside.upkeep, self.clock)


def resending(**changes: Callable[..., Any]) -> type[StreamInbox]:
    """An inbox whose resending differs in some methods; each gets the object as its first argument."""

    class Inbox(StreamInbox):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made = self.upkeep.resending
            for name, method in changes.items():
                setattr(made, name, partial(method, made))

    return Inbox


INBOXES.breaks("what_nobody_recorded_is_sent_once_more")(resending(take=lambda made, limit, lease: []))
INBOXES.breaks("what_nobody_recorded_is_sent_once_more")(
    resending(settle=lambda made, confirmed, failed, retry_in: None)
)
INBOXES.breaks("what_is_refused_again_waits_and_lets_others_pass")(
    resending(
        take=lambda made, limit, lease: [
            made._lend(handling, output, 0.0)
            for handling, outputs in made._find(made.consumers, made._clock.now(), limit)
            for output in outputs
        ]
    )
)
INBOXES.breaks("a_lease_that_ends_is_taken_over")(
    resending(take=lambda made, limit, lease: Resending.take(made, limit, timedelta(days=1)))
)


@INBOXES.breaks("consumers_of_others_are_left_alone")
class OfAllConsumers(StreamInbox):
    """What others wait for goes to this one's broker."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        overdue, streams = self.streams.overdue, self.streams
        assert isinstance(streams, InMemoryStreams)
        streams.overdue = lambda consumers, before, limit: overdue(  # type: ignore[method-assign]
            {consumer for consumer, _, _ in streams.unconfirmed}, before, limit
        )


@pytest.mark.parametrize("mutant", STREAMS.mutants, ids=str)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    clock = FakeClock()
    store = StreamInbox(mutant.made(), InMemoryStore(clock), clock)
    assert fails(mutant.case, store, clock), f"{mutant.case} does not notice: {mutant.breaks}"


@pytest.mark.parametrize("mutant", INBOXES.mutants, ids=str)
def test_mutant_of_an_inbox_is_noticed(mutant: Mutant) -> None:
    clock = FakeClock()
    store = mutant.made(InMemoryStreams(), InMemoryStore(clock), clock)
    assert fails(mutant.case, store, clock), f"{mutant.case} does not notice: {mutant.breaks}"


@pytest.mark.parametrize("case", sorted(STREAMS.cases | INBOXES.cases))
def test_sound_streams_pass(case: str) -> None:
    """The same way of calling: it is the fault that is noticed."""
    clock = FakeClock()
    assert fails(case, StreamInbox(InMemoryStreams(), InMemoryStore(clock), clock), clock) is None


def test_each_case_of_streams_has_a_mutant() -> None:
    own = cases_of(StreamConformance) - OF_ALL_STORES | {"test_ids_differ_in_each_byte"}
    assert cases_of(PortCases) <= own
    assert STREAMS.cases | INBOXES.cases == own
