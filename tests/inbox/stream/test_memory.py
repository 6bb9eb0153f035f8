"""Streams in memory keep the port's promises."""

from __future__ import annotations

import pytest

from idemp.inbox.stream import InMemoryStreams
from idemp.testing.stream_conformance import StreamConformance


class TestInMemoryStreams(StreamConformance):
    @pytest.fixture
    def streams(self) -> InMemoryStreams:
        return InMemoryStreams()
