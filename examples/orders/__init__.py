"""Order, stock reservation, confirmation: two consumers on one database. Begin reading in `handlers.py`."""

from .handlers import app, stock
from .models import create_tables, drop_tables

__all__ = ["app", "create_tables", "drop_tables", "stock"]
