"""Claims back from an archive."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from idemp.identity import EffectiveId
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore
from idemp.inbox.sql.restoring import ArchivedClaim, Restoring
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from tests.inbox.sql.conftest import MovedClock
    from tests.inbox.sql.rows import Rows

MESSAGE = Message(body=b"\x00{}", type="stock.Reserve")


@pytest.fixture
def store(engine: Engine, clock: MovedClock) -> Iterator[SqlStore]:
    made = SqlStore(engine, clock=clock)
    yield made
    made.close()


def archived(clock: MovedClock, **fields: Any) -> ArchivedClaim:
    def output(ordinal: int) -> dict[str, Any]:
        made = Output(
            id=uuid.uuid4(), ordinal=ordinal, kind=OutputKind.SEND, exchange="", routing_key="stock", message=MESSAGE
        )
        named = {"output_id": made.id, "ordinal": ordinal, "kind": "send", "exchange": "", "routing_key": "stock"}
        return {**named, "envelope": made.envelope(), "body": MESSAGE.body}

    key = uuid.uuid4()
    values = {
        "consumer": "orders",
        "key": key,
        "original_id": str(key),
        "message_type": "orders.Place",
        "worker": "host-9",
        "claimed_at": clock.now() - timedelta(days=30),
        "fingerprint": b"\x01" * 32,
        "source_position": "orders/3#17",
        "outputs": [output(0), output(1)],
    }
    return ArchivedClaim(**{**values, **fields})


def look(store: SqlStore, claim: ArchivedClaim) -> Any:
    """What a redelivery would learn."""
    again = Claim(
        consumer=claim.consumer,
        id=EffectiveId(claim.key, claim.original_id),
        message_type=claim.message_type,
        fingerprint=claim.fingerprint,
        wait=timedelta(seconds=1),
    )
    with store.begin([again]) as unit:
        return unit.claim(again)


def test_a_redelivery_is_a_duplicate_again(store: SqlStore, clock: MovedClock) -> None:
    claim = archived(clock)
    assert look(store, claim).verdict is Verdict.CLAIMED
    assert Restoring(store).put_back([claim]) == 1
    found = look(store, claim)
    assert found.verdict is Verdict.DUPLICATE
    assert found.claimed_at == claim.claimed_at
    assert [stored.output.id for stored in found.outputs] == [each["output_id"] for each in claim.outputs]
    assert [stored.output.message.body for stored in found.outputs] == [b"\x00{}"] * 2
    assert not any(stored.pending for stored in found.outputs)


def test_repeating_it_is_harmless(store: SqlStore, clock: MovedClock, rows: Rows) -> None:
    claims = [archived(clock) for _ in range(3)]
    assert [Restoring(store).put_back(claims) for _ in range(2)] == [3, 0]
    assert rows.count(rows.tables.output) == 6


def test_what_was_handled_anew_stays(store: SqlStore, clock: MovedClock, rows: Rows) -> None:
    there = rows.claim(outputs=1, pending=False)
    claim = archived(clock, key=there, original_id=str(there))
    assert Restoring(store).put_back([claim, archived(clock)]) == 1
    assert look(store, replace(claim, fingerprint=None)).claimed_at == clock.now()
    with rows.engine.connect() as connection:
        of_that = select(func.count()).where(rows.tables.output.c.message_key == there)
        assert connection.scalar(of_that) == 1


def test_ids_that_are_no_uuids_keep_their_text(store: SqlStore, clock: MovedClock, rows: Rows) -> None:
    named = archived(clock, original_id="order-17")
    Restoring(store).put_back([named, archived(clock)])
    with rows.engine.connect() as connection:
        found = connection.scalars(select(rows.tables.inbox.c.original_id)).all()
    assert sorted(found, key=str) == [None, "order-17"]
