"""The page: one HTML file with all that it needs inside."""

from __future__ import annotations

from datetime import datetime
from html import escape
from string import Template
from typing import TYPE_CHECKING, Final

from idemp.spark.reconcile.plots import COLOURS, by_type, timeline
from idemp.spark.reconcile.summary import Counts
from idemp.spark.reconcile.terms import Fate, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from idemp.spark.reconcile.summary import Finding, Summary

_FATES: Final[Mapping[Fate, str]] = {
    Fate.HANDLED: "sent, and in the inbox",
    Fate.LOST: "sent, and not handled within the grace time",
    Fate.NOT_YET: "sent within the grace time, not handled so far",
    Fate.UNUSABLE: "sent without an id that can be used, or unreadable",
    Fate.UNKNOWN: "sent longer ago than claims are kept: nobody knows any more",
    Fate.UNKNOWN_ORIGIN: "in the inbox, and never sent",
    Fate.INITIATED: "in the inbox as work that no message started",
    Fate.OUTSIDE: "sent or claimed outside of the span; not judged",
}
_NEXT: Final[Mapping[Kind, str]] = {
    Kind.LOST: "Look for them among the dead letters (<code>idemp dead list</code>), and in what a backfill parked; else "
    "send them again, under the same ids: what was handled meanwhile is a duplicate.",
    Kind.CONFLICTING: "Two messages have one id. The later one was parked: <code>idemp dead list</code> has it, or the "
    "folder of a backfill. Mend how the producer makes ids.",
    Kind.UNDISPATCHED: "See that a relay runs; <code>idemp inbox explain ID</code> has the reason, "
    "<code>idemp inbox release</code> gives the relay back what it gave up.",
    Kind.UNKNOWN_ORIGIN: "Somebody else sends to this consumer, or the log is not complete.",
    Kind.UNUSABLE: "They are parked: <code>idemp dead list</code> has them, or the folder of a backfill. Mend the producer.",
    Kind.DUPLICATED: "The inbox has handled each of them once. If there are many, look at the producer's retries.",
    Kind.LATE: "Look at how long the queue was then, and at failures that were retried. What a backfill handled is late by "
    "nature.",
}
_MOST_HOURS: Final = 1000
_BY_TYPE: Final = ("messages", "handled", *(kind.value for kind in Kind))
_TEMPLATE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; --ink: #1c2530; --soft: #5b6673; --line: #dde3e9; --back: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.verdict { margin: 1.25rem 0; padding: .8rem 1rem; border-radius: .5rem; border: 1px solid; font-size: 1.05rem; }
.clean { background: #e9f7f1; border-color: #8fd1b5; } .found { background: #fdf0e8; border-color: #e8ad84; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(13.5rem, 1fr)); gap: .75rem; padding: 0; }
.tiles li { list-style: none; background: #fff; border: 1px solid var(--line); border-left: .4rem solid var(--colour);
  border-radius: .5rem; padding: .6rem .8rem; }
.tiles .none { border-left-color: var(--line); color: var(--soft); }
.tiles strong { font-size: 1.5rem; line-height: 1.2; display: block; font-variant-numeric: tabular-nums; }
.tiles b { display: block; } .tiles span { font-size: .85rem; color: var(--soft); }
.card + .card { margin-top: .75rem; }
.card { background: #fff; border: 1px solid var(--line); border-radius: .5rem; padding: .9rem 1rem; overflow-x: auto; }
.card svg { width: 100%; height: auto; display: block; min-width: 34rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .3rem .4rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
thead th { color: var(--soft); font-weight: 600; } td.zero { color: #b4bcc5; }
td.id { font: .8rem ui-monospace, "DejaVu Sans Mono", monospace; min-width: 19rem; white-space: normal;
  overflow-wrap: anywhere; }
details { margin: .75rem 0; } summary { cursor: pointer; padding: .3rem 0; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; padding-left: .6rem; border-left: .4rem solid var(--colour); }
code { background: #eef1f4; border-radius: .25rem; padding: .05rem .3rem; font-size: .88em; }
@media print { body { background: #fff; } details > * { display: block; } }
</style>
</head>
<body><main>
<header>
<h1>$title</h1>
<p class="soft">$span</p>
<p class="soft">$terms</p>
</header>
<p class="verdict $mood">$verdict</p>
<ul class="tiles">$tiles</ul>
<h2>Over time</h2>
<div class="card">$timeline</div>
<details><summary>The same by hour, in numbers</summary><div class="card">$hours</div></details>
<h2>By consumer and message type</h2>
$types
<h2>What became of each message</h2>
<div class="card">$fates</div>
$examples
</main></body>
</html>
""")


def page(summary: Summary) -> str:
    """The HTML.

    Example:
        >>> from datetime import UTC, timedelta
        >>> from idemp.spark.reconcile.summary import Summary
        >>> from idemp.spark.reconcile.terms import Terms
        >>> noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
        >>> terms = Terms(as_of=noon, since=noon - timedelta(hours=6), until=noon)
        >>> clean = Summary.of(terms, totals=Counts(messages=5, handled=5), types=[], hours=[], findings=[])
        >>> "Nothing was found" in page(clean)
        True
    """
    found = summary.found()
    names = sorted({each.consumer for each in summary.types})
    plot = f'<div class="card">{by_type(summary)}</div>' if found else ""
    return _TEMPLATE.substitute(
        title=escape(f"Reconciliation of {', '.join(names) or 'nobody'}"),
        span=f"Sent from {_moment(summary.since)} to {_moment(summary.until)}.",
        terms=f"The inbox as of {_moment(summary.as_of)}; grace time {_duration(summary.grace_seconds)}, "
        f"claims kept for {_duration(summary.retention_seconds)} unless their type says otherwise. All times are UTC.",
        mood="found" if found else "clean",
        verdict=_verdict(summary.totals, found),
        tiles="".join(_tile(kind, summary.totals.of(kind)) for kind in Kind),
        timeline=timeline(summary),
        hours=_table(_hours_caption(summary), ("hour", *_BY_TYPE), _hours(summary)),
        types=plot + f'<div class="card">{_types(summary)}</div>',
        fates=_fates(summary.totals),
        examples="".join(_examples(kind, summary) for kind in Kind if kind in found),
    )


def _verdict(totals: Counts, found: Mapping[Kind, int]) -> str:
    judged = totals.messages - totals.outside
    if not found:
        return f"Nothing was found in {judged:,} messages."
    kinds = ", ".join(f"{number:,} {_word(kind)}" for kind, number in found.items())
    return f"Found in {judged:,} messages: {kinds}."


def _tile(kind: Kind, number: int) -> str:
    shade = "" if number else ' class="none"'
    return (
        f'<li{shade} style="--colour: {COLOURS[kind]}"><strong>{number:,}</strong><b>{_word(kind)}</b>'
        f"<span>{kind.meaning}</span></li>"
    )


def _hours(summary: Summary) -> Iterable[Sequence[str | int]]:
    for each in summary.hours[-_MOST_HOURS:]:
        name = "without a time, or not judged" if each.hour is None else _moment(each.hour)
        yield (name, *_numbers(each))


def _hours_caption(summary: Summary) -> str:
    left_out = len(summary.hours) - _MOST_HOURS
    more = f"; {left_out:,} earlier ones are in summary.json" if left_out > 0 else ""
    return f"Messages and findings by the hour in which they were sent{more}"


def _types(summary: Summary) -> str:
    rows: list[Sequence[str | int]] = [
        (f"{each.type or 'no type'} · {each.consumer}", *_numbers(each)) for each in summary.types
    ]
    return _table("Messages and findings by consumer and message type", ("type · consumer", *_BY_TYPE), rows)


def _numbers(counts: Counts) -> list[int]:
    return [getattr(counts, name) for name in _BY_TYPE]


def _fates(totals: Counts) -> str:
    rows = [(f"{_word(fate)}: {meaning}", totals.of(fate)) for fate, meaning in _FATES.items()]
    rows.append((f"together, from {totals.sends:,} rows of the log", totals.messages))
    return _table("Each message has one of these", ("", "messages"), rows)


def _examples(kind: Kind, summary: Summary) -> str:
    shown = [each for each in summary.findings if each.kind is kind]
    total = summary.totals.of(kind)
    caption = f"{len(shown):,} of {total:,}, the oldest first" if len(shown) < total else "All of them"
    heads = ("id", "type", "consumer", "sent", "claimed", "sends", "pending")
    rows = "".join(_finding(each) for each in shown)
    return (
        f'<h3 style="--colour: {COLOURS[kind]}">{_word(kind).capitalize()}</h3><p>{_NEXT[kind]}</p>'
        f'<div class="card words">{_framed(caption, heads, rows)}</div>'
    )


def _finding(each: Finding) -> str:
    told = (each.type, each.consumer, _moment(each.sent_at), _moment(each.claimed_at))
    named = each.id if each.id is not None else f"none ({each.fault})"
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in told)
    return f'<tr><td class="id">{escape(named)}</td>{cells}<td>{each.sends}</td><td>{each.pending}</td></tr>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    return _framed(caption, heads, "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows))


def _framed(caption: str, heads: Sequence[str], rows: str) -> str:
    head = "".join(f'<th scope="col">{escape(_plain(name))}</th>' for name in heads)
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: str | int) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f"<td>{value:,}</td>" if value else '<td class="zero">0</td>'


def _word(word: Kind | Fate) -> str:
    return _plain(word.value)


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _moment(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _duration(seconds: float) -> str:
    """As people say it.

    Example:
        >>> _duration(900), _duration(86_400), _duration(5_430)
        ('15 minutes', '1 day', '1 hour 30 minutes 30 seconds')
    """
    parts, left = [], round(seconds)
    for size, word in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        number, left = divmod(left, size)
        parts += [f"{number} {word}{'s' * (number > 1)}"] if number else []
    return " ".join(parts) or "none"
