"""A state machine over the whole protocol: anything may happen in any order, and the promises hold."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import text

from idemp import Context, Idempotent, Retry, context, dispatcher, protocol
from idemp.identity import uuid7
from idemp.messages import Refusal
from idemp.sql.engine import Database
from idemp.sql.records.failures import DeadLetters
from idemp.sql.schema import upgrade
from idemp.testing import Crash, CrashPoints
from idemp.worker import Worker
from tests.test_promises import Refusing
from tests.world import Order, World, insert_and_send

PRISTINE = tempfile.TemporaryDirectory()
IDS = ("a", "b", "c")


class Machine(RuleBasedStateMachine):
    """Two processes on one queue. `fault` plants a mistake that has to be found."""

    def __init__(self) -> None:
        super().__init__()
        if not list(Path(PRISTINE.name).iterdir()):
            database = Database(f"sqlite:///{PRISTINE.name}/test.db")
            upgrade(database)
            database.close()
        self.folder = tempfile.TemporaryDirectory()
        shutil.copytree(PRISTINE.name, self.folder.name, dirs_exist_ok=True)
        self.failing: set[str] = set()
        self.world = World(f"sqlite:///{self.folder.name}/test.db", self.handle)
        self.sent: set[str] = set()
        self.purged: Counter[str] = Counter()
        self.bodies: dict[tuple[str, int], tuple[str, bytes]] = {}
        self.away = False
        self.processes: list[Worker | None] = [None, None]

    def handle(self, message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if message.order_id in self.failing:
            raise RuntimeError("boom")

    # Rules

    @initialize(batch=st.sampled_from([1, 3]), group=st.sampled_from([1, 20]))
    def choose(self, batch: int, group: int) -> None:
        """Behind a full group, the next one executes while the first is in flight."""
        self.world.settings = {"group": group}
        retry = Retry(attempts=2, delays=(0.0,), jitter=0)
        self.world.policy = Idempotent(key="order_id", retry=retry, batch=batch)

    @rule(id=st.sampled_from(IDS), copies=st.integers(1, 2), same=st.booleans())
    def send(self, id: str, copies: int, same: bool) -> None:
        for _ in range(copies):
            self.world.send(id, message_id=id if same else None)
        self.sent.add(id)

    @rule(id=st.sampled_from(IDS))
    def fails_or_not(self, id: str) -> None:
        self.failing ^= {id}

    @rule(number=st.integers(0, 1))
    def step(self, number: int) -> None:
        self.process(number).step(poll=0.0)

    @rule(number=st.integers(0, 1), at=st.integers(0, 25), id=st.sampled_from(IDS))
    def crash(self, number: int, at: int, id: str) -> None:
        self.send(id, copies=1, same=False)
        points = CrashPoints(at)
        worker = self.start(points)
        self.processes[number] = None  # the one before is gone, too
        try:
            worker.step(poll=0.0)
            worker.relay.turn()
        except Crash:
            return
        points._at = None
        self.processes[number] = worker

    @rule(number=st.integers(0, 1))
    def stop(self, number: int) -> None:
        worker, self.processes[number] = self.processes[number], None
        if worker is not None:
            worker.close()

    @rule(number=st.integers(0, 1))
    def relay(self, number: int) -> None:
        self.process(number).relay.turn()

    @rule(seconds=st.sampled_from([1, 16, 31, 700]))
    def time_passes(self, seconds: int) -> None:
        self.world.pass_time(seconds)

    @rule(number=st.integers(0, 1))
    def heartbeat(self, number: int) -> None:
        worker = self.process(number)
        worker._next_beat = 0.0
        worker.upkeep()

    @rule(number=st.integers(0, 1), which=st.integers(0, 1), taken=st.booleans(), own=st.booleans(), id=st.sampled_from(IDS))
    def broker_refuses(self, number: int, which: int, taken: bool, own: bool, id: str) -> None:
        """One output of a step is refused, or was taken although the broker's word was lost."""
        self.send(id, copies=1, same=False)
        worker = self.process(number)
        publisher = worker.protocol.dispatcher.publisher

        def refuse(position: int) -> Refusal | Exception | None:
            if position != which:
                return None
            return ConnectionResetError("gone") if taken else Refusal("refused", own=own)

        worker.protocol.dispatcher.publisher = Refusing(publisher, refuse)
        worker.step(poll=0.0)
        worker.protocol.dispatcher.publisher = publisher

    @precondition(lambda self: not self.away)
    @rule(number=st.integers(0, 1), table=st.sampled_from(["idemp_inbox", "idemp_output", "idemp_pending"]))
    def database_away(self, number: int, table: str) -> None:
        worker = self.process(number)
        self.rename(table, "gone")
        worker.step(poll=0.0)
        self.rename("gone", table)

    @rule(number=st.integers(0, 1))
    def claims_are_purged(self, number: int) -> None:
        """The window passes, and what is sent behind it is handled once more."""
        self.world.pass_time(8 * 86_400)
        before = self.world.claimed()
        self.process(number).adapters.scheduler.purge()
        self.purged.update(before - self.world.claimed())

    @rule()
    def replay(self) -> None:
        letters = DeadLetters(self.world.database)
        letters.replay(letters.find())

    # Invariants

    @invariant()
    def effects_happen_once_and_with_their_claim(self) -> None:
        effects = self.world.effects()
        assert set(effects) <= self.sent
        handled = Counter(effects) - self.purged
        assert all(count == 1 for count in handled.values()), effects
        assert self.world.claimed() == set(handled)

    @invariant()
    def outputs_have_one_id_and_body_and_a_committed_handling(self) -> None:
        effects = self.world.effects()
        for place, variants in self.world.sent().items():
            assert len(variants) == 1, place
            assert self.bodies.setdefault(place, *variants) == next(iter(variants)), place
            assert place[0] in effects, place

    def teardown(self) -> None:
        """At rest, every message was handled once or is a dead letter, and every output was sent or is in quarantine."""
        try:
            self.failing.clear()
            self.processes = [None, None]
            worker = self.start()
            for _ in range(8):
                self.world.pass_time(3600)
                worker._next_beat = 0.0
                worker.upkeep()
                self.world.work(worker)
            dead = {letter.body for letter in DeadLetters(self.world.database).find()}
            effects = self.world.effects()
            assert set(effects) | {id for id in self.sent if any(f'"{id}"' in body for body in dead)} == self.sent
            assert {(id, part) for id in effects for part in range(3)} == set(self.world.sent())
            assert self.world.pending() == 0
            assert all(row.due_at is None for row in self.world.rows())
            digests = [row.digest for row in self.world.rows()]
            assert len(digests) == len(set(digests))
            self.effects_happen_once_and_with_their_claim()
            self.outputs_have_one_id_and_body_and_a_committed_handling()
        finally:
            self.world.close()
            self.folder.cleanup()

    # Helpers

    def start(self, points: CrashPoints | None = None) -> Worker:
        return self.world.worker(points)

    def process(self, number: int) -> Worker:
        worker = self.processes[number] or self.start()
        worker.intake.look_again()
        self.processes[number] = worker
        return worker

    def rename(self, before: str, after: str) -> None:
        with self.world.database.short() as connection:
            connection.execute(text(f"ALTER TABLE {before} RENAME TO {after}"))


QUIET: Any = {
    "deadline": None,
    "stateful_step_count": 20,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "phases": [Phase.generate, Phase.shrink],
}


@pytest.mark.parametrize(("number", "examples"), [(1, 15), pytest.param(2, 40, marks=pytest.mark.slow)])
def test_the_promises_hold_whatever_happens(number: int, examples: int) -> None:
    machine = seed(number)(Machine)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, **QUIET))


def ack_before_commit(patch: pytest.MonkeyPatch) -> None:
    handle = protocol.Protocol.handle

    def early(self: Any, group: Any, **options: Any) -> Any:
        self.settler._ack([handling.delivery for handling in group if handling.delivery.row is None])
        return handle(self, group, **options)

    patch.setattr(protocol.Protocol, "handle", early)


def confirm_of_another_message(patch: pytest.MonkeyPatch) -> None:
    publish = dispatcher.publish

    def confused(publisher: Any, outputs: Any, timeout: float) -> Any:
        refused = publish(publisher, outputs, timeout)
        return {outputs[0].id: next(iter(refused.values()))} if refused else {}

    patch.setattr(dispatcher, "publish", confused)


def output_id_from_the_clock(patch: pytest.MonkeyPatch) -> None:
    emit = context.Context.outputs

    def dated(self: Any) -> Any:
        for output in (outputs := emit(self)):
            output.id = uuid7()
        return outputs

    patch.setattr(context.Context, "outputs", dated)
    stored = dispatcher.Dispatcher.send

    def again(self: Any, handlings: Any) -> Any:
        for handling in handlings:
            for output in handling.outputs:
                output.properties["message_id"] = uuid7()
        return stored(self, handlings)

    patch.setattr(dispatcher.Dispatcher, "send", again)


@pytest.mark.parametrize("plant", [ack_before_commit, confirm_of_another_message, output_id_from_the_clock])
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup, Flaky, FlakyStrategyDefinition)):  # not each repetition fails, too
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=200, derandomize=True, **{**QUIET, "phases": [Phase.generate]})
        )
