"""What is simulated: how many of what, and with which parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal

from idemp.consuming import Consuming
from idemp.dispatch import Dispatcher
from idemp.errors import ConfigurationError
from idemp.inbox.memory import InMemoryStore
from idemp.protocol import Protocol
from idemp.relay import Relay
from idemp.retention import Cleaner
from idemp.testing.simulation.inboxes import SimulatedInbox, TableInbox

if TYPE_CHECKING:
    from idemp.clock import Clock


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The classes that are simulated; idemp's own, unless a test gives others.

    What takes their place must keep nothing between two deliveries beside marks, and must not act on chance or on time.

    Attributes:
        protocol: runs deliveries.
        dispatcher: sends outputs and gathers marks.
        consuming: receives and settles.
        relay: ships what is pending.
        cleaner: purges.
        inbox: the kind of inbox.
        store: makes the store of one run, for a `TableInbox`.
    """

    protocol: type[Protocol] = Protocol
    dispatcher: type[Dispatcher] = Dispatcher
    consuming: type[Consuming] = Consuming
    relay: type[Relay] = Relay
    cleaner: type[Cleaner] = Cleaner
    inbox: type[SimulatedInbox] = TableInbox
    store: Callable[[Clock], InMemoryStore] = InMemoryStore


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is simulated.

    Attributes:
        workers: consuming processes, 1 or more.
        messages: different messages, 1 or more; each has one effect in the store.
        copies: how often each of them arrives at first.
        outputs: outputs of each message.
        relays: relay processes.
        relay_returns: a relay that died is followed by another; else none runs until all has come to rest.
        relay_rounds: rounds of each relay in which something may be pending.
        purges: how often the cleaner purges; the retention window is one hour.
        jumps: how far the clock goes, in this order, at any moments.
        crashes: how many processes (workers or relays) die at most in one schedule, each before any of its calls.
        faults: how many other faults happen at most in one schedule: a handler that fails, a COMMIT without an answer, a
            nack, a lost confirm, a publisher that raises, a link lost before the ack, marks that can't be recorded.
        outages: how many other statements of the database fail at most in one schedule: refused, or their connection lost
            before or after they took effect, or the database is away for long.
        stops: how many workers are told to stop at most in one schedule, as by SIGTERM; another one follows each.
        attempts: deliveries that a failing handler gets, as in a policy.
        claim: "early" or "late", as in a policy.
        window: deliveries of a worker that may wait for their confirms; with 1 each is waited for before the next.
        together: deliveries of a worker that may share a transaction; with 1 each has its own.
        entities: how many entities the messages are about, in turn, for an inbox that keeps claims with their entities.
        batch: marks recorded together; with 1 they are recorded before the ack, else after it.
        parts: the classes that are simulated.
    """

    workers: int = 2
    messages: int = 1
    copies: int = 2
    outputs: int = 1
    relays: int = 1
    relay_returns: bool = True
    relay_rounds: int = 1
    purges: int = 1
    jumps: tuple[timedelta, ...] = (timedelta(minutes=1), timedelta(hours=2))
    crashes: int = 1
    faults: int = 0
    outages: int = 0
    stops: int = 0
    attempts: int = 7
    claim: Literal["early", "late"] = "early"
    window: int = 1
    together: int = 1
    batch: int = 50
    entities: int = 1
    parts: Parts = field(default_factory=Parts)
    least: ClassVar[Mapping[str, int]] = dict.fromkeys(
        ("workers", "messages", "copies", "attempts", "window", "together", "batch", "entities"), 1
    )

    def __post_init__(self) -> None:
        """See that there is something to simulate.

        Raises:
            ConfigurationError: there is not.
        """
        for each in fields(self):
            given, least = getattr(self, each.name), self.least.get(each.name, 0)
            if isinstance(given, int) and given < least:
                raise ConfigurationError(f"{each.name} can't be {given}.", fix=f"Give {least} or more.")
        if self.parts.inbox.per_entity and (self.relays or self.together > 1):
            raise ConfigurationError(
                "An inbox that keeps claims with their entities has no relays, and no transaction over several messages.",
                fix="Say relays=0 and together=1.",
            )
        if self.outages and not self.parts.inbox.has_outages:
            raise ConfigurationError(
                f"{self.parts.inbox.__name__} has failures of its own: each of its requests is a step that may fail.",
                fix="Say outages=0, and give faults.",
            )
        if any(jump <= timedelta(0) for jump in self.jumps):
            raise ConfigurationError("A clock does not go back.", fix="Give jumps above zero.")
