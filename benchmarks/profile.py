"""CPU time of a delivery by step: `python -m benchmarks.profile [groups|batches|lists]`.

Samples the stack by the CPU timer: self time of idemp and of the packages that it calls, and total time by step.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import idemp
from benchmarks.consumers.own import BATCHES, GROUPS, make_worker
from benchmarks.place import Place
from benchmarks.servers import running

PACKAGE = str(Path(idemp.__file__).parent)
STEPS = {
    "executor.py:Executor.accept": "accept",
    "sql/store.py:SqlStore.claim": "claim",
    "handlers.py:Handler.call": "handler, and its outputs",
    "sql/store.py:SqlStore.finish": "finish",
    "sql/guard.py:Unit.__enter__": "connection, transaction",
    "sql/guard.py:Unit.__exit__": "connection, transaction",
    "dispatcher.py:Dispatcher.send": "send outputs",
    "dispatcher.py:Dispatcher.confirm": "confirms",
    "worker/intake.py:Intake.take": "receive",
}


class Samples:
    """Counts samples by the innermost step, and by the package of the innermost frame."""

    def __init__(self) -> None:
        self.steps, self.own, self.functions = Counter[str](), Counter[str](), Counter[str]()

    def take(self, _signal: int, frame: FrameType | None) -> None:
        innermost, step = frame, "the rest"
        while frame is not None:
            name = _name(frame)
            if name in STEPS:
                step = STEPS[name]
                break
            frame = frame.f_back
        self.steps[step] += 1
        assert innermost is not None
        inside = innermost.f_code.co_filename.startswith(PACKAGE)
        self.own["idemp" if inside else "libraries"] += 1
        if inside:
            self.functions[_name(innermost)] += 1


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE + '/')}:{frame.f_code.co_qualname}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["groups", "batches"], default="groups", nargs="?")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    arguments: dict[str, Any] = GROUPS if options.way == "groups" else BATCHES
    samples = Samples()
    with running(options.disk) as servers:
        place = Place("profile", servers.database, servers.broker)
        place.make()
        worker = make_worker(place, **arguments)
        place.load(500)
        while worker.step(poll=0.5):
            pass
        place.load(options.messages)
        signal.signal(signal.SIGPROF, samples.take)
        start, busy = time.perf_counter(), time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
        left = options.messages
        while left > 0:
            left -= worker.step(poll=0.5)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        took, busy = time.perf_counter() - start, time.process_time() - busy
        worker.protocol.complete()
        worker.close()
        place.check()
    total = sum(samples.own.values())
    each = busy / options.messages * 1e6
    print(
        f"{options.messages / took:.0f} a second, {each:.0f} µs of CPU each; self time in idemp {samples.own['idemp'] / total:.0%}"
    )
    for counts in (samples.steps, samples.functions):
        print()
        for name, count in counts.most_common(12):
            print(f"{count / total * each:7.0f} µs  {name}")


if __name__ == "__main__":
    main()
