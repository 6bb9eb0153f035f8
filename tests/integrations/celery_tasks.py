"""The tasks of the tests of Celery. `python -m tests.integrations.celery_tasks` runs a worker for each line of its input.

The line holds options of `celery worker`. Workers are forked, so that they have imported everything; their pids are printed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import celery as canvas
from celery import Celery
from sqlalchemy import create_engine, text

from idemp import Inbox
from idemp.integrations import celery as tested
from idemp.integrations.celery import install, session

IMPORTED = (
    *(f"celery.{name}" for name in ("apps.worker", "bin.celery", "concurrency.prefork", "events.state", "worker.autoscale")),
    *(f"celery.worker.{name}" for name in ("components", "consumer", "consumer.tasks", "control", "strategy")),
    *(f"kombu.{name}" for name in ("asynchronous", "transport.pyamqp", "transport.redis")),
)
BACKEND = os.environ.get("SHOP_BACKEND", "cache+memory://")

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "memory://"), backend=BACKEND)
app.conf.update(
    task_time_limit=30,
    broker_transport_options={"confirm_publish": True, "visibility_timeout": 60},
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    result_extended=True,
)
app.conf.update({name: eval(value) for name, value in os.environ.items() if name.islower()})  # what a test sets
engine = create_engine(os.environ.get("IDEMP_DATABASE_URL", "sqlite://"))
between: list[Callable[[], object]] = []
"""What happens between COMMIT and send, as a task of this process wants it."""


class Interrupted(tested.CeleryBroker):
    """Sends for tasks, which run in the main thread, and for the relay, which is a thread."""

    def publish(self, outputs: Sequence[Any], timeout: float) -> Sequence[Any]:
        while between and threading.current_thread() is threading.main_thread():
            between.pop()()
        return super().publish(outputs, timeout)


tested.CeleryBroker = Interrupted  # type: ignore[misc]
idempotent = install(app, Inbox(engine))


def change(what: str) -> None:
    session().execute(text("INSERT INTO changed (what) VALUES (:what)"), {"what": what})


@app.task(shared=False, bind=True, acks_late=True, reject_on_worker_lost=True)
def arrive(self: Any, what: Any, *more: Any) -> str:
    """A task that is not idempotent: it counts each run."""
    with engine.begin() as connection:
        row = {"id": self.request.id, "what": f"{what}{''.join(more)}"}
        connection.execute(text("INSERT INTO arrived (id, what) VALUES (:id, :what)"), row)
    return f"{what}'"


def by_chord(name: str) -> None:
    canvas.chord([arrive.s(f"{name}/0"), arrive.s(f"{name}/1")], gather.s(name)).delay()


@app.task(shared=False)
def gather(results: list[str], name: str) -> None:
    arrive(f"{name}/{'+'.join(results)}")


WAYS: dict[str, Any] = {
    "delay": arrive.delay,
    "send_task": lambda name: app.send_task(arrive.name, [name]),
    "countdown": lambda name: arrive.apply_async((name,), countdown=0.5),
    "expires": lambda name: arrive.apply_async((name,), expires=60),
    "compressed": lambda name: arrive.apply_async((name,), compression="gzip"),
    "group": lambda name: canvas.group(arrive.s(f"{name}/{number}") for number in range(2)).delay(),
    "chain": lambda name: canvas.chain(arrive.s(name), arrive.s(), arrive.s()).delay(),
    "link": lambda name: arrive.apply_async((name,), link=arrive.s("/linked")),
    "chord": by_chord,
}


def follow_ups(way: str, name: str) -> list[str]:
    """Return what arrives, once each."""
    return {
        "group": [f"{name}/0", f"{name}/1"],
        "chain": [name, f"{name}'", f"{name}''"],
        "link": [name, f"{name}'/linked"],
        "chord": [f"{name}/0", f"{name}/1", f"{name}/{name}/0'+{name}/1'"],
        "outside": [name, f"{name}:done/linked"],
        "replace": [f"{name}/replaced", f"{name}/replaced'"],
    }.get(way, [name])


@app.task(shared=False, base=idempotent, bind=True, autoretry_for=(LookupError,), retry_kwargs={"countdown": 0, "max_retries": 2})
def work(self: Any, name: str, way: str, kill: bool = False) -> str:
    change(name)
    between[:] = [lambda: os.kill(os.getpid(), signal.SIGKILL)] if kill else []
    if way == "retry" and not self.request.retries:
        arrive.delay("never")
        raise self.retry(countdown=0.2)
    if way == "autoretry" and not self.request.retries:
        raise LookupError(name)
    if way == "replace":
        raise self.replace(canvas.chain(arrive.s(f"{name}/replaced"), arrive.s()))
    if way == "again" and not self.request.replaced_task_nesting:
        raise self.replace(self.s(name, "again"))
    WAYS.get(way, WAYS["delay"])(name)
    return f"{name}:done"


@app.task(shared=False, base=idempotent, idempotency_key="order_id")
def pay(order_id: int, cents: int = 100, lock: int = 0) -> list[int]:
    change(f"paid {order_id}")
    if lock:
        wait(session(), lock)
    return [order_id, cents]


@app.task(shared=False, base=idempotent, soft_time_limit=1)
def slow(lock: int) -> str:
    change("slow")
    wait(session(), lock)
    return "slow"


@app.task(shared=False, base=idempotent)
def deferred(what: str) -> str:
    change(f"deferred {what}")
    session().execute(text("INSERT INTO once (what) VALUES (:what)"), {"what": what})
    return what


@app.task(shared=False, base=idempotent, ignore_result=True)
def quiet(name: str) -> object:
    change(name)
    arrive.delay(name)
    return object()  # which no backend can store


def wait(connection: Any, lock: int) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": lock})


def wait_apart(lock: int) -> None:
    with engine.connect() as connection:
        wait(connection, lock)


@app.task(shared=False, base=idempotent)
def storm(number: int, lock: int) -> int:
    """Wait at one of three points until the test has killed the worker: before the change, behind it, and behind COMMIT."""
    point = number % 3
    if point == 0:
        wait(session(), lock)
    change(f"storm {number}")
    arrive.delay(f"storm {number}")
    if point == 1:
        wait(session(), lock)
    between[:] = [partial(wait_apart, lock)] if point == 2 else []
    return number


@app.task(shared=False, base=idempotent)
def warm() -> None:
    session().execute(text("SELECT 1"))


def main() -> None:
    warm.apply(throw=True)  # which imports what the first task needs
    for name in IMPORTED:
        import_module(name)
    workers = []
    for line in sys.stdin:
        if not (pid := os.fork()):
            os.setsid()
            os.dup2(2, 1)
            app.worker_main(["worker", "--without-gossip", "--without-mingle", "--without-heartbeat", *line.split()])
            os._exit(0)
        workers.append(pid)
        print(pid, flush=True)
    for pid in workers:  # the test has ended
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    import_module("tests.integrations.celery_tasks").main()  # not as `__main__`, which tasks cannot be named after
