"""The worker of `async def` handlers: an event loop that runs them, beside the thread that consumes.

    consuming thread: take, accept ──► ready ──► event loop: claim, handler, store outputs, COMMIT; one task each
                      dispatch, settle ◄── finished ◄──┘

A group is what has finished since the last one was settled, and the loop takes what is ready without waiting for that.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from idemp.app import App
from idemp.errors import HandlerError
from idemp.events import log
from idemp.failures import Phase, decide
from idemp.messages import Delivery, Row
from idemp.ports import AsyncStore
from idemp.protocol import Protocol
from idemp.work import Work, batches
from idemp.worker.loop import POLL, Worker, type_names

__all__ = ["AsyncWorker"]

BLOCKED: Final = 1.0  # seconds for which a handler may keep the event loop to itself
TOGETHER: Final = 0.005  # seconds in which more may finish before a group is settled
LAST: Final = 0.5  # seconds of the grace time that are left for cancelled handlers
ALONE: Final = 10.0  # seconds for which a suspect has its process to itself; twice as long with each delivery
DOUBLINGS: Final = 5
PATIENCE: Final = 1.0  # seconds for which nothing is taken, so that a suspect can run alone; twice as long with each try in vain
LONGEST_PATIENCE: Final = 16.0
ROUNDS: Final = 3  # times as many deliveries in hand as run at once: ready, running and being settled


class AsyncWorker(Worker):
    """Consumes the queue of an app until it is stopped; its `async def` handlers share an event loop, plain ones have threads.

    Args:
        app: The consumer.

    Raises:
        ConfigurationError: The app has no handlers, a start-up check has a red finding, or the engine's pool is too small.

    Example:
        >>> AsyncWorker(App("orders"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the app 'orders' has no handlers: import the modules that define them
    """

    _awaits = True

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._async_store: AsyncStore[Any] = app.async_store()
        self._limit = self._async_store.limit(self.settings.concurrency)
        self._most = max(self._limit, *(handler.batch for handler in app.handlers.values()))
        self._in_hand = 0  # deliveries that were accepted and not settled
        self._settled = True  # whether anything was, the last time
        self._receiving = False
        self._suspect: Row | None = None  # it runs alone
        self._alone_until = 0.0
        self._patience, self._patient_until, self._next_patience = PATIENCE, 0.0, 0.0
        self._news = threading.Event()  # something has finished
        # Shared by the two threads:
        self._ready: deque[list[Work]] = deque()
        self._finished: deque[Work] = deque()
        self._gave_up = False
        # The event loop's, which others only look at:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        self._executor = ThreadPoolExecutor(self._limit + 1, "idemp-plain")
        self._tasks: dict[asyncio.Task[None], tuple[Protocol, list[Work]]] = {}
        self._places: set[Any] = set()  # of the claims that are running
        self._waiting: list[list[Work]] = []  # for a claim of the same id
        self._telling = False
        self._asked: float | None = None  # when the loop was asked for a sign of life
        self._warned = False

    def run(self) -> None:
        """Consume until `stop`; then finish what runs, and give the rest back.

        Raises:
            BaseException: What ended the process: SystemExit of a handler, MemoryError, an error in idemp.
        """
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._async_store.run(self._async_store.check)
            await self._loop.run_in_executor(self._executor, super().run)
        finally:
            self._executor.shutdown(wait=False)
            await self._async_store.close()

    @property
    def running(self) -> list[Work]:
        """The deliveries that are being claimed or handled."""
        return [protocol.running for protocol, _ in list(self._tasks.values()) if protocol.running is not None]

    def _silent(self) -> float:
        return time.monotonic() - self._seen  # handlers run beside it

    # The consuming thread

    def _run(self, deliveries: Sequence[Delivery]) -> None:
        self._receiving = False
        works = list(map(self.protocol.accept, deliveries))
        self._in_hand += len(works)
        self._finished += [work for work in works if work.error is not None]
        self._ready += batches(works)
        self._settle()
        while self._held and self._ready:  # the database takes no work
            with suppress(IndexError):  # the event loop was faster
                works = self._ready.popleft()
                self._in_hand -= len(works)
                self._held += [work.delivery for work in works]
        self._call(self._start)

    def _settle(self) -> None:
        """Dispatch and settle what has finished."""
        works = [self._finished.popleft() for _ in range(len(self._finished))]
        if not works:
            return
        held = [work for work in works if work.held]
        done = [work for work in works if not work.held]
        self._settled = bool(done)
        try:
            self.protocol.dispatch(done)
            if held := [*held, *self.protocol.settle(done)]:
                self._hold(held)
        finally:
            self._in_hand -= len(works)

    def _room(self) -> int:
        rounds = 1 if self._limit == 1 else ROUNDS
        room = rounds * self._most - self._in_hand + len(self._waiting)  # copies of one id are in nobody's way
        if self._keeps_free():
            room = 0
        if room <= 0:
            self._news.wait(POLL)
        self._news.clear()
        return room

    def _is_free(self) -> bool:
        """Return whether nothing else is in hand; or whether it was waited for that in vain for long."""
        return not self._in_hand or self._patience > LONGEST_PATIENCE

    def _take_suspect(self) -> list[Delivery]:
        """Return a suspect, alone or after long in company."""
        if not self._is_free():
            return []
        found = super()._take_suspect()
        if found and (row := found[0].row) is not None:
            if self._in_hand:
                self._held += found  # until it is noted that it has company
                self._scheduler.accompany(row)
                self._held.clear()
            else:
                self._suspect = row
                self._alone_until = time.monotonic() + ALONE * 2 ** max(0, min(row.deliveries - 2, DOUBLINGS))
        self._patience, self._patient_until = PATIENCE, 0.0
        return found

    def _keeps_free(self) -> bool:
        """Return whether nothing is to be taken: a suspect runs alone, or could if the others came to an end."""
        now = time.monotonic()
        if self._suspect is not None:
            if self._in_hand and now < self._alone_until:
                return True
            if self._in_hand:
                self._scheduler.accompany(self._suspect)
            self._suspect = None
        elif self._suspect_due and self._in_hand and now >= self._next_patience:
            self._patient_until = self._patient_until or now + self._patience
            if now < self._patient_until:
                return True
            self._next_patience, self._patient_until = now + self._patience, 0.0
            self._patience *= 2
        return False

    def _works_again(self) -> bool:
        return self._settled or not self._in_hand

    def _may_wait(self) -> bool:
        self._receiving = True  # from now on, what finishes wakes the receiver
        return not self._finished

    def _finish(self) -> None:
        """Wait for what runs; shortly before the grace time is over, cancel it. What is not settled is given back."""
        begun = threading.Event()
        self._call(begun.set)  # behind all starts
        begun.wait()
        while self._tasks:
            self._news.wait(POLL / 5)
            self._news.clear()
            self._settle()
            if not self._gave_up and time.monotonic() > self._deadline - LAST:
                self._gave_up = True
                self._call(self._cancel)
        self._settle()

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    # The thread of upkeep

    def _watch(self, now: float) -> None:
        super()._watch(now)
        if self._loop is None:
            return
        if self._asked is None:
            self._asked, self._warned = now, False
            self._call(self._answer)
        elif now - self._asked > BLOCKED and not self._warned:
            self._warned = True
            found = [works[0] for task, (_, works) in list(self._tasks.items()) if task is asyncio.current_task(self._loop)]
            id = found[0].delivery.properties.get("message_id") if found else None
            log("loop.blocked", type=type_names(found) or "a task of its own", id=id)

    # The event loop

    def _answer(self) -> None:
        self._asked = None

    def _start(self) -> None:
        """Start what is ready, as far as there is room."""
        assert self._loop is not None
        while self._ready and len(self._tasks) < self._limit and not self.stopping:
            try:
                works = self._ready.popleft()
            except IndexError:  # the consuming thread was faster
                return
            places = {claim.place for work in works for claim in (work.claim, work.claim and work.claim.former) if claim}
            if places & self._places:  # a copy would wait for the other one with a connection in its hands
                self._waiting.append(works)
                continue
            handler = works[0].handler
            assert handler is not None
            protocol = self.protocol.on(self._async_store) if handler.is_async else replace(self.protocol)
            task = self._loop.create_task(self._execute(protocol, works, places), name=handler.type, context=self._context.copy())
            self._tasks[task] = protocol, works
            self._places |= places

    async def _execute(self, protocol: Protocol, works: list[Work], places: set[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if protocol.wait is not None:
                await self._async_store.run(protocol.execute, works)
            else:
                run = contextvars.copy_context().run
                await asyncio.get_running_loop().run_in_executor(self._executor, run, protocol.execute, works)
        except asyncio.CancelledError:
            works = [] if self._gave_up else self._cancelled(works)
        except BaseException as error:  # noqa: BLE001 - the consuming thread raises it
            self._fail(error)
            works = []
        self.protocol.obstacle = protocol.obstacle or self.protocol.obstacle
        self._finished += works  # before it counts as done, because the worker may be stopping
        del self._tasks[task]
        self._places -= places
        self._ready.extendleft(reversed(self._waiting))
        self._waiting.clear()
        if not self._tasks or len(self._finished) >= self._limit:
            self._tell()
        elif not self._telling:  # soon, and together with what finishes until then
            self._telling = True
            asyncio.get_running_loop().call_later(TOGETHER, self._tell)
        if self._limit > 1:  # else outputs are settled first, because the next handler would have the only write lock
            self._start()

    def _tell(self) -> None:
        """Wake the consuming thread, because something has finished."""
        self._telling = False
        self._news.set()
        if self._receiving:
            self._receiving = False
            self._receiver.wake()

    def _cancelled(self, works: list[Work]) -> list[Work]:
        """Make a failure of a task that a handler has cancelled; of many deliveries, each runs again alone."""
        if len(works) > 1:
            again = [self.protocol.accept(work.delivery) for work in works]  # a handler may have changed the messages
            self._ready.extendleft([work] for work in reversed(again) if work.error is None)
            return [work for work in again if work.error is not None]
        error, work = HandlerError("the handler's own task was cancelled"), works[0]
        work.fail(error, decide(error, Phase.HANDLER, work.retry, work.history, self._store))
        return works

    def _cancel(self) -> None:
        for task, (protocol, _) in self._tasks.items():
            if protocol.wait is not None:  # a thread cannot be cancelled
                task.cancel()
