"""Connections that were open before a handler ran: their writes are found, or the report says what was not seen."""

from __future__ import annotations

import queue
import socket
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, make_url, text

from idemp import Context, Idempotent
from idemp.testing import NotIdempotent, NotSeen, assert_idempotent
from idemp.testing.detectors import DEFAULT
from tests.testing.test_idioms import found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONE: dict[str, Any] = {"message": dict, "type": "mails.Send", "policy": Idempotent(key="id"), "crash_at": ()}


def writes_and_reads(execute: Any, expected: str, *, database: str = "sqlite://") -> None:
    """A handler that writes through a connection of before is found; one that reads is not."""

    def writes(message: dict[str, Any], ctx: Context) -> None:
        execute("INSERT INTO mail VALUES (1)")

    def reads(message: dict[str, Any], ctx: Context) -> None:
        execute("SELECT 1 FROM mail")

    (finding,) = found(writes, "second connection", database=database)
    assert expected in finding.what
    assert found(reads, "second connection", database=database) == []


@pytest.fixture(scope="module")
def django_mail() -> Iterator[Any]:
    """A model of Django's, whose table is there, on the connection that Django opened before."""
    import django  # type: ignore[import-untyped]
    from django.conf import settings  # type: ignore[import-untyped]

    databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    settings.configure(DATABASES=databases, INSTALLED_APPS=[], DEFAULT_AUTO_FIELD="django.db.models.AutoField")
    django.setup()
    from django.db import connection, models  # type: ignore[import-untyped]

    class Mail(models.Model):  # type: ignore[misc]  # noqa: DJ008
        to = models.CharField(max_length=40)

        class Meta:
            app_label = "mails"

    with connection.schema_editor() as editor:
        editor.create_model(Mail)
    yield Mail
    connection.close()


def test_django_orm(django_mail: Any) -> None:
    def sends(message: dict[str, Any], ctx: Context) -> None:
        django_mail.objects.create(to="me")

    def looks(message: dict[str, Any], ctx: Context) -> None:
        django_mail.objects.filter(to="me").count()

    with pytest.raises(NotIdempotent, match=r"INSERT INTO \"mails_mail\".*\[second connection\]"):
        assert_idempotent(sends, {"id": 1}, **ONE)
    report = assert_idempotent(looks, {"id": 1}, **ONE)
    assert report.not_seen == ("Whether the key tells messages apart: one message was given.",)


def test_sqlite_in_memory() -> None:
    with closing(sqlite3.connect(":memory:")) as other:
        other.execute("CREATE TABLE mail (id)")
        writes_and_reads(
            other.execute, "through a connection that was open before: 1 row of a SQLite database in memory"
        )


def test_sqlite_of_another_thread(tmp_path: Path) -> None:
    asked: queue.Queue[str | None] = queue.Queue()
    ready = threading.Event()

    def works() -> None:
        with closing(sqlite3.connect(tmp_path / "mail.db")) as other:
            other.execute("CREATE TABLE mail (id)")
            ready.set()
            while statement := asked.get():
                other.execute(statement)
                other.commit()
                asked.task_done()

    def execute(statement: str) -> None:
        asked.put(statement)
        asked.join()

    thread = threading.Thread(target=works, daemon=True)
    thread.start()
    ready.wait()
    try:
        writes_and_reads(execute, "1 row of a SQLite database")
    finally:
        asked.put(None)
        thread.join()


@pytest.mark.parametrize("same_server", [False, True])
def test_psycopg(postgresql_url: str, same_server: bool) -> None:
    url = make_url(postgresql_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("CREATE TEMP TABLE mail (id int)")
        writes_and_reads(other.execute, "INSERT INTO mail", database=postgresql_url if same_server else "sqlite://")


def test_pymysql(mariadb_url: str) -> None:
    url = make_url(mariadb_url)
    other = pymysql.connect(
        host=url.host,
        port=url.port or 3306,
        user=url.username or "",
        password=url.password or "",
        database=url.database,
    )
    with closing(other), other.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE mail (id int)")
        writes_and_reads(cursor.execute, "INSERT INTO mail")


def test_what_sqlalchemy_sends_is_seen_as_such(postgresql_url: str) -> None:
    engine = create_engine(postgresql_url)
    with engine.connect() as other:
        other.execute(text("CREATE TEMP TABLE mail (id int)"))
        writes_and_reads(lambda statement: other.execute(text(statement)), "a second connection: INSERT INTO mail")
    engine.dispose()


def test_a_method_of_a_driver_that_was_taken_before_is_not_passed_over(postgresql_url: str) -> None:
    url = make_url(postgresql_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as other:
        taken = other.cursor().execute

        def asks(message: dict[str, Any], ctx: Context) -> None:
            taken("SELECT 1")

        with pytest.warns(NotSeen, match="through a connection that was open before"):
            assert_idempotent(asks, {"id": 1}, **ONE)


def test_what_can_not_be_seen_is_said() -> None:
    """The driver is unknown, so it may have read only. The report says so, and a warning where the test passes."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2]) as client:
        peer = "{}:{}".format(*server.getsockname()[:2])

        def asks(message: dict[str, Any], ctx: Context) -> None:
            client.sendall(b"INSERT")

        def fails(message: dict[str, Any], ctx: Context) -> None:
            asks(message, ctx)
            message.clear()

        with pytest.warns(NotSeen, match=f"sent something to {peer} through a connection that was open before"):
            report = assert_idempotent(asks, {"id": 1}, **ONE)
        assert peer in report.not_seen[0]
        with pytest.raises(NotIdempotent) as found_out:
            assert_idempotent(fails, {"id": 1}, **ONE)
        assert f"sent something to {peer}" in found_out.value.__notes__[0]
        assert_idempotent(asks, {"id": 1}, **ONE, detect=DEFAULT - {"second connection"})
