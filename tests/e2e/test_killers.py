"""Poison that kills its worker, among healthy messages, on real servers with real processes."""

from __future__ import annotations

import json
import signal
from collections import Counter
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select

from idemp.broker.kombu import KombuBroker
from idemp.identity import effective_id
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.messages import Message, Output, OutputKind
from tests.e2e.killers import app, effect, metadata, started
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until
from tests.storms.workers import Workers

HEALTHY = 60
POISON = effective_id("envelope", "poison").key


def an_order(name: str, kills: str = "") -> Output:
    body = json.dumps({"kills": kills}).encode()
    message = Message(body=body, type="killers.Work", message_id=name)
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=app.name, message=message)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("database", "threads", "kills"),
    [
        ("postgresql", 1, "killed"),
        pytest.param("postgresql", 4, "killed", marks=pytest.mark.slow),
        ("postgresql", 1, "exits"),
        pytest.param("mariadb", 4, "memory", marks=pytest.mark.slow),
    ],
)
def test_it_is_parked_after_the_limit_and_no_neighbour_is(
    request: pytest.FixtureRequest, rabbitmq_url: str, database: str, threads: int, kills: str
) -> None:
    """Cases 35 and 35a."""
    url = str(request.getfixturevalue(f"{database}_url"))
    engine = create_engine_safely(url)
    make_tables(engine)
    metadata.create_all(engine)
    broker = KombuBroker(rabbitmq_url)
    app.registry.build()
    broker.declare(app.topology())
    names = [f"m-{number}" for number in range(HEALTHY)]
    outputs = [an_order(name) for name in names]
    outputs.insert(HEALTHY // 3, an_order("poison", kills))
    publisher = broker.publisher()
    assert publisher.publish(outputs, 20.0) == [None] * len(outputs)
    publisher.close()
    workers = Workers(
        1,
        ["tests.e2e.killers:app", "--threads", str(threads), "--log-level", "error"],
        {"IDEMP_DATABASE_URL": url, "IDEMP_BROKER_URL": rabbitmq_url},
    )

    def at_rest() -> bool:
        workers.replace_the_dead()
        # Neighbours that were handled already may still be in the worker's hands, to be found duplicates.
        return len(effects()) == HEALTHY and unfinished() == [POISON] and broker.depth("killers.dead") > 0

    def effects() -> list[str]:
        with engine.connect() as connection:
            return list(connection.scalars(select(effect.c.message_id)))

    def unfinished() -> list[UUID]:
        """The poison's deaths outlast its parking: if the ack is lost, it is parked again without being started."""
        with engine.connect() as connection:
            return list(connection.scalars(select(Tables().unfinished.c.message_key)))

    def seen() -> object:
        missing = set(names) - set(effects())
        depths = {queue: broker.depth(queue) for queue in (app.name, "killers.dead")}
        return missing, unfinished(), depths, workers.exit_codes

    workers.start()
    try:
        wait_until(at_rest, "the poison is parked and all others are handled", seconds=150.0, seen=seen)
        assert workers.running[0].poll() is None
    finally:
        workers.stop()
    (dead,) = broker.browse("killers.dead", 99)
    assert (dead.message_id, dead.headers["idemp-dead-reason"]) == ("poison", "WorkerDied")
    assert dead.headers["idemp-dead-attempts"] == 3
    assert Counter(effects()) == dict.fromkeys(names, 1)
    with engine.connect() as connection:
        starts = Counter(connection.scalars(select(started.c.message_id)))
    # Its first start is not counted, and with several threads the second one neither: they ran beside others.
    assert starts["poison"] == 3 + (1 if threads == 1 else 2)
    assert len(workers.exit_codes) == starts["poison"], "its deaths"
    assert {code == -signal.SIGKILL for code in workers.exit_codes} == {kills == "killed"}
    assert unfinished() == [POISON]
    engine.dispose()
