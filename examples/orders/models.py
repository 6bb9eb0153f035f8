"""The shop's own tables: ordinary SQLAlchemy models, which know nothing of idemp.

No key protects them: whatever ran twice would leave two orders, two reservations, two confirmations and a stock that is
too small. Your tables need no such help either; here it is left out on purpose, so that a double would be seen.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

if TYPE_CHECKING:
    from sqlalchemy import Engine

PREFIX = os.environ.get("ORDERS_PREFIX", "")
"""Stands before the names of tables and queues, so that several copies of this example can share servers."""

IN_STOCK = 1_000_000


class Base(DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    """An order; `confirmations` counts how often it was confirmed."""

    __tablename__ = f"{PREFIX}orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(index=True)
    sku: Mapped[str] = mapped_column(String(40))
    quantity: Mapped[int]
    confirmations: Mapped[int] = mapped_column(default=0)

    @property
    def status(self) -> str:
        """The state of the order, for people."""
        return "confirmed" if self.confirmations else "placed"


class Stock(Base):
    """How many pieces of an article are left."""

    __tablename__ = f"{PREFIX}stock"

    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    quantity: Mapped[int]


class Reservation(Base):
    """Pieces that were taken from the stock for an order."""

    __tablename__ = f"{PREFIX}reservations"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(index=True)
    sku: Mapped[str] = mapped_column(String(40))
    quantity: Mapped[int]


def create_tables(engine: Engine, articles: int = 10) -> None:
    """Make the shop's tables, with so many articles (`sku-0`, `sku-1`, ...) in stock; those that exist stay."""
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        for number in range(articles):
            if session.get(Stock, f"sku-{number}") is None:
                session.add(Stock(sku=f"sku-{number}", quantity=IN_STOCK))


def drop_tables(engine: Engine) -> None:
    """Drop them, with all that they hold."""
    Base.metadata.drop_all(engine)
