"""What every inbox store must do, as a pytest class: subclass it, and give it a store.

```python
class TestMyStore(StoreConformance):
    @pytest.fixture
    def store(self, clock):
        return MyStore("my://localhost", clock=clock)

    def reopen(self, store):
        return MyStore("my://localhost", clock=store.clock)
```
"""

from __future__ import annotations

from idemp.testing.cases.batches import BatchCases
from idemp.testing.cases.claims import ClaimCases
from idemp.testing.cases.effects import EffectCases
from idemp.testing.cases.identities import IdentityCases
from idemp.testing.cases.instances import InstanceCases, InstanceRelayCases, InstanceUpkeepCases
from idemp.testing.cases.optimistic import OptimisticCases
from idemp.testing.cases.records import RecordCases
from idemp.testing.cases.relays import RelayCases
from idemp.testing.cases.retention import RetentionCases
from idemp.testing.cases.waiting import WaitingCases
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
    "EntityStoreConformance",
    "MemoryEffects",
    "NoEffects",
    "SqlEffects",
    "StoreConformance",
    "make_outputs",
]


class CoreStoreConformance(ClaimCases, WaitingCases, BatchCases, RecordCases, InstanceCases):
    """The cases of the protocol's own half of the port, which ask for no `Upkeep`: where a new store begins.

    A subclass gives the fixture `store`: an inbox ready to use, on the clock of the fixture `clock`; and the method
    `reopen(store)`: another instance on the same data and the same clock, opened as another process opens it. It should
    also give the fixture `effects`, an `Effects`, without which nothing is said about effects; and the method
    `failing_commits(store)`: a context manager within which each COMMIT of that store fails. It may set:

    Attributes:
        one_writer: the store lets one unit of work write at a time; who waits too long gets a `TransientStoreError`.
        asks_again: losing a race may be a `TransientStoreError` first (REPEATABLE READ, SERIALIZABLE).
        outlives_process: what it keeps does, as another instance shows; where not, `reopen` is not needed, windows need
            not stand still with their consumer, and no deploy can change what identifies a message.
        patience: seconds that something which must happen may take.
        quiet: seconds in which something that must not happen would have happened.
        shortest_wait: seconds that a claim can be told to wait for somebody else, and waits about as long.
        largest_output: bytes; a store that takes less than 1 MiB says how much.

    Example:
        >>> [case for case in dir(CoreStoreConformance) if "consumers" in case]
        ['test_one_id_two_consumers']
    """


class StoreConformance(
    CoreStoreConformance,
    RelayCases,
    EffectCases,
    RetentionCases,
    IdentityCases,
    InstanceRelayCases,
    InstanceUpkeepCases,
):
    """All cases: those of `CoreStoreConformance`, and those of `Upkeep`, which relay, cleaner and workers ask for.

    Fixtures and attributes are those of `CoreStoreConformance`.

    Example:
        >>> [case for case in dir(StoreConformance) if "lease" in case]
        ['test_effects_are_leased_and_settled', 'test_lease_keeps_others_away_until_it_ends']
    """


class EntityStoreConformance(ClaimCases, OptimisticCases, RecordCases, InstanceCases, IdentityCases):
    """The cases for a store that keeps a claim with its entity (`per_entity`): no locks, no batches, no relays.

    Fixtures and attributes are those of `CoreStoreConformance`; the claims of these cases have an `entity`. Where the store
    deletes claims, add the cases of `idemp.testing.cases.retention` and `InstanceUpkeepCases`. It may set:

    Attributes:
        purges_bare: the cleaner takes claims without outputs, too.

    Example:
        >>> EntityStoreConformance.waits, [case for case in dir(EntityStoreConformance) if "relay" in case]
        (False, [])
    """

    asks_again = True
