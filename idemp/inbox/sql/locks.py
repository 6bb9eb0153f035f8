"""Locks that one process in the whole cluster holds: for a migration, for a round of cleaning."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, func, select

from idemp.inbox.sql.engine import is_mysql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

    from idemp.inbox.sql.tables import Tables

_WAIT: Final = select(func.pg_advisory_xact_lock(bindparam("number")))
_TRY: Final = select(func.pg_try_advisory_xact_lock(bindparam("number")))
_GET: Final = select(func.get_lock(bindparam("name"), bindparam("seconds")))
_RELEASE: Final = select(func.release_lock(bindparam("name")))


@contextmanager
def cluster_lock(connection: Connection, tables: Tables, purpose: str, *, wait_seconds: int) -> Iterator[bool]:
    """Hold the lock of `purpose` on these tables; says whether it was got. Enter it inside of a transaction.

    On PostgreSQL it lasts until the transaction ends. On SQLite the write lock, which the transaction took, is enough.
    On MariaDB and MySQL the work is committed before the lock is released: the next holder must see it.
    """
    dialect = connection.dialect.name
    if dialect == "postgresql":
        number = int.from_bytes(_digest(tables, purpose)[:8], "big", signed=True)
        got = connection.scalar(_WAIT if wait_seconds else _TRY, {"number": number})
        yield bool(wait_seconds) or bool(got)
    elif is_mysql(dialect):
        # Such locks are the whole server's: the database's name keeps two databases apart.
        name = f"idemp-{_digest(tables, f'{connection.engine.url.database}.{purpose}').hex()[:32]}"
        got = connection.scalar(_GET, {"name": name, "seconds": wait_seconds})
        try:
            yield bool(got)
            if got:
                connection.exec_driver_sql("COMMIT")
        finally:
            if got and not connection.invalidated:
                connection.execute(_RELEASE, {"name": name})
    else:
        yield True


def _digest(tables: Tables, purpose: str) -> bytes:
    return hashlib.sha256(f"{tables.configured_schema or ''}.{tables.prefix}.{purpose}".encode()).digest()
