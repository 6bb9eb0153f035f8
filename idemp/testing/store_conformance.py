"""What every inbox store must do, as a pytest class: subclass it, and give it a store.

```python
class TestMyStore(StoreConformance):
    @pytest.fixture
    def store(self, clock):
        return MyStore("my://localhost", clock=clock)
```
"""

from __future__ import annotations

from idemp.testing.cases.claims import ClaimCases
from idemp.testing.cases.identities import IdentityCases
from idemp.testing.cases.records import RecordCases
from idemp.testing.cases.relays import RelayCases
from idemp.testing.cases.retention import RetentionCases
from idemp.testing.store_bench import (
    Background,
    Bench,
    Effects,
    MemoryEffects,
    NoEffects,
    SqlEffects,
    make_outputs,
)

__all__ = [
    "Background",
    "Bench",
    "CoreStoreConformance",
    "Effects",
    "MemoryEffects",
    "NoEffects",
    "SqlEffects",
    "StoreConformance",
    "make_outputs",
]


class CoreStoreConformance(ClaimCases, RecordCases):
    """The cases of the protocol's own half of the port, which ask for no `Upkeep`: where a new store begins.

    A subclass gives the fixture `store`: an inbox ready to use, on the clock of the fixture `clock`. It should also give
    the fixture `effects`, an `Effects`; without it nothing is said about effects. It may set:

    Attributes:
        one_writer: the store lets one unit of work write at a time; who waits too long gets a `TransientStoreError`.
        asks_again: losing a race may be a `TransientStoreError` first (REPEATABLE READ, SERIALIZABLE).
        outlives_process: what it keeps does; where not, windows need not stand still with their consumer, and no deploy
            can change what identifies a message.
        patience: seconds that something which must happen may take.
        quiet: seconds in which something that must not happen would have happened.

    Example:
        >>> [case for case in dir(CoreStoreConformance) if "consumers" in case]
        ['test_one_id_two_consumers']
    """


class StoreConformance(CoreStoreConformance, RelayCases, RetentionCases, IdentityCases):
    """All cases: those of `CoreStoreConformance`, and those of `Upkeep`, which relay, cleaner and workers ask for.

    Fixtures and attributes are those of `CoreStoreConformance`.

    Example:
        >>> [case for case in dir(StoreConformance) if "lease" in case]
        ['test_lease_keeps_others_away_until_it_ends']
    """
