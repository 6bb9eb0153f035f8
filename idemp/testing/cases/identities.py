"""Cases of the store port: what identifies a message may not change in silence."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import pytest

from idemp.errors import IdentityChanged
from idemp.inbox.port import Identity
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import MESSAGE_TYPE, Bench

WINDOW: Final = timedelta(minutes=5)
NUMBER: Final = Identity(MESSAGE_TYPE, "field:number")
NAME: Final = Identity(MESSAGE_TYPE, "field:name")


class IdentityCases(StoreSuite):
    """A deploy that changes the key, while claims by the former one still count."""

    def test_changed_identity_is_refused(self, bench: Bench) -> None:
        """And nothing of it is stored. A store that ends with its process has nothing to compare with."""
        bench.agree(NUMBER, WINDOW)
        bench.agree(NUMBER, WINDOW)
        for _ in range(2 if self.outlives_process else 0):
            with pytest.raises(IdentityChanged, match="field:number"):
                bench.agree(NAME, WINDOW)
        bench.agree(NUMBER, WINDOW)

    def test_changed_identity_is_covered_for_a_window(self, bench: Bench) -> None:
        """As long as the consumer's claims by the former one count it has to be named; then it is forgotten."""
        bench.consume(timedelta(0))
        bench.agree(NUMBER, WINDOW)
        bench.agree(NAME, WINDOW, former=NUMBER)
        bench.consume(WINDOW - timedelta(minutes=1))
        bench.agree(NAME, WINDOW, former=NUMBER)
        if self.outlives_process:
            with pytest.raises(IdentityChanged, match="field:number"):
                bench.agree(NAME, WINDOW)
        bench.consume(timedelta(minutes=2))
        bench.agree(NAME, WINDOW)

    def test_renamed_consumer_of_a_queue_is_refused(self, bench: Bench) -> None:
        """The queue's messages were claimed under the former name; another queue's were not."""
        former, renamed = bench.consumer, f"{bench.consumer}-renamed"
        bench.agree(NUMBER, WINDOW)
        bench.agree(NUMBER, WINDOW, consumer=f"{former}-other", queue=f"{former}-other.queue")
        if self.outlives_process:
            with pytest.raises(IdentityChanged, match=former):
                bench.agree(NUMBER, WINDOW, consumer=renamed)
        bench.agree(NUMBER, WINDOW, consumer=renamed, former=Identity(MESSAGE_TYPE, "field:number", consumer=former))
