"""Which database an engine is on, and an INSERT whose conflict is the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Engine, Table

_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}


def place_of(engine: Engine) -> str:
    """The same for engines on the same database, as far as their URLs tell; without user and password.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> place_of(create_engine_safely("postgresql://me:secret@db/shop"))
        'postgresql://db:5432/shop'
    """
    url, kind = engine.url, engine.url.get_backend_name()
    if kind == "sqlite":
        named = url.database not in {None, "", ":memory:"}
        return f"sqlite:///{url.database}" if named else f"sqlite://#{id(engine):x}"
    return f"{kind}://{url.host or 'localhost'}:{url.port or _PORTS.get(kind, 0)}/{url.database or ''}"


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
        if getattr(error.orig, "args", (0,))[0] != _DUPLICATE:
            raise
        return False
    return True


_DUPLICATE: Final = 1062
