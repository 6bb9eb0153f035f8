"""Dead letters of a message that the inbox is asked about: a conflict stands in no table, only in a queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Self

from rich.text import Text

from idemp.broker.copies import dead_queue
from idemp.cli.letters import as_read, row
from idemp.cli.mending import Mending
from idemp.cli.screen import Paragraph, shortened, shown
from idemp.cli.wiring import existing_broker
from idemp.diagnosis import shell
from idemp.errors import BrokerError, ConfigurationError, PayloadConflict
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from idemp.app import App
    from idemp.broker.port import Broker
    from idemp.messages import Message
    from idemp.settings import Settings

LOOKED_AT: Final = 10_000
"""Dead letters of one queue that are read, the oldest first."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The dead letters of a message.

    Attributes:
        letters: each with what a list has of it, and its `queue`.
        unseen: why there may be more; `None` if all were read.
    """

    letters: list[dict[str, Any]] = field(default_factory=list)
    unseen: str | None = None

    @classmethod
    def of(cls, found: App | Settings, queues: Iterable[str], ids: Collection[str]) -> Self:
        """Read the dead letters of these ids: message ids, CloudEvents' ids, or keys that met another payload."""
        try:
            return cls(list(_letters(existing_broker(found), queues, ids)))
        except (BrokerError, ConfigurationError) as error:
            return cls(unseen=f"{error.message} {error.fix}")

    def beside(self, stories: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add each story's dead letters to it, for programs; without a story they are one of their own."""
        if not stories:
            return [{"claim": None, "outputs": [], "dead_letters": self.letters}]
        return [
            {
                **story,
                "dead_letters": [
                    letter for letter in self.letters if letter["consumer"] in {None, story["claim"]["consumer"]}
                ],
            }
            for story in stories
        ]

    def lines(self, app: str | None, broker: str | None) -> list[Paragraph]:
        """Return them for people, each with the command that shows it whole."""
        options = Mending(app, None, {"broker": broker}).of_broker()
        lines = []
        for letter in self.letters:
            whose = ("--queue", letter["queue"], *(("--app", app) if app is not None else ()))
            see = shell("idemp", "dead", "show", str(letter["message_id"]), *whose, *options).text
            text = (
                f"parked in {dead_queue(letter['queue'])} after {counted(letter['attempts'] or 0, 'attempt')}: "
                f"{letter['reason']}: {shortened(str(letter['error']), 240)} See `{see}`."
            )
            lines.append(Paragraph(Text(f"  {_time(letter['last_at'])}  "), text))
        if self.unseen is not None:
            lines.append(Paragraph(Text("  "), f"Dead letters were not looked at: {self.unseen}"))
        return lines


def _letters(broker: Broker, queues: Iterable[str], ids: Collection[str]) -> Iterator[dict[str, Any]]:
    for queue in queues:
        try:
            found = broker.browse(dead_queue(queue), LOOKED_AT)
        except ConfigurationError:
            continue  # it does not exist on this broker
        for message in found:
            letter = row(message)
            if _is_meant(message, letter, ids):
                yield {**letter, "queue": queue}


def _is_meant(message: Message, letter: dict[str, Any], ids: Collection[str]) -> bool:
    if {message.message_id, as_read(message).message_id} & set(ids):
        return True
    said = str(letter["error"])
    return letter["reason"] == PayloadConflict.__name__ and any(f"id {each!r} " in said for each in ids)


def _time(text: object) -> str:
    try:
        return shown(datetime.fromisoformat(str(text)))
    except ValueError:
        return "at an unknown time"
