"""What tests of brokers start from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from idemp.messages import Message, Output, OutputKind


class HandClock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.time = datetime(2025, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.time.timestamp()

    def go(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


def output(body: bytes = b"{}", *, key: str = "q", delay: float = 0.0, headers: dict[str, Any] | None = None) -> Output:
    """A message for the queue `q`, with an id of its own."""
    message = Message(body=body, message_id=str(uuid4()), headers=headers or {})
    return Output(
        id=UUID(message.message_id),
        ordinal=0,
        kind=OutputKind.SEND,
        exchange="",
        routing_key=key,
        message=message,
        delay=delay,
    )
