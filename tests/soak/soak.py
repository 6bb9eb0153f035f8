"""The soak: feed, break, heal, wait for rest, count."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Binding, Topology
from idemp.errors import IdempError
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.testing import FaultProxy
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import wait_until
from tests.servers.rabbitmq import RabbitMQ
from tests.soak import app as soaked
from tests.soak.app import CHARGES, CONSUMER, INVOICES, KILLERS, Charge, Charged
from tests.soak.audit import Drain, Ledger
from tests.soak.counting import count
from tests.soak.faults import Lane, Place, declare_invoices, link_faults, server_faults
from tests.soak.feeding import Feeder
from tests.soak.plan import MINUTE, Plan
from tests.soak.report import Report
from tests.soak.watching import Sample, Watcher, mebibytes, median, read_logs
from tests.storms.looking import depths, number_from, queues_of
from tests.storms.workers import Workers, sharing

REST_SECONDS = 180.0
CALM_SECONDS = 5.0
LOOK_SECONDS = 1.0
TELL_SECONDS = 15.0
_ARGUMENTS = ["--threads", "2", "--log-level", "warning", "--log-json", "--json"]
_EFFECTS = "SELECT count(*) FROM effect"
_PENDING = "SELECT count(*) FROM idemp_pending"


class Soak:
    """One run.

    Args:
        plan: what happens.
        database: a server of the soak's own.
        broker: likewise.
        logs: a folder for the workers' logs.
    """

    def __init__(self, plan: Plan, database: PostgreSQL, broker: RabbitMQ, logs: Path) -> None:
        self._plan = plan
        self._database = database
        self._broker = broker
        self._logs = logs
        self._url = database.create_database("soak")
        self._engine = create_engine_safely(self._url)
        self._queues: list[str] = []
        self._effects = 0
        self._began = 0.0
        self.report = Report()

    def run(self) -> Report:
        """The whole soak."""
        topology = self._prepare()
        with ExitStack() as stack:
            stack.callback(self._engine.dispose)
            database_link = stack.enter_context(FaultProxy("127.0.0.1", self._database.port))
            broker_link = stack.enter_context(FaultProxy("127.0.0.1", self._broker.port))
            survivor = self._workers(
                1, "survivor", database_link.through(self._url), broker_link.through(self._broker.url)
            )
            workers = self._workers(self._plan.workers, "killed", self._url, self._broker.url, "tests.soak.app:killers")
            stack.callback(survivor.stop)
            stack.callback(workers.stop)
            ledger = Ledger(self._plan)
            drains = [Drain(self._broker.url, queue, ledger.enter) for queue in (INVOICES, CHARGES)]
            feeder = Feeder(self._plan, self._broker.url, lambda: feeder.sent - self._effects)
            place = Place(
                self._database,
                self._broker,
                topology,
                database_link,
                broker_link,
                workers,
                drains[0],
                feeder.add_killer,
            )
            self._live(place, survivor, feeder, drains)
            self._rest(place, feeder)
            self._stop(survivor, workers)
            self._drained(drains)
            count(self.report, self._plan, self._engine, self._broker.url, feeder, ledger, self._queues)
        return self.report

    # Doing ------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> Topology:
        upgrade(self._engine, Tables())
        soaked.metadata.create_all(self._engine)
        declare_invoices(self._broker.url)
        soaked.app.registry.build()
        soaked.killers.registry.build()
        own, killers = soaked.app.topology(), soaked.killers.topology()
        audited = Binding(CHARGES, Charged.__message_type__)
        topology = replace(
            own, queues=(CONSUMER, KILLERS, CHARGES), bindings=(*own.bindings, *killers.bindings, audited)
        )
        KombuBroker(self._broker.url).declare(topology)
        self._queues = [*queues_of(CONSUMER, topology.delays), *queues_of(KILLERS, topology.delays)]
        return topology

    def _workers(self, number: int, name: str, database: str, broker: str, *more_apps: str) -> Workers:
        folder = self._logs / name
        folder.mkdir()
        environment = {
            "IDEMP_DATABASE_URL": database,
            "IDEMP_BROKER_URL": broker,
            "IDEMP_RELAY_AFTER": "5s",
            # What a killed worker's relay had taken comes again after this.
            "IDEMP_RELAY_LEASE": "8s",
        }
        each = sharing(Charge.__message_type__, self._plan.batches)
        return Workers(number, ["tests.soak.app:app", *more_apps, *_ARGUMENTS], environment, each=each, logs=folder)

    def _live(self, place: Place, survivor: Workers, feeder: Feeder, drains: list[Drain]) -> None:
        """Feed; after a few calm seconds break things until the time is up and everything has been broken once."""
        survivor.start()
        for drain in drains:
            drain.start()
        self._began = time.monotonic()
        feeder.start()
        watcher = Watcher(survivor.running[0].pid, self._began)
        watcher.start()
        wait_until(lambda: self._look(place) > 0, "the first effects of the worker that is watched", seconds=60.0)
        calm = time.monotonic() - self._began
        place.workers.start()
        wait_until(lambda: self._passed(calm + CALM_SECONDS), "a few calm seconds", seconds=60.0)
        lanes = [
            Lane("servers", server_faults(place, self._plan.dice("server faults")), self._plan, self._began),
            Lane("links", link_faults(place, self._plan.dice("link faults")), self._plan, self._began),
        ]
        for lane in lanes:
            lane.start()
        self._until(lambda: self._passed(self._plan.seconds) and all(lane.has_had_all for lane in lanes), place, feeder)
        for lane in lanes:
            lane.stop()
        place.heal()
        watcher.stop()
        self._note(lanes, watcher.samples, calm)

    def _until(self, over: Callable[[], bool], place: Place, feeder: Feeder) -> None:
        told = time.monotonic()
        pause = threading.Event()
        while not over() and not self._passed(2 * self._plan.seconds + 2 * MINUTE):
            effects = self._look(place)
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(
                    f"{told - self._began:7.1f} s  {feeder.sent} sent, {effects} effects", file=sys.stderr, flush=True
                )
            pause.wait(LOOK_SECONDS)

    def _look(self, place: Place) -> int:
        place.workers.replace_the_dead()
        self._effects = max(self._effects, number_from(self._engine, _EFFECTS))
        return self._effects

    def _passed(self, seconds: float) -> bool:
        return time.monotonic() - self._began >= seconds

    def _rest(self, place: Place, feeder: Feeder) -> None:
        """Until all is handled or parked, nothing pends and nothing waits."""
        feeder.finish()
        kinds = Counter(self._plan.kind(number) for number in range(feeder.sent))
        self.report.fail_once, self.report.fail_always = kinds["once"], kinds["always"]
        wanted = {f"{CONSUMER}.dead": kinds["always"], f"{KILLERS}.dead": len(feeder.killers)}
        pause = threading.Event()
        deadline = time.monotonic() + REST_SECONDS
        while lacking := self._lacking(place, feeder.sent - kinds["always"], wanted):
            if time.monotonic() > deadline:
                self.report.not_at_rest = lacking
                break
            pause.wait(LOOK_SECONDS)
        self.report.seconds = round(time.monotonic() - self._began, 1)

    def _lacking(self, place: Place, effects: int, letters: Mapping[str, int]) -> str:
        """What there is left to wait for; empty when all is at rest."""
        if (done := self._look(place)) < effects:
            return f"{effects - done} effects are missing"
        try:
            waiting = depths(KombuBroker(self._broker.url), self._queues)
        except IdempError as error:
            return str(error)
        lacking = [
            f"{name} has {waiting[name]} of {number}" for name, number in letters.items() if waiting[name] < number
        ]
        lacking += [f"{depth} in {name}" for name, depth in waiting.items() if depth and name not in letters]
        if pending := number_from(self._engine, _PENDING):
            lacking.append(f"{pending} outputs pend")
        return ", ".join(lacking)

    def _stop(self, survivor: Workers, workers: Workers) -> None:
        ended = survivor.running[0].poll()
        if ended is not None:
            self.report.survivor_ended = f"with {ended}"
        self.report.workers_that_ended = dict(Counter(workers.exit_codes))
        self.report.exit_codes = [code for code in (*survivor.stop(), *workers.stop()) if code]
        logged = read_logs(self._logs, never_ends="survivor", expected=_is_expected)
        self.report.logged = dict(logged.events.most_common())
        self.report.logged_unexpectedly = logged.unexpected

    def _drained(self, drains: list[Drain]) -> None:
        broker = KombuBroker(self._broker.url)
        wait_until(lambda: not any(depths(broker, (INVOICES, CHARGES)).values()), "the outputs are read", seconds=60.0)
        for drain in drains:
            drain.end()

    # Telling ----------------------------------------------------------------------------------------------------------

    def _note(self, lanes: list[Lane], samples: list[Sample], calm: float) -> None:
        report, plan = self.report, self._plan
        for lane in lanes:
            report.faults |= dict(lane.happened)
            report.faults_log += lane.log
            report.faults_failed += lane.failures
            report.faults_that_never_happened += lane.missing
        report.faults_log.sort()
        last = plan.last_quarter
        report.memory_before = median(samples, plan.baseline, mebibytes)
        report.memory_after = median(samples, last, mebibytes)
        report.memory_by_minute = [
            median(samples, (MINUTE * minute, MINUTE * (minute + 1)), mebibytes)
            for minute in range(math.ceil(plan.minutes))
        ]
        early = plan.baseline or (calm, max(plan.seconds / 2, calm + 2 * CALM_SECONDS))
        report.threads_before = median(samples, early, lambda sample: sample.threads)
        report.threads_after = median(samples, last, lambda sample: sample.threads)
        report.descriptors_before = median(samples, early, lambda sample: sample.descriptors)
        report.descriptors_after = median(samples, last, lambda sample: sample.descriptors)


def _is_expected(entry: dict[str, Any]) -> bool:
    """Whether a worker should have logged this error: it parked what can't be handled."""
    return entry.get("event") == "delivery" and entry.get("reason") in {"Doomed", "WorkerDied"}
