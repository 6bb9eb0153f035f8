"""Connections that are thrown away."""

from __future__ import annotations

import gc
import weakref

import pytest

from idemp.broker.kombu.link import LINK_ERRORS, Link


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
