"""Tables and charts of docs/benchmarks.md, from the saved runs in docs/benchmarks: `python -m benchmarks.charts` writes both."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks import kills

DOCS = Path(__file__).parent.parent / "docs"
PAGE = "benchmarks.md"
RUNS = ("groups", "others", "slow", "peers")
CHARTS = {"fast": ("groups", "others"), "slow": ("slow",), "peers": ("peers",)}
"""Charts, and the runs that each shows."""

NAMES = {
    "naive": "naive: SELECT first, ORM, outbox row",
    "single": "idemp, one at a time (`IDEMP_GROUP=1`)",
    "groups": "idemp, groups of 20",
    "groups@.,IDEMP_COMMITS=each": "groups, each COMMIT waiting (`IDEMP_COMMITS=each`)",
    "groups, Core": "groups without the fast path (`IDEMP_FAST_PATH=false`)",
    "two databases": "groups, two databases by two-phase commit",
    "batch of 50": "idemp, `batch=50`",
    "lists of 200": "idemp, lists of 200, one statement a list",
    "duplicates": "idemp, duplicates",
    "four bare": "four bare processes",
    "four groups": "four processes, groups of 20",
    "bare asyncio": "bare asyncio: aio-pika and asyncpg without SQLAlchemy",
    "bare asyncio, psycopg": "bare asyncio: SQLAlchemy on psycopg",
    "bare asyncio, asyncpg": "bare asyncio: SQLAlchemy on asyncpg",
    "asyncio, psycopg": "idemp, `async def` on psycopg",
    "asyncio, asyncpg": "idemp, `async def` on asyncpg",
    "far bare": "database 2 ms away, bare",
    "far groups": "database 2 ms away, groups of 20",
    "far batch of 50": "database 2 ms away, `batch=50`",
    "far asyncio, psycopg": "database 2 ms away, `async def` on psycopg",
    "far asyncio, asyncpg": "database 2 ms away, `async def` on asyncpg",
}
"""Names of consumers on the page, where they differ from those on the command line."""

WIDTH, LEFT, RIGHT, ROW, TOP = 480, 180, 46, 26, 34
# The text has a background of its own, so it is readable on any page; browsers choose the colours by the reader's scheme.
STYLE = """
  rect.card { fill: #fff; stroke: #d0d7de } rect.bar { fill: #2a6fdb } line { stroke: #6e7781 }
  text { fill: #1f2328; font: 13px system-ui, sans-serif } text.end { text-anchor: end } .goal { stroke: #bc4c00; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    rect.card { fill: #161b22; stroke: #30363d } rect.bar { fill: #6ea8fe } line { stroke: #8b949e }
    text { fill: #e6edf3 } .goal { stroke: #ffa657 }
  }
"""


@dataclass
class Run:
    """Figures of a run, as they are saved.

    Attributes:
        messages: Messages that each consumer handles in a round.
        flush: Microseconds by which each flush of commits took longer.
        figures: For each consumer and unit, the figures of each round.
        compared: For each consumer, pairs of consumers whose ratio counts, the one that should be faster first, and its goal or 0.
    """

    messages: int
    flush: int
    figures: dict[str, dict[str, list[float]]]
    compared: dict[str, list[tuple[str, str, float]]]

    def each(self, name: str, unit: str) -> float:
        """Return the median for one message."""
        return statistics.median(self.figures[name][unit]) / self.messages

    def ratios(self, fast: str, slow: str) -> list[float]:
        """Return for each round how many times as fast the one consumer was as the other."""
        pairs = zip(self.figures[slow]["seconds"], self.figures[fast]["seconds"], strict=True)
        return [one / other for one, other in pairs]

    def pairs(self, name: str) -> Iterator[tuple[str, str, float]]:
        """Return the comparisons of a consumer; a variant of one has no goal of its own."""
        for fast, slow, goal in self.compared[name]:
            yield fast, slow, 0 if "@" in name else goal

    def rows(self, name: str) -> Iterator[str]:
        """Return the rows of a table for a consumer, one for each comparison."""
        first = f"{named(name)} | {1 / self.each(name, 'seconds'):,.0f} | {self.each(name, 'cpu') * 1e6:,.0f}"
        ratios = []
        for fast, slow, goal in self.pairs(name):
            other = named(slow) if fast == name else f"{fast} / {slow}"
            ratios.append(f"{other} | {quartiles(self.ratios(fast, slow))} | {f'{goal:g}' if goal else ''}")
        for ratio in ratios or [" |  | "]:
            yield f"| {first} | {ratio} |"
            first = " |  | "

    def table(self) -> str:
        """Return the table of a run."""
        rounds = len(next(iter(self.figures.values()))["seconds"])
        rows = [row for name in self.compared for row in self.rows(name)]
        head = "| consumer | a second | µs of CPU | compared with | ratio | goal |\n|---|--:|--:|---|---|--:|"
        return "\n".join([f"{rounds} rounds of {self.messages} messages.\n", head, *rows])


def named(name: str) -> str:
    return NAMES.get(name, name)


def quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f}\u00a0[{low:.2f}\u2011{high:.2f}]"  # in one line, also in a narrow table


def chart(runs: list[Run]) -> str:
    """Return an SVG with a bar for the first ratio of each consumer, its quartiles as a line, and its goal as a mark."""
    bars: dict[str, tuple[list[float], float]] = {}
    for run in runs:
        for name in run.compared:
            for fast, slow, goal in islice(run.pairs(name), 0 if "bare" in name else 1):
                ratio = statistics.quantiles(run.ratios(fast, slow), n=4)
                bars.setdefault(name.partition("@.,")[2] or name, (ratio, goal))
    scale = (WIDTH - LEFT - RIGHT) / max(max(ratio[2], goal) for ratio, goal in bars.values())
    height = TOP + ROW * len(bars) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>Messages a second, as a multiple of the other consumer's</title><style>{STYLE}</style>",
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        '<text x="12" y="22">ratio, with quartiles; dashed: as fast as the other; mark: goal</text>',
        f'<line x1="{LEFT + scale:.1f}" x2="{LEFT + scale:.1f}" y1="{TOP}" y2="{height - 10}" stroke-dasharray="3"/>',
    ]
    for number, (label, ((low, middle, high), goal)) in enumerate(bars.items()):
        y = TOP + ROW * number
        lines += [
            f'<text class="end" x="{LEFT - 8}" y="{y + 17}">{escape(label)}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y + 4}" width="{middle * scale:.1f}" height="{ROW - 10}" rx="2"/>',
            f'<line x1="{LEFT + low * scale:.1f}" x2="{LEFT + high * scale:.1f}" y1="{y + 12}" y2="{y + 12}"/>',
            f'<text class="end" x="{WIDTH - 10}" y="{y + 17}">{middle:.2f}</text>',
        ]
        if goal:
            x = f"{LEFT + goal * scale:.1f}"
            lines.append(f'<line class="goal" x1="{x}" x2="{x}" y1="{y + 1}" y2="{y + ROW - 3}"/>')
    return "\n".join([*lines, "</svg>", ""])


def pages(page: str) -> dict[str, str]:
    """Return the page with the tables of the saved runs, and its charts."""
    runs = {name: Run(**json.loads((DOCS / f"benchmarks/{name}.json").read_text())) for name in RUNS}
    for name, run in runs.items():
        place = re.compile(rf"(?<=<!-- table: {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        page = place.sub(lambda _, run=run: f"{run.table()}\n", page, count=1)
    killed = kills.table(json.loads((DOCS / "benchmarks/kills.json").read_text()))
    page = re.sub(r"(?<=<!-- table: kills -->\n).*?(?=<!-- end -->)", lambda _: f"{killed}\n", page, count=1, flags=re.DOTALL)
    charts = {f"benchmarks/{name}.svg": chart([runs[each] for each in shown]) for name, shown in CHARTS.items()}
    return {PAGE: page, **charts}


if __name__ == "__main__":
    for name, text in pages((DOCS / PAGE).read_text()).items():
        (DOCS / name).write_text(text)
