"""Databases of servers, by plain clients."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pymysql
from sqlalchemy import URL, make_url

LOST = (psycopg.OperationalError, pymysql.OperationalError, pymysql.InterfaceError)
"""What clients raise while a server is away. `pymysql.err` may be another module: Django imports it again, as `MySQLdb.err`."""


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run a statement outside of a transaction."""
    made = make_url(url)
    if made.get_backend_name() == "postgresql":
        address = made.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(address, autocommit=True, connect_timeout=5) as connection:
            found = connection.execute(statement.encode(), parameters or None)
            return found.fetchall() if found.description else []
    with closing(_connect(made)) as connection, connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return list(cursor.fetchall())


WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"


@contextmanager
def locked(url: str, lock: int) -> Iterator[Callable[[int], bool]]:
    """Hold an advisory lock of PostgreSQL; yield a function that says whether so many transactions wait for it."""
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with closing(psycopg.connect(address, autocommit=True)) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [lock])
        yield lambda count: connection.execute(WAITING, [lock]).fetchall() == [(count,)]


def create_database(url: str, template: str | None = None) -> str:
    """Create a database, as a copy of another one if it is given; return its URL."""
    made, name, source = make_url(url), f"test_{secrets.token_hex(6)}", make_url(template).database if template else None
    if made.get_backend_name() == "postgresql":
        query(url, f"CREATE DATABASE {name}" + (f" TEMPLATE {source}" if source else ""))
        return made.set(database=name).render_as_string(hide_password=False)
    with closing(_connect(made)) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        if source:
            cursor.execute(f"SHOW TABLES FROM {source}")
            for (table,) in cursor.fetchall():
                cursor.execute(f"CREATE TABLE {name}.{table} LIKE {source}.{table}")
                cursor.execute(f"INSERT INTO {name}.{table} SELECT * FROM {source}.{table}")
    return made.set(database=name).render_as_string(hide_password=False)


def drop_database(url: str) -> None:
    """Drop a database with all its connections."""
    made = make_url(url)
    if made.get_backend_name() == "postgresql":
        server = made.set(database="postgres").render_as_string(hide_password=False)
        query(server, f"DROP DATABASE {made.database} WITH (FORCE)")
        return
    end_connections(url, "db", made.database or "")
    query(url, f"DROP DATABASE {made.database}")


def end_connections(url: str, column: str, value: str) -> None:
    """End all other connections to MariaDB that have a value in a column of its list, `db` or `user`."""
    wanted = f"SELECT id FROM information_schema.processlist WHERE {column} = %s AND id <> CONNECTION_ID()"
    with closing(_connect(make_url(url))) as connection, connection.cursor() as cursor:
        cursor.execute(wanted, (value,))
        for (number,) in cursor.fetchall():
            try:
                cursor.execute(f"KILL {number}")
            except pymysql.MySQLError as error:
                if error.args[0] != 1094:  # it has ended
                    raise


def _connect(url: URL) -> pymysql.Connection[Any]:
    where: dict[str, Any] = {"host": url.host, "port": url.port or 3306, "user": url.username, "database": url.database}
    return pymysql.connect(**where, password=url.password or "", autocommit=True, connect_timeout=5)
