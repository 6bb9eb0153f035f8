"""The inbox in transactions of Django, on PostgreSQL and on SQLite; a part of it on MariaDB."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import django
import pytest
from asgiref.sync import sync_to_async
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.integrations.django_shop.settings")
if not settings.configured:
    django.setup()
del os.environ["DJANGO_SETTINGS_MODULE"]  # Celery would look for it

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import call_command
from django.core.signals import request_finished, request_started
from django.db import DatabaseError, IntegrityError, OperationalError, connection, connections, transaction
from django.db.models.signals import post_save
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone
from sqlalchemy import select

try:
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
except ImportError:
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist

from idemp import Idempotent, Settings, TransactionEnded, Unreadable
from idemp.errors import ConfigurationError, HandlerError, InFlight, UnusableOutput
from idemp.handlers import AnyMessage
from idemp.identity import uuid7
from idemp.integrations._capture import current
from idemp.integrations.django import AtomicRolledBack, DjangoInbox, url_of
from idemp.integrations.django.bridge import own_engine
from idemp.messages import Output, encode
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.records.failures import DeadLetters
from idemp.sql.schema import upgrade
from idemp.testing.app import busy, let_pass, step
from idemp.worker import Worker
from tests.integrations.django_shop.models import One, Payment
from tests.integrations.django_shop.settings import database as entry
from tests.integrations.django_shop.shop import inbox, take
from tests.servers import server
from tests.servers.databases import create_database, drop_database, query
from tests.test_docs import ROOT
from tests.worker.test_loop import wait_for

SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("postgresql", "mariadb")]
both = pytest.mark.parametrize("kind", ["sqlite", SLOW[0]], indirect=True)
each = pytest.mark.parametrize("kind", ["sqlite", *SLOW], indirect=True)


def use(url: str, **more: Any) -> None:
    """Let `connections["default"]` lead to a database."""
    with suppress(AttributeError):
        connections["default"].close()
        del connections["default"]
    connections.settings["default"] = connections.configure_settings({"default": entry(url, **more)})["default"]


def close(inbox: DjangoInbox) -> None:
    """End the relay thread, and close idemp's own connections."""
    while inbox._opened:
        opened, *_ = inbox._opened.popitem()[1]
        opened.relay().stop()
        opened.engine.dispose()


class Shop:
    """A database with idemp's tables, those of the shop, and a queue `ledger`."""

    def __init__(self, url: str) -> None:
        self.url, self.database = url, Database(url)
        SqlBroker(self.database, "test").declare("ledger", [])
        with connection.schema_editor() as editor:
            editor.create_model(Payment)
            editor.create_model(One)

    def sent(self) -> list[bytes]:
        message = self.database.tables.message
        with self.database.queue_engine.connect() as own:
            return list(own.scalars(select(message.c.body).where(message.c.queue == "ledger").order_by(message.c.id)))

    def claims(self) -> int:
        with self.database.engine.connect() as own:
            return len(own.execute(select(self.database.tables.inbox)).all())

    def keys(self) -> list[str]:
        return sorted(Payment.objects.values_list("key", flat=True))


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    use(url)
    made = Shop(url)
    yield made
    close(inbox)
    connections.close_all()
    made.database.close()


@each
def test_a_function_runs_once_for_a_key(shop: Shop) -> None:
    first = take("a", cents=5)
    assert take(key="a", cents=9) == first == {"id": first["id"], "cents": [5]}
    assert take("b")["id"] != first["id"]
    assert shop.keys() == ["a", "b"]
    wait_for(lambda: len(shop.sent()) == 2)
    assert shop.sent() == [b'{"key": "a"}', b'{"key": "b"}']


@both
def test_a_block_runs_once_for_a_key(shop: Shop) -> None:
    for _ in range(2):
        with inbox.once("shop.pay", key=7) as unit:
            if not unit.duplicate:
                Payment.objects.create(key="seven")
                unit.result = b"[7]"
        assert unit.result == b"[7]"
    assert (shop.keys(), shop.claims()) == (["seven"], 1)


@each
def test_what_fails_leaves_no_claim(shop: Shop) -> None:
    with pytest.raises(ValueError, match="no"), inbox.once("shop.pay", key="a") as unit:
        Payment.objects.create(key="a")
        unit.send({}, to="ledger", type="shop.Paid")
        raise ValueError("no")
    assert (shop.keys(), shop.claims(), shop.sent()) == ([], 0, [])
    take("a")
    wait_for(lambda: len(shop.sent()) == 1)


@each
def test_an_error_that_was_caught_is_no_success(shop: Shop) -> None:
    """Django rolls such a transaction back at its end, without an error."""
    One.objects.create(what="a")

    def pay() -> None:
        with suppress(IntegrityError):
            One.objects.create(what="a")

    with pytest.raises(AtomicRolledBack, match="nothing was committed"):
        inbox.once("shop.pay", key=lambda: "a")(pay)()
    with (
        pytest.raises(AtomicRolledBack),
        inbox.once("shop.pay", key="a"),
        suppress(IntegrityError),
        transaction.atomic(savepoint=False),
    ):
        One.objects.create(what="a")
    with transaction.atomic():
        inbox.prepare("shop.pay")
        with pytest.raises(AtomicRolledBack), inbox.joined("shop.pay", key="a"):
            pay()
        Payment.objects.create(key="after")  # the savepoint of the block is gone, and the transaction goes on
    assert (shop.keys(), shop.claims()) == (["after"], 0)
    with inbox.once("shop.pay", key="a") as unit, suppress(IntegrityError), transaction.atomic():
        One.objects.create(what="a")
    assert not unit.duplicate
    assert shop.claims() == 1


@each
def test_four_threads_on_one_key(shop: Shop) -> None:
    inbox.prepare("shop.pay")
    running = threading.Event()

    def pay(_: int) -> Any:
        with closing(connection):
            with inbox.once("shop.pay", key="a", wait=20) as unit:
                if not unit.duplicate:
                    assert not running.is_set()
                    running.set()
                    Payment.objects.create(key="a")
                    unit.result = b"1"
            return unit.result

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(pay, range(4))) == [b"1"] * 4
    assert (shop.keys(), shop.claims()) == (["a"], 1)


@each
def test_a_key_that_another_transaction_holds(shop: Shop) -> None:
    claimed, go = threading.Event(), threading.Event()
    inbox.prepare("shop.pay")

    def hold() -> None:
        with closing(connection), inbox.once("shop.pay", key="a"):
            claimed.set()
            go.wait(20)

    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(hold)
        assert claimed.wait(20)
        with pytest.raises(InFlight), inbox.once("shop.pay", key="a", wait=0.2):
            pass
        with transaction.atomic():
            with pytest.raises(InFlight), inbox.joined("shop.pay", key="a", wait=0.2):
                pass
            assert Payment.objects.count() == 0  # the transaction goes on
        go.set()
        held.result()
    with inbox.once("shop.pay", key="a") as unit:
        assert unit.duplicate


@both
def test_atomic_requests(shop: Shop, url: str) -> None:
    use(url, ATOMIC_REQUESTS=True)
    inbox.prepare("shop.pay")
    client = Client(raise_request_exception=False)
    assert client.post("/pay?fail=1", headers={"Idempotency-Key": "a"}).status_code == 500
    assert (shop.keys(), shop.claims(), shop.sent()) == ([], 0, [])
    first, second = (client.post("/pay", headers={"Idempotency-Key": "a"}) for _ in range(2))
    assert (first.status_code, first.content) == (200, second.content)
    assert (shop.keys(), shop.claims()) == (["a"], 1)
    wait_for(lambda: shop.sent() == [b'{"key": "a"}'])


# Handlers of a worker


@pytest.fixture
def worker(shop: Shop) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Return a function that sends messages to a worker, and runs it until they are handled or dead."""
    from tests.integrations.django_shop.worker import app

    app.process.forget()
    app.process._settings = Settings(database_url=shop.url)
    made = Worker(app)
    made.upkeep()
    broker = SqlBroker(shop.database, "producer")

    def work(*bodies: dict[str, str]) -> list[dict[str, Any]]:
        outputs = [Output("", "send", "", "shop", {"message_id": uuid7(), "type": "shop.Pay"}, encode(body)) for body in bodies]
        assert broker.publisher().publish(outputs, 10.0) == [None] * len(bodies)
        letters = DeadLetters(shop.database)
        message = shop.database.tables.message

        def waits() -> bool:
            with shop.database.queue_engine.connect() as own:
                rows = own.execute(select(message.c.id).where(message.c.queue == "shop", message.c.due_at.is_not(None))).all()
            return bool(rows) or busy(made)

        deadline = time.monotonic() + 60
        while waits():
            step(made)
            assert time.monotonic() < deadline
        return [letter.as_dict() for letter in letters.find()]

    yield work
    made.intake.receiver.close()
    app.close()


@each
def test_the_orm_of_a_handler_is_in_the_transaction_of_the_claim(shop: Shop, worker: Callable[..., Any]) -> None:
    assert worker({"key": "a"}, {"key": "a"}, {"key": "b", "how": "fail_at_first"}) == []
    assert shop.keys() == ["a", "b"]
    assert (shop.claims(), len(shop.sent())) == (2, 2)
    assert Payment.objects.get(key="b").cents == 2
    (dead,) = worker({"key": "c", "how": "fail"})
    assert (dead["rule"], dead["attempts"], dead["error"]) == ("handler", 2, "ValueError: no")
    assert shop.keys() == ["a", "b"]


@each
def test_a_handler_that_spoils_its_transaction(shop: Shop, worker: Callable[..., Any]) -> None:
    (caught,) = worker({"key": "a", "how": "catch"})
    assert (caught["rule"], caught["committed"]) == ("rolled back", False)
    assert (shop.keys(), shop.claims()) == ([], 0)
    _, committed = worker({"key": "b", "how": "commit"})
    assert (committed["rule"], committed["committed"]) == ("transaction ended", True)
    assert worker({"key": "c"})[2:] == []
    assert shop.keys() == ["b", "c"]
    assert shop.sent() == [b'{"key": "c"}']


@both
def test_hooks_of_on_commit_run_after_the_commit_of_a_handler(shop: Shop, worker: Callable[..., Any], caplog: Any) -> None:
    assert worker({"key": "a", "how": "hook"}, {"key": "b", "how": "lose"}) == []
    assert shop.keys() == ["a", "b"]
    assert [one.what for one in One.objects.all()] == ["a"]
    assert "after COMMIT" in caplog.text
    assert len(shop.sent()) == 2


# Migrations, the command and the admin


def manage(url: str, *arguments: str, code: int = 0, err: bool = False) -> str:
    """Run `manage.py` in another process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.integrations.django_shop.settings", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-m", "django", *arguments]
    found = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert found.returncode == code, (found.stdout + found.stderr)[-3000:]
    return found.stderr if code or err else found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_migrations_create_the_tables(kind: str, tmp_path: Path, capsys: Any) -> None:
    url = f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else create_database(server(kind))
    use(url)
    call_command("migrate")
    assert "Applying idemp.0001_tables... OK" in capsys.readouterr().out
    assert json.loads(manage(url, "idemp", "--database", "default", "db", "check", "--json")) == []
    if kind == "sqlite":
        call_command("migrate", "idemp", "zero")  # which drops nothing
        call_command("migrate")
        call_command("makemigrations", "idemp", check_changes=True)
        assert "no dead letter 7" in manage(url, "idemp", "dead", "discard", "7", code=1)
    connections.close_all()
    if kind != "sqlite":
        drop_database(url)


@each
def test_the_pages_of_the_admin(shop: Shop, worker: Callable[..., Any], caplog: Any) -> None:
    call_command("migrate", verbosity=0)
    worker({"key": "a", "how": "fail"}, {"key": "b", "how": "fail"})
    _, dead = worker({"key": "c"}, {"key": "<d>", "how": "commit"})[1:]
    first, second = (letter["id"] for letter in worker()[:2])
    clients = {}
    for name in ("view", "change", "delete", "nothing"):
        user = User.objects.create_user(name, is_staff=True)
        user.user_permissions.set(Permission.objects.filter(content_type__app_label="idemp", codename=f"{name}_deadletter"))
        clients[name] = Client()
        clients[name].force_login(user)
    place = "/admin/idemp/deadletter/"
    clients["delete"].get("/admin/")  # the index has links to the pages

    assert clients["nothing"].get(place).status_code == 403
    page = clients["view"].get(place).content.decode()
    assert "ValueError: no" in page
    assert f'href="{place}{first}/"' in page
    page = clients["view"].get(place, {"q": "c"}).content.decode()
    assert "shop handled shop.Pay c" in page
    assert "send to ledger: shop.Paid, confirmed" in page
    assert "Nothing was handled" in clients["view"].get(place, {"q": "x"}).content.decode()
    page = clients["view"].get(f"{place}{dead['id']}/").content.decode()
    assert "&lt;d&gt;" in page
    assert "Replay" not in page
    assert clients["view"].get(f"{place}999/").status_code == 404
    assert Client().get(place).status_code == 302

    for name, action in (("view", "replay"), ("view", "discard"), ("change", "discard"), ("delete", "replay")):
        assert clients[name].post(f"{place}{first}/", {action: "1"}).status_code == 403, (name, action)
    User.objects.get(username="delete").user_permissions.add(Permission.objects.get(codename="view_deadletter"))
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="change"))
    assert strict.post(f"{place}{first}/", {"replay": "1"}).status_code == 403
    clients["change"].post(f"{place}{dead['id']}/", {"replay": "1"})
    assert len(DeadLetters(shop.database).find()) == 3  # this one needs force
    assert clients["change"].post(f"{place}{first}/", {"replay": "1"}).status_code == 302
    assert clients["delete"].post(f"{place}{second}/", {"discard": "1"}).status_code == 302
    assert [letter.id for letter in DeadLetters(shop.database).find()] == [dead["id"]]
    assert clients["change"].post(f"{place}{dead['id']}/", {"replay": "1", "force": "on"}).status_code == 302
    assert DeadLetters(shop.database).find() == []
    assert LogEntry.objects.count() == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
def test_the_test_runner_of_django(url: str) -> None:
    assert "Ran 4 tests" in manage(url, "test", "tests.integrations.django_shop", "--noinput", err=True)
    assert "no dead letters" in manage(url, "idemp", "dead", "list")


# The transaction


@both
def test_hooks_signals_and_locks(shop: Shop) -> None:
    seen: list[Any] = []

    def saved(sender: Any, instance: Payment, **_: Any) -> None:
        One.objects.create(what=f"{instance.key}{instance.cents}")
        transaction.on_commit(lambda: seen.append((instance.key, Payment.objects.count(), connection.in_atomic_block)))

    Payment.objects.create(key="a")
    post_save.connect(saved, sender=Payment)
    try:
        with pytest.raises(ValueError, match="no"), inbox.once("shop.pay", key="b"):
            Payment.objects.create(key="b")
            raise ValueError("no")
        assert (seen, One.objects.count()) == ([], 0)
        with inbox.once("shop.pay", key="b"):
            payment = Payment.objects.select_for_update().get(key="a")
            payment.cents += 1
            payment.save()
            Payment.objects.create(key="b")
    finally:
        post_save.disconnect(saved, sender=Payment)
    assert seen == [("a", 2, False), ("b", 2, False)]
    assert [one.what for one in One.objects.order_by("id")] == ["a1", "b0"]


@both
def test_a_hook_that_raises(shop: Shop) -> None:
    """As in Django, its error comes out of the block, which is committed; its messages are sent, and a repetition finds it done."""

    def broken() -> None:
        raise ValueError("after COMMIT")

    with pytest.raises(ValueError, match="after COMMIT"), inbox.once("shop.pay", key="a") as unit:
        transaction.on_commit(broken)
        unit.send({}, to="ledger", type="shop.Paid")
        unit.result = b"1"
    with inbox.once("shop.pay", key="a") as unit:
        assert (unit.duplicate, unit.result) == (True, b"1")
    wait_for(lambda: shop.sent() == [b"{}"])


@each
def test_an_outer_transaction_decides(shop: Shop) -> None:
    inbox.prepare("shop.pay")

    def pay(key: str) -> bool:
        with inbox.joined("shop.pay", key=key) as unit:
            if not unit.duplicate:
                unit.send({"key": key}, to="ledger", type="shop.Paid")
                Payment.objects.create(key=key)
        return unit.duplicate

    with suppress(ZeroDivisionError), transaction.atomic():
        pay("a")
        1 / 0
    with transaction.atomic():
        with suppress(ZeroDivisionError), transaction.atomic():
            pay("a")
            1 / 0
        assert not pay("b")
        assert pay("b")
    assert (shop.keys(), shop.claims()) == (["b"], 1)
    wait_for(lambda: shop.sent() == [b'{"key": "b"}'])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_connections_that_the_server_has_closed(shop: Shop, url: str) -> None:
    """Between requests Django finds it, and within one it is an error that rolls back."""
    use(url, CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True)
    inbox.prepare("shop.pay")

    def kill() -> None:
        query(
            url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )

    def request(key: str, within: Callable[[], None] = lambda: None) -> bool:
        request_started.send(None)
        try:
            with inbox.once("shop.pay", key=key) as unit:
                if not unit.duplicate:
                    Payment.objects.create(key=key)
                    within()
                    unit.send({}, to="ledger", type="shop.Paid")
            return unit.duplicate
        finally:
            request_finished.send(None)

    assert not request("a")
    kill()
    assert not request("b")  # CONN_HEALTH_CHECKS
    with pytest.raises(OperationalError):  # Django's
        request("c", kill)
    assert not request("c")
    assert request("c")
    shop.database.close()
    assert shop.keys() == ["a", "b", "c"]
    wait_for(lambda: len(shop.sent()) == 3)


@each
def test_a_transaction_that_ends_in_a_block_is_no_success(shop: Shop) -> None:
    """An end that Django does not see: PostgreSQL would roll back in place of COMMIT, and effects behind an end stay."""

    def fail() -> None:
        with suppress(DatabaseError):
            connection.cursor().execute("SELECT * FROM nowhere")

    def end() -> None:
        connection.cursor().execute("ROLLBACK")

    for number, spoil in enumerate([end, fail] if connection.vendor == "postgresql" else [end]):
        with pytest.raises((TransactionEnded, DatabaseError)), inbox.once("shop.pay", key=f"{number}") as unit:
            Payment.objects.create(key=f"{number}")
            spoil()
            unit.send({}, to="ledger", type="shop.Paid")
        connection.close()
    assert (shop.claims(), shop.keys(), shop.sent()) == (0, [], [])


def test_a_message_is_of_the_inbox_that_it_is_asked_of(shop: Shop) -> None:
    other = DjangoInbox("other")
    other.prepare("other.pay")
    with inbox.once("shop.pay", key="a") as unit, other.joined("other.pay", key="a") as nested:
        inbox.unit.send({"of": "shop"}, to="ledger", type="shop.Paid")
        other.unit.send({"of": "other"}, to="ledger", type="shop.Paid")
    assert [json.loads(each.stored[0].body) for each in (unit, nested)] == [{"of": "shop"}, {"of": "other"}]
    close(other)
    with pytest.raises(HandlerError, match="no once"):
        inbox.unit.send({}, to="ledger", type="shop.Paid")


@pytest.mark.parametrize(("key", "same"), [(UUID(int=7), str(UUID(int=7))), (True, True), (7, 7)])
def test_keys(shop: Shop, key: Any, same: Any) -> None:
    for each in (key, same):
        with inbox.once("shop.pay", key=each) as unit:
            unit.result = b"1"
    assert unit.duplicate


@pytest.mark.parametrize("key", [Decimal(1), None, 1.5, b"a", "", object()])
def test_keys_that_are_refused(shop: Shop, key: Any) -> None:
    with pytest.raises(Unreadable), inbox.once("shop.pay", key=key):
        pass
    assert shop.claims() == 0


def test_a_wrapped_handler_leaves_the_connection_as_it_is(shop: Shop) -> None:
    """A management command reads from it while it handles."""
    connection.cursor().execute("CREATE TEMPORARY TABLE mine (id integer)")
    handle = inbox.wrap(lambda _: None, message=AnyMessage, consumer="shop", type="shop.Row", policy=Idempotent(key="id"))
    assert [handle({"id": number}).verdict.value for number in (1, 1, 2)] == ["claimed", "duplicate", "claimed"]
    connection.cursor().execute("SELECT * FROM mine")


def test_all_data_can_be_dumped(shop: Shop, tmp_path: Path) -> None:
    call_command("migrate", verbosity=0)
    for every in (False, True):
        call_command("dumpdata", "idemp", all=every, output=str(tmp_path / "dump.json"))
    assert (tmp_path / "dump.json").read_text() == "[]"
    call_command("makemigrations", "idemp", check=True, verbosity=0)


@both
def test_a_process_that_dies_between_commit_and_send(shop: Shop) -> None:
    died = subprocess.run(
        [sys.executable, "-c", DIES],
        env={
            **os.environ,
            "DATABASE_URL": shop.url,
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "tests.integrations.django_shop.settings",
        },
        check=False,
        capture_output=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert (shop.keys(), shop.claims(), shop.sent()) == (["a"], 1, [])
    inbox.prepare("shop.pay")
    inbox._open()[0].relay().wake()  # the thread of another process
    wait_for(lambda: shop.sent() == [b'{"key": "a"}'])


DIES = """
import os, signal, django
django.setup()
from django.db import transaction
from tests.integrations.django_shop.shop import Payment, inbox
inbox.prepare("shop.pay")
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with inbox.joined("shop.pay", key="a") as unit:
        Payment.objects.create(key="a")
        unit.send({"key": "a"}, to="ledger", type="shop.Paid")
"""


@both
def test_messages_of_other_libraries_are_captured(shop: Shop) -> None:
    assert current() is None
    with inbox.once("shop.pay", key="a") as unit:
        assert current() is unit is inbox.unit
    assert current() is None
    with pytest.raises(HandlerError, match="never be stored"):
        inbox.unit


# Refusals


@both
def test_results_that_are_no_json(shop: Shop) -> None:
    for value in (object(), {1, 2}, float("nan"), HttpResponse("paid")):
        with pytest.raises(UnusableOutput, match="no JSON"):
            inbox.once("shop.pay", key=lambda value: "a")(lambda value: value)(value)
    for result in (b"paid", "paid", b"\xff"):
        with pytest.raises(UnusableOutput, match="no JSON"), inbox.once("shop.pay", key="a") as unit:
            unit.result = result
    assert shop.claims() == 0


def test_functions_that_cannot_be_decorated() -> None:
    async def pay(key: str) -> None: ...

    with pytest.raises(ConfigurationError, match="pay is async def: decorate a def, and call it by sync_to_async"):
        inbox.once("shop.pay", key="key")(pay)
    with pytest.raises(ConfigurationError, match="has no parameter 'id': name one"):
        inbox.once("shop.pay", key="id")(lambda key: None)


def test_transactions_that_do_not_fit(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="no open transaction: use once"), inbox.joined("shop.pay", key="a"):
        pass
    with transaction.atomic():
        with inbox.joined("shop.pay", key="a"):  # its name is registered by another connection, as nothing was written
            pass
        with pytest.raises(ConfigurationError, match="use joined"), inbox.once("shop.take", key="a"):
            pass

    async def view() -> Any:
        with pytest.raises(SynchronousOnlyOperation):
            take("a")
        return await sync_to_async(take)("a")

    assert asyncio.run(view()) == take("a")


@pytest.mark.parametrize(
    ("url", "more", "refusal"),
    [
        ("sqlite:///:memory:", {}, "is in memory, .* name a file, also in 'TEST'"),
        ("sqlite:///file:shop.db?mode=ro", {}, "names a URI"),
        (
            "sqlite:///shop.db",
            {"OPTIONS": {"factory": object}},
            "has the option 'factory' as a type: write it as text",
        ),
        ("postgresql://shop@localhost/shop", {"AUTOCOMMIT": False}, "has AUTOCOMMIT False"),
        ("postgresql://shop@localhost/shop", {"OPTIONS": {"keepalives": 1.5}}, "has the option 'keepalives' as a float"),
        ("mysql://shop@localhost/shop", {"OPTIONS": {"ssl": {"ca": object()}}}, "has the option 'ssl_ca' as a object"),
        ("mysql://shop@localhost/shop", {"OPTIONS": {"local_infile": True}}, "has the option 'local_infile' as a bool"),
    ],
)
def test_databases_that_are_refused(url: str, more: dict[str, Any], refusal: str) -> None:
    use(url, **more)
    with pytest.raises(ConfigurationError, match=refusal):
        url_of()
    with pytest.raises(ConfigurationError, match=refusal):
        take("a")


@pytest.mark.parametrize(
    ("driver", "refusal"),
    [("psycopg2", "psycopg2, .* pip install 'psycopg"), ("MySQLdb", r"mysqlclient, .* call pymysql.install_as_MySQLdb\(\)")],
)
def test_drivers_that_are_refused(driver: str, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use("postgresql://shop@localhost/shop")
    monkeypatch.setattr(connections["default"], "Database", ModuleType(driver))
    with pytest.raises(ConfigurationError, match=refusal):
        url_of()
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    with pytest.raises(ConfigurationError, match="is oracle: idemp works on PostgreSQL"):
        url_of()


def test_options_are_those_of_idemps_own_connections() -> None:
    own = {"sslmode": "verify-full", "sslrootcert": "/ca.pem", "assume_role": "shop", "options": "-c search_path=x"}
    own |= {"pool": True} if django.VERSION >= (5, 1) else {}
    use("postgresql://shop:s%40@db.internal:5433/shop", OPTIONS=own, CONN_MAX_AGE=0)
    url = url_of()
    assert (url.host, url.port, url.password, url.database) == ("db.internal", 5433, "s@", "shop")
    assert url.query["sslmode"] == "verify-full"
    assert url.query["options"] == "-c search_path=x -c role=shop"
    assert "pool" not in url.query
    use("postgresql:///shop", NAME="", OPTIONS={"service": "shop"})
    assert url_of().query["service"] == "shop"
    use("postgresql://shop@x/shop", HOST="/var/run/postgresql")
    assert url_of().query["host"] == "/var/run/postgresql"
    use(
        "mysql://shop@db.internal/shop",
        OPTIONS={"ssl": {"ca": "/ca.pem"}, "init_command": "SET @a = 1", "isolation_level": "read committed"},
    )
    assert (url_of().query["ssl_ca"], url_of().query["init_command"]) == ("/ca.pem", "SET @a = 1")
    use(
        "sqlite:///shop.db", OPTIONS={"timeout": 30, "transaction_mode": "IMMEDIATE", "init_command": "PRAGMA cache_size = -2000"}
    )
    assert dict(url_of().query) == {"timeout": "30"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_idemps_own_connections_have_the_role_and_the_settings_of_djangos(url: str) -> None:
    role = f"role_{uuid7()[:8]}"
    query(url, f"CREATE ROLE {role}")
    try:
        use(url, OPTIONS={"assume_role": role, "application_name": "shop"})
        with own_engine().connect() as own, connection.cursor() as cursor:
            asked = "SELECT current_user::text, current_setting('application_name')"
            cursor.execute(asked)
            assert tuple(own.exec_driver_sql(asked).one()) == cursor.fetchone() == (role, "shop")
    finally:
        connections.close_all()
        query(url, f"DROP ROLE {role}")


def test_a_worker_on_another_database(shop: Shop, tmp_path: Path) -> None:
    from tests.integrations.django_shop.worker import app

    other = f"sqlite:///{tmp_path}/other.db"
    database = Database(other)
    upgrade(database)
    database.close()
    app.process.forget()
    app.process._settings = Settings(database_url=other)
    with pytest.raises(ConfigurationError, match=r"start it by python manage.py idemp worker"):
        app.adapters()
    app.process.forget()
    app.process._settings = Settings(database_url=shop.url)
    with pytest.raises(ConfigurationError, match="async def handlers cannot run in a transaction of Django"):
        app.async_store()
    app.close()


# django.tasks


@both
def test_tasks_run_once(shop: Shop) -> None:
    from tests.integrations.django_shop.tasks import app, broken, pack

    app.process.forget()
    app.process._settings = Settings(database_url=shop.url)
    worker = Worker(app)

    def waiting() -> list[Any]:
        message, pending = shop.database.tables.message, shop.database.tables.pending
        with shop.database.engine.connect() as own:  # first: the relay thread makes messages of these
            outputs = own.execute(select(pending.c.output_id)).all()
        with shop.database.queue_engine.connect() as own:
            rows = own.execute(select(message.c.id).where(message.c.queue == "tasks", message.c.due_at.is_not(None))).all()
        return [*outputs, *rows]

    try:
        first = pack.enqueue("a", cents=5)
        with suppress(ZeroDivisionError), transaction.atomic():
            lost = pack.enqueue("lost")
            1 / 0
        with transaction.atomic():
            second = pack.enqueue("two")
            assert shop.sent() == []
        later = pack.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("later")
        wrong = broken.enqueue()
        assert (first.status, first.args, first.kwargs) == ("READY", ["a"], {"cents": 5})
        deadline = time.monotonic() + 60
        while len(waiting()) > 1:
            step(worker)
            let_pass(shop.database, 1)
            assert time.monotonic() < deadline
        first.refresh()
        second.refresh()
        assert (first.status, first.return_value, second.return_value) == ("SUCCESSFUL", ["a", 5, 1], ["two", 0, 1])
        assert pack.get_result(later.id).status == "READY"
        assert (failed := broken.get_result(wrong.id)).status == "FAILED"
        assert "ValueError: no" in failed.errors[0].traceback
        with pytest.raises(TaskResultDoesNotExist):
            pack.get_result(lost.id)
        assert shop.keys() == ["a", "one", "two"]
        with pytest.raises(InvalidTask):
            pack.using(priority=5)
    finally:
        close(pack.get_backend().inbox)
        worker.intake.receiver.close()
        app.close()
