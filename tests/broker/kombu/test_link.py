"""Connections that are thrown away."""

from __future__ import annotations

import gc
import weakref

import pytest
from amqp.exceptions import NotFound

from idemp.broker.kombu.link import LINK_ERRORS, Link
from idemp.broker.kombu.wire import parcel


def test_a_discarded_connection_keeps_no_buffer_until_garbage_is_collected(rabbitmq_url: str) -> None:
    """A broker that is away has many of them made: each would hold 128 KiB for minutes."""
    link = Link.open(rabbitmq_url, connect_timeout=5, heartbeat=30)
    writer = weakref.ref(link.connection.frame_writer)
    gc.disable()
    try:
        assert writer() is not None
        link.discard()
        assert writer() is None
    finally:
        gc.enable()
    with pytest.raises(LINK_ERRORS):
        link.send_heartbeat()
    assert not link.alive


def test_what_leaves_together(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for many frames; larger ones in pieces; and after a piece that failed half-way nothing is sent."""
    link = Link.open(rabbitmq_url, connect_timeout=5, heartbeat=30)
    written: list[bytes] = []
    failing = [False]

    def write(data: bytes) -> None:
        written.append(bytes(data))
        if failing[0]:
            raise TimeoutError("timed out")

    monkeypatch.setattr(link._transport, "_write", write)
    small, large = parcel("", "q", b"{}", {}, mandatory=True), parcel("", "q", b"x" * 40_000, {}, mandatory=True)
    link.publish([small] * 5)
    assert len(written) == 1
    written.clear()
    link.ack([3, 5], up_to=1)
    assert len(written) == 1
    assert written[0].count(b"\xce") == 3
    written.clear()
    link.publish([large] * 3)
    assert [len(piece) // 1000 for piece in written] == [80, 40]
    written.clear()
    failing[0] = True
    with pytest.raises(TimeoutError):
        link.publish([large] * 3)
    assert len(written) == 1
    assert not link.alive
    with pytest.raises(LINK_ERRORS):
        link.publish([small])
    assert len(written) == 1


def test_nothing_is_sent_over_a_channel_that_the_broker_closed(rabbitmq_url: str) -> None:
    """py-amqp says so for its own methods; what is written past it must not vanish."""
    link = Link.open(rabbitmq_url, connect_timeout=5, heartbeat=30)
    link.publish([parcel("no such exchange", "q", b"{}", {}, mandatory=True)])
    with pytest.raises(NotFound):
        while link.wait_readable(5):
            link.read()
    with pytest.raises(LINK_ERRORS):
        link.publish([parcel("", "q", b"{}", {}, mandatory=True)])
    link.discard()
