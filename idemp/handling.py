"""Deliveries on their way through the protocol, alone or in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import UUID

from idemp.context import BaseContext
from idemp.failures import Action, Decision, Phase, decide
from idemp.handlers import Handler
from idemp.messages import Delivery, Output
from idemp.policy import Retry
from idemp.ports import Claim, Verdict

__all__ = ["Handling", "batches", "parts"]

MANY: Final = 100
RETRY: Final = Retry()  # for deliveries of unknown types


@dataclass(slots=True, eq=False)
class Handling:
    """A delivery on its way through the protocol.

    Attributes:
        properties: Of the message; other than the delivery's if it is a CloudEvent.
        outputs: What the handler emitted, or what a duplicate found.
        result: What the handler that ran first has put into `ctx.result`.
        context: What the handler is given; None before it runs.
        claimer: Name of the worker that had claimed a duplicate.
        lazy: Whether its COMMIT has waited for no disk.
        notes: For hooks.
        error: Why it failed; None while it has not.
        decision: What becomes of a failed one.
        obstacle: Why the database takes no work, if the delivery is held.

    Example:
        >>> Handling(Delivery("billing", {}, b"{}")).poison
        False
    """

    delivery: Delivery
    handler: Handler | None = None
    message: Any = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    claim: Claim | None = None
    verdict: Verdict | None = None
    outputs: Sequence[Output] = ()
    result: bytes | None = None
    context: BaseContext | None = None
    phase: Phase = Phase.ACCEPT
    error: Exception | None = None
    decision: Decision | None = None
    obstacle: str = ""
    claimer: str = ""
    lazy: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    def decide(self, error: Exception, store: Any = None, *, own: bool = False, reruns: int = 0) -> Decision:
        """Return what becomes of the delivery if it fails with an error in its present phase; see `idemp.failures.decide`."""
        return decide(error, self.phase, self.retry, self.history, store, own=own, reruns=reruns)

    def fail(self, error: Exception, decision: Decision | None = None) -> None:
        """Note why the delivery failed, and what becomes of it; by default what the table says of an error of idemp's own."""
        self.error, self.decision, self.outputs = error, decision or self.decide(error), ()

    @property
    def action(self) -> Action | None:
        """Action for a failed delivery; None for one that was handled."""
        return self.decision.action if self.decision else None

    @property
    def parked(self) -> bool:
        """Whether it becomes a dead letter."""
        return self.action is Action.PARK

    @property
    def outcome(self) -> Literal["done", "retry", "dead"]:
        """What becomes of it, for metrics and logs."""
        if self.decision is None:
            return "done"
        return "dead" if self.parked else "retry"

    @property
    def held(self) -> bool:
        """Whether it opens the next group, because the database takes no work."""
        return self.decision is not None and self.decision.action is Action.HOLD

    @property
    def retry(self) -> Retry:
        """Retry rules of its type."""
        return self.handler.policy.retry if self.handler else RETRY

    @property
    def history(self) -> list[dict[str, Any]]:
        """Earlier failures."""
        return self.delivery.row.history if self.delivery.row else []

    @property
    def forced(self) -> bool:
        """Whether an operator replayed the message with force."""
        return bool(self.history) and bool(self.history[-1].get("forced"))

    @property
    def poison(self) -> bool:
        """Whether it ended its process as often as it may, each time alone: it is only claimed, as it may have been handled."""
        return self.delivery.row is not None and self.delivery.row.deaths_alone >= self.retry.attempts


def batches(group: Sequence[Handling]) -> list[list[Handling]]:
    """Split accepted deliveries into what shares a transaction. What is doubtful, and a second copy of an id, runs alone.

    Example:
        >>> batches([Handling(Delivery("billing", {}, b""), error=ValueError())])
        []
    """
    found: list[list[Handling]] = []
    filling: dict[str, list[Handling]] = {}
    seen = set()
    for handling in group:
        if handling.error is not None:
            continue
        handler, claim = handling.handler, handling.claim
        doubtful = handling.delivery.row is not None or claim is None or claim.former is not None
        if handler is None or handler.batch == 1 or doubtful or claim is None or claim.key in seen:
            found.append([handling])
            continue
        seen.add(claim.key)
        batch = filling.get(handler.type)
        if batch is None or len(batch) == handler.batch:
            batch = filling[handler.type] = []
            found.append(batch)
        batch.append(handling)
    for batch in found:
        if len(batch) > 1:
            batch.sort(key=_key)  # in one order everywhere, so that no two transactions wait for each other
    return found


def _key(handling: Handling) -> UUID:
    assert handling.claim is not None
    return handling.claim.key


def parts(handlings: Sequence[Handling], culprit: Handling | None) -> list[Sequence[Handling]]:
    """Split a batch that failed: before, at and after the culprit; in halves if it is unknown.

    After a culprit that came first, or before many, others may fail as well: halves keep the claims that are repeated few.

    Example:
        >>> batch = [Handling(Delivery("billing", {}, b"")) for _ in range(4)]
        >>> [len(part) for part in parts(batch, batch[1])], [len(part) for part in parts(batch, None)]
        ([1, 1, 2], [2, 2])
        >>> [len(part) for part in parts(batch, batch[0])]
        [1, 1, 2]
    """
    at = next((number for number, handling in enumerate(handlings) if handling is culprit), None)
    before, after = (0, 0) if at is None else (at, at + 1)
    middle = after if at and len(handlings) - after < MANY else (after + len(handlings)) // 2
    found = [handlings[:before], handlings[before:after], handlings[after:middle], handlings[middle:]]
    return [part for part in found if part]
