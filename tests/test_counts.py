"""Guards of counts: what a delivery costs in statements, and that no statement is built anew per message."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.pq import Trace
from sqlalchemy import event, text
from sqlalchemy.sql.compiler import SQLCompiler

from idemp import Context, Idempotent, Outcome
from tests.house import SELL, House, sale, sql_house

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class OutOfStockError(Exception):
    """What the handler raises when it is told to."""


class Watched:
    """A house whose statements are counted, as the server gets them: on PostgreSQL each entry is one round trip."""

    def __init__(self, house: House, folder: Path) -> None:
        self.house = house
        self._folder = folder
        self.engine = house.store.inner.engine
        self._seen: list[str] = []
        self._wires: list[Wire] = []
        match self.engine.dialect.name:
            case "postgresql":
                event.listen(self.engine, "connect", self._connected)
            case "sqlite":
                event.listen(self.engine, "connect", lambda driver, _: driver.set_trace_callback(self._seen.append))
            case _:
                event.listen(self.engine, "before_cursor_execute", lambda *given: self._seen.append(given[2]))
                event.listen(self.engine, "commit", lambda _: self._seen.append("COMMIT"))
                event.listen(self.engine, "rollback", lambda _: self._seen.append("ROLLBACK"))
        if self.engine.url.database:
            self.engine.dispose()
        else:
            self.engine.raw_connection().driver_connection.set_trace_callback(self._seen.append)  # type: ignore[union-attr]
        for _ in range(8):  # names are interned, dialects have looked around, statements are prepared
            house.deliver(sale("warm"))
        house.restart()
        self.clear()

    def _connected(self, driver: Any, _: Any) -> None:
        self._wires.append(Wire(driver, self._folder / f"wire-{len(self._wires)}"))

    def clear(self) -> None:
        """Begin anew."""
        self.statements()

    def statements(self) -> list[str]:
        """What was sent since the last time, by its first words."""
        seen = [*self._seen, *(message for wire in self._wires for message in wire.messages())]
        self._seen.clear()
        kinds = ["; ".join(map(_kind, filter(None, message.split("; ")))) for message in seen]
        return [kind for kind, _ in groupby(kinds)]  # SQLite tells each row of one executemany

    def deliver(self, message_id: str = "sale-1") -> list[str]:
        """The statements of one delivery."""
        self.clear()
        outcome = self.house.deliver(sale(message_id))
        assert outcome in {Outcome.HANDLED, Outcome.REDISPATCHED, Outcome.SKIPPED}
        return self.statements()

    def fail(self) -> list[str]:
        """Those of a delivery whose handler raises after its effect."""
        self.clear()
        with pytest.raises(OutOfStockError):
            self.house.deliver(sale("unsold", {"sold_out": True}))
        return self.statements()


class Wire:
    """What libpq sends on a connection: a round trip for each message of the simple protocol, and for each Sync."""

    def __init__(self, driver: Any, path: Path) -> None:
        self._path = path
        self._read = 0
        self._prepared: dict[str, str] = {}
        driver.pgconn.trace(os.open(path, os.O_CREAT | os.O_WRONLY))  # libpq closes it
        driver.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)

    def messages(self) -> Iterator[str]:
        """Since the last time."""
        bound = ""
        told = self._path.read_bytes()
        lines, self._read = re.split(r"^(?=[FB]\t)", told[self._read :].decode(), flags=re.MULTILINE), len(told)
        for line in lines:
            if not line.startswith("F"):
                continue
            _, _, kind, *rest = line.rstrip("\n").split("\t", 3)
            words = re.findall(r'"([^"]*)"', rest[0]) if rest else []
            if kind == "Query":
                yield rest[0].strip()[1:-1]
            elif kind == "Parse":
                self._prepared[words[0]] = words[1]
            elif kind == "Bind":
                bound = self._prepared[words[1]]
            elif kind == "Sync":
                yield bound


def _kind(statement: str) -> str:
    words = re.sub(r"[\w`\"]+\.(?=idemp_)", "", " ".join(statement.split()))  # without schemas
    tables = re.findall(r"INSERT (?:IGNORE )?INTO (\w+)|FROM (?:ONLY )?(idemp_\w+|effect)", words)
    verb = re.match(r"(?:SET STATEMENT \S+ FOR )?(\w+)", words)
    assert verb is not None
    if words.startswith("WITH"):
        return f"INSERT {'+'.join(name for name, _ in tables if name)}"
    return f"{verb.group(1)} {'+'.join(name or read for name, read in tables)}".strip()


def opened(stack: ExitStack, url: str, folder: Path, *, outputs: int, claim: str = "early", batch: int = 1) -> Watched:
    house = stack.enter_context(sql_house(url))
    with house.store.inner.engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (n int)"))

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO effect VALUES (1)"))
        if "sold_out" in message:
            raise OutOfStockError
        for number in range(outputs):
            ctx.send({"n": number}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(claim=claim, batch=batch))(sell)
    return Watched(house, folder)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


CLAIM = "BEGIN; LOCK; SHOW; SET; INSERT idemp_inbox; SET"  # one message, with what lock_timeout was before
ON_MARIADB = [
    "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "INSERT idemp_output", "INSERT idemp_pending", "RELEASE", "COMMIT",
]  # fmt: skip
FIRST = {
    ("postgresql", "early", 1): [
        CLAIM, "INSERT effect", "SELECT; INSERT idemp_output; INSERT idemp_pending; COMMIT",
    ],
    # Outputs too long for literals are bound parameters, in a statement of their own.
    ("postgresql", "early", 100): [
        CLAIM, "INSERT effect", "INSERT idemp_output+idemp_pending", "SELECT; COMMIT",
    ],
    ("postgresql", "early", 0): [CLAIM, "INSERT effect", "SELECT; COMMIT"],
    # The first is the transaction's id: what a late claim proves at its end has to stand at the beginning.
    ("postgresql", "late", 1): [
        "BEGIN; SELECT", "INSERT effect", "INSERT idemp_inbox+idemp_output+idemp_pending", "SELECT; COMMIT",
    ],
    ("sqlite", "early", 1): [
        "BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "INSERT idemp_output", "INSERT idemp_pending",
        "RELEASE", "COMMIT",
    ],
    ("sqlite", "early", 0): ["BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "RELEASE", "COMMIT"],
    ("mariadb", "early", 1): ON_MARIADB,
    ("mariadb", "early", 100): ON_MARIADB,
}  # fmt: skip
DUPLICATE = {
    "postgresql": [CLAIM, "SELECT idemp_inbox+idemp_message_type+idemp_output+idemp_pending", "ROLLBACK"],
    "sqlite": ["BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "SELECT idemp_inbox", "ROLLBACK"],
    "mariadb": ["SAVEPOINT", "INSERT idemp_inbox", "ROLLBACK", "SAVEPOINT", "SELECT idemp_inbox", "ROLLBACK"],
}


def url_of(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else request.getfixturevalue(f"{database}_url")


@pytest.mark.parametrize(("database", "claim", "outputs"), FIRST)
def test_first_delivery(
    request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str, claim: str, outputs: int
) -> None:
    """Claim, the handler's own, outputs, COMMIT: there is never a SELECT first."""
    watched = opened(stack, url_of(request, database, tmp_path), tmp_path, outputs=outputs, claim=claim)
    assert watched.deliver() == FIRST[database, claim, outputs]


@pytest.mark.parametrize("database", DUPLICATE)
def test_duplicate(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str) -> None:
    """One INSERT and one SELECT."""
    watched = opened(stack, url_of(request, database, tmp_path), tmp_path, outputs=3, claim="early")
    watched.deliver()
    watched.house.restart()
    assert watched.deliver() == DUPLICATE[database]


MARKS = {
    "postgresql": ["BEGIN; SET; DELETE idemp_pending; INSERT idemp_history; COMMIT"],
    "sqlite": ["BEGIN", "DELETE idemp_pending", "INSERT idemp_history", "COMMIT"],
    "mariadb": ["DELETE idemp_pending", "INSERT idemp_history", "COMMIT"],
}


@pytest.mark.parametrize("database", MARKS)
def test_marks(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str) -> None:
    """Of as many handlings as there are."""
    watched = opened(stack, url_of(request, database, tmp_path), tmp_path, outputs=2)
    for number in range(40):
        watched.deliver(f"sale-{number}")
    watched.clear()
    watched.house.restart()
    assert watched.statements() == MARKS[database]


# One entry for what is the same one after the other: 10 effects are 10 round trips.
BATCH = {
    "postgresql": [CLAIM, "INSERT effect", "SELECT; INSERT idemp_output+idemp_pending; COMMIT"],
    "sqlite": FIRST["sqlite", "early", 1],
    "mariadb": [
        "SAVEPOINT", "SET", "INSERT idemp_inbox", "SET", "INSERT effect", "INSERT idemp_output", "INSERT idemp_pending",
        "RELEASE", "COMMIT",
    ],
}  # fmt: skip
DUPLICATES = {
    "postgresql": DUPLICATE["postgresql"],
    "sqlite": DUPLICATE["sqlite"],
    "mariadb": [
        "SAVEPOINT", "SET", "INSERT idemp_inbox", "SET", "ROLLBACK", "SAVEPOINT", "SELECT idemp_inbox", "ROLLBACK",
    ],
}  # fmt: skip


@pytest.mark.parametrize("database", BATCH)
def test_batch(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str) -> None:
    """What one delivery costs beside its handler, 10 cost together; so with duplicates."""
    watched = opened(stack, url_of(request, database, tmp_path), tmp_path, outputs=1, batch=50)
    for round_ in range(3):  # on each connection of the pool
        watched.house.together(*(sale(f"warm-{round_}-{number}") for number in range(10)))
        watched.house.restart()
    messages = [sale(f"sale-{number}") for number in range(10)]  # libpq cuts off what is longer than 8 KiB in its trace
    watched.clear()
    watched.house.together(*messages)
    assert watched.statements() == BATCH[database]
    watched.house.restart()
    watched.clear()
    watched.house.together(*messages)
    assert watched.statements() == DUPLICATES[database]


FAILED = {
    # On PostgreSQL the question whether it is still the same transaction goes with the ROLLBACK.
    "postgresql": [CLAIM, "INSERT effect", "SELECT; ROLLBACK"],
    "sqlite": ["BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "RELEASE", "ROLLBACK"],
    "mariadb": ["SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "RELEASE", "ROLLBACK"],
}


@pytest.mark.parametrize("database", FAILED)
def test_failure(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str) -> None:
    watched = opened(stack, url_of(request, database, tmp_path), tmp_path, outputs=3, claim="early")
    assert watched.fail() == FAILED[database]


def test_a_rollback_forgets_no_prepared_statement(stack: ExitStack, tmp_path: Path, postgresql_url: str) -> None:
    """Left to itself, psycopg deallocates all of them with each ROLLBACK, and a failure costs more than a success."""
    watched = opened(stack, postgresql_url, tmp_path, outputs=1, claim="early")
    engine = watched.house.store.inner.engine

    def prepared() -> set[str]:
        with engine.begin() as connection:  # whose end is no rollback
            return set(connection.scalars(text("SELECT name FROM pg_prepared_statements")))

    for number in range(8):  # psycopg prepares what was executed five times
        watched.deliver(f"sale-{number}")
    watched.house.restart()
    before = prepared()
    assert len(before) >= 2
    for _ in range(8):
        watched.deliver("sale-1")  # a duplicate
        watched.fail()
    watched.house.restart()
    assert prepared() >= before


@pytest.mark.parametrize("database", ["postgresql", "sqlite", "mariadb"])
def test_no_statement_is_built_per_message(
    request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 50 messages, their duplicates and their marks: nothing is compiled, no cache grows."""
    watched = opened(stack, url_of(request, database, tmp_path), tmp_path, outputs=2, claim="early")
    engine = watched.house.store.inner.engine

    def run(name: str) -> None:
        for number in range(50):
            watched.deliver(f"{name}-{number}")
        watched.house.restart()
        for number in range(50):
            watched.deliver(f"{name}-{number}")
        watched.house.restart()

    run("warm")
    compiled: list[str] = []
    construct = SQLCompiler.__init__

    def counting(self: SQLCompiler, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        compiled.append(str(self))

    monkeypatch.setattr(SQLCompiler, "__init__", counting)
    cached = len(engine._compiled_cache)
    run("counted")
    assert [statement for statement in compiled if "idemp_" in statement] == []
    assert len(engine._compiled_cache) == cached


def test_compiling_is_noticed(stack: ExitStack, tmp_path: Path) -> None:
    """The guard above can fail."""
    watched = opened(stack, "sqlite://", tmp_path, outputs=0, claim="early")
    engine = watched.house.store.inner.engine
    before = len(engine._compiled_cache)
    with engine.connect() as connection:
        connection.execute(text("SELECT 12345"))
    assert len(engine._compiled_cache) == before + 1


def test_marks_of_a_batch_are_one_transaction(stack: ExitStack, tmp_path: Path) -> None:
    watched = opened(stack, "sqlite://", tmp_path, outputs=2, claim="early")
    for number in range(20):
        watched.deliver(f"sale-{number}")
    watched.clear()
    watched.house.worker().dispatcher.flush()
    assert watched.statements() == ["BEGIN", "DELETE idemp_pending", "INSERT idemp_history", "COMMIT"]


def test_not_opted_in_costs_no_statement(stack: ExitStack, tmp_path: Path) -> None:
    house = stack.enter_context(sql_house())
    house.app.handler(dict, type=SELL)(lambda message: None)
    watched = Watched(house, tmp_path)
    assert [word for word in watched.deliver() if word.startswith(("INSERT", "SELECT"))] == []


def test_not_opted_in_costs_no_round_trip(stack: ExitStack, tmp_path: Path, postgresql_url: str) -> None:
    """The proof that it is still the same transaction goes with BEGIN and COMMIT, and only where there are any."""
    house = stack.enter_context(sql_house(postgresql_url))
    with house.store.inner.engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (n int)"))

    def sell(message: dict[str, str], ctx: Context) -> None:
        if "idle" not in message:
            ctx.connection.execute(text("INSERT INTO effect VALUES (1)"))

    house.app.handler(dict, type=SELL)(sell)
    watched = Watched(house, tmp_path)
    assert watched.deliver() == ["BEGIN; SELECT", "INSERT effect", "SELECT; COMMIT"]
    house.deliver(sale("idle", {"idle": "yes"}))
    assert watched.statements() == []
