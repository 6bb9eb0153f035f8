"""Crash points for real: a process that handles a message is killed there by SIGKILL, and another one goes on.

A helper process imports the app once and forks for each death, so that all crash points take seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import UUID

from idemp.broker.port import Topology
from idemp.errors import ConfigurationError, StoreUnavailable
from idemp.messages import Message, Output, OutputKind
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.faulty import FaultyPublisher, FaultyReceiver, FaultyStore, Script

if TYPE_CHECKING:
    from idemp.app import App
    from idemp.broker.port import Broker, Refusal
    from idemp.protocol import Protocol
    from idemp.work import Registration

OUTPUTS_QUEUE: Final = "idemp.testing.outputs"
_ALL: Final = tuple(point.name for point in CRASH_POINTS)
_LONGEST: Final = 60
_QUIET: Final = 0.1
_QUIET_ELSEWHERE: Final = 0.3  # a server has to notice that its consumer died
_RELAY_AFTER: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Killed:
    """What became of one message whose worker was killed.

    Attributes:
        point: where.
        message: what it was handling.
        died: whether it came to that point; an early claim never comes to that of a late one, for example.
        outcomes: how the deliveries to the healthy worker ended, which came after it.
        outputs: by their ids, the bodies that reached the broker, one for each time.
        parked: whether the message ended in the dead-letter queue.

    Example:
        >>> Killed("after commit", Message(body=b"{}"), True, ("REDISPATCHED",), {}, parked=False).died
        True
    """

    point: str
    message: Message
    died: bool
    outcomes: tuple[str, ...]
    outputs: dict[str, list[bytes]]
    parked: bool


def kill_for_real(
    where: str,
    message: Callable[[int], Message],
    *,
    database: str,
    broker: str,
    tables: str | None = None,
    points: Sequence[str] = _ALL,
) -> list[Killed]:
    """For each point: publish a message, kill the worker that handles it there, let another one come to rest.

    All outputs go to one queue of the kit, whatever their destination; nobody consumes them.

    Args:
        where: the app, as `MODULE:ATTRIBUTE`; a module that opens connections at import can't be used. The working
            directory is on the path.
        message: makes the message for a point's number, each with a key of its own.
        database: URL of a database that processes share: not SQLite in memory.
        broker: URL of a broker whose queues nobody else uses, such as `local://queues.db`.
        tables: what makes the user's tables: `MODULE:Base.metadata`, or `MODULE:FUNCTION` of an engine.
        points: names of crash points.

    Returns:
        What became of each message. What is in the user's tables is for the caller to see: one effect for each message. Of
        each `Killed`, say that `outputs` has as many ids as the handler sends, and one body under each.

    Raises:
        ConfigurationError: no such crash point, or app, tables, database or broker can't be used.
        RuntimeError: the helper process failed; its words are on standard error.

    Example:
        >>> kill_for_real("orders:app", lambda number: Message(body=b"{}"), database="sqlite:///a.db", broker="local://b.db",
        ...               points=["after lunch"])
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: There is no crash point 'after lunch'. ...
    """
    known = {point.name for point in CRASH_POINTS}
    for point in points:
        if point not in known:
            raise ConfigurationError(
                f"There is no crash point {point!r}.", fix=f"Use one of {', '.join(sorted(known))}."
            )
    queues = _broker(broker)
    with _helper(where, database, broker, tables or "") as ask:
        queue = str(ask({"do": "prepare"})["queue"])
        return [_killed(point, message(number), queue, queues, ask) for number, point in enumerate(points)]


def _killed(point: str, message: Message, queue: str, queues: Broker, ask: Callable[..., Any]) -> Killed:
    output = Output(id=UUID(int=0), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message)
    with closing(queues.publisher()) as publisher:
        if publisher.publish([output], _LONGEST) != [None]:
            raise RuntimeError(f"The message for {point!r} could not be published.")
    seen = len(queues.browse(OUTPUTS_QUEUE, 100_000))
    dead = len(queues.browse(f"{queue}.dead", 100_000))
    died = ask({"do": "die", "point": point})["killed"]
    rest = ask({"do": "rest"})
    outputs: dict[str, list[bytes]] = {}
    for sent in queues.browse(OUTPUTS_QUEUE, 100_000)[seen:]:
        outputs.setdefault(str(sent.message_id), []).append(sent.body)
    parked = len(queues.browse(f"{queue}.dead", 100_000)) > dead
    return Killed(point, message, bool(died), tuple(rest["outcomes"]), outputs, parked)


@contextmanager
def _helper(*arguments: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A process that imports the app, and forks a worker for each question."""
    process = subprocess.Popen(  # noqa: S603 - this very module
        [sys.executable, "-m", "idemp.testing.killing", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    wanted, answers = process.stdin, process.stdout

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):
            wanted.write(f"{json.dumps(question)}\n")
            wanted.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError(f"The helper process for {arguments[0]!r} ended; its last words are on standard error.")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise ConfigurationError(answer["refused"], fix=answer["fix"])
        if "error" in answer:
            raise RuntimeError(f"A worker of {arguments[0]!r} failed at {question}: {answer['error']}")
        return answer

    try:
        yield ask
    finally:
        with suppress(BrokenPipeError):
            wanted.close()
        answers.close()
        process.wait(_LONGEST)


# In the helper process ----------------------------------------------------------------------------------------------


def _main(where: str, database: str, broker: str, tables: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    try:
        making = _loaded(tables) if tables else None
        worker = _Worker(_loaded(where), database, broker)  # made once, and connected to nothing before it is forked
    except ConfigurationError as error:
        sys.stdout.write(json.dumps({"refused": error.message, "fix": error.fix}))
        return
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(_forked(json.loads(line), worker, making))}\n")
        sys.stdout.flush()


def _forked(question: dict[str, Any], worker: _Worker, tables: Any) -> dict[str, Any]:
    """What a worker answers; one that is killed answers nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(_LONGEST)
        try:
            answer = _answer(question, worker, tables)
        except BaseException as error:  # noqa: BLE001 - the parent tells it
            answer = {"error": repr(error)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True}
    return {"killed": False, **json.loads(text or '{"error": "it ended without a word"}')}


def _answer(question: dict[str, Any], worker: _Worker, tables: Any) -> dict[str, Any]:
    match question["do"]:
        case "prepare":
            worker.prepare(tables)
            return {"queue": worker.app.queue}
        case "die":
            worker.script.death = _kill_myself
            worker.script.die(question["point"])
            return {"outcomes": worker.deliver(_LONGEST / 4, most=1)}
    outcomes = worker.deliver()
    worker.relay()
    return {"outcomes": outcomes}


def _kill_myself(point: str) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(point)  # pragma: no cover - nobody comes here


class _Worker:
    """A worker process on the real database and broker."""

    def __init__(self, app: App, database: str, broker: str) -> None:
        from idemp.app import App
        from idemp.inbox.sql import SqlStore, create_engine_safely
        from idemp.testing.clock import FakeClock
        from idemp.testing.subject import rebound, told

        told(app)
        self.engine = engine = create_engine_safely(database)
        if engine.dialect.name == "sqlite" and engine.url.database in {None, "", ":memory:"}:
            raise ConfigurationError(
                "A database in memory is gone with the process that is killed.", fix="Name a file: sqlite:///…"
            )
        self.script = script = Script()
        self.clock = FakeClock(datetime.now(UTC))
        self.broker = _broker(broker)
        self._quiet = _QUIET if broker.startswith("local:") else _QUIET_ELSEWHERE
        self._store = SqlStore(engine, clock=self.clock, session_factory=rebound(app, engine))
        store: Any = FaultyStore(self._store, script)
        self.app = App(
            app.name, queue=app.queue, store=store, broker=self.broker, settings=app.settings, clock=self.clock
        )
        self.app.registry = app.registry
        self.publisher = FaultyPublisher(_ToOneQueue(self.broker), script)

    def prepare(self, tables: Any) -> None:
        """Make idemp's tables and the user's, and the queues."""
        from sqlalchemy import MetaData

        from idemp.inbox.sql import Tables
        from idemp.inbox.sql.schema import upgrade

        upgrade(self.engine, Tables())
        if isinstance(tables, MetaData):
            tables.create_all(self.engine)
        elif tables is not None:
            tables(self.engine)
        self.broker.declare(self.app.topology())
        self.broker.declare(Topology(exchange="", queues=(OUTPUTS_QUEUE,)))

    def deliver(self, quiet: float | None = None, most: int = 1_000) -> list[str]:
        """Handle deliveries until none comes for so many seconds; how they ended."""
        wait = self._quiet if quiet is None else quiet
        outcomes: list[str] = []
        protocol = self._protocol()
        with closing(FaultyReceiver(self.broker.receiver([self.app.queue], prefetch=1), self.script)) as receiver:
            while len(outcomes) < most and (delivery := receiver.receive(wait)) is not None:
                with suppress(StoreUnavailable):
                    outcome, settlement = protocol.handle(delivery)
                    outcomes.append(outcome.name)
                    receiver.settle(delivery, settlement)
            protocol.dispatcher.flush()
        return outcomes

    def _protocol(self) -> Protocol:
        from idemp.dispatch import Dispatcher
        from idemp.protocol import Protocol

        consumer = replace(self.app.consumer, find=self._find)
        return Protocol(consumer, Dispatcher(self.publisher, consumer.store, self.clock))

    def _find(self, message: Message) -> Registration:
        found = self.app.registry.find(message)
        handler = found.handler
        return replace(found, handler=lambda body, ctx: self.script.call("handler", lambda: handler(body, ctx)))

    def relay(self) -> None:
        """Ship what is pending, as if its time had come."""
        from idemp.relay import Relay

        self.clock.advance(_RELAY_AFTER)
        while Relay(self._store.upkeep, self.publisher).run_once().taken:
            pass


class _ToOneQueue:
    """A publisher that sends everything to one queue."""

    def __init__(self, broker: Broker) -> None:
        self._inner = broker.publisher()

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        return self._inner.publish([replace(each, exchange="", routing_key=OUTPUTS_QUEUE) for each in outputs], timeout)

    def keep_alive(self) -> None:
        self._inner.keep_alive()

    def close(self) -> None:
        self._inner.close()


def _broker(url: str) -> Broker:
    from idemp.broker.making import make_broker
    from idemp.settings import Settings

    return make_broker(url, Settings(allow_at_most_once=True))


def _loaded(where: str) -> Any:
    module, _, attribute = where.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{where!r} can't be loaded: {type(error).__name__}: {error}.", fix="Write it as MODULE:ATTRIBUTE."
        ) from error


if __name__ == "__main__":
    _main(*sys.argv[1:])
