"""What the servers and the driver can do at best, with nothing of ours or SQLAlchemy's in between."""

from __future__ import annotations

import re
import subprocess
import time
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from amqp import Message
from kombu import Connection
from sqlalchemy import make_url

from benchmarks.variants import Block, Variant, place_of
from benchmarks.work import Done, effects_of
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.servers import programs

if TYPE_CHECKING:
    from sqlalchemy import Engine

_SECONDS: Final = 60.0
_BATCH: Final = 100
_EFFECT: Final = "INSERT INTO effect_limit (order_id) VALUES (gen_random_uuid()::text);"

#: A transaction as the bare handler has it: three round trips.
BARE: Final = f"""
BEGIN;
{_EFFECT}
COMMIT;
"""

#: The same with claim, one output and its pending row, as the store says them: three round trips, too. Marks are left out.
CLAIM: Final = rf"""
BEGIN \; LOCK TABLE idemp_inbox IN ROW EXCLUSIVE MODE \; SHOW lock_timeout \; SET LOCAL lock_timeout = 2000 \; INSERT INTO idemp_inbox (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id) VALUES (gen_random_uuid(), 1, 1, 1, now(), decode('000102030405060708090a0b0c0d0e0f', 'hex'), NULL) ON CONFLICT (consumer_id, message_key) DO NOTHING RETURNING txid_current() \; SET LOCAL lock_timeout = '0';
{_EFFECT}
SELECT txid_current_if_assigned() \; INSERT INTO idemp_output (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body) VALUES (gen_random_uuid(), gen_random_uuid(), 1, 0, 'send', '', 'out', repeat('e', 120), decode(repeat('79', 110), 'hex')) \; INSERT INTO idemp_pending (output_id, message_key, consumer_id, ordinal, attempts, due_at) VALUES (gen_random_uuid(), gen_random_uuid(), 1, 0, 0, now()) \; COMMIT;
"""  # noqa: E501 - what goes in one message is one line of pgbench's


class Limit(Variant):
    """A limit has no queue of orders, and leaves nothing behind that could be wrong."""

    def prepare(self, count: int) -> None:
        """There is no work to be sent."""

    def conserved(self) -> str:
        """It counted by itself."""
        return ""


class PgBench(Limit):
    """Transactions of one client of pgbench.

    Args:
        database: URL of one that nothing else uses.
        script: the transaction.
    """

    def __init__(self, database: str, script: str) -> None:
        engine = create_engine_safely(database)
        upgrade(engine, Tables())
        effects_of("limit").metadata.create_all(engine)
        engine.dispose()
        self._url = make_url(database)
        self._script = script

    def measured(self, count: int) -> Block:
        """By its own watch: without the time that connecting takes. CPU time is not asked for."""
        url, count = self._url, 5 * count
        command = [programs.path("pgbench"), "--no-vacuum", "--file=-", f"--transactions={count}"]
        where = [f"--host={url.host}", f"--port={url.port}", f"--username={url.username}", url.database or ""]
        done = subprocess.run(
            [*command, *where], input=self._script, capture_output=True, text=True, timeout=300, check=False
        )
        found = re.search(r"^tps = ([\d.]+)", done.stdout, re.MULTILINE)
        if done.returncode or found is None or f"processed: {count}/{count}" not in done.stdout:
            raise RuntimeError(f"pgbench failed: {done.stdout[-500:]} {done.stderr[-500:]}")
        return Block(1 / float(found[1]), 0.0)

    def consume(self, count: int) -> float:
        """The seconds it took."""
        return self.measured(count).seconds * count

    def close(self) -> None:
        """There is nothing open."""


class Amqp(Limit):
    """py-amqp itself on a channel, and a queue of its own."""

    def __init__(self, name: str, engine: Engine, broker: str) -> None:
        super().__init__(place_of(name, engine, broker))
        self._connection = Connection(broker)
        self.channel: Any = self._connection.channel()
        self.wire: Any = self._connection.connection

    @abstractmethod
    def consume(self, count: int) -> float:
        """So many messages; the seconds it took."""

    def close(self) -> None:
        """Close what is open."""
        self._connection.release()
        super().close()


class Consuming(Amqp):
    """Consume and ack, so many in one word."""

    def __init__(self, engine: Engine, broker: str) -> None:
        super().__init__("limit consume", engine, broker)
        self._arrived: deque[Any] = deque()
        self.channel.basic_qos(0, 2 * _BATCH, False)
        self.channel.basic_consume(self.place.queue, callback=self._arrived.append)

    def prepare(self, count: int) -> None:
        """Fill the queue."""
        self.place.send(5 * count)

    def measured(self, count: int) -> Block:
        """Of more messages than the others take: they are gone soon."""
        return super().measured(5 * count)

    def consume(self, count: int) -> float:
        """Acks are never fewer than what the broker waits for."""
        began = time.perf_counter()
        while count:
            while len(self._arrived) < min(count, _BATCH):
                self.wire.drain_events(timeout=_SECONDS)
            taken = [self._arrived.popleft() for _ in range(min(count, _BATCH))]
            self.channel.basic_ack(taken[-1].delivery_tag, multiple=True)
            count -= len(taken)
        return time.perf_counter() - began


class Publishing(Amqp):
    """Publish, and wait for the confirms of a batch."""

    def __init__(self, engine: Engine, broker: str) -> None:
        super().__init__("limit publish", engine, broker)
        self.channel.confirm_select()
        self._published = self._confirmed = 0
        self.channel.events["basic_ack"].add(self._on_ack)
        body = Done(order_id="0" * 36, note="y" * 40).model_dump_json()
        self._message = Message(body, content_type="application/json", delivery_mode=2)

    def measured(self, count: int) -> Block:
        """Of more messages than the others take."""
        return super().measured(5 * count)

    def consume(self, count: int) -> float:
        """Persistent ones."""
        began, upto = time.perf_counter(), self._published + count
        while self._published < upto:
            more = min(_BATCH, upto - self._published)
            for _ in range(more):
                self.channel.basic_publish(self._message, exchange="", routing_key=self.place.out)
            self._published += more
            while self._confirmed < self._published:
                self.wire.drain_events(timeout=_SECONDS)
        return time.perf_counter() - began

    def conserved(self) -> str:
        """All of them are in the queue."""
        found = self.place.broker.depth(self.place.out)
        return "" if found == self._published else f"{self.place.name}: {found} of {self._published} are there"

    def _on_ack(self, delivery_tag: int, multiple: bool) -> None:
        del multiple
        self._confirmed = max(self._confirmed, delivery_tag)
