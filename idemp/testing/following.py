"""Work that a handler hands to other threads is the handler's: pools that are older than it, and threads that it starts."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POOLS_WORK: Final = 1.0  # seconds that what was handed over may take to end
_THREADS_WORK: Final = 0.2


class Followed:
    """The threads that work for one run of a handler: its own, those that it starts, and a pool's while it does its work.

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

    def __init__(self) -> None:
        self._others: set[int | None] = set()
        self._handed: list[Future[Any]] = []

    def is_here(self) -> bool:
        """Whether the present thread works for the handler."""
        return threading.get_ident() not in self._others

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what is handed over while the block runs; then wait for it, though not for long."""
        self._others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        pool_class: Any = ThreadPoolExecutor
        submit: Any = ThreadPoolExecutor.submit

        @wraps(submit)
        def followed(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
            if not self.is_here():
                return submit(pool, function, *args, **options)
            future = submit(pool, self._as_own, function, *args, **options)
            self._handed.append(future)
            return future

        pool_class.submit = followed
        try:
            yield
        finally:
            pool_class.submit = submit
            futures.wait(self._handed, _POOLS_WORK)
            self._join()

    def _as_own(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        ident = threading.get_ident()
        was_other = ident in self._others
        self._others.discard(ident)
        try:
            return function(*args, **options)
        finally:
            if was_other:
                self._others.add(ident)

    def _join(self) -> None:
        for thread in threading.enumerate():
            target = getattr(thread, "_target", None)  # a pool's threads don't end
            if thread.ident in self._others or thread is threading.current_thread():
                continue
            if getattr(target, "__module__", None) != "concurrent.futures.thread":
                thread.join(_THREADS_WORK)
