"""A process that uses a local broker's file, and does one thing: `python -m tests.broker.local_process DOES FILE …`.

Lines on standard output say how far it is; a line on standard input lets it go on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from idemp.broker.local import LocalBroker
from idemp.broker.port import Ack, Topology
from idemp.errors import BrokerUnavailable
from tests.broker.given import output

TOPOLOGY = Topology(exchange="events", queues=("q",))


def say(line: str) -> None:
    print(line, flush=True)


def consume(path: str, log: str) -> None:
    """Write the body of each message into the log, then ack it, until told to stop."""
    going = [True]
    signal.signal(signal.SIGTERM, lambda *_: going.clear())
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    receiver = LocalBroker(path).receiver(["q"], prefetch=7)
    say("ready")
    while going:
        if (delivery := receiver.receive(0.1)) is not None:
            time.sleep(0.001)  # the work of a handler: room for the kill to hit
            os.write(file, delivery.message.body + b"\n")
            receiver.settle(delivery, Ack())
    receiver.close()


def hold(path: str, lease: str) -> None:
    """Take a message, wait, and ack it."""
    receiver = LocalBroker(path, lease=timedelta(seconds=float(lease))).receiver(["q"], prefetch=1)
    delivery = receiver.receive(30)
    assert delivery is not None
    say("holding")
    sys.stdin.readline()
    try:
        receiver.settle(delivery, Ack())
    except BrokerUnavailable as error:
        say(f"refused: {error.message}")
    else:
        say("settled")
    receiver.close()


def fork(path: str) -> None:
    """Take a message, and leave a child behind."""
    receiver = LocalBroker(path, lease=timedelta(seconds=300)).receiver(["q"], prefetch=1)
    assert receiver.receive(30) is not None
    child = os.fork()
    if child:
        say(str(child))
    signal.pause()


def publish(path: str, number: str) -> None:
    """Publish, and die at the confirm."""
    outputs = [output(str(index).encode()) for index in range(int(number))]
    answers = LocalBroker(path).publisher().publish(outputs, 30)
    if answers == [None] * len(outputs):
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(answers)


def open_files() -> None:
    """Open each file that standard input names, and put a message in."""
    say("ready")
    for line in sys.stdin:
        broker = LocalBroker(line.strip())
        broker.declare(TOPOLOGY)
        publisher = broker.publisher()
        answers = publisher.publish([output()], 30)
        publisher.close()
        say(str(answers))


if __name__ == "__main__":
    does: dict[str, Callable[..., None]] = {
        "consume": consume,
        "hold": hold,
        "fork": fork,
        "publish": publish,
        "open": open_files,
    }
    does[sys.argv[1]](*sys.argv[2:])
