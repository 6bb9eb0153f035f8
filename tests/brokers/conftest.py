"""Fixtures: a virtual host for each test, and a node of one's own for tests that disturb it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.rabbitmq import Rabbitmq


@pytest.fixture(scope="module")
def own_node() -> Iterator[Rabbitmq]:
    with tempfile.TemporaryDirectory(prefix="idemp-rabbitmq-") as folder, Rabbitmq(Path(folder) / "node") as node:
        yield node
