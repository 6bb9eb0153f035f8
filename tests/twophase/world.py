"""A consumer that writes to its inbox's database and to others, in this process and in those that are killed."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, text

from idemp import App, Context, Message, Outcome, TwoPhase
from idemp.broker.memory import InMemoryBroker
from idemp.dispatch import Dispatcher
from idemp.inbox.sql import create_engine_safely
from idemp.protocol import Protocol
from idemp.settings import Settings
from idemp.twophase import BranchId
from idemp.twophase.sql import coordinator_of
from tests.inbox.sql import kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from idemp.twophase import Coordinator

PAY = "billing.Pay"
SOMEBODY = "somebody-else"


@dataclass(frozen=True)
class Place:
    """Where a world is, for other processes.

    Attributes:
        inbox: URL of the inbox's database.
        others: those of the other databases, by their names.
        sent: a file with a line for each output that was sent.
    """

    inbox: str
    others: dict[str, str]
    sent: Path


class Noting:
    """A publisher that writes down what it sends, and has it confirmed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def publish(self, outputs: Sequence[Any], timeout: float) -> list[None]:
        with self._path.open("a") as file:
            for output in outputs:
                file.write(f"{output.message.causation_id} {output.id}\n")
        return [None for _ in outputs]

    def keep_alive(self) -> None: ...

    def close(self) -> None: ...


class Consumer:
    """One process's part: an app with engines of its own."""

    def __init__(self, place: Place, **policy: Any) -> None:
        self.engine = create_engine_safely(place.inbox)
        self.app = App(
            "billing",
            database=self.engine,
            databases=dict(place.others),
            broker=InMemoryBroker(),
            settings=Settings(),
        )
        self.before_writing: list[Any] = []  # called by the handler after its claim
        self.after_writing: list[Any] = []  # and at its end

        def pay(message: dict[str, Any], ctx: Context) -> None:
            for each in self.before_writing:
                each(ctx)
            ctx.connection.execute(text("INSERT INTO effect (n) VALUES (:n)"), message)
            for name in ctx_names(message, place):
                ctx.database(name).session.execute(text("INSERT INTO effect (n) VALUES (:n)"), message)
            ctx.send({"n": message["n"]}, to="stock", type="stock.Reserve")
            for each in self.after_writing:
                each(ctx)

        names = tuple(place.others)
        self.app.handler(dict, type=PAY, policy=TwoPhase(*names, key="n", claim_wait="1s", **policy))(pay)
        self.app.registry.build({})
        self.protocol = self.another(place.sent)

    def another(self, sent: Path) -> Protocol:
        consumer = self.app.consumer
        return Protocol(consumer, Dispatcher(Noting(sent), consumer.store, consumer.clock), pause=lambda _: None)

    @property
    def coordinator(self) -> Coordinator:
        assert self.app.coordinator is not None
        return self.app.coordinator

    def deliver(self, n: int, **said: Any) -> Outcome:
        return self.protocol.process(message(n, **said))

    def close(self) -> None:
        self.app.close()
        kept.dispose(self.engine)


def ctx_names(body: dict[str, Any], place: Place) -> list[str]:
    """Which databases a message has written to; all of them if it does not say."""
    return body.get("names", list(place.others))


def message(n: int, **said: Any) -> Message:
    return Message(body=json.dumps({"n": n, **said}).encode(), type=PAY, message_id=f"pay-{n}")


class World:
    """The databases, with somebody else's prepared transactions in them; and what is to be seen there."""

    def __init__(self, place: Place, engines: dict[str, Engine]) -> None:
        self.place = place
        self.engines = engines  # that of the inbox under ""
        self.consumer = Consumer(place)
        self.foreign = {name: self._plant(name) for name in place.others}

    def _plant(self, name: str) -> list[str]:
        """Transactions of somebody else, and of another inbox: names like ours, which are not."""
        names = [f"{SOMEBODY}-{uuid.uuid4().hex[:8]}", BranchId(os.urandom(8), 1, uuid.uuid4(), bytes(8), 0).text]
        for each in names:
            with self.engines[name].connect() as connection:
                if self.is_postgresql(name):
                    connection.execute(text("INSERT INTO foreigner (n) VALUES (1)"))
                    connection.connection.driver_connection.execute(f"PREPARE TRANSACTION '{each}'")
                else:
                    for said in ("XA START", "INSERT INTO foreigner (n) VALUES (1)", "XA END", "XA PREPARE"):
                        connection.exec_driver_sql(said if "INTO" in said else f"{said} '{each}'")
                    connection.invalidate()
        return sorted(names)

    def is_postgresql(self, name: str) -> bool:
        return self.engines[name].dialect.name == "postgresql"

    def prepared(self, name: str) -> list[str]:
        """All that is prepared on this database, of whomever."""
        with self.engines[name].connect() as connection:
            if self.is_postgresql(name):
                listed = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                return sorted(connection.scalars(text(listed)))
            return sorted(bytes(row.data).decode() for row in connection.execute(text("XA RECOVER")))

    def in_doubt(self) -> list[str]:
        """What is prepared, and this inbox's; MariaDB lists what is anywhere on its server."""
        inbox = self.consumer.coordinator.decisions.inbox()
        found = [(each, BranchId.parse(each)) for name in self.place.others for each in self.prepared(name)]
        return [each for each, branch in found if branch is not None and branch.inbox == inbox]

    def others_are_untouched(self) -> bool:
        """Whether all that was planted is still prepared."""
        return all(set(names) <= set(self.prepared(name)) for name, names in self.foreign.items())

    def effects(self, n: int) -> list[int]:
        """How often a message had its effect: in the inbox's database, and in each other one."""
        found = []
        for engine in self.engines.values():
            with engine.connect() as connection:
                found.append(connection.scalar(text("SELECT COUNT(*) FROM effect WHERE n = :n"), {"n": n}) or 0)
        return found

    def decisions(self) -> int:
        with self.engines[""].connect() as connection:
            return connection.scalar(text("SELECT COUNT(*) FROM idemp_decision")) or 0

    def ids_sent(self, n: int) -> Counter[str]:
        """The ids of the outputs of a message, and how often each was sent."""
        lines = self.place.sent.read_text().splitlines() if self.place.sent.exists() else []
        return Counter(line.split()[1] for line in lines if line.split()[0] == f"pay-{n}")

    def all_is_well(self, n: int) -> None:
        """Effects once everywhere, nothing left, nobody else touched, outputs under one id."""
        assert self.effects(n) == [1] * len(self.engines)
        assert self.in_doubt() == []
        assert self.decisions() == 0
        assert self.others_are_untouched()
        assert len(self.ids_sent(n)) == 1

    def close(self) -> None:
        for name in self.foreign:
            for each in {*self.in_doubt(), *self.foreign[name]} & {*self.prepared(name)}:
                with self.engines[name].connect() as connection:
                    made = connection.execution_options(isolation_level="AUTOCOMMIT")
                    said = "ROLLBACK PREPARED" if self.is_postgresql(name) else "XA ROLLBACK"
                    made.exec_driver_sql(f"{said} '{each}'")
        self.consumer.close()


@contextmanager
def world(request: pytest.FixtureRequest, folder: Path, inbox: str, **others: str) -> Iterator[World]:
    """A world on databases of its own: `inbox` and `others` name kinds of servers."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(kept.database(request.getfixturevalue(kind)))
            for name, kind in {"": inbox, **others}.items()
        }
        kept.make_tables(engines[""])
        for engine in engines.values():
            with engine.begin() as connection:
                connection.execute(text("CREATE TABLE effect (n int)"))
                connection.execute(text("CREATE TABLE foreigner (n int)"))
        urls = {name: engine.url.render_as_string(hide_password=False) for name, engine in engines.items()}
        made = World(Place(urls.pop(""), urls, folder / "sent"), engines)
        stack.callback(made.close)
        yield made


def coordinator(consumer: Consumer, place: Place) -> Coordinator:
    """Another one on the same inbox, as another process has it."""
    return coordinator_of(consumer.app.store, dict(place.others))
