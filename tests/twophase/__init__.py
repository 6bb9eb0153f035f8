"""Payments that are booked in two databases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, func, make_url, select

from idemp import App, Context
from idemp.sql.engine import spelt
from idemp.twophase import TwoPhase
from tests.world import Order, World, insert_and_send

metadata = MetaData()
# No unique constraint: it would hide a second effect.
booked = Table("booked", metadata, Column("row", Integer, primary_key=True), Column("what", String(50)))


def engine_of(url: str) -> Engine:
    made, options = spelt(make_url(url))
    return create_engine(made, **options)


@dataclass
class Books(World):
    """A world with a second database."""

    ledger_url: str = ""
    ledgers: list[TwoPhase] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ledger = engine_of(self.ledger_url)
        metadata.create_all(self.ledger)
        inner = self.handle

        def handle(message: Order, ctx: Context) -> Any:
            self.book(message, ctx)
            return inner(message, ctx)

        self.handle = handle if inner is insert_and_send else inner

    def book(self, message: Order, ctx: Context) -> None:
        self.session(ctx).execute(booked.insert(), {"what": message.order_id})

    def session(self, ctx: Context) -> Any:
        return self.ledgers[-1].session(ctx)

    def app(self) -> App:
        app = super().app()
        self.ledgers.append(TwoPhase(app, "ledger", engine_of(self.ledger_url)))
        return app

    def booked(self) -> dict[str, int]:
        with self.ledger.connect() as connection:
            return dict(connection.execute(select(booked.c.what, func.count()).group_by(booked.c.what)).all())

    def in_doubt(self) -> list[Any]:
        return self.ledgers[-1]._prepared()

    def close(self) -> None:
        super().close()
        for each in self.ledgers:
            each.second.close()
        self.ledger.dispose()
