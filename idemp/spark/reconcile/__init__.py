"""Reconciliation: what was sent, what the inbox says, and what was produced and confirmed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from idemp.errors import ConfigurationError
from idemp.initiation import INITIATION_TYPE
from idemp.spark import require
from idemp.spark.reconcile.sent import Sent
from idemp.spark.reconcile.summary import Counts, Finding, Summary
from idemp.spark.reconcile.terms import DEFAULT_GRACE, DEFAULT_RETENTION, Fate, Kind, Terms

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from pyspark.sql import DataFrame

    from idemp.spark.reconcile.reconciliation import Reconciliation

__all__ = [
    "INBOX_COLUMNS",
    "OUTPUT_COLUMNS",
    "Counts",
    "Fate",
    "Finding",
    "Kind",
    "Sent",
    "Summary",
    "Terms",
    "reconcile",
]

INBOX_COLUMNS: Final = (
    "consumer STRING, message_key BINARY, original_id STRING, type STRING, claimed_at TIMESTAMP, fingerprint BINARY"
)
"""What is read of the data source's table `inbox`, for `DataFrameReader.schema`."""
OUTPUT_COLUMNS: Final = "consumer STRING, message_key BINARY, pending BOOLEAN, quarantined BOOLEAN"
"""Likewise of `outputs`."""


def reconcile(
    sent: Sent,
    inbox: DataFrame,
    outputs: DataFrame,
    *,
    as_of: datetime,
    since: datetime | None = None,
    until: datetime | None = None,
    grace: timedelta = DEFAULT_GRACE,
    retention: timedelta = DEFAULT_RETENTION,
) -> Reconciliation:
    """Compare what was sent with what was handled, and what that produced with what was confirmed.

    Args:
        sent: the log.
        inbox: claims, as `spark.read.format("idemp")` has them, with `INBOX_COLUMNS` at least.
        outputs: what was produced, likewise, with `OUTPUT_COLUMNS`.
        as_of: when the inbox was read; taken before reading it, if it is not a snapshot. Aware, as all times here.
        since: the first moment judged: from here on the log has all that was sent. By default, its first time.
        until: the last one; by default, its last time.
        grace: how long a message may take until it is handled, and its outputs until they are confirmed.
        retention: how long claims are kept; an app's types have their own.

    Raises:
        ConfigurationError: a package or Java is missing; the log lacks a column, or is empty; a time is without a zone.
    """
    require()
    from idemp.spark.reconcile.bodies import load
    from idemp.spark.reconcile.reconciliation import Reconciliation
    from idemp.spark.reconcile.rows import rows_of, span_of

    app = None if sent.app is None else load(sent.app)
    if app is not None and app.name != sent.consumers[0]:
        raise ConfigurationError(f"App {sent.app!r} is consumer {app.name!r}, not {sent.consumers[0]!r}.")
    if since is None or until is None:
        first, last = span_of(sent)
        since, until = since or first, until or last
    windows = {} if app is None else app.retentions()
    terms = Terms(as_of=as_of, since=since, until=until, grace=grace, retention=retention, windows=windows)
    names = list(sent.consumers)
    claimed = inbox.where(inbox["consumer"].isin(names))
    if app is not None:
        claimed = claimed.where(claimed["type"].isin([*windows, INITIATION_TYPE]))
    return Reconciliation(rows_of(sent), claimed, outputs.where(outputs["consumer"].isin(names)), terms)
