"""What a look at a live server found: one line each, with what mends it."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

_MIB: Final = 1024 * 1024
_ENOUGH: Final = 200 * _MIB
_TOO_LITTLE: Final = 10 * _MIB

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command to copy and run.

    Attributes:
        kind: "shell", or "sql" for a statement that the database's administrator runs.
        text: the command, without a password.
    """

    kind: Literal["shell", "sql"]
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that was looked at.

    Attributes:
        verdict: "ok"; "warning" where a promise holds for now; "failed" where one does not.
        name: what was looked at.
        detail: what was seen.
        fix: what to do about it.
        commands: what mends it, in this order.

    Example:
        >>> missing = Diagnosis("failed", "queue", "There is none.", commands=(shell("idemp", "broker", "declare", "a:b"),))
        >>> missing.commands[0].text
        'idemp broker declare a:b'
    """

    verdict: Verdict
    name: str
    detail: str
    fix: str = ""
    commands: tuple[Command, ...] = ()


def free_space(file: Path) -> Diagnosis:
    """Look at the free space of the disk that holds a file.

    Example:
        >>> free_space(Path("/no/such/file.db")).name
        'disk'
    """
    folder = next(folder for folder in file.absolute().parents if folder.exists())
    free = shutil.disk_usage(folder).free
    detail = f"{free // _MIB} MiB are free for {file}"
    if free >= _ENOUGH:
        return Diagnosis("ok", "disk", detail)
    verdict: Verdict = "failed" if free < _TOO_LITTLE else "warning"
    return Diagnosis(verdict, "disk", detail, "Make room: what can't be written is not handled, nor sent.")


def shell(*words: str) -> Command:
    """A command for the shell, quoted where that is needed.

    Example:
        >>> shell("rabbitmqctl", "set_permissions", "-p", "/", "guest", ".*", ".*", ".*").text
        "rabbitmqctl set_permissions -p / guest '.*' '.*' '.*'"
    """
    return Command("shell", shlex.join(words))


def statements(texts: Iterable[str]) -> tuple[Command, ...]:
    """Statements for the database's administrator.

    Example:
        >>> statements(["SELECT pg_reload_conf()"])
        (Command(kind='sql', text='SELECT pg_reload_conf()'),)
    """
    return tuple(Command("sql", text) for text in texts)


@dataclass(frozen=True, slots=True)
class BrokerCommands:
    """The commands that mend an app's queues.

    Attributes:
        app: `MODULE:APP`.
        options: what its broker is named by, if not by its code or the settings.

    Example:
        >>> BrokerCommands("shop.orders:app").rebuild("orders").text
        'idemp broker rebuild shop.orders:app --queue orders'
    """

    app: str
    options: tuple[str, ...] = ()

    def declare(self) -> Command:
        """Makes what is missing."""
        return shell("idemp", "broker", "declare", self.app, *self.options)

    def rebuild(self, queue: str) -> Command:
        """Makes a queue anew that has other arguments, and keeps its messages."""
        return shell("idemp", "broker", "rebuild", self.app, "--queue", queue, *self.options)

    def dead_letters(self, queue: str | None = None) -> Command:
        """Shows what was parked, of another queue than the app's own if that is named."""
        named = ("--queue", queue) if queue is not None else ()
        return shell("idemp", "dead", "list", "--app", self.app, *named, *self.options)
