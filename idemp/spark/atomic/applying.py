"""What the driver does with staged messages: one transaction for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa

from idemp.bulk import Report
from idemp.errors import CommitUnknown, StoreError, StoreUnavailable
from idemp.inbox.sql.arrivals import Arrivals
from idemp.inbox.sql.unit import ended
from idemp.inbox.sql.whole import Whole
from idemp.spark.atomic.parking import Letters
from idemp.spark.chunks import gathered
from idemp.spark.summary import Summary
from idemp.spark.task import persistently

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection

    from idemp.bulk import Bulk
    from idemp.spark.atomic.options import Options


@dataclass(frozen=True, slots=True)
class Landed:
    """What an attempt of a task staged.

    Attributes:
        token: under which it did.
        messages: how many.
    """

    token: UUID
    messages: int


def applied(options: Options, landed: Sequence[Landed], batch: int) -> Summary:
    """Handle staged messages, all or nothing; what became of them.

    Raises:
        ConfigurationError: the app, its settings or its tables are not as they must be.
        StoreError: the database stayed away, or lost what was staged; or the COMMIT's answer was lost.
        TransactionEnded: a handler ended the transaction.
    """
    job = options.job()
    app = job.load()
    try:
        store = job.store(app)
        whole, arrivals = Whole(store), Arrivals(store.engine, store.tables)
        bulk = persistently(partial(job.bulk, app, whole))
        run = options.run or app.name

        def once() -> Summary:
            letters = Letters(options.parked, run, batch, options.size)
            try:
                return _applied(whole, arrivals, bulk, landed, letters, options)
            except StoreUnavailable as error:
                if whole.lost:  # to run it again would have its effects once more
                    raise ended() from error
                raise

        return persistently(once)
    finally:
        app.close()


def _applied(
    whole: Whole, arrivals: Arrivals, bulk: Bulk, landed: Sequence[Landed], letters: Letters, options: Options
) -> Summary:
    report = Report()
    with whole:
        _check(arrivals.counted(whole.connection, [each.token for each in landed]), landed)
        for chunk in gathered(_read(arrivals, whole.connection, landed), options.rows, options.size):
            of_chunk = bulk.run(chunk)
            letters.add(of_chunk.parked)
            of_chunk.parked.clear()
            report.add(of_chunk)
        arrivals.drop(whole.connection, [each.token for each in landed])
        letters.write()
        try:
            whole.commit()
        except CommitUnknown as error:  # what was staged can't tell it: a COMMIT and a crash both take it away
            raise StoreError(
                error.message, committed="unknown", fix="Start the query again: the micro-batch's claims tell."
            ) from error
    return Summary.of_report(report)


def _check(found: dict[UUID, int], landed: Sequence[Landed]) -> None:
    """See that nothing is missing.

    Raises:
        StoreError: something is.
    """
    wanted = sum(each.messages for each in landed)
    if any(found.get(each.token) != each.messages for each in landed):
        there = sum(found.values())
        raise StoreError(
            f"Of {wanted} messages that tasks staged, {there} are there: the database crashed or failed over meanwhile, "
            "which empties the table of staged messages; or they lay there for more than a day.",
            fix="Nothing is lost: start the query again, and the micro-batch is staged anew.",
        )


def _read(arrivals: Arrivals, connection: Connection, landed: Sequence[Landed]) -> Iterator[pa.Table]:
    for each in landed:
        for content in arrivals.read(connection, each.token):
            yield pa.ipc.open_stream(content).read_all()
