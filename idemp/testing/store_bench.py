# ruff: noqa: S101 - tests use this module, and assertions are how they hear from it
"""What tests of inbox stores work with: effects to write and count, threads with results, a store in few words."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import UUID, uuid4

from idemp.errors import TransientStoreError
from idemp.fingerprint import Fingerprint
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Claimed, Identity, Verdict
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine, Table

    from idemp.inbox.port import InboxStore, UnitOfWork
    from idemp.testing.clock import FakeClock

T = TypeVar("T")

RELAY_AFTER = timedelta(seconds=30)
LEASE = timedelta(seconds=60)
MESSAGE_TYPE = "conformance.Message"


class Effects(Protocol):
    """How a test writes an effect in a unit of work, and counts what was committed.

    Where `count` asks the store itself, a further method `on(store)` gives the effects on another instance of it.
    """

    def write(self, unit: UnitOfWork, name: str) -> None:
        """Add one effect of this name, in the unit's transaction."""
        ...

    def count(self, name: str) -> int:
        """How many effects of this name are committed."""
        ...

    def clash(self, unit: UnitOfWork) -> None:
        """Violate a unique constraint of the handler's own, so that the driver raises what it then raises."""
        ...


class HasData(Protocol):
    """A store whose units' `session` is a mapping, such as an `InMemoryStore`."""

    @property
    def data(self) -> dict[Any, Any]:
        """The effects of committed handlings."""
        ...


class MemoryEffects:
    """Effects in a store whose units' `session` is a mapping: an `InMemoryStore`, or a `SmallStore`.

    Example:
        >>> from idemp.inbox.memory import InMemoryStore
        >>> MemoryEffects(InMemoryStore()).count("sale")
        0
    """

    def __init__(self, store: HasData) -> None:
        self._store = store

    def on(self, store: HasData) -> MemoryEffects:
        """The same on another instance."""
        return MemoryEffects(store)

    def write(self, unit: UnitOfWork, name: str) -> None:
        """Add one."""
        unit.session[name, uuid4()] = True

    def count(self, name: str) -> int:
        """Count them."""
        return sum(1 for key in list(self._store.data) if key[0] == name)

    def clash(self, unit: UnitOfWork) -> None:
        """A dictionary has no constraints: any error of the handler's own will do."""
        del unit
        raise KeyError("taken")


class SqlEffects:
    """Effects in two tables of the database's own, made at once.

    Example:
        >>> from idemp.inbox.sql import create_engine_safely
        >>> SqlEffects(create_engine_safely("sqlite://")).count("sale")
        0
    """

    def __init__(self, engine: Engine) -> None:
        from sqlalchemy import bindparam, func, insert, select

        self._engine = engine
        self._effect, self._once = effect_tables()
        self._insert = insert
        self._counting = select(func.count()).where(self._effect.c.name == bindparam("name"))
        self._effect.metadata.create_all(engine)

    def write(self, unit: UnitOfWork, name: str) -> None:
        """Add one."""
        unit.connection.execute(self._insert(self._effect).values(name=name))

    def count(self, name: str) -> int:
        """Count them."""
        with self._engine.connect() as connection:
            return connection.scalar(self._counting, {"name": name}) or 0

    def clash(self, unit: UnitOfWork) -> None:
        """One key twice."""
        for _ in range(2):
            unit.connection.execute(self._insert(self._once).values(name="taken"))


@cache
def effect_tables() -> tuple[Table, Table]:
    """The two tables of `SqlEffects`.

    Example:
        >>> [table.name for table in effect_tables()]
        ['conformance_effect', 'conformance_once']
    """
    from sqlalchemy import Column, Integer, MetaData, String, Table

    metadata = MetaData()
    number = Column("id", Integer, primary_key=True, autoincrement=True)
    effect = Table("conformance_effect", metadata, number, Column("name", String(100), nullable=False))
    return effect, Table("conformance_once", metadata, Column("name", String(100), primary_key=True))


class NoEffects:
    """For stores whose effects a test can't see.

    Example:
        >>> NoEffects().count("sale") is None
        True
    """

    def write(self, unit: UnitOfWork, name: str) -> None:
        """Nothing."""

    def count(self, name: str) -> Any:
        """Unknown: the conformance suite then asserts nothing about effects."""
        del name

    def clash(self, unit: UnitOfWork) -> None:
        """Nothing violates anything."""
        del unit
        raise LookupError("taken")


class Background(Generic[T]):
    """A function on a thread of its own, that has begun.

    Example:
        >>> Background(lambda: 42).result(10)
        42
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._function = function
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._begun.wait()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._future.done()

    def stays(self, seconds: float) -> bool:
        """Whether it is still running after so many seconds; answers `False` as soon as it has ended."""
        return not wait([self._future], seconds).done

    def result(self, timeout: float) -> T:
        """What the function answers or raises, within `timeout` seconds."""
        answer = self._future.result(timeout)
        self._thread.join(timeout)
        return answer

    def _run(self) -> None:
        self._begun.set()
        try:
            self._future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - told to whoever asks for the result
            self._future.set_exception(error)


def make_outputs(number: int = 3, *, to: str = "stock") -> list[Output]:
    """Outputs of one handling, sent to a queue, with ids of their own.

    Example:
        >>> [output.ordinal for output in make_outputs(2)]
        [0, 1]
    """
    return [
        Output(
            id=(made := uuid4()),
            ordinal=ordinal,
            kind=OutputKind.SEND,
            exchange="",
            routing_key=to,
            message=Message(body=b'{"n":%d}' % ordinal, type="stock.Reserve", message_id=str(made)),
        )
        for ordinal in range(number)
    ]


@dataclass
class Bench:
    """A store, and what a test needs to use it in few words."""

    store: InboxStore
    effects: Effects
    clock: FakeClock
    consumer: str
    asks_again: bool
    patience: float
    quiet: float = 0.1

    def claim(self, text: str | None = None, *, payload: Any = 1, wait: float = 10.0, consumer: str = "") -> Claim:
        """A claim of an id that nobody else uses, or of this one, about an entity of its own."""
        text = text or str(uuid4())
        return Claim(
            consumer=consumer or self.consumer,
            id=effective_id("envelope", text),
            message_type=MESSAGE_TYPE,
            fingerprint=None if payload is None else Fingerprint().of(payload),
            wait=timedelta(seconds=wait),
            entity=text,
        )

    def handle(self, claim: Claim, outputs: Sequence[Output] = (), *, effect: str = "", late: bool = False) -> Claimed:
        """A whole handling; again, a bounded number of times, where the store may ask for that."""
        for _ in range(10 if self.asks_again else 0):
            try:
                return self._handle_once(claim, outputs, effect, late=late)
            except TransientStoreError:
                continue
        return self._handle_once(claim, outputs, effect, late=late)

    def repeat(self, work: Callable[[], T]) -> T:
        """What `work` answers, done again while the store asks for that, within `patience`."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return work()
            except TransientStoreError:
                if time.monotonic() > deadline:
                    raise

    def effects_on(self, store: InboxStore) -> Effects:
        """The effects as another instance sees them: through itself, where they say how."""
        on: Callable[[InboxStore], Effects] | None = getattr(self.effects, "on", None)
        return self.effects if on is None else on(store)

    def look(self, claim: Claim) -> Claimed:
        """The verdict on a claim that is not kept."""
        with self.store.begin([claim]) as unit:
            return unit.claim(claim)

    def pending(self, claim: Claim) -> list[UUID]:
        """Which outputs of a handling wait for their confirm, as a duplicate sees it."""
        found = self.look(claim)
        assert found.verdict is Verdict.DUPLICATE
        return [stored.output.id for stored in found.outputs if stored.pending]

    def counted(self, effect: str, number: int) -> None:
        """So many effects are committed."""
        found: int | None = self.effects.count(effect)
        assert found is None or found == number, f"{found} effects {effect!r} are committed, not {number}"

    def agree(
        self,
        identity: Identity,
        window: timedelta,
        *,
        former: Identity | None = None,
        consumer: str = "",
        queue: str = "",
    ) -> None:
        """Agree on what identifies messages, as a worker does at its start; `former` is what `previous=` names."""
        self.store.upkeep.agree_identities(
            consumer or self.consumer,
            queue or f"{self.consumer}.queue",
            [identity],
            {identity.message_type: [former] if former else []},
            {identity.message_type: window},
        )

    def consume(self, period: timedelta) -> None:
        """The consumer consumes for so long: a beat each half minute."""
        end = self.clock.now() + period
        self.store.upkeep.beat("conformance", relay=False, consumers=[self.consumer])
        while (left := end - self.clock.now()) > timedelta(0):
            self.clock.advance(min(left, timedelta(seconds=30)))
            self.store.upkeep.beat("conformance", relay=False, consumers=[self.consumer])

    def _handle_once(self, claim: Claim, outputs: Sequence[Output], effect: str, *, late: bool) -> Claimed:
        with self.store.begin([claim]) as unit:
            if late:
                self._write(unit, effect)
                claimed = unit.claim_and_store(claim, outputs, RELAY_AFTER)
            else:
                claimed = unit.claim(claim)
            if claimed.verdict is Verdict.CLAIMED:
                if not late:
                    self._write(unit, effect)
                    unit.store_outputs(claim, outputs, RELAY_AFTER)
                unit.commit()
            return claimed

    def _write(self, unit: UnitOfWork, effect: str) -> None:
        if effect:
            self.effects.write(unit, effect)
