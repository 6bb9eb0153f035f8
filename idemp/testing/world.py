"""What the runs of one machine share: a harness, what was rehearsed, and the shortest schedules of what failed."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from idemp.testing.harness import Harness
from idemp.testing.promises import Promises
from idemp.testing.running import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine, MetaData
    from sqlalchemy.orm import Session

    from idemp.app import App
    from idemp.messages import Message
    from idemp.testing.story import Action
    from idemp.wrap import Wrapped

REHEARSED: Final = 10
"""How many different messages of each type are rehearsed, as long as nothing is found."""

_SHORTENINGS: Final = 4
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
        state: Callable[[Session], Any] | None,
        invariants: tuple[Callable[[Session], object], ...],
        setup: Callable[[Session], object] | None,
        database: str,
        tables: MetaData | Callable[[Engine], object] | None,
        *,
        rehearse: bool,
    ) -> None:
        self.app = app
        self._state = state
        self._invariants = invariants
        self._setup = setup
        self._database = database
        self._tables = tables
        self._rehearse = rehearse
        self._promises: Promises | None = None
        self._clean: set[tuple[str | None, bytes]] = set()
        self._rehearsals: dict[str | None, int] = {}
        self._shortest: dict[tuple[Action, ...], tuple[Action, ...]] = {}

    def run(self) -> Run:
        """A new run, in the same harness."""
        if self._promises is None:
            harness = Harness(self.app, database=self._database, tables=self._tables)
            harness.claim_wait = _CLAIM_WAIT
            self._promises = Promises(harness, state=self._state, setup=self._setup)
        return Run(self._promises, invariants=self._invariants, rehearse=self._rehearsed)

    def play(self, schedule: Sequence[Action]) -> Run:
        """Run a schedule from the beginning to the rest."""
        run = self.run()
        for action in schedule:
            run.do(tuple(action))
        run.finish()
        return run

    def raise_shortest(self, schedule: Sequence[Action], error: Exception) -> NoReturn:
        """Leave out every step without which it fails in the same way; the error of what is left.

        Whole steps are known here, so that it takes a run for each of them, not hundreds as for Hypothesis.
        """
        found = tuple(schedule)
        if found not in self._shortest:
            left = found
            for _ in range(_SHORTENINGS):
                before, index = left, len(left)
                while index:
                    index -= 1
                    if type(self._failure(fewer := (*left[:index], *left[index + 1 :]))) is type(error):
                        left = fewer
                if left == before:
                    break
            self._shortest[found] = left
        raise self._failure(self._shortest[found]) or error from None

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
        told = (message.type, message.body)
        if not self._rehearse or told in self._clean or self._promises is None:
            return
        from idemp.testing.detectors import rehearse
        from idemp.testing.findings import NotIdempotent

        if self._rehearsals.get(message.type, 0) < REHEARSED:
            findings = rehearse(self._promises.harness, message)
            if findings:
                raise NotIdempotent(findings)
            self._rehearsals[message.type] = self._rehearsals.get(message.type, 0) + 1
        self._clean.add(told)
