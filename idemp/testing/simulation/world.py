"""One world per schedule: a store, a broker and a clock of its own, and the real code on them."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from idemp.app import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.consuming import KeptAlive
from idemp.errors import StoreError, StoreUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.messages import Message, Output, OutputKind
from idemp.policy import Idempotent
from idemp.protocol import Protocol
from idemp.settings import Settings
from idemp.suspects import Turns
from idemp.telemetry import SILENT
from idemp.testing.simulation.inboxes import QUEUE, TYPE, WINDOW
from idemp.testing.simulation.ports import (
    CONFIRM_LOST,
    HANDLER_FAILS,
    HANDLER_LOSES,
    NACKED,
    PUBLISH_RAISES,
    PUBLISH_RAISES_AFTER,
    SteppedBroker,
    SteppedPublisher,
)
from idemp.testing.simulation.stage import Actor, Event, Move, Role, Stage, Step
from idemp.testing.simulation.surroundings import START, PicturedBroker, Rounds, SimulatedClock, Told, WorkersClock
from idemp.testing.simulation.witness import COMES_TO_REST, Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.context import Context
    from idemp.testing.simulation.options import Options
    from idemp.testing.simulation.ports import SteppedReceiver, SteppedStore
    from idemp.work import Consumer, Registration

_OUTPUTS: Final = "outputs"
COPY_HEADER: Final = "copy"
_MINUTE: Final = timedelta(minutes=1)
_MOST_RESTING: Final = 300


@dataclass(frozen=True)
class Setting:
    """What all worlds of one simulation share."""

    options: Options

    def world(self) -> World:
        """A world before its first choice."""
        world = World(self)
        world.begin()
        return world

    @cached_property
    def consumer(self) -> Consumer:
        """A consumer whose store is given later."""
        app = App(QUEUE, store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings())
        app.handler(dict, type=TYPE, policy=self.policy)(_unused)
        return replace(app.consumer, telemetry=SILENT, wrap=None, unwrap=None)

    @property
    def policy(self) -> Idempotent:
        """Of the one message type."""
        entity = "about" if self.options.parts.inbox.per_entity else None
        return Idempotent(
            retention=WINDOW,
            claim=self.options.claim,
            attempts=self.options.attempts,
            batch=self.options.together,
            entity=entity,
        )

    @cached_property
    def registration(self) -> Registration:
        """How the one message type is handled, but for the handler. Waiting for a claim is a matter of the schedule."""
        found = self.consumer.find(Message(body=b"{}", type=TYPE))
        return replace(found, policy=found.policy.model_copy(update={"claim_wait": timedelta(0)}))

    @cached_property
    def arrivals(self) -> list[Output]:
        """What is in the queue at first: all messages, then all of them again."""
        names = [f"message-{number + 1}" for number in range(self.options.messages)] * self.options.copies
        return [
            Output(
                id=UUID(int=number),
                ordinal=0,
                kind=OutputKind.SEND,
                exchange="",
                routing_key=QUEUE,
                message=Message(
                    body=self._body(number % self.options.messages),
                    type=TYPE,
                    message_id=name,
                    timestamp=START,
                    headers={COPY_HEADER: number // self.options.messages + 1},
                ),
            )
            for number, name in enumerate(names)
        ]

    def _body(self, number: int) -> bytes:
        about = f',"about":"entity-{number % self.options.entities + 1}"' if self.options.parts.inbox.per_entity else ""
        return f'{{"id":"message-{number + 1}"{about}}}'.encode()


class World(Stage):
    """One run of a simulation.

    Args:
        setting: what all worlds share.

    Attributes:
        receivers: the one that each worker has, or had last.
        stopping: the workers that are told to stop, and have not ended.
    """

    publish_faults = (NACKED, CONFIRM_LOST, PUBLISH_RAISES, PUBLISH_RAISES_AFTER)

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        super().__init__(options.crashes, options.faults, options.outages)
        self.receivers: dict[str, SteppedReceiver] = {}
        self.stopping: set[str] = set()
        self._stops = options.stops
        self._stop_events: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._setting = setting
        self.options = options
        self.clock = SimulatedClock()
        self.inbox = options.parts.inbox(self.clock, options.parts)
        self.effects = self.inbox.effects
        self.broker = PicturedBroker(self.clock)
        self.broker.declare(Topology(exchange="idemp", queues=(QUEUE, _OUTPUTS)))
        self.broker.publisher().publish(setting.arrivals, 1)
        self.witness = Witness(self.breaks)
        self.units: dict[int, str] = {}
        self.ends = 0  # of transactions; whoever waits for a claim looks again
        self._jumps = list(options.jumps)
        self._jump_event = ""
        self._rounds = [options.relay_rounds] * options.relays
        self._purges = options.purges
        self._roles: list[Role] = []
        self._lives: dict[int, int] = {}

    # Who acts -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Everybody comes up to the first call."""
        self._roles = self.roles()
        for slot in range(len(self._roles)):
            self._begin(slot)
        self._offer_jump()

    def roles(self) -> list[Role]:
        """Who there is, slot by slot."""
        workers = [Role(f"worker {number + 1}", self._work, alike="worker") for number in range(self.options.workers)]
        relays = [Role(f"relay {number + 1}", partial(self._ship, number)) for number in range(self.options.relays)]
        cleaners = [Role("cleaner", self._clean, mortal=self.inbox.mortal_cleaner)] if self.options.purges else []
        return [*workers, *relays, *cleaners]

    def _begin(self, slot: int) -> None:
        self._lives[slot] = life = self._lives.get(slot, 0) + 1
        role = self._roles[slot]
        name = role.name + (f", life {life}" if life > 1 else "")
        actor = Actor(self, name, role.live, mortal=role.mortal)
        if slot < len(self.actors):
            self.actors[slot] = actor
        else:
            self.actors.append(actor)
        actor.start()

    def after_death(self, slot: int) -> None:
        """A new process takes its place, unless it is a relay that stays dead."""
        if slot < self.options.workers or self.options.relay_returns:
            self._begin(slot)

    def _work(self, actor: Actor) -> None:
        while self._works(actor):
            actor.memory, actor.stained = 0, False  # another process takes its place

    def _works(self, actor: Actor) -> bool:
        """One process, up to its end; whether it was told to end."""
        store = self.inbox.of(self, actor)
        broker = SteppedBroker(self, actor, store)

        def protocol(publisher: SteppedPublisher, turns: Turns) -> Protocol:
            dispatcher = self.options.parts.dispatcher(
                publisher, cast("Any", store), WorkersClock(self.clock, actor), batch=self.options.batch
            )
            consumer = self.consumer_of(actor, store)
            return self.options.parts.protocol(consumer, dispatcher, pause=lambda _: None, turns=turns)

        app = SimpleNamespace(
            name=QUEUE,
            queue=QUEUE,
            clock=self.clock,
            broker=broker,
            protocol=protocol,
            topology=lambda: None,
            prefetch=max(self.options.window, self.options.together),
        )
        stop = Told()
        with self._may_be_stopped(actor, stop):
            self.options.parts.consuming(cast("App", app), stop, KeptAlive(), Turns(solitary=True)).run()
        if not actor.stained:
            self.witness.ends_at_work(actor.name, store.unrecorded)
        actor.tell("ends")
        return True

    @contextmanager
    def _may_be_stopped(self, actor: Actor, stop: Told) -> Iterator[None]:
        what = f"tells {actor.name} to stop"

        def tell() -> None:
            stop.set()
            actor.memory = hash((actor.memory, what))
            self.stopping.add(actor.name)
            self._stops -= 1
            self._stop_events.discard(what)
            if not self._stops:
                self._offer_no_stop()

        if self._stops and not self.resting:
            self._stop_events.add(what)
            self.later("operator", what, tell)
        try:
            yield
        finally:
            self.stopping.discard(actor.name)
            if what in self._stop_events:  # it died
                self._stop_events.discard(what)
                self.events.pop(what, None)

    def _offer_no_stop(self) -> None:
        for what in self._stop_events:
            self.events.pop(what, None)
        self._stop_events.clear()

    def consumer_of(self, actor: Actor, store: SteppedStore) -> Consumer:
        """What all deliveries of one worker share."""
        find = self._found(actor, store)
        return replace(self._setting.consumer, store=cast("Any", store), clock=self.clock, find=lambda _: find)

    def _found(self, actor: Actor, store: SteppedStore) -> Registration:
        def handler(body: dict[str, Any], ctx: Context) -> None:
            chosen = actor.point("handler", faults=(HANDLER_FAILS,), outages=(HANDLER_LOSES,))
            self.effect(body["id"], ctx, actor)
            for number in range(self.options.outputs):
                ctx.send({"of": body["id"], "n": number}, to=_OUTPUTS, type="shop.Sold")
            actor.tell(chosen)
            if chosen == HANDLER_FAILS:
                raise ValueError("the simulation says so")
            if chosen == HANDLER_LOSES and store.unit is not None:
                store.unit.lose_connection()
                raise StoreUnavailable("The simulation cut the connection that the handler writes on.")

        return replace(self._setting.registration, handler=handler)

    def effect(self, name: str, ctx: Context, actor: Actor) -> None:
        """What the handler writes."""
        del actor
        self.effects.write(cast("Any", ctx), name)

    def _ship(self, relay: int, actor: Actor) -> None:
        store = self.inbox.of(self, actor)
        publisher = SteppedPublisher(self.broker.publisher(), self, actor, store)

        def goes_on() -> bool:
            if self._rounds[relay] <= 0:
                return False
            with suppress(StoreError):  # beats have a thread of their own
                store.beat(actor.name, relay=True, consumers=[])
            self._rounds[relay] -= 1
            return True

        self.options.parts.relay(cast("Any", store), publisher).run(Rounds(goes_on))

    def _clean(self, actor: Actor) -> None:
        store = self.inbox.of(self, actor)
        cleaner = self.options.parts.cleaner(cast("Any", store), QUEUE, {TYPE: WINDOW})
        while self._purges > 0:
            cleaner.run()
            self._purges -= 1

    # What happens around them ---------------------------------------------------------------------------------------

    def later(self, who: str, what: str, do: Callable[[], object], detail: object = None) -> None:
        """Something that happens at any time from now on."""
        if self.broken is None:
            self.events[what] = Event(who, do, detail)

    def numbered(self, what: str) -> str:
        """A name for something that may happen several times."""
        self._numbers[what] = number = self._numbers.get(what, 0) + 1
        return what if number == 1 else f"{what}, {number}"

    def decides_later(
        self, actor: Actor, arrives: Callable[[], None], ends: Callable[[], None], handled: Sequence[str]
    ) -> None:
        """A COMMIT that was given up takes place at any time from now on, or does not."""
        kinds = {"commits": arrives, "rolls back": ends}
        names = {kind: self.numbered(f"{kind} what {actor.name} gave up") for kind in kinds}

        def happens(do: Callable[[], None]) -> Callable[[], None]:
            def either() -> None:
                for name in names.values():
                    self.events.pop(name, None)
                do()

            return either

        for kind, do in kinds.items():
            self.later("database", names[kind], happens(do), (kind, *handled))

    def _offer_jump(self) -> None:
        if self._jumps:
            self._jump_event = f"{self._jumps[0]} passes"
            self.later("clock", self._jump_event, self._jump, self._jump_event)

    def _jump(self) -> None:
        self._pass(self._jumps.pop(0))
        self._offer_jump()

    def _pass(self, by: timedelta) -> None:
        """Time passes, in which the consumer consumes: as if its workers had beaten all the while."""
        self.clock.advance(by)
        self.inbox.consumes(START, self.clock.time)

    # What the ports ask ---------------------------------------------------------------------------------------------

    def something_pends(self) -> bool:
        """Whether any output has no confirm yet."""
        return self.inbox.pends()

    def something_waits(self) -> bool:
        """Whether the broker has something to deliver."""
        return self.broker.waits()

    def something_is_stored(self) -> bool:
        """Whether the inbox has anything for the cleaner."""
        return self.inbox.keeps()

    def told(self, output: Output) -> str:
        """An output in words."""
        return f"output {output.ordinal + 1} of {output.message.causation_id}"

    # The state, and the end -----------------------------------------------------------------------------------------

    def picture(self) -> int:
        """A digest of everything that the future depends on: two schedules that lead here go on alike.

        Processes of one kind are alike, so it does not matter which of them is where.
        """
        stands = sorted(
            (role.alike or role.name, hash((actor.memory, actor.offers, actor.always, self.inbox.held(self, actor))))
            for role, actor in zip(self._roles, self.actors, strict=True)
            if not actor.ended
        )
        return hash(
            (
                tuple(stands),
                self.inbox.picture(),
                self.broker.picture(),
                self.witness.picture(),
                tuple(sorted(hash((event.who, event.detail)) for event in self.events.values())),
                tuple(actor.ready() for actor in self.actors if actor.always and actor.ready is not None),
                (self.clock.time, self.crashes, self.faults, self._purges, *self._rounds, self.outages, self._stops),
            )
        )

    def fewer_moves(self) -> list[Move]:
        """Enough of the moves that can happen next.

        A call that no other process sees, and that sees nothing of others, may as well happen at once; and a death before
        it is like one after it.
        """
        unseen = self.unseen()
        for slot, actor in enumerate(self.actors):
            if actor.offers and actor.offers[0] in unseen and not self._may_fail(actor):
                return [Move(slot, actor.offers[0])]
        return self.moves()

    def _may_fail(self, actor: Actor) -> bool:
        return bool((self.faults and actor.faults) or (self.outages and actor.outages))

    def unseen(self) -> frozenset[str]:
        """Calls that no other process sees, and that see nothing of others."""
        return self.inbox.unseen(time_stands=not self._jumps)

    def rest(self) -> None:
        """Let everything come to rest, without choices and faults, and see what became of each message."""
        self.resting = True
        self.events.pop(self._jump_event, None)
        self._offer_no_stop()
        for _ in range(_MOST_RESTING):
            if self.broken is not None:
                return
            if not self._goes_on():
                self.see()
                return
        self.breaks(COMES_TO_REST, f"after {_MOST_RESTING} turns there is still something to do")

    def _goes_on(self) -> bool:
        """Let somebody go on; whether anybody could."""
        for name in list(self.events):
            if name in self.events:
                self.happen(name)
        alive = [actor for actor in self.actors if not actor.ended]
        for actor in alive:
            if actor.ready is None or actor.ready():
                actor.resume(actor.offers[0])
                return True
        for actor in alive:
            if actor.always:
                actor.resume(actor.always[0])
                return True
        if not self.something_is_left():
            return False
        self._pass(_MINUTE)
        self.steps.append(Step("clock", f"{_MINUTE} passes", ""))
        self.helps()
        return True

    def something_is_left(self) -> bool:
        """Whether time has to pass: nobody can go on, and not all is done."""
        return bool(self.broker.entries(QUEUE) or (self._relays_return() and self.something_pends()))

    def helps(self) -> None:
        """Do in the end what those did not who have no rounds left."""
        if self._relays_return() and self.something_pends():
            self._last_relay()

    def _relays_return(self) -> bool:
        return self.options.relays > 0 and self.options.relay_returns

    def _last_relay(self) -> None:
        actor = Actor(self, "relay at the end", lambda _: None)
        store = self.inbox.of(self, actor)
        publisher = SteppedPublisher(self.broker.publisher(), self, actor, store)
        self.options.parts.relay(cast("Any", store), publisher).run_once()

    def see(self) -> None:
        """What became of each message, now that nothing moves any more."""
        if self.options.relays and not self.options.relay_returns:
            self._see_what_pends()
        parked = {message.message_id for message in self.broker.browse(f"{QUEUE}.dead", 1_000)}
        late = self.clock.time - START > WINDOW
        for arrival in self._setting.arrivals[: self.options.messages]:
            name = str(arrival.message.message_id)
            if late and name in parked and self.inbox.would_resend(self.witness.committed.get(name, ())):
                continue  # its COMMIT was slower than the window, which is over; a replay finds the claim, and sends all
            self.witness.rests(name, self.effects.count(name), parked=name in parked, late=late)

    def _see_what_pends(self) -> None:
        """What the dead relay left is in the inbox, and the next relay, whenever it comes, sends it."""
        self.witness.stands(self.inbox.pending())
        if self.something_pends() and self.broken is None:
            self._pass(_MINUTE)
            self._last_relay()


def _unused(message: dict[str, Any]) -> None:
    """Stands for the handler until there is one per process."""
