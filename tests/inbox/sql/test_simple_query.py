"""Whatever a user's id or output is made of, PostgreSQL gets it back unharmed from a message without parameters."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DataError, IntegrityError

from idemp import Context, Message
from idemp.errors import TransactionEnded
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.claim_postgresql import LONGEST_MESSAGE
from idemp.inbox.sql.schema import upgrade
from idemp.messages import Output, OutputKind
from tests.inbox.sql.test_guard import Shop
from tests.inbox.sql.unseen import end_unseen

NASTY = ["it's", "\\'; DROP TABLE idemp_inbox; --", "$1 %s :name {x}", "\\x27", "ünï/🙂", '"', "E'\\n'", "a;b; COMMIT"]


@pytest.fixture(scope="module", params=["on", "off"])
def engine(request: pytest.FixtureRequest, postgresql: object) -> Iterator[Engine]:
    """Strings with backslashes as the standard has them, and as they were before."""
    name = f"idemp_test_{uuid4().hex[:12]}"
    made = create_engine_safely(postgresql.create_database(name))  # type: ignore[attr-defined]

    @event.listens_for(made, "connect")
    def _conforming(driver: object, _: object) -> None:
        driver.execute(f"SET standard_conforming_strings = {request.param}")  # type: ignore[attr-defined]
        driver.commit()  # type: ignore[attr-defined]

    upgrade(made, Tables())
    yield made
    made.dispose()
    postgresql.drop_database(name)  # type: ignore[attr-defined]


def claim_of(message_id: str, fingerprint: bytes | None = None) -> Claim:
    return Claim(
        consumer="shop",
        id=effective_id("envelope", message_id),
        message_type="shop.Sell",
        fingerprint=fingerprint,
        wait=timedelta(seconds=1),
    )


def output_of(body: bytes, header: str) -> Output:
    output_id = uuid4()
    message = Message(body=body, type="shop.Sold", message_id=str(output_id), headers={"x": header})
    return Output(
        id=output_id, ordinal=0, kind=OutputKind.SEND, exchange=header[:50], routing_key="out", message=message
    )


def stored(engine: Engine, message_id: str, output: Output, fingerprint: bytes | None = None) -> Output:
    """Claimed, stored, committed, and read back by the next delivery."""
    store, claim = SqlStore(engine), claim_of(message_id, fingerprint)
    with store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        unit.store_outputs(claim, [output], timedelta(minutes=1))
        unit.commit()
    with store.begin([claim]) as unit:
        again = unit.claim(claim)
    assert again.verdict is Verdict.DUPLICATE
    (found,) = again.outputs
    return found.output


@pytest.mark.parametrize("nasty", NASTY)
def test_nasty_texts(engine: Engine, nasty: str) -> None:
    output = output_of(nasty.encode(), nasty)
    assert stored(engine, f"{nasty}-{uuid4()}", output, nasty.encode()[:32]) == output
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM idemp_inbox")) > 0


@settings(max_examples=30, deadline=None)
@given(
    body=st.binary(max_size=200),
    header=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30),
    message_id=st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs"]), min_size=1, max_size=100),
)
def test_any_bytes_and_texts(engine: Engine, body: bytes, header: str, message_id: str) -> None:
    output = output_of(body, header)
    assert stored(engine, f"{message_id}{uuid4()}", output) == output


@pytest.mark.parametrize("size", [LONGEST_MESSAGE - 200, LONGEST_MESSAGE, LONGEST_MESSAGE * 4])
def test_long_outputs_are_the_same(engine: Engine, size: int) -> None:
    output = output_of(b"x" * size, "long")
    assert stored(engine, str(uuid4()), output) == output


def test_what_a_deferred_constraint_refuses_is_not_committed(engine: Engine) -> None:
    """The server says so in the middle of the last message."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE seat (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        connection.execute(text("INSERT INTO seat VALUES (1)"))
    store, claim = SqlStore(engine), claim_of(str(uuid4()))
    with pytest.raises(IntegrityError, match="seat"), store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        unit.connection.execute(text("INSERT INTO seat VALUES (1)"))
        unit.store_outputs(claim, [output_of(b"x", "x")], timedelta(minutes=1))
        unit.commit()
    with store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        unit.connection.execute(text("INSERT INTO seat VALUES (2)"))
        unit.commit()
    with engine.begin() as connection:
        assert list(connection.scalars(text("SELECT n FROM seat ORDER BY n"))) == [1, 2]
        connection.execute(text("DROP TABLE seat"))


def test_isolation_of_the_engine_is_that_of_the_transaction(engine: Engine) -> None:
    """It goes with BEGIN, which is not psycopg's own here."""
    strict = SqlStore(engine.execution_options(isolation_level="SERIALIZABLE"))
    claim = claim_of(str(uuid4()))
    with strict.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        assert unit.connection.scalar(text("SHOW transaction_isolation")) == "serializable"


def test_only_the_claim_waits_as_long_as_a_claim_does(engine: Engine) -> None:
    """What lock_timeout was before counts again for the handler, also where it changes from one claim to the next."""

    def seen_by_a_handler() -> str:
        claim = claim_of(f"lock-timeout-{uuid4()}")
        with SqlStore(engine).begin([claim]) as unit:
            assert unit.claim(claim).verdict is Verdict.CLAIMED
            seen: str = unit.connection.scalar(text("SHOW lock_timeout"))
            unit.commit()
        with engine.begin() as connection:
            connection.execute(text("SET lock_timeout = '7s'"))  # for the session, by another user of the pool
        return seen

    engine.dispose()  # so that all get one connection, a new one
    assert [seen_by_a_handler() for _ in range(3)] == ["0", "7s", "7s"]
    claim = claim_of("lock-timeout-duplicate")
    stored(engine, "lock-timeout-duplicate", output_of(b"{}", "x"))
    with SqlStore(engine).begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.DUPLICATE
        assert unit.connection.scalar(text("SHOW lock_timeout")) == "7s"
    engine.dispose()


FAILS_ON_REQUEST = """
    CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF current_setting('test.fails', true) = 'on' THEN PERFORM 1 / 0; END IF; RETURN new; END
    $$;
    CREATE TRIGGER fails BEFORE INSERT ON idemp_output FOR EACH ROW EXECUTE FUNCTION fails();
"""


@pytest.mark.parametrize("committed", [True, False], ids=["committed behind its back", "not committed"])
def test_the_proof_comes_before_all_that_may_fail(postgresql_url: str, committed: bool) -> None:
    """Outputs can't be stored, and that even looks like the proof's failure: only a commit of the handler's is one."""
    engine = create_engine_safely(postgresql_url)
    upgrade(engine, Tables())
    shop = Shop(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(FAILS_ON_REQUEST)

    def misdeed(ctx: Context) -> None:
        if committed:
            end_unseen(ctx.connection)
        ctx.connection.execute(text("SET LOCAL test.fails = 'on'"))

    with pytest.raises(TransactionEnded if committed else DataError):
        shop.deliver(misdeed)
    assert (shop.claims(), shop.app.store.upkeep.pending_count()) == (0, 0)
    shop.handled_now()
    engine.dispose()
