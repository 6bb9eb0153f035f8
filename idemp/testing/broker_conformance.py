"""What every broker adapter must do, as a pytest class: subclass it, and give it a broker.

```python
class TestMyBroker(BrokerConformance):
    @pytest.fixture
    def broker(self):
        return MyBroker("my://localhost")

    def reopen(self, broker):
        return MyBroker("my://localhost")
```
"""

from __future__ import annotations

from idemp.testing.broker_bench import Bench
from idemp.testing.cases.looking import SharingCases
from idemp.testing.cases.ordering import OrderingCases
from idemp.testing.cases.publishing import PublishingCases
from idemp.testing.cases.reopening import ReopeningCases
from idemp.testing.cases.settling import SettlingCases

__all__ = ["Bench", "BrokerConformance"]


class BrokerConformance(PublishingCases, SettlingCases, SharingCases, OrderingCases, ReopeningCases):
    """The cases. A subclass gives the fixture `broker`: a broker that nobody else uses.

    It gives the method `reopen(broker)`, too: another instance on the same queues, as another process makes it. It may
    also give the fixture `name` (a prefix for queues and exchanges that nobody else uses), and set:

    Attributes:
        patience: seconds that something which must happen may take.
        quiet: seconds in which something that must not happen would have happened.
        delay: seconds, for `Retry` and for outputs that wait.
        largest_body: bytes; a transport that takes less than 1 MiB says how much.
        tells_redelivered: whether the transport knows that it delivered a message before.
        outlives_process: what it keeps does, as another instance shows; where not, `reopen` is not needed.

    Example:
        >>> [case for case in dir(BrokerConformance) if "park" in case]
        ['test_park_goes_to_the_dead_letter_queue_intact', 'test_what_was_parked_leaves_no_gap']
    """
