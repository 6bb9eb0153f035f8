"""Leases of the local broker: who holds which messages until when, and whether the holder still lives."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import merge
from itertools import count, islice
from typing import TYPE_CHECKING, Final, assert_never
from uuid import uuid4

from idemp.broker.copies import dead_queue, parked, properties_text, restored, retried
from idemp.broker.local.file import DELAYED, FREE, LEASED, READY, Link, numbers, restore, turn_back
from idemp.broker.port import Ack, Park, Release, Retry
from idemp.errors import BrokerUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from idemp.broker.port import Settlement
    from idemp.clock import Clock
    from idemp.messages import Message

HELD: Final = f"id = ? AND state = {LEASED} AND owner = ? AND lease = ?"
ALIVE_PATIENCE: Final = 0.2
CLOSE_PATIENCE: Final = 2.0
_STEP_SECONDS: Final = 1.0


def owners_of(path: Path) -> Path:
    """The folder of the owners' lock files.

    Example:
        >>> from pathlib import Path
        >>> owners_of(Path("/var/lib/shop/queues.db"))
        PosixPath('/var/lib/shop/queues.db.owners')
    """
    return path.with_name(f"{path.name}.owners")


class LeaseLost(BrokerUnavailable):
    """A lease ran out and the message went to somebody else."""


_locks: set[int] = set()


def _leave_to_parent() -> None:
    """A forked child must not keep its parent's owners alive."""
    for file in _locks:
        os.close(file)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class Owner:
    """A name for leases, with a lock on a file that the kernel lets go when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._process = os.getpid()
        self.name = f"{os.getpid()}-{uuid4().hex}"
        self._path = folder / self.name
        try:
            folder.mkdir(exist_ok=True)
            for left in folder.iterdir():
                with dead_owner(folder, left.name):  # what crashed processes left behind
                    pass
            self._file = self._locked()
            _locks.add(self._file)
        except OSError as error:
            raise BrokerUnavailable(f"The lock file {self._path} can't be made: {error}.") from error

    def close(self) -> None:
        """Let go. Repeating it is harmless."""
        if self._file >= 0 and self._process == os.getpid():
            self._path.unlink(missing_ok=True)
            _locks.discard(self._file)
            os.close(self._file)
            self._file = -1

    def _locked(self) -> int:
        while True:
            file = os.open(self._path, os.O_CREAT | os.O_RDONLY, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_ino == self._path.stat().st_ino:
                    return file
            except FileNotFoundError:  # somebody who tidied up took it for a dead owner's before it was locked
                pass
            except BaseException:
                os.close(file)
                raise
            os.close(file)


@contextmanager
def dead_owner(folder: Path, name: str) -> Iterator[bool]:
    """Whether an owner is dead. If it is, its lock is ours inside the `with` block, and its file is gone afterwards."""
    path = folder / name
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def bury(link: Link, folder: Path, queues: Collection[int], *, but: str = "") -> bool:
    """Give back at once what dead owners hold in these queues; whether there were any."""
    found = False
    sql = f"SELECT DISTINCT owner FROM messages WHERE state = {LEASED} AND queue IN ({numbers(queues)}) AND owner <> ?"
    for (owner,) in link.rows(sql, (but,)):
        with dead_owner(folder, owner) as dead:
            if dead:
                found = True
                with link.transaction(durable=False) as raw:
                    raw.execute(
                        f"UPDATE messages SET {FREE} WHERE state = {LEASED} AND queue IN (SELECT id FROM queues)"
                        " AND owner = ?",
                        (owner,),
                    )
    return found


@dataclass(frozen=True, slots=True)
class Leased:
    """A message in the hands of an owner: the row `id`, leased under the number `lease`."""

    id: int
    lease: int
    owner: str
    queue: int
    delivery_count: int
    message: Message


class Holder:
    """Takes leases on messages of some queues, and ends them.

    Args:
        path: the broker's file.
        opens: opens a connection to it.
        queues: names of the queues by their numbers.
        seconds: how long a lease lasts without being renewed.
        clock: source of time, the same for all processes.
    """

    def __init__(
        self, path: Path, opens: Callable[[], Link], queues: dict[int, str], seconds: float, clock: Clock
    ) -> None:
        self.queues = queues
        self.seconds = seconds
        self.folder = owners_of(path)
        self._clock = clock
        self._leases = count(1)
        self._offset: float | None = None  # of the machine's clock from one that cannot be set
        self._owner = Owner(self.folder)
        try:
            self.link = opens()
        except BaseException:
            self._owner.close()
            raise

    @property
    def name(self) -> str:
        """The name of the owner."""
        return self._owner.name

    def now(self) -> float:
        """The time, as the file has it."""
        return self._clock.now().timestamp()

    def was_set_back(self, now: float) -> bool:
        """Return whether the machine's clock was set back since the last call; then delays and leases begin anew.

        Before the first call, when it may have been set back while no process looked, the delays do.
        """
        former, self._offset = self._offset, now - self._clock.monotonic()
        if former is None:
            self._turn_back((), now)
            return False
        if self._offset >= former - _STEP_SECONDS:
            return False
        self._turn_back(self.queues, now)
        return True

    def _turn_back(self, queues: Collection[int], now: float) -> None:
        try:
            with self.link.transaction(durable=False) as raw:
                turn_back(raw, queues, now, self.seconds)
        except BaseException:
            self._offset = None  # it is not done yet
            raise

    def bury(self) -> bool:
        """Give back at once what dead owners hold in our queues; whether there were any."""
        return bury(self.link, self.folder, self.queues, but=self.name)

    def lease(self, limit: int, wanted: Collection[str] | None = None) -> list[Leased]:
        """Lease up to `limit` ready messages, oldest first; with `wanted`, only those with these message ids."""
        now = self.now()
        with self.link.transaction(durable=False) as raw:  # a power failure ends all leases anyway
            restore(raw, self.queues, now)
            ids = list(islice(self._ready(raw, limit, wanted), limit))
            lease = next(self._leases)
            raw.executemany(
                f"UPDATE messages SET state = {LEASED}, due = ?, owner = ?, lease = ?,"
                " delivery_count = delivery_count + 1 WHERE id = ?",
                [(now + self.seconds, self.name, lease, number) for number in ids],
            )
            return [self._leased(raw, number, lease) for number in ids]

    def renew(self, patience: float = ALIVE_PATIENCE) -> set[tuple[int, int]]:
        """Make all leases last from now on; returns those that are still ours, as (id, lease)."""
        with self.link.transaction(patience, durable=False) as raw:
            rows = raw.execute(
                f"UPDATE messages SET due = ? WHERE state = {LEASED} AND queue IN ({numbers(self.queues)})"
                " AND owner = ? RETURNING id, lease",
                (self.now() + self.seconds, self.name),
            )
            return set(rows.fetchall())

    def settle(self, leased: Leased, settlement: Settlement) -> None:
        """End a lease.

        Raises:
            LeaseLost: it ran out and the message went to somebody else; nothing was changed.
        """
        held = (leased.id, leased.owner, leased.lease)
        with self.link.transaction() as raw:
            match settlement:
                case Ack():
                    changed = raw.execute(f"DELETE FROM messages WHERE {HELD}", held).rowcount
                    if changed:
                        raw.execute("DELETE FROM bodies WHERE id = ?", (leased.id,))
                case Retry():
                    copy = retried(leased.message, settlement, self._clock.now())
                    delay = settlement.delay.total_seconds()
                    changed = raw.execute(
                        f"UPDATE messages SET {FREE}, state = {DELAYED}, due = ?, lease = ?, properties = ? WHERE {HELD}",
                        (self.now() + delay, round(1000 * delay), properties_text(copy), *held),
                    ).rowcount
                case Park():
                    properties = properties_text(parked(leased.message, settlement))
                    target = _dead_queue_id(raw, self.queues[leased.queue])
                    changed = raw.execute(
                        f"UPDATE messages SET {FREE}, queue = ?, delivery_count = 0, properties = ? WHERE {HELD}",
                        (target, properties, *held),
                    ).rowcount
                case Release():
                    changed = raw.execute(f"UPDATE messages SET {FREE} WHERE {HELD}", held).rowcount
                case _:  # pragma: no cover - the type checker proves that there is no other
                    assert_never(settlement)
        if not changed:
            raise LeaseLost("Lease lost: the message was or will be delivered again.")

    def close(self) -> None:
        """Give everything back and let go of the file. What can't be given back now is when others find us gone."""
        with suppress(BrokerUnavailable), self.link.transaction(CLOSE_PATIENCE, durable=False) as raw:
            raw.execute(
                f"UPDATE messages SET {FREE} WHERE state = {LEASED} AND queue IN ({numbers(self.queues)})"
                " AND owner = ?",
                (self.name,),
            )
        self.link.close()
        self._owner.close()

    def _ready(self, raw: sqlite3.Connection, limit: int, wanted: Collection[str] | None) -> Iterator[int]:
        """Ready ids of all queues in order; a queue each, for one ORDER BY over several would sort them all."""
        chosen = ""
        values: tuple[str, ...] = ()
        if wanted is not None:
            chosen = "AND json_extract(properties, '$.message_id') IN (SELECT value FROM json_each(?))"
            values = (json.dumps(list(wanted)),)
        sql = f"SELECT id FROM messages WHERE queue = ? AND state = {READY} {chosen} ORDER BY id LIMIT ?"
        found = [raw.execute(sql, (queue, *values, limit)).fetchall() for queue in self.queues]
        return merge(*([number for (number,) in rows] for rows in found))

    def _leased(self, raw: sqlite3.Connection, number: int, lease: int) -> Leased:
        queue, delivery_count, properties, body = raw.execute(
            "SELECT queue, delivery_count, properties, body FROM messages JOIN bodies USING (id) WHERE id = ?",
            (number,),
        ).fetchone()
        return Leased(number, lease, self.name, queue, delivery_count, restored(properties, body))


def messages(raw: sqlite3.Connection, queue: int, limit: int) -> Sequence[Message]:
    """Up to `limit` ready messages of a queue, oldest first."""
    rows = raw.execute(
        f"SELECT properties, body FROM messages JOIN bodies USING (id) WHERE queue = ? AND state = {READY}"
        " ORDER BY messages.id LIMIT ?",
        (queue, limit),
    )
    return [restored(properties, body) for properties, body in rows]


def _dead_queue_id(raw: sqlite3.Connection, queue: str) -> int:
    name = dead_queue(queue)
    raw.execute("INSERT OR IGNORE INTO queues (name) VALUES (?)", (name,))
    return int(raw.execute("SELECT id FROM queues WHERE name = ?", (name,)).fetchone()[0])
