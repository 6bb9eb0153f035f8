"""Names interned as small integers: consumers, message types, workers, brokers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import Insert, Table, bindparam, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from idemp.clock import SystemClock
from idemp.errors import ConfigurationError
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Engine

    from idemp.clock import Clock
    from idemp.inbox.sql.tables import Tables

NameKind = Literal["consumer", "message_type", "worker", "broker"]
MAX_NAME_BYTES: Final = 255


class Names:
    """Small integers for names, and names for small integers. Safe to share between threads.

    A name that is new is stored in a short transaction of its own, so ask *before* a unit of work begins: inside one,
    SQLite would wait for itself. What was asked once is answered from memory; a name enters that memory only after the
    COMMIT that stored it.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> names = Names(engine, tables)
        >>> names.id("consumer", "orders") == Names(engine, tables).id("consumer", "orders")
        True
        >>> names.name("consumer", names.id("consumer", "orders"))
        'orders'
    """

    def __init__(self, engine: Engine, tables: Tables, clock: Clock | None = None) -> None:
        self._short = Short(engine)
        self._clock = clock or SystemClock()
        kinds: dict[NameKind, Table] = {
            "consumer": tables.consumer,
            "message_type": tables.message_type,
            "worker": tables.worker,
            "broker": tables.broker,
        }
        self._ids: dict[NameKind, dict[str, int]] = {kind: {} for kind in kinds}
        self._names: dict[NameKind, dict[int, str]] = {kind: {} for kind in kinds}
        self._find = {k: select(t.c.id).where(t.c.name == bindparam("name")) for k, t in kinds.items()}
        self._read = {k: select(t.c.name).where(t.c.id == bindparam("id")) for k, t in kinds.items()}
        self._insert = {k: _insert_if_absent(t, engine.dialect.name) for k, t in kinds.items()}

    def id(self, kind: NameKind, name: str) -> int:
        """The integer of a name, which is stored if it is new.

        Raises:
            ConfigurationError: a name that a database would change: empty, longer than 255 bytes, with outer blanks.
            StoreUnavailable: the database can't be reached.
        """
        known = self._ids[kind].get(name)
        return known if known is not None else self._interned(kind, name)

    def known(self, kind: NameKind, name: str) -> int | None:
        """The integer of a name, `None` when it was never stored; stores nothing."""
        known = self._ids[kind].get(name)
        if known is not None:
            return known
        found = self._short.run(lambda connection: connection.scalar(self._find[kind], {"name": name}))
        return None if found is None else self._remember(kind, name, int(found))

    def name(self, kind: NameKind, number: int) -> str:
        """The name behind an integer.

        Raises:
            KeyError: there is none.
        """
        known = self._names[kind].get(number)
        if known is None:
            known = self._short.run(lambda connection: connection.scalar(self._read[kind], {"id": number}))
            if known is None:
                raise KeyError(number)
            self._remember(kind, known, number)
        return known

    def _interned(self, kind: NameKind, name: str) -> int:
        _check(kind, name)
        found = self.known(kind, name)
        if found is None:
            values = self._values(kind, name)
            with suppress(IntegrityError):  # MySQL's family: somebody else was faster
                self._short.run(lambda connection: connection.execute(self._insert[kind], values))
            found = self.known(kind, name)
        if found is None:
            raise ConfigurationError(f"The database did not keep the {kind} name {name!r} as it is.")
        return found

    def _remember(self, kind: NameKind, name: str, number: int) -> int:
        self._ids[kind][name] = number
        self._names[kind][number] = name
        return number

    def _values(self, kind: NameKind, name: str) -> Mapping[str, Any]:
        if kind == "worker":
            return {"name": name, "started_at": self._clock.now(), "seen_at": None, "relay": False}
        return {"name": name}


def _insert_if_absent(table: Table, dialect: str) -> Insert:
    # INSERT IGNORE would hide truncation, too: in MySQL's family the violation is the answer.
    others = {"id", "queue", "purged_before", "broker_id", "identity"}
    names = [column.name for column in table.c if column.name not in others]
    values: dict[str, Any] = {name: bindparam(name) for name in names}
    if dialect == "postgresql":
        return postgresql.insert(table).values(values).on_conflict_do_nothing(index_elements=[table.c.name])
    if dialect == "sqlite":
        return sqlite.insert(table).values(values).on_conflict_do_nothing(index_elements=[table.c.name])
    return insert(table).values(values)


def _check(kind: NameKind, name: str) -> None:
    if not name or name != name.strip() or "\x00" in name or len(name.encode("utf-8")) > MAX_NAME_BYTES:
        raise ConfigurationError(
            f"{name!r} can't be the name of a {kind.replace('_', ' ')}.",
            fix=f"Use 1 to {MAX_NAME_BYTES} bytes without blanks around them.",
        )
