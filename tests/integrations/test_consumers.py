"""Wrapped consumers of kombu, pika and aio-pika, on real servers."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from sqlalchemy import make_url

from idemp import ConfigurationError, Context, Idempotent
from idemp.errors import (
    Conflict,
    DispatchIncomplete,
    InFlight,
    Late,
    Refuse,
    TransactionEnded,
    TransactionRolledBack,
    Unavailable,
    UnknownType,
    Unreadable,
)
from idemp.integrations import _settling, aio_pika, reject
from idemp.integrations._settling import Fate, fate
from idemp.integrations.aio_pika import AioPikaCallbacks
from idemp.integrations.kombu import KombuCallbacks
from idemp.integrations.pika import PikaCallbacks
from tests.integrations.consumers import CLIENTS, by_kombu, by_pika, consume
from tests.servers.databases import query
from tests.sql.test_outages import end_sessions, role
from tests.world import Order, World, effect

every_client = pytest.mark.parametrize("client", CLIENTS)
on_postgresql = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
QUEUE, DEAD = "orders", "orders.dead"
OPTIONS: dict[str, Any] = {"message": Order, "consumer": "billing", "policy": Idempotent(key="order_id")}
__all__ = ["role"]


class Orders:
    """A queue with a dead-letter exchange and a delivery limit, as a producer and an operator see it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        channel.confirm_delivery()
        channel.queue_declare(DEAD, durable=True)
        dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD, "x-delivery-limit": 5}
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum", **dead})

    def send(self, body: bytes, **headers: Any) -> None:
        self.channel.basic_publish("", QUEUE, body, pika.BasicProperties(headers=headers, delivery_mode=2), mandatory=True)

    def order(self, id: str, **fields: Any) -> None:
        self.send(json.dumps({"order_id": id, **fields}).encode())

    def waiting(self, queue: str = QUEUE) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def dead(self) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        while (got := self.channel.basic_get(DEAD, auto_ack=True))[0] is not None:
            found[got[2]] += 1
        return found


@pytest.fixture
def orders(vhost: str) -> Iterator[Orders]:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost))) as connection:
        yield Orders(connection.channel())


def when(condition: Callable[[], bool]) -> Callable[[], bool]:
    deadline = time.monotonic() + 30

    def stop() -> bool:
        assert time.monotonic() < deadline, "it did not happen"
        return condition()

    return stop


def events(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    return Counter(event for record in caplog.records if (event := getattr(record, "event", "")).startswith("wrapped."))


@on_postgresql
@every_client
def test_each_message_is_settled_by_what_became_of_it(
    client: str, url: str, vhost: str, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    world, runs, buried = World(url), Counter[str](), Counter[bytes]()

    def handle(message: Order, ctx: Context) -> None:
        runs[message.order_id] += 1
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if message.order_id == "fails" and runs["fails"] < 3:
            raise ValueError("not yet")
        if message.order_id == "refused":
            raise Refuse("never")

    def dead(message: Any, error: Exception) -> Any:
        buried[bytes(message.body)] += 1
        if buried[bytes(message.body)] == 1:
            raise OSError("there is no place for it")
        return reject(message, error)

    def settled() -> bool:
        if len(bad) == before and world.effects().get("1"):  # tasks of aio-pika overtake each other
            bad.append(b'{"order_id": "1", "price": 7}')
            orders.send(bad[-1])
        return len(bad) > before and orders.waiting(DEAD) == len(bad) and world.effects() == dict.fromkeys(handled, 1)

    handled = ["1", "fails"]
    bad = [b"{", b'{"order_id": "refused"}']
    orders.order("1")
    orders.order("1")
    orders.order("fails")
    for body in bad:
        orders.send(body)
    packed = zlib.compress(b'{"order_id": "packed"}')
    orders.send(packed, compression="application/x-gzip")
    if client == "kombu":
        handled.append("packed")
        orders.send(b"not packed", compression="application/x-gzip")
        bad.append(b"not packed")
    else:
        bad.append(packed)
    before = len(bad)
    consume(client, url, vhost, QUEUE, handle, stop=when(settled), dead=dead, **OPTIONS)
    assert world.effects() == dict.fromkeys(handled, 1)
    assert runs == Counter(dict.fromkeys(handled, 1)) | Counter(fails=3, refused=2)
    assert orders.dead() == Counter(bad)
    assert events(caplog) == {"wrapped.failed": 2 + len(bad), "wrapped.dead": len(bad)}


@on_postgresql
@every_client
@pytest.mark.parametrize("used", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_message_stays_in_hand_while_the_database_is_away(
    client: str, used: bool, url: str, role: str, vhost: str, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    world, headers = World(url), list[Any]()

    def handle(message: Order, ctx: Context) -> None:
        headers.append(dict(ctx.headers))
        ctx.connection.execute(effect.insert(), {"what": message.order_id})

    def stop() -> bool:
        nonlocal step
        if step == "before" and (not used or world.effects()):
            step = "away"
            query(url, f"ALTER ROLE {role} NOLOGIN")
            end_sessions(url, role)
            orders.order("2")
        return bool(step == "back" and world.effects().get("2")) and not orders.waiting()

    def restore(record: Any) -> bool:
        nonlocal step
        if getattr(record, "event", "") == "wrapped.paused" and step == "away":
            step = "back"
            query(url, f"ALTER ROLE {role} LOGIN")
        return True

    step = "before"
    if used:
        orders.order("1")
    caplog.handler.addFilter(restore)
    caplog.set_level("INFO")
    try:
        database = make_url(url).set(username=role).render_as_string(hide_password=False)
        consume(client, database, vhost, QUEUE, handle, stop=when(stop), **OPTIONS)
    finally:
        caplog.handler.removeFilter(restore)
    assert world.effects() == ({"1": 1, "2": 1} if used else {"2": 1})
    assert orders.waiting(DEAD) == 0
    assert not any(each.get("x-delivery-count") for each in headers)
    assert events(caplog) == {"wrapped.paused": 1, "wrapped.resumed": 1}


@pytest.mark.slow
@pytest.mark.parametrize("client", ["kombu", "pika"])
def test_heartbeats_go_on_while_a_message_stays_in_hand(client: str, vhost: str, orders: Orders) -> None:
    began, seen = time.monotonic(), list[bool]()

    def handle(*_: Any, redelivered: bool) -> None:
        seen.append(redelivered)
        if time.monotonic() < began + 8:
            raise Unavailable("the database takes no work")

    orders.order("1")
    stop = when(lambda: time.monotonic() > began + 8 and not orders.waiting() and len(seen) > 6)
    if client == "kombu":
        by_kombu(vhost, QUEUE, KombuCallbacks(handle, dead=reject), stop, heartbeat=1)
    else:
        by_pika(f"{vhost}?heartbeat=1", QUEUE, PikaCallbacks(handle, dead=reject), stop)
    assert seen == [False, *[True] * (len(seen) - 1)]  # from a broker that has cut the connection, it would come anew
    assert not orders.waiting()


def test_the_table_of_errors() -> None:
    found = {
        Fate.DEAD: [Conflict(), Late(), Refuse(), UnknownType(), Unreadable(), TransactionEnded("COMMIT", committed=True)],
        Fate.HOLD: [ConfigurationError(), InFlight(), Unavailable()],
        Fate.REQUEUE: [DispatchIncomplete(), TransactionRolledBack("ROLLBACK"), ValueError(), MemoryError()],
    }
    assert all(fate(error) is expected for expected, errors in found.items() for error in errors)


class Stub:
    """A message of any client, with a handler that raises what it is given."""

    def __init__(self, client: str, *errors: BaseException | None) -> None:
        self.client, self.errors, self.done, self.redelivered = client, list(errors), list[str](), list[bool]()
        self.waits: list[float] = []
        self.broken: BaseException | None = None

    def handle(self, *_: Any, redelivered: bool) -> None:
        self.redelivered.append(redelivered)
        if (error := self.errors.pop(0)) is not None:
            raise error

    def settle(self, how: str) -> None:
        if self.broken:
            raise self.broken
        self.done.append(how)

    def run(self, dead: Callable[..., Any] = reject) -> None:
        if self.client == "aio_pika":
            self._on_loop(dead)
        elif self.client == "pika":
            channel = SimpleNamespace(connection=SimpleNamespace(sleep=self.waits.append))
            channel.basic_ack = lambda _tag: self.settle("ack")
            channel.basic_reject = lambda _tag, requeue: self.settle("requeue" if requeue else "reject")
            method = SimpleNamespace(delivery_tag=1, redelivered=False)
            PikaCallbacks(self.handle, dead=dead).on_message(channel, method, pika.BasicProperties(), b"")
        else:
            message = SimpleNamespace(properties={}, channel=None, acknowledged=False)
            message.ack = lambda: self.settle("ack")

            def rejects(*, requeue: bool) -> None:
                self.settle("requeue" if requeue else "reject")
                message.acknowledged = True

            message.reject = rejects
            KombuCallbacks(self.handle, dead=dead).on_message(message)

    def _on_loop(self, dead: Callable[..., Any]) -> None:
        async def handle(*arguments: Any, redelivered: bool) -> None:
            self.handle(*arguments, redelivered=redelivered)

        async def ack() -> None:
            self.settle("ack")

        async def rejects(*, requeue: bool) -> None:
            self.settle("requeue" if requeue else "reject")
            message.processed = True

        message = SimpleNamespace(body=b"", message_id=None, redelivered=False, processed=False, ack=ack, reject=rejects)
        coroutine: Any = AioPikaCallbacks(handle, dead=dead).on_message(message)
        with suppress(StopIteration):
            coroutine.send(None)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(aio_pika, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("idemp.integrations.kombu._wait", lambda _, seconds: waits.append(seconds))
    return waits


@every_client
def test_pauses_grow_while_the_message_is_not_to_blame(client: str, no_pauses: list[float]) -> None:
    stub = Stub(client, *[Unavailable("away"), InFlight("held")] * 4, None)
    stub.run()
    assert stub.done == ["ack"]
    assert stub.redelivered == [False, *[True] * 8]
    assert [*no_pauses, *stub.waits] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, _settling.LONGEST_PAUSE, _settling.LONGEST_PAUSE]


@every_client
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_leaves_the_message(client: str, error: type[BaseException]) -> None:
    stub = Stub(client, error())
    with pytest.raises(error):
        stub.run()
    assert stub.done == []


@every_client
@pytest.mark.parametrize("raised", [None, ValueError("fails"), Refuse("never")])
def test_errors_of_the_connection_come_through(client: str, raised: Exception | None, no_pauses: list[float]) -> None:
    stub = Stub(client, raised)
    stub.broken = ConnectionResetError("gone")
    with pytest.raises(ConnectionResetError):
        stub.run()


@every_client
def test_a_function_for_dead_letters_may_leave_the_acknowledgement_to_the_callback(client: str) -> None:
    stub, kept = Stub(client, Conflict("another")), list[Exception]()
    stub.run(dead=lambda _, error: kept.append(error))
    assert (stub.done, [type(error) for error in kept]) == (["ack"], [Conflict])


def test_what_does_not_fit_is_refused() -> None:
    async def asynchronous(*_: Any) -> None: ...

    def plain(*_: Any) -> None: ...

    for kind, given in ((KombuCallbacks, asynchronous), (PikaCallbacks, asynchronous), (AioPikaCallbacks, plain)):
        with pytest.raises(ConfigurationError, match="has wrapped"):
            kind(given, dead=reject)
    with pytest.raises(ConfigurationError, match="cannot await"):
        PikaCallbacks(plain, dead=asynchronous)
