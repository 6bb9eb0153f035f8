"""The actors of the tests of dramatiq. `python -m tests.integrations.dramatiq_actors` keeps workers; see `forked.keep`."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import dramatiq
from dramatiq import Retry, Worker, WorkerThread
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from sqlalchemy import create_engine, text

from idemp import Inbox
from idemp.integrations import dramatiq as tested
from idemp.integrations.dramatiq import install, session
from tests.integrations.forked import keep


def open_broker(url: str) -> RabbitmqBroker | RedisBroker:
    """Return a broker; on Redis, what a killed worker had comes back after a second."""
    if url.startswith("redis"):
        return RedisBroker(url=url, heartbeat_timeout=1000, maintenance_chance=1_000_000)
    return RabbitmqBroker(url=url, confirm_delivery=True)


broker = open_broker(os.environ.get("SHOP_BROKER", "amqp://localhost"))
broker.add_middleware(CurrentMessage())
broker.add_middleware(Results(backend=RedisBackend(url=os.environ.get("SHOP_BACKEND", "redis://localhost")), store_results=True))
dramatiq.set_broker(broker)
options = eval(os.environ.get("SHOP_POOL", "{}"))
engine = create_engine(os.environ.get("IDEMP_DATABASE_URL", "sqlite://"), **options)
between: dict[int, Callable[[], object]] = {}
"""What happens between COMMIT and send, as an actor of a thread wants it."""


class Interrupted(tested.IdempotentActors):
    """Sends for actors, in their threads, and for the relay."""

    def publish(self, outputs: Sequence[Any], timeout: float) -> Sequence[Any]:
        if isinstance(threading.current_thread(), WorkerThread) and (then := between.pop(threading.get_ident(), None)):
            then()
        return super().publish(outputs, timeout)


tested.IdempotentActors = Interrupted  # type: ignore[misc]
idempotent = install(broker, Inbox(engine))


def change(what: str) -> None:
    session().execute(text("INSERT INTO changed (what) VALUES (:what)"), {"what": what})


@dramatiq.actor
def arrive(what: Any, *more: Any) -> str:
    """An actor that is not idempotent: it counts each run."""
    message = CurrentMessage.get_current_message()
    assert message is not None
    what = what["args"][0] if isinstance(what, dict) else what  # as a callback has it
    with engine.begin() as connection:
        row = {"id": message.message_id, "what": f"{what}{''.join(more)}"}
        connection.execute(text("INSERT INTO arrived (id, what) VALUES (:id, :what)"), row)
    return f"{what}'"


WAYS: dict[str, Any] = {
    "send": arrive.send,
    "delay": lambda name: arrive.send_with_options(args=(name,), delay=300),
    "priority": lambda name: arrive.send_with_options(args=(name,), broker_priority=3),
    "group": lambda name: dramatiq.group(arrive.message(f"{name}/{number}") for number in range(2)).run(),
    "pipeline": lambda name: (arrive.message(name) | arrive.message() | arrive.message()).run(),
}


def follow_ups(way: str, name: str) -> list[str]:
    """Return what arrives, once each."""
    return {
        "group": [f"{name}/0", f"{name}/1"],
        "pipeline": [name, f"{name}'", f"{name}''"],
        "piped": [name, f"{name}:done"],
        "on_success": [name, f"{name}{name}:done"],
    }.get(way, [name])


@dramatiq.actor(min_backoff=10, max_backoff=20)
@idempotent("shop.work")
def work(name: str, way: str, kill: bool = False) -> str:
    message = CurrentMessage.get_current_message()
    assert message is not None
    change(name)
    if kill:
        between[threading.get_ident()] = partial(os.kill, os.getpid(), signal.SIGKILL)
    if way in ("retry", "error") and not message.options.get("retries"):
        arrive.send("never")
        raise Retry(delay=100) if way == "retry" else LookupError(name)
    WAYS.get(way, arrive.send)(name)
    return f"{name}:done"


@dramatiq.actor(max_retries=0, time_limit=1000)
@idempotent("shop.pay", key="order_id")
def pay(order_id: int, cents: int = 100, lock: int = 0) -> list[int]:
    change(f"paid {order_id}")
    if lock:
        wait(session(), lock)
    arrive.send(f"paid {order_id}")
    return [order_id, cents]


@dramatiq.actor(max_retries=0, time_limit=1000)
@idempotent("shop.slow")
def slow(lock: int) -> None:
    change("slow")
    for _ in range(100):
        session().execute(text("SELECT pg_sleep(0.05)"))
    wait(session(), lock)


@dramatiq.actor(max_retries=0)
@idempotent("shop.deferred")
def deferred(what: str) -> str:
    change(f"deferred {what}")
    session().execute(text("INSERT INTO once (what) VALUES (:what)"), {"what": what})
    return what


def wait(connection: Any, lock: int) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": lock})


def wait_apart(lock: int) -> None:
    with engine.connect() as connection:
        wait(connection, lock)


@dramatiq.actor
@idempotent("shop.storm")
def storm(number: int, lock: int) -> int:
    """Wait at one of three points until the test has killed the worker: before the change, behind it, and behind COMMIT."""
    point = number % 3
    if point == 0:
        wait(session(), lock)
    change(f"storm {number}")
    arrive.send(f"storm {number}")
    if point == 1:
        wait(session(), lock)
    if point == 2:
        between[threading.get_ident()] = partial(wait_apart, lock)
    return number


def run_worker() -> None:
    if isinstance(broker, RedisBroker):
        broker.broker_id = str(uuid.uuid4())  # as where each process imports the module
    broker.emit_after("process_boot")
    Worker(broker, worker_timeout=50, worker_threads=int(os.environ.get("SHOP_THREADS", "4"))).start()
    while True:
        signal.pause()


def main() -> None:
    keep(run_worker)


if __name__ == "__main__":
    import_module("tests.integrations.dramatiq_actors").main()
