"""What the test kit makes of effects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from idemp import App, Context, Idempotent
from idemp.effects import EffectRun
from idemp.testing import context, redelivery_machine, replay
from idemp.testing.promises import PromiseBroken

MAILS: list[str] = []


def an_app(*, counts: bool = False) -> App:
    app = App("shop")
    runs = []

    @app.effect("mail.receipt")
    def receipt(value: dict[str, Any], run: EffectRun) -> None:
        MAILS.append(value["to"])

    @app.handler(dict, type="shop.Order", policy=Idempotent(key="id"))
    def order(message: dict[str, Any], ctx: Context) -> None:
        runs.append(message)
        ctx.effect("mail.receipt", {"to": len(runs) if counts else message["id"]})
        ctx.send({"id": message["id"]}, to="stock", type="stock.Reserve")

    return app


ORDERS = {"shop.Order": st.fixed_dictionaries({"id": st.integers(0, 2)})}
Machine = redelivery_machine(an_app(), messages=ORDERS, rehearse=False)
Machine.TestCase.settings = settings(Machine.TestCase.settings, max_examples=10)
TestOrders = Machine.TestCase


def test_really_done_by_nobody() -> None:
    told = replay(
        an_app(),
        [("publish", "shop.Order", '{"id":0}'), ("crash", "after commit"), ("deliver",), ("relay",), ("relay",)],
    )
    assert told
    assert not MAILS


def test_an_effect_that_depends_on_runs_is_a_finding() -> None:
    with pytest.raises(PromiseBroken, match="is not the one that is sent"):
        replay(an_app(counts=True), [("publish", "shop.Order", '{"id":0}'), ("crash", "before commit"), ("deliver",)])


def test_context_shows_them() -> None:
    ctx = context(message_id="m-1")
    ctx.effect("mail.receipt", {"to": "ann"})
    (output,) = ctx.outputs
    assert output.is_effect
    assert (output.routing_key, output.message.body) == ("mail.receipt", b'{"to":"ann"}')
