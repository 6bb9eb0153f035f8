"""The example of an aio-pika consumer, on real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pika
import pytest
from sqlalchemy import create_engine, text

from tests.servers.databases import query
from tests.worker.test_loop import wait_for

FOLDER = Path(__file__).parent.parent.parent / "examples" / "asyncio"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_wrapped_consumer_and_an_app_take_each_payment_once(url: str, vhost: str, tmp_path: Path) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE payment (row serial, id integer, cents integer)"))
    engine.dispose()
    places = {"DATABASE_URL": url.replace("psycopg", "asyncpg"), "AMQP_URL": vhost.replace("pyamqp", "amqp")}
    places |= {"IDEMP_DATABASE_URL": url, "IDEMP_BROKER_URL": vhost}
    environment = {**os.environ, **places}
    connection = pika.BlockingConnection(pika.URLParameters(places["AMQP_URL"]))
    channel = connection.channel()
    channel.confirm_delivery()
    for queue in ("payments", "receipts"):
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})

    def send(queue: str, *ids: int) -> None:
        for id in ids:
            channel.basic_publish(
                "", queue, json.dumps({"payment_id": id, "cents": 100}), pika.BasicProperties(message_id=str(id))
            )

    def receipts() -> set[int]:
        while True:
            _, _, body = channel.basic_get("receipts", auto_ack=True)
            if body is None:
                return seen
            seen.add(json.loads(body)["payment_id"])

    def run(*command: str) -> Any:
        with (tmp_path / "log").open("ab") as log:
            running.append(subprocess.Popen([sys.executable, *command], cwd=FOLDER, env=environment, stdout=log, stderr=log))
        return running[-1]

    seen: set[int] = set()
    running: list[subprocess.Popen[bytes]] = []
    try:
        relay, wrapped = run("-m", "idemp", "relay"), run("wrapped.py")
        send("payments", 1, 2, 1, 1)
        wait_for(lambda: len(taken(url)) == 2 and receipts() == {1, 2})
        for process in (wrapped, relay):
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        run("-m", "idemp", "worker", "billing")
        wait_for(lambda: b"consuming billing" in (tmp_path / "log").read_bytes())
        send("billing", 2, 3, 3)
        wait_for(lambda: len(taken(url)) == 3 and receipts() == {1, 2, 3})
        wait_for(lambda: channel.queue_declare("billing", passive=True).method.message_count == 0)
        assert taken(url) == [1, 2, 3], (tmp_path / "log").read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()
        connection.close()


def taken(url: str) -> list[int]:
    return sorted(row[0] for row in query(url, "SELECT id FROM payment"))
