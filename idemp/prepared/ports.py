"""Ports of prepared messages: a home that stores them, and a checker that knows the outcome of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal, Protocol
from uuid import UUID

from idemp.identity import key_scope, message_key
from idemp.messages import Output

__all__ = ["Answer", "Checker", "Home", "Prepared"]

SCOPE: Final = key_scope("idemp.Prepared", "key:")

Answer = Literal["commit", "rollback", "unknown"]
"""Outcome of the work; `unknown` if it is not decided yet."""


@dataclass(frozen=True)
class Prepared:
    """A message that waits for the outcome of its producer's work.

    Attributes:
        app: Name of the app that prepared it.
        key: The producer's name of the work, such as the id of an order.
        output: The message, as it will be published.
        checks: Number of checks without a decision.
        handle: Reference by which the home finds the message.

    Example:
        >>> prepared = Prepared("orders", "7", Output("1", "send", "", "stock", {}, b"{}"))
        >>> prepared.checks, prepared.place.version
        (0, 8)
    """

    app: str
    key: str
    output: Output
    checks: int = 0
    handle: Any = None

    @property
    def place(self) -> UUID:
        """The key as tables store it."""
        return message_key(f"s:{self.key}", self.key, SCOPE)

    @property
    def digest(self) -> str:
        """Digest of queue, type and body."""
        sent = self.output
        return sha256(b"\0".join((sent.routing_key.encode(), str(sent.properties["type"]).encode(), sent.body))).hexdigest()


class Checker(Protocol):
    """Answers whether work was committed.

    Example:
        >>> class Printed:
        ...     def ask(self, prepared: Prepared) -> Answer:
        ...         return "commit" if prepared.key in {"7"} else "unknown"
    """

    def ask(self, prepared: Prepared) -> Answer:
        """Return the outcome of the work. Return `rollback` only if the work cannot commit any more.

        Raises:
            Exception: The outcome cannot be asked for now; this does not count as a check.
        """


class Home(Protocol):
    """A durable store of prepared messages, which consumers cannot see.

    Example:
        >>> Home.__name__
        'Home'
    """

    def prepare(self, prepared: Prepared, wait: float) -> None:
        """Store a message; `lease` returns it after `wait` seconds, unless it has ended.

        Raises:
            Conflict: Another message is prepared under the key.
        """

    def lease(self, limit: int) -> Sequence[Prepared]:
        """Lease messages whose check is due: other checkers do not get them for a while."""

    def commit(self, prepared: Prepared) -> None:
        """Store that the work is committed. The message is published then, or leased again."""

    def end(self, prepared: Prepared) -> None:
        """Delete a message that is published, or whose work was rolled back."""

    def postpone(self, prepared: Prepared, wait: float) -> None:
        """Count a check without a decision; the next one is due after `wait` seconds."""
