"""One world per schedule: an inbox, other databases, a broker and a clock, and the real code on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from idemp.errors import StoreError
from idemp.identity import effective_id
from idemp.policy import TwoPhase
from idemp.testing.simulation.inboxes import QUEUE, WINDOW
from idemp.testing.simulation.stage import SURROUNDINGS, Actor, Move, Role
from idemp.testing.simulation.twophase.databases import DecidingStore, InMemoryDatabase, InMemoryDecisions
from idemp.testing.simulation.twophase.ports import (
    SESSION_ENDS,
    SteppedDatabase,
    SteppedDecisions,
    TwoPhaseUnit,
    numbered,
)
from idemp.testing.simulation.twophase.witness import TwoPhaseWitness
from idemp.testing.simulation.world import Setting, World
from idemp.twophase import BranchId, Coordinator
from idemp.twophase.port import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from idemp.context import Context
    from idemp.policy import Idempotent
    from idemp.testing.simulation.ports import SteppedStore
    from idemp.testing.simulation.twophase import TwoPhaseOptions
    from idemp.testing.simulation.twophase.databases import InMemoryBranch
    from idemp.twophase import Decision, Recovery
    from idemp.work import Consumer

_OTHER_INBOX: Final = b"another1"
_SOMEBODY: Final = "somebody-else"
_NO_TIME: Final = timedelta(0)


@dataclass(frozen=True)
class TwoPhaseSetting(Setting):
    """What all worlds of one simulation share."""

    options: TwoPhaseOptions

    def world(self) -> TwoPhaseWorld:
        """A world before its first choice."""
        world = TwoPhaseWorld(self)
        world.begin()
        return world

    @property
    def policy(self) -> Idempotent:
        """Of the one message type."""
        return TwoPhase(*self.options.parts.databases, retention=WINDOW)


class TwoPhaseWorld(World):
    """One run of a simulation of handlings in several databases.

    Args:
        setting: what all worlds share.

    Attributes:
        databases: the others, by their names.
        decisions: in the inbox's database.
        seen: the witness.
        claimed: units of work that hold a claim and have not sent COMMIT, by their actors.
        messages: what is known by which key.
    """

    options: TwoPhaseOptions

    def __init__(self, setting: TwoPhaseSetting) -> None:
        super().__init__(setting)
        parts = self.options.parts
        self.databases = {name: kind(name) for name, kind in parts.databases.items()}
        self.store = cast("DecidingStore", cast("Any", self.inbox).store)
        self.decisions = InMemoryDecisions(self.store, QUEUE)
        relays = self.options.relays > 0
        self.witness = self.seen = TwoPhaseWitness(self.breaks, self.decisions.inbox(), self._missing, relays=relays)
        self.claimed: dict[str, TwoPhaseUnit] = {}
        self.messages: dict[UUID, str] = {}
        self._known: dict[str, set[bytes]] = {}
        self._branches: dict[str, list[tuple[InMemoryDatabase, InMemoryBranch]]] = {}
        self._recoveries = self.options.recoveries
        self._preparing: set[str] = set()
        self._planted = self._plant()
        self._unseen = {f"{call} in {name}" for call in ("begin", "insert") for name in self.databases}

    def _plant(self) -> list[str]:
        """Transactions of somebody else, and of another inbox about the very messages of this one."""
        claims = [effective_id("envelope", str(each.message.message_id)).key for each in self._setting.arrivals]
        names = {_SOMEBODY, *(BranchId(_OTHER_INBOX, 1, key, _token(0), 0).text for key in claims)}
        for database in self.databases.values():
            for name in sorted(names):
                database.plant(name)
        return self._foreign()

    def _foreign(self) -> list[str]:
        found = (
            (database.name, name, BranchId.parse(name))
            for database in self.databases.values()
            for name in database.prepared
        )
        return [
            f"{name} in {database}" for database, name, branch in found if branch is None or not self.is_ours(branch)
        ]

    # Who acts -------------------------------------------------------------------------------------------------------

    def roles(self) -> list[Role]:
        """Workers, whoever runs `idemp recover`, and the upkeep of a worker."""
        recoverers = [
            Role(f"recoverer {number + 1}", self._recover, alike="recoverer")
            for number in range(self.options.recoverers)
        ]
        return [*super().roles(), *recoverers]

    def _work(self, actor: Actor) -> None:
        if self.options.start == "recover":
            self._recovery(actor).keep_up()
        super()._work(actor)

    def _recover(self, actor: Actor) -> None:
        recovery = self._recovery(actor)
        while True:
            if not actor.stained and not self.options.upkeep:
                actor.memory = 0  # `idemp recover` knows nothing of earlier rounds
            actor.point("recover", ready=self._something_to_recover, idle=True)
            self._recoveries -= 1
            actor.tell("recover")
            if self.options.upkeep:
                recovery.keep_up()
                continue
            self._known[actor.name] = set()
            try:
                recovery.run_once()
            except StoreError as error:
                actor.tell("gives the round up", type(error).__name__)

    def _something_to_recover(self) -> bool:
        return self._recoveries > 0 and bool(self._in_doubt())

    def consumer_of(self, actor: Actor, store: SteppedStore) -> Consumer:
        """With other databases."""
        return replace(super().consumer_of(actor, store), coordinator=self._coordinator(actor, store))

    def _recovery(self, actor: Actor) -> Recovery:
        coordinator = self._coordinator(actor, self.inbox.of(self, actor))
        return self.options.parts.recovery(coordinator, wait=_NO_TIME)

    def _coordinator(self, actor: Actor, store: SteppedStore) -> Coordinator:
        made = self.options.parts.coordinator(
            cast("Any", store),
            cast("Any", SteppedDecisions(self.decisions, self, actor)),
            cast("Any", {name: SteppedDatabase(each, self, actor) for name, each in self.databases.items()}),
        )
        made.pause = lambda _: None
        made.new_token = partial(self._next_token, actor)
        return made

    def _next_token(self, actor: Actor) -> bytes:
        """The first one of which nobody knows, so that it does not matter how many attempts there were."""
        self._known[actor.name] = set()
        self._branches[actor.name] = []  # those of its attempt before have been left
        used, number = self._tokens(), 1
        while _token(number) in used:
            number += 1
        token = _token(number)
        for database in self.databases.values():
            database.forget(token)
        self.knows(actor, [token])
        actor.memory = hash((actor.memory, token))
        return token

    def _tokens(self) -> set[bytes]:
        """Those that somebody knows, be it a database."""
        return set().union(
            *(database.tokens() for database in self.databases.values()),
            *self._known.values(),
            (decision.token for decision in self.store.decisions()),
            self.seen.decided.values(),
        )

    def effect(self, name: str, ctx: Context, actor: Actor) -> None:
        """Everywhere."""
        actor.tell("handler", "begins")
        for database in self.databases:
            session = ctx.database(database).session
            (session.update if self.options.updates else session.insert)(name)
        super().effect(name, ctx, actor)

    def after_death(self, slot: int) -> None:
        """Nobody knows any more what it knew, and its connections end."""
        dead = self.actors[slot]
        self._known.pop(dead.name, None)
        for database, branch in self._branches.pop(dead.name, ()):
            self.disconnects(dead, database, branch)
        super().after_death(slot)

    # What the ports ask ---------------------------------------------------------------------------------------------

    def point(
        self,
        actor: Actor,
        call: str,
        *,
        ready: Callable[[], bool] | None = None,
        always: tuple[str, ...] = (),
        faults: tuple[str, ...] = (),
    ) -> str:
        """Stop before a call; who holds a claim may lose it first, and makes the call all the same."""
        while True:
            more = (SESSION_ENDS,) if actor.name in self.claimed else ()
            chosen = actor.point(call, ready=ready, always=always, faults=(*faults, *more))
            if chosen != SESSION_ENDS:
                return chosen
            self.claimed.pop(actor.name).lose()
            actor.tell(chosen)

    def knows(self, actor: Actor, tokens: Iterable[bytes]) -> None:
        """It has seen these."""
        self._known.setdefault(actor.name, set()).update(tokens)

    def is_ours(self, branch: BranchId) -> bool:
        """Whether it is this inbox's."""
        return branch.inbox == self.decisions.inbox()

    def decides(self, decision: Decision) -> None:
        """The inbox commits it."""
        unprepared = [
            prepared.database
            for number, prepared in enumerate(decision.branches)
            if self._name(decision, number) not in self.databases[prepared.database].prepared
        ]
        self.seen.decides(decision, unprepared)

    def _name(self, decision: Decision, number: int) -> str:
        return BranchId(self.decisions.inbox(), decision.consumer, decision.key, decision.token, number).text

    def arrives_later(self, what: str, token: bytes, do: Callable[[], object], detail: object) -> None:
        """A request is under way, which nobody waits for any more; till then its token is not another's."""
        self._known[what] = {token}

        def arrive() -> None:
            do()
            del self._known[what]

        self.later("network", what, arrive, detail)

    def prepares_later(self, actor: Actor, database: InMemoryDatabase, branch: InMemoryBranch) -> None:
        """PREPARE is under way; until it arrives the server keeps the connection."""
        self._preparing.add(branch.id.text)

        def arrive() -> None:
            branch.prepare()
            self._preparing.remove(branch.id.text)
            self.disconnects(actor, database, branch)

        what = f"PREPARE of {actor.name} arrives in {database.name}, {numbered(branch.id.token)}"
        self.later("network", what, arrive, ("prepares", branch.id.text))

    def disconnects(self, actor: Actor, database: InMemoryDatabase, branch: InMemoryBranch) -> None:
        """The client's end is gone; the server sees it at any time, if it makes a difference there."""

        def notice() -> None:
            database.disconnect(branch.id)
            self.ends += 1

        if branch.id.text in self._preparing or not database.is_connected(branch.id):
            return
        if database.minds(branch.id):
            what = f"{database.name} sees the end of a connection of {actor.name}, {numbered(branch.id.token)}"
            self.later("database", what, notice, ("ends", branch.id.text))
        else:
            notice()

    def begins(self, actor: Actor, database: InMemoryDatabase, branch: InMemoryBranch) -> None:
        """It has a connection there."""
        self._branches[actor.name].append((database, branch))

    def _missing(self, message: str) -> list[str]:
        return [name for name, database in self.databases.items() if not database.rows[message]]

    def _in_doubt(self) -> list[str]:
        """All of ours that is prepared or decided, and has not ended."""
        found = ((name, doubt.id) for name, database in self.databases.items() for doubt in database.in_doubt())
        return [
            *(
                f"a transaction of {self.messages[branch.key]} in {name}"
                for name, branch in found
                if self.is_ours(branch)
            ),
            *(f"the decision about {self.messages[decision.key]}" for decision in self.decisions.unfinished()),
        ]

    def moves(self) -> list[Move]:
        """Without the faults that are left out, and the others first: most of what is wrong is found sooner by these."""
        faults, others = [], []
        for move in super().moves():
            if move.slot == SURROUNDINGS or move.option not in self.actors[move.slot].faults:
                others.append(move)
            elif self.options.only in move.option:
                faults.append(move)
        return faults + others

    # The state, and the end -----------------------------------------------------------------------------------------

    def picture(self) -> int:
        """All of the inbox's world, and what there is beside."""
        tokens = self._tokens()
        return hash(
            (
                super().picture(),
                tuple(database.picture(tokens) for database in self.databases.values()),
                frozenset((decision.key, decision.token) for decision in self.store.decisions()),
                self._recoveries,
            )
        )

    def unseen(self) -> frozenset[str]:
        """And what changes only a transaction of one's own."""
        return super().unseen() | {"note the decision", *self._unseen}

    def something_is_left(self) -> bool:
        """And whatever is in doubt."""
        return super().something_is_left() or bool(self._in_doubt())

    def helps(self) -> None:
        """A last recovery."""
        super().helps()
        if self._in_doubt():
            self._recovery(Actor(self, "recovery at the end", lambda _: None)).run_once()

    def see(self) -> None:
        """And whether all databases agree."""
        super().see()
        for name in sorted({str(arrival.message.message_id) for arrival in self._setting.arrivals}):
            there = {database.name: database.rows[name] for database in self.databases.values()}
            self.seen.agrees(name, self.effects.count(name), there)
        self.seen.is_left(self._in_doubt(), self._planted, self._foreign())


def _token(number: int) -> bytes:
    return number.to_bytes(TOKEN_BYTES)
