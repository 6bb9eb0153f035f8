"""Forks: a child process uses nothing that its parent has opened, and closes nothing of it, because that would end it for both."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["forget_in_children", "let_go", "pause_at_forks"]


class Forgetful(Protocol):
    """An object that has opened something which belongs to this process."""

    def forget(self) -> None:
        """Forget it, and keep it from being closed; called in a child, before anything else runs there."""


class Pausing(Protocol):
    """A thread of ours, which must be in no library's lock when the process forks: the child would wait for it for ever."""

    def pause(self) -> None:
        """Wait for the end of what the thread does, some seconds at most, and let it begin nothing."""

    def resume(self) -> None:
        """Let it go on, in the parent."""


_OWNERS: WeakSet[Forgetful] = WeakSet()
_THREADS: WeakSet[Pausing] = WeakSet()


def forget_in_children(owner: Forgetful) -> None:
    """Let an object forget what it has opened, in each process that is forked from this one while the object lives.

    Example:
        >>> class Owner:
        ...     connection: object = None
        ...     def forget(self) -> None:
        ...         self.connection = None
        >>> forget_in_children(Owner())
    """
    _OWNERS.add(owner)


def let_go(engine: Engine | AsyncEngine) -> object:
    """Begin a new pool, and return the former one, whose connections were open at a fork: they are shared.

    While it is kept, nothing closes them. Some drivers close with a word to the server, which would end the parent's connection.

    Example:
        >>> from sqlalchemy import create_engine
        >>> engine = create_engine("sqlite:///shop.db")
        >>> let_go(engine) is engine.pool
        False
    """
    engine = getattr(engine, "sync_engine", engine)
    former = engine.pool
    engine.dispose(close=False)
    return former


def pause_at_forks(thread: Pausing) -> None:
    """Pause a thread while this process forks, as long as the object lives.

    Example:
        >>> class Thread:
        ...     def pause(self) -> None: ...
        ...     def resume(self) -> None: ...
        >>> pause_at_forks(Thread())
    """
    _THREADS.add(thread)


def _each(threads: list[Pausing], method: str) -> None:
    with ExitStack() as stack:
        for thread in threads:
            stack.callback(getattr(thread, method))


def _forked() -> None:
    with ExitStack() as stack:  # an error of one keeps no other from forgetting
        for owner in list(_OWNERS):
            stack.callback(owner.forget)


os.register_at_fork(
    before=lambda: _each(list(_THREADS), "pause"),
    after_in_parent=lambda: _each(list(_THREADS), "resume"),
    after_in_child=_forked,
)
