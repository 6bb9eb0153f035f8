"""What a harness remembers of runs of handlers and of deliveries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from idemp.messages import HEADER_PREFIX, Message, Output

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Settlement
    from idemp.codecs import Types
    from idemp.outcome import Outcome

ToldOutput = tuple[str, str | None, bytes, dict[str, Any]]
"""Where an output goes, its type, its body and the user's own headers."""


@dataclass(eq=False)
class Execution:
    """One run of a handler.

    Attributes:
        message: what it got, as it arrived.
        attempt: 1 for the first run after which no failure was counted.
        redelivered: what the broker said of the delivery.
        outputs: what it emitted and returned, as (destination, type, body, headers), in order.
        error: what it raised.
        committed: whether its transaction was committed.
    """

    message: Message
    attempt: int
    redelivered: bool
    outputs: list[ToldOutput] = field(default_factory=list)
    error: BaseException | None = None
    committed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one delivery.

    Attributes:
        delivery: what arrived.
        outcome: how its handling ended; `None` where the process died or the delivery comes again as it was.
        settlement: how it was settled; `None` likewise.
        died: the point where the process died, if it did.
    """

    delivery: Delivery
    outcome: Outcome | None = None
    settlement: Settlement | None = None
    died: str | None = None


@dataclass(eq=False)
class Tally:
    """What was done in a harness since it was made.

    Attributes:
        messages: how many were sent, copies included.
        deliveries: how many.
        deaths: how often the process died at each crash point.
        not_seen: sentences about what could not be looked at, each once, in order.
        unseen: the same about what the handler did: a green test warns of it.
    """

    messages: int = 0
    deliveries: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    not_seen: dict[str, None] = field(default_factory=dict)
    unseen: dict[str, None] = field(default_factory=dict)


def endless(last: Step | None) -> str:
    """Why there may be no end, and how there could be one: begins with a space; empty where nothing was delivered."""
    if last is None:
        return ""
    message = last.delivery.message
    told = f" The last delivery was of {message.type} {message.message_id!r}"
    if not message.hops:
        return f"{told}. Does its policy retry for ever? Give it fewer attempts."
    return (
        f"{told}, number {message.hops} in a chain of messages, each caused by the one before. A flow that keeps itself "
        "going has to end in a test: say max_hops=3 in the policy of one of its types, and what is longer is parked."
    )


def told_output(output: Output) -> ToldOutput:
    """What the next consumer gets to see of an output."""
    place = output.routing_key or output.exchange
    ours = {name: value for name, value in output.message.headers.items() if not name.startswith(HEADER_PREFIX)}
    return place, output.message.type, output.message.body, ours


def told_returned(returned: Any, types: Types) -> list[ToldOutput]:
    """The same of what a handler returns."""
    if returned is None:
        return []
    if isinstance(returned, list | tuple):
        return [told for item in returned for told in told_returned(item, types)]
    name, body = types.encode(returned, None)
    return [(name or "", name, body, {})]
