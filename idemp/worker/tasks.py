"""The runner of apps with `async def` handlers: an event loop that runs them, and a thread that consumes.

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
from typing import Any, Final

from idemp.errors import HandlerError
from idemp.events import log
from idemp.executor import Executor
from idemp.failures import Phase
from idemp.handling import Handling, batches
from idemp.messages import Delivery
from idemp.ports import AsyncStore
from idemp.protocol import Protocol
from idemp.worker.intake import HandlerRunner, Intake
from idemp.worker.shell import POLL, Stop

__all__ = ["Tasks"]

BLOCKED: Final = 1.0  # seconds for which a handler may keep the event loop to itself
TOGETHER: Final = 0.005  # seconds in which more may finish before a group is settled
LAST: Final = 0.5  # seconds of the grace time that are left for cancelled handlers
ROUNDS: Final = 3  # times as many deliveries in hand as run at once: ready, running and being settled


class Tasks(HandlerRunner):
    """Runs deliveries at once: `async def` handlers share an event loop, plain ones have threads.

    Args:
        protocol: Accepts, dispatches and settles.
        intake: Holds deliveries for the next turn.
        stop: Says when no more is begun.
        fail: Ends the worker with an error.
        store: Store of `async def` handlers.
        limit: Handlers that run at once.
        most: Deliveries of a round: as many, or one batch.

    Attributes:
        in_hand: Number of deliveries that were accepted and not settled.
        loop: The event loop, once it runs.

    Example:
        >>> Tasks.__name__
        'Tasks'
    """

    def __init__(
        self,
        protocol: Protocol,
        intake: Intake,
        stop: Stop,
        fail: Callable[[BaseException], None],
        store: AsyncStore[Any],
        limit: int,
        most: int,
    ) -> None:
        super().__init__()
        self._protocol, self._intake, self._stop, self._fail, self._store = protocol, intake, stop, fail, store
        self._limit, self._most = limit, most
        self._receiving = False
        self.news = threading.Event()  # something has finished
        # Shared by the two threads:
        self._ready: deque[list[Handling]] = deque()
        self._finished: deque[Handling] = deque()
        self._gave_up = False
        # The event loop's, which others only look at:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        self._threads = ThreadPoolExecutor(limit + 1, "idemp-plain")
        self.tasks: dict[asyncio.Task[None], tuple[Executor, list[Handling]]] = {}
        self._places: set[Any] = set()  # of the claims that are running
        self._waiting: list[list[Handling]] = []  # for a claim of the same id
        self._telling = False
        self._asked: float | None = None  # when the loop was asked for a sign of life
        self._warned = False

    def serve(self, consume: Callable[[], None]) -> None:
        """Consume in another thread than that of the event loop."""
        asyncio.run(self._serve(consume))

    async def _serve(self, consume: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await self._store.run(self._store.check)
            await self.loop.run_in_executor(self._threads, consume)
        finally:
            self._threads.shutdown(wait=False)
            await self._store.close()

    def running(self) -> list[Handling]:
        """Return the deliveries of all tasks."""
        return [executor.running for executor, _ in list(self.tasks.values()) if executor.running is not None]

    # The consuming thread

    def run(self, deliveries: Sequence[Delivery]) -> None:
        """Settle what has finished, and let the event loop start what was taken."""
        self._receiving = False
        self.news.clear()
        handlings = list(map(self._protocol.executor.accept, deliveries))
        self.in_hand += len(handlings)
        self._finished += [handling for handling in handlings if handling.error is not None]
        self._ready += batches(handlings)
        self._settle()
        while self._intake.held and self._ready:  # the database takes no work
            with suppress(IndexError):  # the event loop was faster
                handlings = self._ready.popleft()
                self.in_hand -= len(handlings)
                self._intake.held += [handling.delivery for handling in handlings]
        self._call(self._start)

    def _settle(self) -> None:
        """Dispatch and settle what has finished."""
        handlings = [self._finished.popleft() for _ in range(len(self._finished))]
        if not handlings:
            return
        try:
            self._protocol.executor.read_back(handlings)
            done = [handling for handling in handlings if not handling.held]
            self.settled = bool(done)
            self._protocol.dispatcher.dispatch(done)
            self._intake.hold([*(handling for handling in handlings if handling.held), *self._protocol.settler.settle(done)])
        finally:
            self.in_hand -= len(handlings)

    def room(self) -> int:
        """Return how many may be taken; copies of one id that wait for each other are in nobody's way."""
        return (1 if self._limit == 1 else ROUNDS) * self._most - self.in_hand + len(self._waiting)

    def wait(self) -> None:
        """Wait a moment for what finishes."""
        self.news.wait(POLL)

    def may_wait(self) -> bool:
        """Wait for messages until something finishes."""
        self._receiving = True  # from now on, what finishes wakes the receiver
        return not self._finished

    def finish(self) -> None:
        """Wait for what runs; shortly before the grace time is over, cancel it. What is not settled is given back."""
        begun = threading.Event()
        self._call(begun.set)  # after all starts
        begun.wait()
        while self.tasks:
            self.news.wait(POLL / 5)
            self.news.clear()
            self._settle()
            if not self._gave_up and time.monotonic() > self._stop.deadline - LAST:
                self._gave_up = True
                self._call(self._cancel)
        self._settle()

    def _call(self, function: Callable[[], object]) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function)

    # The thread of upkeep

    def watch(self, now: float) -> None:
        """Log a handler that blocks the event loop, once."""
        if self.loop is None:
            return
        if self._asked is None:
            self._asked, self._warned = now, False
            self._call(self._answer)
        elif now - self._asked > BLOCKED and not self._warned:
            self._warned = True
            blocking = [
                handlings[0] for task, (_, handlings) in list(self.tasks.items()) if task is asyncio.current_task(self.loop)
            ]
            type = blocking[0].handler.type if blocking and blocking[0].handler is not None else "a task of its own"
            log("loop.blocked", type=type, id=blocking[0].delivery.properties.get("message_id") if blocking else None)

    # The event loop

    def _answer(self) -> None:
        self._asked = None

    def _start(self) -> None:
        """Start what is ready, as far as there is room."""
        assert self.loop is not None
        while self._ready and len(self.tasks) < self._limit and not self._stop.asked:
            try:
                handlings = self._ready.popleft()
            except IndexError:  # the consuming thread was faster
                return
            places = {
                claim.place
                for handling in handlings
                for claim in (handling.claim, handling.claim and handling.claim.former)
                if claim
            }
            if places & self._places:  # a copy would wait for the other one with a connection in its hands
                self._waiting.append(handlings)
                continue
            handler = handlings[0].handler
            assert handler is not None
            executor = self._protocol.executor.for_task(self._store if handler.is_async else None)
            executor.lazy = bool(self.tasks)  # others are settled together with it
            task = self.loop.create_task(
                self._execute(executor, handlings, places), name=handler.type, context=self._context.copy()
            )
            self.tasks[task] = executor, handlings
            self._places |= places

    async def _execute(self, executor: Executor, handlings: list[Handling], places: set[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if executor.wait is not None:
                await self._store.run(executor.execute, [handlings])
            else:
                run = contextvars.copy_context().run
                await asyncio.get_running_loop().run_in_executor(self._threads, run, executor.execute, [handlings])
        except asyncio.CancelledError:
            handlings = [] if self._gave_up else self._cancelled(handlings)
        except BaseException as error:  # noqa: BLE001 - the consuming thread raises it
            self._fail(error)
            handlings = []
        self._finished += handlings  # before it counts as done, because the worker may be stopping
        del self.tasks[task]
        self._places -= places
        self._ready.extendleft(reversed(self._waiting))
        self._waiting.clear()
        if not self.tasks or len(self._finished) >= self._limit:
            self._tell()
        elif not self._telling:  # soon, and together with what finishes until then
            self._telling = True
            asyncio.get_running_loop().call_later(TOGETHER, self._tell)
        if self._limit > 1:  # else outputs are settled first, because the next handler would have the only write lock
            self._start()

    def _tell(self) -> None:
        """Wake the consuming thread, because something has finished."""
        self._telling = False
        self.news.set()
        if self._receiving:
            self._receiving = False
            self._intake.receiver.wake()

    def _cancelled(self, handlings: list[Handling]) -> list[Handling]:
        """Make a failure of a task that a handler has cancelled; of many deliveries, each runs again alone."""
        if len(handlings) > 1:
            again = [
                self._protocol.executor.accept(handling.delivery) for handling in handlings
            ]  # a handler may have changed the messages
            self._ready.extendleft([handling] for handling in reversed(again) if handling.error is None)
            return [handling for handling in again if handling.error is not None]
        error, handling = HandlerError("the handler's own task was cancelled"), handlings[0]
        handling.phase = Phase.HANDLER
        handling.fail(error, handling.decide(error, self._store))
        return handlings

    def _cancel(self) -> None:
        for task, (executor, _) in self.tasks.items():
            if executor.wait is not None:  # a thread cannot be cancelled
                task.cancel()
