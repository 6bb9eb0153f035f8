"""What a relay sends: the outputs that it leased, read from the tables that their inputs belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, exc, select

from idemp.errors import FutureMessage, StoreError, StoreUnavailable
from idemp.inbox.port import PendingOutput
from idemp.inbox.sql.claiming import only
from idemp.inbox.sql.short import Short
from idemp.messages import Output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection, Engine, Row, Table

    from idemp.inbox.sql.places import Places
    from idemp.inbox.sql.tables import Tables

_STORED = ("output_id", "ordinal", "kind", "exchange", "routing_key", "envelope", "body")


class LeasedOutputs:
    """Reads leased outputs, one statement for each place: days in which nothing pends are not even locked.

    Example:
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.places import Places
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> LeasedOutputs(engine, tables, Places(engine, tables, SystemClock())).read([])
        []
    """

    def __init__(self, engine: Engine, tables: Tables, places: Places) -> None:
        self._short = Short(engine)
        self._tables = tables
        self._places = places

    def read(self, leased: Sequence[Mapping[str, Any]]) -> list[PendingOutput]:
        """The outputs of these rows of what pends, in emission order; those that were confirmed meanwhile are left out.

        Places are looked at as they are remembered; what is not there is read through the plain table, which sees all.
        """
        self._places.look_if_due()
        rows = self._by_place(leased)
        if missing := {row["output_id"] for row in leased}.difference(row.output_id for row in rows):
            rows += self._short.run(lambda connection: self._in(connection, self._tables.output, missing))
        rows.sort(key=lambda row: (row.consumer_id, row.message_key.int, row.ordinal))
        return [
            PendingOutput(Output.restored(*(getattr(row, name) for name in _STORED)), row.attempts, row.refusals)
            for row in rows
        ]

    def _by_place(self, leased: Sequence[Mapping[str, Any]]) -> list[Row[Any]]:
        """What is where it is remembered; nothing where a place is not."""
        try:
            placed = self._places.by_place(leased)
        except (FutureMessage, StoreUnavailable):
            return []  # its day was made since anybody looked here

        def work(connection: Connection) -> list[Row[Any]]:
            found: list[Row[Any]] = []
            for place, own in placed:
                ids = {row["output_id"] for row in own}
                found += self._in(connection, place.tables.output, ids, alone=True)
            return found

        try:
            return self._short.run(work)
        except StoreError as error:
            if isinstance(error.__cause__, exc.DBAPIError) and self._places.was_wrong(error.__cause__):
                return []
            raise

    def _in(self, connection: Connection, output: Table, ids: set[UUID], *, alone: bool = False) -> list[Row[Any]]:
        pending = self._tables.pending
        columns = (output.c[name] for name in (*_STORED, "consumer_id", "message_key"))
        same = and_(*(output.c[name] == pending.c[name] for name in ("consumer_id", "message_key", "ordinal")))
        wanted = (
            select(*columns, pending.c.attempts, pending.c.refusals)
            .select_from(pending.join(output, same))
            .where(pending.c.output_id.in_(bindparam("ids", expanding=True)))
        )
        return list(connection.execute(only(wanted, output) if alone else wanted, {"ids": sorted(ids)}))
