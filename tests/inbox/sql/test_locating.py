"""Handlers change where a session looks names up, and idemp's tables stay the same ones."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import make_url, text

from idemp import Context, Idempotent, Outcome
from idemp.bulk import Bulk, Came, Row, SqlSet
from idemp.clock import SystemClock
from idemp.columns import Columns
from idemp.diagnosis import shell
from idemp.errors import StoreUnavailable
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.diagnosing import Diagnoses
from idemp.inbox.sql.locating import located
from idemp.inbox.sql.schema import check, sql, upgrade
from idemp.prepared.port import Answer
from idemp.prepared.sql import SqlBarrier
from idemp.spool import SpoolStore
from idemp.testing.store_bench import make_outputs
from tests.house import SELL, House, sale, sql_house
from tests.inbox.sql.kept import make_tables
from tests.lanes import mostly_slow
from tests.servers.process import with_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

COUNTED = ("idemp_consumer", "idemp_inbox", "idemp_output", "idemp_pending", "idemp_history", "idemp_barrier")
SHADOW = "CREATE TEMP TABLE IF NOT EXISTS {0} AS SELECT * FROM main.{0} WHERE 0"


class Place:
    """A database with idemp's tables, and the same tables elsewhere, where a handler's session looks first.

    Args:
        url: the database.
        home: the schema where idemp's tables are.
        elsewhere: the other schema.
        moves: the statements of a handler that looks there from now on.
    """

    def __init__(self, url: str, home: str, elsewhere: str, *moves: str) -> None:
        self.engine = create_engine_safely(url)
        self.url, self.home, self.elsewhere, self.moves = url, home, elsewhere, moves
        make_tables(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {home}.sold (id VARCHAR(100))"))

    def counts(self, schema: str) -> dict[str, int]:
        with self.engine.connect() as connection:
            if schema == "temp":
                self.move(connection)
            counted = {name: connection.scalar(text(f"SELECT count(*) FROM {schema}.{name}")) for name in COUNTED}
        return {name: number or 0 for name, number in counted.items()}

    def sold(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(text(f"SELECT count(*) FROM {self.home}.sold")) or 0

    def move(self, connection: Any) -> None:
        """Do as the handler does."""
        for statement in self.moves:
            connection.execute(text(statement))


@pytest.fixture(params=["sqlite", "mariadb", "postgresql", "postgresql, local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind, _, local = request.param.partition(", ")
    if kind == "sqlite":
        made = Place(f"sqlite:///{tmp_path}/inbox.db", "main", "temp", *map(SHADOW.format, sorted(Tables().names)))
    elif kind == "mariadb":
        url = request.getfixturevalue("mariadb_url")
        name = f"{make_url(url).database}_tenant"
        other = create_engine_safely(request.getfixturevalue("mariadb").create_database(name))
        make_tables(other)
        other.dispose()
        made = Place(url, str(make_url(url).database), name, f"USE {name}")
    else:
        made = Place(
            request.getfixturevalue("postgresql_url"), "public", "tenant", f"SET {local.upper()} search_path TO tenant"
        )
        upgrade(made.engine, Tables("tenant"))
    yield made
    made.engine.dispose()
    if kind == "mariadb":
        request.getfixturevalue("mariadb").drop_database(made.elsewhere)


def selling(place: Place, house: House, **policy: Any) -> None:
    """Handlers that look elsewhere once they are at work."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(text(f"INSERT INTO {place.home}.sold VALUES (:id)"), {"id": ctx.message_id})
        place.move(ctx.connection)
        for number in range(2):
            ctx.send({"n": number}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(**policy))(sell)


@pytest.mark.parametrize("mode", mostly_slow(["early", "late", "batches"]))
def test_claims_and_outputs_stay_together(place: Place, mode: str) -> None:
    """Also of later deliveries, on the connection that a handler has left so."""
    with sql_house(place.url) as house:
        selling(place, house, batch=5 if mode == "batches" else 1, claim="late" if mode == "late" else "early")
        deliver: Callable[..., Sequence[Any]] = house.together if mode == "batches" else one_by_one(house)
        messages = [sale(f"sale-{number}") for number in range(5)]
        assert [outcome for outcome, _ in deliver(*messages)] == [Outcome.HANDLED] * 5
        assert [outcome for outcome, _ in deliver(*messages)] == [Outcome.REDISPATCHED] * 5
        assert house.pending() == 0
    found = place.counts(place.home)
    assert (found["idemp_inbox"], found["idemp_output"], found["idemp_pending"]) == (5, 10, 0)
    assert found["idemp_history"] >= 5
    assert place.sold() == 5
    assert set(place.counts(place.elsewhere).values()) == {0}


def one_by_one(house: House) -> Callable[..., list[Any]]:
    return lambda *messages: [house.handle(message) for message in messages]


def test_pending_outputs_are_found(place: Place) -> None:
    """By a relay of the same process, on a connection that a handler has left so."""
    with sql_house(place.url) as house:
        selling(place, house)
        house.script.answers = ["nacked", "nacked"]
        house.handle(sale())
        house.script.clear()
        assert house.relay().confirmed == 2
        assert house.pending() == 0


def test_local_work_and_its_barrier(place: Place) -> None:
    """The row is where a checker looks for it, wherever the work looks."""
    barrier, id_ = SqlBarrier(place.engine), uuid4()
    with barrier.begin() as session:
        place.move(session)
        barrier.pass_(session, id_)
    assert SqlBarrier(place.engine).probe(id_) is Answer.COMMIT
    assert place.counts(place.home)["idemp_barrier"] == 1
    assert place.counts(place.elsewhere)["idemp_barrier"] == 0


def test_spool(place: Place) -> None:
    """Its tables are made by whoever spools first, and stay where they are."""
    store = SpoolStore(place.engine)
    store.create("orders")
    with place.engine.begin() as connection:
        place.move(connection)
    store.append("orders", [Columns("m-1", "t", b"{}", None, None, "")])
    assert store.level("orders").messages == 1


def test_chunks(postgresql_url: str) -> None:
    """Statements over a set may look elsewhere as well."""
    place = Place(postgresql_url, "public", "tenant", "SET search_path TO tenant")
    upgrade(place.engine, Tables("tenant"))
    booking = SqlSet(
        effects=["INSERT INTO public.sold SELECT id FROM {fresh}", f"{place.moves[0]} /* {{fresh}} */"],
        outputs="SELECT place, 'shop.Sold' AS type, payload AS body FROM {fresh}",
    )
    with sql_house(place.url) as house:
        house.sells()
        rows = [Row(id=f"m-{n}", type=SELL, body=b"{}", position=f"f#{n}") for n in range(5)]
        report = Bulk(house.app, sets={SELL: booking}).run(rows)
        assert (report.counts[Came.NEW], report.outputs) == (5, 5)
    found = place.counts("public")
    assert (found["idemp_inbox"], found["idemp_output"]) == (5, 5)
    assert set(place.counts("tenant").values()) == {0}
    place.engine.dispose()


@pytest.mark.parametrize(
    ("made_in", "path"),
    [
        ("public", "tenant, public"),
        ("Tenant-1", '"Tenant-1", public'),
        ("user", '"user"'),
        ("tenant", "tenant, public"),
    ],
)
def test_found_by_the_search_path(postgresql_url: str, made_in: str, path: str) -> None:
    """In the first schema that has them, whatever its name; further tables are made beside them."""
    engine = create_engine_safely(postgresql_url, connect_args={"options": f"-c search_path={path.replace(' ', '')}"})
    with engine.begin() as connection:
        for schema in ("tenant", "Tenant-1", "user"):
            connection.execute(text(f'CREATE SCHEMA "{schema}"'))
        connection.execute(text(f'SET LOCAL search_path TO "{made_in}"'))
        driver: Any = connection.connection.driver_connection
        driver.execute(sql("postgresql", Tables()))
    assert located(engine, Tables()).schema == made_in
    with engine.begin() as connection:
        connection.execute(text(f'DROP TABLE "{made_in}".idemp_barrier'))
    upgrade(engine, Tables())
    check(engine, Tables())
    with engine.connect() as connection:
        schemas = connection.scalars(
            text("SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'idemp_%'")
        ).all()
    assert schemas == [made_in]
    with closing(SqlStore(engine)) as store:
        store.verify()
        _handle(store)
    engine.dispose()


def test_database_whose_name_has_to_be_quoted(mariadb: Any, unique_name: str) -> None:
    name = f"{unique_name}-shop"
    engine = create_engine_safely(with_database(mariadb.url, name))
    root = create_engine_safely(mariadb.url)
    with root.begin() as connection:
        connection.execute(text(f"CREATE DATABASE `{name}`"))
    upgrade(engine, Tables())
    for without_returning in (False, True):
        with closing(SqlStore(engine, without_returning=without_returning)) as store:
            store.verify()
            _handle(store)
    found = Diagnoses(engine, located(engine, Tables()), SystemClock(), shell("idemp", "db", "upgrade")).run()
    assert [each for each in found if each.verdict == "failed"] == []
    engine.dispose()
    with root.begin() as connection:
        connection.execute(text(f"DROP DATABASE `{name}`"))
    root.dispose()


def _handle(store: SqlStore) -> None:
    """One handling with an output, and its redelivery."""
    id_ = effective_id("envelope", uuid4().hex)
    claim = Claim(consumer="shop", id=id_, message_type="T", fingerprint=None, wait=timedelta(seconds=1))
    output = make_outputs(1)
    for verdict in (Verdict.CLAIMED, Verdict.DUPLICATE):
        with store.begin([claim]) as unit:
            found = unit.claim(claim)
            assert found.verdict is verdict
            if verdict is Verdict.CLAIMED:
                unit.store_outputs(claim, output, timedelta(seconds=1))
                unit.commit()
    assert [each.output for each in found.outputs] == output


def test_nothing_is_asked_before_the_first_use() -> None:
    """A store is made where its database is away, as when a module is imported; its first use says so."""
    with closing(SqlStore(create_engine_safely("postgresql://me:secret@127.0.0.1:1/shop"))) as store:
        assert store.configured_tables.schema is None
        with pytest.raises(StoreUnavailable):
            store.begin()
