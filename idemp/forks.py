"""Forks: a child process uses nothing that its parent has opened, and closes nothing of it, because that would end it for both."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["forget_in_children"]


class Forgetful(Protocol):
    """What has opened something that belongs to this process."""

    def forget(self) -> None:
        """Forget it, and keep it from being closed; called in a child, before anything else runs there."""


_OWNERS: WeakSet[Forgetful] = WeakSet()


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


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.forget()


os.register_at_fork(after_in_child=_forked)
