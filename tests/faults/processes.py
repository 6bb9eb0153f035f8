"""Consumers in processes of their own, for SIGKILL; forked from a server that has imported everything."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from idemp.broker.kombu import KombuBroker
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.settings import Settings
from tests.faults.shop import SOON, Consumer, Shop, make_app
from tests.servers.forked import forking

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Event


def consume(database: str, broker: str, marks: int, ready: Event, begin: Event) -> None:
    """Steps for ever."""
    store = SqlStore(create_engine_safely(database))
    app = make_app(None, store, KombuBroker(broker, max_in_flight=1), Settings())
    app.registry.build({})
    consumer = Consumer(app, marks=marks)
    ready.set()
    begin.wait()
    while True:
        consumer.step()


class Process:
    """One consumer; it starts with `begin`."""

    def __init__(self, context: Any, shop: Shop, marks: int) -> None:
        self._ready, self._begin = context.Event(), context.Event()
        self._process = context.Process(target=consume, args=(*shop.urls, marks, self._ready, self._begin), daemon=True)
        self._process.start()
        assert self._ready.wait(SOON)

    def begin(self) -> None:
        self._begin.set()

    def kill(self) -> None:
        """SIGKILL, from any thread; only one thread may wait for the end: see `ended`."""
        os.kill(self._process.pid or 0, signal.SIGKILL)

    def ended(self) -> None:
        """It must have been killed."""
        self._process.join(SOON)
        assert self._process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


class Processes:
    """Makes them."""

    def __init__(self) -> None:
        self._context = forking(__name__)

    @contextmanager
    def running(self, shop: Shop, *, marks: int = 50) -> Iterator[Process]:
        process = Process(self._context, shop, marks)
        try:
            yield process
        finally:
            process.close()
