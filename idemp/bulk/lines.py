"""Messages in lines of JSON: those of an archive, and rows that were not handled, which a person may edit."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import IO, Any, Final, cast

from idemp.bulk.rows import Parked, Row
from idemp.cloudevents import STRUCTURED
from idemp.errors import ConfigurationError, Unreadable, describe_error
from idemp.messages import BOM

__all__ = [
    "FIELD",
    "PARTS",
    "REASONS",
    "REPLACED",
    "UNREADABLE_ID",
    "Fields",
    "edited",
    "parked_line",
    "read_lines",
    "readable",
    "reread",
]

PARTS: Final = ("id", "type", "time", "content_type", "correlation_id", "reply_to", "headers", "body")
REASONS: Final = ("answer", "rule", "error")
FIELD: Final = re.compile(r"[^\s.'\"\[\]\\*]+(\.[^\s.'\"\[\]\\*]+)*")
REPLACED: Final = "\ufffd"
UNREADABLE_ID: Final = "is neither text nor a whole number"
NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
ZONE: Final = re.compile(r" ?(UTC|GMT)$")
LOOKED_AT: Final = 100
ID: Final = ("id", "type")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The places of ids, types, times and other properties in a line: names of fields, `a.b` for one in another object.

    Args:
        id: Text or whole numbers; by default the field of that name, as are `type` and `time`.
        type: Text; a message without one is of the default type of the app.
        time: Seconds since 1970, or a time in ISO 8601, in UTC if it does not say a zone.
        content_type: Text. By default, a line with a field `specversion` that is not null is a CloudEvent.
        correlation_id: Text.
        reply_to: Text: the queue for replies.
        of_type: Type of all messages, in place of `type`.

    Raises:
        ConfigurationError: A name is none of a field.

    Example:
        >>> row, _ = Fields(id="order.id", of_type="shop.PlaceOrder").row(b'{"order": {"id": 7}}')
        >>> row.id
        '7'
    """

    id: str | None = None
    type: str | None = None
    time: str | None = None
    content_type: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    of_type: str | None = None

    def __post_init__(self) -> None:
        for name, field in self.given.items():
            if not FIELD.fullmatch(field):
                raise ConfigurationError(
                    f"{name}: {field!r} is not a field of a JSON object: write a name, or a.b for one in another object"
                )

    @property
    def given(self) -> dict[str, str]:
        """Fields by the parts that they are given for."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "of_type"}
        return {name: field for name, field in named.items() if field is not None}

    def row(self, line: bytes) -> tuple[Row, Unreadable | None]:
        """Return a line as a row whose body it is, and why it has to be parked; what is not JSON is parked when it is handled."""
        document = _parsed(line)
        if not isinstance(document, dict):
            return Row(line, type=self.of_type), None
        found = {
            name: _find(document, field) for name, field in ({"id": "id", "type": "type", "time": "time"} | self.given).items()
        }
        if "content_type" not in found and document.get("specversion") is not None:
            found["content_type"] = STRUCTURED
        if self.of_type is not None:
            found["type"] = self.of_type
        texts: dict[str, Any] = {name: _text(value) for name, value in found.items() if name != "time"}
        if (id := found["id"]) is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
            texts["id"] = f"{REPLACED}{json.dumps(id)} {UNREADABLE_ID}"  # which is refused in an id
        try:
            return Row(line, time=_seconds(found["time"]), **texts), None
        except Unreadable as error:
            return Row(line, **texts), error

    def check(self, lines: list[bytes]) -> None:
        """Refuse a field that none of the first lines has, and that is then misspelt.

        Raises:
            ConfigurationError: There is one.
        """
        seen = [document for line in lines[:LOOKED_AT] if isinstance(document := _parsed(line), dict)]
        for name, field in self.given.items():
            if seen and all(_find(document, field, _ABSENT) is _ABSENT for document in seen):
                known = ", ".join(sorted({str(each) for document in seen for each in document}))
                raise ConfigurationError(f"{name}: none of {len(seen)} lines that were read has {field!r}: they have {known}")


_ABSENT: Final = object()


def read_lines(path: Path, rows: int) -> Iterator[list[tuple[int, bytes]]]:
    r"""Return the lines of a file with their numbers, in chunks, without blank ones. A file that ends in `.gz` is unpacked.

    Raises:
        ConfigurationError: The file cannot be read, or not further than the lines that were returned.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"{}\n\n{}\r\n[]"), file.flush()
        ...     list(read_lines(Path(file.name), 2))
        [[(1, b'{}'), (3, b'{}')], [(4, b'[]')]]
    """
    chunk: list[tuple[int, bytes]] = []
    number, failed = 0, None
    try:
        with cast("IO[bytes]", gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")) as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(BOM.encode()) if number == 1 else line
                chunk += [(number, part) for part in re.split(rb"[\r\n]", text) if part.strip()]
                if len(chunk) >= rows:
                    yield chunk
                    chunk = []
    except (OSError, EOFError, zlib.error) as error:
        failed = error
    if chunk:
        yield chunk
    if failed is not None:
        done = f"its first {number} lines are handled, and those behind are not" if number else "nothing was handled"
        raise ConfigurationError(f"{path} cannot be read: {describe_error(failed)}; {done}")


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return a row that was not handled for a line of JSON that a person can edit: its body is text, or Base64 if it is not UTF-8.

    Example:
        >>> readable({"row": "7f", "id": "a", "body": b"{}", "files": []}), readable({"body": b"\xff"})
        ({'id': 'a', 'type': None, 'row': '7f', 'body': '{}'}, {'id': None, 'type': None, 'body_base64': '/w=='})
    """
    known = {"id": None, "type": None, **row}  # shown even if a correction has yet to name them
    shown = {name: value for name, value in known.items() if name not in ("body", "files") and (value is not None or name in ID)}
    body = row["body"]
    if body is None:
        return shown
    try:
        return shown | {"body": bytes(body).decode()}
    except UnicodeDecodeError:
        return shown | {"body_base64": b64encode(body).decode()}


def edited(number: int, line: str | bytes) -> dict[str, Any]:
    """Return the parts of a row in a line that `readable` has written, and its `row`.

    Args:
        number: Of the line, for the text of the error.
        line: JSON.

    Raises:
        ConfigurationError: The line is no such row.

    Example:
        >>> edited(1, '{"id": "a", "type": "shop.Pay", "body": "{}", "rule": "handler"}')["body"]
        b'{}'
    """
    try:
        row = json.loads(line)
        body = row["body"].encode() if "body" in row else None
        if "body_base64" in row:
            body = b64decode(row["body_base64"], validate=True)
        texts = {name: row.get(name) for name in ("row", *PARTS) if name not in ("time", "body")}
        if not all(text is None or isinstance(text, str) for text in texts.values()):
            raise TypeError("a value is not text")
        if unknown := sorted(row.keys() - {"row", "body_base64", *PARTS, *REASONS}):
            raise TypeError(f"unknown: {', '.join(unknown)}")
        moment = None if row.get("time") is None else float(row["time"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"line {number} is not a parked row, as idemp writes them: {error}; it was not handled"
        ) from None
    return texts | {"time": moment, "body": body}


def reread(number: int, line: bytes) -> Row:
    """Return a parked row, edited or not, as a row to handle.

    Raises:
        ConfigurationError: The line is no parked row.

    Example:
        >>> reread(1, b'{"id": "a", "type": "shop.Pay", "body": "{}"}').id
        'a'
    """
    return Row(**{name: value for name, value in edited(number, line).items() if name != "row"})


def parked_line(row: Row, parked: Parked) -> str:
    """Return a row that was not handled, and why, as a line of JSON that can be edited and read again.

    Example:
        >>> from idemp.bulk.rows import Answer
        >>> parked_line(Row(b"{", id="7"), Parked(0, Answer.PARKED, "unreadable", "Unreadable: …"))
        '{"id": "7", "type": null, "answer": "parked", "rule": "unreadable", "error": "Unreadable: …", "body": "{"}'
    """
    parts = {name: getattr(row, name) for name in PARTS}
    headers = parts["headers"]
    parts["headers"] = headers if headers is None or isinstance(headers, str) else json.dumps(dict(headers))
    reasons = {"answer": parked.answer.value, "rule": parked.rule, "error": parked.error}
    shown = readable({**parts, **reasons})
    text = json.dumps(shown, ensure_ascii=False)
    return text if _is_storable(text) else json.dumps(shown)


def _is_storable(text: str) -> bool:
    with suppress(UnicodeEncodeError):  # a lone surrogate
        return bool(text.encode())
    return False


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _find(value: Any, path: str, otherwise: Any = None) -> Any:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return otherwise
        value = value[name]
    return value


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _seconds(value: Any) -> float | None:
    """Return a time in seconds.

    Raises:
        Unreadable: It is none: the age of the message would be unknown, and a late one would run again.
    """
    if value is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        if isinstance(value, str) and not NUMBER.fullmatch(value):
            found = datetime.fromisoformat(ZONE.sub("Z", value))
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        if not isinstance(value, bool) and isfinite(number := float(value)):
            return number
    raise Unreadable(f"the time {str(value)[:100]!r} is neither seconds since 1970 nor ISO 8601")
