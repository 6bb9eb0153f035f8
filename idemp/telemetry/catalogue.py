"""Catalogue of metrics, dashboard panels and alerts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["ALERTS", "METRICS", "PANELS", "Alert", "Metric", "Panel", "alert_rules", "dashboard"]


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        name: Name in Prometheus; a histogram has the suffixes `_bucket`, `_sum` and `_count`.
        kind: Counters and histograms count in the processes of a worker; gauges are read from the tables.

    Example:
        >>> METRICS["idemp_deliveries_total"].labels
        ('consumer', 'type', 'verdict', 'outcome')
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Example:
        >>> PANELS[0].title
        'Deliveries by verdict'
    """

    title: str
    unit: str
    expressions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alert:
    """A rule of Prometheus.

    Attributes:
        lasts: Time for which the expression holds before the alert.
        then: The command that shows more.

    Example:
        >>> ALERTS[0].name
        'IdempDeadLetters'
    """

    name: str
    expression: str
    lasts: str
    text: str
    then: str


BY_TYPE: Final = ("consumer", "type")
METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric(
            "idemp_deliveries_total",
            "counter",
            "deliveries that are settled; the outcome is done, retry or dead, the verdict claimed, duplicate, in_flight, "
            "conflict or none",
            (*BY_TYPE, "verdict", "outcome"),
        ),
        Metric("idemp_handled_total", "counter", "handlings that are committed", BY_TYPE),
        Metric("idemp_outputs_total", "counter", "outputs of committed handlings", BY_TYPE),
        Metric("idemp_failures_total", "counter", "deliveries that became a retry or a dead letter", (*BY_TYPE, "rule")),
        Metric("idemp_handling_seconds", "histogram", "seconds from the start of a handler to COMMIT", BY_TYPE),
        Metric("idemp_holds_total", "counter", "pauses of consumption, because the database took no work", ("consumer",)),
        Metric("idemp_database_up", "gauge", "1 if the gauges below could be read"),
        Metric("idemp_pending_outputs", "gauge", "outputs that the broker has not confirmed"),
        Metric("idemp_pending_overdue_seconds", "gauge", "seconds for which the oldest pending output has been due"),
        Metric("idemp_quarantined_outputs", "gauge", "outputs that no queue took"),
        Metric("idemp_messages", "gauge", "messages in a queue of the SQL broker", ("queue",)),
        Metric("idemp_retries", "gauge", "retries, due or not", ("queue",)),
        Metric("idemp_retries_due", "gauge", "retries that are due, and that no worker has leased", ("queue",)),
        Metric("idemp_dead_letters", "gauge", "dead letters", ("queue",)),
        Metric("idemp_queue_overdue_seconds", "gauge", "seconds for which the oldest message or retry has been due", ("queue",)),
        Metric("idemp_alive", "gauge", "processes that were seen within 15 seconds", ("role",)),
    )
}

PANELS: Final = (
    Panel(
        "Deliveries by verdict",
        "ops",
        (("sum by (consumer, verdict) (rate(idemp_deliveries_total[1m]))", "{{consumer}} {{verdict}}"),),
    ),
    Panel(
        "Retries and dead letters by rule",
        "ops",
        (("sum by (consumer, rule) (rate(idemp_failures_total[5m]))", "{{consumer}} {{rule}}"),),
    ),
    Panel(
        "Seconds from the start of a handler to COMMIT",
        "s",
        tuple(
            (f"histogram_quantile({share}, sum by (type, le) (rate(idemp_handling_seconds_bucket[5m])))", f"{{{{type}}}} p{name}")
            for share, name in (("0.5", "50"), ("0.99", "99"))
        ),
    ),
    Panel(
        "Handlings and outputs",
        "ops",
        (
            ("sum by (type) (rate(idemp_handled_total[1m]))", "{{type}}"),
            ("sum by (type) (rate(idemp_outputs_total[1m]))", "outputs of {{type}}"),
        ),
    ),
    Panel(
        "Outputs that wait",
        "short",
        (("max(idemp_pending_outputs)", "pending"), ("max(idemp_quarantined_outputs)", "in quarantine")),
    ),
    Panel(
        "Due for",
        "s",
        (
            ("max(idemp_pending_overdue_seconds)", "outputs"),
            ("max by (queue) (idemp_queue_overdue_seconds)", "{{queue}}"),
        ),
    ),
    Panel(
        "Queues",
        "short",
        (
            ("max by (queue) (idemp_messages)", "messages of {{queue}}"),
            ("max by (queue) (idemp_retries)", "retries of {{queue}}"),
            ("max by (queue) (idemp_retries_due)", "due retries of {{queue}}"),
            ("max by (queue) (idemp_dead_letters)", "dead letters of {{queue}}"),
        ),
    ),
    Panel(
        "Processes and pauses",
        "short",
        (
            ("max by (role) (idemp_alive)", "{{role}}"),
            ("sum by (consumer) (increase(idemp_holds_total[5m]))", "pauses of {{consumer}}"),
            ("min(idemp_database_up)", "database"),
        ),
    ),
)

ALERTS: Final = (
    Alert(
        "IdempDeadLetters",
        "max by (queue) (idemp_dead_letters) > 0",
        "1m",
        "{{ $labels.queue }} has dead letters",
        "idemp dead list",
    ),
    Alert(
        "IdempQuarantine", "max(idemp_quarantined_outputs) > 0", "1m", "no queue took outputs", "idemp inbox list --quarantined"
    ),
    Alert("IdempOutputsWait", "max(idemp_pending_overdue_seconds) > 120", "5m", "outputs are not sent", "idemp doctor"),
    Alert(
        "IdempQueueWaits",
        "max by (queue) (idemp_queue_overdue_seconds) > 300",
        "5m",
        "{{ $labels.queue }} is overdue",
        "idemp doctor",
    ),
    Alert("IdempDatabaseAway", "min(idemp_database_up) == 0", "2m", "the tables cannot be read", "idemp doctor"),
    Alert(
        "IdempPaused",
        "sum by (consumer) (increase(idemp_holds_total[15m])) > 3",
        "0m",
        "{{ $labels.consumer }} pauses",
        "idemp doctor",
    ),
    Alert("IdempNobodyAlive", "absent(idemp_alive) == 1", "2m", "no worker and no relay is alive", "idemp doctor"),
)


def dashboard() -> dict[str, Any]:
    """Return a Grafana dashboard, to be imported.

    Example:
        >>> dashboard()["title"]
        'idemp'
    """
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "title": panel.title,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
                for place, (expression, legend) in enumerate(panel.expressions)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    variable = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "idemp",
        "uid": "idemp",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }


def alert_rules() -> str:
    """Return Prometheus alert rules, as YAML.

    Example:
        >>> print(alert_rules().partition("      - alert: IdempQuarantine")[0])
        groups:
          - name: idemp
            rules:
              - alert: IdempDeadLetters
                expr: "max by (queue) (idemp_dead_letters) > 0"
                for: 1m
                annotations:
                  summary: "{{ $labels.queue }} has dead letters"
                  description: "idemp dead list"
        <BLANKLINE>
    """
    lines = ["groups:", "  - name: idemp", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.lasts}",
            "        annotations:",
            f"          summary: {json.dumps(alert.text)}",
            f"          description: {json.dumps(alert.then)}",
        ]
    return "\n".join(lines) + "\n"
