"""How a relay learns that outputs were left to it: LISTEN/NOTIFY on PostgreSQL, within the process elsewhere."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, func, select
from sqlalchemy.exc import SQLAlchemyError

from idemp.forking import ForkAware, renewed_in_child
from idemp.inbox.sql import pooler
from idemp.inbox.sql.short import Short
from idemp.showing import logger

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from idemp.inbox.sql.tables import Tables

_SLICE_SECONDS: Final = 1.0

log = logger(__name__)


def pending_channel(tables: Tables, *, effects: bool = False) -> str:
    """The channel that a store notifies (`pg_notify(channel, '')`) once it has left outputs to the relay, or effects.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> pending_channel(Tables(prefix="billing_")), pending_channel(Tables(), effects=True)
        ('billing_pending', 'idemp_effects')
    """
    return f"{tables.prefix}{'effects' if effects else 'pending'}"


def wakeup_for(engine: Engine, tables: Tables, *, effects: bool = False) -> LocalWakeup:
    """What suits the engine's database and driver; for relays, or for who runs effects.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.tables import Tables
        >>> wakeup = wakeup_for(create_engine_safely("sqlite://"), Tables())
        >>> wakeup.announce()
        >>> wakeup.wait(10.0), wakeup.wait(0.0)
        (True, False)
    """
    if engine.dialect.name == "postgresql" and engine.dialect.driver == "psycopg":
        return PostgresWakeup(engine, pending_channel(tables, effects=effects))
    return LocalWakeup()


class LocalWakeup:
    """Wakes a thread of this process; others find out by their timeouts."""

    def __init__(self) -> None:
        self._changed = threading.Condition(renewed_in_child(threading.RLock()))
        self._announced = False
        self._closed = False

    def announce(self) -> None:
        """Wake whoever waits, or the next one who does."""
        with self._changed:
            self._announced = True
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether something was announced within `timeout` seconds, or since the last wait; `False` once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._announced or self._closed, timeout)
            announced = self._announced and not self._closed
            self._announced = False
        return announced

    def close(self) -> None:
        """Let go of what it holds, and of whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PostgresWakeup(LocalWakeup, ForkAware):
    """Listens on a connection of its own, outside of the pool.

    After each (re)connect `wait` answers at once: what was announced before could not be heard. Without a connection
    it waits its time out, as a relay that polls would. Behind a pooler it does so, too: LISTEN would stay on a server
    connection that belongs to another client next.
    """

    def __init__(self, engine: Engine, channel: str) -> None:
        super().__init__()
        self._engine = engine
        self._short = Short(engine)
        self._channel = channel
        self._notify = select(func.pg_notify(bindparam("channel"), ""))
        self._listening: Any = None  # psycopg's own connection
        self._turn = renewed_in_child(threading.Lock())
        self._outage = False  # one line in the log for each
        self._polls = False  # for good, behind a pooler
        self.track()

    def after_fork_in_child(self) -> None:
        """Listen on another connection from the next wait on; psycopg closes none that another process opened."""
        self._listening = None

    def announce(self) -> None:
        """Wake the relays on this database."""
        if self._polls:
            super().announce()
        self._short.run(lambda connection: connection.execute(self._notify, {"channel": self._channel}))

    def wait(self, timeout: float) -> bool:
        """Whether something was, or may have been, announced within `timeout` seconds; `False` once closed."""
        if self._polls or not self._turn.acquire(blocking=False):
            return super().wait(timeout)
        deadline = time.monotonic() + timeout
        try:
            listened = self._listen(deadline)
            if listened is not None:
                return listened
        except SQLAlchemyError as error:
            self._lost(error)
        except self._driver_errors() as error:
            self._lost(error)
        finally:
            self._turn.release()
        return super().wait(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Stop whoever waits, within a second, and close the connection."""
        super().close()
        with self._turn:
            if self._listening is not None:
                self._listening.close()
                self._listening = None

    def _listen(self, deadline: float) -> bool | None:
        """What `wait` answers; `None` where nothing can be heard."""
        if self._closed:
            return False
        if self._listening is None:
            self._listening = self._connected()
            self._outage = False
            return True if self._listening is not None else None
        while (remaining := deadline - time.monotonic()) > 0 and not self._closed:
            # In slices, so that close() is not kept waiting.
            if list(self._listening.notifies(timeout=min(remaining, _SLICE_SECONDS), stop_after=1)):
                return True
        return False

    def _connected(self) -> Any:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()
        try:
            connection.autocommit = True
            self._polls = pooler.is_driver_shared(connection)
            if not self._polls:
                connection.execute(f"LISTEN {self._channel}")
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
        log.info(
            "a connection pooler stands before the database: polling for pending outputs",
            extra={"event": "polling_behind_pooler"},
        )
        return None

    def _lost(self, error: Exception) -> None:
        if not self._outage:
            log.warning(
                "not listening for pending outputs, polling until the database answers again: %s",
                error,
                extra={"event": "listening_lost"},
            )
        self._outage = True
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _driver_errors(self) -> Any:
        return self._engine.dialect.dbapi.Error if self._engine.dialect.dbapi is not None else ()
