"""An INSERT whose conflict is the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from idemp.inbox.sql import failures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Table

_DUPLICATE: Final = 1062


def insert_if_absent(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless its primary key is taken; whether it was inserted. Waits for whoever inserts the same key.

    Any other constraint that is violated raises.
    """
    key = [column.name for column in table.primary_key]
    if connection.dialect.name == "postgresql":
        statement = postgresql.insert(table).values(values).on_conflict_do_nothing(index_elements=key)
        return connection.execute(statement.returning(table.c[key[0]])).first() is not None
    if connection.dialect.name == "sqlite":
        return connection.execute(sqlite.insert(table).values(values).on_conflict_do_nothing(key)).rowcount == 1
    # INSERT IGNORE would hide truncation, too: in MySQL's family the violation is the answer.
    try:
        connection.execute(insert(table).values(values))
    except IntegrityError as error:
        if failures.mysql_code(error.orig) != _DUPLICATE:
            raise
        return False
    return True
