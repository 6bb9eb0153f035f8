"""A process that consumes in forked children, and goes on itself: `python -m tests.forks.parent os.fork|fork|forkserver`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext

import pika

from tests.forks import OWN, QUEUE, wired

CHILDREN = 3


def consume() -> None:
    """Handle the messages of the queue for ever."""
    connection = pika.BlockingConnection(pika.URLParameters(wired.settings.broker_url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=20)
    for method, _, body in channel.consume(QUEUE):
        try:
            wired.handle(body)
        except Exception:
            channel.basic_nack(method.delivery_tag)
        else:
            channel.basic_ack(method.delivery_tag)


def fork() -> Callable[[], bool]:
    """Fork a child; return what tells whether it lives."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        consume()
        os._exit(1)
    children.add(pid)

    def lives() -> bool:
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)
        return pid in children

    return lives


def start(context: BaseContext) -> Callable[[], bool]:
    process = context.Process(target=consume, daemon=True)  # type: ignore[attr-defined]
    process.start()
    return process.is_alive  # type: ignore[no-any-return]


children: set[int] = set()

if __name__ == "__main__":
    wired.use()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    way, own = sys.argv[1], iter(OWN)
    multiprocessing.set_forkserver_preload([wired.__name__])
    begin = fork if way == "os.fork" else lambda: start(multiprocessing.get_context(way))  # type: ignore[arg-type]
    running = [begin() for _ in range(CHILDREN)]
    try:
        while True:
            running = [lives if lives() else begin() for lives in running]
            if (number := next(own, None)) is not None:
                for _ in range(2):
                    wired.handle({"number": number})
            time.sleep(0.02)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
