"""A parent of workers that are forked from it, so that they have imported everything. One that is killed has a successor."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


def keep(run_worker: Callable[[], object]) -> None:
    """Keep as many workers as the last line of the input says; print the pids of new ones. The end of the input ends all."""
    workers, wanted = set[int](), 0
    lock, over = threading.Lock(), threading.Event()

    def begin() -> None:
        while len(workers) < wanted:
            if not (pid := os.fork()):
                os.dup2(2, 1)
                try:
                    run_worker()
                finally:
                    os._exit(1)
            workers.add(pid)
            print(pid, flush=True)

    def succeed() -> None:
        while not over.wait(0.05):
            with lock:
                with suppress(ChildProcessError):
                    while pid := os.waitpid(-1, os.WNOHANG)[0]:
                        workers.discard(pid)
                begin()

    thread = threading.Thread(target=succeed)
    thread.start()
    for line in sys.stdin:
        with lock:
            wanted = int(line)
    over.set()
    thread.join()
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
