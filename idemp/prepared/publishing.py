"""Publishers that producers and checkers share, one user at a time each."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from idemp.dispatch import watch_of, watched_publish
from idemp.forking import renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from idemp.app import App
    from idemp.broker.port import Publisher, Refusal
    from idemp.messages import Output


class Publishers:
    """As many publishers of an app's broker as are used at once. Safe to share between threads.

    Args:
        app: whose broker.

    Example:
        >>> from idemp import App
        >>> from idemp.broker.memory import InMemoryBroker
        >>> from idemp.inbox.memory import InMemoryStore
        >>> publishers = Publishers(App("orders", store=InMemoryStore(), broker=InMemoryBroker()))
        >>> with publishers.borrowed() as first:
        ...     pass
        >>> with publishers.borrowed() as second:
        ...     second is first
        True
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._idle: list[Publisher] = []
        self._lock = renewed_in_child(threading.Lock())

    def publish(self, outputs: Sequence[Output], timeout: timedelta) -> list[Refusal | None]:
        """Publish with confirms; per output `None` if the broker confirmed it, else why not. Never raises for that."""
        with self.borrowed() as publisher:
            watch = watch_of(self._app.telemetry, None, publisher)
            answers = watched_publish(watch, "prepared", publisher, outputs, timeout)
            lost = [place for place, answer in enumerate(answers) if answer is not None and answer.kind == "closed"]
            if lost:  # a connection that lay idle is lost without anybody's fault: the next one is new
                again = watched_publish(watch, "prepared", publisher, [outputs[place] for place in lost], timeout)
                for place, answer in zip(lost, again, strict=True):
                    answers[place] = answer
        return answers

    @contextmanager
    def borrowed(self) -> Iterator[Publisher]:
        """One for the block alone."""
        with self._lock:
            publisher = self._idle.pop() if self._idle else None
        if publisher is None:
            publisher = self._app.broker.publisher()
        try:
            yield publisher
        finally:
            with self._lock:
                self._idle.append(publisher)

    def keep_alive(self) -> None:
        """Service heartbeats of those that are idle; from any thread."""
        with self._lock:
            idle, self._idle = self._idle, []
        for publisher in idle:
            publisher.keep_alive()
        with self._lock:
            self._idle += idle

    def close(self) -> None:
        """Close those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for publisher in idle:
            publisher.close()
