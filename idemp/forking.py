"""Forked processes: what holds a socket, a file or a thread belongs to the process that opened it.

A child that uses its parent's connection mixes its frames with the parent's; one that closes it with a word of the protocol
closes it for the parent, too. So whatever keeps such a thing open derives from `ForkAware` and lets go of it in the child.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from logging import ERROR, WARNING
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakSet

from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ForkAware", "call_once", "check_process", "close_descriptor", "renewed_in_child"]

log = logger("idemp.forking")

L = TypeVar("L")
R = TypeVar("R")


class ForkAware:
    """A holder of resources that no forked child may use. It is tracked from `track()` on, by a weak reference.

    Example:
        >>> class Holder(ForkAware):
        ...     def after_fork_in_child(self):
        ...         self.socket = None
        >>> holder = Holder()
        >>> holder.track()
    """

    def track(self) -> None:
        """Have the methods below called at each fork of this process."""
        _tracked.add(self)

    def before_fork(self) -> None:
        """Close, in the parent, what a child could not let go of."""

    def after_fork_in_parent(self) -> None:
        """Undo `before_fork`, in the parent."""

    def after_fork_in_child(self) -> None:
        """Let go of what is the parent's, without a word to the other side."""


_tracked: Final[WeakSet[ForkAware]] = WeakSet()
_locks: Final[WeakSet[Any]] = WeakSet()
_process = os.getpid()


def renewed_in_child(lock: L) -> L:
    """Return the lock, which every forked child finds free: the thread that held it is not there.

    Example:
        >>> import threading
        >>> with renewed_in_child(threading.Lock()):
        ...     pass
    """
    _locks.add(lock)
    return lock


def check_process() -> None:
    """Do what belongs to a child's beginning if this is one that no Python code forked (uWSGI forks in C).

    Example:
        >>> check_process()
    """
    if os.getpid() != _process:
        _after_in_child()


def close_descriptor(sock: Any) -> None:
    """Close a socket's descriptor in a child: no shutdown, no TLS alert, so that the parent's connection lives on."""
    descriptor = sock.detach()
    if descriptor >= 0:
        os.close(descriptor)


def call_once(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function of the user's, which returns or raises once: a child that it forked ends where it would, too.

    Otherwise the child would go on with the delivery beside its parent, and then with the next ones. It ends with 0 where it
    returned, with the code of its `SystemExit`, or with 1 and a log line where it raised.

    Example:
        >>> call_once(len, "abc")
        3
    """
    process = os.getpid()
    try:
        result = function(*arguments)
    except BaseException as error:
        if os.getpid() != process:
            _end_child(function, error)
        raise
    if os.getpid() != process:
        _end_child(function, None)
    return result


def _end_child(function: Callable[..., Any], error: BaseException | None) -> None:
    asked = error.code if isinstance(error, SystemExit) else int(error is not None)
    code = asked if isinstance(asked, int) else int(asked is not None)
    name = getattr(function, "__qualname__", type(function).__name__)
    log.log(
        ERROR if code else WARNING,
        "A child that %s forked came to its end there; its parent goes on. End it with os._exit, or use multiprocessing",
        name,
        exc_info=error if code else None,
        extra={"event": "forked_child_ended", "handler": name, "code": code},
    )
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _before() -> None:
    for each in list(_tracked):
        with _alone(each):
            each.before_fork()


def _after_in_parent() -> None:
    for each in list(_tracked):
        with _alone(each):
            each.after_fork_in_parent()


def _after_in_child() -> None:
    global _process  # noqa: PLW0603 - there is one process
    _process = os.getpid()
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 - as logging and concurrent.futures do
    for each in list(_tracked):
        with _alone(each):
            each.after_fork_in_child()


@contextmanager
def _alone(resource: ForkAware) -> Iterator[None]:
    """The trouble of one is not that of the others: Python ignores what is raised here, and would leave them out."""
    try:
        yield
    except Exception:
        name = type(resource).__name__
        log.exception("%s did not follow a fork", name, extra={"event": "fork_not_followed", "by": name})


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
