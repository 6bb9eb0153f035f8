"""A service that is wired, and has worked, before its process is forked: every connection that it can have is open.

Imported by the processes that are forked: `IDEMP_FORKS` names its database, its broker and its folder.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, Table, insert

from idemp import App, Context, Idempotent, Inbox, Outcome
from idemp.broker.making import make_broker
from idemp.errors import AlreadyHandled
from idemp.inbox.sql import create_engine_safely
from idemp.relay import Relay
from idemp.settings import Settings

VARIABLE = "IDEMP_FORKS"
QUEUE = "receipts"
SETTLED = {Outcome.HANDLED, Outcome.REDISPATCHED, Outcome.SKIPPED}
FIRST = 1_000_000  # ids that the parent handles before the fork
metadata = MetaData()
# Without a unique key: an effect that takes place twice is there twice.
effect = Table(
    "effect", metadata, Column("id", Integer, primary_key=True, autoincrement=True), Column("number", Integer)
)


class Service:
    """A wrapped function and an app on one engine, with a publisher of their own."""

    def __init__(self, database: str, broker: str, folder: str) -> None:
        self.folder = Path(folder)
        self.engine = create_engine_safely(database)
        self.broker = make_broker(broker, Settings(allow_at_most_once=True))
        self.publisher = self.broker.publisher()
        self.inbox = Inbox(self.engine)
        self.store: Any = self.inbox.store
        self.handle = self.inbox.wrap(
            self.take, message=dict, type="forks.Take", consumer="forks", policy=Idempotent(key="number"),
            publisher=self.publisher,
        )  # fmt: skip
        self.app = App("forks-web", database=self.engine, broker=self.broker, settings=Settings())

    def take(self, message: dict[str, int], ctx: Context) -> None:
        """One effect and one output."""
        number = message["number"]
        ctx.connection.execute(insert(effect).values(number=number))
        ctx.send({"number": number}, to=QUEUE, type="forks.Receipt")
        self.die_once(number)

    def die_once(self, number: int) -> None:
        """Every fifth message and every fifth start kill their process once, before their COMMIT."""
        if number < FIRST and number % 10 in {3, 4} and self.is_first(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def is_first(self, number: int) -> bool:
        """Whether no process has asked for this number before."""
        with suppress(FileExistsError):
            os.close(os.open(self.folder / f"killed-{number}", os.O_CREAT | os.O_EXCL))
            return True
        return False

    def settle(self, number: int) -> None:
        """Handle a message, as a consumer does to which it comes again and again until it is settled."""
        while True:
            try:
                if self.handle({"number": number}) in SETTLED:
                    return
            except Exception as error:
                self.note(error)
            time.sleep(0.02)  # as a delay tier

    def work(self, number: int) -> None:
        """Settle an even number as a message; start something for an odd one, again and again until it stands."""
        if number % 2 == 0:
            self.settle(number)
            return
        while True:
            try:
                self.start(number)
            except Exception as error:
                self.note(error)
                time.sleep(0.02)
            else:
                return

    def note(self, error: Exception) -> None:
        """Keep an error that nothing excuses: both servers are there all the time."""
        if "InFlight" not in type(error).__name__:
            with (self.folder / "errors").open("a") as file:
                file.write(f"{os.getpid()}: {error!r}\n")

    def start(self, number: int) -> None:
        """The same without a message."""
        with suppress(AlreadyHandled), self.app.initiate(id=str(number)) as unit:
            unit.connection.execute(insert(effect).values(number=number))
            unit.send({"number": number}, to=QUEUE, type="forks.Receipt")
            self.die_once(number)

    def use_all(self) -> None:
        """Open what there is to open: pool, publisher, notifications."""
        self.settle(FIRST + os.getpid())
        self.start(FIRST + 10_000_000 + os.getpid())
        self.store.upkeep.wait_for_pending(0.01)

    def relaying(self) -> None:
        """Ship what is pending from a thread, whatever this thread forks meanwhile."""
        relay = Relay(self.store.upkeep, self.broker.publisher(), lease=timedelta(seconds=10))
        threading.Thread(
            target=relay.run, args=(threading.Event(), timedelta(seconds=0.1)), daemon=True, name="relay"
        ).start()


def configuration(database: str, broker: str, folder: Path) -> dict[str, str]:
    """The environment that wires a service."""
    return {VARIABLE: json.dumps({"database": database, "broker": broker, "folder": str(folder)})}


SERVICE = Service(**json.loads(os.environ[VARIABLE])) if VARIABLE in os.environ else None
if SERVICE is not None:
    SERVICE.use_all()
