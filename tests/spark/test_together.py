"""A worker on RabbitMQ and a backfill of an archive at the same time, on one PostgreSQL: they overlap by 30 %."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest
from pydantic import SecretStr

from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Topology
from idemp.messages import Message, Output, OutputKind
from idemp.spark.archives import backfill
from idemp.spark.columns import Columns
from idemp.spark.files import read_messages
from idemp.spark.writing import sink
from tests.servers.process import wait_until
from tests.spark.shop import ORDER, WHERE, Shop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MESSAGES = int(os.environ.get("IDEMP_TEST_TOGETHER", "600"))
"""Both ways. `IDEMP_TEST_TOGETHER=50000` for a longer look."""
ONLINE = range(MESSAGES)
ARCHIVED = range(7 * MESSAGES // 10, 17 * MESSAGES // 10)
SECONDS = 60 + MESSAGES / 50


def id_of(number: int) -> UUID:
    return uuid5(NAMESPACE_OID, f"order {number}")


def body_of(number: int) -> str:
    return json.dumps({"sku": f"sku-{number}"})


def sent(number: int) -> Output:
    message = Message(body=body_of(number).encode(), type=ORDER, message_id=str(id_of(number)))
    return Output(id=id_of(number), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop", message=message)


@contextmanager
def worker(database: str, broker: str, folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "idemp", "worker", WHERE, "--database", database, "--broker", broker]
    environment = {**os.environ, "IDEMP_PREFETCH": "10"}
    with (folder / "worker").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            ended = process.wait(60)
    assert ended == 0, (folder / "worker").read_text()


def test_every_effect_once(spark: SparkSession, shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive.json"
    archive.write_text(
        "".join(json.dumps({"id": str(id_of(n)), "type": ORDER, "body": body_of(n)}) + "\n" for n in ARCHIVED)
    )
    broker = KombuBroker(rabbitmq_url)
    broker.declare(Topology(exchange="idemp", queues=("shop", "stock")))
    publisher = broker.publisher()
    assert not any(publisher.publish([sent(number) for number in ONLINE], SECONDS))
    publisher.close()

    everything = len({*ONLINE, *ARCHIVED})
    messages = read_messages(spark, [str(archive)], "json", Columns(body="body"))
    to = sink(WHERE, database=SecretStr(shop.url), parked=str(tmp_path / "parked"), rows=MESSAGES // 30)
    with worker(shop.url, rabbitmq_url, tmp_path):
        wait_until(lambda: shop.count("sale") > 0, "the worker has begun")
        assert shop.count("sale") < len(ONLINE)  # and has not ended: they run at the same time
        summary = backfill(messages, to)
        wait_until(lambda: shop.count("sale") >= everything, "all are handled", seconds=SECONDS)
        wait_until(
            lambda: broker.depth("shop") == 0 and shop.count("idemp_pending") == 0, "all is sent", seconds=SECONDS
        )

    assert (summary.rows, summary.new + summary.duplicate) == (len(ARCHIVED), len(ARCHIVED))
    assert shop.sales() == sorted(str(id_of(number)) for number in {*ONLINE, *ARCHIVED})
    assert shop.counts() == (everything, everything, 0)
    ids = [message.message_id for message in broker.browse("stock", 10 * everything)]
    assert len(ids) >= len(set(ids)) == everything
