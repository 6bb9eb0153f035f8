"""Outputs whose confirm was never recorded, in stores without a relay: a worker sends them once more, and records it.

A delivery on such a store is acked after the confirms of its outputs. If its worker dies between the ack and the record of
the confirms, the delivery does not come again, and its outputs stay unconfirmed though they arrived.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from idemp.diagnosis import Diagnosis
from idemp.inbox.port import PendingOutput
from idemp.plurals import counted
from idemp.showing import logger

if TYPE_CHECKING:
    from uuid import UUID

    from idemp.clock import Clock
    from idemp.messages import Output

log = logger("idemp.relay")

T = TypeVar("T")

RESEND_AFTER: Final = timedelta(minutes=10)
"""Age of an output without a recorded confirm from which on it is sent again. Until then its own worker records it."""
SPREAD: Final = timedelta(minutes=1)
"""Each process waits for a random part of it in addition, so that of several workers mostly one sends."""
OVERDUE: Final = RESEND_AFTER + SPREAD + timedelta(minutes=5)
"""Age from which on no worker seems to send it again."""
LOOK_EVERY: Final = timedelta(seconds=30)
"""How often a process looks for such outputs, if it found none."""

Find = Callable[[Collection[str], datetime, int], Iterable[tuple[T, Sequence["Output"]]]]
"""Handlings of these consumers, committed and last refused before a moment, each with its unconfirmed outputs."""


@dataclass(slots=True)
class _Lent(Generic[T]):
    handling: T
    until: float
    attempts: int = 1


class Resending(Generic[T]):
    """Lends a worker's relay what nobody recorded. Leases are known to this process alone; copies have one id.

    Args:
        clock: source of time.
        find: finds handlings with unconfirmed outputs.
        confirm: records that outputs of a handling are confirmed.

    Attributes:
        consumers: those that this process consumes for. Outputs of others may belong to another broker.

    Example:
        >>> from idemp.testing.clock import FakeClock
        >>> resending = Resending(FakeClock(), lambda consumers, before, limit: [], lambda handling, ids: None)
        >>> resending.take(10, timedelta(seconds=30))
        []
    """

    def __init__(self, clock: Clock, find: Find[T], confirm: Callable[[T, tuple[UUID, ...]], None]) -> None:
        self.consumers: set[str] = set()
        self._clock = clock
        self._find = find
        self._confirm = confirm
        self._after = RESEND_AFTER + random.random() * SPREAD  # noqa: S311 - jitter, not a secret
        self._lent: dict[UUID, _Lent[T]] = {}
        self._looks_at = 0.0

    def take(self, limit: int, lease: timedelta) -> list[PendingOutput]:
        """Up to `limit` outputs that are old enough and not lent."""
        now = self._clock.monotonic()
        if not self.consumers or now < self._looks_at:
            return []
        found = self._find(self.consumers, self._clock.now() - self._after, limit + len(self._lent))
        unconfirmed = {output.id: (handling, output) for handling, outputs in found for output in outputs}
        self._lent = {id_: lent for id_, lent in self._lent.items() if id_ in unconfirmed or lent.until > now}
        due = [each for id_, each in unconfirmed.items() if id_ not in self._lent or self._lent[id_].until <= now][
            :limit
        ]
        if not due:
            self._looks_at = now + LOOK_EVERY.total_seconds()
        return [self._lend(handling, output, now + lease.total_seconds()) for handling, output in due]

    def settle(self, confirmed: Iterable[UUID], failed: Iterable[UUID], retry_in: timedelta) -> None:
        """Record the confirmed ones; the others are due again after `retry_in`."""
        of_each: dict[int, tuple[T, list[UUID]]] = {}
        for id_ in confirmed:
            if (lent := self._lent.pop(id_, None)) is not None:
                of_each.setdefault(id(lent.handling), (lent.handling, []))[1].append(id_)
        for handling, ids in of_each.values():
            self._confirm(handling, tuple(ids))
            log.info(
                "sent again %s whose confirms were not recorded",
                counted(len(ids), "output"),
                extra={"event": "outputs_resent", "outputs": len(ids)},
            )
        for id_ in failed:
            if (lent := self._lent.get(id_)) is not None:
                lent.until = self._clock.monotonic() + retry_in.total_seconds()

    def _lend(self, handling: T, output: Output, until: float) -> PendingOutput:
        former = self._lent.get(output.id)
        lent = _Lent(handling, until, former.attempts + 1 if former else 2)  # the first was the handling's own
        self._lent[output.id] = lent
        return PendingOutput(output, lent.attempts)


def unconfirmed(count: int, age: timedelta | None) -> Diagnosis:
    """The line about outputs whose confirm is not recorded.

    Args:
        count: how many.
        age: of the oldest; `None` if there is none.

    Example:
        >>> unconfirmed(0, None).detail
        'none'
    """
    if age is None or not count:
        return Diagnosis("ok", "unconfirmed outputs", "none")
    minutes = counted(round(age.total_seconds() / 60), "minute")
    detail = f"{counted(count, 'output')} without a recorded confirm, the oldest for {minutes}"
    if age <= OVERDUE:
        return Diagnosis("ok", "unconfirmed outputs", detail)
    fix = (
        "Run a worker of the app whose settings do not switch its relay off: it sends them once more. If one runs, the "
        "broker refuses them: see its log, and the delay tiers of the queue."
    )
    return Diagnosis("warning", "unconfirmed outputs", detail, fix)
