"""Brokers, broken on purpose."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.kombu.link import Link
from idemp.broker.kombu.topology import dead_queue, delay_queue, main_queue
from idemp.messages import Message
from tests.cli.test_dead_brokers import put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cli.doctor.conftest import Patient
    from tests.servers.rabbitmq import RabbitMQ
    from tests.servers.redis import Redis


@contextmanager
def channel() -> Iterator[Any]:
    """What an administrator, or another program, did to the broker."""
    link = Link.open(os.environ["IDEMP_BROKER_URL"], connect_timeout=10, heartbeat=0)
    try:
        yield link.channel
    finally:
        link.close()


def other(name: str, **arguments: Any) -> Callable[[Any], None]:
    """Declare a durable queue anew, with other arguments."""

    def break_it(on: Any) -> None:
        on.queue_delete(name)
        on.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)

    return break_it


MAIN, DEAD, TIER = (dict(hop.arguments) for hop in (main_queue("shop"), dead_queue("shop"), delay_queue("shop", 1000)))
HELD: dict[str, tuple[Callable[[Any], None], str, str, str]] = {
    "a classic queue": (other("shop"), "queue", "shop", "exists with other arguments"),
    "a queue that drops what it gives up": (
        other("shop", **{"x-queue-type": "quorum"}),
        "queue",
        "shop",
        "x-dead-letter-exchange",
    ),
    "a queue that drops its oldest": (
        other("shop", **{**MAIN, "x-overflow": "drop-head", "x-max-length": 100}),
        "queue",
        "shop",
        "x-",
    ),
    "classic dead letters": (other("shop.dead"), "dead-letter queue", "shop.dead", "x-queue-type"),
    "a delay tier that waits longer": (
        other("shop.delay.30000ms", **{**delay_queue("shop", 30_000).arguments, "x-message-ttl": 60_000}),
        "delay tier",
        "shop.delay.30000ms",
        "x-message-ttl",
    ),
    "a delay tier that hands on at most once": (
        other(
            "shop.delay.30000ms",
            **{
                name: value
                for name, value in delay_queue("shop", 30_000).arguments.items()
                if name != "x-dead-letter-strategy"
            },
        ),
        "delay tier",
        "shop.delay.30000ms",
        "x-dead-letter-strategy",
    ),
}


@pytest.mark.parametrize("what", HELD)
def test_other_arguments_are_mended_and_messages_kept(on_rabbitmq: Patient, what: str) -> None:
    patient = on_rabbitmq
    break_it, name, queue, words = HELD[what]
    with channel() as on:
        break_it(on)
    messages = [Message(body=b"%d" % number, message_id=f"m-{number}") for number in range(25)]
    put(patient.broker(), queue, messages)
    (found,) = patient.red()
    assert (found["name"], queue in found["detail"], words in found["detail"]) == (name, True, True)
    patient.treat(found)
    assert patient.ran == [f"idemp broker rebuild {patient.where} --queue {queue}"]
    assert patient.red() == []
    kept = patient.broker().browse(queue, 100)
    assert [(message.message_id, message.body) for message in kept] == [
        (message.message_id, message.body) for message in messages
    ]


def test_several_wrong_queues_are_mended_in_the_order_of_the_report(on_rabbitmq: Patient) -> None:
    """A queue and a delay tier have other arguments, a tier and the exchange are missing; nothing is lost."""
    patient = on_rabbitmq
    with channel() as on:
        other("shop")(on)
        other("shop.delay.1000ms")(on)
        on.queue_delete("shop.delay.30000ms")
        on.exchange_delete("idemp")
    messages = [Message(body=b"%d" % number, message_id=f"m-{number}") for number in range(3)]
    put(patient.broker(), "shop", messages)
    found = patient.red()
    assert len(found) == 4
    for check in found:
        patient.treat(check)
    assert patient.red() == []
    assert [message.message_id for message in patient.broker().browse("shop", 100)] == ["m-0", "m-1", "m-2"]


def test_messages_that_a_rebuild_left_aside_are_told_and_come_back(on_rabbitmq: Patient) -> None:
    patient = on_rabbitmq
    with channel() as on:
        on.queue_declare("shop.aside", durable=True, auto_delete=False, arguments=dict(dead_queue("").arguments))
    put(patient.broker(), "shop.aside", [Message(body=b"{}", message_id=f"m-{number}") for number in range(3)])
    (found,) = patient.red()
    assert (found["name"], "shop.aside holds 3 messages of shop" in found["detail"]) == ("messages aside", True)
    patient.treat(found)
    assert patient.ran == [f"idemp broker rebuild {patient.where} --queue shop"]
    assert patient.red() == []
    assert patient.broker().depth("shop") == 3


MISSING: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "no queue": (lambda on: on.queue_delete("shop"), "queue", "'shop' is missing"),
    "no dead-letter queue": (lambda on: on.queue_delete("shop.dead"), "dead-letter queue", "'shop.dead' is missing"),
    "no delay tier": (lambda on: on.queue_delete("shop.delay.1000ms"), "delay tier", "'shop.delay.1000ms' is missing"),
    "no exchange": (lambda on: on.exchange_delete("idemp"), "exchange", "'idemp' is missing"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_declared(on_rabbitmq: Patient, what: str) -> None:
    patient = on_rabbitmq
    break_it, name, words = MISSING[what]
    with channel() as on:
        break_it(on)
    (found,) = patient.red()
    assert (found["name"], words in found["detail"]) == (name, True)
    patient.treat(found)
    assert patient.ran == [f"idemp broker declare {patient.where}"]
    assert patient.red() == []


def test_nothing_declared_yet_is_no_failure(
    on_sqlite: Patient, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMP_BROKER_URL", rabbitmq_url)
    assert on_sqlite.red() == []
    told = [check for check in on_sqlite.look().data["checks"] if check["name"] in {"queue", "exchange"}]
    declare = f"idemp broker declare {on_sqlite.where}"
    assert [(check["verdict"], check["commands"][0]["text"]) for check in told] == [("warning", declare)] * 2


def test_exchange_of_another_type_is_told(on_rabbitmq: Patient) -> None:
    """It may be somebody else's: no command deletes it."""
    with channel() as on:
        on.exchange_delete("idemp")
        on.exchange_declare("idemp", "fanout", durable=True, auto_delete=False)
    (found,) = on_rabbitmq.red()
    assert (found["name"], "current is 'fanout'" in found["detail"]) == ("exchange", True)
    assert (found["commands"], "setting exchange" in found["fix"]) == ([], True)


def test_nothing_of_the_look_reaches_a_consumer(on_rabbitmq: Patient) -> None:
    with channel() as on:
        on.queue_declare("all", durable=True, auto_delete=False)
        on.queue_bind("all", "idemp", "#")
    assert on_rabbitmq.red() == []
    assert on_rabbitmq.broker().depth("all") == 0
    assert on_rabbitmq.broker().depth("shop") == 0


@pytest.fixture
def on_own_rabbitmq(on_sqlite: Patient, own_rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> Patient:
    """On a node whose rights and limits a test may change."""
    monkeypatch.setenv("IDEMP_BROKER_URL", own_rabbitmq.url)
    on_sqlite.rabbitmqctl = own_rabbitmq.ctl
    on_sqlite.declare()
    return on_sqlite


def test_alarm(on_own_rabbitmq: Patient, own_rabbitmq: RabbitMQ) -> None:
    patient = on_own_rabbitmq
    own_rabbitmq.raise_memory_alarm()
    (found,) = patient.red()
    assert (found["name"], "low on memory" in found["detail"]) == ("alarms", True)
    patient.treat(found)
    assert patient.red() == []


PERMISSIONS = {
    "no configure": ('<<"^$">>, <<".*">>, <<".*">>', "shop"),
    "no write": ('<<".*">>, <<"^$">>, <<".*">>', "No writing"),
    "no write to the exchange": ('<<".*">>, <<"^(amq.default|amq.gen.*|shop.*)$">>, <<".*">>', "No publishing"),
    "no read": ('<<".*">>, <<".*">>, <<"^$">>', "No consuming"),
}


def test_permissions(on_own_rabbitmq: Patient, own_rabbitmq: RabbitMQ) -> None:
    patient = on_own_rabbitmq
    permit = 'ok = rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"/">>, {}, <<"test">>)'
    for patterns, words in PERMISSIONS.values():
        own_rabbitmq.evaluate(permit.format(patterns))
        found = patient.red()
        assert {check["name"] for check in found} == {"rights"}
        assert any(words in check["detail"] for check in found)
        assert {command["text"] for check in found for command in check["commands"]} == {
            "rabbitmqctl set_permissions -p / guest '.*' '.*' '.*'"
        }
    patient.treat(found[0])
    assert patient.red() == []


def test_vhost_that_lets_nobody_in(on_own_rabbitmq: Patient, own_rabbitmq: RabbitMQ) -> None:
    patient = on_own_rabbitmq
    own_rabbitmq.evaluate('ok = rabbit_auth_backend_internal:clear_permissions(<<"guest">>, <<"/">>, <<"test">>)')
    (found,) = patient.red()
    assert (found["name"], "access to vhost" in found["detail"]) == ("rights", True)
    patient.treat(found)
    assert patient.red() == []


def test_redis_that_throws_messages_away(on_sqlite: Patient, own_redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    from redis import Redis as Client

    monkeypatch.setenv("IDEMP_BROKER_URL", own_redis.url)
    monkeypatch.setenv("IDEMP_ALLOW_AT_MOST_ONCE", "true")
    with closing(Client.from_url(own_redis.url)) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendfsync", "everysec")
    (found,) = on_sqlite.red()
    assert (found["name"], "allkeys-lru" in found["detail"]) == ("maxmemory-policy", True)
    on_sqlite.treat(found)
    assert on_sqlite.red() == []
    (weak,) = (check for check in on_sqlite.look().data["checks"] if check["name"] == "appendfsync")
    assert weak["verdict"] == "warning"
    on_sqlite.treat(weak)
    assert "everysec" not in on_sqlite.look().out


def test_window_shorter_than_the_horizon(on_sqlite: Patient, folder: Path) -> None:
    """What it says to write is what mends it."""
    (folder / "idemp.toml").write_text('[messages."shop.Order"]\nretention = "1m"\n')
    (found,) = on_sqlite.red()
    assert found["name"] == "retention"
    setting, _, rest = found["fix"].removeprefix("Write ").partition(" or more under ")
    table = rest.partition(" in idemp.toml")[0]
    (folder / "idemp.toml").write_text(f"{table}\n{setting}\n")
    assert on_sqlite.red() == []
