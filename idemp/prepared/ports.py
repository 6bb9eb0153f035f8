"""What prepared messages need: a home where they wait, and a checker that knows what became of the work."""

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
"""What became of the work; `unknown` if that cannot be said yet."""


@dataclass(frozen=True)
class Prepared:
    """A message that waits for the outcome of its producer's work.

    Attributes:
        app: Name of the app that prepared it.
        key: What the producer calls the work, such as the id of an order.
        output: The message, as it will be published.
        checks: How often the checker was asked, and did not know.
        handle: By which its home finds it.

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
        """The key as tables have it."""
        return message_key(f"s:{self.key}", self.key, SCOPE)

    @property
    def digest(self) -> str:
        """Of queue, type and body."""
        sent = self.output
        return sha256(b"\0".join((sent.routing_key.encode(), str(sent.properties["type"]).encode(), sent.body))).hexdigest()


class Checker(Protocol):
    """Knows what became of the work.

    Example:
        >>> class Printed:
        ...     def ask(self, prepared: Prepared) -> Answer:
        ...         return "commit" if prepared.key in {"7"} else "unknown"
    """

    def ask(self, prepared: Prepared) -> Answer:
        """Return what became of the work. `rollback` only if it cannot commit any more.

        Raises:
            Exception: Nobody can be asked; this does not count.
        """


class Home(Protocol):
    """Where prepared messages wait, durable and invisible to consumers.

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
        """Return messages whose check is due; others do not get them for a while."""

    def commit(self, prepared: Prepared) -> None:
        """Note that the work is committed. From now on the message is published, or leased again."""

    def end(self, prepared: Prepared) -> None:
        """Forget a message that is published, or whose work was rolled back."""

    def postpone(self, prepared: Prepared, wait: float) -> None:
        """Count a check that did not know; the next one is due after `wait` seconds."""
