"""The failures that services with prepared messages are known for. Ours has none of them; the naive one has them all."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.errors import IdempError, StoreUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.prepared import Decision, InMemoryBarrier, InMemoryHome, PreparedMessages
from idemp.testing.clock import FakeClock
from tests.prepared.naive import NaiveMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHECK_AFTER = timedelta(minutes=1)
MAX_CHECKS = 5


@dataclass
class World:
    """What a service has around it.

    Attributes:
        away: how many of the next writes of decisions fail.
        unasked: whether the checker can't ask the business store.
        business: keys of committed local work.
        published: ids of published messages, copies included.
        keys: their keys.
    """

    producers_clock: FakeClock = field(default_factory=FakeClock)
    checkers_clock: FakeClock = field(default_factory=FakeClock)
    away: int = 0
    unasked: bool = False
    business: set[str] = field(default_factory=set)
    published: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def fail_if_away(self) -> None:
        if self.away:
            self.away -= 1
            raise StoreUnavailable("The test says: away.")

    def fail_if_unasked(self) -> None:
        if self.unasked:
            raise StoreUnavailable("The test says: nobody can be asked.")

    def later(self, by: timedelta = 2 * CHECK_AFTER) -> None:
        for clock in (self.producers_clock, self.checkers_clock):
            clock.advance(by)


class OurMessages:
    """`PreparedMessages` behind the words of these tests. Its home's clock is the home's own."""

    def __init__(self, world: World, *, check_after: timedelta, max_checks: int) -> None:
        self.world = world
        self.broker = InMemoryBroker(world.producers_clock)
        self.broker.declare(Topology(exchange="idemp", queues=("stock",)))
        home, self.barrier = InMemoryHome(world.producers_clock), InMemoryBarrier(world.producers_clock)
        options: dict[str, Any] = {"check_after": check_after, "max_checks": max_checks, "barrier": self.barrier}
        self.home = home
        producers = App("orders", store=InMemoryStore(), broker=self.broker, clock=world.producers_clock)
        checkers = App("orders", store=InMemoryStore(), broker=self.broker, clock=world.checkers_clock)
        self.producer = PreparedMessages(producers, home, **options)
        self.checker = PreparedMessages(checkers, home, **options)
        decide, probe = home.decide, self.barrier.probe

        def failing(*arguments: Any) -> bool:
            world.fail_if_away()
            return decide(*arguments)

        def asking(id: Any) -> Any:
            world.fail_if_unasked()
            return probe(id)

        home.decide = failing  # type: ignore[method-assign]
        self.barrier.probe = asking  # type: ignore[method-assign]

    def submit(self, key: str, work: Callable[[], None], after: Callable[[], None]) -> None:
        with self.producer.prepare({}, to="stock", type="stock.Reserve", key=key) as half:
            with self.barrier.begin() as unit:
                half.pass_barrier(unit)
                work()
            self.world.business.add(key)
            after()
            half.commit()

    def prepare(self, key: str) -> Any:
        prepared = self.producer.make({}, to="stock", type="stock.Reserve", key=key)
        self.home.prepare(prepared, CHECK_AFTER)
        return prepared

    @contextmanager
    def local_work(self, prepared: Any) -> Iterator[None]:
        with self.barrier.begin() as unit:
            self.barrier.pass_(unit, prepared.id)
            yield
        self.world.business.add(prepared.key)

    def commit(self, prepared: Any) -> None:
        self.producer.decide(prepared, Decision.COMMIT)

    def rollback(self, prepared: Any) -> None:
        self.producer.decide(prepared, Decision.ROLLBACK)

    def check(self) -> None:
        self.checker.run_once()

    def forged(self) -> Any:
        prepared = self.producer.make({}, to="stock", type="stock.Reserve", key="forged")
        with self.barrier.begin() as unit:
            self.barrier.pass_(unit, prepared.id)
        return prepared


def nothing() -> None:
    pass


def raising() -> None:
    raise RuntimeError("the producer's own")


def arrived(messages: Any) -> list[str]:
    """The ids of what consumers see."""
    if isinstance(messages, NaiveMessages):
        return messages.world.published
    return [message.message_id for message in messages.broker.browse("stock", 100)]


def heard(function: Callable[[], object]) -> bool:
    """Whether it raises."""
    try:
        function()
    except (IdempError, RuntimeError):
        return True
    return False


# Each answers whether the promise was kept. -----------------------------------------------------------------------------


def commit_swallowed(messages: Any, world: World) -> bool:
    """1. Commit is retried three times and then swallowed."""
    world.away = 10
    told = heard(lambda: messages.submit("order-7", nothing, nothing))
    world.away = 0
    world.later()
    messages.check()
    return told and len(arrived(messages)) == 1


def unknown_is_success(messages: Any, world: World) -> bool:
    """2. "Does not exist" is taken for success."""
    del world
    return heard(lambda: messages.commit(messages.forged()))


def exception_is_rollback(messages: Any, world: World) -> bool:
    """3. An exception after the local commit is taken for rollback."""
    with suppress(RuntimeError):
        messages.submit("order-7", nothing, raising)
    world.later()
    messages.check()
    return len(arrived(messages)) == len(world.business) == 1


def work_longer_than_the_check_delay(messages: Any, world: World) -> bool:
    """4. Local work is still in flight when the checker comes."""
    half = messages.prepare("order-7")
    with messages.local_work(half):
        world.later()
        messages.check()
    world.later()
    messages.check()
    return len(arrived(messages)) == len(world.business) == 1


def two_commits(messages: Any, world: World) -> bool:
    """5. Two commits store two messages."""
    del world
    half = messages.prepare("order-7")
    with messages.local_work(half):
        pass
    messages.commit(half)
    messages.commit(half)
    return len(set(arrived(messages))) == 1


def commit_after_rollback(messages: Any, world: World) -> bool:
    """6. Commit is accepted after rollback."""
    del world
    half = messages.prepare("order-7")
    messages.rollback(half)
    return heard(lambda: messages.commit(half)) and not arrived(messages)


def checks_burnt(messages: Any, world: World) -> bool:
    """7. Checks are counted though nobody was asked."""
    half = messages.prepare("order-7")
    with messages.local_work(half):
        pass
    world.unasked = True
    for _ in range(3 * MAX_CHECKS):
        world.later()
        messages.check()
    world.unasked = False
    world.later()
    messages.check()
    return len(arrived(messages)) == 1


def clock_skew(messages: Any, world: World) -> bool:
    """8. The checker's clock is ahead of the producer's: it comes before anybody could work."""
    world.checkers_clock.advance(timedelta(hours=1))
    half = messages.prepare("order-7")
    messages.check()
    with suppress(IdempError), messages.local_work(half):
        pass
    with suppress(IdempError):
        messages.commit(half)
    # The naive service commits what it rolled back, its failure 6: what counts is that nobody decided early.
    return getattr(half, "checks", 0) == 0 and len(arrived(messages)) == 1


FAILURES = [
    commit_swallowed,
    unknown_is_success,
    exception_is_rollback,
    work_longer_than_the_check_delay,
    two_commits,
    commit_after_rollback,
    checks_burnt,
    clock_skew,
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_ours_keeps_the_promise(failure: Callable[[Any, World], bool]) -> None:
    world = World()
    assert failure(OurMessages(world, check_after=CHECK_AFTER, max_checks=MAX_CHECKS), world)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_the_naive_one_breaks_it(failure: Callable[[Any, World], bool]) -> None:
    """Else the test above would show nothing."""
    world = World()
    assert not failure(NaiveMessages(world, check_after=CHECK_AFTER, max_checks=MAX_CHECKS), world)


def test_the_naive_one_works_without_faults() -> None:
    """It is naive, not broken."""
    world = World()
    messages = NaiveMessages(world, check_after=CHECK_AFTER, max_checks=MAX_CHECKS)
    messages.submit("order-7", nothing, nothing)
    with pytest.raises(RuntimeError):
        messages.submit("order-8", raising, nothing)
    half = messages.prepare("order-9")
    with messages.local_work(half):
        pass
    world.later()
    messages.check()
    assert (world.keys, world.business) == (["order-7", "order-9"], {"order-7", "order-9"})
