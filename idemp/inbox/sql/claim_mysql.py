"""Claims on MySQL and MariaDB."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, exc, text

from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import INBOX_COLUMNS, INBOX_TYPES, ClaimDialect, HeldByAnother, qualified, typed
from idemp.inbox.sql.guard import OWN_STATEMENT
from idemp.inbox.sql.tables import KeyType, Part, Tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.sql import Executable

_LOCK_WAIT: Final = 1205
_LOCK_NOWAIT: Final = 3572
_IN_TRANSACTION: Final = 1  # of the status flags in the server's answers


class MysqlDialect(ClaimDialect):
    """MySQL: INSERT IGNORE without RETURNING. Also runs on MariaDB."""

    rolls_back_before_reading = True

    def __init__(self, tables: Tables | Part) -> None:
        super().__init__(tables)
        columns = ", ".join(INBOX_COLUMNS)
        values = ", ".join(f":{name}" for name in INBOX_COLUMNS)
        inbox = qualified(tables.inbox, "mysql")
        self._claim_text = f"INSERT IGNORE INTO {inbox} ({columns}) VALUES ({values})"
        self._claim = text(self._claim_text).bindparams(*typed(INBOX_TYPES))
        self._probe = text(
            f"SELECT 1 FROM {inbox} WHERE consumer_id = :consumer_id AND message_key = :message_key FOR UPDATE NOWAIT"
        ).bindparams(bindparam("message_key", type_=KeyType()))

    def was_committed(self, connection: Connection) -> bool | None:
        """As the server said with its last answer, which PyMySQL keeps."""
        status = getattr(connection.connection.driver_connection, "server_status", None)
        return None if status is None else not status & _IN_TRANSACTION

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT IGNORE between two settings of the lock wait; what it ignored is found out by reading."""
        with waiting(connection, wait):
            return self._insert(connection, self._claim, row)

    def claim_all(
        self, connection: Connection, rows: Sequence[Mapping[str, Any]], wait: timedelta
    ) -> tuple[object | None, frozenset[UUID] | None]:
        """One INSERT IGNORE of many rows; if it ignored any, reading tells which."""
        with waiting(connection, wait):
            try:
                inserted = connection.execute(self._claim, rows).rowcount
            except exc.DBAPIError as error:
                if failures.mysql_code(error.orig) == _LOCK_WAIT:
                    held = [row["message_key"] for row in rows if self._is_held(connection, row)]
                    if held:
                        raise HeldByAnother(*held) from error
                raise
        return True, frozenset(row["message_key"] for row in rows) if inserted == len(rows) else None

    def _insert(self, connection: Connection, statement: Executable, row: Mapping[str, Any]) -> object | None:
        try:
            return True if connection.execute(statement, row).rowcount == 1 else None
        except exc.DBAPIError as error:
            if failures.mysql_code(error.orig) == _LOCK_WAIT and self._is_held(connection, row):
                raise HeldByAnother from error
            raise

    def _is_held(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        # A lock wait may also be for a gap or a neighbour; only a lock on the row itself is somebody with the same id.
        key = {"consumer_id": row["consumer_id"], "message_key": row["message_key"]}
        try:
            connection.execute(self._probe, key)
        except exc.DBAPIError as error:
            return failures.mysql_code(error.orig) in {_LOCK_WAIT, _LOCK_NOWAIT}
        return False


class MariadbDialect(MysqlDialect):
    """MariaDB: the lock wait is part of the statement, so that a claim is one round trip."""

    def __init__(self, tables: Tables | Part) -> None:
        super().__init__(tables)
        self._by_wait: dict[int, Executable] = {}

    def claim(self, connection: Connection, row: Mapping[str, Any], wait: timedelta) -> object | None:
        """One INSERT IGNORE."""
        seconds = _seconds(wait)
        statement = self._by_wait.get(seconds)
        if statement is None:
            prefix = f"SET STATEMENT innodb_lock_wait_timeout={seconds} FOR "
            statement = self._by_wait[seconds] = text(prefix + self._claim_text).bindparams(*typed(INBOX_TYPES))
        return self._insert(connection, statement, row)


@contextmanager
def waiting(connection: Connection, wait: timedelta) -> Iterator[None]:
    """Statements that wait for a lock no longer than this, rounded up to whole seconds."""
    former = connection.info.get("idemp_lock_wait")
    if former is None:
        former = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar_one()
        connection.info["idemp_lock_wait"] = former
    _wait_seconds(connection, _seconds(wait))
    try:
        yield
    finally:
        if not connection.invalidated:
            _wait_seconds(connection, int(former))


def _wait_seconds(connection: Connection, seconds: int) -> None:
    statement = f"SET SESSION innodb_lock_wait_timeout = {seconds}"
    connection.exec_driver_sql(statement, execution_options=OWN_STATEMENT)


def _seconds(wait: timedelta) -> int:
    return max(1, math.ceil(wait.total_seconds()))
