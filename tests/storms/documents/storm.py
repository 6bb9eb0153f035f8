"""A storm on RabbitMQ and a document store, and the count of what it left behind."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID, uuid4

import kombu

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker
from idemp.broker.port import Binding, Topology
from idemp.cli.exits import ExitCode
from idemp.inbox.document.attempts import Attempt
from idemp.inbox.document.collector import Collector, scanned
from idemp.inbox.document.state import State
from tests.servers.process import wait_until
from tests.servers.rabbitmq import RabbitMQ
from tests.storms.documents.messages import AUDIT_QUEUE, CONSUMER, WHERE, Charge, collection, inbox
from tests.storms.looking import depths, id_of_output, queues_of, sent_to
from tests.storms.workers import Workers

OUTPUT_TYPES = ("storm.Invoice", "storm.Charged")
WORKERS = 3
MESSAGES_PER_ACCOUNT = 50
DELAYS = (1.0, 5.0, 15.0, 60.0)
ORPHANED_AFTER = timedelta(seconds=2)
COLLECTING_SECONDS = 3.0
ROUNDS = 5


@dataclass
class Report:
    """What was done, and what is left; read from the documents and the queues, never from the workers."""

    messages: int = 0
    copies_sent: int = 0
    kills: int = 0
    effects: int = 0
    lost: int = 0
    doubled: int = 0
    wrong_balances: int = 0
    outputs_expected: int = 0
    outputs_seen: int = 0
    outputs_missing: int = 0
    outputs_under_several_ids: int = 0
    outputs_under_a_wrong_id: int = 0
    outputs_with_several_bodies: int = 0
    outputs_of_a_run_that_did_not_count: int = 0
    orphans_collected: int = 0
    orphans_left: int = 0
    left_in_queues: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def promises_held(self) -> bool:
        """Whether nothing is lost, doubled, or left."""
        broken = (
            self.lost, self.doubled, self.wrong_balances, self.outputs_missing, self.outputs_under_several_ids,
            self.outputs_under_a_wrong_id, self.outputs_with_several_bodies, self.outputs_of_a_run_that_did_not_count,
            self.orphans_left,
        )  # fmt: skip
        return not any(broken) and not any(self.left_in_queues.values()) and self.effects == self.messages


class Orphans(Collector):
    """The collector, for orphans alone: claims are kept, so that a copy that comes late is a duplicate."""

    def expired(self, *_: object) -> bool:
        """No claim is."""
        return False


class Storm:
    """Feeds, kills, collects meanwhile, waits for rest, counts.

    Args:
        where: the server, as workers are told of it: `couchdb http://…`.
        broker: on which the workers consume.
        messages: how many; every tenth comes a second time.
        seed: of the dice.
    """

    def __init__(self, where: str, broker: RabbitMQ, *, messages: int, seed: int) -> None:
        self._where = where
        self._broker = broker
        self._random = random.Random(seed)
        environment = {WHERE: where, "IDEMP_BROKER_URL": broker.url, "IDEMP_THREADS": "2"}
        self._workers = Workers(WORKERS, ["tests.storms.documents.app:app", "--log-level", "error"], environment)
        accounts = [f"account-{number}" for number in range(max(1, messages // MESSAGES_PER_ACCOUNT))]
        self._charges = [
            Charge(order_id=uuid4(), account=self._random.choice(accounts), cents=self._random.randrange(1, 1000))
            for _ in range(messages)
        ]
        self._inbox = inbox(where)
        self._orphans = Orphans(self._inbox.states, self._inbox.own, self._inbox.clock, self._inbox.paths)
        self._stop = threading.Event()
        self.report = Report(messages=messages, outputs_expected=2 * messages)

    def run(self, *, kills: int) -> Report:
        """The whole storm."""
        started = time.monotonic()
        for name in ("accounts", "idemp"):
            with closing(collection(self._where, name)) as documents:
                documents.create()
        self._declare()
        self._feed()
        collecting = threading.Thread(target=self._collect)
        collecting.start()
        try:
            self._rage(kills)
            for _ in range(ROUNDS):
                self._rest()
                self._workers.stop()
                # Brokers count what lies in queues, not what is in a worker's hands: that is back now.
                if not any(self._left().values()):
                    break
                self._workers.start()
        finally:
            self._workers.stop()
            self._stop.set()
            collecting.join()
        assert ExitCode.REFUSED not in self._workers.exit_codes, "a worker refused its settings"
        self._count()
        self._inbox.close()
        self.report.seconds = round(time.monotonic() - started, 1)
        return self.report

    # Doing ------------------------------------------------------------------------------------------------------------

    def _declare(self) -> None:
        KombuBroker(self._broker.url).declare(
            Topology(
                exchange="idemp",
                queues=(CONSUMER, AUDIT_QUEUE),
                bindings=(Binding(AUDIT_QUEUE, "storm.Charged"),),
                delays=DELAYS,
            )
        )

    def _feed(self) -> None:
        """Each charge once, every tenth a second time under another transport id, in random order."""
        sent = [*self._charges, *self._charges[::10]]
        self._random.shuffle(sent)
        self.report.copies_sent = len(sent) - len(self._charges)
        with closing(ConfirmingPublisher(self._broker.url)) as publisher:
            outputs = [sent_to(CONSUMER, charge, str(uuid4())) for charge in sent]
            refused = [answer for answer in publisher.publish(outputs, 120.0) if answer is not None]
        assert not refused, refused[:3]

    def _rage(self, kills: int) -> None:
        """Kill a random worker each time a few more messages are done."""
        self._workers.start()
        for number in range(1, kills + 1):
            goal = number * self.report.messages // (kills + 1)
            wait_until(partial(self._reached, goal), f"{goal} effects", seconds=120.0)
            self._workers.kill_one(self._random)
            self.report.kills += 1

    def _rest(self) -> None:
        """Until every message is done and nothing waits."""

        def at_rest() -> bool:
            self._workers.replace_the_dead()
            return not any(self._left().values()) and len(self._effects()) >= self.report.messages

        with suppress(TimeoutError):  # then the count says what is missing
            wait_until(at_rest, "rest", seconds=120.0)

    def _collect(self) -> None:
        """Collect orphans all the time, beside those whose writes are under way."""
        while not self._stop.wait(COLLECTING_SECONDS):
            self._collect_once()

    def _collect_once(self) -> None:
        collected = self._orphans.collect(
            CONSUMER,
            self._unnamed(),
            lambda _: ORPHANED_AFTER,
            lambda window: datetime.now(UTC) - window,
            limit=10_000,
        )
        self.report.orphans_collected += collected.orphans

    def _unnamed(self) -> Iterator[Attempt]:
        """Attempts but those that are named already: two reads for each of them would be most of the storm's work."""
        states = [State(found.id, found) for found in scanned(self._inbox.states, "account-")]
        named = {record.attempt for state in states for record in state.records(CONSUMER)}
        return (attempt for attempt in self._orphans.attempts() if attempt.name not in named)

    # Counting ---------------------------------------------------------------------------------------------------------

    def _reached(self, goal: int) -> bool:
        """By what came out of it, which costs the document store nothing."""
        self._workers.replace_the_dead()
        return KombuBroker(self._broker.url).depth(AUDIT_QUEUE) >= goal * len(OUTPUT_TYPES)

    def _effects(self) -> dict[UUID, list[str]]:
        """The runs whose effects the accounts hold, by order."""
        effects: dict[UUID, list[str]] = defaultdict(list)
        for account in scanned(self._inbox.states, "account-"):
            for order, run in account.body.get("charged", ()):
                effects[UUID(order)].append(run)
        return effects

    def _left(self) -> dict[str, int]:
        """Ready messages of every queue but the audit's."""
        return depths(KombuBroker(self._broker.url), queues_of(CONSUMER, DELAYS))

    def _count(self) -> None:
        report, effects = self.report, self._effects()
        report.effects = sum(map(len, effects.values()))
        report.lost = sum(not effects[charge.order_id] for charge in self._charges)
        report.doubled = sum(len(runs) > 1 for runs in effects.values())
        report.left_in_queues = self._left()
        self._count_balances()
        self._count_outputs(effects)
        self._count_orphans()

    def _count_balances(self) -> None:
        wanted: Counter[str] = Counter()
        for charge in self._charges:
            wanted[charge.account] += charge.cents
        found = {account.id: account.body.get("balance") for account in scanned(self._inbox.states, "account-")}
        self.report.wrong_balances = sum(found.get(account) != cents for account, cents in wanted.items())

    def _count_outputs(self, effects: dict[UUID, list[str]]) -> None:
        report = self.report
        ids: dict[tuple[UUID, str], set[str]] = defaultdict(set)
        bodies: dict[tuple[UUID, str], set[str]] = defaultdict(set)
        for message in self._audited():
            body = message.body if isinstance(message.body, str) else bytes(message.body).decode()
            what = (UUID(json.loads(body)["order_id"]), message.properties["type"])
            report.outputs_seen += 1
            ids[what].add(message.properties["message_id"])
            bodies[what].add(body)
        for charge in self._charges:
            for ordinal, message_type in enumerate(OUTPUT_TYPES):
                what = (charge.order_id, message_type)
                report.outputs_missing += not ids[what]
                report.outputs_under_several_ids += len(ids[what]) > 1
                wanted = {id_of_output(CONSUMER, Charge.__message_type__, charge.order_id, ordinal)}
                report.outputs_under_a_wrong_id += bool(ids[what]) and ids[what] != wanted
                report.outputs_with_several_bodies += len(bodies[what]) > 1
                runs = {json.loads(body)["run"] for body in bodies[what]}
                report.outputs_of_a_run_that_did_not_count += not runs <= set(effects[charge.order_id])

    def _count_orphans(self) -> None:
        """After one more round of the collector, at a time at which all that is left is older than the window."""
        time.sleep(ORPHANED_AFTER.total_seconds())
        self._collect_once()
        self.report.orphans_left = sum(self._orphans.named(left)[1] is None for left in self._orphans.attempts())

    def _audited(self) -> list[kombu.Message]:
        found = []
        with kombu.Connection(self._broker.url) as connection:
            channel = connection.channel()
            while (message := channel.basic_get(AUDIT_QUEUE, no_ack=True)) is not None:
                found.append(message)
        return found


def as_json(report: Report) -> dict[str, object]:
    """The report with its verdict."""
    return {**asdict(report), "promises_held": report.promises_held}
