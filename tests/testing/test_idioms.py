"""Idioms as one meets them: those that are right raise nothing, and their neighbours that are wrong are found."""

from __future__ import annotations

import asyncio
import enum
import io
import logging
import multiprocessing
import queue
import random
import runpy
import secrets
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
import time_machine
from celery import Celery  # type: ignore[import-untyped]
from sqlalchemy import StaticPool, create_engine, event, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from idemp import App, Context, Idempotent, Refuse
from idemp.testing import Finding, Harness, NotIdempotent, NotSeen, assert_idempotent, detectors, elsewhere, rehearse
from idemp.testing.stopped_clock import StoppedClock
from tests.testing import scripts

pytestmark = pytest.mark.slow

Handler = Callable[[dict[str, Any], Context], object]


class Base(DeclarativeBase):
    """The handlers' tables."""


class Account(Base):
    __tablename__ = "idiom_accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="new")


class Versioned(Base):
    __tablename__ = "idiom_versioned"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="new")
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - SQLAlchemy's own way


class Payment(Base):
    __tablename__ = "idiom_payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[int]


class Customer(Base):
    __tablename__ = "idiom_customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


def found(
    handler: Any, *kinds: Any, app: App | None = None, key: str | None = None, database: str = "sqlite://"
) -> list[Finding]:
    """What the kit says of a handler of `{"id": 1, "email": "me@example.org"}`, where each table but one has a row."""
    app = app or App("idioms")
    app.handler(dict, type="idioms.Do", policy=Idempotent(key=key) if key else Idempotent())(handler)
    with Harness(app, database=database, tables=Base.metadata) as harness:
        with Session(harness.engine) as session, session.begin():
            session.add_all([Account(id=1), Versioned(id=1)])
        message = harness.message({"id": 1, "email": "me@example.org"})
        return rehearse(harness, message, detect=kinds)


# Memory ---------------------------------------------------------------------------------------------------------------


class Service:
    """Remembers whom it has served."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def handle(self, message: dict[str, Any], ctx: Context) -> None:
        if message["id"] not in self.seen:
            self.seen.add(message["id"])
            ctx.session.add(Payment(account=message["id"]))

    __call__ = handle


def served(seen: set[int], message: dict[str, Any], ctx: Context) -> None:
    seen.add(message["id"])


tenants = threading.local()
visits: ContextVar[int] = ContextVar("visits", default=0)
waiting: queue.Queue[int] = queue.Queue()
kept: dict[str, Any] = {"last": None}
last_message: dict[str, Any] | None = None
handled_numbers = array("i", [0])
handled_by_all = multiprocessing.Value("i", 0)
report = io.StringIO()


def of_this_thread(message: dict[str, Any], ctx: Context) -> None:
    tenants.__dict__.setdefault("seen", set()).add(message["id"])


def of_this_context(message: dict[str, Any], ctx: Context) -> None:
    visits.set(visits.get() + 1)


def puts_into_a_queue(message: dict[str, Any], ctx: Context) -> None:
    waiting.put(message["id"])


def counts_in_an_array(message: dict[str, Any], ctx: Context) -> None:
    handled_numbers[0] += 1


def counts_in_shared_memory(message: dict[str, Any], ctx: Context) -> None:
    handled_by_all.value += 1


def writes_into_a_text(message: dict[str, Any], ctx: Context) -> None:
    report.write("handled")


def keeps_its_message(message: dict[str, Any], ctx: Context) -> None:
    global last_message
    last_message = message


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (Service().handle, "Service.seen"),
        (Service(), "Service.seen"),
        (partial(served, set()), "argument 1 of served"),
        (of_this_thread, "tenants"),
        (of_this_context, "visits"),
        (puts_into_a_queue, "waiting"),
        (keeps_its_message, "last_message"),
        (counts_in_an_array, "handled_numbers"),
        (counts_in_shared_memory, "handled_by_all"),
        (writes_into_a_text, "report"),
    ],
    ids=[
        "method",
        "object",
        "partial",
        "threading.local",
        "ContextVar",
        "Queue",
        "global",
        "array",
        "shared",
        "StringIO",
    ],
)
def test_memory_in_all_places(handler: Any, words: str) -> None:
    (finding,) = found(handler, "memory")
    assert words in finding.what


def test_a_service_that_loses_messages_is_not_idempotent() -> None:
    with pytest.raises(AssertionError, match=r"Service\.seen \[memory\]"):
        assert_idempotent(
            Service().handle,
            {"id": 1},
            message=dict,
            type="idioms.Do",
            policy=Idempotent(),
            tables=Base.metadata,
        )


class Rights(enum.Flag):
    """What somebody may do."""

    READ = 1
    WRITE = 2


class Settings:
    """Read when they are needed first."""

    @cached_property
    def limits(self) -> dict[str, int]:
        return {"orders": 3}


settings = Settings()
client: Settings | None = None
request_id: ContextVar[str] = ContextVar("request_id")


def combines_flags(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"rights": (Rights.READ | Rights.WRITE).value}, to="q", type="idioms.Done")


def reads_settings(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"limit": settings.limits["orders"]}, to="q", type="idioms.Done")


def makes_a_client(message: dict[str, Any], ctx: Context) -> None:
    global client
    client = client or Settings()
    ctx.send({"limit": client.limits["orders"]}, to="q", type="idioms.Done")


def names_its_request(message: dict[str, Any], ctx: Context) -> None:
    request_id.set(f"request of {ctx.message_id}")


@pytest.mark.parametrize("handler", [combines_flags, reads_settings, makes_a_client, names_its_request])
def test_what_is_made_at_its_first_use_is_no_memory(handler: Handler) -> None:
    assert found(handler, "memory") == []


limits: dict[str, Any] = {}
currencies: frozenset[str] = frozenset()
senders: dict[str, object] = {}
timeout: int | None = None
known: dict[str, int] = {}
sizes: set[int] = set()


def fills_a_dict(message: dict[str, Any], ctx: Context) -> None:
    if not limits:
        limits.update(orders=3, hosts=["a"])


def sets_a_global(message: dict[str, Any], ctx: Context) -> None:
    global currencies, timeout
    currencies = currencies or frozenset({"eur"})
    timeout = timeout or 30


def registers(message: dict[str, Any], ctx: Context) -> None:
    senders.setdefault("mail", object())


def knows_who_wrote(message: dict[str, Any], ctx: Context) -> None:
    known.setdefault(message["email"].upper(), 1)


def knows_how_long(message: dict[str, Any], ctx: Context) -> None:
    sizes.add(message["id"] * 17)


def knows_the_only_one(message: dict[str, Any], ctx: Context) -> None:
    if message != {"id": 1, "email": "me@example.org"}:
        raise ValueError
    known.setdefault(message["email"], 1)


@pytest.mark.parametrize("handler", [fills_a_dict, sets_a_global, registers])
def test_settings_of_all_kinds_that_are_made_at_first_use_are_no_memory(handler: Handler) -> None:
    assert found(handler, "memory") == []


@pytest.mark.parametrize("handler", [knows_who_wrote, knows_how_long, knows_the_only_one])
def test_what_follows_from_the_message_is_memory(handler: Handler) -> None:
    known.clear()
    (finding,) = found(handler, "memory")
    assert "test_idioms.known" in finding.what or "test_idioms.sizes" in finding.what


def test_lazy_parts_of_celery_are_no_memory() -> None:
    tasks = Celery("idioms", broker="memory://", set_as_current=False)

    @tasks.task  # type: ignore[untyped-decorator]
    def mail(to: str) -> None: ...

    def asks(message: dict[str, Any], ctx: Context) -> None:
        mail.signature((message["email"],))
        assert mail.backend and mail.app.amqp and mail._get_exec_options() is not None  # noqa: PT018
        sends(ctx, tasks.conf.task_serializer)

    assert found(asks, "memory") == []


# Looking before inserting ---------------------------------------------------------------------------------------------


def compares_and_sets(message: dict[str, Any], ctx: Context) -> None:
    unpaid = update(Account).where(Account.id == message["id"], Account.status == "new")
    result: Any = ctx.session.execute(unpaid.values(status="paid"))
    if result.rowcount == 1:
        ctx.session.add(Payment(account=message["id"]))


def counts_versions(message: dict[str, Any], ctx: Context) -> None:
    account = ctx.session.get_one(Versioned, message["id"])
    if account.status == "new":
        account.status = "paid"
        ctx.session.add(Payment(account=message["id"]))


def locks_what_it_looks_at(message: dict[str, Any], ctx: Context) -> None:
    account = ctx.session.get_one(Account, message["id"], with_for_update=True)
    if account.status == "new":
        account.status = "paid"
        ctx.session.add(Payment(account=message["id"]))


def locks_nothing(message: dict[str, Any], ctx: Context) -> None:
    of_this = select(Payment).where(Payment.account == message["id"]).with_for_update()
    if ctx.session.scalars(of_this).first() is None:
        ctx.session.add(Payment(account=message["id"]))


def only_looks(message: dict[str, Any], ctx: Context) -> None:
    account = ctx.session.get_one(Account, message["id"])
    if account.status == "new":
        account.status = "paid"
        ctx.session.add(Payment(account=message["id"]))


def gets_or_makes_a_customer(message: dict[str, Any], ctx: Context) -> None:
    customer = ctx.session.scalars(select(Customer).where(Customer.email == message["email"])).first()
    if customer is None:
        customer = Customer(email=message["email"])
        ctx.session.add(customer)
        ctx.session.flush()
    ctx.session.add(Account(id=message["id"] + 1, status=str(customer.id)))


def makes_a_customer_unless_one_exists(message: dict[str, Any], ctx: Context) -> None:
    insert = "INSERT INTO idiom_customers (email) SELECT :email WHERE NOT EXISTS"
    asked = "(SELECT 1 FROM idiom_customers WHERE email = CAST(:email AS varchar))"
    ctx.session.execute(text(f"{insert} {asked}"), {"email": message["email"]})


def pays_unless_that_exists(message: dict[str, Any], ctx: Context) -> None:
    insert = "INSERT INTO idiom_payments (id, account) SELECT :id, :id WHERE NOT EXISTS"
    ctx.session.execute(text(f"{insert} (SELECT 1 FROM idiom_payments WHERE id = :id)"), {"id": message["id"]})


def looks_through_the_driver(message: dict[str, Any], ctx: Context) -> None:
    driver: Any = ctx.connection.connection.driver_connection
    value = "?" if ctx.connection.dialect.name == "sqlite" else "%s"
    asked = f"SELECT 1 FROM idiom_customers WHERE email = {value}"
    if driver.execute(asked, [message["email"]]).fetchone() is None:
        driver.execute(f"INSERT INTO idiom_customers (email) VALUES ({value})", [message["email"]])


def inserts_through_the_driver(message: dict[str, Any], ctx: Context) -> None:
    driver: Any = ctx.connection.connection.driver_connection
    value = "?" if ctx.connection.dialect.name == "sqlite" else "%s"
    driver.execute(f"INSERT INTO idiom_payments (account) VALUES ({value})", [message["id"]])


GUARDED = (
    compares_and_sets,
    counts_versions,
    locks_what_it_looks_at,
    pays_unless_that_exists,
    inserts_through_the_driver,
)


@pytest.mark.parametrize("handler", GUARDED)
def test_guarded_inserts_raise_nothing(handler: Handler) -> None:
    assert found(handler, "check then insert") == []


@pytest.mark.parametrize(
    ("handler", "key", "table"),
    [
        (only_looks, None, "idiom_payments"),
        (locks_nothing, None, "idiom_payments"),
        (gets_or_makes_a_customer, "id", "idiom_customers"),
        (makes_a_customer_unless_one_exists, "id", "idiom_customers"),
        (looks_through_the_driver, "id", "idiom_customers"),
    ],
)
def test_unguarded_inserts_are_found(handler: Handler, key: str | None, table: str) -> None:
    (finding,) = found(handler, "check then insert", key=key)
    assert f"INSERT INTO {table}" in finding.what


def test_races_on_postgresql(postgresql_url: str) -> None:
    for handler in GUARDED:
        assert found(handler, "check then insert", "second connection", database=postgresql_url) == []
    unguarded: list[Handler] = [gets_or_makes_a_customer, makes_a_customer_unless_one_exists, looks_through_the_driver]
    for handler in unguarded:
        assert len(found(handler, "check then insert", key="id", database=postgresql_url)) == 1


# Files, networks, other databases -------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What handlers need that is older than they are."""
    log = logging.getLogger("idioms")
    log.addHandler(handler := logging.FileHandler(tmp_path / "idioms.log", delay=True))
    database = tmp_path / "other.db"
    with closing(sqlite3.connect(database)) as other:
        other.execute("CREATE TABLE customer (id INTEGER)")
    (tmp_path / "lazily_imported.py").write_text("LIMIT = 3\n")
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE numbers (n INTEGER)"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    given = {"log": log, "database": database, "engine": engine, "at": tmp_path, "loop": loop}
    with (
        ThreadPoolExecutor(1) as pool,
        closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as datagrams,
        (tmp_path / "journal.csv").open("a") as journal,
    ):
        pool.submit(int).result()
        yield {**given, "pool": pool, "socket": datagrams, "journal": journal}
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    log.removeHandler(handler)
    handler.close()
    engine.dispose()


def logs(world: dict[str, Any]) -> None:
    world["log"].warning("handled")


def works_in_a_temporary_folder(world: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "part").write_text("x")
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as other:
        file.write(b"x")
        other.write(b"x")


def imports_lazily(world: dict[str, Any]) -> None:
    code = sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(world["at"]))
    try:
        import lazily_imported  # type: ignore[import-not-found]  # noqa: F401
    finally:
        sys.path.remove(str(world["at"]))
        sys.dont_write_bytecode = code
        sys.modules.pop("lazily_imported", None)


def reads_another_file(world: dict[str, Any]) -> None:
    with closing(sqlite3.connect(world["database"])) as connection:
        connection.execute("SELECT count(*) FROM customer").fetchone()


def reads_by_a_common_table_expression(world: dict[str, Any]) -> None:
    with world["engine"].connect() as connection:
        connection.execute(text("WITH one AS (SELECT 1 AS n) SELECT n FROM one"))
        connection.execute(text("/* orders:read */ SELECT 1"))
        connection.execute(text("-- which one?\nSELECT 1"))


@pytest.mark.parametrize(
    "deed",
    [logs, works_in_a_temporary_folder, imports_lazily, reads_another_file, reads_by_a_common_table_expression],
)
def test_deeds_without_effect_raise_nothing(world: dict[str, Any], deed: Callable[[dict[str, Any]], None]) -> None:
    def handler(message: dict[str, Any], ctx: Context) -> None:
        deed(world)

    assert found(handler, "file", "network", "process", "second connection") == []


def keeps_a_temporary_file(world: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile(dir=world["at"], delete=False) as file:
        file.write(b"x")


def moves_a_temporary_file(world: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, "draft")
        draft.write_text("x")
        draft.rename(world["at"] / "letter.txt")


def writes_in_a_pool(world: dict[str, Any]) -> None:
    world["pool"].submit(Path(world["at"], "mail.txt").write_text, "x")


def writes_in_a_thread(world: dict[str, Any]) -> None:
    threading.Thread(target=Path(world["at"], "mail.txt").write_text, args=["x"]).start()


def writes_in_an_event_loop(world: dict[str, Any]) -> None:
    mail = Path(world["at"], "mail.txt")

    async def write() -> None:
        asyncio.get_running_loop().call_soon(mail.write_text, "x")

    asyncio.run_coroutine_threadsafe(write(), world["loop"])


def writes_to_an_open_file(world: dict[str, Any]) -> None:
    world["journal"].write("7;charged")


def writes_another_file(world: dict[str, Any]) -> None:
    with closing(sqlite3.connect(world["database"])) as connection, connection:
        connection.execute("INSERT INTO customer VALUES (1)")


def changes_by_a_common_table_expression(world: dict[str, Any]) -> None:
    with world["engine"].begin() as connection:
        connection.execute(text("WITH one AS (SELECT 1 AS n) INSERT INTO numbers SELECT n FROM one"))


def counts_itself(world: dict[str, Any]) -> None:
    world["socket"].sendto(b"handled:1|c", ("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (keeps_a_temporary_file, "it changed a file"),
        (moves_a_temporary_file, "os.rename"),
        (writes_in_a_pool, "mail.txt"),
        (writes_in_a_thread, "mail.txt"),
        (writes_in_an_event_loop, "mail.txt"),
        (writes_to_an_open_file, "a file that was open before"),
        (writes_another_file, "sqlite3.connect"),
        (changes_by_a_common_table_expression, "INSERT INTO numbers"),
        (counts_itself, "it sent a datagram"),
    ],
)
def test_deeds_with_effect_are_found(world: dict[str, Any], deed: Callable[[dict[str, Any]], None], words: str) -> None:
    def handler(message: dict[str, Any], ctx: Context) -> None:
        deed(world)

    (finding,) = found(handler, "file", "network", "process", "second connection")
    assert words in finding.what


def test_what_a_thread_does_that_was_waiting_is_not_seen() -> None:
    asked, ended = threading.Event(), threading.Event()
    condition: Any = asked._cond  # type: ignore[attr-defined]

    def works() -> None:
        while not ended.is_set():
            asked.wait()
            asked.clear()

    def asks(message: dict[str, Any], ctx: Context) -> None:
        asked.set()

    worker = threading.Thread(target=works, name="idioms")
    worker.start()
    try:
        while not condition._waiters:
            pass
        with pytest.warns(NotSeen, match="woke the thread 'idioms', which was there before"):
            assert_idempotent(asks, {"id": 1}, message=dict, type="idioms.Do", policy=Idempotent(), crash_at=())
    finally:
        ended.set()
        asked.set()
        worker.join()


@pytest.mark.parametrize("start", ["thread", "timer", "pool"])
def test_what_goes_on_long_after_the_handler_is_not_seen(start: str) -> None:
    """And what ends soon after it is waited for, and found."""
    let_go = threading.Event()
    pool = ThreadPoolExecutor(50)

    def begins(message: dict[str, Any], ctx: Context) -> None:
        match start:
            case "thread":
                threading.Thread(target=let_go.wait, daemon=True).start()
            case "timer":
                threading.Timer(1000, print).start()
            case "pool":
                pool.submit(let_go.wait)

    try:
        with pytest.warns(NotSeen, match="still ran 1 s after it"):
            assert_idempotent(begins, {"id": 1}, message=dict, type="idioms.Do", policy=Idempotent(), crash_at=())
    finally:
        let_go.set()
        pool.shutdown()
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.cancel()


def test_a_listener_on_the_class_of_sessions_is_found() -> None:
    class OwnSession(Session):
        """With a listener for all."""

    sent: list[int] = []
    event.listen(OwnSession, "after_commit", lambda _: sent.append(1))
    app = App("idioms", session_factory=sessionmaker(class_=OwnSession))

    def handler(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.add(Payment(account=message["id"]))

    assert [finding.kind for finding in found(handler, "after commit", app=app)] == ["after commit"]
    assert found(handler, "after commit") == []


# Time, and what the texts say -----------------------------------------------------------------------------------------


def test_a_handler_that_waits_for_a_deadline_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detectors, "StoppedClock", partial(StoppedClock, patience=0.02))

    def polls(message: dict[str, Any], ctx: Context) -> None:
        deadline = time.time() + 300
        while time.time() < deadline:
            time.sleep(0.001)

    assert found(polls, "memory") == []


def invents_a_pin(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"pin": random.getrandbits(40)}, to="q", type="idioms.Done")


def measures(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"took": time.perf_counter_ns()}, to="q", type="idioms.Done")


def counts_runs(message: dict[str, Any], ctx: Context, runs: list[int] = []) -> None:  # noqa: B006 - the fault
    runs.append(1)
    ctx.send({"run": len(runs)}, to="q", type="idioms.Done")


def refuses_what_is_late(message: dict[str, Any], ctx: Context) -> None:
    if datetime.now(UTC).timestamp() > began + 86_400:
        raise Refuse("It came too late.")
    ctx.send({"id": 1}, to="q", type="idioms.Done")


def sends_nothing_later(message: dict[str, Any], ctx: Context) -> None:
    if datetime.now(UTC).timestamp() < began + 86_400:
        ctx.send({"id": 1}, to="q", type="idioms.Done")


began = time.time()


@pytest.mark.parametrize(
    ("handler", "kind", "words"),
    [
        (invents_a_pin, "random", "sent other values in $.pin"),
        (measures, "random", "sent other values in $.took"),
        (counts_runs, "counter", "counted on: 1 and 2 in $.run"),
        (refuses_what_is_late, "clock", "a run two days later ended with Refuse('It came too late.')"),
        (sends_nothing_later, "clock", "a run two days later had 0 outputs instead of 1"),
    ],
)
def test_the_text_tells_what_was_seen(handler: Handler, kind: str, words: str) -> None:
    (finding,) = found(handler, "random", "counter", "clock")
    assert (finding.kind, finding.handler) == (kind, handler.__name__)
    assert words in finding.what


def sends(ctx: Context, value: object) -> None:
    ctx.send({"value": value}, to="q", type="idioms.Done")


BY_THE_CALENDAR: dict[str, Callable[[datetime], object]] = {
    "the hours of a day": lambda now: 9 <= now.hour < 17,
    "the days of a week": lambda now: now.weekday() >= 5,
    "the end of a month": lambda now: now.month > 9,
    "the end of a year": lambda now: now.year,
    "the end of February": lambda now: (now.month, now.day) == (2, 29),
    "a change of daylight saving time": lambda now: str(now.astimezone(ZoneInfo("Europe/Berlin")).utcoffset()),
}


@pytest.mark.parametrize("boundary", BY_THE_CALENDAR)
@pytest.mark.parametrize("today", ["2026-11-18T10:00Z", "2026-11-20T23:30Z"])
def test_the_clock_is_looked_at_around_the_boundaries_of_the_calendar(boundary: str, today: str) -> None:
    """And the day of the test does not matter: two days later it is the same, or not."""

    def asks(message: dict[str, Any], ctx: Context) -> None:
        sends(ctx, BY_THE_CALENDAR[boundary](datetime.now(UTC)))

    with time_machine.travel(today, tick=True):
        (finding,) = found(asks, "clock", "random")
    assert finding.kind == "clock"
    assert f"around {boundary} (" in finding.what or "a run two days later" in finding.what


def rarely(message: dict[str, Any], ctx: Context) -> None:
    sends(ctx, random.random() < 0.001)


def rarely_in_the_end(message: dict[str, Any], ctx: Context) -> None:
    drawn = [random.randint(1, 6) for _ in range(3)]
    sends(ctx, bool(drawn) and secrets.randbelow(1000) == 0)


def picks(message: dict[str, Any], ctx: Context) -> None:
    sends(ctx, secrets.choice(["a", "b"]))


def names(message: dict[str, Any], ctx: Context) -> None:
    sends(ctx, uuid4().hex)


def fails_rarely(message: dict[str, Any], ctx: Context) -> None:
    if random.Random().uniform(0, 100) > 99:
        raise ConnectionError


@pytest.mark.parametrize("handler", [rarely, rarely_in_the_end, picks, names, fails_rarely])
def test_chance_is_found_for_sure(handler: Handler) -> None:
    (finding,) = found(handler, "random", "clock", "redelivered", "memory")
    assert finding.kind == "random"


def test_random_values_that_follow_from_the_message_are_no_chance() -> None:
    def seeds(message: dict[str, Any], ctx: Context) -> None:
        random.seed(message["id"])
        sends(ctx, [random.random(), random.choice("ab"), random.Random(ctx.message_id).random()])

    before = random.getstate()
    assert found(seeds, "random", "clock") == []
    assert random.getstate() == before


# Other processes ------------------------------------------------------------------------------------------------------


def test_what_differs_on_another_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: the other process counts by the policy of the app that it finds, which is no unstable key."""
    monkeypatch.setattr(elsewhere, "_SEEDS", (1,))
    (finding,) = found(scripts.names_its_host, "environment", "set order", "unstable key")
    assert finding.kind == "environment"
    assert socket.gethostname() in finding.what


@pytest.mark.parametrize(
    ("handler", "kinds"),
    [
        (scripts.sends_its_processes_number, ["environment"]),
        (scripts.keeps_the_first_address, ["memory"]),
        (scripts.sends_what_each_process_has, []),
    ],
)
def test_what_is_carried_out_has_to_be_the_same_in_a_new_process(handler: Handler, kinds: list[str]) -> None:
    scripts.kept.clear()
    assert [finding.kind for finding in found(handler, "environment", "memory")] == kinds


def test_what_was_made_at_first_use_is_found_where_the_state_shows_it() -> None:
    scripts.kept.clear()
    about: dict[str, Any] = {"message": dict, "type": "idioms.Do", "policy": Idempotent(key="id"), "crash_at": ()}
    about |= {"tables": Base.metadata}
    with pytest.raises(NotIdempotent, match=r"at its first use, keeps it in tests\.testing\.scripts\.kept"):
        assert_idempotent(
            scripts.writes_what_it_made_first,
            {"id": 1},
            **about,
            state=lambda session: session.scalars(select(Customer)).all(),
        )
    scripts.kept.clear()
    assert_idempotent(scripts.writes_what_it_made_first, {"id": 1}, **about)


def test_what_other_processes_can_not_import_is_not_seen() -> None:
    def tags(message: dict[str, Any], ctx: Context) -> None:
        sends(ctx, sorted({"a", "b"}))

    about: dict[str, Any] = {"message": dict, "type": "idioms.Do", "policy": Idempotent(), "crash_at": ()}
    report = assert_idempotent(tags, {"id": 1}, **about)
    assert report.not_seen[0].startswith("Whether other processes do the same as tags, which uses sets")
    assert len(assert_idempotent(fills_a_dict, {"id": 1}, **about).not_seen) == 1


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from idemp import Idempotent\n"
        "from idemp.testing import assert_idempotent\n"
        "with open(__file__ + '.runs', 'a') as runs:\n"
        "    runs.write('x')\n"
        "def handle(message, ctx):\n"
        "    for tag in sorted({'a', 'b'}):\n"
        "        ctx.send({'tag': tag}, to='q', type='idioms.Tagged')\n"
        "assert_idempotent(handle, {'id': 1}, message=dict, type='idioms.Do', policy=Idempotent(), crash_at=())\n"
    )
    runpy.run_path(str(script), run_name="__main__")
    assert Path(f"{script}.runs").read_text() == "x"
