"""Faults that `assert_idempotent` finds, and their cures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["CURES", "Fault", "NotIdempotent", "TrialReport"]

CURES: Final = {
    "attempt": "let a repeated run do what the first one does: it may be the first that commits",
    "chance": "derive the value from the message (uuid5 of its id), or let the database make it in the row",
    "clock": "take the time from the message, or leave it to the database (a default of the column)",
    "commit": "leave the end of the transaction to idemp: flush, or use begin_nested() for a part that may fail",
    "connection": "use ctx.session or ctx.connection, so that it is committed together with the claim",
    "file": "send a message to the app's own queue; its handler writes under the id of that message, and has allow={'file'}",
    "memory": "keep it in the database, in the same transaction; a rollback does not undo what a process remembers",
    "network": "send a message to the app's own queue; its id is the idempotency key of a handler that has allow={'network'}",
    "order": "sort before you iterate: the order of a set differs between processes",
    "process": "take the value from the message or the settings, not from the process or its host",
    "program": "send a message to the app's own queue; its handler starts the program, and has allow={'program'}",
    "race": "let a unique constraint decide: insert first, and take the conflict for the answer",
    "repeated": "opt in by policy=Idempotent(…), or make the change one that can be repeated",
    "state": "derive what is written from the message and from rows that the handler has read",
    "swallowed": "let errors of the database pass, or catch the one you expect around begin_nested()",
    "thread": "wait for it before the handler returns, or send a message instead",
}
"""The cure for each kind of fault."""


@dataclass(frozen=True)
class Fault:
    """A reason why a handler is not idempotent.

    Attributes:
        kind: Key of `CURES`.
        cause: What was seen.

    Example:
        >>> print(Fault("clock", "output 1 to stock: $.at is another one at another time"))
        clock: output 1 to stock: $.at is another one at another time
            Cure: take the time from the message, or leave it to the database (a default of the column)
    """

    kind: str
    cause: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause}\n    Cure: {CURES[self.kind]}"


class NotIdempotent(AssertionError):
    """A handler is not idempotent.

    Attributes:
        faults: Why.
        not_looked_at: What the test could not see.

    Example:
        >>> NotIdempotent("pay", [Fault("file", "open /tmp/letter")], []).faults[0].kind
        'file'
    """

    def __init__(self, handler: str, faults: Sequence[Fault], not_looked_at: Sequence[str]) -> None:
        self.faults, self.not_looked_at = faults, not_looked_at
        lines = [f"{number}. {fault}" for number, fault in enumerate(faults, start=1)]
        lines += ["Not looked at:", *(f"- {each}" for each in not_looked_at)] if not_looked_at else []
        super().__init__("\n".join([f"{handler} is not idempotent:", *lines]))


@dataclass(frozen=True)
class TrialReport:
    """The result of `assert_idempotent` for a handler without faults.

    Attributes:
        handler: Name of the function.
        runs: How often it ran.
        not_looked_at: What the test could not see.

    Example:
        >>> TrialReport("pay", 12, ()).runs
        12
    """

    handler: str
    runs: int
    not_looked_at: Sequence[str]
