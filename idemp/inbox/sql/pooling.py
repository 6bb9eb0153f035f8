"""Pools of engines: their connections belong to the process that opened them, to the server and to the file that was there.

A session that takes no writes is closed when it is returned, and all older ones with it: after a failover the old server
may live on and answer for ever, while new connections go to the one that took its place.

A child of a fork begins with an empty pool and leaves its parent's connections alone: it neither uses nor closes them. Where
SQLite's file is deleted or replaced, no connection comes back without an error, so that no COMMIT counts.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, ref

from sqlalchemy import event, exc

from idemp.errors import ConfigurationError, GuaranteeError, StoreError, StoreReplaced
from idemp.files import Identity, OpenFile, identity_of, is_parents, leave_to_parent
from idemp.forking import ForkAware, check_process
from idemp.inbox.sql import failures
from idemp.inbox.sql.readable import OTHER_ROWS, TUPLES, answers_tuples

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import ExceptionContext

__all__ = ["watch_pool"]

_PROCESS: Final = "idemp_process"
_FILE: Final = "idemp_file"
_SINCE: Final = "idemp_since"
_USED: Final = "idemp_used"


def watch_pool(engine: Engine) -> None:
    """Keep an engine's connections to their process and their file. Repeating it is harmless.

    A SQLite database in memory is left alone: it is a part of its process, and a child has a copy.

    Example:
        >>> from sqlalchemy import create_engine
        >>> watch_pool(create_engine("sqlite:///inbox.db"))
    """
    if engine not in _watched and not _is_in_memory(engine):
        _watched.add(engine)
        (_SqlitePool if engine.dialect.name == "sqlite" else _Pool)(engine)


_watched: Final[WeakSet[Engine]] = WeakSet()
_parents_connections: Final[list[Any]] = []  # kept, so that no destructor says goodbye in the parent's name


class _ParentsConnection:
    """What a connection that was checked out at the fork is in the child: it ends without a word, and does nothing else."""

    def rollback(self) -> None:
        """Leave the transaction to the parent."""

    def close(self) -> None:
        """Leave the connection to the parent."""

    def __getattr__(self, name: str) -> Any:
        raise _parents()


class _Pool(ForkAware):
    """One engine's pool."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)
        self._records: WeakSet[Any] = WeakSet()
        self._fit_since = 0.0
        event.listen(engine, "connect", _check_rows, insert=True)  # before SQLAlchemy itself reads one
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "checkout", self._checked_out)
        event.listen(engine, "reset", self._reset)
        event.listen(engine, "checkin", self._checked_in)
        event.listen(engine, "handle_error", _look_at)
        self.track()

    def after_fork_in_child(self) -> None:
        """Begin with an empty pool."""
        for record in list(self._records):
            if record.dbapi_connection is None:
                continue
            _parents_connections.append(record.dbapi_connection)
            fairy = record.fairy_ref() if record.fairy_ref is not None else None
            record.dbapi_connection = _ParentsConnection()
            if fairy is not None and fairy.dbapi_connection is not None:
                fairy.dbapi_connection = record.dbapi_connection
        self._records.clear()
        if (engine := self._engine()) is not None:
            engine.dispose(close=False)

    def _connected(self, connection: Any, record: Any) -> None:
        _check_rows(connection, record)  # again: listeners of the user's came between
        record.info[_PROCESS] = os.getpid()
        record.info[_SINCE] = time.monotonic()
        self._records.add(record)

    def _checked_out(self, connection: Any, record: Any, proxy: Any) -> None:
        process = os.getpid()
        if record.info.get(_PROCESS, process) != process:
            # No Python code forked this process, so that nothing has emptied the pool.
            _parents_connections.append(connection)
            record.dbapi_connection = proxy.dbapi_connection = None
            check_process()
            raise exc.DisconnectionError("the connection belongs to the parent process")
        if record.info.get(_SINCE, self._fit_since) < self._fit_since:
            raise exc.DisconnectionError("the connection is older than a session that took no writes")
        if _commits_by_itself(connection):
            if record.info.get(_USED):
                raise exc.DisconnectionError("somebody left the connection committing each statement by itself")
            raise GuaranteeError(
                "The engine's connections commit each statement by themselves (autocommit): effects would stay without "
                "their claim, and claims without their effects.",
                fix="Make it without autocommit: in isolation_level, connect_args, the URL, and in listeners to `connect`.",
            )
        if not answers_tuples(connection, record.info):
            if record.info.get(_USED):
                raise exc.DisconnectionError("somebody left the connection answering rows that are no tuples")
            raise ConfigurationError(OTHER_ROWS, fix=TUPLES)
        record.info[_USED] = True

    def _checked_in(self, _connection: Any, record: Any) -> None:
        """Close what is unfit, so that the next connection is a new one."""
        if record.info.pop(failures.UNFIT, False):
            self._fit_since = time.monotonic()
            record.invalidate()

    def _reset(self, connection: Any, record: Any, state: Any) -> None:
        """Say no ROLLBACK: what threads of the parent had in thread-local variables ends in the child before all else."""
        if state.transaction_was_reset or record is None:
            return
        process = os.getpid()
        if record.info.get(_PROCESS, process) != process:
            _parents_connections.append(connection)
            record.dbapi_connection = None
            raise _parents()


class _SqlitePool(_Pool):
    """The pool of an engine on an SQLite file."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._path = ""
        self._identity: Identity | None = None
        self._forks = False
        self._replaced: str | None = None
        event.listen(engine, "engine_disposed", self._disposed)

    def before_fork(self) -> None:
        """Close what is idle: SQLite forbids to carry a connection into a child."""
        engine = self._engine()
        if engine is not None and not getattr(engine.pool, "checkedout", int)():
            self._forks = True
            engine.dispose()
            self._forks = False

    def after_fork_in_child(self) -> None:
        """Begin with an empty pool, on a file that is not open here."""
        self._forks = True
        super().after_fork_in_child()
        self._forks = False
        if self._path:
            leave_to_parent(self._path)

    def _connected(self, connection: Any, record: Any) -> None:
        super()._connected(connection, record)
        path = next((row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main"), "")
        if not path:
            return  # in memory after all
        if is_parents(path):
            raise StoreError(
                f"{path} was in use when this process was forked, and SQLite can't go on with it here.",
                fix="Fork while no transaction is open, or start the process with multiprocessing's spawn.",
            )
        self._path = path
        self._identity = self._identity or identity_of(path)
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").close()  # from now on all its files are held open
        record.info[_FILE] = OpenFile(path, self._identity)
        self._check_file(record)

    def _checked_out(self, connection: Any, record: Any, proxy: Any) -> None:
        super()._checked_out(connection, record, proxy)
        if self._replaced is not None:
            raise StoreReplaced.of(self._replaced)

    def _checked_in(self, connection: Any, record: Any) -> None:
        """Look after COMMIT: what was committed to a file that is gone must not count as committed."""
        if connection is None or isinstance(connection, _ParentsConnection):
            return
        try:
            self._check_file(record)
        except StoreReplaced as error:
            record.invalidate(error)
            raise

    def _disposed(self, _engine: Engine) -> None:
        if not self._forks:
            self._identity = self._replaced = None

    def _check_file(self, record: Any) -> None:
        file: OpenFile | None = record.info.get(_FILE)
        if file is not None and (replaced := file.replaced()) is not None:
            self._replaced = replaced
            raise StoreReplaced.of(replaced)
        if file is not None:
            file.look()  # the log may be there since this transaction


def _check_rows(driver: Any, record: Any) -> None:
    if not answers_tuples(driver, record.info):
        driver.close()
        raise ConfigurationError(OTHER_ROWS, fix=TUPLES)


def _commits_by_itself(driver: Any) -> bool:
    """Return what psycopg or PyMySQL says of its connection; each keeps that at hand and asks no server."""
    if hasattr(driver, "get_autocommit"):
        return bool(driver.get_autocommit())
    return getattr(driver, "autocommit", False) is True


def _look_at(context: ExceptionContext) -> None:
    if context.connection is not None and failures.is_read_only(context.original_exception):
        context.connection.info[failures.UNFIT] = True


def _is_in_memory(engine: Engine) -> bool:
    url = engine.url
    return engine.dialect.name == "sqlite" and (
        url.database in {None, "", ":memory:"} or ":memory:" in str(url.database) or url.query.get("mode") == "memory"
    )


def _parents() -> StoreError:
    return StoreError(
        "The connection was opened by the parent process, before the fork.",
        fix="Begin a unit of work in the process that is to commit it; no handler may fork and return twice.",
    )
