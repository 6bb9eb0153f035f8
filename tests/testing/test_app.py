"""`App.test`, `context` and the pytest plugin."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine, func, inspect, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from idemp import App, AsyncContext, ConfigurationError, Conflict, Context, Idempotent, Retry, Unreadable
from idemp.testing import AppTest, context
from tests.testing.classic import Base, Order
from tests.testing.classic import Place as PlaceOrder


class Placed(BaseModel):
    __message_type__ = "shop.Placed"
    id: int


def app_of(handler: Callable[..., Any], **options: Any) -> App:
    app = App("orders", policy=Idempotent(key="id", **options))
    app.handler(PlaceOrder)(handler)
    return app


def place_order(message: PlaceOrder, ctx: Context) -> Placed:
    ctx.session.add(Order(number=message.id, sku=message.sku))
    ctx.send({"id": message.id}, to="mail", type="shop.Remind", delay="2h")
    return Placed(id=message.id)


async def async_place_order(message: PlaceOrder, ctx: AsyncContext) -> Placed:
    ctx.session.add(Order(number=message.id, sku=message.sku))
    ctx.send({"id": message.id}, to="mail", type="shop.Remind", delay="2h")
    return Placed(id=message.id)


ORDER = PlaceOrder(id=7, sku="A", tags=[])


def count(test: AppTest) -> int:
    with test.session() as session:
        return session.scalar(select(func.count()).select_from(Order)) or 0


@pytest.mark.parametrize("handler", [place_order, async_place_order])
@pytest.mark.parametrize(
    ("kind", "ours"),
    [("sqlite", True), ("sqlite", False), ("postgresql", False)],
    indirect=["kind"],
    ids=["ours", "file", "server"],
)
def test_an_app_is_tested(handler: Callable[..., Any], kind: str, url: str, ours: bool) -> None:
    app = app_of(handler)
    with app.test(tables=Base.metadata, database=None if ours else url) as test:
        test.send(ORDER)
        test.send(ORDER)
        test.run_until_idle()
        assert (count(test), test.runs.total(), test.sent("shop.Placed"), test.sent("mail")) == (1, 1, [{"id": 7}], [])
        test.pass_time("2h")
        test.run_until_idle()
        assert test.sent("mail") == [{"id": 7}]
        with app.initiate() as unit:
            unit.send({"id": 8}, to="mail", type="shop.Remind")
        assert test.sent("mail") == [{"id": 7}, {"id": 8}]
    assert app.settings.database_url == "sqlite:///idemp.db"
    assert (app.hooks, app.process.opened) == ((), None)
    if not ours:  # nothing is left but the tables that were there
        engine = create_engine(url)
        assert [name for name in inspect(engine).get_table_names() if "test" in name or "classic" in name] == []
        engine.dispose()


def test_what_a_handler_raises_is_raised() -> None:
    def fails(message: PlaceOrder, ctx: Context) -> None:
        raise LookupError("no such order")

    with app_of(fails, retry=Retry(attempts=2, delays=("1m",))).test() as test:
        test.send(ORDER)
        with pytest.raises(LookupError, match="no such order"):
            test.run_until_idle()
        test.run_until_idle()  # the retry is not due
        test.pass_time("5m")
        test.run_until_idle(raises=False)
        assert [(letter.rule, letter.attempts) for letter in test.dead_letters()] == [("handler", 2)]
        assert test.runs.total() == 0


def test_what_is_not_handled_is_raised() -> None:
    with app_of(place_order).test(tables=Base.metadata) as test:
        test.send(b"nonsense", type="classic.Place")
        with pytest.raises(Unreadable):
            test.run_until_idle()
        test.send(ORDER)
        test.send(PlaceOrder(id=7, sku="B", tags=[]))
        with pytest.raises(Conflict):
            test.run_until_idle()


def test_a_plugin_closes_what_it_has_opened(idemp_test: Callable[..., AppTest]) -> None:
    test = idemp_test(app_of(place_order), tables=Base.metadata)
    test.send({"id": 7, "sku": "A", "tags": []}, type="classic.Place")
    test.run_until_idle()
    assert count(test) == 1


def test_a_context_for_a_unit_test() -> None:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        ctx = context(session, message_id="7", headers={"x-tenant": "a"})
        assert place_order(ORDER, ctx) == Placed(id=7)
        assert session.scalars(select(Order.number)).all() == [7]
        assert ctx.connection is session.connection()
    assert [(output.routing_key, output.delay) for output in ctx.outputs()] == [("mail", 7200.0)]
    assert (ctx.headers, ctx.attempt) == ({"x-tenant": "a"}, 1)
    with pytest.raises(ConfigurationError, match=r"make the context by context\(session\)"):
        place_order(ORDER, context())
    engine.dispose()


def test_a_context_for_a_unit_test_of_an_async_handler() -> None:
    async def main() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(engine) as session:
            ctx = context(session)
            await async_place_order(ORDER, ctx)
            assert (await ctx.session.scalars(select(Order.number))).all() == [7]
        await engine.dispose()

    asyncio.run(main())


def test_the_plugin_is_light() -> None:
    code = "import idemp.testing.plugin, sys; print([name for name in ('sqlalchemy', 'hypothesis', 'time_machine') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
