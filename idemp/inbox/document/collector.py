"""The collector: deletes what expired, and the outputs of attempts that never counted.

One rule says which attempts may go: the state document does not name the attempt, *and* has another revision than the one
that the attempt expects. Then its write of the state document can't succeed any more, however slow it is: revisions never
repeat. An attempt that still expects the present revision is *fenced* first: the collector writes the state document anew,
unchanged. If there is no state document, the collector makes none: an attempt that counted goes, since its entity was
deleted afterwards, and any other stays, since its write may still arrive.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from idemp.errors import HandlerError
from idemp.inbox.document.attempts import ATTEMPTS, Attempt
from idemp.inbox.document.port import RevisionConflict
from idemp.inbox.document.state import State
from idemp.plurals import counted
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.clock import Clock
    from idemp.inbox.document.port import Document, Documents
    from idemp.inbox.document.state import Record

log = logger("idemp.retention")

T = TypeVar("T")
V = TypeVar("V")

_PAGE: Final = 500
_BRIEF: Final = 1.0
"""Seconds; what takes no longer may be done at any time."""
_REST: Final = 19


@dataclass(slots=True)
class Collected:
    """What a round of the collector deleted.

    Attributes:
        claims: expired ids, each with its outputs.
        orphans: attempts that never counted.
        complete: it looked through everything.
    """

    claims: int = 0
    orphans: int = 0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Collector:
    """Looks through attempts.

    Args:
        states: where the state documents are.
        own: where the attempts are.
        clock: source of time.
        paths: the fields of state documents that are idemp's.
    """

    states: Documents
    own: Documents
    clock: Clock
    paths: frozenset[str] = field(default=frozenset())

    def attempts(self, prefix: str = ATTEMPTS) -> Iterator[Attempt]:
        """All of them, as the scan has them."""
        yield from map(Attempt.restored, scanned(self.own, prefix))

    def named(self, attempt: Attempt) -> tuple[State, Record | None]:
        """The state document as it is now, and what it says of the attempt's message if it names the attempt."""
        state = State(attempt.state, self.states.read(attempt.state), attempt.path, self.paths)
        record = state.find(attempt.consumer, attempt.key)
        return state, record if record is not None and record.attempt == attempt.name else None

    def collect(
        self,
        consumer: str,
        attempts: Iterator[Attempt],
        window: Callable[[str], timedelta | None],
        late_before: Callable[[timedelta], datetime],
        limit: int,
    ) -> Collected:
        """Delete up to `limit` expired claims and as many orphans.

        Args:
            consumer: whose.
            attempts: what is left to be looked through of this round.
            window: of a message type; `None` keeps what is of that type.
            late_before: the moment at which a window began that ends now.
            limit: of each.
        """
        collected = Collected()
        while max(collected.claims, collected.orphans) < limit:
            attempt = next(attempts, None)
            if attempt is None:
                collected.complete = True
                break
            length = window(attempt.message_type)
            if length is None or attempt.claimed_at >= late_before(length):
                continue
            try:
                self._look_at(attempt, length, late_before, collected)
            except (RevisionConflict, HandlerError):
                continue  # somebody is at it, or has written into idemp's field: later
        if collected.orphans:
            log.info(
                "deleted the outputs of %s that never counted, of %s",
                counted(collected.orphans, "attempt"),
                consumer,
                extra={"event": "orphans_collected", "consumer": consumer, "attempts": collected.orphans},
            )
        return collected

    def expired(self, attempt: Attempt, window: timedelta, late_before: Callable[[timedelta], datetime]) -> bool:
        """Whether its id may go, if it won.

        No relay sends what pends: its message does, which comes again and again, and says each time what was refused. What
        was neither confirmed nor refused for two windows is of a message that comes no more: nobody recorded its confirm.
        """
        if attempt.pending:
            return attempt.tried_at < late_before(2 * window)
        return attempt.claimed_at < late_before(window)

    def _look_at(
        self, attempt: Attempt, window: timedelta, late_before: Callable[[timedelta], datetime], collected: Collected
    ) -> None:
        state, record = self.named(attempt)
        if record is not None:
            now = self.own.read(attempt.id)  # the scan may have been a while ago
            if now is None or not self.expired(attempt := Attempt.restored(now), window, late_before):
                return
            state.forget([record], self.clock.now())
            self.states.write(state.id, state.body(), state.revision)
            collected.claims += 1
            if attempt.pending:
                self._tell_unconfirmed(attempt, record)
        elif state.revision == attempt.expects:
            if state.revision is not None:
                self.states.write(state.id, state.body(), state.revision)  # the fence
            elif not attempt.counted:
                return  # its write may still make the document, and no fence can stand where there is none
        self.own.delete(attempt.id, attempt.revision)
        collected.orphans += record is None

    def _tell_unconfirmed(self, attempt: Attempt, record: Record) -> None:
        log.warning(
            "an expired claim is deleted with %s whose confirm was not recorded",
            counted(attempt.pending, "output"),
            extra={
                "event": "unconfirmed_expired",
                "consumer": attempt.consumer,
                "message_id": record.claim.id.text,
                "message_type": attempt.message_type,
                "outputs": attempt.pending,
            },
        )


class Rounds(Generic[T]):
    """Goes through everything in several calls, and then rests for nineteen times as long, if that was long.

    Args:
        clock: source of time.
        all_: what there is to go through.

    Example:
        >>> from idemp.testing.clock import FakeClock
        >>> clock = FakeClock()
        >>> rounds = Rounds(clock, lambda: iter([1, 2]))
        >>> with rounds.going() as left:
        ...     seen = list(left)
        ...     _ = clock.advance(timedelta(seconds=3))
        >>> rounds.ended()
        >>> rounds.rests, seen
        (True, [1, 2])
    """

    def __init__(self, clock: Clock, all_: Callable[[], Iterator[T]]) -> None:
        self._clock = clock
        self._all = all_
        self._left: Iterator[T] | None = None
        self._took = 0.0
        self._rests_until = 0.0

    @property
    def rests(self) -> bool:
        """Whether it is too early for another round."""
        return self._clock.monotonic() < self._rests_until

    @contextmanager
    def going(self) -> Iterator[Iterator[T]]:
        """What is left of this round; an error ends the round."""
        begun = self._clock.monotonic()
        left, self._left = self._left or self._all(), None
        yield left
        self._left = left
        self._took += self._clock.monotonic() - begun

    def looked(self, see: Callable[[Iterator[T]], V], before: V) -> V:
        """What `see` makes of everything, in one round; what it made `before`, where it is too early for another."""
        if self.rests:
            return before
        with self.going() as left:
            seen = see(left)
        self.ended()
        return seen

    def ended(self) -> None:
        """Everything of this round was seen."""
        if self._took > _BRIEF:
            self._rests_until = self._clock.monotonic() + _REST * self._took
        self._left, self._took = None, 0.0


def scanned(documents: Documents, prefix: str) -> Iterator[Document]:
    """All pages of a scan."""
    cursor: str | None = None
    while True:
        page, cursor = documents.scan(prefix, cursor, _PAGE)
        yield from page
        if cursor is None:
            return
