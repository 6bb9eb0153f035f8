"""Many units of work in one transaction of PostgreSQL: each is a savepoint, and one COMMIT ends all of them.

```
BEGIN ── unit ── unit ── unit ── … ── proof, COMMIT
          └─ SAVEPOINT; claims, effects, outputs ──┬── proof; constraints; RELEASE
                                                   └── it fails: ROLLBACK TO SAVEPOINT, the others stay
```

To those who use it such a unit is one as any other: it is claimed in, committed, rolled back and run again by the very
same steps. What they take for committed is, once `Whole.commit` has answered.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, Self, cast

from sqlalchemy import exc

from idemp.errors import StoreUnavailable
from idemp.inbox.sql import drivers, simple_query
from idemp.inbox.sql.guard import UNIT_OPTION
from idemp.inbox.sql.sets_postgresql import SetUnit
from idemp.inbox.sql.store import SqlStore
from idemp.inbox.sql.unit import SqlUnit, ended

if TYPE_CHECKING:
    from types import TracebackType
    from uuid import UUID

    from sqlalchemy import Connection, Transaction

_NAME: Final = "idemp_unit"
# A rollback to a savepoint that was set before it takes this value back: it tells that the unit is whole.
_MARK: Final = "SELECT set_config('idemp.unit', '%s', true)"
_PROOF: Final = "SELECT current_setting('idemp.unit', true); "
# What waits for COMMIT is looked at now, while it is known whose it is; and again then, with all the others' work.
_CONSTRAINTS: Final = (
    "SAVEPOINT idemp_constraints; SET CONSTRAINTS ALL IMMEDIATE; "
    "ROLLBACK TO SAVEPOINT idemp_constraints; RELEASE SAVEPOINT idemp_constraints"
)


class Whole(SqlStore):
    """A store whose units of work are parts of one transaction, which is open inside of a `with`. For one thread.

    Args:
        store: the same inbox; on PostgreSQL.

    Attributes:
        lost: whether a part found that the transaction is not the same any more: a handler ended it.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> Whole(SqlStore(create_engine_safely("postgresql://db/shop"))).is_open
        False
    """

    def __init__(self, store: SqlStore) -> None:
        super().__init__(
            store.engine,
            tables=store.configured_tables,
            session_factory=store.session_factory,
            clock=store.clock,
            worker=store.worker,
        )
        self._all: SqlUnit | None = None
        self._marks = count(1)
        self._announced = False
        self.lost = False

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            StoreUnavailable: the database can't be reached.
        """
        self._all, self.lost, self._announced = SqlUnit(self, late=True), False, False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._all is not None:
            unit, self._all = self._all, None
            if not unit.connection.closed:
                unit.connection.execution_options(**{UNIT_OPTION: unit})  # whichever part failed when it began
            unit.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        """Whether units have a transaction to be parts of."""
        unit = self._all
        return unit is not None and not self.lost and unit.usable() and not self.dialect.is_over(unit.connection)

    @property
    def connection(self) -> Connection:
        """The transaction's own connection, between its parts.

        Raises:
            StoreUnavailable: the transaction is over.
        """
        if self._all is None or not self.is_open:
            raise StoreUnavailable(
                "The transaction that all of the messages share is over: its connection broke, or a handler ended it.",
                committed="unknown",
                fix="Run all of it again: what was committed counts as done.",
            )
        return self._all.connection

    @property
    def unit(self) -> SqlUnit | None:
        """The whole, as a unit of work."""
        return self._all

    def commit(self) -> None:
        """Prove that it is still the same transaction, and commit all of it.

        Raises:
            TransactionEnded: it is not: a handler ended it. What came after that is rolled back.
            CommitUnknown: the answer was lost; run all of it again, the claims tell.
            StoreUnavailable: the transaction is over.
        """
        assert self._all is not None  # noqa: S101 - used inside of `with`
        self._all.commit()
        if self._announced:
            super().announce_pending()
            super().announce_effects()

    def announce_pending(self) -> None:
        """Once there is something to be seen."""
        self._announced = True

    def announce_effects(self) -> None:
        """Likewise."""
        self._announced = True

    def note_start(self, consumer: str, key: UUID) -> int:
        """As always; but no handler is to start where the transaction is over."""
        _ = self.connection
        return super().note_start(consumer, key)

    def mark(self) -> str:
        """What no other part has."""
        return str(next(self._marks))

    def _made_unit(self, *, late: bool, unclaimed: bool) -> SqlUnit:
        del unclaimed  # each part has a mark of its own
        return _Part(self, late=late)

    def _made_set(self, consumer: str, message_type: str) -> SetUnit:
        return _SetPart(self, consumer, message_type)


class _Part(SqlUnit):
    """A unit of work between a savepoint and its release.

    There are two, one inside of the other: the outer one is nobody's but ours; the inner one is SQLAlchemy's, and what a
    handler's session takes for its transaction.
    """

    @property
    def savepoint(self) -> Transaction | None:
        """What the handler must not roll back."""
        return self._transaction

    def _open(self) -> tuple[Connection, Transaction]:
        whole = cast("Whole", self._store)
        connection, self._mark = whole.connection, whole.mark()
        simple_query.run(connection, f"SAVEPOINT {_NAME}").all()
        connection.execution_options(**{UNIT_OPTION: self})
        try:
            transaction = connection.begin_nested()
            simple_query.run(connection, _MARK % self._mark).all()
        except BaseException:
            connection.execution_options(**{UNIT_OPTION: whole.unit})
            raise
        return connection, transaction

    def _leave(self) -> None:
        self._forget_savepoints()
        unit = cast("Whole", self._store).unit
        self._connection.execution_options(**{UNIT_OPTION: unit})
        if unit is not None and self.usable():
            drivers.watch(self._connection, unit)
            if self._session_changed:
                unit.changed_session()

    def commit(self) -> None:
        """Prove that it is whole, and leave its COMMIT to the others'."""
        super().commit()
        with self._translated():
            simple_query.run(self._connection, f"RELEASE SAVEPOINT {_NAME}").all()

    def _ending_with(self, stored: str = "") -> str | None:
        del stored
        return None  # it is another one that commits

    def _prove(self) -> None:
        self._check_handler()
        answers = simple_query.run(self._connection, _PROOF + _CONSTRAINTS)
        if not answers.results or (answers.results[0].get_value(0, 0) or b"").decode() != self._mark:
            self._broken = self._asked_again or ended()
            raise self._broken
        answers.all()

    def _rolled_back(self, *, failed: bool) -> bool:
        """Whether it is not the transaction any more in which it began: then the savepoint is gone."""
        del failed
        whole = cast("Whole", self._store)
        if not self.usable():
            return False
        try:
            simple_query.run(self._connection, f"ROLLBACK TO SAVEPOINT {_NAME}; RELEASE SAVEPOINT {_NAME}").all()
        except exc.DBAPIError:
            if not self.usable():
                return False
            whole.lost = True
            self._broken = self._broken or ended()
            return True
        finally:
            self._forget_savepoints()
        return False

    def _end_unasked(self) -> None:
        """It is rolled back already; the connection is the others' as well."""

    def _forget_savepoints(self) -> None:
        """Those that SQLAlchemy still has in mind ended with ours."""
        while (savepoint := self._connection.get_nested_transaction()) is not None:
            savepoint.is_active = False
            savepoint.close()


class _SetPart(_Part, SetUnit):
    """The same for messages of one type by the thousand."""

    def _making(self, statement: str, table: str) -> str:
        # There was no COMMIT since the last set.
        return f"{super()._making(statement, table)}; TRUNCATE {table}"
