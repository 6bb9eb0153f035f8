"""Logging to stderr: plain lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

from idemp.deliverylog import in_one_line
from idemp.showing import readable, stack_of, text_of

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_PLAIN: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_TRACEBACK_CHARACTERS: Final = 8_000
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextLines(logging.Formatter):
    r"""One line each, for people: line breaks in what a server or a handler said become blanks; tracebacks stay as they are.

    Example:
        >>> TextLines("%(name)s: %(message)s").format(logging.makeLogRecord({"msg": "a\nb", "name": "idemp"}))
        'idemp: a b'
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in the standard library
        """The line without the traceback."""
        return readable(in_one_line(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in the standard library
        """The traceback, whatever the exception does when it is looked at."""
        return _traceback(ei)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, event, message, and the fields that belong to the event.

    `idemp.telemetry.events` has the events and their fields. A traceback is cut to 8,000 characters, in its middle.

    Example:
        >>> record = logging.makeLogRecord({"msg": "purged %d", "args": (2,), "name": "idemp", "rows": 2})
        >>> line = json.loads(JsonLines().format(record))
        >>> line["message"], line["rows"]
        ('purged 2', 2)
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": None,
            "message": record.getMessage(),
        }
        fields.update({name: value for name, value in vars(record).items() if name not in _OWN})
        if record.exc_info:
            fields["traceback"] = _shortened(self.formatException(record.exc_info))
        return json.dumps(fields, default=text_of)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in the standard library
        """The traceback, whatever the exception does when it is looked at."""
        return _traceback(ei)


def _traceback(found: Any) -> str:
    error = found[1]
    return stack_of(error).rstrip("\n") if error is not None else "NoneType: None"


def _shortened(text: str) -> str:
    """Where it was raised from and what it says are at its ends."""
    if len(text) <= MAX_TRACEBACK_CHARACTERS:
        return text
    half = MAX_TRACEBACK_CHARACTERS // 2 - 10
    return f"{text[:half]}\n  [...]\n{text[-half:]}"


def set_up(level: str, *, json_lines: bool) -> None:
    """Send idemp's log, and warnings and worse of everybody else, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else TextLines(_PLAIN))
    root = logging.getLogger()
    for old in [item for item in root.handlers if isinstance(item, logging.StreamHandler) and item.name == "idemp-cli"]:
        root.removeHandler(old)
    handler.name = "idemp-cli"
    root.addHandler(handler)
    logging.getLogger("idemp").setLevel(level.upper())
