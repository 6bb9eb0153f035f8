"""Case 16a: a handler can't end the unit of work that holds its claim; refused, nothing half done."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql
from sqlalchemy import Column, Engine, ForeignKey, Integer, MetaData, Table, create_engine, func, insert, select, text
from sqlalchemy.exc import CircularDependencyError, IntegrityError
from sqlalchemy.orm import Session, close_all_sessions, registry, relationship, sessionmaker

from idemp import App, Context, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery, Park, Topology
from idemp.errors import ConfigurationError, TransactionEnded
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.settings import Settings
from tests.inbox.sql.kept import make_tables
from tests.inbox.sql.unseen import end_unseen
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Iterator

Misdeed = Callable[[Context], Any]

EFFECT = Table("effect", MetaData(), Column("id", Integer, primary_key=True, autoincrement=True), Column("n", Integer))


class Effect:
    """A row of `EFFECT`."""

    def __init__(self, n: int, id: int | None = None) -> None:
        self.n = n
        self.id = id


class Node:
    """Two that point at each other can't be flushed, which SQLAlchemy finds out before it sends anything."""

    next: Node


MAPPED = registry()
NODE = Table("node", MetaData(), Column("id", Integer, primary_key=True), Column("next_id", ForeignKey("node.id")))
MAPPED.map_imperatively(Effect, EFFECT)
MAPPED.map_imperatively(Node, NODE, properties={"next": relationship(Node, remote_side=NODE.c.id)})


class Shop:
    """An app with one handler: an effect, whatever `then` does, an effect, an output."""

    def __init__(self, engine: Engine, claim: str | None = "early", **options: Any) -> None:
        self.engine = engine
        EFFECT.metadata.drop_all(engine)
        EFFECT.metadata.create_all(engine)
        broker = InMemoryBroker()
        broker.declare(Topology(exchange="idemp", queues=("stock",)))
        self.app = App("shop", database=engine, broker=broker, settings=Settings(), **options)
        self.app.handler(dict, type="shop.Sell", policy=Idempotent(claim=claim) if claim else None)(self.sell)
        self.app.start()
        self.protocol = self.app.protocol(broker.publisher())
        self.then: Misdeed = lambda ctx: None

    def sell(self, message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(insert(EFFECT).values(n=1))
        self.then(ctx)
        ctx.connection.execute(insert(EFFECT).values(n=2))
        ctx.send(message, to="stock", type="stock.Reserve")

    def deliver(self, then: Misdeed = lambda ctx: None) -> Outcome:
        self.then = then
        return self.protocol.process(message())

    def effects(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(EFFECT)) or 0

    def claims(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(self.app.store.tables.inbox)) or 0

    def untouched(self) -> None:
        """Nothing half done, and the same message can be handled."""
        assert (self.effects(), self.claims(), self.app.store.upkeep.pending_count()) == (0, 0, 0)
        self.handled_now()

    def handled_now(self) -> None:
        before = self.effects()
        assert self.deliver() is Outcome.HANDLED
        assert self.effects() == before + 2
        assert self.deliver() is Outcome.REDISPATCHED
        assert self.effects() == before + 2


def message() -> Message:
    return Message(body=b"{}", type="shop.Sell", message_id="sale-1")


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


def raw(ctx: Context) -> Any:
    return ctx.connection.connection.dbapi_connection


def with_session_begin(ctx: Context) -> None:
    with ctx.session.begin():
        ctx.session.execute(insert(EFFECT).values(n=3))


def session_used_then(end: str) -> Misdeed:
    def misdeed(ctx: Context) -> None:
        ctx.session.execute(insert(EFFECT).values(n=3))
        getattr(ctx.session, end)()

    return misdeed


def pending_then(end: Misdeed) -> Misdeed:
    """The session holds an object, and has sent nothing."""

    def misdeed(ctx: Context) -> None:
        ctx.session.add(Effect(3))
        end(ctx)

    return misdeed


def failing_session_begin(ctx: Context) -> None:
    with ctx.session.begin():
        ctx.session.add(Effect(3))
        raise ZeroDivisionError


def session_outlives_savepoint(ctx: Context) -> None:
    with ctx.connection.begin_nested():
        ctx.session.execute(insert(EFFECT).values(n=3))
    ctx.session.execute(insert(EFFECT).values(n=4))
    ctx.session.rollback()


def transaction_of(session: Session) -> Any:
    return session.get_transaction()


def transaction_object(end: str) -> Misdeed:
    return lambda ctx: getattr(ctx.connection.get_transaction(), end)()


def statement(words: str) -> Misdeed:
    return lambda ctx: ctx.connection.execute(text(words))


REFUSED: dict[str, Misdeed] = {
    "session.commit": session_used_then("commit"),
    "session.rollback": session_used_then("rollback"),
    "session.close": session_used_then("close"),
    "unused session.commit": lambda ctx: ctx.session.commit(),
    "unused session.rollback": lambda ctx: ctx.session.rollback(),
    "with session.begin": with_session_begin,
    "pending session.rollback": pending_then(lambda ctx: ctx.session.rollback()),
    "connection.commit": lambda ctx: ctx.connection.commit(),
    "connection.rollback": lambda ctx: ctx.connection.rollback(),
    "connection.close": lambda ctx: ctx.connection.close(),
    "transaction.commit": transaction_object("commit"),
    "transaction.rollback": transaction_object("rollback"),
    "COMMIT": statement("COMMIT"),
    "comment, then rollback": statement("/* why\nnot */ -- so\n rollback"),
    "COMMIT past SQLAlchemy's SQL": lambda ctx: ctx.connection.exec_driver_sql("COMMIT"),
    "COMMIT by the session": lambda ctx: ctx.session.execute(text("COMMIT")),
    "BEGIN": statement("BEGIN"),
    "several statements": statement("SELECT ';'; /* ; */ COMMIT; BEGIN"),
    "unused session.reset": lambda ctx: ctx.session.reset(),
    "unused session.invalidate": lambda ctx: ctx.session.invalidate(),
    "with session.begin, which fails": failing_session_begin,
    "pending session.commit": pending_then(lambda ctx: ctx.session.commit()),
    "pending session.close": pending_then(lambda ctx: ctx.session.close()),
    "pending session.reset": pending_then(lambda ctx: ctx.session.reset()),
    "pending session.invalidate": pending_then(lambda ctx: ctx.session.invalidate()),
    "pending session's transaction.rollback": pending_then(lambda ctx: transaction_of(ctx.session).rollback()),
    "pending session's transaction.close": pending_then(lambda ctx: transaction_of(ctx.session).close()),
    "close_all_sessions": pending_then(lambda _: close_all_sessions()),
    "session.rollback after its savepoint": session_outlives_savepoint,
}


@pytest.mark.parametrize("swallowed", mostly_slow([True, False]), ids=["swallowed", "raised"])
@pytest.mark.parametrize("way", mostly_slow(REFUSED, first=list(REFUSED).index("unused session.reset") + 1))
def test_ending_the_transaction_is_refused(shop: Shop, way: str, swallowed: bool) -> None:
    def misdeed(ctx: Context) -> None:
        if swallowed:
            with suppress(TransactionEnded):
                REFUSED[way](ctx)
        else:
            REFUSED[way](ctx)

    with pytest.raises(TransactionEnded) as raised:
        shop.deliver(misdeed)
    assert raised.value.committed == "no"
    shop.untouched()


@pytest.mark.parametrize("way", ["session.commit", "connection.rollback", "COMMIT"])
def test_refused_for_late_claims_too(engine: Engine, way: str) -> None:
    shop = Shop(engine, claim="late")
    with pytest.raises(TransactionEnded):
        shop.deliver(REFUSED[way])
    shop.untouched()


def test_refused_in_an_initiation(shop: Shop) -> None:
    def initiate(misdeed: bool) -> None:
        with shop.app.initiate(id="request-1") as unit:
            unit.connection.execute(insert(EFFECT).values(n=1))
            unit.send({}, to="stock", type="stock.Reserve")
            if misdeed:
                with suppress(TransactionEnded):
                    unit.session.commit()

    with pytest.raises(TransactionEnded):
        initiate(misdeed=True)
    assert (shop.effects(), shop.claims()) == (0, 0)
    initiate(misdeed=False)
    assert (shop.effects(), shop.claims()) == (1, 1)


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "swallowed"])
def test_autocommit_option_is_refused(shop: Shop, caught: bool) -> None:
    def misdeed(ctx: Context) -> None:
        with suppress(Exception) if caught else nullcontext():
            ctx.connection.execution_options(isolation_level="AUTOCOMMIT")
        ctx.connection.execute(insert(EFFECT).values(n=3))
        raise ZeroDivisionError

    with pytest.raises(Exception, match=r"isolation_level|^$"):
        shop.deliver(misdeed)
    shop.untouched()


def with_connection(ctx: Context) -> None:
    with raw(ctx):
        pass


RAW: dict[str, Misdeed] = {
    "commit": lambda ctx: raw(ctx).commit(),
    "the pool's commit": lambda ctx: ctx.connection.connection.commit(),
    "with": with_connection,
    "cursor.execute": lambda ctx: raw(ctx).cursor().execute("/* now */ COMMIT"),
    "cursor.executemany": lambda ctx: raw(ctx).cursor().executemany("COMMIT", [()]),
}


@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("claim", mostly_slow(["early", "late"]))
@pytest.mark.parametrize("way", RAW)
def test_a_commit_on_the_drivers_connection_is_refused(engine: Engine, way: str, claim: str, swallowed: bool) -> None:
    """A process that died right behind it would leave a claim without outputs."""
    if way == "with" and engine.dialect.name == "mariadb":
        return  # PyMySQL only closes the connection, which rolls back
    shop = Shop(engine, claim=claim)

    def misdeed(ctx: Context) -> None:
        with suppress(Exception) if swallowed else nullcontext():
            RAW[way](ctx)
        seen.append(claimed(engine))

    seen: list[int] = []
    with pytest.raises(TransactionEnded) as raised:
        shop.deliver(misdeed)
    assert raised.value.committed == "no"
    assert seen == ([0] if swallowed else [])
    shop.untouched()


@pytest.mark.parametrize("claim", ["early", "late", None])
@pytest.mark.parametrize(
    "way", ["rollback", "the pool's rollback", "several statements", "copy", "stream", "tpc_begin"]
)
def test_what_else_psycopg_ends_a_transaction_with(postgresql_url: str, way: str, claim: str | None) -> None:
    misdeeds: dict[str, Misdeed] = {
        "rollback": lambda ctx: raw(ctx).rollback(),
        "the pool's rollback": lambda ctx: ctx.connection.connection.rollback(),
        "several statements": lambda ctx: raw(ctx).execute("SELECT 1; COMMIT; BEGIN"),
        "copy": lambda ctx: raw(ctx).cursor().copy("COMMIT").__enter__(),
        "stream": lambda ctx: next(raw(ctx).cursor().stream("COMMIT")),
        "tpc_begin": lambda ctx: raw(ctx).tpc_begin("x"),
    }
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    shop = Shop(engine, claim=claim)

    def misdeed(ctx: Context) -> None:
        with suppress(Exception):
            misdeeds[way](ctx)

    with pytest.raises(TransactionEnded) as raised:
        shop.deliver(misdeed)
    assert raised.value.committed == "no"
    assert shop.effects() == 0
    engine.dispose()


def claimed(engine: Engine) -> int:
    """What others see of it now."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(EFFECT)) or 0


def test_psycopgs_other_statements(postgresql_url: str) -> None:
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    shop = Shop(engine)
    for query in (b"COMMIT", sql.SQL("COMMIT"), sql.Composed([sql.SQL("ROLL"), sql.SQL("BACK")])):
        with pytest.raises(TransactionEnded):
            shop.deliver(lambda ctx, query=query: raw(ctx).execute(query))
        assert (shop.effects(), shop.claims()) == (0, 0)

    def harmless(ctx: Context) -> None:
        with raw(ctx).cursor() as cursor, raw(ctx).transaction():
            cursor.execute(sql.SQL("INSERT INTO effect (n) VALUES ({})").format(3))
            cursor.executemany("INSERT INTO effect (n) VALUES (%s)", [(4,), (5,)])

    assert shop.deliver(harmless) is Outcome.HANDLED
    assert shop.effects() == 5
    engine.dispose()


@pytest.mark.parametrize(
    "misdeed",
    [lambda raw: raw.begin(), lambda raw: raw.autocommit(True), lambda raw: raw.rollback()],
    ids=["begin", "autocommit", "rollback"],
)
def test_pymysqls_other_methods_that_commit(mariadb_url: str, misdeed: Callable[[Any], Any]) -> None:
    engine = create_engine_safely(mariadb_url)
    make_tables(engine)
    shop = Shop(engine)
    with pytest.raises(TransactionEnded):
        shop.deliver(lambda ctx: misdeed(raw(ctx)))
    shop.untouched()
    engine.dispose()


def test_the_drivers_connection_is_free_outside_of_units(engine: Engine) -> None:
    shop = Shop(engine)
    shop.handled_now()
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.cursor().execute("SELECT 1")
        driver.commit()
        driver.rollback()


@pytest.mark.parametrize("claim", ["early", "late", None])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_behind_sqlalchemys_back(engine: Engine, end: str, claim: str) -> None:
    """What was committed there can't be taken back; but no claim may stand without its outputs."""
    shop = Shop(engine, claim=claim)
    with pytest.raises(TransactionEnded) as raised:
        shop.deliver(lambda ctx: end_unseen(ctx.connection, end))
    assert raised.value.committed == "unknown"
    assert shop.claims() == 0
    assert shop.effects() == (1 if end == "COMMIT" else 0)
    assert shop.app.store.upkeep.pending_count() == 0
    if claim is None:
        assert shop.deliver() is Outcome.HANDLED
    else:
        shop.handled_now()


@pytest.mark.parametrize("end", ["ABORT", "ROLLBACK AND CHAIN", "COMMIT AND CHAIN", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
@pytest.mark.parametrize("last", [False, True], ids=["in between", "at the end"])
def test_below_psycopg_without_a_claim(postgresql_url: str, end: str, last: bool) -> None:
    """The effect before it would be lost or committed alone, the one after it committed, and the message acked."""
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    shop = Shop(engine, claim=None)
    sent: list[str] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(insert(EFFECT).values(n=1))
        end_unseen(ctx.connection, end)
        if not last:
            ctx.connection.execute(insert(EFFECT).values(n=2))
        ctx.send(message, to="stock", type="stock.Reserve")
        sent.append(end)

    shop.app.registry.declared.clear()
    shop.app.handler(dict, type="shop.Sell")(sell)
    with pytest.raises(TransactionEnded):
        shop.deliver()
    assert sent == [end]
    assert shop.effects() == (1 if "COMMIT" in end else 0)
    engine.dispose()


@pytest.mark.parametrize("claim", ["early", "late", None])
def test_a_block_of_psycopgs_is_a_savepoint(postgresql_url: str, claim: str | None) -> None:
    """Where it comes first it would begin and commit a transaction of its own."""
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    shop = Shop(engine, claim=claim)

    def sell(message: dict[str, Any], ctx: Context) -> None:
        with raw(ctx).transaction():
            raw(ctx).execute("INSERT INTO effect (n) VALUES (1)")
        raise ZeroDivisionError

    shop.app.registry.declared.clear()
    shop.app.handler(dict, type="shop.Sell", policy=Idempotent(claim=claim) if claim else None)(sell)
    with pytest.raises(ZeroDivisionError):
        shop.deliver()
    assert shop.effects() == 0
    engine.dispose()


def test_behind_its_back_without_outputs(shop: Shop) -> None:
    """Nothing is stored after it that could tell; the proof before COMMIT does."""

    def misdeed(ctx: Context) -> None:
        end_unseen(ctx.connection)

    shop.app.registry.declared.clear()
    shop.app.handler(dict, type="shop.Sell", policy=Idempotent())(lambda message, ctx: shop.then(ctx))
    with pytest.raises(TransactionEnded):
        shop.deliver(misdeed)
    assert shop.claims() == 0


def test_such_a_message_is_parked_at_once(shop: Shop) -> None:
    shop.then = REFUSED["session.commit"]
    outcome, settlement = shop.protocol.handle(Delivery(message=message(), queue="shop"))
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "TransactionEnded"


def test_savepoints_are_allowed(shop: Shop) -> None:
    def nested(ctx: Context) -> None:
        with ctx.session.begin_nested():
            ctx.session.execute(insert(EFFECT).values(n=3))
        with suppress(ZeroDivisionError), ctx.session.begin_nested():
            ctx.session.execute(insert(EFFECT).values(n=4))
            raise ZeroDivisionError
        with suppress(ZeroDivisionError), ctx.connection.begin_nested():
            ctx.connection.execute(insert(EFFECT).values(n=5))
            raise ZeroDivisionError
        with ctx.connection.begin_nested():
            ctx.connection.execute(insert(EFFECT).values(n=6))

    assert shop.deliver(nested) is Outcome.HANDLED
    with shop.engine.connect() as connection:
        assert sorted(connection.scalars(select(EFFECT.c.n))) == [1, 2, 3, 6]
    assert shop.deliver(nested) is Outcome.REDISPATCHED


def test_a_session_that_begins_in_a_savepoint_may_roll_it_back(shop: Shop) -> None:
    def nested(ctx: Context) -> None:
        with suppress(IntegrityError), ctx.connection.begin_nested():
            ctx.session.add(Effect(3))
            ctx.session.flush()
            ctx.session.add(Effect(4, id=ctx.session.scalar(select(EFFECT.c.id).where(EFFECT.c.n == 1))))
            ctx.session.flush()
        ctx.session.rollback()

    assert shop.deliver(nested) is Outcome.HANDLED
    assert shop.effects() == 2


@pytest.mark.parametrize("rolls_back", [False, True])
def test_flush_that_fails_before_it_sends_anything(shop: Shop, rolls_back: bool) -> None:
    """SQLAlchemy drops what the session holds: the handling fails of that error, not of a rollback of the handler's."""

    def misdeed(ctx: Context) -> None:
        one, other = Node(), Node()
        one.next, other.next = other, one
        ctx.session.add(one)
        with suppress(CircularDependencyError):
            ctx.session.flush()
        if rolls_back:
            ctx.session.rollback()
            ctx.session.rollback()

    with pytest.raises(CircularDependencyError):
        shop.deliver(misdeed)
    shop.untouched()


def test_commit_inside_of_a_savepoint_is_refused(shop: Shop) -> None:
    def misdeed(ctx: Context) -> None:
        ctx.session.begin_nested()
        ctx.session.commit()

    with pytest.raises(TransactionEnded):
        shop.deliver(misdeed)
    shop.untouched()


def test_words_that_only_look_like_it_are_allowed(shop: Shop) -> None:
    def harmless(ctx: Context) -> None:
        ctx.connection.execute(text("SELECT 'COMMIT', 1 /* ROLLBACK */"))
        ctx.connection.execute(text("SAVEPOINT mine"))
        ctx.connection.execute(text("ROLLBACK TO SAVEPOINT mine"))
        ctx.connection.execute(text("RELEASE SAVEPOINT mine"))

    assert shop.deliver(harmless) is Outcome.HANDLED
    assert shop.effects() == 2


class TestMariadb:
    @pytest.fixture
    def shop(self, mariadb_url: str) -> Iterator[Shop]:
        engine = create_engine_safely(mariadb_url)
        make_tables(engine)
        yield Shop(engine)
        engine.dispose()

    @pytest.mark.parametrize(
        "words",
        [
            "CREATE TABLE t (n int)",
            "/* */ create index i on effect (n)",
            "ALTER TABLE effect ADD COLUMN m int",
            "TRUNCATE TABLE effect",
            "SET autocommit = 1",
            "SET @@session.autocommit = 1",
            "START TRANSACTION",
            "LOCK TABLES effect WRITE",
        ],
    )
    def test_what_commits_implicitly_is_refused(self, shop: Shop, words: str) -> None:
        with pytest.raises(TransactionEnded):
            shop.deliver(statement(words))
        shop.untouched()

    @pytest.mark.parametrize("words", ["CREATE TABLE t (n int)", "SET autocommit = 1", "START TRANSACTION"])
    def test_on_the_drivers_connection_too(self, shop: Shop, words: str) -> None:
        with pytest.raises(TransactionEnded):
            shop.deliver(lambda ctx: raw(ctx).cursor().execute(words))
        shop.untouched()

    @pytest.mark.parametrize("words", ["CREATE TABLE t (n int)", "SET autocommit = 1", "START TRANSACTION"])
    def test_behind_sqlalchemys_back(self, shop: Shop, words: str) -> None:
        with pytest.raises(TransactionEnded):
            shop.deliver(lambda ctx: end_unseen(ctx.connection, words))
        assert shop.effects() >= 1  # what was committed there can't be taken back
        assert (shop.claims(), shop.app.store.upkeep.pending_count()) == (0, 0)
        shop.handled_now()

    def test_temporary_tables_are_allowed(self, shop: Shop) -> None:
        assert shop.deliver(statement("CREATE  TEMPORARY TABLE t (n int)")) is Outcome.HANDLED


def test_ddl_is_part_of_the_transaction_elsewhere(postgresql_url: str) -> None:
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    shop = Shop(engine)
    assert shop.deliver(statement("CREATE TABLE t (n int)")) is Outcome.HANDLED
    engine.dispose()


def test_database_in_memory_outlives_a_refusal() -> None:
    engine = create_engine_safely("sqlite://")
    make_tables(engine)
    shop = Shop(engine)
    with pytest.raises(TransactionEnded):
        shop.deliver(REFUSED["connection.commit"])
    shop.untouched()
    engine.dispose()


def test_swallowed_refusal_is_found_at_the_latest_at_commit() -> None:
    """Whoever uses the store without the protocol, which asks before."""
    engine = create_engine_safely("sqlite://")
    make_tables(engine)
    store = SqlStore(engine)
    claim = Claim(
        consumer="shop",
        id=effective_id("envelope", "sale-1"),
        message_type="shop.Sell",
        fingerprint=None,
        wait=timedelta(milliseconds=1),
    )
    with pytest.raises(TransactionEnded), store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        with suppress(TransactionEnded):
            unit.connection.execute(text("COMMIT"))
        unit.commit()
    with store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
    engine.dispose()


def test_session_of_another_engine_is_refused(engine: Engine) -> None:
    other = create_engine("sqlite://")
    for factory in (sessionmaker(other), sessionmaker(binds={Session: other})):
        with pytest.raises(ConfigurationError, match="another engine"):
            SqlStore(engine, session_factory=factory)

    class Elsewhere(Session):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "bind": other})

    shop = Shop(engine, session_factory=sessionmaker(class_=Elsewhere))
    with pytest.raises(ConfigurationError, match="another engine"):
        shop.deliver(lambda ctx: ctx.session.execute(text("SELECT 1")))
    assert (shop.effects(), shop.claims()) == (0, 0)
    other.dispose()


def test_session_of_the_users_own_factory(engine: Engine) -> None:
    class Own(Session):
        pass

    shop = Shop(engine, session_factory=sessionmaker(engine, class_=Own, expire_on_commit=False))
    seen: list[object] = []
    assert shop.deliver(lambda ctx: seen.append(ctx.session)) is Outcome.HANDLED
    assert [isinstance(session, Own) for session in seen] == [True]


def test_a_unit_that_was_dropped_refuses_nothing_later(database_url: str) -> None:
    """Its connection goes back to the pool, and others commit on it."""
    engine = create_engine_safely(database_url, pool_size=1, max_overflow=0)
    make_tables(engine)
    EFFECT.metadata.create_all(engine)
    unit = SqlStore(engine).begin()
    unit.connection.execute(insert(EFFECT).values(n=1))
    del unit
    gc.collect()
    with engine.begin() as connection:
        connection.execute(insert(EFFECT).values(n=2))
    with engine.connect() as connection:
        assert list(connection.scalars(select(EFFECT.c.n))) == [2]
    engine.dispose()
