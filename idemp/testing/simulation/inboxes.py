"""The inbox of one simulated world: its store, how each process has it, and what the world sees of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from idemp.testing.simulation.ports import SteppedStore
from idemp.testing.store_bench import MemoryEffects

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from datetime import datetime
    from uuid import UUID

    from idemp.clock import Clock
    from idemp.inbox.small import Sending
    from idemp.messages import Output
    from idemp.testing.simulation.options import Parts
    from idemp.testing.simulation.stage import Actor
    from idemp.testing.simulation.world import World
    from idemp.testing.store_bench import Effects

QUEUE: Final = "shop"
"""The one queue, and the one consumer."""
TYPE: Final = "shop.Sell"
"""The one message type."""
WINDOW: Final = timedelta(hours=1)
"""Its retention window."""
_UNSEEN: Final = frozenset({"begin", "handler"})
_UNSEEN_WHILE_TIME_STANDS: Final = _UNSEEN | {"store", "late before"}


class SimulatedInbox(ABC):
    """A kind of inbox in the simulation. Subclass it for a store whose own calls are to be steps.

    Args:
        clock: the world's time.
        parts: the classes that are simulated.

    Attributes:
        effects: how the handler's effects are written and counted.
        per_entity: it keeps a claim with its entity; messages then have one.
        has_outages: each statement of its database may fail.
        mortal_cleaner: the cleaner takes several steps, between which it may die.
    """

    per_entity: ClassVar[bool] = False
    mortal_cleaner: ClassVar[bool] = False
    has_outages: ClassVar[bool] = False
    effects: Effects

    def __init__(self, clock: Clock, parts: Parts) -> None:
        self.clock = clock
        self.parts = parts

    @abstractmethod
    def of(self, world: World, actor: Actor) -> Any:
        """The store as one process has it, each call of which is a step: a `SteppedStore`, or what does the same."""

    @abstractmethod
    def consumes(self, since: datetime, until: datetime) -> None:
        """The consumer has consumed all the time from then to then."""

    @abstractmethod
    def pends(self) -> bool:
        """Whether any output has no confirm yet, for relays."""

    def pending(self) -> frozenset[UUID]:
        """Outputs without a confirm that a relay may send."""
        return frozenset()

    @abstractmethod
    def keeps(self) -> bool:
        """Whether there is anything for the cleaner to look at."""

    @abstractmethod
    def picture(self) -> Hashable:
        """All that its later answers depend on."""

    def would_resend(self, outputs: Sequence[Output]) -> bool:
        """Whether these are some, and a copy of their message would find and send them, whoever committed them."""
        del outputs
        return False

    def held(self, world: World, actor: Actor) -> Hashable:
        """What the process keeps from others."""
        del world, actor
        return ()

    def unseen(self, *, time_stands: bool) -> frozenset[str]:
        """Steps that no other process sees, and that see nothing of others."""
        return _UNSEEN_WHILE_TIME_STANDS if time_stands else _UNSEEN


class TableInbox(SimulatedInbox):
    """An `InMemoryStore`, whose units of work are transactions: the steps are the calls of the store port."""

    has_outages = True

    def __init__(self, clock: Clock, parts: Parts) -> None:
        super().__init__(clock, parts)
        self.store = parts.store(clock)
        self.effects = MemoryEffects(self.store)

    def of(self, world: World, actor: Actor) -> Any:
        """The store, stepped."""
        return SteppedStore(self.store, world, actor)

    def consumes(self, since: datetime, until: datetime) -> None:
        """As if its workers had beaten all the while."""
        self.store.content.consumed[QUEUE] = [(since, until)]

    def pends(self) -> bool:
        """By its content."""
        return next(self.store.content.pending(), None) is not None

    def pending(self) -> frozenset[UUID]:
        """By its content."""
        return frozenset(item.output.id for _, item in self.store.content.pending())

    def keeps(self) -> bool:
        """Whether it has any claim."""
        return bool(self.store.content.handlings)

    def held(self, world: World, actor: Actor) -> Hashable:
        """The keys that its unit of work claimed."""
        return tuple(key for key, unit in self.store.holders.items() if world.units.get(id(unit)) == actor.name)

    def picture(self) -> Hashable:
        """Its content."""
        content, now = self.store.content, self.clock.now()
        return (
            frozenset(
                (key, handling.claimed_at, tuple(_pictured(item, now) for item in handling.sendings))
                for key, handling in content.handlings.items()
            ),
            frozenset(content.starts.items()),
            tuple(sorted(hash(key[0]) for key in content.data)),
            frozenset(content.relays.values()),
        )


def _pictured(item: Sending, now: datetime) -> Hashable:
    due_at = item.due_at if item.due_at > now else None
    return item.pending and (due_at, item.attempts, item.refusals, item.quarantined)
