"""What a dead letter tells: the original message stays intact, the story stands in its headers."""

from __future__ import annotations

import os
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from idemp.messages import ATTEMPT_HEADER, DEAD_PREFIX, DEFERRED_HEADER, FIRST_SEEN_HEADER, counter
from idemp.showing import class_of, stack_of, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from idemp.broker.port import Delivery
    from idemp.clock import Clock
    from idemp.messages import Message

MAX_ERROR_CHARACTERS: Final = 1_000
MAX_STACK_CHARACTERS: Final = 4_000
"""AMQP headers share one frame of 128 KiB: an error's story has to stay small."""
UNKNOWN_VERSION: Final = "unknown"
REPLAYS_HEADER: Final = f"{DEAD_PREFIX}replays"
REPLAYED_AT_HEADER: Final = f"{DEAD_PREFIX}replayed-at"
FIRST_AT_HEADER: Final = f"{DEAD_PREFIX}first-at"
_OF_RETRIES: Final = (ATTEMPT_HEADER, DEFERRED_HEADER, FIRST_SEEN_HEADER)
# Properties of the original that no copy can carry as such stand in headers: they have to outlive a replay, too.
_KEPT: Final = (FIRST_AT_HEADER, f"{DEAD_PREFIX}expiration", f"{DEAD_PREFIX}user-id")


def dead_letter_headers(
    delivery: Delivery,
    error: BaseException,
    consumer: str,
    clock: Clock,
    app_version: str = UNKNOWN_VERSION,
    *,
    because: str = "",
) -> dict[str, Any]:
    """The headers of a parked message: why, after how many attempts, when first and last, where and by which version.

    `because` is the rule by which it is not tried again.

    The first failure is that before any replay; the attempts are those since the last one.
    """
    headers = delivery.message.headers
    now = clock.now().isoformat()
    story = {
        "reason": class_of(error),
        "error": text_of(error)[:MAX_ERROR_CHARACTERS],
        **({"because": because} if because else {}),
        "stack": stack_of(error, limit=-12)[-MAX_STACK_CHARACTERS:],
        "attempts": delivery.attempt,
        "first-at": headers.get(FIRST_AT_HEADER) or headers.get(FIRST_SEEN_HEADER, now),
        "last-at": now,
        "queue": delivery.queue,
        "consumer": consumer,
        "host": f"{socket.gethostname()}:{os.getpid()}",
        "version": idemp_version(),
        "app-version": app_version,
    }
    replayed = {name: headers[name] for name in (REPLAYS_HEADER, REPLAYED_AT_HEADER) if name in headers}
    return {**{f"{DEAD_PREFIX}{name}": value for name, value in story.items()}, **replayed}


def without_story(message: Message) -> Message:
    """The original of a dead letter, as it is replayed: attempts start again.

    Example:
        >>> from idemp.messages import Message
        >>> without_story(Message(body=b"{}", headers={"idemp-dead-reason": "Refuse", "tenant": 1})).headers
        {'tenant': 1}
    """
    gone = [name for name in message.headers if name.startswith(DEAD_PREFIX)]
    return message.with_headers(**dict.fromkeys([*gone, *_OF_RETRIES]))


def replayed_headers(headers: Mapping[str, Any], at: datetime) -> dict[str, Any]:
    """The headers with which a dead letter is replayed: the original's, how often that was done, and when last.

    Example:
        >>> from datetime import UTC, datetime
        >>> noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
        >>> first = replayed_headers({"idemp-dead-reason": "Refuse", "idemp-attempt": 7, "tenant": 1}, noon)
        >>> first
        {'tenant': 1, 'idemp-dead-replays': 1, 'idemp-dead-replayed-at': '2025-01-01T12:00:00+00:00'}
        >>> replayed_headers(first, noon)["idemp-dead-replays"]
        2
    """
    kept = {
        name: value
        for name, value in headers.items()
        if name in _KEPT or not (name.startswith(DEAD_PREFIX) or name in _OF_RETRIES)
    }
    return {**kept, REPLAYS_HEADER: counter(headers, REPLAYS_HEADER) + 1, REPLAYED_AT_HEADER: at.isoformat()}


@cache
def idemp_version() -> str:
    """The installed version of idemp, read from disk once."""
    try:
        return version("idemp")
    except PackageNotFoundError:  # running from a source tree that was never installed
        return "unknown"
