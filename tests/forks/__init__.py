"""Names that both sides of the tests of forks know."""

from __future__ import annotations

from sqlalchemy import Column, Integer, MetaData, Table

QUEUE, SINK = "forks", "forks.sink"
OWN = range(1_000_000, 1_000_050)
"""What a parent handles while its children do the rest."""
metadata = MetaData()
# No unique constraint: it would hide a second effect.
effect = Table("effect", metadata, *(Column(name, Integer, primary_key=name == "id") for name in ("id", "number", "pid")))
