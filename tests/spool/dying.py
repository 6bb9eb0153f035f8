"""A spooler that dies by SIGKILL: `python -m tests.spool.dying BROKER DATABASE QUEUE POINT`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from idemp.broker.kombu import KombuBroker
from idemp.inbox.sql import create_engine_safely
from idemp.spool import Spooler, SpoolStore

CHUNK = 20
POINTS = ("received", "stored", "acked")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(SpoolStore):
    """Dies with the second chunk."""

    def __init__(self, url: str, point: str) -> None:
        super().__init__(create_engine_safely(url))
        self._point = point
        self._chunks = 0

    def append(self, *arguments: Any, **options: Any) -> bool:
        self._chunks += 1
        if self._chunks == 2 and self._point == "received":
            die()
        done = super().append(*arguments, **options)
        if self._chunks == 2 and self._point == "stored":
            die()
        return done


if __name__ == "__main__":
    broker, database, queue, point = sys.argv[1:]
    spooler = Spooler(KombuBroker(broker), DyingStore(database, point), queue, chunk=CHUNK)
    spooler.run(threading.Event(), told=lambda tally: die() if tally.stored >= 2 * CHUNK else None)
