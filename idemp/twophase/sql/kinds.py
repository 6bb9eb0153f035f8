"""How each kind of server prepares and ends a transaction.

Ours are told from others by their names alone, and those are made of letters, digits, dots, dashes and underscores: they
stand in the statements as they are, where no server takes bound values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import TwoPhaseTransaction, event, exc, text

from idemp.errors import BranchUnavailable, ConfigurationError, GuaranteeError, HandlerError
from idemp.inbox.sql import failures
from idemp.inbox.sql.claiming import AnotherTransaction
from idemp.inbox.sql.engine import is_mysql, place_of
from idemp.twophase.port import BranchId, Ended, InDoubt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine

LOCK_WAIT: Final = "10s"
"""How long a branch waits for a lock where nobody said otherwise: two handlings that wait for one another, each in another
database, are a deadlock that neither server sees."""

# PostgreSQL
_NO_SUCH_TRANSACTION: Final = "42704"
_NOT_READY: Final = "55000"  # at PREPARE: they are disabled; at COMMIT PREPARED: somebody else is at it
_ABORTED: Final = "25P02"
_IN_ITS_FUTURE: Final = "22023"
_ROLE: Final = "idemp_role"  # in a connection's `info`: who began the transaction

# MariaDB and MySQL
_UNKNOWN_XID: Final = 1397  # also for one whose connection lives
_WRONG_STATE: Final = 1399
_ROLLED_BACK: Final = 1402
_TIMED_OUT: Final = 1613
_DEADLOCK: Final = 1614
_OLDEST_MARIADB: Final = (10, 5)
"""Before, the end of a connection rolled back what it had prepared."""
_OLDEST_MYSQL: Final = (8, 0, 29)


class Kind(ABC):
    """One kind of server."""

    @abstractmethod
    def begin(self, connection: Connection, id: BranchId) -> int | None:
        """Begin the branch; what proves later that it is the same transaction, and what its server calls it."""

    @abstractmethod
    def prepare(self, connection: Connection, id: BranchId, begun: int | None) -> None:
        """Prove that it is the same transaction, and prepare it.

        Raises:
            AnotherTransaction: it is not.
            HandlerError: it used what can't be prepared, or went on after an error.
            BranchUnavailable: the server prepares no more.
            DBAPIError: anything else.
        """

    @abstractmethod
    def end_own(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """End the branch that this very connection has prepared."""

    @abstractmethod
    def abandon(self, connection: Connection, id: BranchId) -> None:
        """Roll back the branch before it is prepared."""

    @abstractmethod
    def end(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """End a prepared branch; the connection commits by itself."""

    @abstractmethod
    def in_doubt(self, connection: Connection) -> Iterator[InDoubt]:
        """All branches that the server lists and this database may end."""

    @abstractmethod
    def verify(self, connection: Connection, name: str) -> None:
        """See that the server can prepare.

        Raises:
            GuaranteeError: it can't, as it is set up.
        """

    def outcome(self, connection: Connection, transaction: int) -> bool | None:
        """Whether a transaction that has ended was committed; `None` where the server does not say."""
        del connection, transaction
        return None


class PostgreSQL(Kind):
    """Prepared transactions, through psycopg. They belong to no connection."""

    def begin(self, connection: Connection, id: BranchId) -> int | None:
        """One round trip."""
        del id
        _refuse_autocommit(connection)
        connection.begin()
        begun = text(
            "SELECT txid_current(), CASE current_setting('lock_timeout') WHEN '0' THEN "
            "set_config('lock_timeout', :wait, true) END, current_user"
        )
        number: int
        number, _, connection.info[_ROLE] = connection.execute(begun, {"wait": LOCK_WAIT}).one()
        return number

    def prepare(self, connection: Connection, id: BranchId, begun: int | None) -> None:
        """PREPARE TRANSACTION answers ROLLBACK, and no error, where the transaction had failed or there is none."""
        number, role = connection.exec_driver_sql("SELECT txid_current_if_assigned(), current_user").one()
        if number != begun:
            raise AnotherTransaction
        if role != connection.info[_ROLE]:
            raise HandlerError(
                f"The handler left its transaction on {place_of(connection.engine)} in the role {role!r}: who prepares a "
                "transaction is the only one who may commit it. All was rolled back.",
                fix="Say `SET LOCAL ROLE NONE` before the handler returns.",
            )
        try:
            if self._run(connection, f"PREPARE TRANSACTION '{id.text}'") != "PREPARE TRANSACTION":
                raise AnotherTransaction
        except exc.DBAPIError as error:
            raise _refusal_to_prepare(error) or error from error
        event.listen(connection, "before_cursor_execute", _refuse_late)

    def end_own(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """As any other connection would."""
        driver: Any = connection.connection.driver_connection
        if event.contains(connection, "before_cursor_execute", _refuse_late):
            event.remove(connection, "before_cursor_execute", _refuse_late)
        driver.rollback()  # what the driver was told since the branch was prepared; nothing is sent where that is nothing
        driver.autocommit = True
        try:
            return self.end(connection, id, commit=commit)
        finally:
            if not driver.closed:
                driver.autocommit = False

    def abandon(self, connection: Connection, id: BranchId) -> None:
        """The driver's own rollback, which follows, is enough."""

    def end(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """COMMIT PREPARED or ROLLBACK PREPARED."""
        try:
            self._run(connection, f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{id.text}'")
        except exc.DBAPIError as error:
            state = _sqlstate(error)
            if state == _NO_SUCH_TRANSACTION:
                return Ended.GONE
            if state == _NOT_READY:
                return Ended.BUSY
            raise
        return Ended.DONE

    def in_doubt(self, connection: Connection) -> Iterator[InDoubt]:
        """Those of this database: the list is the whole cluster's, and only from here can they be ended."""
        listed = "SELECT gid, prepared FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared"
        for gid, since in connection.exec_driver_sql(listed):
            if (branch := BranchId.parse(gid)) is not None:
                yield InDoubt(branch, since)

    def verify(self, connection: Connection, name: str) -> None:
        """Zero is the default."""
        _refuse_autocommit(connection)
        if self.most(connection) == 0:
            raise GuaranteeError(
                f"The database {name!r} prepares no transactions: max_prepared_transactions is 0.",
                fix="Set max_prepared_transactions in postgresql.conf to no less than all workers have threads, and restart "
                "the server.",
            )

    def most(self, connection: Connection) -> int:
        """How many the cluster has room for."""
        return int(connection.exec_driver_sql("SHOW max_prepared_transactions").scalar_one())

    def others(self, connection: Connection, inbox: bytes) -> int:
        """How many of them are taken by what this inbox has not prepared, in any database of the cluster."""
        held = [
            BranchId.parse(gid) for gid in connection.exec_driver_sql("SELECT gid FROM pg_prepared_xacts").scalars()
        ]
        return sum(branch is None or branch.inbox != inbox for branch in held)

    def outcome(self, connection: Connection, transaction: int) -> bool | None:
        """As long as the server keeps the transaction's status."""
        try:
            status = connection.execute(text("SELECT txid_status(:number)"), {"number": transaction}).scalar_one()
        except exc.DBAPIError as error:
            if _sqlstate(error) == _IN_ITS_FUTURE:  # the server was restored, or a replica that lagged took its place
                return False
            raise
        return {"committed": True, "aborted": False}.get(status)

    @staticmethod
    def _run(connection: Connection, statement: str) -> str | None:
        """By the driver itself, since what it answers counts; SQLAlchemy's two-phase calls would not look at it."""
        driver: Any = connection.connection.driver_connection
        try:
            answered: str | None = driver.execute(statement).statusmessage
        except Exception as error:
            if not isinstance(error, connection.dialect.loaded_dbapi.Error):
                raise
            raise failures.told(connection, error) from error
        return answered


class MySQL(Kind):
    """XA, on MariaDB and MySQL. A prepared branch is in its connection's hands until that ends.

    Between XA START and XA PREPARE the server itself refuses COMMIT, ROLLBACK and DDL: nothing else has to prove that it is
    the same transaction.
    """

    def begin(self, connection: Connection, id: BranchId) -> int | None:
        """SQLAlchemy's own words for it: after a failed flush its ROLLBACK would be refused, too."""
        connection.begin_twophase(id.text)
        return None

    def prepare(self, connection: Connection, id: BranchId, begun: int | None) -> None:
        """Two round trips."""
        del id, begun
        transaction = connection.get_transaction()
        if not isinstance(transaction, TwoPhaseTransaction):
            raise AnotherTransaction
        try:
            transaction.prepare()
        except exc.DBAPIError as error:
            if failures.mysql_code(error.orig) in {_UNKNOWN_XID, _WRONG_STATE}:
                raise AnotherTransaction from error
            raise

    def end_own(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """Only this connection can, as long as it lives."""
        transaction = connection.get_transaction()
        if transaction is None:
            return Ended.BUSY  # it was tried, and failed
        return self._ended(connection, id, transaction.commit if commit else transaction.rollback)

    def abandon(self, connection: Connection, id: BranchId) -> None:
        """Two round trips."""
        del id
        if (transaction := connection.get_transaction()) is not None:
            transaction.rollback()

    def end(self, connection: Connection, id: BranchId, *, commit: bool) -> Ended:
        """One round trip."""
        statement = f"XA {'COMMIT' if commit else 'ROLLBACK'} '{id.text}'"
        return self._ended(connection, id, lambda: connection.exec_driver_sql(statement))

    def _ended(self, connection: Connection, id: BranchId, end: Callable[[], object]) -> Ended:
        """The same error tells of one that is gone and of one in other hands: the list says which it is."""
        try:
            end()
        except exc.DBAPIError as error:
            code = failures.mysql_code(error.orig)
            if code not in {_UNKNOWN_XID, _ROLLED_BACK}:
                raise
            # Rolled back: it had written nothing, and its connection ended before the decision was carried out.
            listed = any(doubt.id == id for doubt in self.in_doubt(connection))
            return Ended.BUSY if listed else Ended.GONE
        return Ended.DONE

    def in_doubt(self, connection: Connection) -> Iterator[InDoubt]:
        """The whole server's: from any of its databases they can be ended."""
        for row in connection.exec_driver_sql("XA RECOVER").mappings():
            data = row["data"]
            raw = data if isinstance(data, bytes) else str(data).encode("utf-8", "replace")
            branch = BranchId.parse(raw.decode("ascii", "replace")) if row["bqual_length"] == 0 else None
            if branch is not None:
                yield InDoubt(branch)

    def verify(self, connection: Connection, name: str) -> None:
        """See `_OLDEST_MARIADB`."""
        dialect = connection.dialect
        is_mariadb = getattr(dialect, "is_mariadb", False)
        version = tuple(part for part in dialect.server_version_info or () if isinstance(part, int))
        oldest = _OLDEST_MARIADB if is_mariadb else _OLDEST_MYSQL
        if version < oldest:
            told = ".".join(map(str, version))
            wanted = f"{'MariaDB' if is_mariadb else 'MySQL'} {'.'.join(map(str, oldest))}"
            raise GuaranteeError(
                f"The database {name!r} runs on version {told}, whose prepared transactions don't outlive their connection.",
                fix=f"Use {wanted} or later.",
            )
        connection.exec_driver_sql("XA RECOVER").all()  # MySQL asks for a right of its own


def kind_of(engine: Engine, name: str) -> Kind:
    """The kind of an engine's database.

    Raises:
        ConfigurationError: it can't prepare transactions.
    """
    dialect = engine.dialect.name
    if dialect == "postgresql":
        return PostgreSQL()
    if is_mysql(dialect):
        return MySQL()
    raise ConfigurationError(
        f"The database {name!r} is on {dialect}, which can't prepare transactions.",
        fix="Use PostgreSQL, MariaDB or MySQL; or send a message to a consumer that has its inbox in that database.",
    )


def is_aborted(error: exc.DBAPIError) -> bool:
    """Whether a statement failed only because an earlier one had."""
    return bool(_sqlstate(error) == _ABORTED)


def was_rolled_back(error: exc.DBAPIError) -> bool:
    """Whether XA says so: for a deadlock, or a lock wait, which may be tried again."""
    return failures.mysql_code(error.orig) in {_ROLLED_BACK, _TIMED_OUT, _DEADLOCK}


def _refusal_to_prepare(error: exc.DBAPIError) -> Exception | None:
    said = str(error.orig).partition("\n")[0]
    match _sqlstate(error):
        case "0A000":
            return HandlerError(
                f"The handler used what can't be prepared: {said}.",
                fix="Nothing was committed. Use no temporary tables, LISTEN, NOTIFY or cursors WITH HOLD there.",
            )
        case "55000" | "53200":
            return BranchUnavailable(
                f"The server prepares no more transactions: {said}.",
                fix="Nothing was committed. Set max_prepared_transactions to no less than all workers have threads; "
                "`idemp recover` ends what is left in doubt, `idemp doctor` tells whether others hold them.",
            )
    return None


def _refuse_late(connection: Connection, *_: object) -> None:
    """It would begin another transaction, which nobody commits. MariaDB refuses by itself."""
    raise HandlerError(
        f"A statement on {place_of(connection.engine)} came after the handler's work there was prepared: by a listener of "
        "the claim's session before its COMMIT, say.",
        fix="Do it in the handler, or in a listener of the other database's own session.",
    )


def _refuse_autocommit(connection: Connection) -> None:
    driver: Any = connection.connection.driver_connection
    if driver.autocommit:
        raise GuaranteeError(
            f"The engine of {place_of(connection.engine)} commits each statement by itself (AUTOCOMMIT): effects would stay "
            "there without their claim.",
            fix="Make it without isolation_level='AUTOCOMMIT'.",
        )


def _sqlstate(error: exc.DBAPIError) -> Any:
    return getattr(error.orig, "sqlstate", None)
