"""Output for a terminal: tables, or blocks where a table does not fit, with control characters escaped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, Final

__all__ = ["counted", "escape", "fields", "folded", "moment", "records"]

NAMES: Final = 12  # width of the column of field names
NARROW: Final = 60  # width below which a name and an id do not fit on one line
SHORTEST: Final = 16  # width to which a value may be cut


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    Example:
        >>> counted(1, "output"), counted(2, "output")
        ('1 output', '2 outputs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def moment(seconds: float) -> str:
    """Return seconds since 1970 as date and time.

    Example:
        >>> moment(0.5)
        '1970-01-01 00:00:00 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def escape(value: object) -> str:
    r"""Return text with escaped control characters and direction marks, which could rewrite the screen.

    Example:
        >>> print(escape("a\x1b[2Jb\u202e"))
        a\x1b[2Jb\u202e
    """
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def folded(text: str, width: int | None = None) -> list[str]:
    """Wrap a sentence into lines that fit next to field names. Commands and statements are not broken, so they can be copied.

    Example:
        >>> folded("the role shop may not SELECT (idemp_inbox, idemp_output)", 50)
        ['the role shop may not SELECT', '(idemp_inbox, idemp_output)']
    """
    columns = max(width or shutil.get_terminal_size().columns, NARROW // 2) - NAMES
    return wrap(escape(text), columns, break_long_words=False, break_on_hyphens=False)


def fields(pairs: Sequence[tuple[str, object]], width: int | None = None) -> str:
    """Return names and values, one pair a line; on a narrow terminal each value is below its name. Nothing is wrapped.

    Args:
        pairs: Names and values; a pair without a name continues the previous one.
        width: Width of the terminal; detected by default.

    Example:
        >>> print(fields([("id", 7), ("", "handled")], 80))
        id          7
                    handled
        >>> print(fields([("id", 7), ("", "handled")], 40))
        id
          7
          handled
    """
    narrow = (width or shutil.get_terminal_size().columns) < NARROW
    lines = [f"{name}\n  {escape(value)}" if narrow else f"{name:<{NAMES}}{escape(value)}" for name, value in pairs]
    return "\n".join(line.lstrip("\n").rstrip() for line in lines)


def records(rows: Sequence[Mapping[str, Any]], width: int | None = None, *, cut: bool = False) -> str:
    """Return rows as a table, or one block a row where the table would be wider than the terminal. Nothing is wrapped.

    Args:
        rows: Rows with the same names.
        width: Width of the terminal; detected by default.
        cut: Whether the last value of a row may be cut, so that it fits into the terminal.

    Example:
        >>> print(records([{"id": 1, "queue": "billing"}], 80))
        id  queue
        1   billing
        >>> print(records([{"id": 1, "queue": "billing"}], 8))
        id     1
        queue  billing
        >>> print(records([{"id": 1, "reason": "the card was refused"}], 22, cut=True))
        id  reason
        1   the card was refu…
    """
    texts = [{name: escape(value) for name, value in row.items()} for row in rows]
    if not texts:
        return ""
    names, width = list(texts[0]), width or shutil.get_terminal_size().columns
    widths = {name: max(len(name), *(len(row[name]) for row in texts)) for name in names}
    wide = sum(widths.values()) + 2 * (len(names) - 1)
    if cut and wide > width:
        last = names[-1]
        longest = max(widths[last] - (wide - width), SHORTEST)
        wide -= widths[last] - longest
        for row in texts if wide <= width else ():
            row[last] = row[last] if len(row[last]) <= longest else f"{row[last][: longest - 1]}…"
    if wide <= width:
        lines = [dict(zip(names, names, strict=True)), *texts]
        return "\n".join("  ".join(line[name].ljust(widths[name]) for name in names).rstrip() for line in lines)
    longest = max(map(len, names))
    return "\n\n".join("\n".join(f"{name.ljust(longest)}  {row[name]}".rstrip() for name in names) for row in texts)
