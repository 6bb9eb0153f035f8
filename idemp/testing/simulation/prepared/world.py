"""One world per schedule: a home, a barrier, a broker, a consumer's inbox and a clock, and the real code on them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from idemp.errors import BrokerError, IdempError, StoreError
from idemp.prepared.port import Answer, Prepared, State
from idemp.settings import Settings
from idemp.telemetry import SILENT
from idemp.testing.crash_points import Crash
from idemp.testing.simulation.inboxes import QUEUE, TYPE
from idemp.testing.simulation.ports import SteppedPublisher
from idemp.testing.simulation.prepared.ports import LocalWork, LocalWorkFailed, SteppedBarrier, SteppedHome
from idemp.testing.simulation.prepared.witness import PreparedWitness
from idemp.testing.simulation.stage import Actor, Role, Step
from idemp.testing.simulation.world import Setting, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.app import App
    from idemp.messages import Output
    from idemp.prepared import PreparedMessages
    from idemp.testing.simulation.prepared import PreparedOptions

_SETTINGS: Final = Settings()
_MINUTE: Final = timedelta(minutes=1)
_OPEN: Final = frozenset({State.PREPARED, State.COMMITTED})


@dataclass(frozen=True)
class PreparedSetting(Setting):
    """What all worlds of one simulation share."""

    options: PreparedOptions

    def world(self) -> PreparedWorld:
        """A world before its first choice."""
        world = PreparedWorld(self)
        world.begin()
        return world

    @cached_property
    def arrivals(self) -> list[Output]:
        """Nothing is in the queue at first."""
        return []

    @cached_property
    def keys(self) -> list[str]:
        """Those of all messages."""
        return [f"order-{number + 1}" for number in range(self.options.messages)]


class PreparedWorld(World):
    """One run of a simulation of prepared messages.

    Args:
        setting: what all worlds share.

    Attributes:
        home: where messages are prepared.
        barrier: in the store of the local work.
        seen: the witness.
    """

    options: PreparedOptions

    def __init__(self, setting: PreparedSetting) -> None:
        super().__init__(setting)
        self.home = self.options.parts.home(self.clock)
        self.barrier = self.options.parts.barrier(self.clock)
        guessed = self.options.answers == "guesses"
        self.witness = self.seen = PreparedWitness(self.breaks, decides=self.home.decides, guessed=guessed)
        self._keys = setting.keys
        self._consumer = setting.consumer
        self._runs = dict.fromkeys(setting.keys, self.options.runs)
        self._checks = self.options.checks
        self._sweeps = self.options.sweeps

    # Who acts -------------------------------------------------------------------------------------------------------

    def roles(self) -> list[Role]:
        """Consumers, producers and checkers."""
        producers = []
        for number in range(self.options.producers):
            key = self._keys[number % len(self._keys)]
            producers.append(Role(f"producer {number + 1}", partial(self._produce, key), alike=f"producer of {key}"))
        checkers = [
            Role(f"checker {number + 1}", self._check, alike="checker") for number in range(self.options.checkers)
        ]
        sweepers = [Role("sweeper", self._sweep)] if self._sweeps else []
        return [*super().roles(), *producers, *checkers, *sweepers]

    def _produce(self, key: str, actor: Actor) -> None:
        _, barrier, messages = self._parts(actor)
        run = self._submit if self.options.style == "submit" else self._step_by_step
        while self._runs[key] > 0:
            self._runs[key] -= 1
            actor.memory = hash(key)
            barrier.attempt = attempt = self.seen.begins(key)
            told, committed = "done", "yes"
            try:
                run(messages, barrier, key)
                attempt.done = True
            except IdempError as error:
                told, committed = type(error).__name__, error.committed
            except LocalWorkFailed as error:
                told, committed = repr(error), "no"
            actor.tell("is told", f"{told}; committed: {committed}")
            self.seen.tells(attempt, committed)

    def _submit(self, messages: PreparedMessages, _: SteppedBarrier, key: str) -> None:
        messages.submit_after(LocalWork.write, {"id": key}, to=QUEUE, type=TYPE, key=key)

    def _step_by_step(self, messages: PreparedMessages, barrier: SteppedBarrier, key: str) -> None:
        with messages.prepare({"id": key}, to=QUEUE, type=TYPE, key=key) as half:
            try:
                with barrier.begin() as work:
                    if messages.barrier is not None:
                        half.pass_barrier(work)
                    work.write()
            except LocalWorkFailed:
                half.rollback()
                raise
            half.commit()

    def _check(self, actor: Actor) -> None:
        home, _, messages = self._parts(actor)
        while True:
            if not actor.stained:
                actor.memory = 0  # a checker knows nothing of earlier rounds
            try:
                messages.run_once()
            except (StoreError, BrokerError) as error:  # as its loop does
                actor.tell("gives the round up", type(error).__name__)
            except Crash:
                home.dies()
                raise

    def _sweep(self, actor: Actor) -> None:
        messages = self._parts(actor)[2]
        while self._sweeps > 0:
            actor.point("sweep", ready=self._something_is_final)
            self._sweeps -= 1
            actor.tell("sweep")
            try:
                messages.purge()
            except StoreError as error:  # as the checker's loop does
                actor.tell("gives the sweep up", type(error).__name__)

    def _parts(self, actor: Actor) -> tuple[SteppedHome, SteppedBarrier, PreparedMessages]:
        home = SteppedHome(self.home, self, actor)
        barrier = SteppedBarrier(self.barrier, self, actor, home)
        app = SimpleNamespace(
            name=QUEUE,
            clock=self.clock,
            settings=_SETTINGS,
            consumer=self._consumer,
            telemetry=SILENT,
            store=self._consumer.store,
            broker=SimpleNamespace(publisher=lambda: SteppedPublisher(self.broker.publisher(), self, actor)),
            prepared=None,
        )
        options = self.options
        guarded = options.answers == "barrier"
        messages = options.parts.messages(
            cast("App", app),
            cast("Any", home),
            barrier=cast("Any", barrier) if guarded else None,
            checker=None if guarded else self._checker(actor, home),
            check_after=options.check_after,
            max_checks=options.max_checks,
            retention=timedelta(0),
        )
        messages.deciding.pause = lambda _: None
        return home, barrier, messages

    def _checker(self, actor: Actor, home: SteppedHome) -> Callable[[Prepared], Answer]:
        def look(prepared: Prepared) -> Answer:
            actor.point("check")
            home.asked.add(prepared.id)
            seen = self.options.answers != "unknown" and prepared.key in self.seen.worked
            unseen = Answer.ROLLBACK if self.options.answers == "guesses" else Answer.UNKNOWN
            answer = Answer.COMMIT if seen else unseen
            actor.tell("check", answer.value)
            return answer

        return look

    # What the ports ask ---------------------------------------------------------------------------------------------

    def something_is_due(self) -> bool:
        """Whether a checker has a round left, and something to take."""
        return self._checks > 0 and self.home.is_due()

    def _something_is_final(self) -> bool:
        return any(state.is_final for states in self.home.states().values() for state in states)

    def takes(self) -> None:
        """A checker begins a round."""
        self._checks -= 1

    def looks(self) -> None:
        """The home may have changed."""
        if self.home.decides:
            self.seen.sees(self.home.states())

    def rounded(self, retry_in: timedelta) -> timedelta:
        """In whole minutes, up."""
        return -(-retry_in // _MINUTE) * _MINUTE

    def told(self, output: Output) -> str:
        """An output in words."""
        return f"message of {output.message.causation_id}"

    # The state, and the end -----------------------------------------------------------------------------------------

    def picture(self) -> int:
        """All of the inbox's world, and what there is beside."""
        return hash(
            (
                super().picture(),
                self.home.picture(),
                self.barrier.picture(),
                tuple(self._runs.values()),
                self._checks,
                self._sweeps,
            )
        )

    def unseen(self) -> frozenset[str]:
        """And the local work, whose effect is seen from its COMMIT on."""
        return super().unseen() | {"work"}

    def rest(self) -> None:
        """And whatever is published is consumed."""
        self.resting = True
        if not self.options.workers:
            self._roles.append(Role("consumer", self._work))
            self._begin(len(self._roles) - 1)
        super().rest()

    def something_is_left(self) -> bool:
        """Whatever is undecided, or not published yet; and what is parked, if somebody would know its fate now."""
        states = set[State]().union(*self.home.states().values())
        return super().something_is_left() or bool(states & _OPEN) or bool(self._parked())

    def helps(self) -> None:
        """A last checker, and somebody who resumes what is parked."""
        super().helps()
        for key, id_ in self._parked().items():
            self.steps.append(Step("operator", f"resumes {key}", ""))
            self.home.resume(id_)
            self.looks()
        if self.home.is_due():
            self._checks += 1
            self._parts(Actor(self, "checker at the end", lambda _: None))[2].run_once()

    def _parked(self) -> dict[str, Any]:
        if self.options.answers != "barrier":
            return {}
        states = self.home.states()
        return {key: id_ for key, id_ in self.seen.ids.items() if State.PARKED in states.get(id_, ())}

    def see(self) -> None:
        """What became of each key."""
        states = self.home.states()
        known = self.options.answers in {"barrier", "guesses"}
        for key in self._keys:
            of_key = states.get(self.seen.ids[key], set()) if key in self.seen.ids else set()
            self.seen.comes_to_rest(key, self.effects.count(key), of_key, known=known)
