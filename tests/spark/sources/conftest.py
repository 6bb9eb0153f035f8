"""Each source in turn, as what the conformance suite needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.spark.sources.grounds import Ground, KafkaGround, SpoolGround, StreamGround

KINDS: dict[str, Callable[[pytest.FixtureRequest], Ground]] = {
    "stream": lambda request: StreamGround(request.getfixturevalue("rabbitmq_url")),
    "spool": lambda request: SpoolGround(request.getfixturevalue("postgresql_url")),
    "kafka": lambda request: KafkaGround(request.getfixturevalue("unique_name")),
}


@pytest.fixture(params=KINDS)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    """A source of one kind, empty."""
    made = KINDS[request.param](request)
    yield made
    made.close()
