"""`idemp broker`: an app's queues, declared and made anew."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import amqp
import pytest

from idemp.broker.kombu import KombuBroker, rebuilding
from idemp.broker.kombu.link import Link
from idemp.broker.kombu.rebuilding import Rebuild
from idemp.broker.kombu.topology import main_queue
from idemp.broker.port import Topology
from idemp.errors import BrokerUnavailable
from idemp.messages import Message, Output, OutputKind
from idemp.testing import FaultProxy
from tests.lanes import mostly_slow
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Answer, Cli, Shop

NAMES = [f"m-{number}" for number in range(30)]
_numbers = itertools.count()
MODULE = """
from idemp import App

app = App("shop")
"""


def test_declare_makes_what_is_missing(cli: Cli, empty_shop: Shop) -> None:
    for _ in range(2):
        made = cli("broker", "declare", empty_shop.where, "--json")
        assert (made.code, made.data["queues"], made.data["dead_letter_queues"]) == (0, ["shop"], ["shop.dead"])
    assert "shop with its dead letters" in cli("broker", "declare", empty_shop.where).out
    assert (empty_shop.app.broker.depth("shop"), empty_shop.app.broker.depth("shop.dead")) == (0, 0)


def test_queues_without_arguments_are_not_rebuilt(cli: Cli, empty_shop: Shop, redis_url: str) -> None:
    assert cli("broker", "rebuild", empty_shop.where, "--queue", "shop").code == 3
    os.environ["IDEMP_ALLOW_AT_MOST_ONCE"] = "true"
    try:
        assert cli("broker", "rebuild", empty_shop.where, "--queue", "shop", "--broker", redis_url).code == 3
    finally:
        del os.environ["IDEMP_ALLOW_AT_MOST_ONCE"]


@pytest.fixture
def where(folder: Path, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An app whose broker is RabbitMQ."""
    monkeypatch.setenv("IDEMP_BROKER_URL", rabbitmq_url)
    module = f"rebuilt_{next(_numbers)}"
    (folder / f"{module}.py").write_text(MODULE)
    return f"{module}:app"


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody publishes: a rebuild need not look for it for as long as it usually does."""
    monkeypatch.setattr(rebuilding, "_WATCH", 0.01)


@pytest.fixture
def link(rabbitmq_url: str) -> Iterator[Link]:
    """A connection for what an administrator does."""
    made = Link.open(rabbitmq_url, connect_timeout=10, heartbeat=0)
    yield made
    made.close()


CLASSIC: dict[str, Any] = {}
QUORUM = {"x-queue-type": "quorum"}


def spoil(link: Link, arguments: dict[str, Any], names: list[str]) -> None:
    """A queue `shop` with other arguments, and messages in it."""
    channel = link.open_channel()
    channel.confirm_select()
    channel.queue_declare("shop", durable=True, auto_delete=False, arguments=arguments)
    for name in names:
        content = amqp.Message(
            name.encode(), message_id=name, app_id="till", expiration="3600000", application_headers={"raw": b"\xff"}
        )
        channel.basic_publish_confirm(content, "", "shop")
    channel.close()


def rebuilt(cli: Cli, where: str, *options: str) -> Answer:
    """What a process answers that knows nothing of an earlier one."""
    sys.modules.pop(where.partition(":")[0], None)
    return cli("broker", "rebuild", where, "--queue", "shop", *options)


def right(link: Link) -> bool:
    """Whether `shop` is as idemp declares it."""
    main_queue("shop").declare(link.open_channel())
    return True


@pytest.mark.parametrize("arguments", [CLASSIC, QUORUM], ids=["classic", "quorum"])
def test_rebuilt_queue_has_its_messages_as_they_were(
    cli: Cli, where: str, link: Link, arguments: dict[str, Any]
) -> None:
    spoil(link, arguments, NAMES)
    answer = cli("broker", "rebuild", where, "--queue", "shop", "--json")
    assert answer.data == {"queue": "shop", "rebuilt": True, "aside": 30, "back": 30}
    assert right(link)
    channel = link.open_channel()
    for name in NAMES:
        came = channel.basic_get("shop")
        assert (came.body, came.properties["message_id"]) == (name.encode(), name)
        assert (came.properties["app_id"], came.properties["expiration"]) == ("till", "3600000")
        assert came.properties["application_headers"]["raw"] == b"\xff"
    assert channel.basic_get("shop") is None
    channel.close()
    again = cli("broker", "rebuild", where, "--queue", "shop")
    assert (again.code, "is as it must be" in again.out) == (0, True)


# AMQP's numbers of queue.delete; a message's name stands in it where it goes aside, and where it comes back.
DELETE = b"\x00\x32\x00\x28"
CUTS: dict[str, dict[str, Any]] = {
    "going aside": {"pattern": b"m-15", "before": True},
    "gone aside, not acked": {"pattern": b"m-29", "before": False},
    "before the deletion": {"pattern": DELETE, "before": True},
    "after the deletion": {"pattern": DELETE, "before": False},
    "coming back": {"pattern": b"m-15", "nth": 3, "before": True},
    "before the end": {"pattern": DELETE, "nth": 2, "before": True},
}


@pytest.mark.parametrize("arguments", mostly_slow([QUORUM, CLASSIC]), ids=["quorum", "classic"])
@pytest.mark.parametrize("cut", mostly_slow(CUTS, first=4))
def test_interrupted_rebuild_goes_on_where_it_stopped(
    cli: Cli, where: str, link: Link, rabbitmq_url: str, unwatched: None, arguments: dict[str, Any], cut: str
) -> None:
    spoil(link, arguments, NAMES)
    port = int(rabbitmq_url.rpartition(":")[2].partition("/")[0])
    with FaultProxy("127.0.0.1", port) as proxy:
        trigger = proxy.cut_when(**CUTS[cut])
        first = rebuilt(cli, where, "--broker", proxy.through(rabbitmq_url))
        assert trigger.wait_triggered(5)
    assert first.code in {0, 4}
    if first.code and cut in {"gone aside, not acked", "before the deletion", "coming back"}:
        again = f"`idemp broker rebuild {where} --queue shop --broker"
        assert ("shop.aside holds" in first.err, again in first.err) == (True, True)
    assert rebuilt(cli, where).code == 0
    assert right(link)
    broker = KombuBroker(rabbitmq_url)
    copies: dict[str, set[bytes]] = {}
    for message in broker.browse("shop", 1000):
        copies.setdefault(str(message.message_id), set()).add(message.body)
    assert copies == {name: {name.encode()} for name in NAMES}
    with pytest.raises(Exception, match=r"NOT_FOUND - no queue 'shop\.aside'"):
        link.open_channel().queue_declare("shop.aside", passive=True)


@contextmanager
def publishing(url: str, *, pause: float = 0.0) -> Iterator[list[str]]:
    """Somebody publishes to `shop`, one by one; the ids of those that were confirmed.

    Args:
        url: the broker.
        pause: seconds after each; without, it may well publish faster than a rebuild moves.
    """
    confirmed: list[str] = []
    done = threading.Event()

    def publish() -> None:
        with closing(KombuBroker(url).publisher()) as publisher:
            while not done.is_set():
                name = str(uuid4())
                message = Message(body=b"{}", message_id=name)
                output = Output(
                    id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop", message=message
                )
                if publisher.publish([output], 10) == [None]:
                    confirmed.append(name)
                done.wait(pause)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        wait_until(lambda: len(confirmed) > 0, "it publishes")
        yield confirmed
    finally:
        done.set()
        thread.join()


def test_rebuild_under_traffic_is_refused(cli: Cli, where: str, link: Link, rabbitmq_url: str) -> None:
    spoil(link, CLASSIC, NAMES)
    with publishing(rabbitmq_url) as confirmed:
        answer = rebuilt(cli, where)
    assert (answer.code, "Somebody publishes to the queue 'shop'" in answer.err) == (3, True)
    assert {message.message_id for message in KombuBroker(rabbitmq_url).browse("shop", 10_000)} == {*NAMES, *confirmed}


@pytest.mark.parametrize("arguments", [CLASSIC, QUORUM], ids=["classic", "quorum"])
def test_traffic_that_was_not_seen_costs_no_more_than_the_broker_drops(
    link: Link, rabbitmq_url: str, arguments: dict[str, Any]
) -> None:
    """What is in flight in the moment of the deletion: of one publisher that waits for each confirm, one message."""
    spoil(link, arguments, NAMES)
    topology = Topology(exchange="", queues=("shop",))
    with publishing(rabbitmq_url, pause=0.005) as confirmed:
        done = Rebuild(rabbitmq_url, topology, "shop", lambda _: None, 10.0, watch=0).run()
    found = {message.message_id for message in KombuBroker(rabbitmq_url).browse("shop", 100_000)}
    assert done.rebuilt
    assert found <= {*NAMES, *confirmed}
    assert len({*NAMES, *confirmed} - found) <= 1
    assert set(NAMES) <= found


@pytest.mark.slow
def test_queue_that_fills_as_fast_as_it_is_emptied_is_left_alone(
    cli: Cli, where: str, link: Link, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(link, QUORUM, NAMES)
    topology = Topology(exchange="", queues=("shop",))
    with (
        monkeypatch.context() as slow,
        publishing(rabbitmq_url) as confirmed,
        publishing(rabbitmq_url) as by_another,
        pytest.raises(BrokerUnavailable, match=r"never empty\. shop\.aside holds \d+ messages"),
    ):
        slow.setattr(rebuilding, "_PREFETCH", 50)
        slow.setattr(rebuilding, "_PATIENCE", 0.5)
        slow.setattr(rebuilding, "_FLOODED", 0.5)
        Rebuild(rabbitmq_url, topology, "shop", lambda _: None, 10.0, watch=0).run()
    assert rebuilt(cli, where).code == 0
    found = {message.message_id for message in KombuBroker(rabbitmq_url).browse("shop", 100_000)}
    assert found == {*NAMES, *confirmed, *by_another}


def test_rebuild_refuses_what_would_lose_messages(cli: Cli, where: str, link: Link, rabbitmq_url: str) -> None:
    spoil(link, CLASSIC, NAMES)
    channel = link.open_channel()
    channel.basic_consume("shop", callback=lambda _: None)
    refused = cli("broker", "rebuild", where, "--queue", "shop")
    assert (refused.code, "has 1 consumer." in refused.err) == (3, True)
    channel.close()
    channel = link.open_channel()
    channel.queue_declare("shop.rebuilding", exclusive=True)
    refused = cli("broker", "rebuild", where, "--queue", "shop")
    assert (refused.code, "Somebody else rebuilds 'shop'" in refused.err) == (3, True)
    assert cli("broker", "rebuild", where, "--queue", "shopp").code == 3
    assert KombuBroker(rabbitmq_url).depth("shop") == 30


@pytest.mark.parametrize("names", [NAMES[:2], []], ids=["messages", "empty"])
def test_rebuild_refuses_a_stream(cli: Cli, where: str, link: Link, rabbitmq_url: str, names: list[str]) -> None:
    """RabbitMQ says for a while that it is empty, and hands out none of its messages."""
    spoil(link, {"x-queue-type": "stream"}, names)
    answer = cli("broker", "rebuild", where, "--queue", "shop")
    assert (answer.code, "'shop' is a stream" in answer.err) == (3, True)
    link.open_channel().queue_declare("shop", durable=True, auto_delete=False, arguments={"x-queue-type": "stream"})


@pytest.mark.parametrize(
    "arguments", [{"x-single-active-consumer": True}, {**QUORUM, "x-single-active-consumer": True}]
)
def test_a_queue_for_one_consumer_at_a_time_is_rebuilt(
    cli: Cli, where: str, link: Link, arguments: dict[str, Any]
) -> None:
    spoil(link, arguments, NAMES[:3])
    answer = cli("broker", "rebuild", where, "--queue", "shop", "--json")
    assert answer.data == {"queue": "shop", "rebuilt": True, "aside": 3, "back": 3}


def test_declare_says_what_stands_in_its_way(cli: Cli, where: str, link: Link, rabbitmq_url: str) -> None:
    KombuBroker(rabbitmq_url).declare(Topology(exchange="", queues=("other",)))
    spoil(link, CLASSIC, [])
    answer = cli("broker", "declare", where, "--json")
    assert (answer.code, answer.error["kind"]) == (3, "ConfigurationError")
    assert "'shop' exists with other arguments" in answer.error["message"]
    assert "`idemp broker rebuild MODULE:APP --queue shop`" in answer.error["fix"]


def test_rebuild_touches_that_queue_alone(cli: Cli, where: str, link: Link, rabbitmq_url: str, unwatched: None) -> None:
    """Though another one of the app has other arguments, too, and a third is missing."""
    link.open_channel().queue_declare("shop.delay.1000ms", durable=True, auto_delete=False)
    spoil(link, CLASSIC, NAMES)
    assert rebuilt(cli, where, "--json").data == {"queue": "shop", "rebuilt": True, "aside": 30, "back": 30}
    assert KombuBroker(rabbitmq_url).depth("shop.dead") == 0
    with pytest.raises(Exception, match="NOT_FOUND"):
        link.open_channel().queue_declare("shop.delay.5000ms", passive=True)


def test_rebuild_refuses_before_it_moves_anything(cli: Cli, where: str, link: Link, rabbitmq_url: str) -> None:
    """It could not bind the new queue."""
    spoil(link, CLASSIC, NAMES)
    link.open_channel().exchange_declare("idemp", "fanout", durable=True, auto_delete=False)
    answer = rebuilt(cli, where)
    assert (answer.code, "exchange 'idemp' exists with other arguments" in answer.err) == (3, True)
    assert KombuBroker(rabbitmq_url).depth("shop") == 30
    with pytest.raises(Exception, match="NOT_FOUND"):
        link.open_channel().queue_declare("shop.aside", passive=True)
