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


def test_what_leaves_in_one_piece(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for many frames; larger ones in pieces; and a piece that failed half-way is never sent again."""
    link = Link.open(rabbitmq_url, connect_timeout=5, heartbeat=30)
    written: list[bytes] = []
    failing = [False]

    def write(data: bytes) -> None:
        written.append(bytes(data))
        if failing[0]:
            raise TimeoutError("timed out")

    monkeypatch.setattr(link._transport, "_write", write)
    with link.in_one_piece():
        for _ in range(5):
            link.send_heartbeat()
    assert len(written) == 1
    written.clear()
    with link.in_one_piece():
        for letter in b"abc":
            link._transport.write(bytes([letter]) * 40_000)
    assert [len(piece) for piece in written] == [80_000, 40_000]
    written.clear()
    failing[0] = True
    with pytest.raises(TimeoutError), link.in_one_piece():
        for letter in b"abc":
            link._transport.write(bytes([letter]) * 40_000)
    assert written == [b"a" * 40_000 + b"b" * 40_000]
    failing[0] = False
    written.clear()
    link.send_heartbeat()
    assert len(written) == 1
    link.discard()
