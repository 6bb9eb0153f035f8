"""What a running service tells about itself: the port that metrics and traces implement.

Nothing is loaded and nothing is counted unless somebody asks for it: `SILENT` stands in all places where telemetry may be.

>>> from idemp.telemetry import Telemetry, Watch
>>> class Outcomes(Watch):
...     def ended(self, outcome, settlement):
...         print(outcome.value)
>>> class MyTelemetry(Telemetry):
...     def watch(self, consumer):
...         return Outcomes()
>>> from idemp import App
>>> from idemp.inbox.memory import InMemoryStore
>>> app = App("shop", store=InMemoryStore(), broker="local://shop.db", telemetry=MyTelemetry())
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from idemp.showing import by_signal, class_of, logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from idemp.broker.port import Delivery, Endpoint, Refusal, Settlement
    from idemp.inbox.port import Claimed, PendingState
    from idemp.messages import Output
    from idemp.outcome import Outcome
    from idemp.relay import Round
    from idemp.work import Consumer, Work

__all__ = ["SILENT", "UNWATCHED", "EffectResult", "Telemetry", "Via", "Watch", "together"]

log = logger("idemp.telemetry")

Via = Literal["dispatch", "redispatch", "relay", "prepared"]
"""Who sends outputs: their own handling, a redelivery, a relay, or whoever decided a prepared message."""

EffectResult = Literal["done", "failed", "refused"]
"""What became of one run of an effect: `failed` is tried again while it has attempts left, `refused` is not."""

_NOTHING = nullcontext()


class Watch:
    """Sees deliveries of one thread, one after the other, in the order of their lives. Here nothing looks.

    Override what you want to know. A method that raises is logged and otherwise ignored.

    Example:
        >>> with Watch().delivery(None):
        ...     pass
    """

    def reaches(self, endpoint: Endpoint) -> None:
        """The broker, told once before all else."""

    def delivery(self, delivery: Delivery) -> AbstractContextManager[None]:
        """Around one delivery: `begins` at its start, `left` at its end."""
        del delivery
        return _NOTHING

    def transaction(self) -> AbstractContextManager[None]:
        """Around a transaction in which a handler may run: `transaction_ended` at its end."""
        return _NOTHING

    def turn(self) -> AbstractContextManager[None]:
        """Around what is done about one of several deliveries: `resumes` at its start, `waits` at its end."""
        return _NOTHING

    def looks(self) -> bool:
        """Whether it wants to know of the next delivery, of which it hears nothing otherwise; asked before it begins."""
        return True

    def begins(self, delivery: Delivery) -> None:
        """A delivery is about to be decoded."""

    def decoded(self, work: Work) -> None:
        """Its type, its id and its policy are known."""

    def handler_begins(self) -> None:
        """The handler is called; an early claim holds its id by now."""

    def handler_ended(self) -> None:
        """The handler returned or raised."""

    def transaction_ended(self) -> None:
        """The transaction ended, by COMMIT or ROLLBACK."""

    def repeats(self, error: Exception) -> None:
        """The whole delivery runs again at once, since the database asked for it."""

    def not_claimed(self, claimed: Claimed) -> None:
        """Somebody else had the id: a duplicate, in flight, or a conflict."""

    def sends(self, outputs: Sequence[Output], via: Via) -> None:
        """Outputs are handed to the broker."""

    def sent(self, outputs: Sequence[Output], answers: Sequence[Refusal | None], via: Via) -> None:
        """The broker answered, or its time was over; `None` is a confirm."""

    def waits(self) -> None:
        """It stops, and other deliveries of this thread, with watches of their own, may come before it goes on.

        It does so to share a transaction with them, and while its outputs are on their way.
        """

    def resumes(self) -> None:
        """It goes on."""

    def failed(self, error: Exception) -> None:
        """The delivery failed; how it ends follows."""

    def ended(self, outcome: Outcome, settlement: Settlement | None) -> None:
        """What became of it, and how it will be settled; `None` if its caller settles it."""

    def left(self, error: BaseException | None) -> None:
        """The last word on a delivery. With an error it did not end: it is held and runs again, or its caller decides."""


class Telemetry:
    """Sees what happens in one process. Here nothing looks.

    Attributes:
        reads_state: whether `pending` and `purged` are wanted, each of which costs a query once in a while.

    Example:
        >>> Telemetry().trace_headers()
        {}
    """

    reads_state: bool = False

    def watch(self, consumer: Consumer | None) -> Watch:
        """A watch for one thread; without a consumer it is a relay's, which has no deliveries.

        A thread has as many as it has deliveries that wait for others, or for the broker's confirms.
        """
        del consumer
        return UNWATCHED

    def trace_headers(self) -> Mapping[str, str]:
        """The headers by which outputs that are emitted now carry the present trace on; none, if there is no trace."""
        return {}

    def relayed(self, round: Round) -> None:
        """A relay ended a round in which it found work."""

    def effect(self, name: str, result: EffectResult, seconds: float) -> None:
        """An effect was run, and took so long."""

    def pending(self, state: PendingState) -> None:
        """What waits for a confirm in this process's databases; told every few seconds."""

    def purged(self, consumer: str, claims: int, lag: float | None) -> None:
        """A cleaner deleted claims; the oldest one that it left is `lag` seconds past its window, `None` if unknown."""


SILENT = Telemetry()
"""Looks at nothing."""

UNWATCHED = Watch()
"""Of all deliveries that nothing looks at."""


def together(*parts: Telemetry) -> Telemetry:
    """Several as one. What one of them raises is logged once for each of its methods, and reaches no delivery.

    Example:
        >>> together(SILENT) is SILENT
        True
    """
    flat = [each for part in parts for each in (part.parts if isinstance(part, _Together) else (part,))]
    wanted = tuple(part for part in dict.fromkeys(flat) if part is not SILENT)
    return _Together(wanted) if wanted else SILENT


class _Fan:
    """Calls a method of each, carefully."""

    def __init__(self, failed: set[tuple[type, str]]) -> None:
        self._failed = failed

    def _each(self, targets: Sequence[Any], name: str, *arguments: Any) -> list[Any]:
        answers = []
        for target in targets:
            try:
                answers.append(getattr(target, name)(*arguments))
            except BaseException as error:  # what looks on must not change what happens
                if by_signal(error):
                    raise
                if (known := (type(target), name)) not in self._failed:
                    self._failed.add(known)
                    where = f"{class_of(target)}.{name}"
                    log.exception("telemetry failed, and is not mentioned again: %s", where, extra={
                        "event": "telemetry_failed", "method": where,
                    })  # fmt: skip
        return answers


class _Together(_Fan, Telemetry):
    def __init__(self, parts: tuple[Telemetry, ...]) -> None:
        super().__init__(set())
        self.parts = parts
        self.reads_state = any(part.reads_state for part in parts)

    def watch(self, consumer: Consumer | None) -> Watch:
        return _Watches(self._each(self.parts, "watch", consumer), self._failed)

    def trace_headers(self) -> Mapping[str, str]:
        merged: dict[str, str] = {}
        for headers in self._each(self.parts, "trace_headers"):
            merged.update(headers)
        return merged

    def relayed(self, round: Round) -> None:
        self._each(self.parts, "relayed", round)

    def effect(self, name: str, result: EffectResult, seconds: float) -> None:
        self._each(self.parts, "effect", name, result, seconds)

    def pending(self, state: PendingState) -> None:
        self._each(self.parts, "pending", state)

    def purged(self, consumer: str, claims: int, lag: float | None) -> None:
        self._each(self.parts, "purged", consumer, claims, lag)


class _Watches(_Fan, Watch):
    def __init__(self, watches: Sequence[Watch], failed: set[tuple[type, str]]) -> None:
        super().__init__(failed)
        self._all = self._watches = tuple(watches)

    def looks(self) -> bool:
        return any(self._each(self._all, "looks"))

    def delivery(self, delivery: Delivery) -> AbstractContextManager[None]:
        self._watches = tuple(watch for watch in self._all if any(self._each((watch,), "looks")))
        return self._delivery(delivery) if self._watches else _NOTHING

    def transaction(self) -> AbstractContextManager[None]:
        return self._transaction() if self._watches else _NOTHING

    def turn(self) -> AbstractContextManager[None]:
        return self._turn() if self._watches else _NOTHING

    @contextmanager
    def _delivery(self, delivery: Delivery) -> Iterator[None]:
        self.begins(delivery)
        try:
            yield
        except BaseException as error:
            self.left(error)
            raise
        self.left(None)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.transaction_ended()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self.resumes()
        try:
            yield
        finally:
            self.waits()

    def reaches(self, endpoint: Endpoint) -> None:
        self._each(self._all, "reaches", endpoint)

    def begins(self, delivery: Delivery) -> None:
        self._each(self._watches, "begins", delivery)

    def decoded(self, work: Work) -> None:
        self._each(self._watches, "decoded", work)

    def handler_begins(self) -> None:
        self._each(self._watches, "handler_begins")

    def handler_ended(self) -> None:
        self._each(self._watches, "handler_ended")

    def transaction_ended(self) -> None:
        self._each(self._watches, "transaction_ended")

    def repeats(self, error: Exception) -> None:
        self._each(self._watches, "repeats", error)

    def not_claimed(self, claimed: Claimed) -> None:
        self._each(self._watches, "not_claimed", claimed)

    def sends(self, outputs: Sequence[Output], via: Via) -> None:
        self._each(self._watches, "sends", outputs, via)

    def sent(self, outputs: Sequence[Output], answers: Sequence[Refusal | None], via: Via) -> None:
        self._each(self._watches, "sent", outputs, answers, via)

    def waits(self) -> None:
        self._each(self._watches, "waits")

    def resumes(self) -> None:
        self._each(self._watches, "resumes")

    def failed(self, error: Exception) -> None:
        self._each(self._watches, "failed", error)

    def ended(self, outcome: Outcome, settlement: Settlement | None) -> None:
        self._each(self._watches, "ended", outcome, settlement)

    def left(self, error: BaseException | None) -> None:
        self._each(self._watches, "left", error)
