"""The metrics, in one table: what `prometheus.py` makes, and what the reference page says.

Every name begins with `idemp_`, units are base units, and no label ever holds an id: each takes a bounded number of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from idemp.errors import MessageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from idemp.messages import Message
    from idemp.work import Consumer

UNKNOWN_TYPE: Final = "unknown"
"""The type of messages that have no handler, as a label: what strangers write there must not become a series."""

_QUICK: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MINUTE, _HOUR, _DAY = 60.0, 3_600.0, 86_400.0
_AGES: Final = (
    1.0, 5.0, 15.0, _MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY, 14 * _DAY, 30 * _DAY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        kind: how Prometheus treats it.
        labels: what its series differ in.
        meaning: one sentence.
        buckets: upper bounds of a histogram, in its unit.
    """

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


METRICS: Final[Mapping[str, Metric]] = MappingProxyType({
    "idemp_deliveries_total": Metric(
        "counter",
        ("consumer", "type", "outcome"),
        "Deliveries by what became of them; `raised`: it did not end, and is held (the database is "
        "away) or left to its caller",
    ),
    "idemp_delivery_seconds": Metric(
        "histogram", ("consumer", "outcome"), "Time from arrival to the decision how to settle", _QUICK
    ),
    "idemp_handler_seconds": Metric("histogram", ("consumer", "type"), "Time in the handler, for each run of it", _QUICK),
    "idemp_claims_in_flight": Metric(
        "gauge",
        ("consumer", "type"),
        "Handlings of opted-in types between their claim and COMMIT or ROLLBACK, in this process",
    ),
    "idemp_duplicates_total": Metric("counter", ("consumer", "type"), "Deliveries that were handled before"),
    "idemp_duplicate_age_seconds": Metric(
        "histogram", ("consumer",), "Time from the first handling's claim to its duplicate", _AGES
    ),
    "idemp_retries_total": Metric(
        "counter",
        ("consumer", "type", "kind"),
        "Runs again: `immediate` (at once, the database asked for it), `delayed` (the handler failed, an attempt is "
        "counted), `uncounted` (comes back without counting: in flight elsewhere, or not confirmed)",
    ),
    "idemp_dead_letters_total": Metric(
        "counter", ("consumer", "type", "reason"), "Deliveries parked, by the class of the error; beyond 100 of them `other`"
    ),
    "idemp_outputs_total": Metric(
        "counter",
        ("consumer", "via", "result"),
        "Outputs sent by `dispatch`, `redispatch`, `relay` or `prepared` (which name no consumer), by the broker's "
        "answer: `confirmed`, `nacked`, `returned`, `timeout`, `blocked`, `closed`, `unsendable`",
    ),
    "idemp_confirm_seconds": Metric(
        "histogram", ("consumer", "via"), "Time from handing over a batch of outputs to the broker's last answer", _QUICK
    ),
    "idemp_relay_rounds_total": Metric("counter", (), "Rounds of a relay that found work"),
    "idemp_quarantined_total": Metric("counter", (), "Outputs that a relay gave up after too many refusals"),
    "idemp_pending_outputs": Metric(
        "gauge",
        ("state",),
        "Outputs without a confirm in the database: `waiting` or `quarantined`; counted up to 100000. Every worker and "
        "relay on a database tells the same: take the maximum, not the sum",
    ),
    "idemp_oldest_pending_seconds": Metric(
        "gauge", (), "Age of the oldest output that waits for a confirm, since its claim; 0 if none does"
    ),
    "idemp_purged_claims_total": Metric("counter", ("consumer",), "Expired claims deleted"),
    "idemp_purge_lag_seconds": Metric(
        "gauge", ("consumer",), "How far the oldest claim that could be purged is past its retention window; 0 if none is"
    ),
})  # fmt: skip


def markdown() -> str:
    """The table of the reference page.

    Example:
        >>> print(markdown().splitlines()[0])
        | metric | kind | labels | meaning |
    """
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for name, metric in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        lines.append(f"| `{name}` | {metric.kind} | {labels} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


def known_type(consumer: Consumer, message: Message) -> str:
    """The canonical type of a message that could not be decoded, if it has a handler at all."""
    try:
        return consumer.find(message).message_type
    except MessageError:
        return UNKNOWN_TYPE
