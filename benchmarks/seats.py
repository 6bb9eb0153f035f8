"""Consumers in processes of their own, which wait at a gate and are let through together."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.place import Place

START_SECONDS = 120.0
ROUND_SECONDS = 120.0


@dataclass
class Seat:
    """Connection of a consumer's process to the benchmark.

    Attributes:
        gate: Set while deliveries may be handled.
        stopped: Set at the end.
        redis: URL of a Redis, for consumers that keep records there.
    """

    name: str
    place: Place
    redis: str
    gate: Any
    stopped: Any
    left: Any
    finished: Any
    cpu: Any
    said: Any

    def ready(self) -> None:
        """Report that the consumer is connected."""
        self.cpu.value = time.process_time()
        self.said.send("")

    def settled(self, count: int = 1) -> None:
        """Count deliveries that are acked."""
        with self.left.get_lock():
            self.left.value -= count
            self.cpu.value = time.process_time()
            if self.left.value <= 0:
                self.finished.set()


class Consumers:
    """Processes of one consumer.

    Args:
        name: Name of the consumer, from which its queues and its table are named.
        consume: `module:function` or `module:function:argument` of `benchmarks.consumers`; called with a seat and the argument.
        processes: Number of processes.
        path: Folder in which the processes look for packages first.
        variables: Environment variables of the processes.
    """

    def __init__(
        self,
        name: str,
        consume: str,
        database: str,
        broker: str,
        *,
        redis: str = "",
        processes: int = 1,
        path: str = "",
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.name, kit = name, get_context("spawn")
        self.place = Place(name, database, broker, **options)
        self.place.make()
        self._gate, self._stopped, self._finished = kit.Event(), kit.Event(), kit.Event()
        self._left = kit.Value("q", 0)
        self._cpus = [kit.Value("d", 0.0) for _ in range(processes)]
        self._processes = []
        for cpu in self._cpus:
            heard, said = kit.Pipe(duplex=False)
            seat = Seat(name, self.place, redis, self._gate, self._stopped, self._left, self._finished, cpu, said)
            process = kit.Process(target=_sit, args=(consume, seat), daemon=True)
            with patch.object(sys, "path", [path, *sys.path] if path else sys.path), patch.dict(os.environ, variables or {}):
                process.start()
            self._processes.append(process)
            if not heard.poll(START_SECONDS) or (error := heard.recv()):
                self.close()
                raise RuntimeError(f"{name} did not start: {error}")

    def run(self, count: int, *, again: bool = False, meter: Callable[[], Sequence[float]] = tuple) -> list[float]:
        """Load orders and let the consumers have them.

        Returns:
            Seconds, seconds of CPU of the consumers, and what the meter counted meanwhile.
        """
        self._left.value = count  # set first, because a consumer may still be running
        self._finished.clear()
        self.place.load(count, again=again)
        first = meter()
        before, start = sum(cpu.value for cpu in self._cpus), time.perf_counter()
        self._gate.set()
        finished = self._finished.wait(ROUND_SECONDS)
        took = time.perf_counter() - start
        self._gate.clear()
        if not finished:
            raise RuntimeError(f"{self.name}: {self._left.value} of {count} were not handled in time")
        cpu = sum(cpu.value for cpu in self._cpus) - before
        return [took, cpu, *(late - early for early, late in zip(first, meter(), strict=True))]

    def close(self) -> None:
        self._stopped.set()
        self._gate.set()
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def package_of(tree: str) -> Iterator[str]:
    """Make a folder that has the package `idemp` of a checkout and nothing else that could be imported from there."""
    with tempfile.TemporaryDirectory(prefix="idemp-bench-") as folder:
        for name in ("idemp", "alembic"):
            Path(folder, name).symlink_to(Path(tree, name).resolve(strict=True))
        yield folder


def _sit(consume: str, seat: Seat) -> None:
    try:
        module, function, *arguments = consume.split(":")
        run: Callable[..., None] = getattr(import_module(f"benchmarks.consumers.{module}"), function)
        run(seat, *arguments)
    except Exception:
        seat.said.send(traceback.format_exc())
        raise
