"""The second database of a handling, its branch of the transaction, and the recovery of branches in doubt.

    BEGIN; claim; handler ─ decision row ─ PREPARE (second) ─ COMMIT (inbox) ─ COMMIT PREPARED (second)

The row of a branch is inserted in the transaction of the inbox, before the branch is prepared, and that COMMIT decides. Recovery of a
prepared branch inserts the same row: this waits for a handling in flight, and the conflict is the answer, as with the inbox.
The protocol is presumed abort (Mohan, Lindsay, Obermarck: Transaction Management in the R* Distributed Database Management System).
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, TwoPhaseTransaction, delete, event, exc, select, text
from sqlalchemy.orm import Session

from idemp.app import App
from idemp.context import AsyncContext, BaseContext
from idemp.errors import ConfigurationError, HandlerError, describe_error
from idemp.events import log
from idemp.identity import digest, name_number
from idemp.ports import Handled, Kind
from idemp.process import Adapters
from idemp.sql.engine import Database
from idemp.sql.guard import HandlerSession, Unit

__all__ = ["TwoPhase", "TwoPhaseStore", "recover"]

OLDEST: Final = {
    True: (10, 5),
    False: (8, 0, 29),
}  # MariaDB, MySQL: prepared branches outlive their connection from these versions on
EVERY: Final = 30.0  # seconds between recoveries
SETTLED: Final = 60.0  # seconds after which the row of an ended branch is deleted
SECOND: WeakKeyDictionary[App, list[TwoPhase]] = WeakKeyDictionary()
"""The second databases of each app."""


def recover(app: App) -> dict[str, str]:
    """Commit or roll back branches in doubt in the second databases of an app; return the outcome of each branch.

    Returns:
        `committed`, `rolled back`, or the reason why the branch is left, by transaction id.

    Example:
        >>> recover(App("billing"))
        {}
    """
    others = SECOND.get(app, [])
    if others:
        app.adapters()
    return {xid: outcome for other in others for xid, outcome in other.recover().items()}


class TwoPhase:
    """A second database of an app's handlers: `session(ctx)` is a session that commits with the claim, or not at all.

    Workers recover branches in doubt when they start, and every 30 seconds.

    Args:
        app: The app whose handlers use the database. They are plain functions of types that are opted in.
        name: Name of the database, which must never change, like the name of the app.
        engine: SQLAlchemy engine on PostgreSQL, MariaDB or MySQL.

    Raises:
        ConfigurationError: The database cannot prepare transactions, or the app has another one of that name.

    Example:
        >>> from pydantic import BaseModel
        >>> from sqlalchemy import create_engine
        >>> from idemp import Context, Idempotent
        >>> class Pay(BaseModel):
        ...     __message_type__ = "billing.Pay"
        ...     payment_id: int
        >>> app = App("billing")
        >>> ledger = TwoPhase(app, "ledger", create_engine("postgresql+psycopg://localhost/ledger"))
        >>> @app.handler(Pay, policy=Idempotent(key="payment_id"))
        ... def pay(message: Pay, ctx: Context) -> None:
        ...     ctx.session.execute(text("INSERT INTO paid (id) VALUES (:id)"), {"id": message.payment_id})
        ...     ledger.session(ctx).execute(text("INSERT INTO booked (id) VALUES (:id)"), {"id": message.payment_id})
    """

    def __init__(self, app: App, name: str, engine: Engine) -> None:
        others = SECOND.setdefault(app, [])
        if any(each.name == name for each in others):
            raise ConfigurationError(f"{app.name} has two databases of the name {name!r}")
        if engine.dialect.name == "sqlite":
            raise ConfigurationError("SQLite prepares no transactions: use app.initiate() or prepared messages")
        self.name: str = name
        self._app = app.name
        self.second, self._scope = Database(engine), ""
        self._database: Database | None = None
        self._branches: dict[int, _Branch] = {}  # by unit of work
        self._next_recovery = 0.0
        others.append(self)
        app.on_open.append(self._adapt)
        app.chores.append(self._upkeep)

    def session(self, ctx: BaseContext) -> Session:
        """Return the session of a handling; it flushes, and refuses to commit, roll back or close.

        Raises:
            HandlerError: The handler is `async def`, or its type is not opted in.
        """
        unit = ctx._tx  # noqa: SLF001
        if isinstance(ctx, AsyncContext) or not isinstance(unit, Unit) or not unit.claims:
            raise HandlerError(f"{self.name}: a second database is for plain handlers of types that are opted in")
        if id(unit) not in self._branches:
            self._branches[id(unit)] = _Branch(self.second, f"{self._scope}{secrets.token_hex(12)}", unit)
        return self._branches[id(unit)].session

    def recover(self) -> dict[str, str]:
        """Commit or roll back branches in doubt; return the outcome of each, or the reason why it is left."""
        database, outcomes = self._inbox(), dict[str, str]()
        branch, now = database.tables.branch, database.dialect.now
        ours = (branch.c.name == self._scope, branch.c.decided_at < now - SETTLED)
        with database.short() as connection:
            settled = set(connection.scalars(select(branch.c.xid).where(*ours)))
        # Branches are prepared before their rows are committed, so a committed row without a prepared branch belongs to an ended one.
        prepared = self._prepared()
        for xid in prepared:
            try:
                outcomes[xid] = self.end(xid)
            except exc.SQLAlchemyError as error:
                outcomes[xid] = f"left: {describe_error(error)}"
        gone = sorted(settled - set(prepared))
        for start in range(0, len(gone), 500):
            with database.short() as connection:
                connection.execute(delete(branch).where(branch.c.xid.in_(gone[start : start + 500])))
        return outcomes

    def end(self, xid: str) -> str:
        """Look up the decision about a prepared branch, and commit or roll it back."""
        committed = self._decided(xid)
        if committed is None:
            return "left: its handling is under way"
        with self.second.engine.connect() as connection:
            if connection.dialect.name != "postgresql":  # these refuse it in a session that begins transactions implicitly
                connection.execution_options(isolation_level="AUTOCOMMIT")
            try:
                (connection.commit_prepared if committed else connection.rollback_prepared)(xid, recover=True)
            except (
                Exception
            ) as error:  # an error of the driver itself, for instance because another process has just ended the branch
                if self.second.dialect.classify(error) is None:
                    raise
                return f"left: {describe_error(error)}"
        return "committed" if committed else "rolled back"

    def decide(self, connection: Connection, branch: _Branch) -> None:
        """Insert the row of a branch in the transaction of the inbox, then prepare the branch."""
        database = self._inbox()
        values = {"xid": branch.xid, "name": self._scope, "decided_at": database.dialect.now}
        connection.execute(database.tables.branch.insert().values(values))
        branch.prepare()

    def take(self, unit: Unit) -> _Branch | None:
        """Return the branch of a unit of work that ends."""
        return self._branches.pop(id(unit), None)

    def branch(self, unit: Unit) -> _Branch | None:
        """Return the branch of a unit of work."""
        return self._branches.get(id(unit))

    def _decided(self, xid: str) -> bool | None:
        """Return whether the handling of a branch was committed; None if it is under way."""
        database = self._inbox()
        branch = database.tables.branch
        try:
            with database.short() as connection, database.dialect.impatient(connection):
                row = {"xid": xid, "name": "", "decided_at": 0.0}
                connection.execute(database.dialect.insert_new(branch, ["xid"]), row)
                deciding_row = database.dialect.newest(select(branch.c.name).where(branch.c.xid == xid))
                committed = bool(connection.execute(deciding_row).scalar_one() == self._scope)
                # The handling is over, so the row of a rollback is not needed any more.
                connection.execute(delete(branch).where(branch.c.xid == xid, branch.c.name == ""))
        except exc.DBAPIError as error:
            if database.dialect.classify(error) is Kind.TRANSIENT:
                return None
            raise
        return committed

    def _prepared(self) -> list[str]:
        with self.second.engine.connect() as connection:
            if connection.dialect.name == "postgresql":  # the view lists branches of all databases of the server
                here = text("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
                xids: Sequence[Any] = connection.scalars(here).all()
            else:
                xids = connection.recover_twophase()
        texts = [each.decode("ascii", "replace") if isinstance(each, bytes) else str(each) for each in xids]
        return sorted(each for each in texts if each.startswith(self._scope))

    def _inbox(self) -> Database:
        assert self._database is not None
        return self._database

    def _adapt(self, adapters: Adapters) -> Adapters:
        self._database = adapters.database
        self._scope = f"idemp.{_scope(adapters.database, self._app, self.name)}."
        self._verify()
        return replace(adapters, store=TwoPhaseStore(adapters.store, self))

    def _verify(self) -> None:
        """Refuse a server that cannot prepare transactions, or loses prepared ones in a crash."""
        with self.second.engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                if connection.scalar(text("SHOW max_prepared_transactions")) == "0":
                    raise ConfigurationError(
                        f"{self.name} cannot prepare transactions: set max_prepared_transactions = 100, and restart it"
                    )
                return
            dialect: Any = connection.dialect
            if dialect.server_version_info < OLDEST[dialect.is_mariadb]:
                raise ConfigurationError(f"{self.name}: use MariaDB 10.5, MySQL 8.0.29 or later")
            if connection.scalar(text("SELECT @@innodb_flush_log_at_trx_commit")) != 1:
                raise ConfigurationError(
                    f"{self.name} loses prepared transactions in a crash: SET GLOBAL innodb_flush_log_at_trx_commit = 1;"
                )

    def _upkeep(self) -> None:
        if time.monotonic() < self._next_recovery or self._database is None:
            return
        self._next_recovery = time.monotonic() + EVERY
        try:
            for xid, what in self.recover().items():
                log("twophase.recovered", xid=xid, database=self.name, what=what)
        except exc.SQLAlchemyError as error:
            log("twophase.unrecovered", database=self.name, error=error)


class TwoPhaseStore:
    """A store whose transactions may have a branch in a second database.

    Args:
        store: The store of claims and outputs.
        second: The other database.

    Example:
        >>> TwoPhaseStore.__name__
        'TwoPhaseStore'
    """

    def __init__(self, store: Any, second: TwoPhase) -> None:
        self._store, self._second = store, second
        self.lazy = False  # the branch is committed right after COMMIT

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Begin a unit of work, and end its branch after it."""
        unit: Any = None
        try:
            with self._store.connect() as unit:
                yield unit
        finally:
            if unit is not None and (branch := self._second.take(unit)) is not None and branch.close():
                with suppress(exc.SQLAlchemyError):  # recovery ends it
                    self._second.end(branch.xid)

    def finish(self, tx: Any, handled: Sequence[Handled], *, lazy: bool = False) -> None:  # noqa: ARG002
        """Prepare the branch, commit, commit the branch."""
        branch = self._second.branch(tx)
        if branch is not None:
            self._second.decide(tx.connection, branch)
        self._store.finish(tx, handled)
        if branch is not None:
            branch.commit()

    def classify(self, error: BaseException) -> Kind | None:
        """Return the meaning of an error in either database."""
        meaning: Kind | None = self._store.classify(error)
        return self._second.second.dialect.classify(error) if meaning in (None, Kind.OTHER) else meaning

    def probe(self) -> bool:
        """Return whether both databases take work."""
        try:
            with self._second.second.engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        except exc.SQLAlchemyError:
            self._second.second.engine.dispose()
            return False
        return bool(self._store.probe())


class _Branch:
    """The branch of a transaction in the second database."""

    def __init__(self, database: Database, xid: str, unit: Unit) -> None:
        self.xid, self._unit, self._prepared, self._ended = xid, unit, False, False
        self._connection = database.engine.connect()
        try:
            self._transaction: TwoPhaseTransaction = self._connection.begin_twophase(xid)
            self._connection.execute(text("SAVEPOINT idemp"))  # proves at the end that it is the same transaction
        except BaseException:
            self._connection.invalidate()
            self._connection.close()
            raise
        event.listen(self._connection, "before_cursor_execute", self._look_at)
        event.listen(self._connection, "commit_twophase", self._refuse)
        self.session = HandlerSession(bind=self._connection, join_transaction_mode="rollback_only")
        self.session.unit = unit

    def prepare(self) -> None:
        """Flush, prove and prepare."""
        self.session.flush()
        event.remove(self._connection, "before_cursor_execute", self._look_at)
        event.remove(self._connection, "commit_twophase", self._refuse)
        self._connection.execute(text("RELEASE SAVEPOINT idemp"))
        self._prepared = True  # or unknown, if the answer is lost
        self._transaction.prepare()

    def commit(self) -> None:
        """Commit the prepared branch. If this fails, recovery commits it."""
        try:
            self._transaction.commit()
        except exc.SQLAlchemyError as error:
            log("twophase.left", xid=self.xid, error=error)
        else:
            self._ended = True

    def close(self) -> bool:
        """Release the connection; return whether the branch is in doubt."""
        in_doubt = self._prepared and not self._ended
        try:
            Session.close(self.session)
            if not self._prepared:
                self._transaction.rollback()
        except exc.SQLAlchemyError:
            in_doubt = in_doubt or self._prepared
            self._connection.invalidate()
        if in_doubt:  # on MariaDB, other connections can end the branch only after this one is closed
            self._connection.invalidate()
        self._connection.close()
        return in_doubt

    def _look_at(self, _connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        self._unit.look_at(statement)

    def _refuse(self, *_: Any) -> None:
        raise self._unit.refuse("connection.commit()")


def _scope(database: Database, app: str, name: str) -> str:
    """Return the prefix of transaction ids, derived from this installation, the app and its second database."""
    names = database.tables.name
    with database.short() as connection:
        number = name_number("twophase", "")  # its conflict makes processes that start together wait for each other
        new = {"id": number, "kind": "twophase", "name": secrets.token_hex(8)}
        connection.execute(database.dialect.insert_new(names, ["id"]), new)
        installation = connection.execute(select(names.c.name).where(names.c.id == number)).scalar_one()
    return base64.b32encode(digest(installation, app, name)[:10]).decode().lower()
