"""`assert_idempotent` finds the classic faults, and says nothing of what is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine, insert, select, text
from sqlalchemy.orm import Session

from idemp import App, AsyncContext, ConfigurationError, Context, Idempotent, Policy
from idemp.testing import NotIdempotent, assert_idempotent, assert_idempotent_async
from tests.testing import classic, idioms

FOUND: Any = {"tables": classic.Base.metadata, "policy": Idempotent()}
RIGHT: Any = {
    "tables": idioms.Base.metadata,
    "policy": Idempotent(),
    "setup": idioms.setup,
    "properties": {"reply_to": "shop"},
}


def name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


@pytest.fixture(autouse=True)
def upload() -> None:
    classic.FOLDER.mkdir(exist_ok=True)
    (classic.FOLDER / "upload.txt").touch()


@pytest.mark.parametrize(("handler", "kind", "words"), classic.CLASSIC, ids=name)
def test_a_classic_fault_is_found(handler: Callable[..., Any], kind: str, words: str) -> None:
    with pytest.raises(NotIdempotent, match=f"(?s){handler.__name__} is not idempotent.*Cure: .*Not looked at") as raised:
        assert_idempotent(handler, classic.MESSAGE, **FOUND)
    (cause,) = [each.cause for each in raised.value.faults if each.kind == kind]
    assert words in cause
    assert {each.kind for each in raised.value.faults} - {kind} <= {"file", "connection"} - {kind}, raised.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_on_another_database(url: str) -> None:
    with pytest.raises(NotIdempotent, match="it wrote on another connection"):  # on SQLite, it waits for itself
        assert_idempotent(classic.initiates_inside, classic.MESSAGE, database=url)
    for handler, kind, words in (each for each in classic.CLASSIC if each[1] in ("race", "commit", "swallowed")):
        with pytest.raises(NotIdempotent, match=words) as raised:
            assert_idempotent(handler, classic.MESSAGE, database=url, **FOUND)
        assert [each.kind for each in raised.value.faults] == [kind]
    for idiom in idioms.ON_TABLES:
        assert_idempotent(idiom, idioms.MESSAGE, database=url, **RIGHT)


@pytest.mark.parametrize(("handler", "kind", "words"), classic.PLAIN, ids=name)
def test_a_fault_of_a_handler_that_is_not_opted_in_is_found(handler: Callable[..., Any], kind: str, words: str) -> None:
    with pytest.raises(NotIdempotent, match=words) as raised:
        assert_idempotent(handler, classic.MESSAGE, tables=classic.Base.metadata, policy=Policy())
    assert [each.kind for each in raised.value.faults] == [kind]


@pytest.mark.parametrize("handler", idioms.IDIOMS, ids=name)
def test_nothing_is_said_of_what_is_right(handler: Callable[..., Any]) -> None:
    report = assert_idempotent(handler, idioms.MESSAGE, **RIGHT)
    assert report.runs > 7
    assert len(report.not_looked_at) == (2 if hasattr(handler, "__qualname__") else 3)  # an object has no name to import


def at_its_time(message: classic.Place, ctx: Context) -> None:
    ctx.session.add(classic.Order(number=message.id, sku=f"{datetime.now(UTC):%H:%M}"))


def test_a_time_in_a_row_counts_only_if_the_state_says_so() -> None:
    assert_idempotent(at_its_time, classic.MESSAGE, **FOUND)

    def state(session: Session) -> Any:
        return session.scalars(select(classic.Order.sku)).all()

    with pytest.raises(NotIdempotent, match="at a later time, the state is") as raised:
        assert_idempotent(at_its_time, classic.MESSAGE, state=state, **FOUND)
    assert [each.kind for each in raised.value.faults] == ["clock"]
    assert_idempotent(at_its_time, classic.MESSAGE, state=state, allow=["clock"], **FOUND)


def test_a_handler_that_fails_is_no_success() -> None:
    def fails(message: classic.Place, ctx: Context) -> None:
        raise LookupError("no such order")

    with pytest.raises(AssertionError, match="fails failed on the message, so nothing was compared: LookupError") as raised:
        assert_idempotent(fails, classic.MESSAGE, **FOUND)
    assert isinstance(raised.value.__cause__, LookupError)


def test_what_other_processes_cannot_import_is_not_looked_at() -> None:
    def is_local(message: classic.Place, ctx: Context) -> None:
        ctx.session.add(classic.Order(number=message.id, sku=message.sku))

    report = assert_idempotent(is_local, classic.MESSAGE, **FOUND)
    assert (
        "other processes: test_what_other_processes_cannot_import_is_not_looked_at.<locals>.is_local cannot"
        in report.not_looked_at[2]
    )


def test_a_handler_is_tested_under_the_policy_of_its_app() -> None:
    app = App("orders", policy=Idempotent(key="id"))

    def adds(message: classic.Place, ctx: Context) -> None:
        ctx.session.add(classic.Order(number=message.id, sku=message.sku))

    with pytest.raises(ConfigurationError, match="adds belongs to no app: pass policy="):
        assert_idempotent(adds, classic.MESSAGE)
    app.handler(classic.Place)(adds)
    assert_idempotent(adds, {"id": 7, "sku": "A", "tags": []}, tables=classic.Base.metadata)
    with pytest.raises(ConfigurationError, match="adds belongs to an app, whose policy counts"):
        assert_idempotent(adds, classic.MESSAGE, policy=Policy())
    other = App("audit", policy=Policy())
    other.handler(classic.Place)(adds)
    with pytest.raises(ConfigurationError, match="adds belongs to 2 apps: pass app="):
        assert_idempotent(adds, classic.MESSAGE)
    with pytest.raises(NotIdempotent, match="it is not opted in, and a second delivery changed"):
        assert_idempotent(adds, classic.MESSAGE, app=other, tables=classic.Base.metadata)
    with pytest.raises(ConfigurationError, match=r"allow=\['time'\]: there are attempt, chance, clock"):
        assert_idempotent(adds, classic.MESSAGE, app=app, allow=["time"])
    with pytest.raises(ConfigurationError, match=r"allow='clock' has to be a list: write allow=\['clock'\]"):
        assert_idempotent(adds, classic.MESSAGE, app=app, allow="clock")


def test_a_database_with_rows_is_no_database_for_tests(url: str) -> None:
    engine = create_engine(url)
    classic.Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(classic.Order).values(number=1, sku="A"))
    with pytest.raises(ConfigurationError, match="the table classic_order has rows: use an empty database"):
        assert_idempotent(classic.commits, classic.MESSAGE, database=url, **FOUND)
    engine.dispose()


def test_an_async_handler_runs_on_the_loop_of_the_test() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def belongs_to_a_loop(message: classic.Place, ctx: AsyncContext) -> None:
            assert asyncio.get_running_loop() is loop
            ctx.session.add(classic.Order(number=message.id, sku=message.sku))

        report = await assert_idempotent_async(belongs_to_a_loop, classic.MESSAGE, **FOUND)
        assert report.runs > 7

    asyncio.run(main())


class Slip(BaseModel):
    __message_type__ = "classic.Slip"
    id: int


def test_what_other_handlers_of_the_app_do_with_its_outputs_is_their_own() -> None:
    app = App("orders", policy=Idempotent())

    @app.handler(classic.Place)
    def place(message: classic.Place) -> Slip:
        return Slip(id=message.id)

    @app.handler(Slip)
    def fails(message: Slip) -> None:
        raise LookupError("no printer")

    assert_idempotent(place, classic.MESSAGE)


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_handler_that_cannot_be_committed_is_no_success(url: str) -> None:
    def adds_twice(message: classic.Place, ctx: Context) -> None:
        for _ in range(2):
            ctx.session.execute(text("INSERT INTO once VALUES (7)"))

    def setup(session: Session) -> None:
        session.execute(text("CREATE TABLE once (number INT UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    with pytest.raises(AssertionError, match=r"classic.Place could not be committed: IntegrityError: .*UniqueViolation"):
        assert_idempotent(adds_twice, classic.MESSAGE, policy=Idempotent(), setup=setup, database=url)
