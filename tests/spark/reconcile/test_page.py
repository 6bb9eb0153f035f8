"""The page, without Spark: it needs nothing beside it, and whoever doesn't see the plots loses nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from idemp.spark.reconcile import Counts, Finding, Kind, Summary, Terms
from idemp.spark.reconcile.page import page
from idemp.spark.reconcile.plots import MOST_TYPES, by_type, timeline
from idemp.spark.reconcile.summary import HourCounts, TypeCounts

pytestmark = pytest.mark.slow

START = datetime(2026, 3, 1, tzinfo=UTC)
EVIL = '<script>alert("1")</script>&'


def summary(*, hours: int = 72, lost: int = 3, type: str = "shop.Order") -> Summary:
    terms = Terms(as_of=START + timedelta(hours=hours + 1), since=START, until=START + timedelta(hours=hours))
    of_hour = [
        HourCounts(
            hour=START + timedelta(hours=number), messages=1200 + number, handled=1200 + number, late=number == 7
        )
        for number in range(hours)
    ]
    finding = Finding(
        kind=Kind.LOST, consumer="orders", type=type, id=EVIL, key=None, sent_at=START, claimed_at=None, sends=1, outputs=0,
        pending=0, quarantined=0, fault=None,
    )  # fmt: skip
    totals = Counts(messages=1000, handled=1000 - lost, lost=lost, late=lost)
    return Summary.of(
        terms,
        totals=totals,
        types=[TypeCounts(consumer="orders", type=type, **totals.model_dump())],
        hours=of_hour,
        findings=[finding] if lost else [],
    )


class Reader(HTMLParser):
    """What a browser would fetch, and how deep elements nest."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href"} and tag != "use"]
        if tag not in {"meta", "br", "path", "use"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"meta", "br", "path", "use"}:
            assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


def test_one_file_that_fetches_nothing_and_runs_nothing() -> None:
    reader = read(page(summary(type=EVIL)))
    assert (reader.fetched, reader.scripts, reader.open) == ([], 0, [])
    assert "$" not in page(summary())


def test_plots_say_in_words_what_they_show() -> None:
    for drawn in (timeline(summary()), by_type(summary(type=EVIL))):
        root = ET.fromstring(drawn)
        assert root.get("role") == "img"
        title, words = root[0], root[1]
        assert title.tag.endswith("title")
        assert words.tag.endswith("desc")
        assert root.get("aria-labelledby") == f"{title.get('id')} {words.get('id')}"
    assert "most findings, 1, from 2026-03-01 07:00 to 2026-03-01 08:00" in timeline(summary())


def test_the_numbers_of_the_plots_stand_in_tables() -> None:
    html = page(summary(hours=5))
    assert all(f"<td>2026-03-01 0{hour}:00</td><td>1,20{hour}</td>" in html for hour in range(5))
    assert "<td>shop.Order · orders</td><td>1,000</td><td>997</td><td>3</td>" in html


def test_a_clean_page_says_so() -> None:
    html = page(summary(lost=0, hours=0))
    assert "Nothing was found in 1,000 messages." in html
    assert 'class="verdict clean"' in html


def test_many_types_and_a_year_of_hours_stay_readable() -> None:
    one = summary(hours=24 * 365)
    types = [one.types[0].model_copy(update={"type": f"shop.T{number}"}) for number in range(40)]
    many = one.model_copy(update={"types": types})
    assert by_type(many).count("orders</text>") <= MOST_TYPES
    assert read(page(many)).open == []


def test_the_same_summary_gives_the_same_page() -> None:
    assert page(summary()) == page(summary())
