"""Metrics for Prometheus. Needs the extra: `pip install 'idemp[prometheus]'`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from idemp.broker.port import Park, Retry
from idemp.inbox.port import Verdict
from idemp.telemetry import Telemetry, Watch
from idemp.telemetry.catalogue import METRICS, UNKNOWN_TYPE, known_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.broker.port import Delivery, Refusal, Settlement
    from idemp.inbox.port import Claimed, PendingState
    from idemp.messages import Output
    from idemp.outcome import Outcome
    from idemp.relay import Round
    from idemp.telemetry import EffectResult, Via
    from idemp.work import Consumer, Work

OTHER: Final = "other"
_MOST_REASONS: Final = 100


class Metrics(Telemetry):
    """The metrics of one process, in a registry of their own. Safe to share between threads.

    Args:
        registry: where they are registered; default a new one. One registry takes one `Metrics`.

    Raises:
        ValueError: the registry has metrics of these names already.

    Example:
        >>> from prometheus_client import generate_latest
        >>> metrics = Metrics()
        >>> metrics.purged("orders", 3, lag=1.5)
        >>> b'idemp_purge_lag_seconds{consumer="orders"} 1.5' in generate_latest(metrics.registry)
        True
    """

    reads_state = True

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._families: dict[str, Any] = {}
        self._reasons: set[str] = set()
        for name, metric in METRICS.items():
            arguments = (name, metric.meaning, metric.labels)
            if metric.kind == "histogram":
                self._families[name] = Histogram(*arguments, buckets=metric.buckets, registry=self.registry)
            else:
                kind = Counter if metric.kind == "counter" else Gauge
                self._families[name] = kind(*arguments, registry=self.registry)

    def series(self, name: str, *labels: str) -> Any:
        """The series of a metric with these label values, in the order of the catalogue."""
        family = self._families[name]
        return family.labels(*labels) if labels else family

    def watch(self, consumer: Consumer | None) -> Watch:
        """A watch for one thread."""
        return _PrometheusWatch(self, consumer)

    def relayed(self, round: Round) -> None:
        """Count the round, and what it gave up."""
        self.series("idemp_relay_rounds_total").inc()
        self.series("idemp_quarantined_total").inc(round.quarantined)

    def effect(self, name: str, result: EffectResult, seconds: float) -> None:
        """Count the run, and how long it took."""
        self.series("idemp_effects_total", name, result).inc()
        self.series("idemp_effect_seconds", name).observe(seconds)

    def pending(self, state: PendingState) -> None:
        """Show what waits now."""
        self.series("idemp_pending_outputs", "waiting").set(state.count - state.quarantined)
        self.series("idemp_pending_outputs", "quarantined").set(state.quarantined)
        self.series("idemp_oldest_pending_seconds").set(state.oldest_seconds)

    def purged(self, consumer: str, claims: int, lag: float | None) -> None:
        """Count what went, show what stays too long."""
        self.series("idemp_purged_claims_total", consumer).inc(claims)
        if lag is not None:
            self.series("idemp_purge_lag_seconds", consumer).set(lag)

    def reason(self, name: str) -> str:
        """A dead letter's reason as label: error classes are few, but nothing forces them to be."""
        if name in self._reasons or len(self._reasons) < _MOST_REASONS:
            self._reasons.add(name)
            return name
        return OTHER


class _PrometheusWatch(Watch):
    def __init__(self, metrics: Metrics, consumer: Consumer | None) -> None:
        self._series = metrics.series
        self._reason = metrics.reason
        self._consumer = consumer
        self._name = consumer.name if consumer is not None else ""
        self._type = UNKNOWN_TYPE
        self._work: Work | None = None
        self._delivery: Delivery | None = None
        self._outcome = ""
        self._in_flight = False
        self._arrived = self._called = self._handed_over = 0.0

    def begins(self, delivery: Delivery) -> None:
        self._delivery, self._work, self._type, self._outcome = delivery, None, UNKNOWN_TYPE, ""
        self._arrived = time.perf_counter()

    def decoded(self, work: Work) -> None:
        self._work, self._type = work, work.registration.message_type

    def handler_begins(self) -> None:
        self._called = time.perf_counter()
        if self._work is not None and self._work.policy.idempotent:
            self._in_flight = True
            self._series("idemp_claims_in_flight", self._name, self._type).inc()

    def handler_ended(self) -> None:
        seconds = time.perf_counter() - self._called
        self._series("idemp_handler_seconds", self._name, self._type).observe(seconds)

    def transaction_ended(self) -> None:
        if self._in_flight:
            self._in_flight = False
            self._series("idemp_claims_in_flight", self._name, self._type).dec()

    def repeats(self, error: Exception) -> None:
        del error
        self._series("idemp_retries_total", self._name, self._type, "immediate").inc()

    def not_claimed(self, claimed: Claimed) -> None:
        if claimed.verdict is not Verdict.DUPLICATE:
            return
        self._series("idemp_duplicates_total", self._name, self._type).inc()
        if claimed.claimed_at is not None and self._consumer is not None:
            age = (self._consumer.clock.now() - claimed.claimed_at).total_seconds()
            self._series("idemp_duplicate_age_seconds", self._name).observe(max(0.0, age))

    def sends(self, outputs: Sequence[Output], via: Via) -> None:
        del outputs, via
        self._handed_over = time.perf_counter()

    def sent(self, outputs: Sequence[Output], answers: Sequence[Refusal | None], via: Via) -> None:
        del outputs
        seconds = time.perf_counter() - self._handed_over
        self._series("idemp_confirm_seconds", self._name, via).observe(seconds)
        for answer in answers:
            result = "confirmed" if answer is None else answer.kind
            self._series("idemp_outputs_total", self._name, via, result).inc()

    def failed(self, error: Exception) -> None:
        del error
        if self._work is None and self._delivery is not None and self._consumer is not None:
            self._type = known_type(self._consumer, self._delivery.message)

    def ended(self, outcome: Outcome, settlement: Settlement | None) -> None:
        self._outcome = outcome.name.lower()
        if isinstance(settlement, Retry):
            kind = "delayed" if settlement.counted else "uncounted"
            self._series("idemp_retries_total", self._name, self._type, kind).inc()
        elif isinstance(settlement, Park):
            reason = self._reason(settlement.reason)
            self._series("idemp_dead_letters_total", self._name, self._type, reason).inc()

    def left(self, error: BaseException | None) -> None:
        del error
        outcome = self._outcome or "raised"
        self._series("idemp_deliveries_total", self._name, self._type, outcome).inc()
        seconds = time.perf_counter() - self._arrived
        self._series("idemp_delivery_seconds", self._name, outcome).observe(seconds)
        self._delivery = self._work = None
