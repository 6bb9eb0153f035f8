"""`idemp pipeline`: the same inbox, from Spark. A file for each verb, with a function `add_to` that registers it.

Only these files and `idemp.spark` know Spark, and they import it when they run: `--help` needs neither Spark nor Java.
"""

from __future__ import annotations

from idemp.cli.command import group
from idemp.cli.pipeline import archive, backfill, reconcile, restore, spool

__all__ = ["commands"]

commands = group("pipeline", "Backfill, archive and audit with Spark, on the inbox of the consumers.")

for _verb in (archive, backfill, reconcile, restore, spool):
    _verb.add_to(commands)
