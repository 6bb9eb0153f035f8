"""The broker in a file: the common cases, its leases, and real processes that die."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from idemp.broker.local import LocalBroker
from idemp.broker.local.file import file_of
from idemp.broker.port import Ack, Binding, Park, Release, Retry, Topology
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.testing.broker_conformance import BrokerConformance
from tests.broker.given import HandClock, output
from tests.broker.local_process import TOPOLOGY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.broker.port import Delivery, Publisher, Receiver, Settlement

PATIENCE = 30.0
LONG = timedelta(seconds=300)


class TestLocalBroker(BrokerConformance):
    delay = 0.1
    quiet = 0.15

    @pytest.fixture
    def broker(self, tmp_path: Path) -> LocalBroker:
        return LocalBroker(tmp_path / "queues.db")

    def reopen(self, broker: Any) -> LocalBroker:
        return LocalBroker(broker._path)


class Hands:
    """A broker in a file, and whatever has to be closed or killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "queues.db"
        self.log = folder / "log"
        self.clock = HandClock()
        self.closing = ExitStack()
        self.broker = LocalBroker(self.path, lease=LONG)
        self.broker.declare(TOPOLOGY)

    def by_hand(self) -> LocalBroker:
        """The same file, with the clock by hand and leases of 30 seconds."""
        return LocalBroker(self.path, clock=self.clock)

    def receiver(self, broker: LocalBroker | None = None, *, prefetch: int = 1) -> Receiver:
        receiver = (broker or self.broker).receiver(["q"], prefetch=prefetch)
        self.closing.callback(receiver.close)
        return receiver

    def publisher(self, broker: LocalBroker | None = None) -> Publisher:
        publisher = (broker or self.broker).publisher()
        self.closing.callback(publisher.close)
        return publisher

    def send(self, *bodies: bytes) -> None:
        answers = self.publisher().publish([output(body) for body in bodies], PATIENCE)
        assert answers == [None] * len(bodies)

    def process(self, *arguments: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.broker.local_process", *map(str, arguments)]
        process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.closing.callback(end, process)
        return process

    def logged(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=PATIENCE)


def line_of(process: subprocess.Popen[str]) -> str:
    stream: IO[str] | None = process.stdout
    assert stream is not None
    return stream.readline().strip()


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    stream: IO[str] | None = process.stdin
    assert stream is not None
    print(line, file=stream, flush=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def came(delivery: Delivery | None) -> Delivery:
    assert delivery is not None, "nothing came"
    return delivery


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    made = Hands(tmp_path)
    with made.closing:
        yield made


# Processes


def test_killed_workers_lose_nothing(hands: Hands) -> None:
    hands.send(*(str(number).encode() for number in range(500)))
    moments = random.Random(7)
    workers = [hands.process("consume", hands.path, hands.log) for _ in range(2)]
    assert [line_of(worker) for worker in workers] == ["ready", "ready"]
    kills = 0
    while len(hands.logged()) < 400 or kills < 3:  # who handles how many in between is up to the machine
        reached = min(len(hands.logged()) + 30, 500)
        wait_until(lambda: len(hands.logged()) >= reached)  # noqa: B023 - called at once
        time.sleep(moments.uniform(0, 0.01))  # any moment within a few messages' handling
        victim = kills % 2
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait(PATIENCE)
        workers[victim] = hands.process("consume", hands.path, hands.log)
        kills += 1
    wait_until(lambda: set(hands.logged()) >= set(range(500)))
    for worker in workers:  # each was started in the loop
        assert line_of(worker) == "ready"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    counts = Counter(hands.logged())
    assert set(counts) == set(range(500))
    assert sum(counts.values()) - 500 <= kills, "only what was logged and not acked at a kill may come twice"
    assert hands.broker.depth("q") == 0
    assert hands.receiver().receive(0.2) is None


def test_a_killed_holder_does_not_keep_its_lease(hands: Hands) -> None:
    hands.send(b"1")
    holder = hands.process("hold", hands.path, "300")
    assert line_of(holder) == "holding"
    receiver = hands.receiver()
    assert receiver.receive(0.3) is None, "it lives, and has it"
    holder.send_signal(signal.SIGKILL)
    delivery = came(receiver.receive(PATIENCE))
    assert delivery.redelivered
    receiver.settle(delivery, Ack())
    assert hands.broker.depth("q") == 0


def test_a_killed_holder_is_noticed_by_depth_browse_and_take(hands: Hands) -> None:
    hands.send(b"1")
    holder = hands.process("hold", hands.path, "300")
    assert line_of(holder) == "holding"
    assert hands.broker.browse("q", 5) == []
    holder.send_signal(signal.SIGKILL)
    holder.wait(PATIENCE)
    with hands.broker.take("q", None, 5) as taken:
        assert [message.body for message in taken.messages] == [b"1"]
    assert hands.broker.depth("q") == 1
    assert list(owners(hands)) == []


def test_a_busy_receiver_notices_dead_owners_too(hands: Hands) -> None:
    hands.send(b"old")
    holder = hands.process("hold", hands.path, "300")
    assert line_of(holder) == "holding"
    receiver, publisher = hands.receiver(), hands.publisher()

    def takes_the_old_one() -> bool:
        publisher.publish([output(b"new")] * 2, PATIENCE)  # there is always something ready
        delivery = came(receiver.receive(0))
        receiver.settle(delivery, Ack())
        return delivery.message.body == b"old"

    assert not takes_the_old_one()
    holder.send_signal(signal.SIGKILL)
    holder.wait(PATIENCE)
    wait_until(takes_the_old_one)


def test_a_stopped_process_loses_its_lease_and_cannot_settle(hands: Hands) -> None:
    hands.send(b"1")
    holder = hands.process("hold", hands.path, "1")
    assert line_of(holder) == "holding"
    holder.send_signal(signal.SIGSTOP)
    receiver = hands.receiver()
    delivery = came(receiver.receive(PATIENCE))
    assert delivery.redelivered
    holder.send_signal(signal.SIGCONT)
    tell(holder)
    assert line_of(holder) == "refused: Lease lost: the message was or will be delivered again."
    receiver.close()
    assert came(hands.receiver().receive(PATIENCE)).message.body == b"1", "the refused ack removed nothing"


def test_a_forked_child_does_not_keep_its_parents_leases(hands: Hands) -> None:
    hands.send(b"1")
    parent = hands.process("fork", hands.path)
    child = int(line_of(parent))
    try:
        parent.send_signal(signal.SIGKILL)
        assert came(hands.receiver().receive(PATIENCE)).redelivered
        os.kill(child, 0)  # the child was there all the time
    finally:
        os.kill(child, signal.SIGKILL)


def test_confirmed_messages_survive_the_publisher(hands: Hands) -> None:
    for _ in range(3):
        assert hands.process("publish", hands.path, "20").wait(PATIENCE) == -signal.SIGKILL
    assert Counter(int(message.body) for message in hands.broker.browse("q", 100)) == dict.fromkeys(range(20), 3)


def test_processes_open_a_new_file_at_the_same_moment(hands: Hands, tmp_path: Path) -> None:
    processes = [hands.process("open") for _ in range(3)]
    assert [line_of(process) for process in processes] == ["ready"] * 3
    for number in range(20):
        path = tmp_path / f"new-{number}.db"
        for process in processes:
            tell(process, str(path))
        assert [line_of(process) for process in processes] == ["[None]"] * 3
        assert LocalBroker(path).depth("q") == 3


# Leases, by a clock that goes when it is told to


def test_a_lease_runs_out_unless_it_is_renewed(hands: Hands) -> None:
    hands.send(b"1")
    broker = hands.by_hand()
    first, second = hands.receiver(broker), hands.receiver(broker)
    held = came(first.receive(0))
    for _ in range(3):
        hands.clock.go(20)
        assert second.receive(0) is None
        first.keep_alive()
    hands.clock.go(31)
    again = came(second.receive(0))
    assert (again.message.body, again.redelivered, again.attempt) == (b"1", True, 1)
    first.keep_alive()  # renews nothing of others'
    hands.clock.go(29)
    assert hands.receiver(broker).receive(0) is None
    hands.clock.go(2)
    assert came(hands.receiver(broker).receive(0)).message.body == b"1"
    with pytest.raises(BrokerUnavailable, match="Lease lost"):
        first.settle(held, Ack())


@pytest.mark.parametrize(
    "settlement",
    [Ack(), Retry(timedelta(0), counted=True), Park("Late"), Release()],
    ids=lambda each: type(each).__name__,
)
def test_a_late_settlement_changes_nothing(hands: Hands, settlement: Settlement) -> None:
    hands.send(b"1")
    broker = hands.by_hand()
    first, second = hands.receiver(broker), hands.receiver(broker)
    held = came(first.receive(0))
    hands.clock.go(31)
    again = came(second.receive(0))
    with pytest.raises(BrokerUnavailable, match="Lease lost"):
        first.settle(held, settlement)
    assert first.receive(0) is None, "it is still the second one's"
    assert broker.depth("q.dead") == 0
    second.settle(again, Retry(timedelta(0), counted=False))
    assert came(first.receive(0)).attempt == 1, "the lost delivery does not count for prefetch either"


def test_a_receiver_takes_back_its_own_lost_message_as_another_delivery(hands: Hands) -> None:
    hands.send(b"1")
    receiver = hands.receiver(hands.by_hand(), prefetch=2)
    first = came(receiver.receive(0))
    hands.clock.go(31)
    second = came(receiver.receive(0))
    with pytest.raises(BrokerUnavailable, match="Lease lost"):
        receiver.settle(first, Ack())
    receiver.settle(second, Ack())
    assert hands.broker.depth("q") == 0


def test_a_settled_delivery_never_reaches_a_message_that_took_its_place(hands: Hands) -> None:
    receiver = hands.receiver(prefetch=5)
    hands.send(b"1")
    first = came(receiver.receive(PATIENCE))
    receiver.settle(first, Ack())
    hands.send(b"2")
    second = came(receiver.receive(PATIENCE))
    assert first.tag.id == second.tag.id, "SQLite gives the row's number again"
    with pytest.raises(BrokerError, match="settled before"):
        receiver.settle(first, Ack())
    with pytest.raises(BrokerError, match="another receiver"):
        hands.receiver().settle(second, Ack())
    receiver.close()
    assert came(hands.receiver().receive(PATIENCE)).message.body == b"2"


def test_what_waits_in_a_receiver_is_not_handed_out_after_its_lease(hands: Hands) -> None:
    hands.send(b"1", b"2", b"3")
    broker = hands.by_hand()
    first, second = hands.receiver(broker, prefetch=3), hands.receiver(broker, prefetch=3)
    came(first.receive(0))
    hands.clock.go(31)
    assert [came(second.receive(0)).message.body for _ in range(3)] == [b"1", b"2", b"3"]
    assert first.receive(0) is None


def test_what_waits_in_a_receiver_is_renewed_when_it_is_handed_out(hands: Hands) -> None:
    hands.send(b"1", b"2")
    broker = hands.by_hand()
    first, second = hands.receiver(broker, prefetch=2), hands.receiver(broker, prefetch=2)
    came(first.receive(0))
    hands.clock.go(29)
    came(first.receive(0))
    hands.clock.go(29)
    assert second.receive(0) is None


def test_what_comes_back_keeps_its_place(hands: Hands) -> None:
    hands.send(b"1", b"2", b"3")
    first = hands.receiver(prefetch=2)
    came(first.receive(PATIENCE))
    first.settle(came(first.receive(PATIENCE)), Release())
    first.close()
    second = hands.receiver(prefetch=3)
    assert [came(second.receive(PATIENCE)).message.body for _ in range(3)] == [b"1", b"2", b"3"]


def test_taken_messages_are_renewed_while_they_are_accepted(hands: Hands) -> None:
    hands.send(b"1", b"2", b"3")
    broker = hands.by_hand()
    with broker.take("q", None, 10) as taken:
        for index in range(2):
            hands.clock.go(25)
            taken.accept(index)
        with pytest.raises(BrokerError, match="accepted before"):
            taken.accept(0)
        hands.clock.go(31)
        receiver = hands.receiver(broker)
        assert came(receiver.receive(0)).message.body == b"3"
        with pytest.raises(BrokerUnavailable, match="Lease lost"):
            taken.accept(2)
    assert receiver.receive(0) is None
    receiver.close()
    assert [message.body for message in broker.browse("q", 10)] == [b"3"]


def test_delays_last_their_time(hands: Hands) -> None:
    broker = hands.by_hand()
    publisher, receiver = hands.publisher(broker), hands.receiver(broker)
    assert publisher.publish([output(b"late", delay=60), output(b"now")], PATIENCE) == [None, None]
    now = came(receiver.receive(0))
    assert now.message.body == b"now"
    receiver.settle(now, Retry(timedelta(seconds=120), counted=True))
    hands.clock.go(59.9)
    assert receiver.receive(0) is None
    assert broker.depth("q") == 0
    hands.clock.go(0.1)
    assert broker.depth("q") == 1
    late = came(receiver.receive(0))
    receiver.settle(late, Ack())
    hands.clock.go(59)
    assert receiver.receive(0) is None
    hands.clock.go(1)
    again = came(receiver.receive(0))
    assert (again.message.body, again.attempt) == (b"now", 2)
    assert again.message.headers["idemp-first-seen"] == "2025-01-01T00:00:00+00:00"


class SteppedClock(HandClock):
    """A machine's clock that is set back while time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.since_boot = 0.0

    def monotonic(self) -> float:
        return self.since_boot

    def go(self, seconds: float) -> None:
        super().go(seconds)
        self.since_boot += seconds

    def set_back(self, seconds: float) -> None:
        self.time -= timedelta(seconds=seconds)


@pytest.mark.parametrize("looked", [True, False])
def test_delays_last_their_time_though_the_clock_is_set_back(hands: Hands, looked: bool) -> None:
    """Also where no process saw it: a receiver that starts later puts it right."""
    hands.clock = clock = SteppedClock()
    broker = hands.by_hand()
    publisher, receiver = hands.publisher(broker), hands.receiver(broker, prefetch=2)
    assert publisher.publish([output(b"late", delay=60), output(b"now")], PATIENCE) == [None, None]
    receiver.settle(came(receiver.receive(0)), Retry(timedelta(seconds=120), counted=True))
    if not looked:
        receiver.close()
    clock.set_back(3600)
    if not looked:
        receiver = hands.receiver(broker, prefetch=2)
    assert receiver.receive(0) is None
    clock.go(61)
    late = came(receiver.receive(0))
    assert late.message.body == b"late"
    receiver.settle(late, Ack())
    clock.go(60)
    assert came(receiver.receive(0)).message.body == b"now"


def test_leases_end_though_the_clock_is_set_back(hands: Hands) -> None:
    hands.clock = clock = SteppedClock()
    broker = hands.by_hand()
    assert hands.publisher(broker).publish([output(b"held")], PATIENCE) == [None]
    holder, other = hands.receiver(broker), hands.receiver(broker)
    held = came(holder.receive(0))
    assert other.receive(0) is None
    clock.set_back(3600)
    assert other.receive(0) is None
    clock.go(31)
    assert came(other.receive(0)).message.body == b"held"
    with pytest.raises(BrokerUnavailable, match="Lease lost"):
        holder.settle(held, Ack())


def test_leases_of_others_are_not_shortened_by_a_start(hands: Hands) -> None:
    hands.clock = clock = SteppedClock()
    long, short = LocalBroker(hands.path, clock=clock, lease=timedelta(seconds=600)), hands.by_hand()
    assert hands.publisher(long).publish([output(b"held")], PATIENCE) == [None]
    held = came((holder := hands.receiver(long)).receive(0))
    other = hands.receiver(short)
    assert other.receive(0) is None
    clock.go(60)
    assert other.receive(0) is None
    holder.settle(held, Ack())


# The file


def owners(hands: Hands) -> Iterator[Path]:
    return hands.path.with_name("queues.db.owners").iterdir()


def test_lock_files_do_not_pile_up(hands: Hands) -> None:
    hands.send(b"1")
    holder = hands.process("hold", hands.path, "300")
    assert line_of(holder) == "holding"
    assert len(list(owners(hands))) == 1
    holder.send_signal(signal.SIGKILL)
    holder.wait(PATIENCE)
    receiver = hands.receiver()
    assert len(list(owners(hands))) == 1, "the dead one's is gone, ours is there"
    came(receiver.receive(PATIENCE))
    receiver.close()
    assert list(owners(hands)) == []


def test_a_locked_file_is_waited_for(hands: Hands) -> None:
    with closing(sqlite3.connect(hands.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        publisher = hands.publisher()
        (answer,) = publisher.publish([output(b"too long")], 0.1)
        assert answer is not None
        assert answer.kind == "timeout"
        timer = threading.Timer(0.2, other.execute, args=("COMMIT",))
        timer.start()
        assert publisher.publish([output(b"waited")], PATIENCE) == [None]
        timer.join()
    assert [message.body for message in hands.broker.browse("q", 5)] == [b"waited"]


def test_keep_alive_of_a_locked_file_neither_raises_nor_hangs(hands: Hands) -> None:
    hands.send(b"1")
    receiver = hands.receiver()
    held = came(receiver.receive(PATIENCE))
    with closing(sqlite3.connect(hands.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        since = time.monotonic()
        receiver.keep_alive()
        assert time.monotonic() - since < 5
        other.execute("COMMIT")
    receiver.settle(held, Ack())


def test_a_damaged_file_is_a_failure_of_the_broker(hands: Hands) -> None:
    publisher, receiver = hands.publisher(), hands.receiver()
    hands.send(b"1")
    held = came(receiver.receive(PATIENCE))
    with closing(sqlite3.connect(hands.path)) as other:
        other.execute("DROP TABLE bodies")
    answers = publisher.publish([output(), output()], PATIENCE)
    assert [answer and answer.kind for answer in answers] == ["closed", "closed"]
    with pytest.raises(BrokerUnavailable):
        receiver.settle(held, Ack())
    with pytest.raises(BrokerUnavailable):
        hands.broker.browse("q", 1)


def test_headers_that_are_no_json_hold_up_no_others(hands: Hands) -> None:
    answers = hands.publisher().publish([output(b"1"), output(headers={"bad": object()}), output(b"2")], PATIENCE)
    assert [answer and answer.kind for answer in answers] == [None, "unsendable", None]
    assert [message.body for message in hands.broker.browse("q", 5)] == [b"1", b"2"]


def test_a_large_backlog_is_taken_by_id(hands: Hands) -> None:
    outputs = [output(str(number).encode()) for number in range(3000)]
    assert hands.publisher().publish(outputs, PATIENCE) == [None] * 3000
    wanted = [str(each.message.message_id) for each in outputs[::2]]
    with hands.broker.take("q", wanted, 5000) as taken:
        assert [message.message_id for message in taken.messages] == wanted
        assert hands.broker.depth("q") == 1500
    assert hands.broker.depth("q") == 3000


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("local:///var/lib/q.db", "/var/lib/q.db"),
        ("local://q.db", "q.db"),
        ("local://folder/q%20r.db", "folder/q r.db"),
        ("folder/q.db", "folder/q.db"),
    ],
)
def test_urls(text: str, file: str) -> None:
    assert file_of(text) == Path(file)


@pytest.mark.parametrize("text", ["", "local://", ":memory:", "local://:memory:", "amqp://localhost/"])
def test_what_names_no_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="names no file"):
        LocalBroker(text)


def test_relative_urls_stay_where_they_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broker = LocalBroker("local://q.db")
    monkeypatch.chdir("/")
    broker.declare(TOPOLOGY)
    assert (tmp_path / "q.db").exists()


def test_a_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE idemp_inbox (id INTEGER)")
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=r"something else.*idemp_inbox.*of its own"):
        LocalBroker(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_of_somebody_else_beside_ours_is_refused(hands: Hands) -> None:
    with closing(sqlite3.connect(hands.path)) as other:
        other.execute("CREATE TABLE idemp_inbox (id INTEGER)")
    with pytest.raises(ConfigurationError, match="something else"):
        LocalBroker(hands.path)


def test_tables_that_only_have_our_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE messages (id INTEGER)")
    with pytest.raises(ConfigurationError, match="something else"):
        LocalBroker(path)


def test_another_format_is_refused(hands: Hands) -> None:
    with closing(sqlite3.connect(hands.path)) as other:
        other.execute("PRAGMA user_version = 2")
    with pytest.raises(ConfigurationError, match="format 2"):
        LocalBroker(hands.path)


def test_files_that_can_not_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, and long enough to have had a header" * 50)
    for path in (tmp_path / "text", tmp_path / "missing" / "q.db", tmp_path):
        with pytest.raises(ConfigurationError, match="can't be used"):
            LocalBroker(path)


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="synchronous='SOMETIMES'"):
        LocalBroker(tmp_path / "q.db", synchronous="SOMETIMES")
    with pytest.raises(ConfigurationError, match="lease"):
        LocalBroker(tmp_path / "q.db", lease=timedelta(0))


def test_guarantees_say_what_the_settings_mean(tmp_path: Path) -> None:
    safe = LocalBroker(tmp_path / "q.db").guarantees
    assert (safe.at_least_once, safe.confirms) == (True, True)
    fast = LocalBroker(tmp_path / "q.db", synchronous="normal").guarantees
    assert (fast.at_least_once, fast.confirms) == (False, False)
    assert "power failure" in fast.remarks


def test_unknown_queues_are_told(hands: Hands) -> None:
    for call in (
        lambda: hands.broker.depth("x"),
        lambda: hands.broker.receiver(["q", "x"], prefetch=1),
        lambda: hands.broker.browse("x", 1),
        lambda: hands.broker.take("x", None, 1),
        lambda: hands.broker.declare(Topology(exchange="e", queues=("y",), bindings=(Binding("x", "#"),))),
    ):
        with pytest.raises(ConfigurationError, match="'x' does not exist"):
            call()
    with pytest.raises(ConfigurationError, match="'y' does not exist"):
        hands.broker.depth("y")
    assert not hands.path.with_name("queues.db.owners").exists()


def test_a_closed_receiver_says_so(hands: Hands) -> None:
    hands.send(b"1")
    receiver = hands.receiver()
    held = came(receiver.receive(PATIENCE))
    receiver.close()
    calls: tuple[Callable[[], object], ...] = (lambda: receiver.receive(0), lambda: receiver.settle(held, Ack()))
    for call in calls:
        with pytest.raises(BrokerUnavailable, match="closed"):
            call()


def test_parking_in_a_dead_letter_queue_makes_one_for_it(hands: Hands) -> None:
    assert hands.publisher().publish([output(b"1", key="q.dead")], PATIENCE) == [None]
    receiver = hands.broker.receiver(["q.dead"], prefetch=1)
    receiver.settle(came(receiver.receive(PATIENCE)), Park("Again"))
    receiver.close()
    assert [message.headers for message in hands.broker.browse("q.dead.dead", 1)] == [{"idemp-dead-reason": "Again"}]
