"""Draining queues: nothing is lost whatever dies when, and what the spool can't hold is parked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from idemp.broker.local import LocalBroker
from idemp.broker.port import Topology
from idemp.cli import root
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.messages import Message
from idemp.spool import Spooler, SpoolStore
from idemp.testing import FaultProxy
from tests.servers.process import wait_until
from tests.spool.conftest import Queue, channel
from tests.spool.dying import CHUNK, POINTS

pytestmark = pytest.mark.slow

Opened = Callable[[str], SpoolStore]


def message(number: int, **properties: object) -> Message:
    values = {"body": b"{}", "type": "shop.Order", "message_id": f"m-{number}", **properties}
    return Message(**values)  # type: ignore[arg-type]


def numbers(store: SpoolStore) -> list[int]:
    level = store.level(Queue.name)
    return [int((row.id or "").removeprefix("m-")) for row in store.read(Queue.name, level.first, level.next)]


@pytest.fixture
def store(postgresql_url: str, opened: Opened) -> SpoolStore:
    made = opened(postgresql_url)
    made.create(Queue.name)
    return made


@pytest.mark.parametrize("queue", ["classic", "quorum"], indirect=True)
def test_queue_is_drained_in_order(queue: Queue, store: SpoolStore) -> None:
    queue.put([message(number) for number in range(250)])
    spooler = Spooler(queue.broker, store, queue.name, chunk=100)
    told: list[int] = []
    spooler.run(threading.Event(), until_empty=True, told=lambda tally: told.append(tally.stored))
    assert (spooler.tally.stored, spooler.tally.parked, spooler.tally.full) == (250, 0, False)
    assert numbers(store) == list(range(250))
    assert told[:3] == [100, 200, 250]
    assert queue.depth == 0


@pytest.mark.parametrize("point", POINTS)
def test_killed_spooler_loses_nothing(queue: Queue, store: SpoolStore, postgresql_url: str, point: str) -> None:
    """A chunk that was committed and not acked comes twice; none is lost, and offsets have no gap."""
    queue.put([message(number) for number in range(100)])
    dying = subprocess.run(
        [sys.executable, "-m", "tests.spool.dying", queue.url, postgresql_url, queue.name, point],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert dying.returncode == -signal.SIGKILL, dying.stderr.decode()
    Spooler(queue.broker, store, queue.name).run(threading.Event(), until_empty=True)
    found = numbers(store)
    assert set(found) == set(range(100))
    assert len(found) - 100 <= (0 if point == "received" else 2 * CHUNK)
    if point == "stored":
        assert len(found) > 100, "the second chunk was committed, and nobody had acked it"


def test_several_spoolers_share_a_queue(queue: Queue, postgresql_url: str, opened: Opened, store: SpoolStore) -> None:
    queue.put([message(number) for number in range(600)])
    spoolers = [Spooler(queue.broker, opened(postgresql_url), queue.name, chunk=20) for _ in range(3)]
    threads = [
        threading.Thread(target=each.run, args=(threading.Event(),), kwargs={"until_empty": True}) for each in spoolers
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(numbers(store)) == list(range(600))
    assert sum(each.tally.stored for each in spoolers) == 600


def test_full_spool_leaves_the_rest_in_the_queue(queue: Queue, store: SpoolStore) -> None:
    queue.put([message(number) for number in range(100)])
    spooler = Spooler(queue.broker, store, queue.name, chunk=20, most_messages=50)
    spooler.run(threading.Event(), until_empty=True)
    assert (spooler.tally.stored, spooler.tally.full) == (40, True)
    wait_until(lambda: queue.depth == 60, "what was in its hands to be back")

    stop = threading.Event()
    again = Spooler(queue.broker, store, queue.name, chunk=20, most_messages=50)
    going_on = threading.Thread(target=again.run, args=(stop,))
    going_on.start()
    wait_until(lambda: store.release(queue.name, 1000) >= 0 and store.level(queue.name).next == 100, "room to be used")
    stop.set()
    going_on.join()
    assert queue.depth == 0


def test_what_no_spool_can_hold_is_parked_alone(
    queue: Queue, store: SpoolStore, caplog: pytest.LogCaptureFixture
) -> None:
    queue.put([message(number, **({"type": "a\x00b"} if number == 7 else {})) for number in range(20)])
    queue.put([message(20, body=b"x" * 101), message(21)])
    spooler = Spooler(queue.broker, store, queue.name, max_body_bytes=100)
    spooler.run(threading.Event(), until_empty=True)
    assert (spooler.tally.stored, spooler.tally.parked) == (20, 2)
    assert numbers(store) == [number for number in range(22) if number not in {7, 20}]
    wait_until(lambda: len(queue.parked()) == 2, "both to be parked")
    reasons = {each.message_id: each.headers["idemp-dead-reason"] for each in queue.parked()}
    assert reasons == {"m-7": "Unstorable", "m-20": "OversizedMessage"}
    told = [record for record in caplog.records if getattr(record, "event", "") == "not_spooled"]
    assert {record.reason for record in told} == set(reasons.values())


def test_outages_are_waited_out(queue: Queue, store: SpoolStore, opened: Opened, postgresql_url: str) -> None:
    """The broker's line breaks, then the database's; both come back."""
    from idemp.broker.kombu import KombuBroker

    with closing_proxy(queue.url) as broker_line, closing_proxy(postgresql_url) as database_line:
        broker = KombuBroker(broker_line.through(queue.url))
        spooler = Spooler(broker, opened(database_line.through(postgresql_url)), queue.name, chunk=10)
        stop = threading.Event()
        running = threading.Thread(target=spooler.run, args=(stop,))
        running.start()
        sent = 0
        for line in (broker_line, database_line, broker_line):
            line.refuse()
            line.cut()
            queue.put([message(sent + each) for each in range(30)])
            sent += 30
            line.heal()
            wait_until(lambda sent=sent: set(numbers(store)) == set(range(sent)), "all to be there")
        stop.set()
        running.join(30)
        assert not running.is_alive()
    wait_until(lambda: queue.depth == 0, "all to be acked")


def test_broker_that_is_away_ends_a_run_to_the_end(store: SpoolStore) -> None:
    from idemp.broker.kombu import KombuBroker

    with pytest.raises(BrokerUnavailable):
        Spooler(KombuBroker("pyamqp://127.0.0.1:1"), store, "orders").run(threading.Event(), until_empty=True)


def test_command(queue: Queue, postgresql_url: str) -> None:
    queue.put([message(number) for number in range(30)])
    command = ["pipeline", "spool", queue.name, "--until-empty", "--json", "--broker", queue.url]
    command += ["--database", postgresql_url]
    done = CliRunner().invoke(root, [*command, "--most-messages", "25", "--chunk", "10"])
    assert (done.exit_code, json.loads(done.stdout)["full"]) == (1, True), done.output
    wait_until(lambda: queue.depth == 10, "what was in its hands to be back")
    done = CliRunner().invoke(root, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "queue": "orders",
        "stored": 10,
        "parked": 0,
        "full": False,
        "spool": {"first": 0, "next": 30, "stored_bytes": 60, "messages": 30},
    }


@pytest.mark.parametrize("options", [[], ["--until-empty"]], ids=["for good", "until empty"])
def test_queue_that_does_not_exist_ends_the_command(
    rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """It is no outage, and no tables are made for it."""
    monkeypatch.chdir(tmp_path)
    for url in (rabbitmq_url, "local://broker.db"):
        if url.startswith("local"):
            LocalBroker(url).declare(Topology(exchange="idemp", queues=("other",)))
        command = ["pipeline", "spool", "nowhere", *options, "--broker", url, "--database", "sqlite:///spool.db"]
        done = CliRunner().invoke(root, command)
        assert (done.exit_code, "'nowhere'" in done.stderr, "Declare it first" in done.stderr) == (3, True, True), done
        assert list(tmp_path.glob("spool.db*")) == []


def test_queue_that_may_not_be_read_ends_the_command(rabbitmq: Any, queue: Queue, tmp_path: Path) -> None:
    rabbitmq.permit_to_write_alone(queue.url.rpartition("/")[2])
    command = ["pipeline", "spool", queue.name, "--broker", queue.url, "--database", f"sqlite:///{tmp_path}/spool.db"]
    done = CliRunner().invoke(root, command)
    assert (done.exit_code, "ACCESS_REFUSED" in done.stderr) == (3, True), done.stderr


def test_queue_that_is_deleted_ends_the_spooler(queue: Queue, store: SpoolStore) -> None:
    queue.put([message(0)])
    spooler, failed = Spooler(queue.broker, store, queue.name), list[Exception]()

    def run() -> None:
        try:
            spooler.run(threading.Event())
        except ConfigurationError as error:
            failed.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    wait_until(lambda: numbers(store) == [0], "the message to be there")
    with channel(queue.url) as amqp:
        amqp.queue_delete(queue.name)  # type: ignore[attr-defined]
    running.join(30)
    assert [f"no queue '{queue.name}'" in str(error) for error in failed] == [True]


def closing_proxy(url: str) -> closing[FaultProxy]:
    host, port = url.partition("@")[2].partition("/")[0].split(":")
    return closing(FaultProxy(host, int(port)))
