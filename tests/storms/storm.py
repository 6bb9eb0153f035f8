"""A storm on RabbitMQ or ActiveMQ and PostgreSQL, and the count of what it left behind.

`python -m tests.storms --messages 5000 --kills 200` runs it at full size on servers of its own.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from uuid import UUID, uuid4

from sqlalchemy import Engine, text

from idemp.broker.making import make_broker
from idemp.broker.port import Binding, Topology
from idemp.cli.exits import ExitCode
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.messages import Message, parse_json
from idemp.settings import Settings
from tests.servers.activemq import ActiveMQ
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import wait_until
from tests.servers.rabbitmq import RabbitMQ
from tests.storms.app import AUDIT_QUEUE, CONSUMER, Charge, metadata
from tests.storms.looking import id_of_output, left_behind, number_from, sent_to
from tests.storms.workers import Workers, sharing

OUTPUT_TYPES = ("storm.Invoice", "storm.Charged")
WORKERS = 3
DELAYS = (1.0, 5.0, 15.0, 60.0)


@dataclass
class Report:
    """What was done, and what is left; read from the database and the queues, never from the workers."""

    messages: int = 0
    duplicates_sent: int = 0
    kills: int = 0
    database_restarts: int = 0
    broker_restarts: int = 0
    effects: int = 0
    lost: int = 0
    doubled: int = 0
    outputs_expected: int = 0
    outputs_seen: int = 0
    outputs_missing: int = 0
    outputs_under_several_ids: int = 0
    outputs_under_a_wrong_id: int = 0
    outputs_with_several_bodies: int = 0
    pending: int = 0
    left_in_queues: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def promises_held(self) -> bool:
        """Whether nothing is lost, doubled, or left."""
        broken = (
            self.lost, self.doubled, self.outputs_missing, self.outputs_under_several_ids,
            self.outputs_under_a_wrong_id, self.outputs_with_several_bodies, self.pending,
        )  # fmt: skip
        return not any(broken) and not any(self.left_in_queues.values()) and self.effects == self.messages


class Storm:
    """Feeds, kills, restarts, waits for rest, counts."""

    def __init__(
        self,
        database: PostgreSQL,
        broker: RabbitMQ | ActiveMQ,
        *,
        messages: int,
        seed: int,
        batches: Sequence[int] = (1,),
        through: Callable[[str], str] = str,
    ) -> None:
        self._database = database
        self._broker = broker
        self._queues = make_broker(broker.url, Settings())
        self._random = random.Random(seed)
        self._url = through(database.create_database("storm"))
        self._engine: Engine = create_engine_safely(self._url)
        self._workers = Workers(
            WORKERS,
            ["tests.storms.app:app", "--log-level", "error"],
            {
                "IDEMP_DATABASE_URL": self._url,
                "IDEMP_BROKER_URL": broker.url,
                "IDEMP_RELAY_AFTER": "2s",
                # What a killed worker's relay had taken comes again after this.
                "IDEMP_RELAY_LEASE": "6s",
            },
            each=sharing(Charge.__message_type__, batches),
        )
        self._orders = [uuid4() for _ in range(messages)]
        self.report = Report(messages=messages, outputs_expected=2 * messages)

    def run(self, *, kills: int, database_restarts: int, broker_restarts: int) -> Report:
        """The whole storm."""
        started = time.monotonic()
        upgrade(self._engine, Tables())
        metadata.create_all(self._engine)
        self._declare()
        self._feed()
        try:
            self._rage(kills, database_restarts, broker_restarts)
            self._rest()
        finally:
            self._workers.stop()
        assert ExitCode.REFUSED not in self._workers.exit_codes, (
            "a worker refused its settings, and others did its work"
        )
        self._count()
        self._engine.dispose()
        self.report.seconds = round(time.monotonic() - started, 1)
        return self.report

    # Doing ------------------------------------------------------------------------------------------------------------

    def _declare(self) -> None:
        self._queues.declare(
            Topology(
                exchange="idemp",
                queues=(CONSUMER, AUDIT_QUEUE),
                bindings=(Binding(AUDIT_QUEUE, "storm.Charged"),),
                delays=DELAYS,
            )
        )

    def _feed(self) -> None:
        """Each order once, every tenth a second time under another transport id, in random order."""
        sent = [*self._orders, *self._orders[::10]]
        self._random.shuffle(sent)
        self.report.duplicates_sent = len(sent) - len(self._orders)
        publisher = self._queues.publisher()
        outputs = [sent_to(CONSUMER, Charge(order_id=order, cents=order.int % 1000), str(uuid4())) for order in sent]
        refused = [answer for answer in publisher.publish(outputs, 120.0) if answer is not None]
        publisher.close()
        assert not refused, refused[:3]

    def _rage(self, kills: int, database_restarts: int, broker_restarts: int) -> None:
        """Kill a random worker each time a few more orders are done; restart servers in between."""
        self._workers.start()
        blows: list[Callable[[], None]] = [self._kill] * kills
        blows += [self._restart_database] * database_restarts + [self._restart_broker] * broker_restarts
        self._random.shuffle(blows)
        step = self.report.messages / (len(blows) + 1)
        for number, blow in enumerate(blows, start=1):
            goal = min(int(number * step), self.report.messages - 1)
            wait_until(partial(self._reached, goal), f"{goal} effects", seconds=120.0)
            blow()

    def _kill(self) -> None:
        self._workers.kill_one(self._random)
        self.report.kills += 1

    def _restart_database(self) -> None:
        self._database.stop_immediately()
        self._database.start()
        self.report.database_restarts += 1

    def _restart_broker(self) -> None:
        if isinstance(self._broker, ActiveMQ):
            self._broker.kill()  # it has every message on the disk before it answers, and is back in a second
            self._broker.start()
        else:
            self._broker.restart()
        self.report.broker_restarts += 1

    def _rest(self) -> None:
        """Until every order is done, nothing pends and nothing waits."""

        def at_rest() -> bool:
            self._workers.replace_the_dead()
            return self._effects() >= self.report.messages and self._pending() == 0 and not any(self._left().values())

        wait_until(at_rest, "rest", seconds=180.0)

    # Counting ---------------------------------------------------------------------------------------------------------

    def _reached(self, goal: int) -> bool:
        self._workers.replace_the_dead()
        return self._effects() >= goal

    def _effects(self) -> int:
        return number_from(self._engine, "SELECT count(DISTINCT order_id) FROM effect")

    def _pending(self) -> int:
        return number_from(self._engine, "SELECT count(*) FROM idemp_pending")

    def _left(self) -> dict[str, int]:
        """Messages of every queue but the audit's."""
        return left_behind(self._queues, CONSUMER, DELAYS)

    def _count(self) -> None:
        report = self.report
        with self._engine.connect() as connection:
            effects = Counter(row.order_id for row in connection.execute(text("SELECT order_id FROM effect")))
        report.effects = sum(effects.values())
        report.lost = len([order for order in self._orders if not effects[order]])
        report.doubled = len([order for order, count in effects.items() if count > 1])
        report.pending = self._pending()
        report.left_in_queues = self._left()
        ids: dict[tuple[UUID, str], set[str]] = defaultdict(set)
        bodies: dict[tuple[UUID, str], set[bytes]] = defaultdict(set)
        for message in self._audited():
            order = UUID(parse_json(message)["order_id"])
            report.outputs_seen += 1
            ids[order, str(message.type)].add(str(message.message_id))
            bodies[order, str(message.type)].add(message.body)
        for order in self._orders:
            for ordinal, message_type in enumerate(OUTPUT_TYPES):
                seen = ids[order, message_type]
                report.outputs_missing += not seen
                report.outputs_under_several_ids += len(seen) > 1
                wanted = {id_of_output(CONSUMER, "storm.Charge", order, ordinal)}
                report.outputs_under_a_wrong_id += bool(seen) and seen != wanted
                report.outputs_with_several_bodies += len(bodies[order, message_type]) > 1

    def _audited(self) -> list[Message]:
        with self._queues.take(AUDIT_QUEUE, None, 1_000_000) as taken:
            return list(taken.messages)


def as_json(report: Report) -> dict[str, object]:
    """The report with its verdict."""
    return {**asdict(report), "promises_held": report.promises_held}


def progress(storm: Storm, stop: threading.Event) -> None:
    """One line every few seconds."""
    while not stop.wait(5.0):
        print(f"  {storm._effects()} of {storm.report.messages} done, {storm.report.kills} kills", file=sys.stderr)
