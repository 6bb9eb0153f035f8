"""Databases of tests: emptied whatever their tables refer to, counting from the start again, and never somebody's own."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, func, inspect, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemp import App, Context, Idempotent
from idemp.errors import ConfigurationError
from idemp.inbox.sql import create_engine_safely
from idemp.testing import Harness, NotIdempotent, assert_idempotent
from idemp.testing.ground import MARK
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATABASES = ("sqlite", "postgresql", "mariadb")


class Base(DeclarativeBase):
    pass


class Ring(Base):
    """Each refers to the next one, and the last to the first."""

    __tablename__ = "ring"
    id: Mapped[int] = mapped_column(primary_key=True)
    gem_id: Mapped[int] = mapped_column(ForeignKey("gem.id"))


class Gem(Base):
    __tablename__ = "gem"
    __table_args__: ClassVar[Any] = {"sqlite_autoincrement": True}
    id: Mapped[int] = mapped_column(primary_key=True)
    ring_id: Mapped[int | None] = mapped_column(ForeignKey("ring.id", use_alter=True, name="gem_ring"))


app = App("jeweller")


@app.handler(dict, type="jeweller.Set", policy=Idempotent(key="n"))
def set_gem(message: dict[str, int], ctx: Context) -> None:
    gem = Gem()
    ctx.session.add(gem)
    ctx.session.flush()
    ring = Ring(gem_id=gem.id)
    ctx.session.add(ring)
    ctx.session.flush()
    gem.ring_id = ring.id
    ctx.send({"gem": gem.id, "ring": ring.id}, to="window", type="jeweller.Show")


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    made = create_engine_safely(url)
    yield made
    made.dispose()


def test_ids_that_the_database_counts_are_no_finding(url: str) -> None:
    message = {"n": 1}
    about: dict[str, Any] = {"message": dict, "type": "jeweller.Set", "policy": Idempotent(key="n")}
    assert_idempotent(set_gem, message, database=url, tables=Base.metadata, crash_at=["before commit"], **about)


def test_emptied_it_counts_from_the_start_again(url: str) -> None:
    with Harness(app, database=url, tables=Base.metadata) as harness:
        for _ in range(2):
            harness.begin_anew()
            harness.send({"n": 1})
            harness.steps()
            assert harness.state(lambda session: session.scalars(select(Gem.id)).all()) == [1]


def test_rows_of_somebody_are_not_deleted(engine: Engine, url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE invoice (number integer)"))
        connection.execute(text("INSERT INTO invoice VALUES (1)"))
    with pytest.raises(ConfigurationError, match=f"would delete the rows of invoice in .*CREATE TABLE {MARK}"):
        Harness(app, database=url)
    assert inspect(engine).get_table_names() == ["invoice"]
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM invoice")) == 1
        connection.execute(text(f"CREATE TABLE {MARK} (yes integer)"))
    with Harness(app, database=url):
        pass
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM invoice")) == 0


def test_tables_of_another_schema_are_emptied(postgresql_url: str) -> None:
    def make(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA sales"))
            connection.execute(text("CREATE TABLE sales.sale (n serial)"))

    with Harness(app, database=postgresql_url, tables=make) as harness:
        for _ in range(2):
            with harness.engine.begin() as connection:
                connection.execute(text("INSERT INTO sales.sale DEFAULT VALUES"))
                assert numbers(connection) == [1]
            harness.begin_anew()


def numbers(connection: Connection) -> list[int]:
    return list(connection.scalars(text("SELECT n FROM sales.sale")))


class Stamped(Base):
    __tablename__ = "stamped"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.current_timestamp())


def stamps(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.add(Stamped(id=message["id"]))


def sends_the_databases_time(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"at": str(ctx.session.scalar(select(func.current_timestamp())))}, to="q", type="rings.Done")


@pytest.mark.parametrize("url", mostly_slow(DATABASES), indirect=True)
def test_the_databases_own_time_is_compared_as_a_time_and_may_not_be_sent(url: str) -> None:
    about: dict[str, Any] = {"message": dict, "type": "rings.Make", "policy": Idempotent(), "database": url}
    about |= {"tables": Base.metadata, "crash_at": ("before commit",)}
    assert_idempotent(stamps, {"id": 1}, **about, state=lambda session: session.scalars(select(Stamped)).all())
    with pytest.raises(NotIdempotent) as raised:
        assert_idempotent(sends_the_databases_time, {"id": 1}, **about)
    assert [finding.kind for finding in raised.value.findings] == ["clock"]
