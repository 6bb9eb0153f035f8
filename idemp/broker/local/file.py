"""The file of the local broker: its tables and its transactions."""

from __future__ import annotations

import os
import random
import secrets
import sqlite3
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from idemp.broker.copies import dead_queue
from idemp.errors import BrokerReplaced, BrokerUnavailable, ConfigurationError
from idemp.files import OpenFile, identity_of, is_parents, leave_to_parent
from idemp.forking import ForkAware, renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from idemp.broker.port import Topology
    from idemp.files import Identity

SCHEME: Final = "local://"
DURABLE: Final = ("FULL", "EXTRA")
SYNCHRONOUS: Final = ("OFF", "NORMAL", *DURABLE)
APPLICATION_ID: Final = 0x69646D70
VERSION: Final = 1
PATIENCE: Final = 10.0
"""Seconds that a transaction waits for other writers."""

READY: Final = 0
DELAYED: Final = 1
LEASED: Final = 2

# Bodies have a table of their own: a lease rewrites the row of its message, and must not rewrite a megabyte.
# `due` is when a delayed message becomes ready, or when a lease runs out. Order within a queue is that of the ids.
# `lease` is the number of the lease; of a delayed message, its delay in milliseconds.
SCHEMA: Final = (
    "CREATE TABLE queues (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """CREATE TABLE bindings (exchange TEXT NOT NULL, pattern TEXT NOT NULL, queue INTEGER NOT NULL REFERENCES queues,
       PRIMARY KEY (exchange, pattern, queue)) WITHOUT ROWID""",
    """CREATE TABLE messages (id INTEGER PRIMARY KEY, queue INTEGER NOT NULL REFERENCES queues, state INTEGER NOT NULL,
       due REAL, owner TEXT, lease INTEGER, delivery_count INTEGER NOT NULL DEFAULT 0, properties TEXT NOT NULL)""",
    "CREATE TABLE bodies (id INTEGER PRIMARY KEY REFERENCES messages, body BLOB NOT NULL)",
    "CREATE INDEX messages_queue_state ON messages (queue, state, id)",
    f"CREATE INDEX messages_delayed ON messages (due) WHERE state = {DELAYED}",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
_IDENTITY: Final = "idemp.file."
TABLES: Final = frozenset({"queues", "bindings", "messages", "bodies"})

FREE: Final = f"state = {READY}, due = NULL, owner = NULL, lease = NULL"
"""What an UPDATE sets to make a message ready."""


_parents_connections: Final[list[sqlite3.Connection | None]] = []  # closing one in a child is not safe either


class FileBusy(BrokerUnavailable):
    """Other processes kept the file locked for longer than a transaction waits."""


def file_of(path_or_url: str | os.PathLike[str]) -> Path:
    """The file that a path or a URL names.

    Raises:
        ConfigurationError: it names no file.

    Example:
        >>> file_of("local:///var/lib/shop/queues.db"), file_of("local://queues.db"), file_of("queues.db")
        (PosixPath('/var/lib/shop/queues.db'), PosixPath('queues.db'), PosixPath('queues.db'))
    """
    text = os.fspath(path_or_url)
    name = unquote(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else text
    if not name or "://" in name or name.startswith(":"):
        raise ConfigurationError(
            f"{text!r} names no file for a local broker.", fix="Write local:///absolute/path/queues.db, or a path."
        )
    return Path(name)


class Link(ForkAware):
    """One SQLite connection with explicit transactions. Threads take turns by its lock.

    SQLite forbids to carry a connection into a forked child. So it is closed before a fork; the parent opens it again at
    the next transaction, and in the child the link is of no use any more.

    Args:
        path: the file; `prepare` made it.
        synchronous: what COMMIT waits for.
        identity: which file it was when the broker was made; default: the one that is there.

    Raises:
        BrokerUnavailable: the file can't be opened.
    """

    def __init__(self, path: Path, synchronous: str = "FULL", identity: Identity | None = None) -> None:
        self.lock = renewed_in_child(threading.RLock())
        self._path = path
        self._identity = identity
        self._synchronous = synchronous
        self._is_parents = False
        self._waits_for_fork = False
        self._is_closed = False
        self._connection: sqlite3.Connection | None = None
        self._open()
        self.track()

    @property
    def _raw(self) -> sqlite3.Connection:
        return self._connection or self._open()

    def _open(self) -> sqlite3.Connection:
        if self._is_closed:
            raise BrokerUnavailable(f"The connection to {self._path} is closed.", fix="Open another.")
        if self._is_parents:
            raise BrokerUnavailable(
                f"The connection to {self._path} belongs to the parent process.", fix="Open another."
            )
        if is_parents(self._path):
            raise BrokerUnavailable(
                f"{self._path} was in use when this process was forked, and SQLite can't go on with it here.",
                fix="Fork before the first use of the broker, or start the process with multiprocessing's spawn.",
            )
        try:
            self._connection = sqlite3.connect(self._path, timeout=0.0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise BrokerUnavailable(f"The file {self._path} can't be opened: {error}.") from error
        if self._identity is not None and identity_of(self._path) != self._identity:
            self._connection.close()
            self._connection = None
            raise BrokerReplaced.of(str(self._path))
        self._file = OpenFile(self._path, self._identity)
        self._set = ""
        return self._connection

    def before_fork(self) -> None:
        """Close the connection, unless this thread forks inside of a transaction."""
        self._waits_for_fork = self.lock.acquire(timeout=PATIENCE)
        if self._waits_for_fork and self._connection is not None and not self._connection.in_transaction:
            self._connection.close()
            self._connection = None

    def after_fork_in_parent(self) -> None:
        """Let other threads go on."""
        if self._waits_for_fork:
            self.lock.release()

    def after_fork_in_child(self) -> None:
        """Leave the leases behind it to the parent."""
        self._is_parents = True
        _parents_connections.append(self._connection)
        self._connection = None
        leave_to_parent(self._path)

    @contextmanager
    def transaction(
        self, patience: float = PATIENCE, *, kind: str = "IMMEDIATE", durable: bool = True
    ) -> Iterator[sqlite3.Connection]:
        """A transaction: COMMIT at the end, ROLLBACK on an error.

        Args:
            patience: seconds to wait for other writers.
            kind: "IMMEDIATE" to write, "DEFERRED" to read.
            durable: whether COMMIT waits for the disk. A power failure may undo others; they go to the disk with the
                next durable one.

        Raises:
            FileBusy: the file stayed locked for `patience` seconds; nothing was done.
            BrokerUnavailable: the transaction failed; when COMMIT failed, it may stand all the same.
            BrokerReplaced: the file was deleted or replaced; what this transaction committed counts for nothing.
        """
        with self.lock:
            raw = self._raw
            try:
                self._begin(patience, kind, durable=durable)
                yield raw
                raw.execute("COMMIT")
                self.check_file()
            except BaseException as error:
                with suppress(sqlite3.Error):
                    if raw.in_transaction:
                        raw.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise BrokerUnavailable(f"The local broker's file failed: {error}.") from error
                raise

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a SELECT finds."""
        with self.transaction(kind="DEFERRED") as raw:
            return raw.execute(sql, parameters).fetchall()

    def data_version(self) -> int | None:
        """A number that is another one after commits of other connections, the cheapest look there is; `None`: unknown.

        Raises:
            BrokerUnavailable: the file can't be read.
        """
        with self.lock:
            is_new = self._connection is None  # its numbers have nothing to do with those of the one before
            try:
                version = int(self._raw.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.Error as error:
                if is_busy(error):
                    return None
                raise BrokerUnavailable(f"The local broker's file failed: {error}.") from error
            return None if is_new else version

    def use_wal(self, patience: float = PATIENCE) -> None:
        """Have the file journalled in a write-ahead log, which it remembers.

        Raises:
            FileBusy: the file stayed locked.
            BrokerUnavailable: its file system does not support that.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                with self.lock:
                    (mode,) = self._raw.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.Error as error:
                _pause(error, deadline)
            else:
                if mode != "wal":
                    raise BrokerUnavailable("No write-ahead log is possible there.")
                return

    def close(self) -> None:
        """Close the connection. Repeating it is harmless."""
        with self.lock, suppress(sqlite3.Error):
            self._is_closed = True
            if self._connection is not None and not self._is_parents:
                self._connection.close()
                self._connection = None

    def check_file(self) -> None:
        """See that the file has not been deleted or replaced.

        Raises:
            BrokerReplaced: it has.
        """
        if self._connection is not None and (replaced := self._file.replaced()) is not None:
            raise BrokerReplaced.of(replaced)

    def _sync(self, *, durable: bool) -> None:
        wanted = self._synchronous if durable or self._synchronous not in DURABLE else "NORMAL"
        if wanted != self._set:
            self._raw.execute(f"PRAGMA synchronous = {wanted}")
            self._set = wanted

    def _begin(self, patience: float, kind: str, *, durable: bool) -> None:
        """BEGIN, and take the snapshot: whatever can be busy is busy here."""
        deadline = time.monotonic() + patience
        while True:
            try:
                if kind == "IMMEDIATE":
                    self._sync(durable=durable)
                self._raw.execute(f"BEGIN {kind}")
                if kind == "DEFERRED":
                    self._raw.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
                self._file.look()
            except sqlite3.Error as error:
                if self._raw.in_transaction:
                    self._raw.execute("ROLLBACK")
                _pause(error, deadline)
            else:
                return


def _pause(error: sqlite3.Error, deadline: float) -> None:
    """Before the next try, if there is any sense in one."""
    if not is_busy(error):
        raise error
    if time.monotonic() >= deadline:
        raise FileBusy("The local broker's file stayed locked by other processes.") from error
    time.sleep(random.uniform(0.0002, 0.002))  # noqa: S311 - spreads waiting writers


def is_busy(error: sqlite3.Error) -> bool:
    """Whether SQLite says that somebody else holds the file."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def prepare(path: Path) -> Identity | None:
    """Make the tables if the file is new; return which file it is. Processes that do this at once wait for each other.

    Raises:
        ConfigurationError: the file can't be used, or belongs to something else.
        FileBusy: it stayed locked.
    """
    try:
        with closing(Link(path)) as link:
            if not _is_ours(link, path):
                link.use_wal()
                with link.transaction() as raw:
                    if not raw.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
                        for statement in SCHEMA:
                            raw.execute(statement)
                _is_ours(link, path)
            return identity_of(path)
    except (FileBusy, BrokerReplaced):
        raise
    except (sqlite3.Error, BrokerUnavailable) as error:
        raise ConfigurationError(
            f"{path} can't be used for a local broker: {error.__cause__ or error}.",
            fix="Name a file of its own on a local disk.",
        ) from error


def _is_ours(link: Link, path: Path) -> bool:
    """Whether the tables are there; `False` for an empty file."""
    with link.transaction(kind="DEFERRED") as raw:
        names = {name for (name,) in raw.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")}
        application = raw.execute("PRAGMA application_id").fetchone()[0]
        version = raw.execute("PRAGMA user_version").fetchone()[0]
    names = {name for name in names if not name.startswith("sqlite_")}
    if not names and application in {0, APPLICATION_ID}:
        return False
    if names - TABLES or application != APPLICATION_ID:
        raise ConfigurationError(
            f"{path} holds something else than a local broker's queues: {', '.join(sorted(names)[:5])}.",
            fix="Give the broker a file of its own, never that of the inbox.",
        )
    if version != VERSION:
        raise ConfigurationError(f"{path} has the format {version}; this version of idemp knows {VERSION}.")
    return True


def declare(link: Link, topology: Topology) -> None:
    """Make queues, their dead-letter queues and bindings.

    Raises:
        ConfigurationError: a binding names a queue that does not exist.
    """
    with link.transaction() as raw:
        for name in topology.queues:
            raw.executemany("INSERT OR IGNORE INTO queues (name) VALUES (?)", [(name,), (dead_queue(name),)])
        for binding in topology.bindings:
            values = (topology.exchange, binding.routing_key, queue_id(raw, binding.queue))
            raw.execute("INSERT OR IGNORE INTO bindings (exchange, pattern, queue) VALUES (?, ?, ?)", values)


def identity(link: Link) -> str:
    """The id of the file, which gets one when it is first asked for.

    It is kept as the name of a queue that nothing is sent to: a former release refuses a file with further tables.
    """
    with link.transaction() as raw:
        found = raw.execute("SELECT name FROM queues WHERE name LIKE ?", (f"{_IDENTITY}%",)).fetchone()
        name = str(found[0]) if found else f"{_IDENTITY}{secrets.token_hex(8)}"
        if not found:
            raw.execute("INSERT INTO queues (name) VALUES (?)", (name,))
    return name.removeprefix(_IDENTITY)


def queue_id(raw: sqlite3.Connection, name: str) -> int:
    """The number of a queue.

    Raises:
        ConfigurationError: there is none of that name.
    """
    row = raw.execute("SELECT id FROM queues WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise ConfigurationError(f"The queue {name!r} does not exist.", fix="Declare it first.")
    return int(row[0])


def restore(raw: sqlite3.Connection, queues: Collection[int], now: float) -> None:
    """Make ready what waited for its time, and in these queues what was leased for too long."""
    raw.execute(f"UPDATE messages SET {FREE} WHERE state = {DELAYED} AND due <= ?", (now,))
    raw.execute(
        f"UPDATE messages SET {FREE} WHERE state = {LEASED} AND queue IN ({numbers(queues)}) AND due <= ?", (now,)
    )


def turn_back(raw: sqlite3.Connection, queues: Collection[int], now: float, lease: float) -> None:
    """Shorten what waits for longer than its delay, or than a lease lasts: the machine's clock was set back."""
    raw.execute(
        f"UPDATE messages SET due = ? + lease / 1000.0 WHERE state = {DELAYED} AND due > ? + lease / 1000.0", (now, now)
    )
    raw.execute(
        f"UPDATE messages SET due = ? WHERE state = {LEASED} AND queue IN ({numbers(queues)}) AND due > ?",
        (now + lease, now + lease),
    )


def numbers(values: Collection[int]) -> str:
    """Numbers as SQL has them in an IN list.

    Example:
        >>> numbers([3, 4])
        '3, 4'
    """
    return ", ".join(str(int(value)) for value in values)
