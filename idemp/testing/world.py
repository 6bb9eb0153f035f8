"""What the runs of one machine share: a harness, what was rehearsed, and the shortest schedules of what failed."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from idemp.testing.deadline import SECONDS, HandlerHangs
from idemp.testing.execution import Tally
from idemp.testing.findings import DEFAULT_KINDS, Kind
from idemp.testing.handled import Handled
from idemp.testing.harness import Harness
from idemp.testing.options import ALL_POINTS
from idemp.testing.promises import Promises
from idemp.testing.report import NotSeen, Report
from idemp.testing.running import Run
from idemp.testing.subject import policy_in_words, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine, MetaData

    from idemp.app import App
    from idemp.messages import Message
    from idemp.testing.findings import Finding
    from idemp.testing.premises import MakesStore
    from idemp.testing.story import Action
    from idemp.wrap import Wrapped

REHEARSED: Final = 10
"""How many different messages of each type are rehearsed, as long as nothing is found."""

_SHORTENINGS: Final = 4
_PATIENCE: Final = 10.0
_UNLIKE: Final = (
    "The same steps did not fail each time: your handler does not do the same twice (a random value, the time, what is left "
    "in memory?), so that the story may not fail when it is replayed."
)
_CLAIM_WAIT: Final = timedelta(milliseconds=20)


class World:
    """What the examples of one machine share: a harness, opened at the first use, and what was rehearsed.

    Args: as for `idemp.testing.machine.redelivery_machine`.

    Example:
        >>> from contextlib import closing
        >>> from idemp import App, Idempotent
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int]) -> None: ...
        >>> with closing(World(app, None, (), None, "sqlite://", None, rehearse=False)) as world:
        ...     world.play([("publish", "orders.Place", '{"id":7}'), ("deliver",)]).story.sentences[-1]
        "The worker handled orders.Place 'message-1'."
    """

    def __init__(
        self,
        app: App | Wrapped,
        state: Callable[[Any], Any] | None,
        invariants: tuple[Callable[[Any], object], ...],
        setup: Callable[[Any], object] | None,
        database: str,
        tables: MetaData | Callable[[Engine], object] | None,
        *,
        rehearse: bool,
        detect: frozenset[Kind] | None = None,
        store: MakesStore | None = None,
        deadline: float = SECONDS,
    ) -> None:
        self.app = app
        self._state = state
        self._invariants = invariants
        self._setup = setup
        self._database = database
        self._tables = tables
        self._rehearse = rehearse and store is None
        self._store = store
        self._deadline = deadline
        self._detect = detect
        self.handled = Handled()
        self._promises: Promises | None = None
        self._clean: set[tuple[str | None, bytes]] = set()
        self._rehearsals: dict[str | None, int] = {}
        self._found: dict[tuple[str | None, bytes], list[Finding]] = {}
        self._shortest: dict[tuple[Action, ...], tuple[Action, ...]] = {}
        self._failed: dict[tuple[tuple[Action, ...], bool], Exception] = {}
        self._patience = _PATIENCE
        self._tally = Tally()
        self._notes: dict[int, tuple[Exception, list[str]]] = {}

    def run(self) -> Run:
        """A new run, in the same harness."""
        if self._promises is None:
            harness = Harness(
                self.app, database=self._database, tables=self._tables, store=self._store, deadline=self._deadline
            )
            harness.claim_wait = _CLAIM_WAIT
            self._promises = Promises(harness, state=self._state, setup=self._setup)
            self._tally = harness.tally
        return Run(self._promises, invariants=self._invariants, rehearse=self._rehearsed, handled=self.handled)

    def report(self) -> Report:
        """What was tested in all runs so far."""
        _, _, registry = told(self.app)
        policies = [f"{each.message_type} under {policy_in_words(each.policy)}" for each in registry.registrations()]
        wanted = (DEFAULT_KINDS if self._detect is None else self._detect) if self._rehearse else frozenset[Kind]()
        return Report(
            tested="; ".join(policies),
            messages=self._tally.messages,
            deliveries=self._tally.deliveries,
            deaths=tuple(point for point in ALL_POINTS if self._tally.deaths[point]),
            not_reached=(),
            looked_for=tuple(sorted(wanted)),
            not_looked_for=tuple(sorted(DEFAULT_KINDS - wanted)),
            not_seen=(*self._tally.unseen, *self._tally.not_seen),
        )

    def warn_of_unseen(self) -> None:
        """Warn of what handlers did that could not be seen."""
        for sentence in self._tally.unseen:
            warnings.warn(sentence, NotSeen, stacklevel=2)

    def play(self, schedule: Sequence[Action]) -> Run:
        """Run a schedule from the beginning to the rest."""
        run = self.run()
        for action in schedule:
            run.do(action)
        run.finish()
        return run

    def check_handled(self, *, ended: bool = True) -> None:
        """See that messages of each type were handled at all, unless something else has failed.

        Raises:
            NeverHandled: it is not so.
        """
        if not self._failed and self._promises is not None:
            try:
                self.handled.check(self._promises, ended=ended)
            except AssertionError as error:
                self._keep_notes(error)
                raise

    def raise_shortest(self, schedule: Sequence[Action], error: Exception, *, resting: bool = False) -> NoReturn:
        """Leave out every step without which it fails in the same way; the error of what is left.

        Whole steps are known here, so that it takes a run for each of them, not hundreds as for Hypothesis. It ends after
        some seconds, with what is left by then.

        Args:
            schedule: its steps.
            error: how it failed.
            resting: whether that was after all steps, when everything came to rest.
        """
        found = tuple(schedule)
        if isinstance(error, HandlerHangs):  # each run of it takes until the deadline
            error.add_note(str(self.report()))
            self._failed[found, resting] = error
            self._keep_notes(error)
            raise error from None
        if found not in self._shortest:
            began = time.monotonic()
            self._shortest[found] = self._shortened(found, type(error), began + self._patience)
            self._patience -= time.monotonic() - began
        again = self._failure(self._shortest[found])
        if again is None:
            error.add_note(_UNLIKE)
        self._failed[found, resting] = again or error
        (again or error).add_note(str(self.report()))
        self._keep_notes(again or error)
        raise again or error from None

    def _keep_notes(self, error: Exception) -> None:
        self._notes[id(error)] = (error, list(getattr(error, "__notes__", ())))

    def restore_notes(self, error: BaseException) -> None:
        """Remove from a failure of this world the notes that were added after it was raised."""
        if id(error) in self._notes:
            error.__notes__ = self._notes[id(error)][1]

    def raise_unlike(self, schedule: Sequence[Action], *, resting: bool = False) -> None:
        """After steps that went well: raise what they failed of before, if they did.

        Hypothesis, left to itself, has its own words for that, and another, longer story.
        """
        before = self._failed.get((tuple(schedule), resting)) if self._failed else None
        if before is not None:
            if _UNLIKE not in getattr(before, "__notes__", ()):
                before.add_note(_UNLIKE)
            self._keep_notes(before)
            raise before

    def _shortened(self, found: tuple[Action, ...], kind: type[Exception], until: float) -> tuple[Action, ...]:
        left = found
        for _ in range(_SHORTENINGS):
            before, index = left, len(left)
            while index and time.monotonic() < until:
                index -= 1
                if type(self._failure(fewer := (*left[:index], *left[index + 1 :]))) is kind:
                    left = fewer
            if left == before:
                break
        return left

    def _failure(self, schedule: Sequence[Action]) -> Exception | None:
        try:
            self.play(schedule)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            return error
        return None

    def close(self) -> None:
        """Close the harness; the next run opens another."""
        if self._promises is not None:
            self._promises.harness.close()
            self._promises = None

    def _rehearsed(self, message: Message) -> None:
        """Rehearse a message, unless it was found clean before: the same messages fail each time, or never."""
        about = (message.type, message.body)
        if not self._rehearse or about in self._clean or self._promises is None:
            return
        from idemp.testing.detectors import rehearse
        from idemp.testing.findings import NotIdempotent

        if self._rehearsals.get(message.type, 0) < REHEARSED:
            wanted = DEFAULT_KINDS if self._detect is None else self._detect
            compared = len(self._promises.harness.compared)
            findings = self._found.get(about) or rehearse(self._promises.harness, message, detect=wanted)
            if len(self._promises.harness.compared) > compared:  # with other processes, which is done once only
                self._found[about] = findings
            if findings:
                raise NotIdempotent(findings)
            self._rehearsals[message.type] = self._rehearsals.get(message.type, 0) + 1
        self._clean.add(about)
