"""The tasks of the tests of taskiq. `python -m tests.integrations.taskiq_tasks` keeps workers; see `forked.keep`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq.receiver import Receiver
from taskiq_aio_pika import AioPikaBroker, Queue, QueueType
from taskiq_redis import RedisAsyncResultBackend

from idemp import AsyncInbox
from idemp.integrations import taskiq as tested
from idemp.integrations.taskiq import RUNNING, install, session
from tests.integrations.forked import keep

URL = os.environ.get("IDEMP_DATABASE_URL", "sqlite+aiosqlite://")


def open_broker(url: str, results: str) -> AioPikaBroker:
    delays = Queue(name="taskiq.delay", type=QueueType.CLASSIC)
    found = AioPikaBroker(url, qos=4, delay_queue=delays).with_result_backend(RedisAsyncResultBackend(redis_url=results))
    return found.with_queues(Queue(type=QueueType.CLASSIC))


broker = open_broker(os.environ.get("SHOP_BROKER", "amqp://localhost"), os.environ.get("SHOP_BACKEND", "redis://localhost"))
broker.add_middlewares(SimpleRetryMiddleware())
engine = create_async_engine(URL, **eval(os.environ.get("SHOP_POOL", "{}")))
apart = create_async_engine(URL, poolclass=NullPool)
CONTEXT = TaskiqDepends()
between: dict[str, Callable[[], object]] = {}
"""What happens between COMMIT and send, as a task wants it."""


class Interrupted(tested.Idempotency):
    """Sends for tasks, in threads of asyncio, and for the relay."""

    def publish(self, outputs: Sequence[Any], timeout: float) -> Sequence[Any]:
        delivery = RUNNING.get()
        if threading.current_thread().name.startswith("asyncio") and delivery and (then := between.pop(delivery.id, None)):
            then()
        return super().publish(outputs, timeout)


tested.Idempotency = Interrupted  # type: ignore[misc]
idempotent = install(broker, AsyncInbox(engine))


async def change(what: str) -> None:
    await session().execute(text("INSERT INTO changed (what) VALUES (:what)"), {"what": what})


@broker.task("arrive")
async def arrive(what: str, context: Context = CONTEXT) -> None:
    """A task that is not idempotent: it counts each run."""
    async with apart.begin() as connection:
        row = {"message": context.message.task_id, "what": what}
        await connection.execute(text("INSERT INTO arrived (message, what) VALUES (:message, :what)"), row)


@broker.task("work", retry_on_error=True)
@idempotent("shop.work")
async def work(name: str, way: str, kill: bool = False, context: Context = CONTEXT) -> str:
    await change(name)
    if kill:
        between[context.message.task_id] = partial(os.kill, os.getpid(), signal.SIGKILL)
    if way == "retry" and not context.message.labels.get("_retries"):
        await arrive.kiq("never")
        raise LookupError(name)
    if way == "delay":
        await arrive.kicker().with_labels(delay=0.3).kiq(name)
    else:
        await arrive.kicker().with_task_id(f"{name} as it was").kiq(name)
    return f"{name}:done"


@broker.task("pay")
@idempotent("shop.pay", key="order_id")
async def pay(order_id: int, cents: int = 100, lock: int = 0) -> list[int]:
    await change(f"paid {order_id}")
    if lock:
        await wait(lock)
    await arrive.kiq(f"paid {order_id}")
    return [order_id, cents]


@broker.task("deferred")
@idempotent("shop.deferred")
async def deferred(what: str) -> str:
    await change(f"deferred {what}")
    await session().execute(text("INSERT INTO once (what) VALUES (:what)"), {"what": what})
    return what


WAIT = "SELECT pg_advisory_xact_lock_shared(:lock)"


async def wait(lock: int) -> None:
    await session().execute(text(WAIT), {"lock": lock})


def wait_apart(lock: int) -> None:
    with create_engine(URL).connect() as connection:
        connection.execute(text(WAIT), {"lock": lock})


@broker.task("storm")
@idempotent("shop.storm")
async def storm(number: int, lock: int, context: Context = CONTEXT) -> int:
    """Wait at one of three points until the test has killed the worker: before the change, behind it, and behind COMMIT."""
    point = number % 3
    if point == 0:
        await wait(lock)
    await change(f"storm {number}")
    await arrive.kiq(f"storm {number}")
    if point == 1:
        await wait(lock)
    if point == 2:
        between[context.message.task_id] = partial(wait_apart, lock)
    return number


def run_worker() -> None:
    async def listen() -> None:
        await Receiver(broker, max_async_tasks=4).listen(asyncio.Event())

    broker.is_worker_process = True
    asyncio.run(listen())


def main() -> None:
    keep(run_worker)


if __name__ == "__main__":
    import_module("tests.integrations.taskiq_tasks").main()
