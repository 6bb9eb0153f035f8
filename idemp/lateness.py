"""What a worker knows of ids beyond the retention window: the guard file, kept up to date, and perhaps the archive."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from idemp.errors import GuardUnusable
from idemp.forking import renewed_in_child
from idemp.lateguard import Guard
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from pathlib import Path
    from uuid import UUID

    from idemp.inbox.port import Claim, UnitOfWork

log = logger("idemp.protocol")


class LateGuard:
    """The guard of a worker. Safe to share between threads.

    A file that was made anew is read at the next late message. Only these are looked up at all: others cost nothing.

    Args:
        path: the guard file; it may come later.
        ask: asks the archive where the file says "perhaps": whether this consumer handled the id of this key. It is called
            in the delivery's transaction, and what it raises is a failure of the delivery. Without it such messages are
            parked.

    Example:
        >>> from pathlib import Path
        >>> guard = LateGuard(Path("/var/lib/shop/guard"))  # App("shop", guard=guard), or the setting `guard`
    """

    def __init__(self, path: Path, *, ask: Callable[[str, UUID], bool] | None = None) -> None:
        self._path = path
        self._ask = ask
        self._lock = renewed_in_child(threading.Lock())
        self._guard: Guard | None = None
        self._seen: object = ()  # which file it was that was read, or could not be
        self._why = ""

    def objection(self, unit: UnitOfWork, claims: Sequence[Claim], moment: datetime) -> str | None:
        """Why a late message may have been handled before; `None` if it certainly was not.

        Args:
            unit: has just claimed its ids.
            claims: the ids: the present one, and former ones that still count.
            moment: when the message was made.
        """
        # Asked for after the claims: a file that is older than some deletion does not reach as far as that one.
        purged = {claim.consumer: unit.purged_before(claim.consumer) for claim in claims}
        guard = self._current()
        if guard is None:
            return f"whether it was handled is not known ({self._why})"
        for claim in claims:
            if not guard.covers(claim.consumer, moment, purged[claim.consumer]):
                return f"whether it was handled is not known, since the guard {guard.path} does not reach there"
            if guard.perhaps(claim.consumer, claim.id.key):
                if self._ask is None:
                    return "by its guard it was probably handled"
                if self._ask(claim.consumer, claim.id.key):
                    return "by the archive it was handled"
        return None

    def _current(self) -> Guard | None:
        """The guard as its file is now."""
        seen = self._identity()
        if seen != self._seen:
            with self._lock:
                if seen != self._seen:
                    self._open()
                    self._seen = seen
        return self._guard

    def _identity(self) -> object:
        try:
            found = self._path.stat()
        except OSError as error:
            return type(error).__name__
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def _open(self) -> None:
        try:
            self._guard, self._why = Guard(self._path), ""
        except GuardUnusable as error:
            self._guard, self._why = None, error.message.rstrip(".")
            log.warning(
                "late messages are parked: %s", error, extra={"event": "guard_unusable", "path": str(self._path)}
            )
        else:
            about = self._guard.description
            log.info(
                "the guard %s knows %d ids",
                self._path,
                about.ids,
                extra={"event": "guard_read", "path": str(self._path), "ids": about.ids},
            )
