"""Ten handlers with the classic faults, and what the kit has to say about each.

Ordinary modules hold handlers: those of sets are run in other processes, which have to find them by name.
"""

from __future__ import annotations

import smtplib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from sqlalchemy import String, create_engine, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemp import App, Context, Idempotent

TYPE = "classic.Place"
SAMPLE = {"id": 7, "sku": "A-1", "customer": "me@example.org", "tags": ["red", "green", "blue", "amber"]}


class Base(DeclarativeBase):
    """The handlers' tables."""


class Order(Base):
    """An order; nothing says that there is one of each number."""

    __tablename__ = "classic_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    sku: Mapped[str] = mapped_column(String(40))


_elsewhere = create_engine(f"sqlite:///{Path(tempfile.mkdtemp(prefix='idemp-classic-'), 'ledger.db')}")
with _elsewhere.begin() as _made:
    _made.execute(text("CREATE TABLE ledger (number INTEGER)"))
_handled = 0


def tells_the_time(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.add(Order(number=message["id"], sku=message["sku"]))
    ctx.send({"id": message["id"], "placed_on": datetime.now().date().isoformat()}, to="mail", type="classic.Placed")


def keeps_a_ledger_of_its_own(message: dict[str, Any], ctx: Context) -> None:
    with _elsewhere.begin() as connection:
        connection.execute(text("INSERT INTO ledger VALUES (:number)"), {"number": message["id"]})
    ctx.send({"id": message["id"]}, to="mail", type="classic.Placed")


def sends_an_email(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.add(Order(number=message["id"], sku=message["sku"]))
    mail = EmailMessage()
    mail["To"] = message["customer"]
    with smtplib.SMTP("127.0.0.1", 1, timeout=1) as server:
        server.send_message(mail)


def numbers_its_orders(message: dict[str, Any], ctx: Context) -> None:
    global _handled
    _handled += 1
    ctx.session.add(Order(number=message["id"], sku=f"{message['sku']}-{_handled}"))


def looks_before_it_inserts(message: dict[str, Any], ctx: Context) -> None:
    if ctx.session.scalars(select(Order).where(Order.number == message["id"])).first() is None:
        ctx.session.add(Order(number=message["id"], sku=message["sku"]))


def goes_through_a_set(message: dict[str, Any], ctx: Context) -> None:
    for tag in set(message["tags"]):
        ctx.send({"id": message["id"], "tag": tag}, to="tags", type="classic.Tagged")


def changes_its_message(message: dict[str, Any], ctx: Context) -> None:
    message["tags"].sort()
    ctx.session.add(Order(number=message["id"], sku=message["tags"][0]))


def commits_each_statement(message: dict[str, Any], ctx: Context) -> None:
    with ctx.connection.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(insert(Order).values(number=message["id"], sku=message["sku"]))


def swallows_errors(message: dict[str, Any], ctx: Context) -> None:
    try:
        ctx.connection.execute(insert(Order).values(number=message["id"], sku=message["sku"]))
    except SQLAlchemyError:
        ctx.send({"id": message["id"]}, to="mail", type="classic.Failed")


def trusts_in_redelivered(message: dict[str, Any], ctx: Context) -> None:
    if ctx.attempt == 1:
        ctx.session.add(Order(number=message["id"], sku=message["sku"]))
    ctx.send({"id": message["id"]}, to="mail", type="classic.Placed")


@dataclass(frozen=True)
class Classic:
    """A handler, the kind of finding that it has to get, and words that have to stand in it."""

    app: App
    handler: Callable[..., Any]
    kind: str
    words: str


def _made_of(handler: Callable[..., Any], kind: str, words: str) -> Classic:
    app = App("classic")
    app.handler(dict, type=TYPE, policy=Idempotent())(handler)
    return Classic(app, handler, kind, words)


def rolls_back_what_it_added(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.add(Order(number=message["id"], sku=message["sku"]))
    ctx.session.rollback()


CASES = [
    _made_of(tells_the_time, "clock", "another time in $.placed_on"),
    _made_of(keeps_a_ledger_of_its_own, "second connection", "INSERT INTO ledger"),
    _made_of(sends_an_email, "network", "smtplib.connect 127.0.0.1"),
    _made_of(numbers_its_orders, "memory", "_handled"),
    _made_of(looks_before_it_inserts, "check then insert", "INSERT INTO classic_order"),
    _made_of(goes_through_a_set, "set order", "outputs changed places"),
    _made_of(changes_its_message, "mutation", "changed its message"),
    _made_of(commits_each_statement, "second connection", "in autocommit mode"),
    _made_of(swallows_errors, "swallowed error", "did not come out"),
    _made_of(rolls_back_what_it_added, "transaction ended", "COMMIT, ROLLBACK or autocommit"),
    _made_of(trusts_in_redelivered, "redelivered", "0 writes instead of 1"),
]
