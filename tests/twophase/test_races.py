"""Two attempts at one message, recovery beside work in flight, and connections that are lost on the way."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from idemp import Context, Outcome
from idemp.broker.port import Delivery, Retry
from idemp.errors import BranchUnavailable, BranchUnfinished, CommitUnknown, StoreUnavailable
from idemp.inbox.sql import create_engine_safely
from idemp.inbox.sql.unit import SqlUnit
from idemp.messages import DEFERRED_HEADER
from idemp.testing.store_bench import Background
from idemp.twophase import BranchId, Prepared, Recovery, State
from idemp.twophase.sql.branch import SqlBranch
from idemp.work import opened, work_of
from tests.inbox.sql import kept
from tests.twophase.dying import dying
from tests.twophase.killed import handle
from tests.twophase.kinds import ON_MARIADB, ON_POSTGRESQL
from tests.twophase.naive import NaiveRecovery, ReadingRecovery, TokenlessRecovery
from tests.twophase.world import Consumer, World, message

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

pytestmark = pytest.mark.slow

SOON = 20.0
BRIEFLY = timedelta(milliseconds=100)


class Halted:
    """A delivery that stops where its branch is about to be prepared, or has been, until it may go on."""

    def __init__(self, consumer: Consumer, n: int, monkeypatch: pytest.MonkeyPatch, *, prepared: bool) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        prepare = SqlBranch.prepare
        owner: list[int] = []

        def halting(branch: SqlBranch) -> None:
            if threading.get_ident() not in owner:
                return prepare(branch)
            owner.clear()  # only the first attempt
            if prepared:
                prepare(branch)
            self.arrived.set()
            assert self.go_on.wait(SOON)
            return None if prepared else prepare(branch)

        monkeypatch.setattr(SqlBranch, "prepare", halting)

        def deliver() -> Outcome:
            owner.append(threading.get_ident())
            return consumer.deliver(n)

        self._delivery = Background(deliver)
        assert self.arrived.wait(SOON)

    def ended(self) -> Outcome:
        self.go_on.set()
        return self._delivery.result(SOON)


def lose_inbox(shop: World) -> None:
    """The server ends all connections to the inbox that are in a transaction."""
    with shop.engines[""].connect() as connection:
        ending = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND "
        connection.execute(text(ending + "pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'"))


# Recovery beside work -------------------------------------------------------------------------------------------------


def test_recovery_waits_for_work_in_flight(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    halted = Halted(shop.consumer, 1, monkeypatch, prepared=True)
    (found,) = Recovery(other.coordinator, wait=BRIEFLY).run_once().found
    assert (found.state, found.reason) == (State.LEFT, "the handling is in work")
    assert halted.ended() is Outcome.HANDLED
    shop.all_is_well(1)


@ON_POSTGRESQL  # on MariaDB the branch is in its connection's hands
def test_who_reads_instead_rolls_back_what_is_about_to_be_committed(
    shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = Halted(shop.consumer, 2, monkeypatch, prepared=True)
    ReadingRecovery(other.coordinator).run_once()
    with pytest.raises(BranchUnfinished, match="has rolled it back, by hand or by losing it"):
        halted.ended()
    assert shop.effects(2) == [1, 0], "this is what must not happen"
    forget_decisions(shop)


def forget_decisions(shop: World) -> None:
    with shop.engines[""].begin() as connection:
        connection.execute(text("DELETE FROM idemp_decision"))


# An attempt that comes too late ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recovery", "effects"), [(Recovery, [1, 1]), (TokenlessRecovery, [1, 2])])
def test_token_tells_attempts_apart(
    shop: World,
    other: Consumer,
    monkeypatch: pytest.MonkeyPatch,
    recovery: type[Recovery],
    effects: list[int],
) -> None:
    """Attempt 1 loses its inbox connection and its branch lives on; attempt 2 commits; then attempt 1 prepares."""
    n = 3 if recovery is Recovery else 4
    halted = Halted(shop.consumer, n, monkeypatch, prepared=False)
    lose_inbox(shop)
    assert other.deliver(n) is Outcome.HANDLED
    assert halted.ended() is Outcome.REDISPATCHED, "it ran again, and found the id taken"
    assert shop.effects(n) == [1, 1]
    (left,) = shop.in_doubt()
    assert [each.branch for each in recovery(other.coordinator).run_once().found] == [left]
    assert shop.effects(n) == effects
    assert shop.in_doubt() == []
    assert issubclass(recovery, NaiveRecovery) == (effects != [1, 1])


def test_attempt_that_lost_its_claim_ends_nobody_elses_branch(
    shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not noticed, when another attempt has committed and is about to have the other database commit, too."""
    claimed, go_on, opened, decided, carry_out = (threading.Event() for _ in range(5))
    commit = SqlBranch.commit

    def slow(ctx: Context) -> None:
        claimed.set()
        assert go_on.wait(SOON)
        ctx.database("ledger")
        opened.set()

    def halting(branch: SqlBranch) -> Any:
        decided.set()
        assert carry_out.wait(SOON)
        return commit(branch)

    def ends() -> bool:
        """On MariaDB the other attempt's branch is in its hands until it carries on."""
        try:
            return shop.consumer.deliver(17) is Outcome.REDISPATCHED
        except BranchUnfinished:
            return not shop.is_postgresql("ledger")

    shop.consumer.before_writing.append(slow)
    try:
        first = Background(ends)
        assert claimed.wait(SOON)
        lose_inbox(shop)
        monkeypatch.setattr(SqlBranch, "commit", halting)
        second = Background(lambda: other.deliver(17))
        assert decided.wait(SOON)
        go_on.set()
        assert opened.wait(SOON)
        assert first.result(SOON)
    finally:
        for event in (go_on, carry_out):
            event.set()
        shop.consumer.before_writing.clear()
    assert second.result(SOON) is Outcome.HANDLED
    shop.all_is_well(17)


# Connections that are lost --------------------------------------------------------------------------------------------


def test_commit_whose_answer_is_lost(shop: World) -> None:
    """Its branches are left as they are; the delivery runs again, and the claim knows."""
    store: Any = shop.consumer.app.store
    losing = kept.lost_at_commit(store)
    with losing, pytest.raises((CommitUnknown, StoreUnavailable)):
        shop.consumer.deliver(5)
    assert shop.consumer.deliver(5) is Outcome.HANDLED
    shop.all_is_well(5)


def test_commit_that_took_place_and_whose_answer_is_lost(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delivery that runs again finds the decision, and carries it out before it sends anything."""
    commit, lost = SqlUnit.commit, []

    def losing(unit: SqlUnit) -> None:
        commit(unit)
        if not lost:
            lost.append(unit)
            raise CommitUnknown("COMMIT was sent, and the test says: no answer came.")

    monkeypatch.setattr(SqlUnit, "commit", losing)
    assert shop.consumer.deliver(14) is Outcome.REDISPATCHED
    shop.all_is_well(14)


def end_connection(branch: Connection, shop: World) -> None:
    """The server ends it."""
    driver: Any = branch.connection.driver_connection
    on_postgresql = shop.is_postgresql("ledger")
    ending = "SELECT pg_terminate_backend({}, 5000)" if on_postgresql else "KILL {}"
    number = driver.info.backend_pid if on_postgresql else driver.thread_id()
    with shop.engines["ledger"].connect() as connection:
        connection.execute(text(ending.format(number)))


def test_connection_lost_in_the_handler(shop: World) -> None:
    """Nothing was committed, and the delivery comes again without being counted."""
    consumer = shop.consumer
    consumer.after_writing.append(lambda ctx: end_connection(ctx.database("ledger").connection, shop))
    try:
        outcome, settlement = consumer.protocol.handle(Delivery(message=message(6), queue="billing"))
    finally:
        consumer.after_writing.clear()
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert not settlement.counted
    assert shop.effects(6) == [0, 0]
    assert consumer.deliver(6) is Outcome.HANDLED
    shop.all_is_well(6)


@pytest.mark.parametrize(("number", "noticed"), [(88, "by the handler"), (89, "by its end")])
def test_connection_lost_in_each_run_counts_after_a_few_times(shop: World, number: int, noticed: str) -> None:
    """The other database answers: a timeout of it that is shorter than the handler, for example."""
    consumer = shop.consumer

    def lose(ctx: Context) -> None:
        end_connection(ctx.database("ledger").connection, shop)
        if noticed == "by the handler":
            ctx.database("ledger").session.execute(text("SELECT 1"))

    consumer.after_writing.append(lose)
    try:
        counted = []
        for deferred in (2, 3):
            headers = {DEFERRED_HEADER: deferred}
            delivery = Delivery(message=message(number).with_headers(**headers), queue="billing")
            settlement = consumer.protocol.handle(delivery)[1]
            assert isinstance(settlement, Retry)
            counted.append(settlement.counted)
    finally:
        consumer.after_writing.clear()
    assert counted == [False, True]
    assert consumer.deliver(number) is Outcome.HANDLED
    shop.all_is_well(number)


def test_connection_lost_after_prepare(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one commits it."""
    prepare = SqlBranch.prepare

    def losing(branch: SqlBranch) -> None:
        prepare(branch)
        end_connection(branch.connection, shop)

    monkeypatch.setattr(SqlBranch, "prepare", losing)
    assert shop.consumer.deliver(7) is Outcome.HANDLED
    shop.all_is_well(7)


def test_committed_here_and_not_there(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other database is away after the decision: said so, not acked, and completed by the redelivery."""
    away = away_after_prepare(shop, monkeypatch)
    outcome, settlement = shop.consumer.protocol.handle(Delivery(message=message(8), queue="billing"))
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert not settlement.counted
    assert "committed" in settlement.reason
    assert shop.effects(8) == [1, 0]
    assert shop.ids_sent(8) == {}, "nothing is sent before all have it"
    away()
    assert shop.consumer.deliver(8) is Outcome.REDISPATCHED
    shop.all_is_well(8)


def away_after_prepare(shop: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The connection is lost after PREPARE, and no other can be made until the answer is called."""
    prepare = SqlBranch.prepare
    database: Any = shop.consumer.coordinator.databases["ledger"]
    reachable, nowhere = database.engine, database.engine.url.set(port=1)

    def losing(branch: SqlBranch) -> None:
        prepare(branch)
        end_connection(branch.connection, shop)
        database.engine = create_engine_safely(nowhere)

    place = database.place
    monkeypatch.setattr(type(database), "place", property(lambda _: place))
    monkeypatch.setattr(SqlBranch, "prepare", losing)

    def back() -> None:
        monkeypatch.undo()
        database.engine = reachable

    return back


@ON_POSTGRESQL  # MariaDB keeps no word of it
def test_rolled_back_by_hand_is_told_each_time(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL knows what became of it."""
    back = away_after_prepare(shop, monkeypatch)
    with pytest.raises(BranchUnfinished):
        shop.consumer.deliver(9)
    back()
    (branch,) = shop.in_doubt()
    with shop.engines["ledger"].connect() as connection:
        by_itself = connection.execution_options(isolation_level="AUTOCOMMIT")
        by_itself.exec_driver_sql(f"ROLLBACK PREPARED '{branch}'")
    for _ in range(2):
        with pytest.raises(BranchUnfinished, match="mend its rows by hand"):
            other.deliver(9)
        (found,) = Recovery(other.coordinator).run_once().left
        assert found.databases == ("ledger",)
    forget_decisions(shop)
    assert other.deliver(9) is Outcome.REDISPATCHED


def test_database_that_is_called_otherwise_now(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found there is ended; what is not found there may be elsewhere, and is no more taken for committed."""
    database: Any = other.coordinator.databases["ledger"]
    for n, is_found in ((15, True), (16, False)):
        back = away_after_prepare(shop, monkeypatch)
        with pytest.raises(BranchUnfinished):
            shop.consumer.deliver(n)
        back()
        (branch,) = shop.in_doubt()
        if not is_found:
            shop.consumer.coordinator.databases["ledger"].end(BranchId.parse(branch), commit=True)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(type(database), "place", "postgresql://elsewhere:5432/ledger")
            found = Recovery(other.coordinator).run_once()
            assert [each.state for each in found.found] == [State.COMMITTED if is_found else State.LEFT]
        assert other.deliver(n) is Outcome.REDISPATCHED
        shop.all_is_well(n)


@ON_POSTGRESQL  # MariaDB keeps no word of it
def test_server_that_was_restored_does_not_pass_for_one_that_committed(shop: World) -> None:
    """PostgreSQL knows that a transaction of its future was never committed there."""
    database = shop.consumer.coordinator.databases["ledger"]
    assert database.outcome(Prepared("ledger", database.place, 1_000_000)) is False


@ON_POSTGRESQL  # MariaDB is not asked
def test_outcome_that_nobody_could_tell_is_no_answer(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for "it does not say", a branch that was rolled back would pass for committed."""
    database: Any = shop.consumer.coordinator.databases["ledger"]
    monkeypatch.setattr(database, "engine", shop.engines["ledger"].execution_options())

    def lose(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "txid_status" in statement:
            end_connection(connection, shop)

    event.listen(database.engine, "before_cursor_execute", lose)
    with pytest.raises(BranchUnavailable):
        database.outcome(Prepared("ledger", database.place, 1))


@ON_MARIADB  # there it belongs to no connection
def test_branch_in_other_hands_is_left(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On MariaDB a connection that lives keeps its own: left to the next round, and to the next attempt."""
    halted = Halted(shop.consumer, 10, monkeypatch, prepared=True)
    lose_inbox(shop)
    (found,) = Recovery(other.coordinator).run_once().found
    assert (found.state, found.reason) == (State.LEFT, "it is in another connection's hands")
    outcome, settlement = other.protocol.handle(Delivery(message=message(10), queue="billing"))
    assert (outcome, type(settlement)) == (Outcome.RETRIED, Retry)
    assert halted.ended() is Outcome.HANDLED
    shop.all_is_well(10)


@ON_POSTGRESQL  # on MariaDB anybody may
def test_who_may_not_end_it(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL asks who prepared it: no fault of the message, which waits for whoever may."""
    with dying(monkeypatch, SqlUnit, "commit"):
        shop.consumer.deliver(33)
    database: Any = other.coordinator.databases["ledger"]
    role = f"idemp_test_{uuid.uuid4().hex[:8]}"
    with shop.engines["ledger"].begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
    proper, database.engine = database.engine, create_engine_safely(database.engine.url.set(username=role))
    try:
        (left,) = Recovery(other.coordinator).run_once().left
        _, settlement = other.protocol.handle(Delivery(message=message(33), queue="billing"))
    finally:
        database.engine.dispose()
        database.engine = proper
        with shop.engines["ledger"].begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))
    assert "permission denied" in left.reason
    assert isinstance(settlement, Retry)
    assert not settlement.counted
    assert "only the user that prepared it" in settlement.reason
    assert shop.consumer.deliver(33) is Outcome.HANDLED
    shop.all_is_well(33)


# Retention ------------------------------------------------------------------------------------------------------------


def test_claim_is_kept_while_a_branch_may_be_prepared(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Purged, recovery would find the id free, and roll back what was committed."""
    back = away_after_prepare(shop, monkeypatch)
    with pytest.raises(BranchUnfinished):
        shop.consumer.deliver(11)
    back()
    upkeep = shop.consumer.app.store.upkeep

    def purge() -> int:
        for table, column in (("inbox", "claimed_at"), ("pending", None), ("activity", "started_at")):
            with shop.engines[""].begin() as connection:
                if column is None:
                    connection.execute(text(f"DELETE FROM idemp_{table}"))
                else:
                    connection.execute(text(f"UPDATE idemp_{table} SET {column} = {column} - interval '30 days'"))
        upkeep.beat(relay=False, consumers=["billing"])  # type: ignore[call-arg]
        shop.consumer.app.store.refresh_horizons("billing", [timedelta(days=7)])
        return upkeep.purge("billing", {"billing.Pay": timedelta(days=7)}, 1000)

    upkeep.beat(relay=False, consumers=["billing"])  # type: ignore[call-arg]
    purge()
    assert shop.decisions() == 1
    with shop.engines[""].connect() as connection:
        left = "SELECT COUNT(*) FROM idemp_inbox WHERE consumer_id = (SELECT consumer_id FROM idemp_decision)"
        assert connection.scalar(text(left)) == 1, "all others are gone"
    assert [each.state for each in Recovery(shop.consumer.coordinator).run_once().found] == [State.COMMITTED]
    assert shop.effects(11) == [1, 1]
    assert purge() == 1


def test_claim_that_was_deleted_by_hand(shop: World, other: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision still tells that it was committed; here to a round that looked at decisions a moment too early."""
    back = away_after_prepare(shop, monkeypatch)
    with pytest.raises(BranchUnfinished):
        shop.consumer.deliver(31)
    back()
    with shop.engines[""].begin() as connection:
        for table in ("output", "pending", "inbox"):
            connection.execute(text(f"DELETE FROM idemp_{table}"))
    with monkeypatch.context() as patch:
        patch.setattr(type(other.coordinator.decisions), "unfinished", lambda _: [])
        (found,) = Recovery(other.coordinator).run_once().found
    assert found.state is State.COMMITTED
    assert shop.effects(31) == [1, 1]
    Recovery(other.coordinator).run_once()
    assert shop.decisions() == 0


def test_killer_of_workers_is_not_acked_before_all_have_committed(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler is not started again; the claim tells that it was handled, and the decision that a part is missing."""
    back = away_after_prepare(shop, monkeypatch)
    with pytest.raises(BranchUnfinished):
        shop.consumer.deliver(32)
    back()
    consumer = shop.consumer.app.consumer
    delivery = Delivery(message=message(32), queue="billing", attempt=1)
    work = replace(work_of(consumer, delivery, opened(consumer, delivery)), deaths=99)
    shipment: Any = shop.consumer.protocol._exhausted(work)
    assert shipment.redelivered
    assert shop.effects(32) == [1, 1]
    assert (shop.in_doubt(), shop.decisions()) == ([], 0)


def test_forked_process_handles(shop: World) -> None:
    """What the kills run is what lives: it ends well if nobody kills it."""
    handle(shop.place, None, 12)
    shop.all_is_well(12)
