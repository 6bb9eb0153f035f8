"""What a dead letter tells: the original message stays intact, the story stands in its headers."""

from __future__ import annotations

import os
import socket
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from idemp.messages import DEAD_PREFIX, FIRST_SEEN_HEADER

if TYPE_CHECKING:
    from idemp.broker.port import Delivery
    from idemp.clock import Clock
    from idemp.messages import Message

MAX_ERROR_CHARACTERS: Final = 1_000
MAX_STACK_CHARACTERS: Final = 4_000
"""AMQP headers share one frame of 128 KiB: an error's story has to stay small."""


def dead_letter_headers(delivery: Delivery, error: BaseException, consumer: str, clock: Clock) -> dict[str, Any]:
    """The headers of a parked message: why, after how many attempts, when first and last, where and by which version."""
    stack = "".join(traceback.format_exception(error, limit=-12))
    now = clock.now().isoformat()
    story = {
        "reason": type(error).__name__,
        "error": str(error)[:MAX_ERROR_CHARACTERS],
        "stack": stack[-MAX_STACK_CHARACTERS:],
        "attempts": delivery.attempt,
        "first-at": delivery.message.headers.get(FIRST_SEEN_HEADER, now),
        "last-at": now,
        "queue": delivery.queue,
        "consumer": consumer,
        "host": f"{socket.gethostname()}:{os.getpid()}",
        "version": idemp_version(),
    }
    return {f"{DEAD_PREFIX}{name}": value for name, value in story.items()}


def without_story(message: Message) -> Message:
    """The original of a dead letter, as it is replayed: attempts start again.

    Example:
        >>> from idemp.messages import Message
        >>> without_story(Message(body=b"{}", headers={"idemp-dead-reason": "Refuse", "tenant": 1})).headers
        {'tenant': 1}
    """
    gone = [name for name in message.headers if name.startswith(DEAD_PREFIX)]
    return message.with_headers(**dict.fromkeys([*gone, "idemp-attempt", FIRST_SEEN_HEADER]))


def idemp_version() -> str:
    """The installed version of idemp."""
    try:
        return version("idemp")
    except PackageNotFoundError:  # running from a source tree that was never installed
        return "unknown"
