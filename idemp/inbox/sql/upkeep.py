"""The second half of the SQL store: what relay, cleaner and worker ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.inbox.sql.brokers import Brokers, OwnBroker
from idemp.inbox.sql.cleaning import Cleaning
from idemp.inbox.sql.daily import Daily
from idemp.inbox.sql.identities import Identities
from idemp.inbox.sql.leases import Leases
from idemp.inbox.sql.liveness import Liveness
from idemp.inbox.sql.locating import made_once
from idemp.inbox.sql.names import Names
from idemp.inbox.sql.places import Places
from idemp.inbox.sql.wakeup import wakeup_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Engine

    from idemp.clock import Clock
    from idemp.inbox.port import Identity, PendingOutput, PendingState
    from idemp.inbox.sql.liveness import WorkerRow
    from idemp.inbox.sql.tables import Tables


class SqlUpkeep:
    """The port `Upkeep` on PostgreSQL, MariaDB, MySQL and SQLite. Safe to share between threads.

    Args:
        engine: where the tables are.
        tables: with their schema and prefix.
        clock: source of time, the same as the store's.
        worker_name: this process, for `beat()` without a name.
        names: interned names to share with the store.
        places: where ids belong, to share with the store.
        broker: the broker that the store's outputs go to.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> upkeep = SqlUpkeep(engine, tables, SystemClock(), "host-1")
        >>> upkeep.take_pending(limit=10, lease=timedelta(seconds=30)), upkeep.pending_count()
        ([], 0)
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        clock: Clock,
        worker_name: str,
        names: Names | None = None,
        places: Places | None = None,
        broker: OwnBroker | None = None,
    ) -> None:
        self.worker_name = worker_name
        self.names = names or Names(engine, tables, clock)
        self._engine, self._tables, self._clock = engine, tables, clock
        self._places = places
        self._broker = broker or OwnBroker(self.names)
        self._wakeup = wakeup_for(engine, tables)
        self._effects_wakeup = wakeup_for(engine, tables, effects=True)
        self._liveness = Liveness(engine, tables, clock, self.names, self._broker)
        self._consumed: set[tuple[str, str]] = set()  # consumers and queues that started by this object

    # Parts, each with its statements: a process pays for those that it uses. -------------------------------------------

    @made_once
    def brokers(self) -> Brokers:
        """Which brokers the outputs of this database go to."""
        return Brokers(self._engine, self._tables, self.names)

    @made_once
    def daily(self) -> Daily:
        """Which consumers have a table for each day."""
        return Daily(self._engine, self._tables, self._clock, self.names)

    @made_once
    def _leases(self) -> Leases:
        places = self._places or Places(self._engine, self._tables, self._clock)
        return Leases(self._engine, self._tables, self._clock, places, self._broker)

    @made_once
    def _cleaning(self) -> Cleaning:
        return Cleaning(self._engine, self._tables, self._liveness, self.names, self.daily)

    @made_once
    def _identities(self) -> Identities:
        return Identities(self._engine, self._tables, self._clock, self._liveness, self.names)

    # Relay ----------------------------------------------------------------------------------------------------------

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Lease up to `limit` messages of this broker that are due; no other relay gets them until the lease is over."""
        return self._leases.take(limit, lease)

    def take_effects(self, consumer: str, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """Lease up to `limit` effects of a consumer whose time has come."""
        return self._leases.take_effects(self.names.id("consumer", consumer), limit, lease)

    def return_effects(self, effects: Mapping[UUID, str], retry_in: timedelta) -> None:
        """Give effects back that were not run: due after `retry_in`, no attempt counted."""
        self._leases.give_back(effects, retry_in)

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Confirmed outputs are done, failed ones wait `retry_in`, with their reason; `refused` ones are counted."""
        self._leases.settle(confirmed, failed, retry_in, refused=refused)

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Take outputs out of the relay's rounds, visible with their reason until somebody resends them."""
        self._leases.quarantine(outputs)

    def release_quarantined(self, outputs: Sequence[UUID]) -> int:
        """Give quarantined outputs back to the relay, or to who runs effects, and wake both; how many there were."""
        released = self._leases.release(outputs)
        if released:
            self.announce_pending()
            self.announce_effects()
        return released

    def pending_count(self) -> int:
        """How many outputs wait for a confirm, quarantined ones included."""
        return self._leases.count()

    def pending_state(self) -> PendingState:
        """How much waits, and how long already; beyond `leases.MOST_COUNTED` outputs the figures are too low."""
        return self._leases.state()

    def waiting(self) -> tuple[dict[str, int], int]:
        """Messages that wait for a relay, by the name of their broker, and effects; beyond `leases.MOST_COUNTED` too low."""
        return self._leases.waiting()

    def wait_for_pending(self, timeout: float) -> bool:
        """Block until outputs may have been left to the relay, or `timeout` seconds passed (`False`)."""
        return self._wakeup.wait(timeout)

    def announce_pending(self) -> None:
        """Wake the relays on this database; in this process only, where it is not PostgreSQL."""
        self._wakeup.announce()

    def wait_for_effects(self, timeout: float) -> bool:
        """Block until effects may have been stored, or `timeout` seconds passed (`False`)."""
        return self._effects_wakeup.wait(timeout)

    def announce_effects(self) -> None:
        """Wake who runs effects on this database; in this process only, where it is not PostgreSQL."""
        self._effects_wakeup.announce()

    # Cleaner --------------------------------------------------------------------------------------------------------

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """Delete up to `limit` expired claims with their outputs; rows deleted, 0 while another cleaner works."""
        return self._cleaning.purge(consumer, retention, limit, others)

    def purge_archived(self, consumer: str, keys: Sequence[UUID], before: datetime) -> int:
        """Delete these claims, which an archive has, if they are from before this moment and nothing of them pends.

        `purged_before` says that moment from then on. A few thousand keys at once; how many claims it were.
        """
        return self._cleaning.purge_archived(consumer, keys, before)

    def tidy_archived(self, consumer: str, before: datetime) -> None:
        """After `purge_archived`: drop days that it has emptied, and forget starts that never ended."""
        self._cleaning.tidy_archived(consumer, before)

    def purged_before(self, consumer: str) -> datetime | None:
        """The moment before which claims of this consumer may be gone; `None` if none ever went."""
        return self._cleaning.purged_before(consumer)

    def purge_lag(
        self, consumer: str, retention: Mapping[str, timedelta], *, others: timedelta | None = None
    ) -> timedelta:
        """How far the oldest claim that could be deleted is past its window."""
        return self._cleaning.lag(consumer, retention, others)

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The moment before which claims of this consumer may be purged."""
        return self._liveness.late_before(consumer, retention)

    # Worker ---------------------------------------------------------------------------------------------------------

    def beat(self, worker: str = "", *, relay: bool, consumers: Sequence[str]) -> None:
        """Show life; by default of this process."""
        queues = [place for place in list(self._consumed) if place[0] in consumers]
        self._liveness.beat(worker or self.worker_name, relay=relay, consumers=consumers, queues=queues)

    def retire(self, worker: str = "") -> None:
        """Take a heartbeat back at a clean end; by default this process's."""
        self._liveness.retire(worker or self.worker_name)

    def relay_alive(self) -> bool:
        """Whether some relay on this database that ships to this broker showed life recently."""
        return self._liveness.relay_alive()

    def workers(self) -> Sequence[WorkerRow]:
        """All workers that this database ever saw, by name."""
        return self._liveness.workers()

    def agree_broker(self, identity: str) -> None:
        """Note which broker has this store's broker name, unless it is noted already.

        Raises:
            BrokerChanged: another broker has it.
        """
        self.brokers.agree(self._broker.name, identity)

    def agree_identities(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """Compare with the stored identities, then store the current ones.

        Raises:
            IdentityChanged: one changed inside the window and is not covered.
        """
        self._identities.agree(consumer, queue, current, covered, retention)
        self._consumed.add((consumer, queue))

    def check_identities(
        self,
        consumer: str,
        queue: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> None:
        """Whether `agree_identities` would refuse them now; stores nothing."""
        self._identities.check(consumer, queue, current, covered, retention)

    def unhandled_types(
        self,
        consumer: str,
        current: Sequence[Identity],
        covered: Mapping[str, Sequence[Identity]],
        retention: Mapping[str, timedelta],
    ) -> Sequence[str]:
        """The types of which this consumer's claims still count, and which it takes no more; see `Identities`."""
        return self._identities.unhandled(consumer, current, covered, retention)

    def close(self) -> None:
        """Let go of the listening connections and of whoever waits on them."""
        self._wakeup.close()
        self._effects_wakeup.close()
