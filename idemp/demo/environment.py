"""How a storm and its worker processes speak: by environment variables."""

from __future__ import annotations

from typing import Final

NOTES: Final = "ORDERS_NOTES"
"""The folder where each worker process notes, in a file of its own, which handlers it began."""
PREFIX: Final = "ORDERS_PREFIX"
"""Stands before the names of the example's tables and queues."""
DATABASE: Final = "IDEMP_DATABASE_URL"
