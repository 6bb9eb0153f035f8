"""`python -m benchmarks twophase`: what a handling in two databases costs by two-phase commit, beside what one would prefer.

Each handling writes two rows and emits one message. *One database*: both rows in the inbox's. *Two-phase*: the second one in
another database on the same server, or on MariaDB. *Message*: the second row by a consumer with its inbox in that database,
whose handling counts, too. All are handled one at a time in one process, by the real protocol; the broker is in memory and
confirms at once. Blocks are interleaved, in another order each round; a ratio pairs the blocks of one round. At the end rows
are counted, and nothing may be in doubt, or the figures are void.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from benchmarks import telling
from benchmarks.servers import Servers
from idemp import App, Context, Idempotent, Message, TwoPhase
from idemp.broker.memory import InMemoryBroker
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

    from idemp.protocol import Protocol

TYPE: Final = "bench.Pay"
ONE, TWO, MARIADB, SENT = "one database", "two-phase, PostgreSQL", "two-phase, MariaDB", "a message to its own consumer"
_INSERT: Final = text("INSERT INTO effect (id) VALUES (:id)")


class Confirms:
    """A publisher that confirms at once."""

    def publish(self, outputs: Sequence[Any], timeout: float) -> list[None]:
        del timeout
        return [None for _ in outputs]

    def keep_alive(self) -> None:
        """Nothing to service."""

    def close(self) -> None:
        """Nothing to close."""


class Bench:
    """All variants, connected at once."""

    def __init__(self, servers: Servers, open_: ExitStack) -> None:
        self._open = open_
        self._urls = {name: servers.database("mariadb" if name == MARIADB else "postgresql") for name in _PLACES}
        self.engines = {name: self._engine(url) for name, url in self._urls.items()}
        self._number = 0
        self.handled = dict.fromkeys((ONE, TWO, MARIADB, SENT), 0)
        own = self._protocol("own", "other", Idempotent(key="id"), self._second)
        sender = self._protocol("sender", "inbox", Idempotent(key="id"), self._first)
        self._do: dict[str, Callable[[Message], object]] = {
            ONE: self._protocol("one", "inbox", Idempotent(key="id"), self._both).process,
            TWO: self._protocol("two", "inbox", TwoPhase("other", key="id"), self._in("other")).process,
            MARIADB: self._protocol("maria", "inbox", TwoPhase(MARIADB, key="id"), self._in(MARIADB)).process,
            SENT: lambda message: (sender.process(message), own.process(message)),
        }

    def _engine(self, url: str) -> Engine:
        engine = create_engine_safely(url)
        self._open.callback(engine.dispose)
        upgrade(engine, Tables())
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (id int)"))
        return engine

    def _protocol(self, name: str, inbox: str, policy: Idempotent, handler: Callable[..., Any]) -> Protocol:
        others = {name: self.engines[name] for name in policy.databases}
        app = App(name, database=self.engines[inbox], databases=others, broker=InMemoryBroker(), settings=Settings())
        app.handler(dict, type=TYPE, policy=policy)(handler)
        app.start()
        return app.protocol(Confirms())

    @staticmethod
    def _both(message: dict[str, int], ctx: Context) -> None:
        for _ in range(2):
            ctx.connection.execute(_INSERT, message)
        ctx.send(message, to="out", type="bench.Done")

    @staticmethod
    def _first(message: dict[str, int], ctx: Context) -> None:
        ctx.connection.execute(_INSERT, message)
        ctx.send(message, to="out", type="bench.Done")

    @staticmethod
    def _second(message: dict[str, int], ctx: Context) -> None:
        ctx.connection.execute(_INSERT, message)

    @staticmethod
    def _in(other: str) -> Callable[..., None]:
        def handle(message: dict[str, int], ctx: Context) -> None:
            ctx.connection.execute(_INSERT, message)
            ctx.database(other).connection.execute(_INSERT, message)
            ctx.send(message, to="out", type="bench.Done")

        return handle

    def block(self, name: str, messages: int) -> float:
        """Messages a second."""
        first = self._number = self._number + messages
        made = [
            Message(body=json.dumps({"id": number}).encode(), type=TYPE, message_id=str(number))
            for number in range(first, first + messages)
        ]
        begun = time.perf_counter()
        for message in made:
            self._do[name](message)
        seconds = time.perf_counter() - begun
        self.handled[name] += messages
        return messages / seconds

    def check(self) -> None:
        """Void figures raise."""
        of = {name: self._count(name, "effect") for name in _PLACES}
        one, two, maria, sent = (self.handled[name] for name in (ONE, TWO, MARIADB, SENT))
        wanted = {"inbox": 2 * one + two + maria + sent, "other": two + sent, MARIADB: maria}
        left = sum(self._count(name, "idemp_decision") for name in _PLACES)
        if of != wanted or left:
            raise RuntimeError(f"the figures are void: {of}, and it should be {wanted}; {left} decisions are left")

    def _count(self, name: str, table: str) -> int:
        with self.engines[name].connect() as connection:
            return int(connection.scalar(text(f"SELECT COUNT(*) FROM {table}")) or 0)


_PLACES: Final = ("inbox", "other", MARIADB)


def measure(rounds: int, messages: int) -> dict[str, Any]:
    """Interleaved blocks of each variant."""
    chance, rates = random.Random(7), {name: [] for name in (ONE, TWO, MARIADB, SENT)}  # type: dict[str, list[float]]
    with Servers() as servers, ExitStack() as open_:
        bench = Bench(servers, open_)
        for number in range(rounds + 1):
            for name in chance.sample(list(rates), len(rates)):
                rate = bench.block(name, messages)
                if number:  # the first round warms up
                    rates[name].append(rate)
        bench.check()
    figures = {f"{name}, rate": telling.figure(values, "messages/s") for name, values in rates.items()}
    for name in (TWO, MARIADB, SENT):
        ratios = [other / one for other, one in zip(rates[name], rates[ONE], strict=True)]
        figures[f"{name} / {ONE}"] = telling.figure(ratios, "")
    ratios = [two / sent for two, sent in zip(rates[TWO], rates[SENT], strict=True)]
    figures[f"{TWO} / {SENT}"] = telling.figure(ratios, "")
    where = (
        f"{rounds} rounds of {messages} handlings, one at a time, on PostgreSQL with durability and MariaDB beside it"
    )
    return telling.found(where, figures, {})


def main(arguments: Sequence[str]) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks twophase", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--messages", type=int, default=200)
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    return telling.tell("twophase", measure(options.rounds, options.messages), options)
