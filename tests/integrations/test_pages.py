"""The consumers of docs/wrap.md, the tasks of docs/celery.md and the actors of docs/dramatiq.md, as printed but for their addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pika
import pytest

from tests.servers import ask
from tests.servers.databases import query
from tests.test_docs import BLOCK, CELERY, DRAMATIQ, FASTSTREAM, NAMED, ROOT, Reader
from tests.worker.test_loop import wait_for


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize("client", ["kombu", "pika", "aio_pika"])
def test_a_consumer_of_the_page_takes_each_payment_once(client: str, url: str, vhost: str, tmp_path: Path) -> None:
    places = {"amqp://localhost": vhost, "sqlite:///shop.db": url, "postgresql+psycopg://localhost/shop": url}
    for _, text in BLOCK.findall((ROOT / "docs" / "wrap.md").read_text()):
        if named := NAMED.match(text):
            for printed, place in places.items():
                text = text.replace(printed, place)  # noqa: PLW2901
            (tmp_path / named[1]).write_text(text)
    query(url, "CREATE TABLE payment (id INTEGER, cents INTEGER)")
    with closing(pika.BlockingConnection(pika.URLParameters(vhost))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("payments", durable=True)
        for id in (8, 8, 9, 9, 10):
            channel.basic_publish("", "payments", f'{{"payment_id": {id}, "cents": 100}}')
        with (tmp_path / "log").open("wb") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, f"by_{client}.py"]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            wait_for(lambda: process.poll() is not None or len(query(url, "SELECT id FROM payment")) == 4)
        finally:
            process.kill()
            process.wait()
    assert sorted(query(url, "SELECT id FROM payment")) == [(7,), (8,), (9,), (10,)], (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("page", "lines"), [(CELERY, 150), (DRAMATIQ, 120), (FASTSTREAM, 125)], ids=["celery", "dramatiq", "faststream"]
)
def test_a_page_of_a_framework_is_true(page: Path, lines: int, url: str, vhost: str, tmp_path: Path) -> None:
    printed = page.read_text()
    assert len(printed.splitlines()) <= lines
    places = {"amqp://localhost": vhost, "redis://localhost": ask("redis", "create_database")}
    for known, place in {**places, "postgresql+psycopg://localhost/shop": url}.items():
        printed = printed.replace(known, place)
    (tmp_path / "page.md").write_text(printed)
    query(url, "CREATE TABLE payment (order_id INTEGER, cents INTEGER)")
    reader = Reader(tmp_path)
    reader.environment["PYTHONPATH"] = str(ROOT)
    reader.read(tmp_path / "page.md")
    assert query(url, "SELECT order_id, cents FROM payment") == [(7, 1200)]
