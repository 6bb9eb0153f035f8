"""Where handlers under test keep what they do: a database of the test's own, or an inbox of another kind, made anew."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import MetaData, func, select
from sqlalchemy.orm import Session

from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.startup import check_entities
from idemp.testing.ground import MARK, Ground
from idemp.testing.options import make_tables
from idemp.testing.subject import rebound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from idemp.app import App
    from idemp.inbox.port import InboxStore
    from idemp.testing.clock import FakeClock
    from idemp.work import Registration
    from idemp.wrap import Wrapped

MakesStore = Callable[[Any], Any]
"""Makes an empty inbox on a clock."""

_BEAT: Final = timedelta(seconds=30)
_CONSUMED: Final = timedelta(hours=1)


class SqlPremises:
    """A database, which is emptied before each run.

    Args:
        app: whose handlers are tested.
        clock: the time of all stores.
        database: a URL.
        tables: the user's tables.
        keep: begin with the tables and rows that are there.

    Attributes:
        relays: whether outputs can be left to a relay.
        holds_claims: whether a claim that is held makes others wait for it, and nobody else.

    Example:
        >>> from idemp import App
        >>> from idemp.testing.clock import FakeClock
        >>> premises = SqlPremises(App("orders"), FakeClock(), "sqlite://", None, keep=False)
        >>> premises.begin_anew()
        >>> premises.state(premises.default_state())
        {}
        >>> premises.close()
    """

    relays = True

    def __init__(
        self,
        app: App | Wrapped,
        clock: FakeClock,
        database: str,
        tables: MetaData | Callable[[Engine], object] | None,
        *,
        keep: bool,
    ) -> None:
        self._clock = clock
        self.engine = create_engine_safely(database)
        self.holds_claims = self.engine.dialect.name != "sqlite"  # there it would hold all others up, too
        self.ground = Ground(self.engine)
        try:
            self._prepare(app, tables, keep=keep)
        except BaseException:
            self.engine.dispose()
            raise

    def _prepare(self, app: App | Wrapped, tables: MetaData | Callable[[Engine], object] | None, *, keep: bool) -> None:
        if not keep:
            self.ground.claim()
            from idemp.inbox.sql.schema import upgrade  # Alembic takes as long to import as all else together

            upgrade(self.engine, Tables())
        make_tables(tables, self.engine)
        self.ground.measure()
        self._session_factory = rebound(app, self.engine)
        self._activity = Tables().activity
        # Kept for good: its statements take longer to make than a delivery takes to handle.
        self.store = SqlStore(self.engine, clock=self._clock, session_factory=self._session_factory, worker="harness")

    def begin_anew(self) -> None:
        """No rows."""
        self.ground.empty()

    def check(self, registrations: Sequence[Registration]) -> None:
        """Whatever types there are, a database takes them."""

    def consume(self, consumer: str, by: timedelta) -> None:
        """Let time pass while the consumer consumes."""
        upkeep, activity = self.store.upkeep, self._activity
        upkeep.beat("harness", relay=True, consumers=[consumer])
        since = self._clock.now()
        self._clock.advance(by)
        with self.engine.begin() as connection:  # as if there had been a beat every few seconds
            connection.execute(activity.update().where(activity.c.ended_at == since).values(ended_at=self._clock.now()))
        upkeep.beat("harness", relay=True, consumers=[consumer])

    def state(self, read: Callable[[Any], Any]) -> Any:
        """What a function reads in a session."""
        with self._session_factory() as session:
            return read(session)

    def write(self, setup: Callable[[Any], object]) -> None:
        """What a function writes in a session, committed."""
        with self._session_factory() as session:
            setup(session)
            session.commit()

    def default_state(self) -> Callable[[Session], dict[str, int]]:
        """How many rows each of the user's tables has."""
        found = MetaData()
        found.reflect(self.engine)
        ours = Tables().names | {MARK}
        tables = [table for table in found.tables.values() if table.name not in ours]  # which may refer to each other
        counts = {table.name: select(func.count()).select_from(table) for table in tables}
        return lambda session: {name: int(session.scalar(count) or 0) for name, count in counts.items()}

    def close(self) -> None:
        """End what was opened."""
        self.store.close()
        self.engine.dispose()


class StorePremises:
    """An inbox of another kind: a new one for each run.

    Args:
        make: makes an empty one on a clock.
        clock: the time of all of them.

    Example:
        >>> from idemp.inbox.memory import InMemoryStore
        >>> from idemp.testing.clock import FakeClock
        >>> StorePremises(InMemoryStore, FakeClock()).state(lambda store: store.pending_count())
        0
    """

    relays = False
    holds_claims = False

    def __init__(self, make: MakesStore, clock: FakeClock) -> None:
        self._make = make
        self._clock = clock
        self.store: InboxStore = make(clock)

    def begin_anew(self) -> None:
        """A new one."""
        self.store.close()
        self.store = self._make(self._clock)

    def check(self, registrations: Sequence[Registration]) -> None:
        """See that it takes these types, as an app does at its start.

        Raises:
            ConfigurationError: it does not.
        """
        check_entities(self.store, registrations)

    def consume(self, consumer: str, by: timedelta) -> None:
        """Let time pass; the consumer consumes for the last hour of it, at most: each half minute of that costs a beat."""
        self._clock.advance(max(timedelta(0), by - _CONSUMED))
        end = self._clock.now() + min(by, _CONSUMED)
        self.store.upkeep.beat("harness", relay=True, consumers=[consumer])
        while (left := end - self._clock.now()) > timedelta(0):
            self._clock.advance(min(left, _BEAT))
            self.store.upkeep.beat("harness", relay=True, consumers=[consumer])

    def state(self, read: Callable[[Any], Any]) -> Any:
        """What a function reads of the store."""
        return read(self.store)

    def write(self, setup: Callable[[Any], object]) -> None:
        """What a function does to the store."""
        setup(self.store)

    def default_state(self) -> Callable[[Any], None]:
        """Nothing is known of what it keeps: the outputs alone are compared."""
        return lambda _: None

    def close(self) -> None:
        """End what was opened."""
        self.store.close()
