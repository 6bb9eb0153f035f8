"""The real worker and the real relay, on ports that play back answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

from pydantic import BaseModel

from idemp import App, Context, Idempotent, Settings
from idemp.messages import Delivery, MessageRow, Output, Refusal
from idemp.ports import Claim, ClaimAnswer, Handled, Kind, NewRow, Verdict
from idemp.process import Adapters
from idemp.worker import Worker
from tests.simulation.model import DEAD, DUE, WAITS, Answer, Call

TURNS = 2
LOST = "lost"  # the answer of a server that is away
OUTPUTS: dict[str, tuple[int, Output]] = {}
"""The message of each output, by its id."""
effects: list[int] = []
"""Effects of the transaction that is open in the process that runs."""


class Lost(Exception):
    pass


class Suspended(BaseException):
    """A process needs the answer to a call."""


class Order(BaseModel):
    __message_type__ = "shop.Order"
    number: int


app = App("shop", settings=Settings(group=2))


@app.handler(Order, policy=Idempotent())
def handle(message: Order, ctx: Context) -> None:
    effects.append(message.number)
    ctx.send({"number": message.number}, to="sink", type="shop.Shipped")


for _handler in app.handlers.values():  # none is slow, however loaded the machine is
    _handler.seconds, _handler.ran = 0.0, lambda took: None  # type: ignore[method-assign]


class Ports:
    """Store, scheduler, broker, receiver and publisher in one. Answers are given in order; the next call suspends."""

    identity = "simulated"

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers, self._at = answers, 0
        self.asked: Call | None = None

    def _ask(self, *call: Any) -> Answer:
        if self.asked is not None:  # on the way out
            raise Suspended
        if self._at == len(self._answers):
            self.asked = call
            raise Suspended
        answer = self._answers[self._at]
        self._at += 1
        if answer == LOST:
            raise Lost(call[0])
        return answer

    # Store

    def register(self, *_: Any, **__: Any) -> None: ...
    def declare(self, *_: Any) -> list[Any]:
        return []

    @contextmanager
    def connect(self) -> Iterator[dict[str, Any]]:
        tx: dict[str, Any] = {"open": False}
        effects.clear()
        try:
            yield tx
        finally:
            if tx["open"] and self.asked is None:
                self._ask("rollback")

    def claim(self, tx: dict[str, Any], claims: Sequence[Claim]) -> list[ClaimAnswer]:
        tx["claimed"] = [_number(each) for each in claims]
        try:
            answers = self._ask("claim", tuple((_number(each), each.resends) for each in claims))
        except Lost:
            tx["open"] = False
            raise
        tx["open"] = True
        return [_claimed(_number(each), answer) for each, answer in zip(claims, answers, strict=False)]

    lazy = False

    def finish(self, tx: dict[str, Any], handled: Sequence[Handled], *, lazy: bool) -> None:
        for each in handled:
            for output in each.outputs:
                OUTPUTS[output.id] = _number(each.claim), output
        tx["open"] = False
        self._ask("finish", tuple(_number(each.claim) for each in handled), tuple(effects))

    def read_back(self, claims: Sequence[Claim]) -> list[bool]:
        return [True] * len(claims)

    def limited(self, tx: Any, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()

    def intact(self, tx: Any) -> bool:
        return True

    def ended(self, tx: Any) -> None: ...
    def classify(self, error: BaseException) -> Kind | None:
        return Kind.LOST if isinstance(error, Lost) else None

    def probe(self) -> bool:
        return True

    # Scheduler

    def confirm(self, ids: Sequence[str]) -> None:
        self._ask("confirm", _numbers(ids))

    def refuse(self, refusals: dict[str, Refusal]) -> None:
        if refusals:
            self._ask("refuse", _numbers(refusals))

    def lease_outputs(self, limit: int, lease: float) -> list[Output]:
        return [_output(number, sendable=True) for number in self._ask("lease_outputs")]

    def settle(self, failed: Sequence[NewRow], done: Sequence[MessageRow]) -> None:
        if failed or done:
            self._ask("settle", tuple(map(_failed, failed)), tuple((row.id, row.deliveries) for row in done))

    def lease_messages(self, queue: str, limit: int) -> tuple[list[Delivery], bool]:
        rows, suspects = self._ask("lease_messages", limit)
        return list(map(_leased, rows)), suspects

    def lease_suspect(self, queue: str) -> Delivery | None:
        return next(map(_leased, self._ask("lease_suspect")), None)

    def release(self) -> None: ...
    def beat(self, role: str, *, stopping: bool = False) -> None: ...
    def relay_alive(self) -> bool:
        return True

    def purge(self) -> int:
        return 0

    # Broker

    def receiver(self, queue: str, prefetch: int) -> Ports:
        return self

    def publisher(self) -> Ports:
        return self

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        return [_delivery(number, tag=tag, redelivered=again) for tag, number, again in self._ask("receive", limit)]

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._ask("ack", tuple(each.tag for each in deliveries))

    def send(self, outputs: Sequence[Output]) -> None: ...
    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        self._ask("publish", _numbers([each.id for each in outputs]))
        return [None for _ in outputs]


def worker(ports: Ports) -> None:
    """Take what is there, some times."""
    process = start(ports)
    for _ in range(TURNS):
        process.intake.look_again()
        process.step(poll=0.0)


def relay(ports: Ports) -> None:
    process = start(ports)
    with suppress(Lost):  # its thread tries again
        process.relay.turn()


def recovery(ports: Ports) -> None:
    """Do all that is due."""
    process = start(ports)
    for _ in range(10):
        process.intake.look_again()
        if not process.step(poll=0.0) and not process.intake.held and not process.intake.suspect_due:
            break
    process.relay.turn()


def start(ports: Any) -> Worker:
    app.process.opened = Adapters(ports, ports, ports, "worker", ports, lambda: ports)
    process = Worker(app)
    process.pause = lambda: None  # type: ignore[method-assign]
    process.protocol.executor.pause = lambda seconds: None
    return process


Program = Callable[[Ports], None]


def next_call(program: Program, answers: tuple[Answer, ...]) -> Call | None:
    """Run a program from its start, and return the call that it makes behind these answers; None if it ends."""
    ports = Ports(answers)
    try:
        program(ports)
    except Suspended:
        return ports.asked
    return None


def _number(claim: Claim | None) -> int:
    assert claim is not None
    return claim.key.int - 1


def _numbers(ids: Any) -> tuple[int, ...]:
    return tuple(sorted(OUTPUTS[id][0] for id in ids))


def _output(number: int, *, sendable: bool) -> Output:
    return next(replace(output, sendable=sendable) for each, output in OUTPUTS.values() if each == number)


def _claimed(number: int, answer: tuple[Any, ...]) -> ClaimAnswer:
    verdict, *rest = answer
    if verdict != "duplicate":
        return ClaimAnswer(Verdict(verdict))
    pending, sendable = rest
    return ClaimAnswer(Verdict.DUPLICATE, [_output(number, sendable=sendable)] if pending else [])


def _delivery(number: int, **options: Any) -> Delivery:
    properties = {"message_id": str(UUID(int=number + 1)), "type": "shop.Order"}
    return Delivery("shop", properties, json.dumps({"number": number}).encode(), **options)


def _leased(row: tuple[int, ...]) -> Delivery:
    number, deliveries, *counts = row
    return _delivery(number, row=MessageRow(number, deliveries, *counts, []))


def _failed(failed: NewRow) -> tuple[Any, ...]:
    row = failed.delivery.row
    when = DEAD if failed.delay is None else DUE if failed.delay == 0 else WAITS
    number = json.loads(failed.delivery.body)["number"]
    return number, row.deliveries if row else None, when, failed.attempts, failed.deaths
