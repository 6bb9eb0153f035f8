"""What commands print: tables for people, JSON with stable field names for programs, errors as one short message."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from idemp.cli.exits import ExitCode, exit_code_of
from idemp.errors import IdempError
from idemp.showing import class_of, described, readable, stack_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import ConsoleOptions
    from rich.progress import Progress

_UNLIMITED: Final = 100_000
_SECONDS_IN_DAY: Final = 86_400
_CUT: Final = frozenset({"error"})
_NARROW: Final = 24
_LONG: Final = 240
_PADDING: Final = 2


class Screen:
    """Where a command writes its results.

    Args:
        json_mode: print JSON instead of tables.

    Example:
        >>> Screen(json_mode=True).result({"queue": "orders"}, "The queue is orders.")
        {"queue": "orders"}
    """

    def __init__(self, *, json_mode: bool = False) -> None:
        self.json_mode = json_mode
        self.console = Console(width=_width(), highlight=False, markup=False)
        self.errors = Console(stderr=True, highlight=False, markup=False)

    def result(self, data: Any, *lines: str | Text | Rows | Paragraph) -> None:
        """A result: `data` as JSON, or lines and tables for people."""
        if self.json_mode:
            print(json.dumps(plain(data)))  # noqa: T201
            return
        for line in lines:
            shown_line = readable(line) if isinstance(line, str) else line
            self.console.print(shown_line, soft_wrap=isinstance(line, str | Text), crop=False)

    def rows(self, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, empty: str = "Nothing.") -> None:
        """A list: all fields as JSON, or `columns` (field to heading) for people."""
        self.result(rows, Rows(rows, columns) if rows else empty)

    def say(self, text: str) -> None:
        """A line for people only."""
        if not self.json_mode:
            self.console.print(readable(text), soft_wrap=True)

    def more(self, rows: Sequence[object], limit: int) -> None:
        """Say that a list was cut, else fifty of thousands would look like all there is; with JSON, on stderr."""
        if len(rows) > limit:
            self.note(f"… and there are more; --limit {limit * 10} shows up to so many.", more=True, limit=limit)

    def note(self, text: str, **data: Any) -> None:
        """A line beside the result; with JSON an object `note` on stderr, since the result is one list or object.

        Example:
            >>> Screen().note("… and there are more.", more=True)
            … and there are more.
        """
        if self.json_mode:
            print(json.dumps({"note": {"message": text.removeprefix("… and "), **plain(data)}}), file=sys.stderr)  # noqa: T201
        else:
            self.say(text)

    def progress(self) -> Progress:
        """A progress bar on stderr, drawn if that is a terminal and nobody asked for JSON."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.errors,
            transient=True,
            disable=self.json_mode or not self.errors.is_terminal,
        )


class Rows:
    """Rows for people: a table where the screen is wide enough for it, else one block of lines for each row.

    A table needs room for each word: names, ids and times stay in one piece, and only text with blanks is wrapped.

    Args:
        rows: what to print.
        columns: field to heading.
        title: printed above.

    Example:
        >>> rows = [{"id": "order-1", "state": None}, {"id": "order-2", "state": "parked"}]
        >>> rows = Rows(rows, {"id": "id", "state": "state"})
        >>> Console(width=12, highlight=False).print(rows, crop=False)
        id     order-1
        <BLANKLINE>
        id     order-2
        state  parked
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], title: str | None = None) -> None:
        self._cells = [{name: _cell(name, row.get(name)) for name in columns} for row in rows]
        self._columns = columns
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text | Paragraph]:
        """Print the table, or the blocks."""
        widths = self._widths(options.max_width)
        if widths is None:
            yield from self._blocks()
            return
        made = Table(title=self._title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        for name, heading in self._columns.items():
            made.add_column(heading, width=widths[name])
        for row in self._cells:
            made.add_row(*(_text(name, cell) for name, cell in row.items()))
        yield made

    def _widths(self, room: int) -> dict[str, int] | None:
        """Return how wide each column is; `None` if the screen is too narrow for words, and for a little of each text."""
        widths: dict[str, int] = {}
        slack: dict[str, int] = {}
        for name, heading in self._columns.items():
            cells = [row[name] for row in self._cells]
            widths[name] = widest = max(map(cell_len, (heading, *cells)))
            whole = cells if name.endswith("_at") else [] if name in _CUT else " ".join(cells).split()
            slack[name] = widest - max(min(widest, _NARROW), *map(cell_len, (heading, *whole)))
        excess = sum(widths.values()) + _PADDING * len(widths) - room
        if excess > sum(slack.values()):
            return None
        while excess > 0:
            name = max(slack, key=slack.__getitem__)
            taken = min(excess, max(1, slack[name] // 2))
            widths[name], slack[name], excess = widths[name] - taken, slack[name] - taken, excess - taken
        return widths

    def _blocks(self) -> Iterator[Text | Paragraph]:
        if self._title is not None:
            yield _line(Text(self._title, style="italic"))
        room = max(map(cell_len, self._columns.values())) + _PADDING
        for number, row in enumerate(self._cells):
            if number:
                yield Text()
            for name, heading in self._columns.items():
                if row[name]:
                    yield Paragraph(Text(heading.ljust(room), style="bold"), row[name])


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text that is wrapped between words where the screen ends, its further lines indented.

    A word that is longer than the screen sticks out, so that it can still be copied.

    Attributes:
        label: the beginning of the first line; the other lines leave its room free.
        text: what is wrapped.

    Example:
        >>> Console(width=20).print(Paragraph(Text("ok  "), "the window is longer than the horizon"))
        ok  the window is
            longer than the
            horizon
    """

    label: Text
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Print its lines."""
        begin, line = self.label, ""
        for word in readable(self.text).split():
            longer = f"{line} {word}" if line else word
            if line and begin.cell_len + cell_len(longer) > options.max_width:
                yield _line(begin + Text(line))
                begin, longer = Text(" " * begin.cell_len), word
            line = longer
        yield _line(begin + Text(line))


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ignore"
    return text


def _width() -> int | None:
    """Return what COLUMNS says, else the terminal's width (`None`); a pipe without COLUMNS gets one line a row."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return None if sys.stdout.isatty() else _UNLIMITED


def _cell(name: str, value: Any) -> str:
    text = shown(_moment(value) if name.endswith("_at") and isinstance(value, str) else value)
    # An id with a line break in it stays on its line, and is seen to be another one.
    return readable(shortened(text, _LONG) if name in _CUT else text).replace("\n", r"\n")


def _text(name: str, cell: str) -> Text:
    # A column that is not wrapped would take its room from the others, a text in it does not.
    return Text(cell, overflow="ellipsis", no_wrap=True) if name in _CUT else Text(cell, overflow="fold")


def _moment(text: str) -> datetime | str:
    """A time as headers have it."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text
    return at.astimezone(UTC) if at.tzinfo is not None else at


def shortened(text: str, length: int = 120) -> str:
    r"""Text in one line, cut where it is long.

    Example:
        >>> shortened("no such\nqueue"), shortened("a" * 9, 5)
        ('no such queue', 'aaaa…')
    """
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def shown(value: Any) -> str:
    """A value as people read it.

    Example:
        >>> shown(timedelta(days=7)), shown(None), shown(True), shown(("a", "b"))
        ('7d', '', 'yes', 'a, b')
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%S")
        case timedelta():
            return _duration(value)
        case list() | tuple():
            return ", ".join(map(shown, value))
    return str(value)


def plain(value: Any) -> Any:
    """A value as JSON: times in ISO 8601, durations in seconds.

    Example:
        >>> plain({"window": timedelta(minutes=1), "ids": (UUID(int=1),)})
        {'window': 60.0, 'ids': ['00000000-0000-0000-0000-000000000001']}
    """
    match value:
        case enum.Enum():
            return plain(value.value)
        case None | bool() | int() | float() | str():
            return value
        case timedelta():
            return value.total_seconds()
        case date():
            return value.isoformat()
        case UUID() | Path():
            return str(value)
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def report_error(error: BaseException, *, json_mode: bool, with_traceback: bool) -> ExitCode:
    """Tell an error on stderr, in one message; the exit code that belongs to it."""
    code = exit_code_of(error)
    if with_traceback:
        print(stack_of(error), end="", file=sys.stderr)  # noqa: T201
    if json_mode:
        print(json.dumps({"error": _as_json(error, code)}), file=sys.stderr)  # noqa: T201
        return code
    message = text_of(error) if isinstance(error, IdempError) else f"Unexpected {described(error)}"
    hint = "" if isinstance(error, IdempError) or with_traceback else " Run it again with --traceback to see where."
    print(readable(f"idemp: {message}{hint}"), file=sys.stderr)  # noqa: T201
    return code


def _as_json(error: BaseException, code: ExitCode) -> dict[str, Any]:
    known = isinstance(error, IdempError)
    return {
        "kind": class_of(error),
        "message": error.message if isinstance(error, IdempError) else text_of(error),
        "committed": error.committed if isinstance(error, IdempError) else "unknown",
        "fix": error.fix if isinstance(error, IdempError) else "",
        "expected": known,
        "exit_code": int(code),
    }


def _duration(value: timedelta) -> str:
    seconds = value.total_seconds()
    for size, unit in ((_SECONDS_IN_DAY, "d"), (3600, "h"), (60, "m")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"
