"""A process that forks while it works: `python -m tests.forks.parent KIND NUMBERS CHILDREN`.

Each number is settled by two children at once. A child that is killed is replaced, and begins its numbers anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.forks import wired

KILLS = 6
PAUSE = 0.05


def work(numbers: Sequence[int]) -> None:
    """What a child does."""
    assert wired.SERVICE is not None
    for number in numbers:
        wired.SERVICE.work(number)


class Forked:
    """A child by the system call; it ends as Python does, with all that is registered for its end."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.exitcode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            work(numbers)
            sys.exit()

    def is_alive(self) -> bool:
        """Whether it runs."""
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if found:
            self.exitcode = os.waitstatus_to_exitcode(status)
        return not found


def starting(kind: str) -> Callable[[Sequence[int]], Any]:
    """What starts a child."""
    if kind == "os.fork":
        return Forked
    context: Any = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(["tests.forks.wired"])

    def start(numbers: Sequence[int]) -> Any:
        child = context.Process(target=work, args=(numbers,))
        child.start()
        return child

    return start


def main(kind: str, count: int, children: int) -> None:
    """Have all numbers settled, some by this process itself."""
    service = wired.SERVICE
    assert service is not None
    # SQLite can't be taken along while a thread has a transaction open: there the relay comes later.
    relays_late = service.engine.dialect.name == "sqlite"
    if not relays_late:
        service.relaying()
    start = starting(kind)
    shares = [list(range(place, count, children)) for place in range(children)] * 2
    for share in shares[children:]:
        random.shuffle(share)
    running = [(start(share), share) for share in shares]
    kills, own = KILLS, [number for number in range(count, count + count // 10) if number % 10 not in {3, 4}]
    mine = iter(own)
    while running:
        if (number := next(mine, None)) is not None:
            service.work(number)
        if kills and random.random() < 0.3:
            kills -= 1
            with suppress(ProcessLookupError):  # it was through before
                os.kill(random.choice(running)[0].pid, signal.SIGKILL)
        time.sleep(PAUSE)
        for child, share in list(running):
            if child.is_alive():
                continue
            running.remove((child, share))
            if child.exitcode == -signal.SIGKILL:
                running.append((start(share), share))
            elif child.exitcode:
                sys.exit(f"a child ended with {child.exitcode}")
    for number in mine:
        service.work(number)
    service.handle.flush()
    if relays_late:
        service.relaying()
    while service.store.upkeep.pending_count():
        time.sleep(PAUSE)
    (service.folder / "settled").write_text(json.dumps([*range(count), *own]))
    os._exit(0)  # the relay's thread goes on


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
