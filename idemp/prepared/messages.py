"""Prepared messages: their producer, and the check of undecided ones.

    prepare ── BEGIN; barrier row; work; COMMIT ── ask ─┬─ commit: publish, end
                                                        ├─ rollback: end
    (died anywhere: the relay asks, when it is due)  ───┴─ unknown: ask later; too often: park

The barrier holds the decision. The producer and every checker ask it, so all of them get the same answer each time.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from sqlalchemy import Connection, exc
from sqlalchemy.orm import Session

from idemp.app import App
from idemp.context import Context, Message
from idemp.errors import ConfigurationError, Conflict, IdempError
from idemp.events import log
from idemp.handling import Handling
from idemp.identity import name_number, uuid7
from idemp.initiation import INITIATION
from idemp.messages import Delivery, Output, check_text
from idemp.policy import Duration, seconds
from idemp.ports import Claim
from idemp.prepared.barrier import SqlBarrier
from idemp.prepared.ports import Answer, Checker, Home, Prepared
from idemp.prepared.table import TableHome
from idemp.sql.engine import Database

__all__ = ["BarrierMissed", "Preparation", "PreparedMessages", "RolledBack", "Undecided"]

LIMIT: Final = 20  # messages that are checked in one round
PATIENCE: Final = 5.0  # seconds after which the rest of a round waits for its next check
RETENTION: Final = 30 * 86_400.0  # seconds for which a barrier keeps its rows
PURGE: Final = 3_600.0  # seconds between purges


class BarrierMissed(IdempError):
    """A block ended without an error, but the barrier has no commit of its work: it is unknown whether the work is committed.

    The message is parked. If the work is committed, send the message by `app.initiate()`, and pass the barrier in future.

    Example:
        >>> BarrierMissed.__mro__[1].__name__
        'IdempError'
    """


class RolledBack(IdempError):
    """The work comes too late: the checker found no commit, and decided on a rollback. Roll back, and do not use the key again.

    Example:
        >>> RolledBack.__mro__[1].__name__
        'IdempError'
    """


class Undecided(IdempError):
    """The outcome of the work is unknown for now. The checker will decide, and the message is published if the work was committed.

    A second call with the same key does not repeat committed work.

    Example:
        >>> Undecided.__mro__[1].__name__
        'IdempError'
    """


class PreparedMessages:
    """Messages that are published if, and only if, work in another database commits.

    Workers of the app check messages that a producer left undecided.

    Args:
        app: The app that publishes the messages.
        checker: A `SqlBarrier`, or a checker of yours that knows the outcome of the work.
        home: Store of waiting messages; by default the tables of the app.
        check_after: Time that the work has before the first check, and between checks.
        checks: Number of checks without a decision after which a message is parked.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> import tempfile
        >>> from sqlalchemy import create_engine, text
        >>> from idemp import Settings
        >>> from idemp.sql.engine import Database
        >>> from idemp.sql.schema import upgrade
        >>> folder = tempfile.TemporaryDirectory()
        >>> settings = Settings(database_url=f"sqlite:///{folder.name}/idemp.db")
        >>> upgrade(Database(settings.database_url))
        >>> shop = create_engine(f"sqlite:///{folder.name}/shop.db")
        >>> barrier = SqlBarrier(shop)
        >>> barrier.create()
        >>> prepared = PreparedMessages(App("orders", settings=settings), barrier)
        >>> def work(session: Session) -> None:
        ...     session.execute(text("CREATE TABLE orders (id TEXT)"))
        >>> for _ in range(2):
        ...     prepared.prepare({"order_id": "7"}, to="stock", type="stock.Reserve", key="7").submit(work)
        True
        False
        >>> shop.dispose()
        >>> folder.cleanup()
    """

    def __init__(
        self, app: App, checker: Checker, *, home: Home | None = None, check_after: Duration = "60s", checks: int = 15
    ) -> None:
        if not hasattr(checker, "ask"):
            raise ConfigurationError(f"{checker!r} cannot be asked: it needs a method ask(prepared)")
        if checks < 1:
            raise ConfigurationError(f"checks={checks}: at least one")
        if any(isinstance(getattr(chore, "__self__", None), PreparedMessages) for chore in app.chores):
            raise ConfigurationError(f"{app.name} has prepared messages with a checker: give these an App of their own")
        self.app, self.checker, self.checks = app, checker, checks
        self._home, self.check_after = home, seconds(check_after, "check_after")
        self._tables: tuple[Database, TableHome] | None = None  # of a process
        self._next_check = self._next_purge = 0.0
        app.chores.append(self._upkeep)

    @property
    def table(self) -> TableHome:
        """The tables of the app: the home of messages, and of those that are parked."""
        database = self.app.adapters().database
        if self._tables is None or self._tables[0] is not database:
            if isinstance(self.checker, SqlBarrier):
                self.checker.verify()
            self._tables = database, TableHome(database, self.app.name, name_number("consumer", self.app.name), self.check_after)
        return self._tables[1]

    @property
    def home(self) -> Home:
        """The home in which messages wait."""
        return self._home or self.table

    def prepare(
        self,
        message: Message,
        *,
        to: str | None = None,
        type: str | None = None,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> Preparation:
        """Return a message that is prepared by its `submit`, or in steps by a `with` block.

        The block stores the message at its start. At its end, after an exception or not, the checker is asked. A block that ends
        without an exception, and without a commit that a `SqlBarrier` knows, raises `BarrierMissed`.

        Args:
            message: A pydantic model, or a mapping with `type=`.
            to: Queue; without one, the message is published to every queue that takes its type.
            type: Type name; by default the model's.
            key: Name of the work, such as the id of an order. Work under a known key is not done again.
            headers: Text, numbers, booleans, lists and mappings of them.

        Raises:
            UnusableOutput: The message could not be published or read back.
        """
        name, key = self.app.name, check_text(key, "key") if key is not None else uuid7()
        claim = Claim(name, INITIATION, Prepared(name, key, _NOTHING).place, key)
        unit = Context(name, {"message_id": key}, None, claim)
        if to is None:
            unit.publish(message, type=type, headers=headers)
        else:
            unit.send(message, to, type=type, headers=headers)
        return Preparation(self, Prepared(name, key, unit.outputs()[0]))

    def check(self) -> int:
        """Check the messages that are due; return how many. Workers call this; without a worker, call it periodically."""
        homes: list[Home] = [self.home] if self._home is None else [self._home, self.table]
        count = 0
        for home in homes:
            due, until = home.lease(LIMIT), time.monotonic() + PATIENCE
            answers = [(prepared, self._ask(prepared)) for prepared in due if time.monotonic() < until]
            for prepared in (message for message, answer in answers if answer == "unknown"):
                self._unknown(home, prepared)
            self.conclude(home, answers)
            count += len(due)
        return count

    def conclude(self, home: Home, answers: Sequence[tuple[Prepared, Answer | None]]) -> None:
        """Publish messages of committed work, delete those of rolled back work. Relays send those that the broker refuses."""
        committed = [prepared.output for prepared, answer in answers if answer == "commit"]
        for prepared in (message for message, answer in answers if answer == "commit"):
            home.commit(prepared)
        handling = Handling(Delivery(self.app.name, {}, b""), outputs=committed)
        refused = self.app.dispatch(handling) if committed else {}
        for prepared, answer in answers:
            if answer in ("commit", "rollback") and prepared.output.id not in refused:
                home.end(prepared)
            elif answer == "commit" and home is not self.table:
                with suppress(Conflict):  # another message is stored under its key: keep asking
                    self.table.prepare(prepared, self.check_after)
                    self.table.commit(prepared)
                    home.end(prepared)

    def park(self, home: Home, prepared: Prepared, reason: str) -> None:
        """Park a message in the tables of the app, from any home.

        Raises:
            Conflict: Another message is stored there under its key.
        """
        self.table.park(prepared, reason)
        if home is not self.table:
            home.end(prepared)

    def _ask(self, prepared: Prepared) -> Answer | None:
        """Return the checker's answer; None if the checker cannot be reached, which does not count as a check."""
        try:
            answer = self.checker.ask(prepared)
        except Exception as error:  # noqa: BLE001 - the database of the work is away, or a checker fails
            log("prepared.unanswered", key=prepared.key, error=error)
            return None
        return answer if answer in ("commit", "rollback") else "unknown"

    def _unknown(self, home: Home, prepared: Prepared) -> None:
        if prepared.checks + 1 < self.checks:
            home.postpone(prepared, self.check_after)
            return
        reason = f"asked {self.checks} times for the outcome of the work"
        if home is self.table:
            self.table.park_ids([prepared.output.id], reason)
        else:
            try:
                self.park(home, prepared, reason)
            except Conflict:  # another message is parked under its key: keep asking
                home.postpone(prepared, self.check_after)
                return
        log("prepared.parked", count=self.checks, key=prepared.key)

    def _upkeep(self) -> None:
        """Check due messages every few seconds; delete old rows of the barrier every hour."""
        now = time.monotonic()
        try:
            if now >= self._next_check and self.check() < LIMIT:
                self._next_check = now + min(5.0, self.check_after / 4)
        except Exception as error:  # noqa: BLE001 - the relay has other outputs to send
            self._next_check = now + 5.0
            log("prepared.unchecked", app=self.app.name, error=error)
            return
        if now >= self._next_purge and isinstance(self.checker, SqlBarrier):
            self._next_purge = now + PURGE
            with suppress(exc.SQLAlchemyError):  # the database is away
                self.checker.purge(self.app.name, RETENTION, self.table.still_there)


class Preparation:
    """A prepared message that its producer submits, or decides by a `with` block.

    Attributes:
        prepared: The message.
        answer: The checker's answer at the end of the block; `rollback` before the block begins.

    Example:
        >>> def place_order(prepared: PreparedMessages, shop: "Engine", order_id: str) -> None:
        ...     with prepared.prepare({"order_id": order_id}, to="stock", type="stock.Reserve", key=order_id) as preparation:
        ...         with shop.begin() as connection:
        ...             if preparation.pass_barrier(connection):
        ...                 connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": order_id})
    """

    def __init__(self, messages: PreparedMessages, prepared: Prepared) -> None:
        self._messages, self.prepared = messages, prepared
        self.answer: Answer = "rollback"
        self._entered = self._passed = self._committing = False

    def __enter__(self) -> Self:
        self._messages.home.prepare(self.prepared, self._messages.check_after)
        self.answer, self._entered = "unknown", True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # the process ends, so the outcome is left to the checker
        self.answer = self._messages._ask(self.prepared) or "unknown"  # noqa: SLF001
        if self.answer != "commit" and not self._passed and isinstance(self._messages.checker, SqlBarrier):
            if error is None:
                raise self._missed("did not pass the barrier")
            key = self.prepared.key
            error.add_note(f"The block did not pass the barrier: what it committed, if anything, has no message {key!r}.")
        if self.answer == "rollback" and error is None and self._committing:
            raise self._missed("sent COMMIT for work of which the barrier has no row (another schema? a COMMIT that failed?)")
        if self.answer != "unknown":
            try:
                self._messages.conclude(self._messages.home, [(self.prepared, self.answer)])
            except Exception as left:  # noqa: BLE001 - the work is over, and the checker concludes it
                log("prepared.left", key=self.prepared.key, error=left)

    def _missed(self, what: str) -> BarrierMissed:
        """Park the message; return the error."""
        messages, id, where = self._messages, self.prepared.output.id, "is parked"
        try:
            messages.park(messages.home, self.prepared, f"its block {what}; if its work is committed, send it by app.initiate()")
        except Exception as error:  # noqa: BLE001 - what happened to the work comes first
            where = f"could not be parked ({error})"
        return BarrierMissed(
            f"the block of {self.prepared.key!r} {what}, so its work may or may not be committed; its message {id} {where}. "
            "If the work is committed, send the message by app.initiate(). To forget this one: idemp prepared resume "
            f"{id}. In code, let pass_barrier() be the first statement of the work, and leave a block without work by an exception"
        )

    def submit(self, work: Callable[[Session], object]) -> bool:
        """Store the message, do work in one transaction that has passed the barrier, and publish the message.

        After a deadlock or a serialization failure the work is done again, three times in all.

        Args:
            work: Function of a session on the barrier's engine. If it raises an error, its work is rolled back.

        Returns:
            Whether the work was done now; False if it was committed under this key before.

        Raises:
            Conflict: Another message is prepared under the key.
            RolledBack: Work under this key was rolled back: take another key.
            Undecided: COMMIT failed, and it is not known yet whether the work is committed.
            ConfigurationError: The checker is not a `SqlBarrier`, or has no table.
        """
        barrier, new = self._barrier, True
        if inspect.iscoroutinefunction(work) or inspect.isgeneratorfunction(work):
            raise ConfigurationError("the work is async def or yields: submit() takes a plain function")
        try:
            with self:
                self._passed = True
                new = self._is_new(barrier.do(self.prepared, work))
        except exc.DBAPIError as error:
            if self.answer == "unknown":
                raise Undecided("the work may be committed; do nothing, or call again with the same key") from error
            if self.answer == "rollback":
                raise
        return new

    def pass_barrier(self, work: Session | Connection) -> bool:
        """Insert the row of the barrier in the transaction of the work, as its first statement.

        Returns:
            Whether the work is to be done; False if it was committed under this key before.

        Raises:
            RolledBack: The checker has decided on a rollback before.
            ConfigurationError: The checker is not a `SqlBarrier`, the message is not stored yet, or the connection belongs to another
                engine or is in autocommit mode.
        """
        if not self._entered:
            raise ConfigurationError("the message is not stored yet: pass the barrier inside of the block, `with preparation:`")
        answer = self._barrier.admit(work, self.prepared, self._commits)
        self._passed = True
        return self._is_new(answer)

    def _commits(self) -> None:
        self._committing = True

    @property
    def _barrier(self) -> SqlBarrier:
        if not isinstance(self._messages.checker, SqlBarrier):
            raise ConfigurationError(f"{self._messages.checker!r} is not a SqlBarrier")
        return self._messages.checker

    def _is_new(self, answer: Answer) -> bool:
        if answer == "rollback":
            raise RolledBack(f"the work {self.prepared.key!r} was rolled back before, nothing is committed: take another key")
        return answer == "unknown"


_NOTHING: Final = Output("", "send", "", "", {}, b"")
