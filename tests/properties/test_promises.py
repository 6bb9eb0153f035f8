"""The promises under any order of deliveries, deaths and outages: a state machine on each kind of inbox."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, text

from idemp import Context, Idempotent, Key, Message
from idemp.broker.port import Park, Retry
from idemp.deadletter import without_story
from idemp.errors import StoreUnavailable, TransientStoreError
from idemp.identity import _uuid_from_digest, effective_id
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Claim, Verdict
from idemp.inbox.sql import SqlStore, create_engine_safely, shared_tables
from idemp.messages import Output, OutputKind
from idemp.testing.clock import FakeClock
from idemp.testing.faulty import Answer, CommitFault, Crash
from idemp.testing.store_bench import MemoryEffects, SqlEffects
from tests.house import House
from tests.inbox.sql import kept

TYPE = "shop.Sell"
WINDOW = timedelta(hours=1)
ATTEMPTS = 3
ANSWERS: list[Answer] = ["confirm", "lose", "unsendable", "nacked", "returned", "timeout", "blocked", "closed"]
FAULTS: list[CommitFault] = ["lost, committed", "lost, not committed", "transient", "away"]
answers = st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=4)


class Promises(RuleBasedStateMachine):
    """One consumer and its queue. Whatever happens: each message has its effect at most once, and its outputs go out."""

    claim = "early"

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.house = self.make()
        self.broker = self.house.broker
        self.house.app.handler(
            dict,
            type=TYPE,
            policy=Idempotent(
                key=Key.header("x-id"), retention=WINDOW, attempts=ATTEMPTS, claim=self.claim, claim_wait="1ms"
            ),
        )(self.sell)
        self.broker.declare(self.house.app.topology())
        self.receiver = self.broker.receiver(["shop"], prefetch=10)
        self.published: list[Message] = []
        self.failures = 0
        self.relay_promised = False
        self.numbers = iter(range(10_000))

    def make(self) -> House:
        store = InMemoryStore(self.clock)
        return House(store, MemoryEffects(store), self.clock)

    def sell(self, message: dict[str, Any], ctx: Context) -> None:
        self.house.effects.write(ctx, message["id"])  # type: ignore[arg-type]
        for number in range(message["outputs"]):
            ctx.send(
                {"of": message["id"], "n": number, "version": message["version"]}, to="stock", type="stock.Reserve"
            )
        if self.failures:
            self.failures -= 1
            raise ValueError("the handler fails")

    # Messages

    @initialize()
    def first(self) -> None:
        self.publish(2)

    @rule(outputs=st.integers(0, 3))
    def publish(self, outputs: int) -> None:
        digest = hashlib.sha256(str(next(self.numbers)).encode()).digest()
        made = str(_uuid_from_digest(digest, self.clock.now()))
        body = json.dumps({"id": made, "outputs": outputs, "version": 1}).encode()
        # By its time, a copy that comes after the window is known to be late; nothing else says how old it is.
        self.published.append(Message(body=body, type=TYPE, headers={"x-id": made}, timestamp=self.clock.now()))
        self._send(self.published[-1])

    @rule(data=st.data())
    def duplicate_under_another_transport_id(self, data: st.DataObject) -> None:
        self._send(data.draw(st.sampled_from(self.published)))

    @rule(data=st.data())
    def other_payload_under_the_same_id(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.published))
        body = json.dumps({**json.loads(chosen.body), "version": 2}).encode()
        self._send(replace(chosen, body=body))

    @rule(limit=st.integers(1, 3))
    def replay_dead_letters(self, limit: int) -> None:
        with self.broker.take("shop.dead", None, limit) as taken:
            for index, message in enumerate(taken.messages):
                self._send(without_story(message))
                taken.accept(index)

    # Deliveries

    @rule()
    def deliver(self) -> None:
        self._step()

    @rule(times=st.integers(2, 6))
    def deliver_several(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @rule(call=st.integers(1, 8), after=st.booleans())
    def dies_at_a_port_call(self, call: int, after: bool) -> None:
        setattr(self.house.script, "crash_after" if after else "crash_before", call)
        self._step()

    @rule(sent=st.integers(0, 2))
    def dies_between_outputs(self, sent: int) -> None:
        self.house.script.crash_after_outputs = sent
        self._step()

    @rule(faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=6))
    def commit_fails(self, faults: list[CommitFault]) -> None:
        self.house.script.commit_faults = faults
        self._step()

    @rule(given=answers)
    def broker_refuses_or_loses_confirms(self, given: list[Answer]) -> None:
        self.house.script.answers = given
        self._step()

    @rule(failures=st.integers(1, 2))
    def handler_fails(self, failures: int) -> None:
        self.failures = failures
        self._step()
        self.failures = 0

    @rule(times=st.integers(1, 6), away=st.booleans())
    def database_is_away(self, times: int, away: bool) -> None:
        error = StoreUnavailable("away") if away else TransientStoreError("busy")
        self.house.script.store_faults = [error] * times
        self._step()

    @rule()
    def ack_is_lost(self) -> None:
        self._step(acks=False)

    @precondition(lambda self: isinstance(self.house.store.inner, InMemoryStore))
    @rule(data=st.data())
    def deliver_while_another_holds_the_claim(self, data: st.DataObject) -> None:
        claim = self._claim_of(data.draw(st.sampled_from(self.published)))
        with self.house.store.inner.begin([claim]) as unit:
            unit.claim(claim)
            self._step()

    # Beside them

    @rule()
    def marks_are_recorded(self) -> None:
        self.house.worker().dispatcher.flush()

    @rule(given=answers)
    def relay_runs(self, given: list[Answer]) -> None:
        self.house.script.answers = given
        self._relay()

    @rule(sent=st.integers(0, 2))
    def relay_dies(self, sent: int) -> None:
        self.house.script.crash_after_outputs = sent
        self._relay()

    @rule()
    def relay_beats(self) -> None:
        self.relay_promised = True
        self.house.app.store.upkeep.beat("relay", relay=True, consumers=[])

    @rule(seconds=st.sampled_from([1, 10, 60, 600, 1800]))
    def clock_moves(self, seconds: int) -> None:
        """The consumer consumes meanwhile."""
        for _ in range(max(1, seconds // 60)):
            self.clock.advance(timedelta(seconds=min(seconds, 60)))
            self.house.app.store.upkeep.beat("worker", relay=False, consumers=["shop"])

    @rule()
    def purge(self) -> None:
        self.house.store.refresh_horizons("shop", [WINDOW])
        self.house.app.store.upkeep.purge("shop", {TYPE: WINDOW}, 100)

    # What holds always

    @invariant()
    def effects_at_most_once(self) -> None:
        assert all(number == 1 for number in self.effects().values()), "an effect happened twice"

    @invariant()
    def nothing_sent_without_commit(self) -> None:
        effects = self.effects()
        for output in self.house.publisher.sent:
            assert json.loads(output.message.body)["of"] in effects, "an output of a handling that rolled back was sent"

    @invariant()
    def one_id_one_body(self) -> None:
        bodies: dict[UUID, bytes] = {}
        places: dict[tuple[str, int], UUID] = {}
        for output in self.house.publisher.sent:
            content = json.loads(output.message.body)
            assert bodies.setdefault(output.id, output.message.body) == output.message.body
            assert places.setdefault((content["of"], content["n"]), output.id) == output.id

    @rule()
    def nothing_marked_without_the_brokers_word(self) -> None:
        confirmed = {output.id for output in self.house.publisher.confirmed}
        for message in self.published:
            claim = self._claim_of(message)
            with self.house.store.inner.begin([claim]) as unit:
                found = unit.claim(claim)
            if found.verdict is Verdict.DUPLICATE:
                for stored in found.outputs:
                    assert stored.pending or stored.output.id in confirmed, "recorded as dispatched without a confirm"

    # What holds when everything has come to rest

    def teardown(self) -> None:
        self.house.script.clear()
        self.failures = 0
        for _ in range(200):
            self.clock.advance(timedelta(seconds=61))
            if not self._step():
                break
        if self.relay_promised:
            while self.house.relay().taken:
                pass
        self.nothing_marked_without_the_brokers_word()
        self._all_is_well()

    def _all_is_well(self) -> None:
        effects = self.effects()
        dead = Counter(message.headers["x-id"] for message in self.broker.browse("shop.dead", 10_000))
        confirmed = Counter(
            (content["of"], content["n"])
            for content in (json.loads(output.message.body) for output in self.house.publisher.confirmed)
        )
        assert self.broker.depth("shop") == 0
        for message in self.published:
            content = json.loads(message.body)
            assert effects[content["id"]] == 1 or dead[content["id"]], "a message was lost"
            if effects[content["id"]]:
                for number in range(content["outputs"]):
                    assert confirmed[content["id"], number], "an output was never confirmed"

    def effects(self) -> Counter[str]:
        return Counter(key[0] for key in self.house.store.inner.data)

    # How

    def _send(self, message: Message) -> None:
        output = Output(
            id=UUID(int=0), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop", message=message
        )
        assert self.broker.publisher().publish([output], 1) == [None]

    def _step(self, *, acks: bool = True) -> bool:
        """One delivery, if there is one; a death of the process gives back what it held."""
        delivery = self.receiver.receive(0)
        try:
            if delivery is None:
                return False
            _, settlement = self.house.worker().handle(delivery)
            if acks:
                assert not (isinstance(settlement, Retry) and delivery.attempt > ATTEMPTS)
                assert not (isinstance(settlement, Park) and not settlement.headers)
                self.receiver.settle(delivery, settlement)
            else:
                self._reopen()
        except StoreUnavailable:
            self._reopen()
        except Crash:
            self._reopen()
            self.house._protocol = None
        finally:
            self.house.script.clear()
        return True

    def _reopen(self) -> None:
        self.receiver.close()
        self.receiver = self.broker.receiver(["shop"], prefetch=10)

    def _relay(self) -> None:
        try:
            self.house.relay(max_attempts=1000)
        except Crash:
            pass
        finally:
            self.house.script.clear()

    def _claim_of(self, message: Message) -> Claim:
        return Claim(
            consumer="shop",
            id=effective_id("envelope", message.headers["x-id"]),
            message_type=TYPE,
            fingerprint=None,
            wait=timedelta(milliseconds=1),
        )


class LatePromises(Promises):
    claim = "late"


_engines: list[Engine] = []


class SqlPromises(Promises):
    """On SQLite in memory: one engine for all examples, emptied before each."""

    def make(self) -> House:
        if not _engines:
            _engines.append(create_engine_safely("sqlite://"))
        engine = _engines[0]
        kept.empty(engine, shared_tables())
        return House(SqlStore(engine, clock=self.clock), SqlEffects(engine), self.clock)

    def effects(self) -> Counter[str]:
        with self.house.store.inner.engine.connect() as connection:
            return Counter(connection.scalars(text("SELECT name FROM conformance_effect")))


class LateSqlPromises(SqlPromises):
    claim = "late"


@pytest.fixture(scope="module", autouse=True)
def engines() -> Any:
    yield
    while _engines:
        _engines.pop().dispose()


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (Promises, 150),
        pytest.param(LatePromises, 80, marks=pytest.mark.slow),
        (SqlPromises, 40),
        pytest.param(LateSqlPromises, 30, marks=pytest.mark.slow),
    ],
)
def test_promises(machine: type[Promises], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
