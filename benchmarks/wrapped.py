"""Consumers of the same work, with idemp."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from benchmarks.gate import Gate, GatedBroker
from benchmarks.variants import Variant
from benchmarks.work import DONE, ORDER, SETTINGS, Order, Place
from idemp import App, BatchContext, Context, Idempotent
from idemp.consuming import Consuming, KeptAlive
from idemp.inbox.sql import Tables
from idemp.inbox.sql.claim_postgresql import PostgresDialect
from idemp.inbox.sql.schema import upgrade
from idemp.suspects import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from idemp.inbox.sql.claiming import History


class Poison(Exception):
    """What the handler of a poisonous order raises."""


class Wrapped(Variant):
    """idemp, as its worker runs it: consuming threads, marks in batches.

    Args:
        place: the queues and the table that are its own.
        waits: whether each confirm is waited for before the next delivery is handled.
        idempotent: whether the message type is opted in.
        threads: how many consume.
        gate: what holds deliveries back, if it is shared with other processes.
        policy: further options of the type's policy.
    """

    def __init__(
        self,
        place: Place,
        *,
        waits: bool = False,
        idempotent: bool = True,
        threads: int = 1,
        gate: Gate | None = None,
        **policy: Any,
    ) -> None:
        super().__init__(place)
        upgrade(place.engine, Tables())
        self._gate = gate or Gate()
        broker = self.around(GatedBroker(place.broker, self._gate, waits=waits))
        self.app = App(place.queue, database=place.engine, broker=broker, settings=SETTINGS)
        self.register(Idempotent(**policy) if idempotent else None)
        self.arrange()
        self.app.start()
        self._stop = threading.Event()
        self._kept, self._turns = KeptAlive(), Turns(solitary=threads == 1)
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def around(self, broker: Any) -> Any:
        """What the app is given for a broker."""
        return broker

    def arrange(self) -> None:
        """What is to be otherwise before the app starts."""

    def register(self, policy: Idempotent | None) -> None:
        """The handler."""
        place = self.place

        @self.app.handler(Order, type=ORDER, policy=policy)
        def handle(order: Order, ctx: Context) -> None:
            ctx.connection.execute(place.insert, {"order_id": order.order_id})
            if order.is_poison:
                raise Poison(order.order_id)
            ctx.send(place.done_by(order), to=place.out, type=DONE)

    def consume(self, count: int) -> float:
        """In its own threads."""
        return self._gate.let(count)

    def stay_open(self) -> None:
        """From now on hand out whatever arrives."""
        self._gate.opened.set()

    def keep_alive(self) -> None:
        """Its threads' heartbeats; in a worker another thread does it."""
        self._kept.keep_alive()

    def close(self) -> None:
        """Close what is open."""
        self._stop.set()
        self._gate.opened.set()
        for thread in self._threads:
            thread.join()
        self.app.close()
        super().close()

    def _run(self) -> None:
        Consuming(self.app, self._stop, self._kept, self._turns).run()


class StatementByStatement(Wrapped):
    """idemp as on databases whose driver has no simple query protocol: bound statements through SQLAlchemy Core."""

    def arrange(self) -> None:
        """Another dialect."""
        store: Any = self.app.store
        store.dialect = store.places.plain = BoundDialect(store.tables)


class BoundDialect(PostgresDialect):
    """PostgreSQL without messages of several statements."""

    def token(self, connection: Connection) -> object | None:
        """A statement."""
        token: object = connection.execute(self._first_token).scalar_one()
        return token

    def _waited_for(self, connection: Connection, claim: str, wait: timedelta) -> None:
        del connection, claim, wait

    def last_message(self, connection: Connection, claimed: object, stored: str = "") -> None:
        """None."""
        del connection, claimed, stored

    def record(self, connection: Connection, confirmed: Sequence[UUID], history: History) -> bool:
        """Not in one round trip."""
        del connection, confirmed, history
        return False

    def is_same_rolled_back(self, connection: Connection, claimed: object | None) -> bool:
        """The driver rolls back."""
        return self.is_same_transaction(connection, claimed, None)

    def roll_back(self, connection: Connection) -> None:
        """The driver does."""


class WrappedSets(Wrapped):
    """idemp with a batch handler: one INSERT of many rows."""

    def register(self, policy: Idempotent | None) -> None:
        """The handler."""
        place = self.place
        assert policy is not None

        @self.app.batch_handler(Order, type=ORDER, policy=policy)
        def handle(orders: list[Order], ctx: BatchContext) -> None:
            ctx.connection.execute(place.insert, [{"order_id": order.order_id} for order in orders])
            for order, each in zip(orders, ctx.each, strict=True):
                each.send(place.done_by(order), to=place.out, type=DONE)


class Duplicates(Wrapped):
    """Redeliveries of what was handled before."""

    known: Sequence[str] = ()

    def prepare(self, count: int) -> None:
        """The same messages each time; the first time they are handled, which is not counted."""
        if len(self.known) < count:
            self.known = self.place.send(count)
            self.consume(count)
        self.place.send_again(self.known[:count])
