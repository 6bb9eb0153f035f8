"""What asynchronous peers share: a gate is waited for without holding up the loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.outside import Seat


async def opened(seat: Seat) -> None:
    """Wait until deliveries may be handled."""
    if not seat.gate.opened.is_set():
        await asyncio.to_thread(seat.gate.opened.wait)


async def until_stopped(seat: Seat) -> None:
    """Wait for the end."""
    await asyncio.to_thread(seat.gate.stopped.wait)


def amqp_url(url: str) -> str:
    """As other libraries than kombu call it."""
    return url.replace("pyamqp://", "amqp://", 1)
