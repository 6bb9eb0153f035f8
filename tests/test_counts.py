"""Guards of counts: what a delivery costs in statements, and that no statement is built anew per message."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
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
    """A house whose statements are counted."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.statements: list[str] = []
        engine = house.store.inner.engine
        event.listen(engine, "before_cursor_execute", self._statement)
        event.listen(engine, "commit", lambda connection: self.statements.append("COMMIT"))
        event.listen(engine, "rollback", lambda connection: self.statements.append("ROLLBACK"))
        for _ in range(3):  # names are interned, dialects have looked around
            house.deliver(sale("warm"))
        house.restart()
        self.statements.clear()

    def deliver(self, message_id: str = "sale-1") -> list[str]:
        """The statements of one delivery, by their first words."""
        self.statements.clear()
        outcome = self.house.deliver(sale(message_id))
        assert outcome in {Outcome.HANDLED, Outcome.REDISPATCHED, Outcome.SKIPPED}
        return [_kind(statement) for statement in self.statements]

    def fail(self) -> None:
        """A delivery whose handler raises after its effect."""
        self.statements.clear()
        with pytest.raises(OutOfStockError):
            self.house.deliver(sale("unsold", {"sold_out": True}))

    def _statement(self, _c: Any, _u: Any, statement: str, *_: Any) -> None:
        self.statements.append(statement)


def _kind(statement: str) -> str:
    words = " ".join(statement.split())
    tables = re.findall(r"INSERT (?:IGNORE )?INTO (\w+)|FROM (idemp_\w+|effect)", words)
    verb = re.match(r"(?:SET STATEMENT \S+ FOR )?(\w+)", words)
    assert verb is not None
    if words.startswith("WITH"):
        return f"INSERT {'+'.join(name for name, _ in tables if name)}"
    return f"{verb.group(1)} {'+'.join(name or read for name, read in tables)}".strip()


def opened(stack: ExitStack, url: str, *, outputs: int, claim: str) -> Watched:
    house = stack.enter_context(sql_house(url))
    with house.store.inner.engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (n int)"))

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO effect VALUES (1)"))
        if "sold_out" in message:
            raise OutOfStockError
        for number in range(outputs):
            ctx.send({"n": number}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(claim=claim))(sell)
    return Watched(house)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


ON_MARIADB = [
    "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "INSERT idemp_output", "INSERT idemp_pending", "RELEASE", "COMMIT",
]  # fmt: skip
FIRST = {
    ("postgresql", "early", 1): ["INSERT idemp_inbox", "INSERT effect", "INSERT idemp_output+idemp_pending", "COMMIT"],
    ("postgresql", "early", 100): ["INSERT idemp_inbox", "INSERT effect", "INSERT idemp_output+idemp_pending", "COMMIT"],
    ("postgresql", "early", 0): ["INSERT idemp_inbox", "INSERT effect", "SELECT", "COMMIT"],
    # The first is the transaction's id: what a late claim proves at its end has to stand at the beginning.
    ("postgresql", "late", 1): ["SELECT", "INSERT effect", "INSERT idemp_inbox+idemp_output+idemp_pending", "COMMIT"],
    ("sqlite", "early", 1): [
        "BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "INSERT idemp_output", "INSERT idemp_pending",
        "RELEASE", "COMMIT",
    ],
    ("sqlite", "early", 0): ["BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "RELEASE", "COMMIT"],
    ("mariadb", "early", 1): ON_MARIADB,
    ("mariadb", "early", 100): ON_MARIADB,
}  # fmt: skip
DUPLICATE = {
    "postgresql": ["INSERT idemp_inbox", "SELECT idemp_inbox", "ROLLBACK"],
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
    watched = opened(stack, url_of(request, database, tmp_path), outputs=outputs, claim=claim)
    assert watched.deliver() == FIRST[database, claim, outputs]


@pytest.mark.parametrize("database", DUPLICATE)
def test_duplicate(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str) -> None:
    """One INSERT and one SELECT."""
    watched = opened(stack, url_of(request, database, tmp_path), outputs=3, claim="early")
    watched.deliver()
    watched.house.restart()
    assert watched.deliver() == DUPLICATE[database]


FAILED = {
    # On PostgreSQL the question whether it is still the same transaction goes with the ROLLBACK.
    "postgresql": ["INSERT idemp_inbox", "INSERT effect", "ROLLBACK"],
    "sqlite": ["BEGIN", "SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "RELEASE", "ROLLBACK"],
    "mariadb": ["SAVEPOINT", "INSERT idemp_inbox", "INSERT effect", "RELEASE", "ROLLBACK"],
}


@pytest.mark.parametrize("database", FAILED)
def test_failure(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, database: str) -> None:
    watched = opened(stack, url_of(request, database, tmp_path), outputs=3, claim="early")
    watched.fail()
    assert [_kind(statement) for statement in watched.statements] == FAILED[database]


def test_a_rollback_forgets_no_prepared_statement(stack: ExitStack, postgresql_url: str) -> None:
    """Left to itself, psycopg deallocates all of them with each ROLLBACK, and a failure costs more than a success."""
    watched = opened(stack, postgresql_url, outputs=1, claim="early")
    engine = watched.house.store.inner.engine

    def prepared() -> set[str]:
        with engine.begin() as connection:  # whose end is no rollback
            return set(connection.scalars(text("SELECT name FROM pg_prepared_statements")))

    for number in range(8):  # psycopg prepares what was executed five times
        watched.deliver(f"sale-{number}")
    watched.house.restart()
    before = prepared()
    assert len(before) >= 3
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
    watched = opened(stack, url_of(request, database, tmp_path), outputs=2, claim="early")
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


def test_compiling_is_noticed(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard above can fail."""
    watched = opened(stack, "sqlite://", outputs=0, claim="early")
    engine = watched.house.store.inner.engine
    before = len(engine._compiled_cache)
    with engine.connect() as connection:
        connection.execute(text("SELECT 12345"))
    assert len(engine._compiled_cache) == before + 1


def test_marks_of_a_batch_are_one_transaction(stack: ExitStack) -> None:
    watched = opened(stack, "sqlite://", outputs=2, claim="early")
    for number in range(20):
        watched.deliver(f"sale-{number}")
    watched.statements.clear()
    watched.house.worker().dispatcher.flush()
    assert [_kind(statement) for statement in watched.statements] == [
        "DELETE idemp_pending",
        "INSERT idemp_history",
        "COMMIT",
    ]


def test_not_opted_in_costs_no_statement(stack: ExitStack) -> None:
    house = stack.enter_context(sql_house())
    house.app.handler(dict, type=SELL)(lambda message: None)
    watched = Watched(house)
    assert [word for word in watched.deliver() if word.startswith(("INSERT", "SELECT"))] == []
