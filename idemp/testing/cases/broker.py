"""What the cases of the broker port share: fixtures, and what a broker can say about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import pytest

from idemp.testing.broker_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.broker.port import Broker


class BrokerSuite:
    """Fixtures and options. A subclass gives the fixture `broker`."""

    patience: ClassVar[float] = 10.0
    quiet: ClassVar[float] = 0.3
    delay: ClassVar[float] = 0.5
    largest_body: ClassVar[int] = 1024 * 1024
    tells_redelivered: ClassVar[bool] = True

    @pytest.fixture
    def name(self) -> str:
        """A prefix that nobody else uses."""
        return f"conformance-{uuid4().hex[:12]}"

    @pytest.fixture
    def bench(self, broker: Broker, name: str) -> Iterator[Bench]:
        """The broker, with queues declared."""
        with self.make_bench(broker, name) as bench:
            yield bench

    def make_bench(self, broker: Broker, name: str) -> Bench:
        """The same without fixtures; queues are declared, and closed, by its `with` block."""
        return Bench(broker, name, patience=self.patience, quiet=self.quiet, delay=self.delay)
