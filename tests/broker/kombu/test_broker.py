"""Declaring, looking into queues, and what is refused at start."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest

from idemp.broker.guarantees import GUARANTEES, guarantees_of, markdown
from idemp.broker.kombu import ConfirmingPublisher, KombuBroker
from idemp.broker.kombu.topology import dead_queue, delay_queue, main_queue
from idemp.broker.port import Ack, Binding, Topology
from idemp.errors import BrokerUnavailable, ConfigurationError, GuaranteeError
from tests.broker.kombu.tools import SOON, an_output, raw_link, received
from tests.servers.process import wait_until

TOPOLOGY = Topology(
    exchange="shop", queues=("work", "other"), bindings=(Binding("work", "orders.#"),), delays=(0.5, 10.0)
)


def test_declaring_twice_is_harmless(rabbitmq_url: str) -> None:
    """The second time nothing changes, and messages stay."""
    broker = KombuBroker(rabbitmq_url)
    broker.declare(TOPOLOGY)
    with broker.publisher() as publisher:
        assert publisher.publish([an_output("orders.eu.Placed", exchange="shop")], SOON) == [None]
    broker.declare(TOPOLOGY)
    assert broker.depth("work") == 1
    for queue in ("work", "other"):
        for name in (f"{queue}.dead", f"{queue}.delay.500ms", f"{queue}.delay.10000ms"):
            assert broker.depth(name) == 0


@pytest.mark.parametrize(
    "hop", [main_queue("work"), dead_queue("work"), delay_queue("work", 500)], ids=lambda h: h.name
)
def test_queue_with_other_arguments(rabbitmq_url: str, hop) -> None:
    """Says what differs and what to do, for each kind of queue."""
    with raw_link(rabbitmq_url) as link:
        link.channel.queue_declare(hop.name, durable=True, auto_delete=False, arguments={"x-queue-type": "classic"})
    with pytest.raises(ConfigurationError, match=rf"queue '{hop.name}' exists with other arguments.*x-") as caught:
        KombuBroker(rabbitmq_url).declare(TOPOLOGY)
    assert "delete it" in str(caught.value)


def test_exchange_of_another_type(rabbitmq_url: str) -> None:
    """The same for exchanges."""
    with raw_link(rabbitmq_url) as link:
        link.channel.exchange_declare("shop", "direct", durable=True, auto_delete=False)
    with pytest.raises(ConfigurationError, match=r"exchange 'shop' exists with other arguments.*type"):
        KombuBroker(rabbitmq_url).declare(TOPOLOGY)


def test_no_broker_there() -> None:
    """Not reachable is no configuration error: it may come up."""
    with pytest.raises(BrokerUnavailable, match="refused"):
        KombuBroker("pyamqp://127.0.0.1:9").declare(TOPOLOGY)


def test_missing_vhost_and_wrong_password(rabbitmq_url: str) -> None:
    """Errors that waiting does not mend."""
    for url in (f"{rabbitmq_url}-missing", rabbitmq_url.replace(":guest@", ":wrong@")):
        with pytest.raises(ConfigurationError):
            KombuBroker(url).declare(TOPOLOGY)


def test_missing_queue(broker: KombuBroker) -> None:
    """Looking at what does not exist."""
    for look in (broker.depth, lambda name: broker.browse(name, 1), lambda name: broker.take(name, None, 1)):
        with pytest.raises(ConfigurationError, match="no queue 'nowhere'"):
            look("nowhere")


def test_browse_takes_nothing(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Up to the limit, in order, and all are there afterwards."""
    publisher.publish([an_output("work", number=number) for number in range(5)], SOON)
    assert [message.body for message in broker.browse("work", 2)] == [b'{"number": 0}', b'{"number": 1}']
    assert broker.depth("work") == 5


def test_expired_message_is_not_lost(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """A message whose time to live has passed is found in the dead-letter queue, with the broker's reason."""
    publisher.publish([an_output("work", ttl=0.01, headers={"a": 1})], SOON)
    wait_until(lambda: broker.depth("work.dead") == 1, "it is dead")
    (dead,) = broker.browse("work.dead", 5)
    assert dead.headers == {"a": 1, "idemp-dead-reason": "broker: expired"}


def test_take_by_id(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Only the wanted ones; what is accepted is gone, the rest is back."""
    outputs = [an_output("work", number=number) for number in range(5)]
    publisher.publish(outputs, SOON)
    with broker.take("work", [str(outputs[3].id), str(outputs[1].id)], 10) as taken:
        assert [message.message_id for message in taken.messages] == [str(outputs[1].id), str(outputs[3].id)]
        taken.accept(1)
    left = {message.message_id for message in broker.browse("work", 10)}
    assert left == {str(output.id) for output in outputs} - {str(outputs[3].id)}


def test_depth_does_not_count_what_consumers_hold(broker: KombuBroker, publisher: ConfirmingPublisher) -> None:
    """Ready ones only."""
    publisher.publish([an_output("work"), an_output("work")], SOON)
    with closing(broker.receiver(["work"], prefetch=1)) as receiver:
        delivery = received(receiver)
        assert broker.depth("work") == 1
        receiver.settle(delivery, Ack())


@pytest.mark.parametrize("url", ["memory://", "redis://cache"])
def test_transports_that_may_lose_messages(url: str) -> None:
    """Refused with the reason."""
    with pytest.raises(GuaranteeError, match="ALLOW_AT_MOST_ONCE"):
        KombuBroker(url)


def test_unknown_transports_are_no_offer_to_lose_messages() -> None:
    """A slip of the pen is told from a transport that loses."""
    with pytest.raises(ConfigurationError, match="pyamqp") as caught:
        KombuBroker("pyampq://guest:secret@h")
    assert "ALLOW_AT_MOST_ONCE" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_librabbitmq_is_refused() -> None:
    """`amqp://` may take it, and one host of several is enough."""
    for url in ("amqp://guest:secret@h", "pyamqp://h;amqp://guest:secret@h"):
        with pytest.raises(ConfigurationError, match="pyamqp://") as caught:
            KombuBroker(url)
        assert "secret" not in str(caught.value)


def test_the_table_of_guarantees() -> None:
    """Every row is in the README's table; safe transports know how late they redeliver."""
    table = markdown()
    for name, row in GUARANTEES.items():
        assert f"| `{name}` |" in table
        assert row.horizon_seconds > 0
        assert row.remarks
    assert guarantees_of("amqps://h").name == "pyamqp"
    assert not guarantees_of("pyamqp://h;redis://h").at_least_once


def test_importing_idemp_leaves_kombu_alone() -> None:
    """Neither the package nor the table of guarantees imports it."""
    code = "import sys, idemp, idemp.broker.guarantees; sys.exit('kombu' in sys.modules or 'amqp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
