"""Work that a handler hands to other threads is the handler's: threads that it starts, and older pools and event loops.

What an event loop is given runs in a context that was copied where it was given, and so is recognized. What a thread does
that was waiting for a condition, an event or a queue is not: that the handler woke it is all that is known.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from idemp.testing.outside import is_called_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WORK: Final = 1.0  # seconds that what was handed over, or a thread that was started, may take to end
_KNOWN_LONG: Final = 0.2  # seconds for work that once took longer: a handler is run many times
_TELEMETRY: Final = ("logging", "opentelemetry", "sentry_sdk", "ddtrace", "prometheus_client")
"""What hands to threads of its own what counts attempts, too."""
_UNSEEN: Final = (
    "What is done there could not be seen. In the test, have the handler do it itself, or start the thread."
)

_STILL_RUNS: Final = "What it does from then on could not be seen. In the test, have the handler wait for it."

_follows: ContextVar[Followed | None] = ContextVar("_follows", default=None)


class Followed:
    """The threads that work for one run of a handler: its own, those that it starts, and others while they do its work.

    Attributes:
        unseen: sentences about what was handed to a thread that could not be followed there.

    Example:
        >>> with ThreadPoolExecutor(1) as pool:
        ...     _ = pool.submit(int).result()
        ...     followed, seen = Followed(), []
        ...     with followed.following():
        ...         _ = pool.submit(lambda: seen.append(followed.is_here()))
        ...     _ = pool.submit(lambda: seen.append(followed.is_here())).result()
        >>> seen
        [True, False]
    """

    _long: Final[set[str]] = set()

    def __init__(self) -> None:
        self._others: set[int | None] = set()
        self._handed: list[Future[Any]] = []
        self.unseen: dict[str, None] = {}

    def is_here(self) -> bool:
        """Whether the present thread works for the handler."""
        return threading.get_ident() not in self._others or _follows.get() is self

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what is handed over while the block runs; then wait for it, though not for long."""
        self._others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        token = _follows.set(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(_replaced(ThreadPoolExecutor, "submit", self._submits))
                stack.enter_context(_replaced(asyncio.BaseEventLoop, "call_soon_threadsafe", self._calls_soon))
                stack.enter_context(_replaced(threading.Condition, "notify", self._notifies))
                yield
        finally:
            _follows.reset(token)
            self._wait()

    def _submits(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def followed(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
            if not self.is_here():
                return submit(pool, function, *args, **options)
            future = submit(pool, self._as_own, function, *args, **options)
            self._handed.append(future)
            return future

        return followed

    def _calls_soon(self, call_soon: Callable[..., Any]) -> Callable[..., Any]:
        def followed(loop: Any, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if not self.is_here() or getattr(loop, "_thread_id", None) not in self._others:
                return call_soon(loop, callback, *args, **options)
            ended: Future[Any] = Future()
            self._handed.append(ended)
            return call_soon(loop, self._in_loop, ended, loop, callback, args, **options)

        return followed

    def _in_loop(self, ended: Future[Any], loop: Any, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        before = asyncio.all_tasks(loop)
        try:
            callback(*args)
        finally:
            tasks = asyncio.all_tasks(loop) - before
            if tasks:
                gathered = asyncio.gather(*tasks, return_exceptions=True)
                gathered.add_done_callback(lambda _: ended.set_result(None))
            else:
                ended.set_result(None)
        if (
            not tasks and getattr(callback, "__module__", None) != "asyncio.futures"
        ):  # it tells one that waits its result
            self.unseen.setdefault(
                f"The handler called {_name(callback)} in an event loop of another thread. {_UNSEEN}"
            )

    def _notifies(self, notify: Callable[..., Any]) -> Callable[..., Any]:
        def followed(condition: Any, n: int = 1) -> None:
            frame = sys._getframe(1)  # noqa: SLF001 - the caller decides
            if condition._waiters and self.is_here():  # noqa: SLF001 - nothing else tells
                for name in self._waiting_for(condition):
                    if not any(is_called_by(frame, package) for package in _TELEMETRY):
                        self.unseen.setdefault(
                            f"The handler woke the thread {name!r}, which was there before. {_UNSEEN}"
                        )
            notify(condition, n)

        return followed

    def _waiting_for(self, condition: Any) -> list[str]:
        frames = sys._current_frames()  # noqa: SLF001 - there is no other way
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found = []
        for ident in frames.keys() & self._others:
            frame = frames[ident]
            if frame.f_code is threading.Condition.wait.__code__ and frame.f_locals.get("self") is condition:
                found.append(names.get(ident, "?"))
        return sorted(found)

    def _as_own(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        ident = threading.get_ident()
        was_other = ident in self._others
        self._others.discard(ident)
        try:
            return function(*args, **options)
        finally:
            if was_other:
                self._others.add(ident)

    def _wait(self) -> None:
        """Wait for what the handler has begun, and note what goes on."""
        until = time.monotonic() + _WORK

        def left(what: str) -> float:
            return max(0.0, min(until - time.monotonic(), _KNOWN_LONG if what in self._long else _WORK))

        def goes_on(what: str) -> None:
            self._long.add(what)
            self.unseen.setdefault(f"{what} still ran {_WORK:g} s after it. {_STILL_RUNS}")

        pools = "What the handler gave to a pool"
        if futures.wait(self._handed, left(pools)).not_done:
            goes_on(pools)
        for thread in threading.enumerate():
            if thread.ident in self._others or thread is threading.current_thread():
                continue
            work = getattr(thread, "_target", None) or type(thread)
            package = str(getattr(work, "__module__", "")).partition(".")[0]
            if package in {"concurrent", *_TELEMETRY}:  # a pool's threads don't end
                continue
            started = f"A thread that the handler started ({_name(work)})"
            thread.join(left(started))
            if thread.is_alive():
                goes_on(started)


@contextmanager
def _replaced(cls: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    method = getattr(cls, name)
    setattr(cls, name, wraps(method)(made(method)))
    try:
        yield
    finally:
        setattr(cls, name, method)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
