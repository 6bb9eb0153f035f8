"""Ten handlers that are right: whatever is redelivered, crashes or comes twice, their results are the same."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import BaseModel
from sqlalchemy import Connection, ForeignKey, MetaData, String, UniqueConstraint, insert, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from idemp import App, Context, Idempotent, Key, Refuse

log = logging.getLogger("shop")


@dataclass(frozen=True)
class Case:
    """A handler to try something on.

    Attributes:
        name: what it does, in a word.
        app: with this one handler.
        samples: some messages, objects of its message class.
        state: what the database says of its work; `None` where that does not show.
        tables: the tables that it needs.
        fault: what goes wrong in production, and when; empty if nothing does.
    """

    name: str
    app: App
    samples: list[Any]
    state: Callable[[Session], Any] | None
    tables: MetaData
    fault: str = ""


class Base(DeclarativeBase):
    """The tables of all handlers here."""


# Prices ---------------------------------------------------------------------------------------------------------------

prices = App("prices")


class Price(Base):
    __tablename__ = "right_prices"

    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    cents: Mapped[int]


class PriceChanged(BaseModel):
    __message_type__: ClassVar[str] = "prices.PriceChanged"
    change_id: int
    sku: str
    cents: int


def upsert_price(connection: Connection, sku: str, cents: int) -> None:
    row = {"sku": sku, "cents": cents}
    if connection.dialect.name in {"mysql", "mariadb"}:
        connection.execute(mysql.insert(Price).values(row).on_duplicate_key_update(cents=cents))
        return
    dialect: Any = {"sqlite": sqlite, "postgresql": postgresql}[connection.dialect.name]
    connection.execute(
        dialect.insert(Price).values(row).on_conflict_do_update(index_elements=["sku"], set_={"cents": cents})
    )


@prices.handler(PriceChanged, policy=Idempotent(key="change_id"))
def change_price(event: PriceChanged, ctx: Context) -> None:
    upsert_price(ctx.connection, event.sku, event.cents)


def prices_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Price.sku, Price.cents))))


# Accounts -------------------------------------------------------------------------------------------------------------

accounts = App("accounts")


class Account(Base):
    __tablename__ = "right_accounts"

    number: Mapped[str] = mapped_column(String(34), primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)


class Transfer(Base):
    __tablename__ = "right_transfers"

    id: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str] = mapped_column(String(40))
    cents: Mapped[int]


class MoveMoney(BaseModel):
    __message_type__: ClassVar[str] = "accounts.MoveMoney"
    reference: str
    source: str
    target: str
    cents: int


class MoneyMoved(BaseModel):
    __message_type__: ClassVar[str] = "accounts.MoneyMoved"
    reference: str


class Ledger:
    """Books amounts by relative updates, so that concurrent ones add up."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def book(self, number: str, cents: int) -> None:
        if not self._add(number, cents):
            self._open(number)
            self._add(number, cents)

    def _add(self, number: str, cents: int) -> bool:
        result: Any = self._session.execute(
            update(Account).where(Account.number == number).values(cents=Account.cents + cents)
        )
        return bool(result.rowcount)

    def _open(self, number: str) -> None:
        try:
            with self._session.begin_nested():
                self._session.execute(insert(Account).values(number=number, cents=0))
        except IntegrityError:
            log.debug("account %s was opened by somebody else", number)


@accounts.handler(MoveMoney, policy=Idempotent(key="reference", retention="30d"))
def move_money(command: MoveMoney, ctx: Context) -> None:
    if command.source == command.target:
        raise Refuse("Source and target are the same account.")
    ledger = Ledger(ctx.session)
    movements = {command.source: -command.cents, command.target: command.cents}
    for number, cents in sorted(movements.items()):  # always in this order: two transfers never deadlock
        ledger.book(number, cents)
    ctx.session.add(Transfer(reference=command.reference, cents=command.cents))
    ctx.publish(MoneyMoved(reference=command.reference), mandatory=False)


def accounts_state(session: Session) -> Any:
    return (
        sorted(map(tuple, session.execute(select(Account.number, Account.cents)))),
        sorted(map(tuple, session.execute(select(Transfer.reference, Transfer.cents)))),
    )


# Newsletter -----------------------------------------------------------------------------------------------------------

newsletter = App("newsletter")


class Issue(Base):
    __tablename__ = "right_issues"

    issue: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    readers: Mapped[int]


class IssueReady(BaseModel):
    __message_type__: ClassVar[str] = "newsletter.IssueReady"
    issue: int
    readers: list[str]
    bounced: list[str] = []


class SendIssue(BaseModel):
    __message_type__: ClassVar[str] = "newsletter.SendIssue"
    issue: int
    reader: str


@newsletter.handler(IssueReady, policy=Idempotent())
def send_issue(event: IssueReady, ctx: Context) -> None:
    started = time.perf_counter()
    readers = set(event.readers) - set(event.bounced)
    ctx.session.add(Issue(issue=event.issue, readers=len(readers)))
    for reader in sorted(readers):
        ctx.send(SendIssue(issue=event.issue, reader=reader), to="mailer")
    log.info("issue %s prepared in %.3f s", event.issue, time.perf_counter() - started)


def newsletter_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Issue.issue, Issue.readers))))


# Quotes ---------------------------------------------------------------------------------------------------------------

quotes = App("quotes")

PREMIUM_PER_THOUSAND = {"bike": 31, "car": 42, "house": 7}
LOWEST_PREMIUM = 500


class Quote(Base):
    __tablename__ = "right_quotes"

    request: Mapped[str] = mapped_column(String(40), primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    cents: Mapped[int]


@dataclass(frozen=True)
class AskQuote:
    __message_type__: ClassVar[str] = "quotes.AskQuote"
    request: str
    kind: str
    value: int


@dataclass(frozen=True)
class QuoteGiven:
    __message_type__: ClassVar[str] = "quotes.QuoteGiven"
    request: str
    cents: int


@quotes.handler(AskQuote, policy=Idempotent(key="request", redispatch="always"), replies=True)
def give_quote(question: AskQuote, ctx: Context) -> QuoteGiven:
    cents = max(LOWEST_PREMIUM, question.value * PREMIUM_PER_THOUSAND[question.kind] // 1000)
    ctx.session.add(Quote(request=question.request, kind=question.kind, cents=cents))
    return QuoteGiven(request=question.request, cents=cents)


def quotes_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Quote.request, Quote.kind, Quote.cents))))


# Orders ---------------------------------------------------------------------------------------------------------------

orders = App("basket")


class Order(Base):
    __tablename__ = "right_orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(String(40), unique=True)
    lines: Mapped[list[OrderLine]] = relationship(
        back_populates="order", cascade="all, delete-orphan", order_by="OrderLine.position"
    )


class OrderLine(Base):
    __tablename__ = "right_order_lines"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("right_orders.id"))
    position: Mapped[int]
    sku: Mapped[str] = mapped_column(String(40))
    pieces: Mapped[int]
    order: Mapped[Order] = relationship(back_populates="lines")


class Line(BaseModel):
    sku: str
    pieces: int


class CheckOut(BaseModel):
    __message_type__: ClassVar[str] = "basket.CheckOut"
    number: str
    lines: list[Line]


class PickPieces(BaseModel):
    __message_type__: ClassVar[str] = "basket.PickPieces"
    number: str
    position: int
    sku: str
    pieces: int


@orders.handler(CheckOut, policy=Idempotent(key="number", retry_delays=["1s", "10s"]))
def check_out(command: CheckOut, ctx: Context) -> Iterator[PickPieces]:
    order = Order(number=command.number)
    for position, line in enumerate(command.lines, start=1):
        order.lines.append(OrderLine(position=position, sku=line.sku, pieces=line.pieces))
    ctx.session.add(order)
    ctx.session.flush()
    for saved in order.lines:
        yield PickPieces(number=order.number, position=saved.position, sku=saved.sku, pieces=saved.pieces)


def orders_state(session: Session) -> Any:
    found = session.scalars(select(Order).order_by(Order.number))
    return [(order.number, [(line.position, line.sku, line.pieces) for line in order.lines]) for order in found]


# Taxes ----------------------------------------------------------------------------------------------------------------

taxes = App("taxes")

RATES = {("DE", "book"): Decimal("0.07"), ("DE", "tool"): Decimal("0.19"), ("AT", "book"): Decimal("0.10")}
STANDARD_RATE = Decimal("0.20")


class TaxLine(Base):
    __tablename__ = "right_tax_lines"

    id: Mapped[int] = mapped_column(primary_key=True)
    invoice: Mapped[str] = mapped_column(String(40))
    day: Mapped[date]
    cents: Mapped[int]


@dataclass(frozen=True)
class InvoiceWritten:
    __message_type__: ClassVar[str] = "taxes.InvoiceWritten"
    invoice: str
    country: str
    category: str
    net_cents: int
    day: date


@lru_cache(maxsize=512)
def tax_rate(country: str, category: str) -> Decimal:
    return RATES.get((country, category), STANDARD_RATE)


@taxes.handler(InvoiceWritten, policy=Idempotent(key=["country", "invoice"]))
def book_tax(event: InvoiceWritten, ctx: Context) -> None:
    cents = (event.net_cents * tax_rate(event.country, event.category)).quantize(Decimal(1), ROUND_HALF_UP)
    ctx.session.add(TaxLine(invoice=f"{event.country}/{event.invoice}", day=event.day, cents=int(cents)))


def taxes_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(TaxLine.invoice, TaxLine.day, TaxLine.cents))))


# Refunds --------------------------------------------------------------------------------------------------------------

refunds = App("refunds")

HIGHEST_REFUND = 50_000


class Refund(Base):
    __tablename__ = "right_refunds"

    id: Mapped[int] = mapped_column(primary_key=True)
    refund: Mapped[int]
    cents: Mapped[int]
    reason: Mapped[str] = mapped_column(String(80))


@refunds.handler(dict, type="refunds.GiveRefund", policy=Idempotent(key="refund.id", refuse_on=[KeyError, TypeError]))
def give_refund(message: dict[str, Any], ctx: Context) -> None:
    refund = message["refund"]
    ctx.session.add(Refund(refund=refund["id"], cents=refund["cents"], reason=message.get("reason", "")))
    ctx.session.flush()
    if not 0 < refund["cents"] <= HIGHEST_REFUND:
        raise Refuse(f"{refund['cents']} cents need somebody's signature.")
    payload = {"refund": refund["id"], "cents": refund["cents"]}
    ctx.publish(payload, type="refunds.RefundGiven", mandatory=False)


def refunds_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Refund.refund, Refund.cents, Refund.reason))))


# Tags -----------------------------------------------------------------------------------------------------------------

tags = App("tags")


class Tag(Base):
    __tablename__ = "right_tags"
    __table_args__ = (UniqueConstraint("name", name="right_tags_name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(40))


class Tagging(Base):
    __tablename__ = "right_taggings"

    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[int]
    tag_id: Mapped[int] = mapped_column(ForeignKey("right_tags.id"))
    tag: Mapped[Tag] = relationship()


class ArticleTagged(BaseModel):
    __message_type__: ClassVar[str] = "tags.ArticleTagged"
    event: str
    article: int
    tags: list[str]


def get_or_make_tag(session: Session, name: str) -> Tag:
    tag = Tag(name=name)
    try:
        with session.begin_nested():
            session.add(tag)
    except IntegrityError:
        return session.scalars(select(Tag).where(Tag.name == name)).one()
    return tag


@tags.handler(ArticleTagged, policy=Idempotent(key="event"))
def tag_article(event: ArticleTagged, ctx: Context) -> None:
    for name in sorted({name.strip().lower() for name in event.tags}):
        ctx.session.add(Tagging(article=event.article, tag=get_or_make_tag(ctx.session, name)))


def tags_state(session: Session) -> Any:
    return (
        sorted(session.scalars(select(Tag.name))),
        sorted(map(tuple, session.execute(select(Tagging.article, Tag.name).join(Tagging.tag)))),
    )


# Votes ----------------------------------------------------------------------------------------------------------------

votes = App("votes")

LOGGED_SHARE = 0.1


class Tally(Base):
    __tablename__ = "right_tallies"

    poll: Mapped[str] = mapped_column(String(40), primary_key=True)
    choice: Mapped[str] = mapped_column(String(40), primary_key=True)
    votes: Mapped[int]


@dataclass
class Ballot:
    poll: str
    choices: list[str] = field(default_factory=list)


@dataclass
class VoteCast:
    __message_type__: ClassVar[str] = "votes.VoteCast"
    vote: int
    ballot: Ballot


class Counting:
    """Adds a ballot to the tallies."""

    class Row:
        """One choice of one poll."""

        def __init__(self, connection: Connection, poll: str, choice: str) -> None:
            self._connection = connection
            self._key = {"poll": poll, "choice": choice}

        def add(self) -> None:
            try:
                with self._connection.begin_nested():
                    self._connection.execute(insert(Tally).values(**self._key, votes=1))
            except IntegrityError:
                self._connection.execute(
                    update(Tally)
                    .where(Tally.poll == self._key["poll"], Tally.choice == self._key["choice"])
                    .values(votes=Tally.votes + 1)
                )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, ballot: Ballot) -> int:
        choices = sorted(set(ballot.choices))
        for choice in choices:
            self.Row(self._connection, ballot.poll, choice).add()
        return len(choices)


@votes.handler(VoteCast, policy=Idempotent(claim="late"))
def count_vote(event: VoteCast, ctx: Context) -> None:
    counted = Counting(ctx.connection).add(event.ballot)
    if random.random() < LOGGED_SHARE:
        log.info("vote %s had %s choices, at %s", event.vote, counted, datetime.now(UTC).isoformat())


def votes_state(session: Session) -> Any:
    return sorted(map(tuple, session.execute(select(Tally.poll, Tally.choice, Tally.votes))))


# Albums ---------------------------------------------------------------------------------------------------------------

albums = App("albums")


class Album(Base):
    __tablename__ = "right_albums"

    code: Mapped[str] = mapped_column(String(40), primary_key=True)
    title: Mapped[str] = mapped_column(String(80))
    tracks: Mapped[list[Track]] = relationship(back_populates="album", cascade="all, delete-orphan")


class Track(Base):
    __tablename__ = "right_tracks"

    album_code: Mapped[str] = mapped_column(ForeignKey("right_albums.code"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    checksum: Mapped[str] = mapped_column(String(64))
    album: Mapped[Album] = relationship(back_populates="tracks")


class AlbumDelivered(BaseModel):
    __message_type__: ClassVar[str] = "albums.AlbumDelivered"
    delivery: str
    code: str
    title: str
    tracks: list[str]


class AlbumListed(BaseModel):
    __message_type__: ClassVar[str] = "albums.AlbumListed"
    code: str
    checksums: list[str]


def checksum(track: str) -> str:
    return hashlib.sha256(track.encode()).hexdigest()


def delivery_key(body: AlbumDelivered) -> tuple[str, str]:
    return body.code, body.delivery.strip().upper()


@albums.handler(AlbumDelivered, policy=Idempotent(key=Key.call(delivery_key, name="delivery"), claim="late"))
def list_album(event: AlbumDelivered, ctx: Context) -> list[AlbumListed]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        checksums = list(pool.map(checksum, event.tracks))
    album = Album(code=event.code, title=event.title)
    album.tracks.extend(Track(position=position, checksum=each) for position, each in enumerate(checksums, start=1))
    ctx.session.add(album)
    return [AlbumListed(code=event.code, checksums=checksums)]


def albums_state(session: Session) -> Any:
    return (
        sorted(map(tuple, session.execute(select(Album.code, Album.title)))),
        sorted(map(tuple, session.execute(select(Track.album_code, Track.position, Track.checksum)))),
    )


# ----------------------------------------------------------------------------------------------------------------------

CASES: list[Case] = [
    Case(
        name="prices",
        app=prices,
        samples=[
            PriceChanged(change_id=1, sku="A-1", cents=199),
            PriceChanged(change_id=2, sku="B-2", cents=249),
            PriceChanged(change_id=3, sku="C-3", cents=5),
        ],
        state=prices_state,
        tables=Base.metadata,
    ),
    Case(
        name="accounts",
        app=accounts,
        samples=[
            MoveMoney(reference="r-1", source="AT11", target="DE22", cents=2_500),
            MoveMoney(reference="r-2", source="DE22", target="AT11", cents=700),
            MoveMoney(reference="r-3", source="DE22", target="CH33", cents=1),
        ],
        state=accounts_state,
        tables=Base.metadata,
    ),
    Case(
        name="newsletter",
        app=newsletter,
        samples=[
            IssueReady(issue=1, readers=["bob@example.org", "ann@example.org", "bob@example.org"]),
            IssueReady(
                issue=2,
                readers=["eve@example.org", "bob@example.org", "dan@example.org"],
                bounced=["dan@example.org"],
            ),
        ],
        state=newsletter_state,
        tables=Base.metadata,
    ),
    Case(
        name="quotes",
        app=quotes,
        samples=[
            AskQuote(request="q-1", kind="bike", value=90_000),
            AskQuote(request="q-2", kind="house", value=35_000_000),
            AskQuote(request="q-3", kind="car", value=900),
        ],
        state=quotes_state,
        tables=Base.metadata,
    ),
    Case(
        name="basket",
        app=orders,
        samples=[
            CheckOut(number="o-1", lines=[Line(sku="B-2", pieces=1), Line(sku="A-1", pieces=3)]),
            CheckOut(number="o-2", lines=[Line(sku="A-1", pieces=1)]),
            CheckOut(number="o-3", lines=[]),
        ],
        state=orders_state,
        tables=Base.metadata,
    ),
    Case(
        name="taxes",
        app=taxes,
        samples=[
            InvoiceWritten(invoice="17", country="DE", category="book", net_cents=1_990, day=date(2026, 2, 3)),
            InvoiceWritten(invoice="17", country="AT", category="book", net_cents=1_990, day=date(2026, 2, 3)),
            InvoiceWritten(invoice="18", country="DE", category="toy", net_cents=333, day=date(2026, 2, 4)),
        ],
        state=taxes_state,
        tables=Base.metadata,
    ),
    Case(
        name="refunds",
        app=refunds,
        samples=[
            {"refund": {"id": 1, "cents": 1_200}, "reason": "broken"},
            {"refund": {"id": 2, "cents": 75_000}, "reason": "late"},
            {"refund": {"id": 3, "cents": 80}},
        ],
        state=refunds_state,
        tables=Base.metadata,
    ),
    Case(
        name="tags",
        app=tags,
        samples=[
            ArticleTagged(event="e-1", article=1, tags=["Garden", "tools "]),
            ArticleTagged(event="e-2", article=2, tags=["tools", "metal", "Tools"]),
            ArticleTagged(event="e-3", article=1, tags=["sale"]),
        ],
        state=tags_state,
        tables=Base.metadata,
    ),
    Case(
        name="votes",
        app=votes,
        samples=[
            VoteCast(vote=1, ballot=Ballot(poll="lunch", choices=["soup", "rice"])),
            VoteCast(vote=2, ballot=Ballot(poll="lunch", choices=["rice", "rice"])),
            VoteCast(vote=3, ballot=Ballot(poll="trip", choices=["lake"])),
        ],
        state=votes_state,
        tables=Base.metadata,
    ),
    Case(
        name="albums",
        app=albums,
        samples=[
            AlbumDelivered(delivery="d-1", code="X1", title="First", tracks=["intro", "song", "outro"]),
            AlbumDelivered(delivery="d-1", code="X2", title="Second", tracks=["one", "two"]),
        ],
        state=albums_state,
        tables=Base.metadata,
    ),
]
