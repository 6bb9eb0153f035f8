"""Prepared messages and barriers in SQL databases keep the ports' promises."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import time_machine
from sqlalchemy import event, text

from idemp.errors import AlreadyPassed, ConfigurationError, RolledBack, StoreUnavailable, TransientStoreError
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import Answer
from idemp.prepared.sql import SqlBarrier, SqlHome
from idemp.testing import BarrierConformance, DecidingHomeConformance
from idemp.testing.prepared_conformance import make_prepared
from tests.prepared.databases import another, database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

BRIEF = timedelta(seconds=0.2)


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Of the kind that the test's class names."""
    with database(request, request.cls.kind) as made:
        yield made


class OnOneDatabase(DecidingHomeConformance, BarrierConformance):
    """One database for all cases: each has ids of its own."""

    @pytest.fixture
    def home(self, engine: Engine) -> SqlHome:
        return SqlHome(engine)

    @pytest.fixture
    def barrier(self, engine: Engine) -> SqlBarrier:
        return SqlBarrier(engine, wait=BRIEF)

    def reopen(self, opened: Any) -> Any:
        other = another(opened.engine)
        return SqlBarrier(other, wait=BRIEF) if isinstance(opened, SqlBarrier) else SqlHome(other)

    def test_only_the_databases_clock_counts(self, home: SqlHome) -> None:
        """A checker whose machine is ahead takes nothing before its time, one that is behind takes it nevertheless."""
        waiting, due = make_prepared(), make_prepared()
        home.prepare(waiting, timedelta(minutes=30))
        with time_machine.travel(datetime.now(UTC) + timedelta(hours=1), tick=True):
            home.prepare(due, timedelta(0))
            assert not self.is_due(home, waiting.id)
        with time_machine.travel(datetime.now(UTC) - timedelta(hours=1), tick=True):
            found = home.find(due.id)
            assert found is not None
            assert found.prepared_at is not None
            assert abs(found.prepared_at - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)

    def test_work_without_a_transaction_is_refused(self, barrier: SqlBarrier) -> None:
        """Its row would stand there without the work."""
        id_ = uuid4()
        autocommit = barrier.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with autocommit as connection, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            barrier.pass_(connection, id_)
        assert barrier.probe(id_) is Answer.ROLLBACK

    @pytest.mark.parametrize(
        ("end", "answer"), [("rollback", Answer.ROLLBACK), ("close", Answer.ROLLBACK), ("commit", Answer.COMMIT)]
    )
    def test_work_that_ends_its_transaction_itself(self, barrier: SqlBarrier, end: str, answer: Answer) -> None:
        """The end of the block is no commit then: it must not pass for one."""
        id_ = uuid4()
        with pytest.raises(ConfigurationError, match="itself"), barrier.begin() as session:
            barrier.pass_(session, id_)
            getattr(session, end)()
        assert barrier.probe(id_) is answer

    def test_work_that_sends_a_rollback_by_itself(self, barrier: SqlBarrier) -> None:
        """Of which neither SQLAlchemy nor the driver needs to know, once another transaction has begun."""
        id_ = uuid4()
        with pytest.raises(ConfigurationError, match="itself"), barrier.begin() as session:
            barrier.pass_(session, id_)
            session.execute(text("ROLLBACK"))
            session.execute(text("SELECT 1"))
        assert barrier.probe(id_) is Answer.ROLLBACK

    def test_place_has_no_secrets(self, home: SqlHome, barrier: SqlBarrier) -> None:
        """And is the same for both, since they share a database."""
        assert home.place == barrier.place
        assert str(home.engine.url.password or "\x00") not in home.place


class TestSqlite(OnOneDatabase):
    kind = "sqlite"

    def test_ids_do_not_wait_for_each_other(self, barrier: Any) -> None:
        pytest.skip("SQLite has one writer at a time")


class TestPostgresql(OnOneDatabase):
    kind = "postgresql"

    def test_deadlock_of_the_work_is_transient(self, barrier: SqlBarrier) -> None:
        """As the database says it: whoever began may run it again."""
        with pytest.raises(TransientStoreError), barrier.begin() as session:
            session.execute(text("DO $$BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40P01'; END$$"))

    def test_what_is_due_is_found_by_its_index(self, home: SqlHome, barrier: SqlBarrier) -> None:
        """Up to the moment in question, not by looking at each row there is: most of them are old, or not due yet."""
        asked: list[tuple[str, Any]] = []

        def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
            if statement.startswith("SELECT"):
                asked.append((statement, parameters))

        event.listen(home.engine, "before_cursor_execute", note)
        home.take(10, timedelta(0))
        home.expired(timedelta(days=7), 10)
        barrier.purge(timedelta(days=30), 10)
        event.remove(home.engine, "before_cursor_execute", note)
        assert len(asked) == 5
        with home.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            connection.exec_driver_sql("SET LOCAL enable_bitmapscan = off")
            for statement, parameters in asked:
                plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
                assert re.search(r"Index Cond: .*(due|settled)_at <= ", plan), plan

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_old_snapshot_is_no_way_around(self, barrier: SqlBarrier, level: str) -> None:
        """Work that began before the checker came may not see its row, and must not commit either."""
        refused(barrier, level)


class TestMariadb(OnOneDatabase):
    kind = "mariadb"

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "READ COMMITTED"])
    def test_old_snapshot_is_no_way_around(self, barrier: SqlBarrier, level: str) -> None:
        """Its snapshot has no row that the INSERT stumbles over: only a lock sees why."""
        assert isinstance(refused(barrier, level), RolledBack)

    def test_connection_that_was_lost_while_it_lay_idle(self, home: SqlHome) -> None:
        """An outage like any other: the server was restarted, and the first statement sets the isolation level."""
        engine = create_engine_safely(home.engine.url)
        with engine.connect() as connection:
            lost = connection.connection.driver_connection.thread_id()  # type: ignore[union-attr]
        with home.engine.connect() as other:
            other.exec_driver_sql(f"KILL {lost}")
        with pytest.raises(StoreUnavailable, match="can't be reached"):
            SqlHome(engine).take(1, timedelta(0))
        SqlHome(engine).take(1, timedelta(0))
        engine.dispose()

    def test_old_snapshot_of_work_that_was_done(self, barrier: SqlBarrier) -> None:
        """Nor is it done twice."""
        id_ = uuid4()
        with barrier.engine.connect().execution_options(isolation_level="REPEATABLE READ") as late, late.begin():
            late.execute(text("SELECT COUNT(*) FROM idemp_barrier"))
            with barrier.begin() as session:
                barrier.pass_(session, id_)
            with pytest.raises(AlreadyPassed):
                barrier.pass_(late, id_)


def refused(barrier: SqlBarrier, level: str) -> Exception:
    """How work is refused that looked around before the checker came."""
    id_ = uuid4()
    with barrier.engine.connect().execution_options(isolation_level=level) as late:
        with pytest.raises(Exception, match=r"rolled back|could not serialize|try again") as raised, late.begin():
            late.execute(text("SELECT COUNT(*) FROM idemp_barrier WHERE reason = 'x'"))
            assert barrier.probe(id_) is Answer.ROLLBACK
            barrier.pass_(late, id_)
        assert barrier.probe(id_) is Answer.ROLLBACK
    return raised.value
