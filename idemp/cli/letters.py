"""Dead letters as a command sees them: which ones are wanted, and what is shown of each."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from idemp.cloudevents import unwrap
from idemp.durations import parse_duration
from idemp.errors import MessageError
from idemp.messages import DEAD_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from idemp.messages import Message

#: Field to heading: what a list shows of each.
COLUMNS: Final = {
    "message_id": "id",
    "type": "type",
    "reason": "reason",
    "attempts": "attempts",
    "replays": "replays",
    "first_at": "first at",
    "last_at": "last at",
    "error": "error",
}
_STORY: Final = (
    "reason",
    "error",
    "attempts",
    "replays",
    "replayed_at",
    "first_at",
    "last_at",
    "consumer",
    "app_version",
    "host",
    "version",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which dead letters are wanted: those for which everything holds that is given.

    Attributes:
        ids: message ids, or ids of CloudEvents.
        type: the message type.
        reason: class name of the error.
        error: what the error's text contains, in capitals or not.
        since: the last failure was then or later; a letter that has no time is left out.
        until: the last failure was then or earlier.
        where: headers with their values, as text.

    Example:
        >>> from idemp.messages import Message
        >>> parked = Message(body=b"", headers={"tenant": 7, "idemp-dead-reason": "KeyError"})
        >>> Filters(reason="KeyError", where=(("tenant", "7"),)).wants(parked), Filters(reason="Refuse").wants(parked)
        (True, False)
    """

    ids: frozenset[str] = frozenset()
    type: str | None = None
    reason: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    where: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(
        cls,
        ids: Sequence[str] | None = None,
        *,
        type: str | None = None,
        reason: str | None = None,
        error: str | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Sequence[str] | None = None,
    ) -> Filters:
        """From what stands on the command line.

        Raises:
            typer.BadParameter: a time or a header that can't be read.
        """
        return cls(
            ids=frozenset(ids or ()),
            type=type,
            reason=reason,
            error=error,
            since=None if since is None else moment(since),
            until=None if until is None else moment(until),
            where=tuple(_pair(item) for item in where or ()),
        )

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self != Filters()

    def wants(self, message: Message) -> bool:
        """Whether all of them hold for a dead letter."""
        told, read = story(message), as_read(message)
        return (
            (not self.ids or not self.ids.isdisjoint({message.message_id, read.message_id}))
            and self.type in {None, message.type, read.type}
            and self.reason in {None, told.get("reason")}
            and (self.error is None or self.error.casefold() in str(told.get("error", "")).casefold())
            and self._in_time(told.get("last_at"))
            and all(_says({**read.headers, **message.headers}, name, value) for name, value in self.where)
        )

    def _in_time(self, last_at: object) -> bool:
        if self.since is None and self.until is None:
            return True
        try:
            at = _aware(datetime.fromisoformat(str(last_at)))
        except ValueError:
            return False
        return (self.since is None or at >= self.since) and (self.until is None or at <= self.until)


def moment(text: str, now: datetime | None = None) -> datetime:
    """A time, or a duration ago; a time without a zone is UTC, as in what is listed.

    Raises:
        typer.BadParameter: it is neither.

    Example:
        >>> moment("2h", datetime(2025, 1, 1, 12, tzinfo=UTC)).isoformat(), moment("2025-01-01 10:30").isoformat()
        ('2025-01-01T10:00:00+00:00', '2025-01-01T10:30:00+00:00')
    """
    try:
        return (now or datetime.now(UTC)) - parse_duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        return _aware(datetime.fromisoformat(text))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a time such as 2025-01-01T10:30 nor a duration ago such as 2h."
        ) from None


def as_read(message: Message) -> Message:
    """What a consumer makes of it: a CloudEvent's id and type stand in headers or in the body.

    Example:
        >>> from idemp.messages import Message
        >>> event = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "orders.Placed"}
        >>> binary = Message(body=b"{}", headers={f"cloudEvents:{name}": value for name, value in event.items()})
        >>> as_read(binary).message_id, as_read(binary).type
        ('e-1', 'orders.Placed')
    """
    try:
        return unwrap(message)
    except MessageError:
        return message  # that is why it was parked


def story(message: Message) -> dict[str, Any]:
    """What the headers of a dead letter tell, without their prefix."""
    return {
        name.removeprefix(DEAD_PREFIX).replace("-", "_"): value
        for name, value in message.headers.items()
        if name.startswith(DEAD_PREFIX)
    }


def row(message: Message) -> dict[str, Any]:
    """What a list has of a dead letter, with stable field names."""
    told, read = {"replays": 0, **story(message)}, as_read(message)
    return {"message_id": read.message_id, "type": read.type, **{name: told.get(name) for name in _STORY}}


def whole(message: Message, properties: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All of a dead letter: its story, and the original with its properties, headers and body.

    Args:
        message: the dead letter.
        properties: all of its properties as the broker has them, where that is more than the message knows.
    """
    told = story(message)
    headers = {name: value for name, value in message.headers.items() if not name.startswith(DEAD_PREFIX)}
    return {
        **row(message),
        "because": told.get("because"),
        "queue": told.get("queue"),
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "timestamp": message.timestamp,
        "content_type": message.content_type,
        "priority": message.priority,
        "ttl": message.ttl,
        "properties": dict(properties) if properties is not None else None,
        "headers": headers,
        "body": message.body,
        "body_base64": None if _is_text(message.body) else base64.b64encode(message.body).decode(),
        "more": {name: value for name, value in told.items() if name not in {*_STORY, "because", "queue", "stack"}}
        or None,
        "stack": told.get("stack"),
    }


def _says(headers: Mapping[str, Any], name: str, value: str) -> bool:
    if name not in headers:
        return False
    found = headers[name]
    return value in {str(found), json.dumps(found)}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is no NAME=VALUE.")
    return name, value


def _aware(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _is_text(body: bytes) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
