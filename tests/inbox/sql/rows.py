"""Claims and outputs put straight into the tables, as handlings would have left them."""

from __future__ import annotations

import sqlite3
import uuid
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Connection, Table, func, insert, select, text

from idemp.inbox.sql.names import Names
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

    from idemp.clock import Clock
    from idemp.inbox.sql.tables import Tables
    from tests.inbox.sql.conftest import MovedClock


def run_script(engine: Engine, script: str) -> None:
    """Run a script as the database's own client would."""
    if engine.dialect.name == "sqlite":
        with sqlite3.connect(str(engine.url.database)) as connection:
            connection.executescript(script)
        return
    with engine.connect() as connection:
        plain = "\n".join(line for line in script.splitlines() if not line.startswith("--"))
        for statement in plain.split(";\n"):
            if statement.strip() not in {"", "BEGIN", "COMMIT"}:
                connection.exec_driver_sql(statement)
        connection.commit()


def alter(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


class Rows:
    """Writes and counts rows."""

    def __init__(self, engine: Engine, tables: Tables, clock: Clock) -> None:
        self.engine = engine
        self.tables = tables
        self.names = Names(engine, tables, clock)
        self._clock = clock

    def claim(
        self,
        *,
        consumer: str = "orders",
        message_type: str = "orders.Place",
        outputs: int = 0,
        pending: bool = True,
        at: datetime | None = None,
        connection: Connection | None = None,
    ) -> UUID:
        """A claim with outputs, due now unless they were confirmed; in its own transaction or somebody's."""
        message_key = uuid.uuid4()
        claim = {
            "consumer_id": self.names.id("consumer", consumer),
            "type_id": self.names.id("message_type", message_type),
            "worker_id": self.names.id("worker", "host-1"),
            "message_key": message_key,
            "claimed_at": at or self._clock.now(),
        }
        key = {name: claim[name] for name in ("consumer_id", "message_key")}
        made = [self._output(ordinal) for ordinal in range(outputs)]
        if connection is not None:
            self._write(connection, claim, key, made, pending)
        else:
            with self.engine.begin() as own:
                self._write(own, claim, key, made, pending)
        return message_key

    def consumed(self, clock: MovedClock, *, consumer: str = "orders", **spell: float) -> None:
        """The consumer consumed without a break, while the clock moved on."""
        interval = {"started_at": clock.now(), "ended_at": clock.move(**spell)}
        with self.engine.begin() as connection:
            values = {"consumer_id": self.names.id("consumer", consumer), **interval}
            connection.execute(insert(self.tables.activity), values)

    def count(self, table: Table) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(table)) or 0

    def keys(self) -> set[UUID]:
        with self.engine.connect() as connection:
            return set(connection.scalars(select(self.tables.inbox.c.message_key)))

    def _write(
        self, connection: Connection, claim: dict[str, Any], key: dict[str, Any], made: list[Output], pending: bool
    ) -> None:
        connection.execute(insert(self.tables.inbox), claim)
        for output in made:
            row = {**key, "output_id": output.id, "ordinal": output.ordinal}
            content = {
                "kind": output.kind.value,
                "exchange": output.exchange,
                "routing_key": output.routing_key,
                "envelope": output.envelope(),
                "body": output.message.body,
            }
            connection.execute(insert(self.tables.output), {**row, **content})
            if pending:
                waiting = {"attempts": 0, "due_at": self._clock.now()}
                connection.execute(insert(self.tables.pending), {**row, **waiting})

    @staticmethod
    def _output(ordinal: int) -> Output:
        body = b'{"at": %d}' % ordinal
        message = Message(body=body, type="orders.Placed", headers={"customer": "Ada"}, correlation_id="c-1")
        return Output(
            id=uuid.uuid4(),
            ordinal=ordinal,
            kind=OutputKind.PUBLISH,
            exchange="events",
            routing_key="orders.Placed",
            message=message,
        )
