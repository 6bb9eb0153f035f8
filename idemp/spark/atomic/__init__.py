"""The atomic sink: a micro-batch as one transaction, `writeStream.format("idemp")`.

```
messages ── tasks: pieces, staged under a token for each attempt ── its messages' number and its token ──► driver
driver's commit: BEGIN ── all there? ── chunk by chunk through `idemp.bulk`, each a savepoint ── COMMIT
```

What is staged counts for nothing until the driver's one transaction takes it. The inbox alone decides what is new, as
everywhere: a micro-batch that is delivered again finds its own claims.
"""

from __future__ import annotations
