"""Logging to stderr: plain lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_PLAIN: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, event, message, and the fields that belong to the event.

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
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up(level: str, *, json_lines: bool) -> None:
    """Send idemp's log, and warnings and worse of everybody else, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else logging.Formatter(_PLAIN))
    root = logging.getLogger()
    for old in [item for item in root.handlers if isinstance(item, logging.StreamHandler) and item.name == "idemp-cli"]:
        root.removeHandler(old)
    handler.name = "idemp-cli"
    root.addHandler(handler)
    logging.getLogger("idemp").setLevel(level.upper())
