"""Handlings that write to several databases: two-phase commit, with the inbox row as the decision.

```
see what is prepared already
BEGIN inbox; claim ─► what was prepared for this key is rolled back, when its database is first used
handler writes to the inbox's database, and to others by ctx.database(name)
store outputs; note the decision (this attempt's token)
PREPARE each other database
COMMIT inbox ◄── the decision
COMMIT PREPARED each other database ─► forget the decision ─► dispatch ─► ack
```

Whatever breaks off, `Recovery` ends what is prepared: it *inserts* the inbox key, which waits for work in flight. Inserted:
nobody committed it, roll back. A conflict: somebody did, and the noted token says which attempt; all others are rolled back.
"""

from __future__ import annotations

from idemp.twophase.branches import Branches
from idemp.twophase.coordinator import Coordinator
from idemp.twophase.port import (
    Branch,
    BranchId,
    Database,
    Databases,
    Decision,
    Decisions,
    Ended,
    InDoubt,
    Prepared,
    Transaction,
)
from idemp.twophase.recovery import Recovered, Recovery, Round, State

__all__ = [
    "Branch",
    "BranchId",
    "Branches",
    "Coordinator",
    "Database",
    "Databases",
    "Decision",
    "Decisions",
    "Ended",
    "InDoubt",
    "Prepared",
    "Recovered",
    "Recovery",
    "Round",
    "State",
    "Transaction",
]
