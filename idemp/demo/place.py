"""Where a storm takes place: a temporary directory, or servers of the user's, where everything has a fresh prefix."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

import idemp
from idemp.broker.local import LocalBroker
from idemp.broker.local.file import LEASED, file_of
from idemp.broker.port import Binding, Topology
from idemp.demo import environment
from idemp.errors import ConfigurationError, IdempError
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade

if TYPE_CHECKING:
    from types import TracebackType

    from sqlalchemy import Engine

    from idemp.broker.port import Broker

_RELAY_AFTER = "2s"
_WITNESS_SECONDS = 5.0
_EFFECT_OF = {
    "place_order": "SELECT count(*) FROM {p}orders WHERE order_id = :id",
    "reserve_stock": "SELECT count(*) FROM {p}reservations WHERE order_id = :id",
    "confirm_order": "SELECT count(*) FROM {p}orders WHERE order_id = :id AND confirmations > 0",
}


class Witness(Protocol):
    """What can be known about a broker from outside."""

    def unsettled(self, pid: int) -> bool:
        """Whether a process, which is stopped now, surely holds a delivery that is not settled."""
        ...

    def remaining(self, queues: list[str]) -> int:
        """How many messages are left in queues, those that wait for their time included."""
        ...


class Place:
    """Database, broker and folder of one storm; a context manager that leaves nothing behind.

    Args:
        database: SQLAlchemy URL, default a file in a temporary directory.
        broker: broker URL, default likewise.
        keep: leave everything as it is at the end.

    Raises:
        IdempError: database or broker can't be used.
    """

    def __init__(self, database: str | None = None, broker: str | None = None, *, keep: bool = False) -> None:
        shared = database is not None or broker is not None
        self.prefix = f"demo_{secrets.token_hex(4)}_" if shared else ""
        self.keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix="idemp-demo-"))
        self.notes = self.folder / "notes"
        self.log = self.folder / "workers.log"
        self.database = database or f"sqlite:///{self.folder / 'shop.db'}"
        self.broker_url = broker or f"local://{self.folder / 'broker.db'}"
        self.tables = Tables(None, f"{self.prefix}idemp_")
        self.exchange = f"{self.prefix}idemp"
        self.orders, self.stock, self.audit = (f"{self.prefix}{name}" for name in ("orders", "stock", "audit"))
        self.in_stock = 0
        try:
            self.engine: Engine = create_engine_safely(self.database)
            self.broker = _broker(self.broker_url)
        except BaseException:
            self._leave()
            raise
        self.witness: Witness = (
            LocalWitness(self.broker_url) if isinstance(self.broker, LocalBroker) else NotesWitness(self)
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment of worker processes: none of the user's own settings, and no password on a command line."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")}
        checkout = str(Path(idemp.__file__).parent.parent)
        return {
            **own,
            "PYTHONPATH": os.pathsep.join(filter(None, [checkout, own.get("PYTHONPATH", "")])),
            environment.DATABASE: self.database,
            "IDEMP_BROKER_URL": self.broker_url,
            "IDEMP_TABLE_PREFIX": self.tables.prefix,
            "IDEMP_EXCHANGE": self.exchange,
            "IDEMP_RELAY_AFTER": _RELAY_AFTER,
            environment.PREFIX: self.prefix,
            environment.NOTES: str(self.notes),
        }

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything, unless it is to be kept. What can't be reached any more stays."""
        if self.prefix and not self.keep:
            with suppress(IdempError, SQLAlchemyError):
                self._tidy_up()
        self.engine.dispose()
        self._leave()

    def scalar(self, sql: str, **values: Any) -> int:
        """One number from the database; `{p}` is the prefix of the example's tables, `{i}` that of idemp's."""
        with self.engine.connect() as connection:
            return int(connection.scalar(text(sql.format(p=self.prefix, i=self.tables.prefix)), values) or 0)

    def counts(self, sql: str) -> Counter[int]:
        """Rows of an order number and a count, likewise."""
        with self.engine.connect() as connection:
            rows = connection.execute(text(sql.format(p=self.prefix, i=self.tables.prefix))).all()
        return Counter({int(order_id): int(count) for order_id, count in rows})

    def effects(self) -> int:
        """How many executions left their effects: orders, reservations and confirmations."""
        return self.scalar(
            "SELECT (SELECT count(*) FROM {p}orders) + (SELECT count(*) FROM {p}reservations)"
            " + (SELECT COALESCE(sum(confirmations), 0) FROM {p}orders)"
        )

    def committed(self, handler: str, order_id: int) -> bool:
        """Whether a handler's effect on an order is committed."""
        return self.scalar(_EFFECT_OF[handler], id=order_id) > 0

    def _make(self) -> None:
        self.notes.mkdir()
        upgrade(self.engine, self.tables)
        making = self._example_tables("create")
        bindings = tuple(Binding(self.audit, pattern) for pattern in ("orders.*", "stock.*"))
        queues = (self.orders, self.stock, self.audit)
        try:
            self.broker.declare(Topology(exchange=self.exchange, queues=queues, bindings=bindings))
        finally:
            _, said = making.communicate()
        if making.returncode:
            raise ConfigurationError(f"The example's tables can't be made: {said.decode()[-500:]}")
        self.in_stock = self.scalar("SELECT sum(quantity) FROM {p}stock")

    def _leave(self) -> None:
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _example_tables(self, verb: str) -> subprocess.Popen[bytes]:
        # In a process of its own: the example takes its prefix from the environment, once.
        command = [sys.executable, "-m", "idemp.demo.apps", verb]
        without_notes = {name: value for name, value in self.environment.items() if name != environment.NOTES}
        return subprocess.Popen(  # noqa: S603
            command, env=without_notes, cwd=self.folder, stderr=subprocess.PIPE
        )

    def _tidy_up(self) -> None:
        if not isinstance(self.broker, LocalBroker):
            _delete_queues(self.broker_url, [self.orders, self.stock, self.audit], self.exchange)
        with self.engine.begin() as connection:
            self.tables.metadata.drop_all(connection)
            connection.execute(text(f"DROP TABLE IF EXISTS {self.tables.version_table}"))
        self._example_tables("drop").communicate()


class LocalWitness:
    """Looks into the file of a local broker, where each lease bears the process id of its holder."""

    def __init__(self, url: str) -> None:
        self._path = file_of(url)

    def unsettled(self, pid: int) -> bool:
        """Whether the process has leases."""
        sql = f"SELECT EXISTS (SELECT 1 FROM messages WHERE state = {LEASED} AND owner GLOB ?)"
        return bool(self._number(sql, f"{pid}-*"))

    def remaining(self, queues: list[str]) -> int:
        """All messages of the queues, whatever their state."""
        marks = ", ".join("?" * len(queues))
        sql = f"SELECT count(*) FROM messages WHERE queue IN (SELECT id FROM queues WHERE name IN ({marks}))"
        return self._number(sql, *queues)

    def _number(self, sql: str, *values: str) -> int:
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=_WITNESS_SECONDS)) as raw:
            return int(raw.execute(sql, values).fetchone()[0])


class NotesWitness:
    """For brokers that can't be looked into: a process whose last handler began and did not commit holds its delivery."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def unsettled(self, pid: int) -> bool:
        """Whether the last handler that this process began is without effect."""
        notes = self._place.notes / str(pid)
        lines = notes.read_text().splitlines() if notes.exists() else []
        if not lines:
            return False
        handler, _, order_id = lines[-1].partition(" ")
        return not self._place.committed(handler, int(order_id))

    def remaining(self, queues: list[str]) -> int:
        """What is ready in the queues and in their delay tiers."""
        tiers = ("", *(f".delay.{seconds * 1000}ms" for seconds in (1, 5, 15, 60)))
        count = 0
        for name in (f"{queue}{tier}" for queue in queues for tier in tiers):
            with suppress(ConfigurationError):  # no such tier
                count += self._place.broker.depth(name)
        return count


def _broker(url: str) -> Broker:
    if url.startswith("local:"):
        return LocalBroker(url)
    from idemp.broker.kombu import KombuBroker

    return KombuBroker(url)


def _delete_queues(url: str, queues: list[str], exchange: str) -> None:
    from kombu.connection import Connection

    from idemp.broker.kombu.topology import DEFAULT_DELAYS

    tiers = {f".delay.{round(seconds * 1000)}ms" for seconds in (1, 5, 15, 60, *DEFAULT_DELAYS)}
    with suppress(OSError), Connection(url) as connection:  # type: ignore[no-untyped-call]
        channel = connection.channel()
        for name in (f"{queue}{end}" for queue in queues for end in ("", ".dead", *tiers)):
            channel.queue_delete(name)
        channel.exchange_delete(exchange)
