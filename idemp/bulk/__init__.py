"""Messages by the thousand on the same inbox: backfills, replays, archives, streams. No Spark in it.

```
chunk of rows ── bad rows apart ── BEGIN; claim all ──┬── REPLAY, DUPLICATE, CONFLICT: counted, nothing runs
                                                      └── NEW: handlers, outputs for the relay ── COMMIT ── report
```

What a message is called, and what is kept of it, is what the online consumer would have said: a message that a worker
handled is a DUPLICATE here, and the other way round. Handlers are the app's own, or take all new rows of a chunk at once:
`SqlSet`, `ArrowSet`. Outputs are stored pending, and sent by a relay.

Example:
    >>> from idemp import App, Context, Idempotent
    >>> from idemp.inbox.memory import InMemoryStore
    >>> app = App("stock", store=InMemoryStore(), broker="local://stock.db")
    >>> @app.handler(dict, type="stock.Reserve", policy=Idempotent())
    ... def reserve(message: dict[str, str], ctx: Context) -> None:
    ...     ctx.send({"sku": message["sku"]}, to="orders", type="stock.Reserved")
    >>> row = Row(id="m-1", type="stock.Reserve", body=b'{"sku": "A-1"}', position="old.json#1")
    >>> report = Bulk(app).run([row, row])
    >>> dict(report.counts), report.outputs
    ({<Came.NEW: 'new'>: 1, <Came.REPLAY: 'replay'>: 1}, 1)
"""

from __future__ import annotations

from idemp.bulk.core import Bulk
from idemp.bulk.report import Came, Parked, Report
from idemp.bulk.rows import Row
from idemp.bulk.sets import ArrowSet, SetHandler, SqlSet

__all__ = ["ArrowSet", "Bulk", "Came", "Parked", "Report", "Row", "SetHandler", "SqlSet"]
