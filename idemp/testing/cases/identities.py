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

    def test_changed_type_of_a_field_is_refused(self, bench: Bench) -> None:
        """Whether its text is read as a number or not; an earlier release did not say how."""
        whole, text = (Identity(MESSAGE_TYPE, f"field:number; read as {kind}") for kind in ("int", "str"))
        for _ in range(2):
            bench.agree(NUMBER, WINDOW)
            bench.agree(whole, WINDOW)
        if self.outlives_process:
            with pytest.raises(IdentityChanged, match="read as int"):
                bench.agree(text, WINDOW)
        bench.agree(text, WINDOW, former=whole)

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

    def test_renamed_consumer_is_refused_by_each_of_its_queues(self, bench: Bench) -> None:
        """Not by the one that started last alone: messages of all of them were claimed under the former name."""
        former, renamed = bench.consumer, f"{bench.consumer}-renamed"
        queues = [f"{former}.{number}" for number in range(3)]
        for queue in queues:
            bench.agree(NUMBER, WINDOW, queue=queue)
        for queue in queues if self.outlives_process else ():
            with pytest.raises(IdentityChanged, match=former):
                bench.agree(NUMBER, WINDOW, consumer=renamed, queue=queue)
        cover = Identity(MESSAGE_TYPE, "field:number", consumer=former)
        for queue in queues:
            bench.agree(NUMBER, WINDOW, consumer=renamed, queue=queue, former=cover)

    def test_queue_that_a_consumer_left_is_free_after_a_window(self, bench: Bench) -> None:
        """Its claims of that queue's messages count no longer. What a worker of it still consumes it has not left."""
        former, renamed = bench.consumer, f"{bench.consumer}-renamed"
        left, kept, latest = (f"{former}.{name}" for name in ("left", "kept", "latest"))
        with self.another(bench) as other:
            bench.agree(NUMBER, WINDOW, queue=left)
            other.agree(NUMBER, WINDOW, queue=kept)
            other.agree(NUMBER, WINDOW, queue=latest)
            other.consume(WINDOW - timedelta(minutes=1))
            if self.outlives_process:
                with pytest.raises(IdentityChanged, match=former):
                    other.agree(NUMBER, WINDOW, consumer=renamed, queue=left)
            other.consume(timedelta(minutes=2))
            for queue in (kept, latest) if self.outlives_process else ():
                with pytest.raises(IdentityChanged, match=former):
                    other.agree(NUMBER, WINDOW, consumer=renamed, queue=queue)
            if self.outlives_process:
                other.agree(NUMBER, WINDOW, consumer=renamed, queue=left)
