"""Variants whose consumers run in processes of their own: several at once, or another framework's."""

from __future__ import annotations

import threading
import traceback
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, Protocol

import psutil

from benchmarks.gate import Gate
from benchmarks.plain import Bare
from benchmarks.variants import Block, Variant, place_of
from benchmarks.work import Place
from benchmarks.wrapped import Wrapped
from idemp.inbox.sql import create_engine_safely

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 20.0
_HEARTBEAT_SECONDS: Final = 5.0


class GaveUp(Exception):
    """A consumer's process ended, or never was ready."""


@dataclass(frozen=True)
class Seat:
    """What a consumer's process is given.

    Attributes:
        name: of the variant.
        database: URL.
        broker: URL.
        redis: URL of a Redis for what keeps its records there.
        gate: what lets deliveries through.
        threads: how many are to consume.
        saying: to be told when all is connected, or what went wrong.
    """

    name: str
    database: str
    broker: str
    redis: str
    gate: Gate
    threads: int
    saying: Connection

    def place(self, **options: Any) -> Place:
        """Queues and table, which exist."""
        return place_of(self.name, create_engine_safely(self.database), self.broker, **options)

    def ready(self) -> None:
        """Everything is connected."""
        self.saying.send("")

    def settled(self) -> None:
        """One more delivery."""
        self.gate.settled()


class Consumer(Protocol):
    """What runs in the process until the gate is taken down; a function of a module, so that it can be named there."""

    def __call__(self, seat: Seat) -> None:
        """Consume."""
        ...


class Outside(Variant):
    """Processes that are started once, wait at the gate and are let through together.

    Args:
        place: the queues and the table that are its own.
        consumer: what each of them runs.
        database: URL.
        redis: URL, where the consumer has a use for it.
        processes: how many.
        threads: that each is to have.

    Raises:
        GaveUp: one of them did not get ready; with its traceback.
    """

    def __init__(
        self,
        place: Place,
        consumer: Consumer,
        database: str,
        *,
        redis: str = "",
        processes: int = 1,
        threads: int = 1,
    ) -> None:
        super().__init__(place)
        kit = get_context("spawn")
        self._gate = Gate(kit)
        self._each = processes * threads
        self._processes: list[Any] = []
        self._hearing = []
        for _ in range(processes):
            hearing, saying = kit.Pipe(duplex=False)
            seat = Seat(place.name, database, place.broker_url, redis, self._gate, threads, saying)
            process = kit.Process(target=_seated, args=(consumer, seat), daemon=True)
            process.start()
            saying.close()
            self._processes.append(process)
            self._hearing.append(hearing)
        try:
            for hearing in self._hearing:
                self._hear(hearing, _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, count: int) -> Block:
        """So many for each of its threads."""
        return super().run(self._each * count)

    def measured(self, count: int) -> Block:
        """CPU time is that of the processes."""
        before = self._cpu_seconds()
        seconds = self.consume(count)
        return Block(seconds / count, (self._cpu_seconds() - before) / count)

    def consume(self, count: int) -> float:
        """Let them."""
        return self._gate.let(count, self._watch)

    def close(self) -> None:
        """End the processes."""
        self._gate.stopped.set()
        self._gate.opened.set()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        super().close()

    def _cpu_seconds(self) -> float:
        """In steps of a hundredth of a second: the system counts it so."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def _watch(self) -> None:
        for hearing in wait(self._hearing, timeout=0):
            self._hear(hearing, 0.0)

    @staticmethod
    def _hear(hearing: Any, seconds: float) -> None:
        if not hearing.poll(seconds):
            raise GaveUp(f"not ready within {seconds:g} s")
        try:
            said = hearing.recv()
        except EOFError:
            said = "its process ended without a word"
        if said:
            raise GaveUp(said)


def _seated(consumer: Consumer, seat: Seat) -> None:
    try:
        consumer(seat)
    except BaseException:
        seat.saying.send(traceback.format_exc())
        raise


def bare(seat: Seat) -> None:
    """Bare handlers, each thread with connections of its own."""
    consumers = [Bare(seat.place()) for _ in range(seat.threads)]
    threads = [threading.Thread(target=each.consume_behind, args=(seat.gate,)) for each in consumers]
    _run(threads, seat)
    for each in consumers:
        each.close()


def wrapped(seat: Seat) -> None:
    """The same with idemp."""
    with closing(Wrapped(seat.place(), threads=seat.threads, gate=seat.gate)) as consumer:
        seat.ready()
        while not seat.gate.stopped.wait(_HEARTBEAT_SECONDS):
            consumer.keep_alive()


def _run(threads: list[threading.Thread], seat: Seat) -> None:
    for thread in threads:
        thread.start()
    seat.ready()
    for thread in threads:
        thread.join()


def several(consumer: Consumer, *, processes: int = 1, threads: int = 1) -> Callable[[Place, str], Variant]:
    """A variant that is told its database."""
    return lambda place, database: Outside(place, consumer, database, processes=processes, threads=threads)
