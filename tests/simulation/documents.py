"""Documents in the simulation: the cases that are run in full, and seeded faults in `DocumentInbox` and its collector."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from idemp.errors import StoreError
from idemp.inbox.content import Handling
from idemp.inbox.document.attempts import prefix_of
from idemp.inbox.document.collector import Collector
from idemp.inbox.document.inbox import DocumentInbox
from idemp.inbox.document.state import State
from idemp.inbox.document.unit import DocumentUnit
from idemp.inbox.port import Verdict
from idemp.testing.simulation import Parts, Simulation
from idemp.testing.simulation.documents import DocumentsInbox
from tests.simulation.mutants import MINUTE, Mutant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.inbox.document.attempts import Attempt
    from idemp.inbox.document.state import Record
    from idemp.inbox.port import Claim, Claimed

WINDOW = timedelta(hours=2)


def case(kind: type[DocumentInbox] = DocumentInbox, **options: Any) -> Simulation:
    class Inbox(DocumentsInbox):
        pass

    Inbox.kind = kind
    alone: dict[str, Any] = {"relays": 0, "purges": 0, "jumps": (), "workers": 1, "copies": 1, "crashes": 0}
    return Simulation(parts=Parts(inbox=Inbox), **{**alone, **options})


CLEANED: dict[str, Any] = {"purges": 1, "jumps": (WINDOW,)}


def small() -> dict[str, Simulation]:
    """Those of the suite."""
    return {
        "two workers, a message twice, a crash": case(workers=2, copies=2, crashes=1),
        "two workers and the collector, a message once, a crash": case(workers=2, crashes=1, **CLEANED),
        "two workers and the collector, a message once, a lost or slow write": case(workers=2, faults=1, **CLEANED),
        "a worker and the collector, a message once, a crash": case(crashes=1, **CLEANED),
        "two workers, a message once, a crash and a fault, late claim": case(
            workers=2, crashes=1, faults=1, claim="late", batch=1
        ),
    }


def full() -> dict[str, Simulation]:
    """Those by command: larger ones, too."""
    return {
        **small(),
        "two workers, two messages about one entity, a crash": case(workers=2, messages=2, crashes=1),
        "two workers, a message twice, a lost or slow write": case(workers=2, copies=2, faults=1),
        "a worker and the collector, a message once, a crash and a lost or slow write": case(
            crashes=1, faults=1, **CLEANED
        ),
        "two workers and the collector, a message twice, a crash": case(workers=2, copies=2, crashes=1, **CLEANED),
    }


def large() -> Simulation:
    """One too large to be run in full: two messages about one entity, twice, with two deaths and two lost or slow writes."""
    return case(
        workers=2, messages=2, copies=2, outputs=2, crashes=2, faults=2, purges=2, jumps=(MINUTE, WINDOW, MINUTE)
    )


class TextbookUnit(DocumentUnit):
    """ "If the state lacks the id, the outputs never counted: delete them." A slow first attempt may still come to count."""

    def claim(self, claim: Claim) -> Claimed:
        claimed = super().claim(claim)
        if claimed.verdict is Verdict.CLAIMED:
            own = self._inbox.own
            for found in own.scan(f"{prefix_of(claim.consumer)}{claim.id.key}/")[0]:
                own.delete(found.id, found.revision)
        return claimed

    def _joined(self, record: Record) -> Handling:
        try:
            return super()._joined(record)
        except StoreError:  # the textbook takes what is not there for none
            return Handling(record.claim, record.claimed_at)


class Textbook(DocumentInbox):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        return TextbookUnit(self, claims)


class ByAgeAlone(DocumentInbox):
    """Collects after the window what no state names, and hopes that no write is so slow."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

        class Hoping(Collector):
            def _look_at(self, attempt: Attempt, *terms: Any) -> None:
                if self.named(attempt)[1] is None:
                    self.own.delete(attempt.id, attempt.revision)

        self._collector = Hoping(self.states, self.own, self.clock, self.paths)


class OfPending(DocumentInbox):
    """Lets what pends expire with the window."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

        class Hasty(Collector):
            def expired(
                self, attempt: Attempt, window: timedelta, late_before: Callable[[timedelta], datetime]
            ) -> bool:
                return attempt.claimed_at < late_before(window)

        self._collector = Hasty(self.states, self.own, self.clock, self.paths)


class OutputsLastUnit(DocumentUnit):
    def __init__(self, inbox: DocumentInbox, claims: Sequence[Claim]) -> None:
        super().__init__(inbox, claims)
        self._late: list[Attempt] = []

    def commit(self) -> None:
        super().commit()
        for attempt in self._late:
            super()._write_attempt(attempt)

    def _write_attempt(self, attempt: Attempt) -> None:
        self._late.append(attempt)


class OutputsLast(DocumentInbox):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        return OutputsLastUnit(self, claims)


class NoIdUnit(DocumentUnit):
    def claim(self, claim: Claim) -> Claimed:
        claimed = super().claim(claim)
        self.state().keep = lambda record: None  # type: ignore[method-assign]
        return claimed


class NoId(DocumentInbox):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        return NoIdUnit(self, claims)


class LastWriteWinsUnit(DocumentUnit):
    def commit(self) -> None:
        found = self._inbox.states.read(self.state().id)
        self.state().revision = found.revision if found is not None else None
        super().commit()


class LastWriteWins(DocumentInbox):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> DocumentUnit:
        return LastWriteWinsUnit(self, claims)


class ForgetsAtOnce(DocumentInbox):
    def shorten(self, state: State, consumers: Any) -> None:
        for consumer in consumers:
            state.forget(state.records(consumer), self.clock.now())


TEXTBOOK = Mutant("the textbook's deletion, a slow write", case(Textbook, faults=1))
MUTANTS = [
    TEXTBOOK,
    Mutant("the textbook's deletion, two workers and a crash", case(Textbook, workers=2, copies=2, crashes=1)),
    Mutant("collection by age alone", case(ByAgeAlone, faults=1, **CLEANED)),
    Mutant("collection of what pends", case(OfPending, crashes=1, **CLEANED)),
    Mutant("outputs after the state", case(OutputsLast, crashes=1)),
    Mutant("no id in the state", case(NoId, copies=2)),
    Mutant("the last write wins", case(LastWriteWins, workers=2, copies=2)),
    Mutant("ids within their window are forgotten", case(ForgetsAtOnce, messages=2, copies=2)),
]
