"""The page's plots, as SVG that stands in HTML: the same bytes for the same summary."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib import dates
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from idemp.spark.reconcile.terms import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from idemp.spark.reconcile.summary import HourCounts, Summary, TypeCounts

# Told apart by people who see fewer colours, too (Okabe and Ito), and never by colour alone: the tables have the numbers.
COLOURS: Final[Mapping[Kind, str]] = {
    Kind.LOST: "#d55e00",
    Kind.CONFLICTING: "#cc79a7",
    Kind.UNDISPATCHED: "#e69f00",
    Kind.UNKNOWN_ORIGIN: "#56b4e9",
    Kind.UNUSABLE: "#4d4d4d",
    Kind.DUPLICATED: "#009e73",
    Kind.LATE: "#0072b2",
}
_HANDLED: Final = "#b8c4d0"
_OTHERS: Final = "#e3c9ad"
_HOUR: Final = timedelta(hours=1)
_WIDTHS: Final = (_HOUR, timedelta(hours=6), timedelta(days=1), timedelta(days=7), timedelta(days=28))
_MOST_BINS: Final = 500
MOST_TYPES: Final = 12
_WIDTH: Final = 9.6
_ROW: Final = 0.34


def timeline(summary: Summary) -> str:
    """Messages by when they were sent, and below them the findings, on the same axis."""
    bins = _binned([(each.hour, each) for each in summary.hours if each.hour is not None])
    figure = _figure(4.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    handled = [sum(each.handled for each in part) for _, part in bins.parts]
    others = [sum(each.messages - each.handled for each in part) for _, part in bins.parts]
    _stacked(above, bins, {"sent and handled": (handled, _HANDLED), "all others": (others, _OTHERS)}, "messages")
    found = {_word(kind): (_sums(bins, kind), colour) for kind, colour in COLOURS.items()}
    _stacked(below, bins, {word: each for word, each in found.items() if any(each[0])}, "findings")
    below.xaxis.set_major_locator(locator := dates.AutoDateLocator(tz=UTC, maxticks=9))  # type: ignore[no-untyped-call]
    below.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    if bins.parts:
        below.set_xlim(bins.edges[0], bins.edges[-1])
    return _svg(figure, "timeline", "Messages and findings over time", _in_words(bins))


def by_type(summary: Summary) -> str:
    """Findings by consumer and message type, those with most on top."""
    ranked = sorted(summary.types, key=lambda each: (-_all(each), each.consumer, each.type))
    shown = [each for each in ranked if _all(each)][:MOST_TYPES][::-1]
    figure = _figure(0.9 + _ROW * max(len(shown), 1))
    axes = figure.subplots()
    names = [f"{each.type or 'no type'}\n{each.consumer}" for each in shown]
    ends = [0] * len(shown)
    for kind, colour in COLOURS.items():
        numbers = [each.of(kind) for each in shown]
        if any(numbers):
            axes.barh(names, numbers, left=ends, color=colour, label=_word(kind), height=0.62)
            ends = [end + number for end, number in zip(ends, numbers, strict=True)]
    for name, end in zip(names, ends, strict=True):
        axes.annotate(f"{end:,}", (end, name), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlabel("findings")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.08)
    _bare(axes)
    _legend(axes)
    words = "; ".join(f"{each.type or 'no type'} of {each.consumer}: {_all(each):,}" for each in shown[::-1])
    return _svg(figure, "types", "Findings by consumer and message type", f"Findings: {words}.")


@dataclass(frozen=True)
class _Bins:
    """Hours, or longer spans where there are too many, without gaps."""

    width: timedelta
    parts: Sequence[tuple[datetime, list[HourCounts]]]

    @property
    def edges(self) -> list[float]:
        """Of all of them, as matplotlib counts time."""
        starts = [start for start, _ in self.parts]
        return [float(dates.date2num(moment)) for moment in (*starts, starts[-1] + self.width)]  # type: ignore[no-untyped-call]


def _binned(hours: Sequence[tuple[datetime, HourCounts]]) -> _Bins:
    if not hours:
        return _Bins(_HOUR, [])
    first, last = hours[0][0], hours[-1][0]
    width = next((each for each in _WIDTHS if (last - first) / each < _MOST_BINS), (last - first) / _MOST_BINS)
    parts: list[tuple[datetime, list[HourCounts]]] = [
        (first + number * width, []) for number in range((last - first) // width + 1)
    ]
    for hour, counts in hours:
        parts[(hour - first) // width][1].append(counts)
    return _Bins(width, parts)


def _sums(bins: _Bins, kind: Kind) -> list[int]:
    return [sum(each.of(kind) for each in part) for _, part in bins.parts]


def _stacked(axes: Axes, bins: _Bins, layers: Mapping[str, tuple[list[int], str]], label: str) -> None:
    ends = [0] * len(bins.parts)
    for word, (numbers, colour) in layers.items():
        tops = [end + number for end, number in zip(ends, numbers, strict=True)]
        if tops:
            axes.stairs(tops, bins.edges, baseline=ends, fill=True, color=colour, label=word, linewidth=0)
        ends = tops
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0, top=max([*ends, 1]) * 1.08)
    _bare(axes)
    if any(ends):
        _legend(axes)


def _in_words(bins: _Bins) -> str:
    if not bins.parts:
        return "There are no messages."
    first, last = bins.parts[0][0], bins.parts[-1][0] + bins.width
    totals = {start: sum(_all(each) for each in part) for start, part in bins.parts}
    worst = max(totals, key=lambda start: totals[start])
    span = f"From {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"
    if not totals[worst]:
        return f"{span} there are no findings."
    until = worst + bins.width
    return f"{span}; most findings, {totals[worst]:,}, from {worst:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}."


def _all(counts: HourCounts | TypeCounts) -> int:
    return sum(counts.of(kind) for kind in Kind)


def _word(kind: Kind) -> str:
    return kind.value.replace("_", " ")


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _bare(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=3, colors="#444")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=7, frameon=False, borderaxespad=0, handlelength=1)


def _svg(figure: Figure, name: str, title: str, words: str) -> str:
    """The figure with a title and a description, for those who don't see it."""
    drawn = io.StringIO()
    look: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.family": ["sans-serif"], "font.size": 9}
    with mpl.rc_context(look):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plot = re.sub(r"<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.DOTALL)
    begun = f'<svg role="img" aria-labelledby="{name}-title {name}-words" '
    told = f'<title id="{name}-title">{title}</title><desc id="{name}-words">{escape(words)}</desc>'
    beginning, _, rest = plot[plot.index("<svg ") :].partition(">")
    return f"{beginning.replace('<svg ', begun, 1)}>{told}{rest}"
