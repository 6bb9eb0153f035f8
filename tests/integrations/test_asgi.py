"""HTTP endpoints behind `Idempotency`: in this process on SQLite and PostgreSQL, and as servers that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pika
import pytest
import stripe
from increase import Increase
from sqlalchemy import Connection, create_engine, event, make_url, text
from starlette.testclient import TestClient

from idemp import ConfigurationError, Inbox
from idemp.integrations.asgi import Idempotency, Route
from tests.integrations import http_shop
from tests.integrations.http_shop import TABLES, make
from tests.servers.databases import locked, query
from tests.servers.process import has_ended
from tests.test_docs import BLOCK, NAMED, ROOT
from tests.worker.test_loop import wait_for
from tests.world import SINK, asynchronous_url

ME = {"authorization": "me"}


CLAIMING = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE datname = current_database() AND locktype = 'transactionid' AND NOT granted"


class Shop:
    """The service in this process."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url, self.api = url, make(url, **options)
        self.client = TestClient(self.api, raise_server_exceptions=False)
        self.engine = create_engine(url)

    def post(self, path: str = "/orders", key: str | None = "a", *, method: str = "POST", who: str = "me", **order: Any) -> Any:
        headers = {"authorization": who} | ({"idempotency-key": key} if key is not None else {})
        return self.client.request(method, path, headers=headers, json={"sku": "lamp", **order})

    def rows(self, statement: str) -> list[Any]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    def placed(self) -> int:
        return int(self.rows("SELECT count(*) FROM placed")[0][0])

    def claims(self) -> int:
        return int(self.rows("SELECT count(*) FROM idemp_inbox")[0][0])

    def outputs(self) -> int:
        return int(self.rows("SELECT count(*) FROM idemp_output WHERE kind <> 'result'")[0][0])

    @contextmanager
    def running(self) -> Iterator[Shop]:
        inbox, plain = self.api.state.inboxes
        with self.client:
            yield self
            self.client.portal.call(inbox.engine.dispose)
        plain.engine.dispose()
        self.engine.dispose()


@pytest.fixture
def shop(kind: str, url: str, request: pytest.FixtureRequest) -> Iterator[Shop]:
    made = Shop(url, **getattr(request, "param", {}))
    with made.engine.begin() as connection:
        for table in TABLES if kind == "postgresql" else TABLES[:1]:
            connection.execute(text(table))
    http_shop.passed.clear()
    with made.running() as shop:
        yield shop


every_kind = pytest.mark.parametrize("kind", ["postgresql-asyncpg", "sqlite-aiosqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("kind", ["postgresql-psycopg"], indirect=True)
by_each_driver = pytest.mark.parametrize("kind", ["postgresql-psycopg", "postgresql-asyncpg"], indirect=True)
on_sqlite = pytest.mark.parametrize("kind", ["sqlite-aiosqlite"], indirect=True)


@every_kind
def test_a_key_has_one_effect_and_one_answer(shop: Shop) -> None:
    for number, path in enumerate(("/orders", "/plain"), 1):
        first, again, quoted = shop.post(path), shop.post(path), shop.post(path, key='"a"')
        assert (first.status_code, first.headers.get("idempotent-replayed")) == (201, None), first.text
        for each in (again, quoted):
            assert (each.status_code, each.headers["idempotent-replayed"], each.json()) == (201, "true", first.json())
            kept = {name: value for name, value in first.headers.items() if name != "set-cookie"}
            assert {**each.headers} == {**kept, "idempotent-replayed": "true"}
        assert "set-cookie" in first.headers
        assert shop.post(path, who="you").json() != first.json()
        other = shop.post(path, sku="chair")
        assert (other.status_code, other.headers["content-type"]) == (422, "application/problem+json")
        assert (shop.placed(), shop.outputs()) == (2 * number, 2 * number)
    assert [shop.post(path, method="PATCH").status_code for path in ("/orders/7%3Fx", "/orders/7?x", "/orders/8")] == [
        200,
        422,
        422,
    ]
    assert shop.post("/orders/7?x=1", method="PATCH").status_code == 422
    assert [shop.post("/orders/9", None, method="PATCH").status_code for _ in range(2)] == [
        200,
        200,
    ]  # a key is not required there
    assert shop.placed() == 7


@on_sqlite
def test_keys(shop: Shop) -> None:
    for wrong in ("", " ", "\t", "a, b", '"a', 'a"', '""', "a" * 256, f'"{"a" * 256}"', "é", '"a";b=1', '"a", "b"', '"\\a"'):
        answer = shop.post(key=wrong.encode())
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json"), wrong
    assert shop.post(key=None).status_code == 400
    twice = [("authorization", "me"), ("idempotency-key", "a"), ("idempotency-key", "a")]
    assert shop.client.post("/orders", headers=twice, json={"sku": "lamp"}).status_code == 400
    assert shop.client.post("/orders", headers={"idempotency-key": "a"}, json={"sku": "lamp"}).status_code == 401
    assert shop.claims() == shop.placed() == 0
    long = ["k" * 219, "k" * 220, "k" * 254, "k" * 254 + "l", "k" * 254 + "m"]
    good = ["a", '"a b"', '"a\\"b"', '"a\\\\b"', *long]
    assert [shop.post(key=key).status_code for key in good] == [201] * len(good)
    assert [shop.post(key=key).headers["idempotent-replayed"] for key in good] == ["true"] * len(good)
    assert shop.claims() == shop.placed() == len(good)
    assert shop.post(key=" a b ").headers["idempotent-replayed"] == "true"  # as some clients have it


@every_kind
def test_what_is_not_final_is_rolled_back(shop: Shop) -> None:
    passing = [{"status": status} for status in (401, 403, 408, 409, 425, 429, 500, 503)]
    for number, order in enumerate([*passing, {"fault": "error"}, {"fault": "raise", "status": 409}]):
        for path in ("/orders", "/plain"):
            answer = shop.post(path, str(number), **order)
            assert answer.status_code == order.get("status", 500)
            assert "idempotent-replayed" not in shop.post(path, str(number), **order).headers
    assert (shop.claims(), shop.placed(), shop.outputs()) == (0, 0, 0)
    answer = shop.post(key="c", fault="conflict", status=404)
    assert (answer.status_code, answer.json(), shop.claims()) == (
        404,
        {"detail": "no such order"},
        0,
    )  # it has rolled back itself
    for key, order in (("r", {"fault": "raise", "status": 404}), ("s", {"status": 402})):
        assert shop.post(key=key, **order).status_code == shop.post(key=key, **order).status_code == order["status"]
    assert (shop.claims(), shop.placed()) == (2, 2)


@on_postgresql
@pytest.mark.parametrize("shop", [{"limit": 500}], indirect=True)
def test_what_cannot_be_committed(shop: Shop) -> None:
    """A commit by the endpoint, an error that it has caught, an answer or a body that is too long, a refused COMMIT, and a refused flush."""
    for fault, status in (("commit", 500), ("caught", 500)):
        assert shop.post(key=fault, fault=fault).status_code == status
    assert shop.post(key="long", long=501).status_code == 500
    assert shop.post(key="long", sku="s" * 501).status_code == 413
    for fault in ("deferred", "unflushed"):
        answer = shop.post("/later", "later", fault=fault)
        assert (answer.status_code, answer.json()["detail"]) == (500, "this request failed, and nothing was done")
    assert (shop.claims(), shop.placed(), http_shop.passed) == (0, 0, [])  # no background task has run
    assert shop.post(key="commit").status_code == 201


@by_each_driver
def test_a_database_that_is_away(shop: Shop) -> None:
    """Before the claim, and right before COMMIT: then the same key finds out."""
    gone = shop.post(fault="gone")
    assert (gone.status_code, gone.headers["retry-after"], shop.placed()) == (503, "1", 0)
    for (pid,) in query(
        shop.url, "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ):
        query(shop.url, "SELECT pg_terminate_backend(%s, 5000)", pid)  # pooled connections, as of a server that was started again
    shop.engine.dispose()
    assert {shop.post().status_code for _ in range(3)} <= {201, 503}
    assert (shop.post().status_code, shop.placed()) == (201, 1)
    away = TestClient(make(make_url(shop.url).set(database="nowhere").render_as_string(False)), raise_server_exceptions=False)
    for path in ("/orders", "/plain"):
        answer = away.post(path, headers={"authorization": "me", "idempotency-key": "a"}, json={"sku": "lamp"})
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")


@every_kind
def test_an_error_of_a_commit_that_was_made(shop: Shop) -> None:
    """Whatever the driver says: nobody is told that nothing was done."""

    def lose(connection: Connection) -> None:
        connection.connection.commit()
        raise RuntimeError("the answer cannot be read")

    for path, inbox in zip(("/orders", "/plain"), shop.api.state.inboxes, strict=True):
        plain = getattr(inbox.engine, "sync_engine", inbox.engine)
        event.listen(plain, "commit", lose)
        answer = shop.post(path, key=path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        event.remove(plain, "commit", lose)
        again = shop.post(path, key=path)
        assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert (shop.claims(), shop.placed()) == (2, 2)


@on_postgresql
@pytest.mark.parametrize("path", ["/orders", "/plain"])
def test_a_request_that_is_cancelled_is_rolled_back(shop: Shop, path: str) -> None:
    body = json.dumps({"sku": "lamp", "lock": 7}).encode()
    headers = [(b"authorization", b"me"), (b"idempotency-key", b"a"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    async def by_asyncio() -> None:
        task = asyncio.ensure_future(shop.api(scope, receive, send))
        await asyncio.to_thread(wait_for, lambda: waiting(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def by_anyio() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(shop.api, scope, receive, send)
            await asyncio.to_thread(wait_for, lambda: waiting(1))
            group.cancel_scope.cancel()

    for number, run in enumerate((by_asyncio, by_anyio) if path == "/orders" else (by_asyncio,)):  # anyio waits for its threads
        with locked(shop.url, 7) as waiting:
            shop.client.portal.call(run)
            assert sent == []
        with locked(shop.url, 7):  # so the transaction has ended: a server does not see at once that its client has gone
            pass
        assert (shop.claims(), shop.placed()) == (number, number)
        assert shop.post(path, str(number), lock=7).status_code == 201
    wait_for(lambda: [inbox.engine.pool.checkedout() for inbox in shop.api.state.inboxes] == [0, 0])


@on_postgresql
def test_a_client_that_goes_away_while_it_sends(shop: Shop) -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    headers = [(b"authorization", b"me"), (b"idempotency-key", b"a")]

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/orders", "headers": headers}
    shop.client.portal.call(shop.api, scope, receive, send)
    assert shop.claims() == 0


@on_postgresql
def test_another_process_waits_in_the_database(shop: Shop) -> None:
    """Two services on one database know nothing of each other."""
    with ThreadPoolExecutor(3) as threads, Shop(shop.url).running() as other:
        for path in ("/orders", "/plain"):
            post = partial(other.post, path, lock=7)
            with locked(shop.url, 7) as waiting:
                first = threads.submit(shop.post, path, lock=7)
                wait_for(lambda: waiting(1))
                assert post().status_code == 409
                third = threads.submit(post)
                wait_for(lambda: query(shop.url, CLAIMING) == [(1,)])
            assert (third.result().json(), third.result().headers["idempotent-replayed"]) == (first.result().json(), "true")
    assert shop.placed() == 2


@every_kind
def test_background_tasks_run_behind_the_commit(shop: Shop) -> None:
    for status, claims in ((201, 1), (409, 1)):
        assert shop.post("/later", str(status), status=status).status_code == status
        assert http_shop.passed == ["None", "InvalidRequestError", "HandlerError"]
        assert shop.claims() == claims
        http_shop.passed.clear()
    shop.post("/later", "201")
    assert http_shop.passed == []


@every_kind
@pytest.mark.parametrize("shop", [{"inner": False}, {"inner": True}], indirect=True)
def test_streams(shop: Shop, request: pytest.FixtureRequest) -> None:
    """Also of a client that goes away: half an answer is not stored."""
    assert [shop.post("/stream").text for _ in range(2)] == ["abc", "abc"]
    assert shop.placed() == 3
    if not request.node.callspec.params["shop"]["inner"]:  # which ends it as if it were complete
        assert shop.post("/stream", "b", fault="error").status_code == 500
    assert (shop.placed(), shop.claims()) == (3, 1)
    messages = iter([{"type": "http.request", "body": b'{"sku": "lamp"}'}])
    headers = [(b"authorization", b"me"), (b"idempotency-key", b"gone"), (b"content-type", b"application/json")]

    async def receive() -> dict[str, Any]:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        raise OSError(message)

    with suppress(OSError, ExceptionGroup):
        shop.client.portal.call(
            shop.api, {"type": "http", "method": "POST", "path": "/stream", "headers": headers}, receive, send
        )
    assert (shop.post("/stream", "gone").text, shop.placed()) == ("abc", 6)


@on_sqlite
def test_an_answer_that_was_erased(shop: Shop) -> None:
    shop.post()
    with shop.engine.begin() as connection:
        connection.execute(text("UPDATE idemp_output SET headers = :none, body = :empty"), {"none": b"{}", "empty": b""})
    answer = shop.post()
    assert (answer.status_code, shop.placed()) == (410, 1)


@on_sqlite
def test_endpoints_that_do_not_fit_are_refused(shop: Shop) -> None:
    client = TestClient(shop.api)
    with pytest.raises(ConfigurationError, match="wrong is a plain def"):
        client.post("/wrong", headers={**ME, "idempotency-key": "a"})
    with pytest.raises(ConfigurationError, match="/undeclared has no Route"):
        client.post("/undeclared")
    assert shop.claims() == 0


@on_sqlite
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"limit": 0}, "limit=0"),
        ({"wait": 0}, "wait=0"),
        ({"retention": "no"}, "retention"),
        ({"client": asyncio.sleep}, "client is async def"),
        ({"routes": [Route("POST", "/a", "a"), Route("PUT", "/a", "a")]}, "two routes have one name: a, a"),
        ({"routes": [Route("POST", "a", "a")]}, "matches nothing"),
        ({"routes": [Route("*", "/a", "a")]}, "has no method"),
    ],
)
def test_a_server_does_not_start(fault: dict[str, Any], told: str, url: str) -> None:
    options: dict[str, Any] = {"inbox": Inbox(create_engine(url)), "routes": [Route("POST", "/a", "a")], "client": str, **fault}
    with pytest.raises(ConfigurationError, match=told):
        Idempotency(make(url), **options)


def test_a_server_without_tables_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with (
        pytest.raises(ConfigurationError, match="idemp db upgrade"),
        TestClient(make(f"sqlite+aiosqlite:///{tmp_path}/empty.db")),
    ):
        pass


@on_sqlite
def test_the_path_is_the_one_that_routers_see(shop: Shop) -> None:
    """Below a mount, and behind a proxy that leaves its prefix in the path."""
    for number, (root, path) in enumerate((("/api", "/orders"), ("/", "/orders"), ("/o", "/orders"), ("/api", "/api/orders"))):
        client = TestClient(shop.api, root_path=root, headers={**ME, "idempotency-key": str(number)})
        assert [client.post(path, json={"sku": "lamp"}).headers.get("idempotent-replayed") for _ in "ab"] == [None, "true"], path


@on_sqlite
def test_another_key_waits_for_the_only_writer(shop: Shop) -> None:
    """So it is the database that is busy, not a request with this key."""
    with shop.engine.connect() as connection:
        connection.execute(text("BEGIN IMMEDIATE"))
        connection.execute(text("DELETE FROM placed"))
        for path in ("/orders", "/plain"):
            assert shop.post(path).status_code == 503


@by_each_driver
def test_many_first_requests_on_a_small_pool(url: str) -> None:
    """Without a start, as in a mounted app: the first one opens, and the others wait without a connection."""
    query(url, TABLES[0])
    shop = Shop(url, pool_size=2, max_overflow=0, pool_timeout=5)
    headers = [{"authorization": str(number), "idempotency-key": "a"} for number in range(8)]

    async def run() -> list[int]:
        transport = httpx.ASGITransport(shop.api)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            made = [client.post(path, json={"sku": "lamp"}, headers=each) for each in headers for path in ("/orders", "/plain")]
            codes = [answer.status_code for answer in await asyncio.gather(*made)]
        await shop.api.state.inboxes[0].engine.dispose()
        return codes

    assert asyncio.run(run()) == [201] * 16
    for inbox in shop.api.state.inboxes:
        inbox.relay().stop()
    shop.api.state.inboxes[1].engine.dispose()
    shop.engine.dispose()


# Real servers


class Server:
    """Uvicorn on a real database, in processes that can be killed; connections wait in a socket while none runs."""

    def __init__(self, url: str, vhost: str, folder: Path, **environment: str) -> None:
        self.mark = folder / "kill"
        environment = {**os.environ, "IDEMP_DATABASE_URL": url, "IDEMP_BROKER_URL": vhost, "KILL": str(self.mark), **environment}
        self.url, self.vhost, self._log = url, vhost, (folder / "log").open("wb")
        command = [sys.executable, "-m", "tests.integrations.http_shop"]
        self._parent = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.address = f"http://127.0.0.1:{self._line()}"
        self.begin()

    def _line(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()

    def begin(self) -> None:
        """Start a process that answers."""
        print("begin", file=self._parent.stdin, flush=True)
        self.pid = int(self._line())

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self._parent.communicate(timeout=30)
        self._log.close()

    @contextmanager
    def restarted(self) -> Iterator[None]:
        """Start another process whenever one has ended."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                if has_ended(self.pid):
                    self.begin()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def post(self, key: str, order: Mapping[str, Any], who: str = "me", path: str = "/orders", **headers: str) -> httpx.Response:
        headers |= {"idempotency-key": key, "authorization": who}
        return httpx.post(self.address + path, json=order, headers=headers, timeout=30)

    def sent(self, count: int) -> dict[str, set[str]]:
        """Wait for so many messages; return under which ids each sku has arrived."""
        found: dict[str, set[str]] = defaultdict(set)
        with closing(pika.BlockingConnection(pika.URLParameters(self.vhost))) as connection:
            channel = connection.channel()

            def arrived() -> bool:
                while (taken := channel.basic_get(SINK, auto_ack=True))[0]:
                    found[json.loads(taken[2])["sku"]].add(taken[1].message_id)
                return len(found) >= count

            wait_for(arrived)
            wait_for(lambda: not query(self.url, "SELECT 1 FROM idemp_pending"))
            arrived()
        return found


@pytest.fixture
def server(url: str, vhost: str, tmp_path: Path) -> Iterator[Server]:
    for table in TABLES:
        query(url, table)
    with closing(pika.BlockingConnection(pika.URLParameters(vhost))) as connection:
        connection.channel().queue_declare(SINK, durable=True)
    server = Server(url, vhost, tmp_path)
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_requests_at_once(server: Server) -> None:
    with ThreadPoolExecutor(8) as threads:
        for path in ("/orders", "/plain"):
            order = {"sku": path, "lock": 7}
            with locked(server.url, 7) as waiting:
                first = threads.submit(server.post, "two", order, path=path)
                wait_for(lambda: waiting(1))
                five = [threads.submit(server.post, "five", {**order, "sku": f"{path} of five"}, path=path) for _ in range(5)]
                wait_for(lambda sent=five: sum(each.done() for each in sent) == 4)  # they have waited for long enough
                assert not first.done()
                third = threads.submit(server.post, "two", order, path=path)
            assert (third.result().json(), third.result().headers["idempotent-replayed"]) == (first.result().json(), "true")
            answers = [each.result() for each in five]
            assert Counter(each.status_code for each in answers) == {201: 1, 409: 4}
            assert {each.headers.get("retry-after") for each in answers} == {"1", None}
    assert {each: len(ids) for each, ids in server.sent(4).items()} == dict.fromkeys(
        ["/orders", "/orders of five", "/plain", "/plain of five"], 1
    )


KEYS, KILLS = 120, 5  # of a storm; with 2,000 and 30 it takes four minutes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql-psycopg"], indirect=True)
def test_servers_that_are_killed_under_load(server: Server) -> None:
    """In the endpoint, between COMMIT and send, between COMMIT and the answer, and anywhere."""
    chance = Random(7)
    plans = [(f"sku{number}", ["", *chance.choices(["endpoint", "send", "answer"], k=1)]) for number in range(KILLS)]
    kills = {sku: where[-1] for sku, where in plans}
    orders = [(f"sku{number}", chance.randint(1, 4)) for number in range(KEYS)]
    todo = [sku for sku, times in orders for _ in range(times)]
    chance.shuffle(todo)
    answers: dict[str, set[str]] = defaultdict(set)

    def deliver(sku: str) -> None:
        """Send until there is an answer, as a client does that retries."""
        while True:
            where = kills.pop(sku, None)
            with suppress(httpx.TransportError):
                answer = server.post(sku, {"sku": sku}, **({"x-kill": where} if where else {}))
                if answer.status_code == 201:
                    answers[sku].add(answer.text)
                    return
                assert answer.status_code == 409, answer.text
            time.sleep(0.02)

    with server.restarted(), ThreadPoolExecutor(8) as threads:
        for _ in threads.map(deliver, todo):
            pass
    assert not kills
    assert {sku: len(said) for sku, said in answers.items()} == {sku: 1 for sku, _ in orders}
    assert dict(query(server.url, "SELECT sku, count(*) FROM placed GROUP BY sku")) == {sku: 1 for sku, _ in orders}
    receipts = dict(query(server.url, "SELECT sku, receipt FROM placed"))
    assert {sku: json.loads(next(iter(said)))["receipt"] for sku, said in answers.items()} == receipts
    assert {sku: len(ids) for sku, ids in server.sent(KEYS).items()} == {sku: 1 for sku, _ in orders}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_clients_of_payment_providers_work_unchanged(server: Server) -> None:
    """They send keys, and repeat a request that has got no answer under the same key: of Stripe, form data; of Increase, JSON."""
    by_stripe = stripe.StripeClient("sk_test_1", base_addresses={"api": server.address}, max_network_retries=3)
    by_increase = Increase(api_key="secret", base_url=server.address, max_retries=3)
    pay = partial(by_stripe.v1.payment_intents.create, params={"amount": 1200, "currency": "eur"})
    account = partial(by_increase.accounts.create, name="shop", program_id="program")
    calls = [
        (lambda: pay().id, lambda: pay(options={"idempotency_key": "order 7"}).id),
        (lambda: account().id, lambda: account(idempotency_key="order-7").id),
    ]
    with server.restarted():
        for number, (anew, once) in enumerate(calls):
            for call, more in ((anew, 1), (once, 0)):
                before = len(query(server.url, "SELECT * FROM placed"))
                server.mark.touch()
                first = call()  # whose first answer is lost
                assert not server.mark.exists()
                assert (call() == first) is not bool(more)
                assert len(query(server.url, "SELECT * FROM placed")) == before + 1 + more, number


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_the_service_of_the_page_does_what_its_openapi_document_says(url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "http.md").read_text().replace("sqlite+aiosqlite:///idemp.db", asynchronous_url(url))
    for _, block in BLOCK.findall(page):
        if named := NAMED.match(block):
            (tmp_path / named[1]).write_text(block)
    query(url, "CREATE TABLE shop_order (id SERIAL, sku TEXT, refunded INTEGER)")
    found = tmp_path / "out"
    with found.open("w") as out:
        options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stdout": out, "stderr": out}
        served = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "service:api", "--host", "127.0.0.1", "--port", "0"], **options
        )
    try:
        wait_for(lambda: "running on" in found.read_text() or served.poll() is not None)
        (address,) = re.findall(r"running on (\S+)", found.read_text())
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{address}/openapi.json", "--no-color"]
        command += ["--header", "x-api-key: me", "--max-examples", "50", "--seed", "7"]
        command += ["--exclude-checks", "positive_data_acceptance"]  # a key of an earlier request is refused: no schema knows it
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stdout[-4000:]
    finally:
        served.terminate()
        assert served.wait(30) in (0, -15)
    placed, answered = query(url, "SELECT count(*) FROM shop_order"), "SELECT count(*) FROM idemp_inbox"
    assert 0 < placed[0][0] <= query(url, answered)[0][0]
