"""Short transactions of the framework's own: for relay, cleaner, heartbeats and start-up, never for a handler."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from idemp.errors import StoreError, TransientStoreError
from idemp.forking import check_process
from idemp.inbox.sql import failures
from idemp.inbox.sql.engine import is_mysql, start_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine, Select

ATTEMPTS: Final = 8
_FIRST_PAUSE_SECONDS: Final = 0.01

_SKIP_LOCKED_SINCE: Final = {"mariadb": (10, 6), "mysql": (8, 0, 1)}

T = TypeVar("T")


class Short:
    """Runs pieces of work in a transaction each, at READ COMMITTED, and again after a deadlock.

    The work must be harmless to repeat. On SQLite the transaction takes the write lock at its start: one that reads
    first and then writes would fail at once where another writer came between, without waiting its turn. With
    `at_start` a refused login is a `ConfigurationError`, not an outage to wait for. `single` says that each piece of work
    is one writing statement, right at any level of isolation: it then costs as few round trips as the database allows.

    Example:
        >>> from sqlalchemy import text
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> Short(create_engine_safely("sqlite://")).run(lambda connection: connection.scalar(text("SELECT 42")))
        42
    """

    def __init__(self, engine: Engine, *, at_start: bool = False, single: bool = False) -> None:
        self.engine = engine
        self._errors = start_errors if at_start else running_errors
        self._sqlite = engine.dialect.name == "sqlite"
        self._level = _level(engine.dialect.name, single=single)

    def run(self, work: Callable[[Connection], T]) -> T:
        """What `work` answers, committed.

        Raises:
            StoreUnavailable: the database can't be reached.
            TransientStoreError: it lost against others, time and again.
            StoreError: the database refuses it, for want of a right, say.
        """
        for attempt in range(1, ATTEMPTS):
            try:
                return self._once(work)
            except TransientStoreError:
                time.sleep(random.uniform(0.5, 1.5) * _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311 - jitter
        return self._once(work)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction that commits at the end of the block, without another try."""
        check_process()
        with _of_no_handling(), self._errors(self.engine), self.engine.connect() as connection:
            if self._level:  # here, where a connection that is lost is given back: an engine's own option would keep it
                connection.execution_options(isolation_level=self._level)
            if self._sqlite:
                self._refuse_shared(connection)
            with connection.begin():
                if self._sqlite:
                    begin_immediate(connection)
                yield connection

    def _once(self, work: Callable[[Connection], T]) -> T:
        with self.transaction() as connection:
            return work(connection)

    @staticmethod
    def _refuse_shared(connection: Connection) -> None:
        # In memory there is one connection for all: this commit would commit somebody else's work.
        if _in_transaction(connection):
            raise TransientStoreError(
                "The only connection to this SQLite database is in a transaction already.",
                fix="Use a database file where several threads work.",
            )


class Locking:
    """A SELECT that locks what it answers, and passes over what others hold where the server can do so.

    SQLite locks nothing here: its transaction has the write lock already. Older servers wait for the others.
    """

    def __init__(self, statement: Select[Any], *, skip: bool = True) -> None:
        self._skipping = statement.with_for_update(skip_locked=skip)
        self._waiting = statement.with_for_update()

    def on(self, connection: Connection) -> Select[Any]:
        """The statement as this server understands it."""
        dialect = connection.dialect
        kind = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
        version = tuple(part for part in dialect.server_version_info or () if isinstance(part, int))
        return self._skipping if version >= _SKIP_LOCKED_SINCE.get(kind, ()) else self._waiting


def begin_immediate(connection: Connection) -> None:
    """Take SQLite's write lock, unless the engine's own settings began that way already."""
    if not _in_transaction(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _level(dialect: str, *, single: bool) -> str | None:
    if dialect == "postgresql":
        return "AUTOCOMMIT" if single else "READ COMMITTED"  # psycopg keeps both on this side: no SET is sent
    # In MySQL's family each change of the level, or of autocommit, is a statement, and so is taking it back.
    return "READ COMMITTED" if is_mysql(dialect) and not single else None


@contextmanager
def _of_no_handling() -> Iterator[None]:
    """Errors of the block don't say whether a handling was committed: none is on its way."""
    try:
        yield
    except StoreError as error:
        error.says_committed = False
        raise


@contextmanager
def running_errors(engine: Engine) -> Iterator[None]:
    """Raise the database's errors as idemp words them."""
    try:
        yield
    except IntegrityError as error:
        raise failures.translate(error) or error from error  # whoever expects one knows what it means
    except SQLAlchemyError as error:
        raise failures.translate(error) or failures.refused(error) from error
    except engine.dialect.loaded_dbapi.Error as error:
        # Setting the level is the first statement on a connection from the pool, which may be lost: SQLAlchemy lets the
        # driver's error through as it is there.
        made = DBAPIError.instance(None, None, error, engine.dialect.loaded_dbapi.Error, dialect=engine.dialect)
        raise failures.translate(made) or failures.refused(made) from error


def _in_transaction(connection: Connection) -> bool:
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)
