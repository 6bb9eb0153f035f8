"""Messages that may have ended a process: their handlers' starts are counted, and proven culprits run alone.

A process that dies in a handler takes the messages with it that were waiting in its hands; all come back marked as
redelivered, and nothing tells the one from the others. So the start of each redelivered message's handler is recorded in
the database before it runs, and its end after it. A start without an end marks a suspect, which from then on runs alone in
its process: a death counts only if it was alone, so that no neighbour is held to account for another's.

A process need not be killed to die: `SystemExit`, `MemoryError` and other exceptions that end it leave the start as SIGKILL
does, unless the operator asked the process to stop. A delivery that was lost before COMMIT leaves its start, too.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from idemp.classification import Start, start_after
from idemp.errors import StoreError, StoreUnavailable, TransientStoreError
from idemp.forking import ForkAware, renewed_in_child
from idemp.messages import DEFERRED_HEADER, counter
from idemp.outcome import Outcome
from idemp.showing import by_signal, logger
from idemp.work import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from idemp.dispatch import Shipment
    from idemp.inbox.port import Store
    from idemp.messages import Message
    from idemp.work import Work

log = logger("idemp.suspects")

LONGEST_WAIT: Final = 30.0
"""Seconds that a turn is waited for: a handler that takes longer must not hold up all others."""


class Turns(ForkAware):
    """Who may run a handler now; shared by the consuming threads of a process.

    Args:
        solitary: there is one consuming thread, so that every handler runs alone anyway.
        longest_wait: seconds after which a handler starts without its turn.
        stop: set when the operator has asked the process to stop; what ends a handler after that is not held against it.

    Example:
        >>> turns = Turns()
        >>> with turns.alone(lambda: print("in company")):
        ...     turns.running
        1
    """

    def __init__(
        self, *, solitary: bool = False, longest_wait: float = LONGEST_WAIT, stop: threading.Event | None = None
    ) -> None:
        self.solitary = solitary
        self.stop = stop or threading.Event()
        self.running = 0
        self._longest_wait = longest_wait
        self._loners = 0  # waiting, or running alone
        self._in_company: Callable[[], None] | None = None  # of the one that runs alone
        self._changed = threading.Condition(renewed_in_child(threading.RLock()))
        self.track()

    def after_fork_in_child(self) -> None:
        """Forget the turns of the parent's threads, which do not run here and so never end."""
        self.running = self._loners = 0
        self._in_company = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A turn beside others, while nobody waits for, or has, a turn of his own."""
        with self._changed:
            self._wait_until(lambda: self._loners == 0)
            disturbed = self._enter(None)
        _tell(disturbed)
        try:
            yield
        finally:
            self._leave(0)

    @contextmanager
    def alone(self, in_company: Callable[[], None]) -> Iterator[None]:
        """A turn while nobody else runs; goes before those that come after it.

        `in_company` is called when it is not alone after all, since somebody's turn did not end in time.
        """
        with self._changed:
            self._loners += 1
            self._wait_until(lambda: self.running == 0)
            disturbed = self._enter(in_company)
        _tell(disturbed)
        try:
            yield
        finally:
            self._leave(1)

    def _enter(self, loner: Callable[[], None] | None) -> list[Callable[[], None]]:
        """One more runs; who has to be told that he is not alone."""
        known = [each for each in (self._in_company, loner) if each is not None]
        alone = self.running == 0
        self.running += 1
        self._in_company = loner if alone else None
        return [] if alone else known

    def _leave(self, loners: int) -> None:
        with self._changed:
            self.running -= 1
            self._loners -= loners
            if loners:
                self._in_company = None
            self._changed.notify_all()

    def _wait_until(self, free: Callable[[], bool]) -> None:
        self._changed.wait_for(free, self._longest_wait)


def _tell(disturbed: Sequence[Callable[[], None]]) -> None:
    for each in disturbed:
        each()


class Suspects:
    """Counts the deaths of processes against the message whose handler had started.

    Args:
        store: where starts are recorded.
        turns: shared by the threads of this process.
    """

    def __init__(self, store: Store, turns: Turns) -> None:
        self._store = store
        self._turns = turns
        self._owed: dict[tuple[str, UUID], int] = {}  # ends that could not be recorded: the database was away
        self._unanswered: dict[tuple[str, UUID], int] = {}  # starts that may be recorded, though no handler ran

    def run(
        self,
        work: Work,
        life: Callable[[Work], Outcome | Shipment],
        *,
        redelivered: bool,
        settle: Callable[[Exception], object] = lambda _: None,
    ) -> Outcome | Shipment:
        """Live a delivery when it is its turn, and hold the deaths against it that were its own.

        Args:
            work: the delivery.
            life: runs it.
            redelivered: the broker's hint that it delivered this before.
            settle: decides how it is settled after what `life` raised. If the process dies in there, the start stays.

        Raises:
            StoreError: the start could not be recorded, and the handler did not run.
            Exception: what `life` raised.
        """
        if not self.counts(work, redelivered=redelivered):
            with self.company():
                return life(work)
        self._pay()
        left = earlier = self._started(work)
        # The first start ran beside others, so that its death may be another's fault.
        deaths = earlier if self._turns.solitary else max(0, earlier - 1)
        try:
            with self._alone(work, earlier) if earlier else self._turns.shared():
                left = 0
                outcome = life(replace(work, attempt=work.attempt + deaths, deaths=deaths))
            if isinstance(outcome, Outcome) and not outcome.came_to_an_end:
                left = earlier
        except BaseException as error:
            if isinstance(error, Exception):
                settle(error)
            # A start that is taken back leaves earlier ones: what was parked may come again if its ack is lost, and is
            # then parked again without being started.
            start = start_after(error, stopping=self._turns.stop.is_set() or by_signal(error))
            if start is not Start.STAYS:
                self._ended(work, earlier if start is Start.TAKEN_BACK else left)
            raise
        self._ended(work, left)
        return outcome

    def _started(self, work: Work) -> int:
        """Record a start; return how many earlier ones did not end.

        If the answer of an earlier call was lost, its start may be recorded, though no handler ran: it does not count.
        """
        key = (work.consumer, work.key)
        try:
            earlier = self._store.note_start(*key)
        except StoreUnavailable:
            self._unanswered[key] = self._unanswered.get(key, 0) + 1
            raise
        unanswered = min(self._unanswered.pop(key, 0), earlier)
        if unanswered:
            self._ended(work, earlier - unanswered + 1)  # the one that begins now stays
        return earlier - unanswered

    def died_undecoded(self, consumer: str, message: Message, error: BaseException) -> int:
        """Record that decoding a message ends this process; how often it did so, this time included.

        It is recorded afterwards, since what a start is counted by is not known before.
        """
        if start_after(error, stopping=self._turns.stop.is_set() or by_signal(error)) is not Start.STAYS:
            return 0
        try:
            return self._store.note_start(consumer, key_of(message)) + 1
        except StoreError as away:
            log.debug("a death is not recorded: %s", away)
            return 0

    @staticmethod
    def counts(work: Work, *, redelivered: bool) -> bool:
        """Whether its handler's starts are counted, which may have ended a process before."""
        # A deferred copy is no redelivery to the broker, but it may be the copy of one.
        return redelivered or bool(counter(work.message.headers, DEFERRED_HEADER))

    @contextmanager
    def company(self) -> Iterator[None]:
        """A turn for handlers whose starts are not counted, beside others.

        Raises:
            StoreError: something else has to be recorded before, and could not be.
        """
        self._pay()
        with self._turns.shared():
            yield

    @contextmanager
    def _alone(self, work: Work, earlier: int) -> Iterator[None]:
        """Its turn. While it waits for it, nothing of it runs, and whoever ends the process is another."""
        if self._turns.solitary:
            yield
            return
        company = threading.Event()

        def in_company() -> None:
            company.set()
            self._ended(work, earlier)

        self._ended(work, earlier)
        with self._turns.alone(in_company):
            if not company.is_set():
                self._store.note_start(work.consumer, work.key)
            if company.is_set():  # meanwhile
                self._ended(work, earlier)
            yield

    def _ended(self, work: Work, left: int) -> None:
        end = (work.consumer, work.key)
        try:
            self._store.note_end(*end, left)
        except StoreError as error:
            self._owed[end] = left
            log.debug("the end of a handler is not recorded yet: %s", error)
        else:
            self._owed.pop(end, None)

    def _pay(self) -> None:
        """Record what is owed before anything is held against anybody: this process is alive."""
        for end, left in list(self._owed.items()):
            try:
                self._store.note_end(*end, left)
            except (TransientStoreError, StoreUnavailable):
                raise
            except StoreError as error:
                log.debug("the end of a handler can't be recorded: %s", error)
            self._owed.pop(end, None)
