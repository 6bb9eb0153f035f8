"""A spool on each database, and a queue to drain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from amqp import Connection
from sqlalchemy import Engine, make_url

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Message, Output, OutputKind
from idemp.spool import SpoolStore

DATABASES = ("sqlite", "postgresql", "mariadb")


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/spool.db"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def opened() -> Iterator[Callable[[str], SpoolStore]]:
    """Opens spools of one's own connections."""
    engines: list[Engine] = []

    def opened(url: str) -> SpoolStore:
        engines.append(create_engine_safely(url))
        return SpoolStore(engines[-1])

    yield opened
    for engine in engines:
        engine.dispose()


class Queue:
    """A queue of RabbitMQ."""

    name = "orders"

    def __init__(self, url: str, kind: str) -> None:
        self.url = url
        self.broker = KombuBroker(url)
        with channel(url) as amqp:
            amqp.queue_declare(self.name, durable=True, auto_delete=False, arguments={"x-queue-type": kind})

    def put(self, messages: list[Message]) -> None:
        """Publish, and wait for the confirms."""
        outputs = [
            Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=self.name, message=each)
            for each in messages
        ]
        with closing(ConfirmingPublisher(self.url)) as publisher:
            assert publisher.publish(outputs, 20) == [None] * len(outputs)

    @property
    def depth(self) -> int:
        """What waits in it."""
        return self.broker.depth(self.name)

    def parked(self) -> list[Message]:
        """Its dead letters."""
        return self.broker.browse(f"{self.name}.dead", 100)


@contextmanager
def channel(url: str) -> Iterator[object]:
    """A channel of py-amqp's."""
    parts = make_url(url)
    where = f"{parts.host}:{parts.port}"
    connecting = Connection(where, userid=parts.username, password=parts.password, virtual_host=parts.database)
    with closing(connecting) as connection:
        connection.connect()
        yield connection.channel()


@pytest.fixture
def queue(request: pytest.FixtureRequest, rabbitmq_url: str) -> Queue:
    """An empty queue: a quorum queue, unless the test asks for another kind."""
    return Queue(rabbitmq_url, getattr(request, "param", "quorum"))
