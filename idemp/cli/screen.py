"""What commands print: tables for people, JSON with stable field names for programs, errors as one short message."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import traceback
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.progress import Progress

_WIDE: Final = 200
_SECONDS_IN_DAY: Final = 86_400
_IN_ONE_PIECE: Final = frozenset({"id", "message_id", "original_id", "output_id"})
_CUT: Final = frozenset({"error"})
_NARROW: Final = 16
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
        self.console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False)
        self.errors = Console(stderr=True, highlight=False, markup=False)

    def result(self, data: Any, *lines: str | Text | Table) -> None:
        """A result: `data` as JSON, or lines and tables for people."""
        if self.json_mode:
            print(json.dumps(plain(data)))  # noqa: T201
            return
        for line in lines:
            if isinstance(line, Table) and line.min_width is not None and line.min_width > self.console.width:
                line.width = line.min_width  # a narrow terminal wraps whole lines rather than ids and times
            self.console.print(line, soft_wrap=isinstance(line, str | Text), crop=not isinstance(line, Table))

    def rows(self, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, empty: str = "Nothing.") -> None:
        """A list: all fields as JSON, or a table with `columns` (field to heading) for people."""
        self.result(rows, table(rows, columns) if rows else empty)

    def say(self, text: str, style: str = "") -> None:
        """A line for people only."""
        if not self.json_mode:
            self.console.print(Text(text, style=style), soft_wrap=True)

    def more(self, rows: Sequence[object], limit: int) -> None:
        """That a list was cut, for people: else fifty of thousands would look like all there is."""
        if len(rows) > limit:
            self.say(f"… and there are more; --limit {limit * 10} shows up to so many.")

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


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], title: str | None = None) -> Table:
    """A table for people: ids and times in one piece, errors cut to one line."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    cells = [{name: _cell(name, row.get(name)) for name in columns} for row in rows]
    needed = _PADDING * (len(columns) - 1)
    for name, heading in columns.items():
        widest = max(map(cell_len, (heading, *(row[name] for row in cells))))
        whole = name in _IN_ONE_PIECE or name.endswith("_at")
        narrowest = widest if whole else min(widest, max(cell_len(heading), _NARROW))
        needed += narrowest
        made.add_column(heading, overflow="fold", no_wrap=whole, min_width=narrowest)
    made.min_width = needed
    for row in cells:
        made.add_row(*(_text(name, cell) for name, cell in row.items()))
    return made


def _cell(name: str, value: Any) -> str:
    text = shown(_moment(value) if name.endswith("_at") and isinstance(value, str) else value)
    return " ".join(text.split()) if name in _CUT else text


def _text(name: str, cell: str) -> Text:
    # A column that is not wrapped would take its room from the others, a text in it does not.
    return Text(cell, overflow="ellipsis", no_wrap=True) if name in _CUT else Text(cell)


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
        traceback.print_exception(error, file=sys.stderr)
    if json_mode:
        print(json.dumps({"error": _as_json(error, code)}), file=sys.stderr)  # noqa: T201
        return code
    message = str(error) if isinstance(error, IdempError) else f"Unexpected {type(error).__name__}: {error}"
    hint = "" if isinstance(error, IdempError) or with_traceback else " Run it again with --traceback to see where."
    print(f"idemp: {message}{hint}", file=sys.stderr)  # noqa: T201
    return code


def _as_json(error: BaseException, code: ExitCode) -> dict[str, Any]:
    known = isinstance(error, IdempError)
    return {
        "kind": type(error).__name__,
        "message": error.message if isinstance(error, IdempError) else str(error),
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
