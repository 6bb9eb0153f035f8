"""The app of the storm."""

from __future__ import annotations

from tests.streams import bank

app, streams = bank()
