"""Ten handlers as one meets them, each with a fault of its own that redeliveries, crashes or duplicates bring to light.

The handlers don't tell; `fault` in the table at the end does.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import random
import secrets
import sqlite3
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel
from sqlalchemy import (
    Connection,
    Engine,
    ForeignKey,
    NullPool,
    String,
    Text,
    create_engine,
    event,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from idemp import App, Context, Idempotent, Key, Refuse
from tests.testing.correct import Case

log = logging.getLogger("shop")


class Base(DeclarativeBase):
    """The tables of all handlers here."""


@cache
def directory() -> Path:
    """Where the handlers keep their files."""
    return Path(tempfile.mkdtemp(prefix="handlers-"))


# Sensors --------------------------------------------------------------------------------------------------------------

sensors = App("sensors")

ROWS_PER_INSERT = 2


class Reading(Base):
    __tablename__ = "odd_readings"

    id: Mapped[int] = mapped_column(primary_key=True)
    reading: Mapped[int]
    sensor: Mapped[str] = mapped_column(String(40))
    celsius: Mapped[float]


class ReadingTaken(BaseModel):
    __message_type__: ClassVar[str] = "sensors.ReadingTaken"
    reading: int
    sensor: str
    celsius: float


class BulkWriter:
    """One INSERT for several rows: the sensors send thousands of readings a minute."""

    def __init__(self, rows_per_insert: int) -> None:
        self._rows_per_insert = rows_per_insert
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, connection: Connection, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)
            if len(self._rows) >= self._rows_per_insert:
                connection.execute(insert(Reading), self._rows)
                self._rows = []


readings = BulkWriter(ROWS_PER_INSERT)


@sensors.handler(ReadingTaken, policy=Idempotent(key="reading", retention="2d"))
def store_reading(measured: ReadingTaken, ctx: Context) -> None:
    readings.add(ctx.connection, measured.model_dump())


def sensors_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Reading.reading, Reading.sensor, Reading.celsius))))


# Credit ---------------------------------------------------------------------------------------------------------------

credit = App("credit")

CREDIT_LIMIT = 100_000


class CreditOrder(Base):
    __tablename__ = "odd_credit_orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(String(40))
    cents: Mapped[int]
    left_over: Mapped[int]


class BuyOnCredit(BaseModel):
    __message_type__: ClassVar[str] = "credit.BuyOnCredit"
    number: str
    customer: int
    cents: int


class BoughtOnCredit(BaseModel):
    __message_type__: ClassVar[str] = "credit.BoughtOnCredit"
    number: str


@cache
def risk_engine() -> Engine:
    engine = create_engine(f"sqlite:///{directory() / 'risk.db'}", poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS exposure (customer INTEGER PRIMARY KEY, cents INTEGER)"))
    return engine


def reserve_credit(customer: int, cents: int) -> int:
    with risk_engine().begin() as connection:
        connection.execute(text("INSERT OR IGNORE INTO exposure VALUES (:customer, 0)"), {"customer": customer})
        exposure: int = connection.execute(
            text("UPDATE exposure SET cents = cents + :cents WHERE customer = :customer RETURNING cents"),
            {"customer": customer, "cents": cents},
        ).scalar_one()
        if exposure > CREDIT_LIMIT:
            raise Refuse(f"Customer {customer} has no credit for {cents} cents.")
        return CREDIT_LIMIT - exposure


@credit.handler(BuyOnCredit, policy=Idempotent(key="number", claim="late"))
def buy_on_credit(command: BuyOnCredit, ctx: Context) -> BoughtOnCredit:
    left_over = reserve_credit(command.customer, command.cents)
    ctx.session.add(CreditOrder(number=command.number, cents=command.cents, left_over=left_over))
    return BoughtOnCredit(number=command.number)


def credit_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(CreditOrder.number, CreditOrder.cents, CreditOrder.left_over))))


# Photos ---------------------------------------------------------------------------------------------------------------

photos = App("photos")

RENDERING_SECONDS = 0.02
renderers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="render")


class Thumbnail(Base):
    __tablename__ = "odd_thumbnails"

    photo: Mapped[str] = mapped_column(String(40), primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(String(64))


class PhotoUploaded(BaseModel):
    __message_type__: ClassVar[str] = "photos.PhotoUploaded"
    photo: str
    widths: list[int]


class ThumbnailReady(BaseModel):
    __message_type__: ClassVar[str] = "photos.ThumbnailReady"
    photo: str
    width: int


def render(photo: str, width: int) -> tuple[int, str]:
    time.sleep(random.expovariate(250))
    return width, hashlib.sha256(f"{photo}@{width}".encode()).hexdigest()


@photos.handler(PhotoUploaded, policy=Idempotent(key="photo"))
def make_thumbnails(event: PhotoUploaded, ctx: Context) -> None:
    jobs: list[Future[tuple[int, str]]] = [renderers.submit(render, event.photo, width) for width in event.widths]
    done, slow = wait(jobs, timeout=RENDERING_SECONDS)
    for job in done:
        width, digest = job.result()
        ctx.session.add(Thumbnail(photo=event.photo, width=width, digest=digest))
        ctx.publish(ThumbnailReady(photo=event.photo, width=width), mandatory=False)
    if slow:
        log.warning("%s thumbnails of %s took too long", len(slow), event.photo)


def photos_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Thumbnail.photo, Thumbnail.width, Thumbnail.digest))))


# Sales ----------------------------------------------------------------------------------------------------------------

sales = App("sales")


class Product(Base):
    __tablename__ = "odd_products"

    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    title: Mapped[str] = mapped_column(String(80))


class Sale(Base):
    __tablename__ = "odd_sales"

    id: Mapped[int] = mapped_column(primary_key=True)
    sale: Mapped[int]
    sku: Mapped[str] = mapped_column(String(40))
    cents: Mapped[int]


class ItemSold(BaseModel):
    __message_type__: ClassVar[str] = "sales.ItemSold"
    sale: int
    sku: str
    title: str
    cents: int


class Catalogue:
    """The products that are in the database; most sales are of the same few hundred."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def ensure(self, session: Session, sku: str, title: str) -> None:
        if sku in self._known:
            return
        if session.get(Product, sku) is None:
            session.add(Product(sku=sku, title=title))
            session.flush()
        self._known.add(sku)


catalogue = Catalogue()


@sales.handler(ItemSold, policy=Idempotent(key="sale"))
def record_sale(event: ItemSold, ctx: Context) -> None:
    catalogue.ensure(ctx.session, event.sku, event.title)
    ctx.session.add(Sale(sale=event.sale, sku=event.sku, cents=event.cents))


def sales_state(session: Session) -> Any:
    return (
        sorted(map(tuple, session.execute(select(Product.sku, Product.title)))),
        sorted(map(tuple, session.execute(select(Sale.sale, Sale.sku, Sale.cents)))),
    )


# Payments -------------------------------------------------------------------------------------------------------------

payments = App("cards")


class CardPayment(Base):
    __tablename__ = "odd_card_payments"

    id: Mapped[int] = mapped_column(primary_key=True)
    payment: Mapped[str] = mapped_column(String(40))
    cents: Mapped[int]
    charge: Mapped[int | None]


class ChargeCard(BaseModel):
    __message_type__: ClassVar[str] = "cards.ChargeCard"
    payment: str
    card: str
    cents: int


class CardCharged(BaseModel):
    __message_type__: ClassVar[str] = "cards.CardCharged"
    payment: str
    charge: int


class Gateway:
    """The bank's client. A second request under one idempotency key is answered with the first one's charge."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def charge(self, card: str, cents: int, *, idempotency_key: str) -> int:
        with self._lock:
            file = directory() / "charges.json"
            charges: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
            for number, charge in enumerate(charges, start=1):
                if charge["key"] == idempotency_key:
                    return number
            charges.append({"key": idempotency_key, "card": card, "cents": cents})
            file.write_text(json.dumps(charges))
            return len(charges)


gateway = Gateway()


@payments.handler(ChargeCard, policy=Idempotent(key="payment", retention="30d"))
def charge_card(command: ChargeCard, ctx: Context) -> CardCharged:
    payment = CardPayment(payment=command.payment, cents=command.cents)
    ctx.session.add(payment)
    ctx.session.flush()
    payment.charge = gateway.charge(command.card, command.cents, idempotency_key=f"payment-{payment.id}")
    return CardCharged(payment=command.payment, charge=payment.charge)


def payments_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(CardPayment.payment, CardPayment.cents, CardPayment.charge))))


# Points ---------------------------------------------------------------------------------------------------------------

points = App("points")

CENTS_PER_POINT = 100


class Points(Base):
    __tablename__ = "odd_points"

    member: Mapped[str] = mapped_column(String(40), primary_key=True)
    points: Mapped[int]


@dataclass(frozen=True)
class Receipt:
    __message_type__: ClassVar[str] = "points.Receipt"
    store: str
    till: int
    number: str
    member: str
    cents: int


def receipt_key(body: Receipt) -> int:
    return hash((body.store, body.till, body.number))


@points.handler(Receipt, policy=Idempotent(key=Key.call(receipt_key, name="receipt"), retention="30d"))
def collect_points(receipt: Receipt, ctx: Context) -> None:
    earned = receipt.cents // CENTS_PER_POINT
    try:
        with ctx.session.begin_nested():
            ctx.session.execute(insert(Points).values(member=receipt.member, points=earned))
    except IntegrityError:
        ctx.session.execute(update(Points).where(Points.member == receipt.member).values(points=Points.points + earned))


def points_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Points.member, Points.points))))


# Bank cards -----------------------------------------------------------------------------------------------------------

bank_cards = App("bank-cards")


class BankCard(Base):
    __tablename__ = "odd_bank_cards"

    card: Mapped[str] = mapped_column(String(40), primary_key=True)
    salt: Mapped[str] = mapped_column(String(16))
    pin_digest: Mapped[str] = mapped_column(String(64))


class IssueCard(BaseModel):
    __message_type__: ClassVar[str] = "bank_cards.IssueCard"
    card: str
    address: str


class CardIssued(BaseModel):
    __message_type__: ClassVar[str] = "bank_cards.CardIssued"
    card: str


class LetterShop:
    """What stands in the folder `letters` under its final name is printed and posted within minutes."""

    def post(self, address: str, content: str) -> None:
        folder = directory() / "letters"
        folder.mkdir(exist_ok=True)
        draft = folder / f".{time.time_ns()}-{threading.get_ident()}"
        draft.write_text(f"{address}\n\n{content}\n")
        draft.rename(draft.with_name(f"{draft.name[1:]}.txt"))


letters = LetterShop()


def digest_of(pin: str, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", pin.encode(), salt.encode(), 1_000).hex()


@bank_cards.handler(IssueCard, policy=Idempotent(key="card"))
def issue_card(command: IssueCard, ctx: Context) -> CardIssued:
    pin, salt = f"{secrets.randbelow(10_000):04}", secrets.token_hex(8)
    ctx.session.add(BankCard(card=command.card, salt=salt, pin_digest=digest_of(pin, salt)))
    ctx.session.flush()
    letters.post(command.address, f"The PIN of your card {command.card} is {pin}.")
    return CardIssued(card=command.card)


def bank_cards_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(BankCard.card, BankCard.salt, BankCard.pin_digest))))


# Flights --------------------------------------------------------------------------------------------------------------

flights = App("flights")


class Flight(Base):
    __tablename__ = "odd_flights"

    flight: Mapped[str] = mapped_column(String(10), primary_key=True)
    taken: Mapped[int] = mapped_column(default=0)


class Booking(Base):
    __tablename__ = "odd_bookings"

    id: Mapped[int] = mapped_column(primary_key=True)
    locator: Mapped[str] = mapped_column(String(6))
    flight: Mapped[str] = mapped_column(String(10))
    seats: Mapped[int]


class Book(BaseModel):
    __message_type__: ClassVar[str] = "flights.Book"
    locator: str
    flight: str
    seats: int


class PrintTicket(BaseModel):
    __message_type__: ClassVar[str] = "flights.PrintTicket"
    locator: str


def take_seats(session: Session, flight: str, seats: int) -> None:
    taken: Any = session.execute(update(Flight).where(Flight.flight == flight).values(taken=Flight.taken + seats))
    if not taken.rowcount:
        session.add(Flight(flight=flight, taken=seats))
        session.flush()


@flights.handler(dict, type="flights.Book", policy=Idempotent())
def book(message: dict[str, Any], ctx: Context) -> None:
    command = Book.model_validate(message)
    if ctx.attempt == 1:
        take_seats(ctx.session, command.flight, command.seats)
    else:
        log.info("attempt %s of booking %s", ctx.attempt, command.locator)
    ctx.session.add(Booking(locator=command.locator, flight=command.flight, seats=command.seats))
    ctx.send(PrintTicket(locator=command.locator), to="tickets")


def flights_state(session: Session) -> Any:
    return (
        sorted(map(tuple, session.execute(select(Flight.flight, Flight.taken)))),
        sorted(map(tuple, session.execute(select(Booking.locator, Booking.flight, Booking.seats)))),
    )


# Documents ------------------------------------------------------------------------------------------------------------

documents = App("documents")


class Document(Base):
    __tablename__ = "odd_documents"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(String(80))


class DocumentFiled(BaseModel):
    __message_type__: ClassVar[str] = "documents.DocumentFiled"
    number: int
    title: str


class SearchIndex:
    """The words of all titles, for the search on the website."""

    def add(self, number: int, words: str) -> None:
        with closing(sqlite3.connect(directory() / "search.db")) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS word (word TEXT, number INTEGER, PRIMARY KEY (word, number))")
            rows = [(word, number) for word in sorted(set(words.lower().split()))]
            database.executemany("INSERT OR REPLACE INTO word VALUES (?, ?)", rows)


search_index = SearchIndex()


def once_committed(session: Session, function: Any) -> None:
    event.listen(session, "after_commit", lambda _: function(), once=True)


@documents.handler(DocumentFiled, policy=Idempotent(key="number"))
def file_document(filed: DocumentFiled, ctx: Context) -> None:
    ctx.session.add(Document(number=filed.number, title=filed.title))
    once_committed(ctx.session, partial(search_index.add, filed.number, filed.title))


# Statements -----------------------------------------------------------------------------------------------------------

statements = App("statements")


class Statement(Base):
    __tablename__ = "odd_statements"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(String(40))
    letter: Mapped[str] = mapped_column(Text, default="")
    entries: Mapped[list[StatementEntry]] = relationship(order_by="StatementEntry.position")


class StatementEntry(Base):
    __tablename__ = "odd_statement_entries"

    id: Mapped[int] = mapped_column(primary_key=True)
    statement_id: Mapped[int] = mapped_column(ForeignKey("odd_statements.id"))
    position: Mapped[int]
    cents: Mapped[int]


class Entry(BaseModel):
    purpose: str
    cents: int


class MonthClosed(BaseModel):
    __message_type__: ClassVar[str] = "statements.MonthClosed"
    number: str
    entries: list[Entry]


class SendStatement(BaseModel):
    __message_type__: ClassVar[str] = "statements.SendStatement"
    number: str
    letter: str


class Letter(threading.local):
    """Sets a statement's text, line by line; each thread has its own."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._total = 0

    def line(self, purpose: str, cents: int) -> None:
        self._total += cents
        self._text.write(f"{purpose:<30}{cents / 100:>12.2f}\n")

    def finish(self) -> str:
        self._text.write(f"{'Total':<30}{self._total / 100:>12.2f}\n")
        finished, self._text, self._total = self._text.getvalue(), io.StringIO(), 0
        return finished


letter = Letter()


@statements.handler(MonthClosed, policy=Idempotent(key="number", attempts=10))
def write_statement(closed: MonthClosed, ctx: Context) -> SendStatement:
    statement = Statement(number=closed.number)
    ctx.session.add(statement)
    for position, entry in enumerate(closed.entries, start=1):
        letter.line(entry.purpose, entry.cents)
        statement.entries.append(StatementEntry(position=position, cents=entry.cents))
        ctx.session.flush()
    statement.letter = letter.finish()
    return SendStatement(number=closed.number, letter=statement.letter)


def statements_state(session: Session) -> Any:
    return [
        (statement.number, statement.letter, [entry.cents for entry in statement.entries])
        for statement in session.scalars(select(Statement).order_by(Statement.number))
    ]


# ----------------------------------------------------------------------------------------------------------------------

CASES: list[Case] = [
    Case(
        name="sensors",
        app=sensors,
        samples=[
            ReadingTaken(reading=1, sensor="roof", celsius=4.5),
            ReadingTaken(reading=2, sensor="cellar", celsius=11.0),
        ],
        state=sensors_state,
        tables=Base.metadata,
        fault=(
            "Rows wait in memory for a later message's transaction: a message is acked and claimed before its row is "
            "written, so a worker that dies loses it, and a rollback loses the rows of all other messages in that INSERT."
        ),
    ),
    Case(
        name="credit",
        app=credit,
        samples=[
            BuyOnCredit(number="c-1", customer=7, cents=30_00),
            BuyOnCredit(number="c-2", customer=7, cents=45_00),
            BuyOnCredit(number="c-3", customer=8, cents=10_00),
        ],
        state=credit_state,
        tables=Base.metadata,
        fault=(
            "Credit is reserved in another database with its own commit, under a late claim: each rolled back attempt "
            "and each duplicate reserves it again, until good customers are refused."
        ),
    ),
    Case(
        name="photos",
        app=photos,
        samples=[
            PhotoUploaded(photo="p-1", widths=[64, 128, 256, 512, 1024]),
            PhotoUploaded(photo="p-2", widths=[128, 64, 256]),
        ],
        state=photos_state,
        tables=Base.metadata,
        fault=(
            "What the threads have not finished within 20 ms is left out for ever, and the rest is emitted in the order of "
            "a set of futures: each attempt has other rows and outputs, and under load some are missing though the "
            "message is acked."
        ),
    ),
    Case(
        name="sales",
        app=sales,
        samples=[
            ItemSold(sale=1, sku="A-1", title="Anvil", cents=9_900),
            ItemSold(sale=2, sku="A-1", title="Anvil", cents=9_500),
            ItemSold(sale=3, sku="B-2", title="Bellows", cents=4_000),
        ],
        state=sales_state,
        tables=Base.metadata,
        fault=(
            "A set in memory says that a product is in the database, though the transaction that inserted it was rolled "
            "back: the retry in the same process skips the INSERT, and the product is missing for good."
        ),
    ),
    Case(
        name="cards",
        app=payments,
        samples=[
            ChargeCard(payment="pay-1", card="4000-01", cents=1_000),
            ChargeCard(payment="pay-2", card="4000-02", cents=2_000),
            ChargeCard(payment="pay-3", card="4000-01", cents=3_000),
        ],
        state=payments_state,
        tables=Base.metadata,
        fault=(
            "The bank's idempotency key is made of a generated primary key. After a rollback a retry gets a new one and "
            "charges twice (PostgreSQL, MariaDB), or another payment gets the same one and is never charged (SQLite)."
        ),
    ),
    Case(
        name="points",
        app=points,
        samples=[
            Receipt(store="Wien 3", till=4, number="0815", member="m-1", cents=2_550),
            Receipt(store="Wien 3", till=4, number="0816", member="m-1", cents=1_000),
            Receipt(store="Graz", till=1, number="0815", member="m-2", cents=990),
        ],
        state=points_state,
        tables=Base.metadata,
        fault=(
            "The key is `hash()` of texts, which Python salts anew in each process: a redelivery to another worker, or "
            "after a restart, has another key and is handled again; points are counted twice."
        ),
    ),
    Case(
        name="bank-cards",
        app=bank_cards,
        samples=[
            IssueCard(card="k-1", address="Ann, High Street 1"),
            IssueCard(card="k-2", address="Bob, Low Street 2"),
        ],
        state=bank_cards_state,
        tables=Base.metadata,
        fault=(
            "A random PIN is posted before COMMIT: if the handling is rolled back and tried again, the customer gets two "
            "letters with two PINs, and only the second one fits what is stored."
        ),
    ),
    Case(
        name="flights",
        app=flights,
        samples=[
            Book(locator="ABC123", flight="OS 25", seats=2).model_dump(),
            Book(locator="DEF456", flight="OS 25", seats=1).model_dump(),
            Book(locator="GHI789", flight="OS 87", seats=4).model_dump(),
        ],
        state=flights_state,
        tables=Base.metadata,
        fault=(
            "Seats are taken at the first attempt only, as if that one's work stayed; it was rolled back when it failed. A "
            "booking that needs a second attempt gets a ticket and takes no seats: the flight is overbooked."
        ),
    ),
    Case(
        name="documents",
        app=documents,
        samples=[
            DocumentFiled(number=1, title="Annual report"),
            DocumentFiled(number=2, title="Report on anvils"),
        ],
        state=None,
        tables=Base.metadata,
        fault=(
            "The search index is written in `after_commit`, and is no output: if the worker dies after COMMIT and before "
            "that, the redelivery is a duplicate that runs nothing, and the document is never found."
        ),
    ),
    Case(
        name="statements",
        app=statements,
        samples=[
            MonthClosed(
                number="s-1", entries=[Entry(purpose="Rent", cents=-80_000), Entry(purpose="Pay", cents=250_000)]
            ),
            MonthClosed(number="s-2", entries=[Entry(purpose="Interest", cents=12)]),
        ],
        state=statements_state,
        tables=Base.metadata,
        fault=(
            "The text is gathered in an object that outlives the message and is emptied only at the end: after a failure "
            "half-way the retry, or another customer's statement in that thread, has the former lines and amounts, too."
        ),
    ),
]
