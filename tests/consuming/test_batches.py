"""A worker whose deliveries share transactions: what it takes together, and what becomes of the rest."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event, text

from idemp import App, Context, Idempotent
from idemp.broker.kombu import KombuBroker
from idemp.broker.memory import InMemoryBroker
from idemp.errors import HandlerError
from idemp.inbox.memory import InMemoryStore
from idemp.messages import Message, Output, OutputKind
from idemp.settings import Settings
from idemp.worker import Worker
from tests.poison.mill import ALWAYS, FINE, ONCE, QUEUE, Mill
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MOST = 20


@pytest.fixture
def mill(tmp_path: Path) -> Iterator[Callable[..., Mill]]:
    """Makes a mill on a broker in memory and a file of SQLite."""
    made: list[Mill] = []

    def make(broker: Any = None, database: str = f"sqlite:///{tmp_path}/mill.db", **options: Any) -> Mill:
        policy = {"batch": MOST, "retry_delays": [0.1], **options}
        made.append(Mill(database, broker or InMemoryBroker(), **policy))
        return made[-1]

    yield make
    for each in made:
        each.close()


def commits_with_effects(shop: Mill) -> list[int]:
    """How many effects each COMMIT of a handling committed; grows while it works."""
    counts: list[int] = []
    running: dict[int, int] = {}

    def executed(connection: Any, _: Any, statement: str, *__: Any) -> None:
        if statement.startswith("INSERT INTO effect"):
            running[id(connection)] = running.get(id(connection), 0) + 1

    def committed(connection: Any) -> None:
        if effects := running.pop(id(connection), 0):
            counts.append(effects)

    event.listen(shop.engine, "after_cursor_execute", executed)
    event.listen(shop.engine, "commit", committed)
    event.listen(shop.engine, "rollback", lambda connection: running.pop(id(connection), None))
    return counts


def handled(shop: Mill, count: int) -> None:
    wait_until(lambda: shop.effects().total() == count and shop.depth(QUEUE) == 0, "all are handled")


def test_takes_what_is_there(mill: Callable[..., Mill]) -> None:
    """As many as the policy says, while there are so many."""
    shop = mill()
    counts = commits_with_effects(shop)
    shop.send([FINE] * 50)
    with shop.working(threads=1):
        handled(shop, 50)
    assert counts == [20, 20, 10]
    assert set(shop.effects().values()) == {1}
    assert shop.outputs().total() == 50


def test_outputs_do_not_wait_for_what_runs_alone(mill: Callable[..., Mill]) -> None:
    """What a batch committed is sent, and told to the broker, before the one that failed runs again by itself."""
    shop = mill(claim_wait="1ms")
    guilty = shop.send([ALWAYS])[ALWAYS][0].message_id
    shop.send([FINE] * 9)

    def during(message: dict[str, Any], run: int) -> None:
        if shop.runs[-1] == (guilty, 2):
            wait_until(lambda: shop.outputs().total() == 9, "the others' outputs are there")

    shop.during = during
    with shop.working(threads=1):
        wait_until(lambda: shop.depth(f"{QUEUE}.dead") == 1 and shop.depth(QUEUE) == 0, "all are handled or parked")
    assert shop.effects().total() == 9


def test_more_than_the_setting_is_sent_ahead(mill: Callable[..., Mill]) -> None:
    """Two batches: one waits for its confirms while the next one is handled."""
    shop = mill(settings={"prefetch": 5}, batch=300)
    assert shop.app.prefetch == 600
    assert mill(settings={"prefetch": 5}, batch=1).app.prefetch == 5


@pytest.mark.parametrize("server", [False, True], ids=["memory", "rabbitmq"])
def test_some_fail(mill: Callable[..., Mill], server: bool, request: pytest.FixtureRequest) -> None:
    """Those that fail come again or are parked, all others are handled, whatever batch they are in."""
    given: dict[str, Any] = {}
    if server:
        given["broker"] = KombuBroker(request.getfixturevalue("rabbitmq_url"))
        given["database"] = request.getfixturevalue("postgresql_url")
    shop = mill(**given)
    sent = shop.send([FINE, FINE, FINE, ONCE, FINE, FINE, FINE, ALWAYS] * 10)
    fine = {str(message.message_id) for kind in (FINE, ONCE) for message in sent[kind]}
    with shop.working(threads=2):
        wait_until(lambda: shop.depth(f"{QUEUE}.dead") == 10 and len(shop.effects()) == 70, "all are handled or parked")
    assert shop.effects() == Counter(dict.fromkeys(fine, 1))
    assert shop.outputs().keys() == fine
    parked = shop.broker.browse(f"{QUEUE}.dead", 100)
    assert {message.message_id for message in parked} == {message.message_id for message in sent[ALWAYS]}
    assert {message.headers["idemp-dead-attempts"] for message in parked} == {3}


def test_other_types_between_them() -> None:
    """Messages are handled in the order in which they came; a type without batches ends what was gathered."""
    broker, order = InMemoryBroker(), []
    app = App("mixed", store=InMemoryStore(), broker=broker, settings=Settings())

    def handler(message: dict[str, Any], ctx: Context) -> None:
        order.append(message["n"])

    for name, policy in (("a", Idempotent(batch=10)), ("b", Idempotent(batch=4)), ("alone", None)):
        app.handler(dict, type=name, policy=policy)(handler)
    app.start()
    kinds = ["a", "b", "a", "alone", "a", "b", "b", "b", "b", "b", "alone", "alone", "a"]
    publish(broker, "mixed", [(kind, b'{"n": %d}' % number) for number, kind in enumerate(kinds)])
    worker = Worker([app], threads=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: len(order) == len(kinds), "all ran")
    worker.stop()
    thread.join()
    assert order == list(range(len(kinds)))
    assert broker.depth("mixed") == 0


def publish(broker: Any, queue: str, bodies: list[tuple[str, bytes]]) -> None:
    def output(name: str, body: bytes, id_: UUID) -> Output:
        message = Message(body=body, type=name, message_id=str(id_))
        return Output(id=id_, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message)

    outputs = [output(name, body, uuid4()) for name, body in bodies]
    assert not any(broker.publisher().publish(outputs, 10))


def test_the_worker_ends_in_a_handler(mill: Callable[..., Mill], caplog: pytest.LogCaptureFixture) -> None:
    """It is said of the one whose handler it was; all of its batch come again, and are handled once."""
    shop = mill()
    sent = shop.send([FINE] * 5)[FINE]
    guilty = sent[2].message_id

    def during(message: dict[str, Any], run: int) -> None:
        if shop.runs[-1] == (guilty, 1):
            raise KeyboardInterrupt

    shop.during = during
    worker = Worker([shop.app], threads=1)
    with caplog.at_level(logging.CRITICAL), pytest.raises(HandlerError, match="ended the process: KeyboardInterrupt"):
        worker.run()
    told = [record for record in caplog.records if getattr(record, "event", "") == "handler_ended_worker"]
    assert [record.message_id for record in told] == [guilty]  # type: ignore[attr-defined]
    assert (shop.effects().total(), shop.depth(QUEUE)) == (0, 5)
    with shop.working(threads=1):
        handled(shop, 5)
    assert set(shop.effects().values()) == {1}


def test_told_to_stop_within_a_batch(mill: Callable[..., Mill]) -> None:
    """What has begun is finished and acked; what was not begun is there for others, unhandled."""
    shop = mill()
    shop.send([FINE] * 50)
    begun, go = threading.Event(), threading.Event()

    def during(message: dict[str, Any], run: int) -> None:
        begun.set()
        assert go.wait(20)

    shop.during = during
    worker = Worker([shop.app], threads=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert begun.wait(20)
    worker.stop()
    go.set()
    thread.join(30)
    assert (shop.effects().total(), shop.outputs().total(), shop.depth(QUEUE)) == (20, 20, 30)


def test_the_database_goes_and_comes(
    mill: Callable[..., Mill], rabbitmq_url: str, postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a handler of a batch: all of it runs again when the database is back; effects once."""
    shop = mill(KombuBroker(rabbitmq_url), postgresql_url)
    sent = shop.send([FINE] * 30)[FINE]
    gone = threading.Event()

    def during(message: dict[str, Any], run: int) -> None:
        if len(shop.runs) == 7 and not gone.is_set():
            with shop.engine.connect() as connection:
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                )
            gone.set()

    shop.during = during
    with shop.working(threads=1):
        assert gone.wait(30)
        handled(shop, 30)
    assert shop.effects() == Counter({str(message.message_id): 1 for message in sent})
