"""Marks on PostgreSQL: knowledge that may be lost, at the price of a redispatch under the same ids."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import text

from idemp.identity import effective_id
from idemp.inbox.port import Claim, Mark
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.testing.store_conformance import make_outputs
from tests.inbox.sql.kept import make_tables

WITNESS = (
    "CREATE TABLE witness (place serial, happened text, setting text)",
    """CREATE FUNCTION testify() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
       INSERT INTO witness (happened, setting) VALUES (TG_OP, current_setting('synchronous_commit')); RETURN NULL; END$$""",
    "CREATE TRIGGER witness AFTER INSERT ON idemp_output EXECUTE FUNCTION testify()",
    "CREATE TRIGGER witness AFTER DELETE ON idemp_pending EXECUTE FUNCTION testify()",
)


def test_they_wait_for_no_disk(postgresql_url: str) -> None:
    """What was handled does, before them and after them."""
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    with engine.begin() as connection:
        for statement in WITNESS:
            connection.execute(text(statement))
    store = SqlStore(engine)
    for number in range(2):
        effective = effective_id("envelope", f"A-{number}")
        claim = Claim(consumer="shop", id=effective, message_type="T", fingerprint=None, wait=timedelta(seconds=1))
        outputs = make_outputs(1)
        with store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, outputs, timedelta(seconds=30))
            unit.commit()
        store.record([Mark(claim, (outputs[0].id,))])
    with engine.begin() as connection:
        seen = connection.execute(text("SELECT happened, setting FROM witness ORDER BY place")).all()
    store.close()
    engine.dispose()
    assert [tuple(row) for row in seen] == [("INSERT", "on"), ("DELETE", "off")] * 2
