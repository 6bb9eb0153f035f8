"""Crash points that only a real server shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp import Context, Idempotent, Outcome
from idemp.errors import CommitUnknown, StoreUnavailable
from idemp.testing.faulty import CommitFault
from tests.house import SELL, House, sale, sql_house
from tests.inbox.sql.unseen import end_unseen
from tests.protocol.test_crash_points import all_is_well
from tests.servers.fixtures import pooler
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from idemp.inbox.sql import SqlStore
    from tests.servers.postgresql import PostgreSQL

Point = Callable[[House], None]

BEFORE_COMMIT = [
    "before begin",
    "after begin",
    "before claim",
    "after claim",
    "before store",
    "after store",
    "before commit",
]
AFTER_COMMIT = ["after commit", "before publish", "after publish"]
LATE_BEFORE_COMMIT = ["before claim and store", "after claim and store", "before commit"]


class TestPostgresql:
    """What only a real server shows."""

    def test_connection_ends_before_commit(self, postgresql_url: str) -> None:
        """`pg_terminate_backend` from another connection: not committed; the delivery runs again on a fresh one."""
        with sql_house(postgresql_url) as house:
            store: SqlStore = house.store.inner
            killed = []

            def sell(message: dict[str, Any], ctx: Context) -> None:
                house.effects.write(ctx, "sale")  # type: ignore[arg-type]
                ctx.send({"n": 0}, to="stock", type="stock.Reserve")
                if not killed:
                    killed.append(ctx.connection.scalar(text("SELECT pg_backend_pid()")))
                    with store.engine.connect() as other:
                        other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": killed[0]})

            house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
            assert house.deliver() is Outcome.HANDLED
            all_is_well(house, outputs=1)

    @pytest.mark.parametrize("committed", [False, True], ids=["healthy", "commits by itself"])
    @pytest.mark.parametrize("batch", [1, 50])
    def test_the_database_goes_while_a_failed_handler_is_rolled_back(
        self, postgresql_url: str, monkeypatch: pytest.MonkeyPatch, committed: bool, batch: int
    ) -> None:
        """Nothing is held against a handler but what is known of it; that is found out when the database is back."""
        with sql_house(postgresql_url) as house:
            store: SqlStore = house.store.inner
            runs: list[str] = []

            def sell(message: dict[str, Any], ctx: Context) -> None:
                runs.append(str(ctx.message_id))
                house.effects.write(ctx, "sale")  # type: ignore[arg-type]
                if ctx.message_id == "a" or runs.count("b") > 1:
                    return
                pid = ctx.connection.scalar(text("SELECT pg_backend_pid()"))
                if committed:
                    end_unseen(ctx.connection)
                with store.engine.connect() as other:
                    other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
                raise ValueError("doomed")

            away = [StoreUnavailable("away")]
            withdraw = store._withdraw_now

            def withdrawing(rows: Any) -> Any:
                if away:
                    raise away.pop()
                return withdraw(rows)

            monkeypatch.setattr(store, "_withdraw_now", withdrawing)
            house.app.handler(dict, type=SELL, policy=Idempotent(batch=batch))(sell)
            if batch > 1:
                first, second = house.together(sale("a"), sale("b"))
            else:
                first, second = house.handle(sale("a")), house.handle(sale("b"))
            assert not away
            if committed:
                assert (second[0], getattr(second[1], "reason", "")) == (Outcome.PARKED, "TransactionEnded")
                assert runs.count("b") == 1
            else:
                assert (first[0], second[0]) == (Outcome.HANDLED, Outcome.HANDLED)
                assert house.sales() == 2

    def test_the_database_goes_while_somebody_ends_the_process(
        self, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What ends the process is not taken for an outage; claims that may be there are owed all the same."""
        with sql_house(postgresql_url) as house:
            store: SqlStore = house.store.inner

            def sell(message: dict[str, Any], ctx: Context) -> None:
                pid = ctx.connection.scalar(text("SELECT pg_backend_pid()"))
                with store.engine.connect() as other:
                    other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
                raise SystemExit(3)

            def away(rows: Any) -> Any:
                raise StoreUnavailable("away")

            monkeypatch.setattr(store, "_withdraw_now", away)
            house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
            with pytest.raises(SystemExit):
                house.handle(sale("a"))
            assert len(store._owed) == 1

    def test_zombie_finishes_after_the_second_attempt(self, postgresql_url: str) -> None:
        """Case 18: it overwrites and deletes nothing, and learns that it is a duplicate."""
        with sql_house(postgresql_url) as house:
            store: SqlStore = house.store.inner
            second = house.app.protocol(house.publisher)
            outcomes = []

            def sell(message: dict[str, Any], ctx: Context) -> None:
                house.effects.write(ctx, "sale")  # type: ignore[arg-type]
                ctx.send({"attempt": ctx.attempt}, to="stock", type="stock.Reserve")
                if ctx.attempt == 1 and not outcomes:
                    zombie = ctx.connection.scalar(text("SELECT pg_backend_pid()"))
                    with store.engine.connect() as other:
                        other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": zombie})
                    outcomes.append(second.process(sale(), attempt=2))

            house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
            outcomes.append(house.deliver())
            assert outcomes == [Outcome.HANDLED, Outcome.REDISPATCHED]
            assert {body for _, body in house.sent()} == {b'{"attempt":2}'}
            second.dispatcher.flush()
            all_is_well(house, outputs=1)

    def test_connection_ends_in_the_answer_to_commit(self, postgresql_url: str) -> None:
        """A deferred trigger ends the session inside of COMMIT: unknown, so it runs again; nothing is done twice."""
        with sql_house(postgresql_url) as house:
            store: SqlStore = house.store.inner
            with store.engine.begin() as connection:
                connection.execute(text("CREATE TABLE doom (n int)"))
                connection.execute(
                    text(
                        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
                        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); RETURN NULL; END $$"
                    )
                )
                connection.execute(
                    text(
                        "CREATE CONSTRAINT TRIGGER die AFTER INSERT ON doom DEFERRABLE INITIALLY DEFERRED "
                        "FOR EACH ROW EXECUTE FUNCTION die()"
                    )
                )
            doomed = [True]

            def sell(message: dict[str, Any], ctx: Context) -> None:
                house.effects.write(ctx, "sale")  # type: ignore[arg-type]
                ctx.send({"n": 0}, to="stock", type="stock.Reserve")
                if doomed:
                    doomed.clear()
                    ctx.connection.execute(text("INSERT INTO doom VALUES (1)"))

            house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
            with store.begin() as unit:
                unit.connection.execute(text("INSERT INTO doom VALUES (1)"))
                with pytest.raises(CommitUnknown):
                    unit.commit()
            assert house.deliver() is Outcome.HANDLED
            all_is_well(house, outputs=1)

    @pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed"])
    def test_commit_sent_and_its_answer_lost(self, postgresql_url: str, fault: CommitFault) -> None:
        with sql_house(postgresql_url) as house:
            house.sells()
            house.script.commit_faults = [fault]
            house.deliver()
            all_is_well(house)

    def test_server_goes_away_and_comes_back(self, own_postgresql: Any, unique_name: str) -> None:
        """Case 12: nothing is remembered of the failure."""
        with sql_house(own_postgresql.create_database(unique_name)) as house:
            house.sells()
            own_postgresql.stop_immediately()
            with pytest.raises(StoreUnavailable):
                house.deliver()
            own_postgresql.start()
            assert house.deliver() is Outcome.HANDLED
            all_is_well(house)


@pytest.mark.slow
class TestBehindPgBouncer(TestPostgresql):
    """Each transaction may run on another server connection."""

    @pytest.fixture
    def postgresql_url(self, pooled_url: str) -> str:
        return pooled_url

    def test_server_goes_away_and_comes_back(self, own_postgresql: PostgreSQL, unique_name: str) -> None:
        """The pooler stays: it answers with errors of its own, and ends its clients' connections after them."""
        with pooler(own_postgresql.url) as front, sql_house(front.create_database(unique_name)) as house:
            house.sells()
            own_postgresql.stop_immediately()
            with pytest.raises(StoreUnavailable):
                house.deliver()
            own_postgresql.start()
            outcomes: list[Outcome] = []

            def delivered() -> bool:
                with suppress(StoreUnavailable):
                    outcomes.append(house.deliver())
                return bool(outcomes)

            wait_until(delivered, "the pooler has found its server again")
            assert outcomes == [Outcome.HANDLED]
            all_is_well(house)
