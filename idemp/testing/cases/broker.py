"""What the cases of the broker port share: fixtures, and what a broker can say about itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import pytest

from idemp.testing.broker_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.broker.port import Broker


class BrokerSuite:
    """Fixtures, hooks and options. A subclass gives the fixture `broker`, and `reopen` where data outlives the process."""

    patience: ClassVar[float] = 10.0
    quiet: ClassVar[float] = 0.3
    delay: ClassVar[float] = 0.5
    largest_body: ClassVar[int] = 1024 * 1024
    tells_redelivered: ClassVar[bool] = True
    outlives_process: ClassVar[bool] = True

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

    def reopen(self, broker: Broker) -> Broker:
        """Another instance on the queues of `broker`, as another process makes it; both are in use at once."""
        if self.outlives_process:
            pytest.fail(
                f"Nothing shows that {type(broker).__name__} outlives its process, as {type(self).__name__} says. Give the "
                "method reopen(self, broker), which makes another instance on the same queues, or set "
                "outlives_process = False."
            )
        return broker

    @contextmanager
    def another(self, bench: Bench) -> Iterator[Bench]:
        """The same queues through another instance, which declares nothing; what it opens is closed at the end."""
        other = self.make_bench(self.reopen(bench.broker), bench.name)
        try:
            yield other
        finally:
            other.close()
