"""What a test of a handler covered, and what it could not see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """What `assert_idempotent` tested. It returns one, and a failure carries it as a note.

    Attributes:
        tested: the message type, its policy, and who declared it.
        messages: how many messages were given.
        deliveries: how many times one was delivered.
        deaths: the crash points at which the process died.
        not_reached: the crash points to which no delivery came.
        looked_for: kinds of findings that were looked for.
        not_looked_for: kinds that `detect=` left out.
        not_seen: sentences about what could not be looked at.

    Example:
        >>> print(Report("orders.Place under Idempotent(key='field:id')", 1, 3, ("after commit",), (), ("clock",), (), ()))
        Tested: orders.Place under Idempotent(key='field:id').
          1 message, 3 deliveries. The process died at 1 crash point: after commit.
          Looked for: clock.
    """

    tested: str
    messages: int
    deliveries: int
    deaths: tuple[str, ...]
    not_reached: tuple[str, ...]
    looked_for: tuple[str, ...]
    not_looked_for: tuple[str, ...]
    not_seen: tuple[str, ...]

    def __str__(self) -> str:
        counted = f"{_counted(self.messages, 'message')}, {_counted(self.deliveries, 'delivery', 'deliveries')}."
        died = f" The process died at {_counted(len(self.deaths), 'crash point')}: {', '.join(self.deaths)}."
        lines = [f"Tested: {self.tested}.", f"  {counted}{died if self.deaths else ' The process never died.'}"]
        if self.not_reached:
            lines.append(f"  No delivery came to: {', '.join(self.not_reached)}.")
        lines.append(f"  Looked for: {', '.join(self.looked_for) or 'nothing'}.")
        if self.not_looked_for:
            lines.append(f"  Left out by detect=: {', '.join(self.not_looked_for)}.")
        if self.not_seen:
            lines += ["  Not seen:", *(f"  - {each}" for each in self.not_seen)]
        return "\n".join(lines)


class NotSeen(UserWarning):
    """A handler did something that the kit could not look at, and the test passed all the same.

    Example:
        >>> issubclass(NotSeen, UserWarning)
        True
    """


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
