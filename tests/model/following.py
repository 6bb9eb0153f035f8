"""Follows the model beside the real code: each step of a simulation has to be one of the model's, with the same effect.

What was seen does not say in which state the model is, so that all possible ones are kept. A step of the code that leads to
none of them breaks a promise of the simulation, which then shows the shortest schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from idemp.testing.simulation import Simulation
from idemp.testing.simulation.inboxes import QUEUE
from idemp.testing.simulation.ports import GIVES_UP
from idemp.testing.simulation.stage import SURROUNDINGS, Move
from idemp.testing.simulation.surroundings import START
from idemp.testing.simulation.world import Setting, World

if TYPE_CHECKING:
    from idemp.testing.simulation.stage import Step
    from tests.model.promela import Model, State

FOLLOWED: Final = "the model has each step of the code"
MESSAGE: Final = "message-1"
EXPIRED: Final = "world: the window of message 0 is over"
PURGED: Final = "cleaner: purges message 0"
NOT_IN_THE_MODEL: Final = re.compile(
    r"settle, the link is lost|handler, the connection"
    r"|(claim|begin|store|late|note|relay|beat|take|settle|purge)\b.*, (it|its|the) "
)
"""Failures after which a worker goes on with what it knows; in the model it dies instead."""


@dataclass
class Followed:
    """What was seen of the model by all schedules.

    Attributes:
        model: the model.
        lines: the alternatives that were taken.
    """

    model: Model
    lines: set[int] = field(default_factory=set)
    _settled: dict[State, frozenset[State]] = field(default_factory=dict)

    def begun(self, *, relay: bool) -> frozenset[State]:
        """The states in which the model may be at first."""
        return self.rest([self.model.with_value(self.model.start, "relay_runs", int(relay))])

    def after(self, states: Iterable[State], label: str) -> frozenset[State]:
        """The states in which it may be after a step with this label."""
        found = set()
        for state in states:
            for _, outcome in self.model.steps(state):
                if outcome.label == label:
                    found.add(outcome.state)
                    self.lines |= outcome.lines
        return self.rest(found)

    def may(self, state: State, label: str) -> bool:
        """Whether a step with this label is possible."""
        return any(outcome.label == label for _, outcome in self.model.steps(state))

    def rest(self, states: Iterable[State]) -> frozenset[State]:
        """With all steps that nobody sees, and those of the world."""
        return frozenset().union(*(self._rest_of(state) for state in states))

    def _rest_of(self, state: State) -> frozenset[State]:
        if state not in self._settled:
            found, left = {state}, [state]
            while left:
                for who, outcome in self.model.steps(left.pop()):
                    unseen = not outcome.label or (who == "World" and outcome.label != EXPIRED)
                    if unseen and outcome.state not in found:
                        self.lines |= outcome.lines
                        found.add(outcome.state)
                        left.append(outcome.state)
            self._settled[state] = frozenset(found)
        return self._settled[state]


class FollowedWorld(World):
    """A world beside which the model is followed."""

    def __init__(self, setting: FollowedSetting) -> None:
        super().__init__(setting)
        self._followed = setting.followed
        self._model = setting.followed.model
        self._states = self._followed.begun(relay=self.options.relays > 0)
        self._failed: set[str] = set()
        self._claimed: set[str] = set()
        self._marked: dict[str, int] = {}
        self._taken = False
        self._seen = 0

    def make(self, move: Move) -> None:
        """Let it happen in the model, too."""
        before = set(self._holders())
        super().make(move)
        self._follow(before)

    def _goes_on(self) -> bool:
        before = set(self._holders())
        goes_on = super()._goes_on()
        self._follow(before)
        return goes_on

    def moves(self) -> list[Move]:
        """But for what the model does not have."""
        return [move for move in super().moves() if self._is_in_the_model(move)]

    def _is_in_the_model(self, move: Move) -> bool:
        if move.option.endswith(" passes") and self.options.purges:
            return self.effects.count(MESSAGE) > 0  # the window of what was never handled is no matter of the inbox
        if move.option == GIVES_UP:
            return bool(self._holders())  # else as if it had given up before the holder's end, which changes nothing
        return move.slot == SURROUNDINGS or NOT_IN_THE_MODEL.match(move.option) is None

    def picture(self) -> int:
        """Also where the model may be."""
        return hash((super().picture(), self._states, frozenset(self._failed), frozenset(self._claimed), self._taken))

    def breaks(self, promise: str, detail: str) -> None:
        """The other promises are looked after elsewhere."""
        if promise == FOLLOWED:
            super().breaks(promise, detail)

    def _follow(self, held_before: set[object]) -> None:
        ended = held_before != set(self._holders())
        for step in self.steps[self._seen :]:
            for label in self._labels(step, ended=ended):
                self._states = self._followed.after(self._states, label)
                if not self._states:
                    self.breaks(FOLLOWED, f"the code went on with {label!r} ({step}), which the model can't")
                    return
        self._seen = len(self.steps)
        seen = self._observed()
        matching = frozenset(state for state in self._states if self._shown(state) == seen)
        if not matching and self.broken is None:
            others = sorted({str(dict(zip(OBSERVED, self._shown(state), strict=True))) for state in self._states})
            self.breaks(
                FOLLOWED, f"the code has {dict(zip(OBSERVED, seen, strict=True))}, the model {' or '.join(others)}"
            )
        self._states = matching

    # What the code does, in the words of the model ------------------------------------------------------------------------

    def _labels(self, step: Step, *, ended: bool) -> Iterator[str]:
        who, _, number = step.who.partition(",")[0].partition(" ")
        call, answer = step.call, step.answer
        if who == "worker":
            yield from self._of_worker(f"consumer {int(number) - 1}", call, answer)
        elif who == "relay":
            yield from self._of_relay(call, answer)
        elif who == "cleaner" and call == "purge":
            yield from self._of_cleaner(kept=answer.startswith("0 "))
        elif who == "clock" and self.options.purges and not self.resting:
            yield EXPIRED
        elif who == "database" and ended:
            how = "was committed" if call.startswith("commits") else "is rolled back"
            yield f"database: the transaction {how}"

    def _of_cleaner(self, *, kept: bool) -> Iterator[str]:
        if not kept:
            yield PURGED
        elif all(self._followed.may(state, PURGED) for state in self._states):
            self.breaks(FOLLOWED, "the code keeps a claim that the model purges")

    def _of_worker(self, who: str, call: str, answer: str) -> Iterator[str]:
        if call in {"late before", "dies"} and who in self._claimed:  # the model knows the age when it claims
            self._claimed.discard(who)
            late = call == "late before" and answer > START.isoformat(" ", "seconds")
            yield f"{who}: CLAIMED; {who}: LateMessage" if late else f"{who}: CLAIMED"
        if call == "receive" and answer != "nothing":
            self._failed.discard(who)
            yield f"{who}: receives message 0"
        elif call == "claim":
            yield from self._of_claim(who, answer)
        elif call == "handler, it fails":
            self._failed.add(who)
            yield f"{who}: the handler fails"
        elif call.startswith("commit"):
            yield from self._of_commit(who, call, answer)
        elif call.startswith("publish"):
            confirmed = answer.endswith("confirmed")
            self._marked[who] = self._marked.get(who, 0) + confirmed
            yield f"{who}: output 1 {'confirmed' if confirmed else 'not confirmed'}"
        elif call == "record" and self._marked.pop(who, 0):
            yield f"{who}: records its marks"
        elif call == "settle":
            yield f"{who}: {'acks' if answer == 'ack' else 'parks' if answer.startswith('parked') else 'retries'}"
        elif call == "dies" and (answer != "before receive" or self._marked.get(who)):
            self._marked.pop(who, None)
            yield f"{who}: dies"

    def _of_claim(self, who: str, answer: str) -> Iterator[str]:
        if answer.startswith("duplicate"):
            yield f"{who}: DUPLICATE"
        elif who in self._failed:
            return  # a look, not a claim
        elif answer == "in flight":
            yield f"{who}: IN_FLIGHT"
        elif answer == "claimed" and self.options.purges:
            self._claimed.add(who)
        elif answer == "claimed":
            yield f"{who}: CLAIMED"

    @staticmethod
    def _of_commit(who: str, call: str, answer: str) -> Iterator[str]:
        if call == "commit":
            yield f"{who}: COMMIT"
        elif call == "commit, it is refused":
            yield f"{who}: COMMIT refused"
        else:
            yield f"{who}: COMMIT, no answer"
            if answer:
                yield f"database: the transaction {'was committed' if answer == 'committed' else 'is rolled back'}"

    def _of_relay(self, call: str, answer: str) -> Iterator[str]:
        if call == "take pending" and answer != "nothing due":
            self._taken = True
            yield "relay: takes output 1"
        elif call.startswith("publish"):
            self._taken = answer.endswith("confirmed")
            yield f"relay: output 1 {'confirmed' if self._taken else 'not confirmed'}"
        elif call == "settle pending" and self._taken:
            self._taken = False
            yield "relay: records it"
        elif call == "dies" and self._taken:
            self._taken = False
            yield "relay: dies"

    # What both of them have ---------------------------------------------------------------------------------------------

    def _holders(self) -> Any:
        return self.inbox.store.holders  # type: ignore[attr-defined]

    def _observed(self) -> tuple[int, ...]:
        content = self.inbox.store.content  # type: ignore[attr-defined]
        sendings = [item for handling in content.handlings.values() for item in handling.sendings if item.pending]
        parked = self.broker.browse(f"{QUEUE}.dead", 1)
        held = [int(actor.name in self._in_hand()) for actor in self.actors[: self.options.workers]]
        return (
            int(bool(content.handlings)),
            int(bool(sendings)),
            int(bool(self.witness.confirmed)),
            self.effects.count(MESSAGE),
            int(bool(parked)),
            int(bool(self._holders()) and not self._claimed),
            *[*held, 0][:2],
        )

    def _in_hand(self) -> set[str]:
        return {name for name, receiver in self.receivers.items() if receiver.holds}

    def _shown(self, state: State) -> tuple[int, ...]:
        model = self._model
        return (
            int(model.named(state, "inbox") == "CLAIMED"),
            int(model.value(state, "pending") > 0),
            int(model.value(state, "confirmed") > 0),
            model.value(state, "effects"),
            model.value(state, "dead"),
            int(model.value(state, "holder") != _NOBODY),
            model.value(state, "unacked", 0),
            model.value(state, "unacked", 1),
        )


OBSERVED: Final = ("inbox", "pending", "confirmed", "effects", "dead", "held", "unacked 0", "unacked 1")
_NOBODY: Final = 20


@dataclass(frozen=True)
class FollowedSetting(Setting):
    """What all worlds of one simulation share."""

    followed: Followed

    def world(self) -> World:
        """A world before its first choice."""
        world = FollowedWorld(self)
        world.begin()
        return world


class FollowedSimulation(Simulation):
    """A simulation beside which the model is followed.

    Args:
        followed: the model.
        options: as of `Simulation`.
    """

    followed: Followed

    def __init__(self, followed: Followed, **options: Any) -> None:
        super().__init__(**options)
        object.__setattr__(self, "followed", followed)  # the options of a simulation are frozen

    @cached_property
    def setting(self) -> FollowedSetting:
        """What all runs of it share."""
        return FollowedSetting(self, self.followed)
