"""A handler can't end the unit of work that holds its claim.

Otherwise a redelivery would find a claim without outputs, or effects without a claim. Four lines of defence:

1. COMMIT and ROLLBACK through SQLAlchemy raise, whoever calls them: session, connection or transaction object.
2. Texts of statements of which one ends the transaction (`COMMIT`; on MySQL every DDL) raise before they are sent.
3. So do the same statements, and a commit or rollback, on the driver's own connection (`drivers.py`).
4. Before COMMIT the dialect proves that this is still the same transaction (`dialects.py`), whatever the driver was told
   behind SQLAlchemy's back; also where nothing is claimed.

Nor can it leave its connection to later deliveries in another state: one that a statement has changed for longer than the
transaction (`SET`, `LISTEN`, `PRAGMA`, a temporary table) is closed at the end of the unit of work, whoever sent the
statement; and so is one on which an operation is left open, or which the handler took away.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlalchemy import event, exc

from idemp.errors import TransientStoreError
from idemp.inbox.sql import failures
from idemp.inbox.sql.statements import changes_session, transaction_end

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, NestedTransaction, Transaction
    from sqlalchemy.engine import ExceptionContext

UNIT_OPTION: Final = "idemp_unit"
OWN_STATEMENT: Final = {"idemp_own": True}
"""Execution options of statements of idemp's own that change a setting and set it back."""


class Guarded(Protocol):
    """A unit of work as the guard sees it."""

    ending: bool
    own_statement: str | None
    """The last statement through SQLAlchemy, if it was one of `OWN_STATEMENT`."""
    undone: NestedTransaction | None
    """The last savepoint of the handler's own that was rolled back on the connection."""

    @property
    def is_lost(self) -> bool:
        """Whether it can't be committed any more, so that a rollback does no harm."""
        ...

    @property
    def savepoint(self) -> Transaction | None:
        """What it is, if not a transaction of its own."""
        ...

    def refuse(self, what: str) -> None:
        """Remember that the handler tried to end the transaction, and raise."""
        ...

    def lost_to(self, error: BaseException) -> None:
        """Remember that SQLAlchemy itself rolled back, because of this error (a failed flush)."""
        ...

    def is_flushing(self) -> bool:
        """Whether SQLAlchemy is at it, so that a rollback is its own."""
        ...

    def sends_commit(self) -> None:
        """Remember that the unit's own COMMIT is on its way."""
        ...

    def commit_failed(self) -> None:
        """Remember that something failed at the unit's end."""
        ...

    def uses_connection(self) -> None:
        """Prepare the proof, if it needs one: the handler is about to send something."""
        ...

    def changed_session(self) -> None:
        """Remember that a statement changed the connection beyond the transaction."""
        ...

    def asked_again(self, error: TransientStoreError) -> None:
        """Remember that the database asked to try again, which may have ended the transaction, too."""
        ...


def examine(unit: Guarded, statement: str, dialect: str, parameters: Any = None) -> None:
    """Refuse a text that ends the unit's transaction, and note one that changes the session.

    The one rule for statements that come through SQLAlchemy and for those on the driver's own connection.
    """
    if (end := transaction_end(statement, dialect)) is not None:
        unit.refuse(end)
    unit.uses_connection()
    if statement != unit.own_statement and changes_session(statement, dialect, parameters):
        unit.changed_session()


def roll_back(unit: Guarded) -> None:
    """Refuse a rollback of the handler's, and note one of SQLAlchemy's own, which makes it before an error is let out.

    The one rule for rollbacks on the connection and for those of a session that has not used it yet.
    """
    cause = sys.exception()
    if isinstance(cause, exc.SQLAlchemyError) or (cause is not None and unit.is_flushing()):
        unit.lost_to(cause)  # a failed flush
    else:
        unit.refuse("rollback")


def install(engine: Engine) -> None:
    """Watch an engine's connections; those of a unit of work carry it as execution option. Repeating it is harmless."""
    for name, listener in (
        ("commit", _on_commit),
        ("rollback", _on_rollback),
        ("prepare_twophase", _on_prepare),
        ("commit_twophase", _on_branch_commit),
        ("rollback_twophase", _on_branch_rollback),
        ("rollback_savepoint", _on_rollback_to),
        ("before_cursor_execute", _on_execute),
        ("handle_error", _on_error),
    ):
        if not event.contains(engine, name, listener):
            event.listen(engine, name, listener)


def _unit_of(connection: Connection) -> Guarded | None:
    unit: Guarded | None = connection.get_execution_options().get(UNIT_OPTION)
    return unit if unit is not None and not unit.ending else None


def _on_commit(connection: Connection) -> None:
    unit: Guarded | None = connection.get_execution_options().get(UNIT_OPTION)
    if unit is None:
        return
    if unit.ending:
        unit.sends_commit()
    else:
        unit.refuse("commit")


def _on_rollback(connection: Connection) -> None:
    if (unit := _unit_of(connection)) is not None:
        roll_back(unit)


# Parts in other databases (see `idemp.twophase`), where SQLAlchemy has words of its own for the same.


def _on_prepare(connection: Connection, _xid: str) -> None:
    if (unit := _unit_of(connection)) is not None:
        unit.refuse("prepare")


def _on_branch_commit(connection: Connection, _xid: str, _is_prepared: bool) -> None:
    if (unit := _unit_of(connection)) is not None:
        unit.refuse("commit")


def _on_branch_rollback(connection: Connection, _xid: str, _is_prepared: bool) -> None:
    _on_rollback(connection)


def _on_rollback_to(connection: Connection, _name: str, _context: None) -> None:
    """For a unit that is a part of a transaction, its own savepoint is what its transaction is for others."""
    unit = _unit_of(connection)
    if unit is None:
        return
    savepoint = connection.get_nested_transaction()
    if unit.savepoint is not None and savepoint is unit.savepoint:
        roll_back(unit)
    else:
        unit.undone = savepoint


def _on_error(context: ExceptionContext) -> None:
    if context.connection is None:
        return
    at_its_end: Guarded | None = context.connection.get_execution_options().get(UNIT_OPTION)
    if at_its_end is not None and at_its_end.ending:
        at_its_end.commit_failed()
    unit = _unit_of(context.connection)
    meaning = failures.translate(context.sqlalchemy_exception) if context.sqlalchemy_exception is not None else None
    if unit is not None and isinstance(meaning, TransientStoreError):
        unit.asked_again(meaning)


def _on_execute(
    connection: Connection, _cursor: Any, statement: str, parameters: Any, context: Any, _many: bool
) -> None:
    unit = _unit_of(connection)
    if unit is None:
        return
    unit.own_statement = statement if "idemp_own" in context.execution_options else None
    examine(unit, statement, connection.dialect.name, parameters)
