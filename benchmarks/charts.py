"""Tables and a chart of saved runs: `python -m benchmarks.charts FILE [FILE …]` prints Markdown."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHART = """```mermaid
xychart-beta horizontal
    title "Messages a second, as a multiple of another consumer's"
    x-axis [{names}]
    y-axis "ratio"
    bar [{ratios}]
```"""


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

    def rows(self, name: str) -> Iterator[str]:
        """Return the rows of a table for a consumer, one for each comparison."""
        first = f"{name} | {1 / self.each(name, 'seconds'):,.0f} | {self.each(name, 'cpu') * 1e6:,.0f}"
        pairs = self.compared[name]
        ratios = [
            f"{slow if fast == name else f'{fast} / {slow}'} | {quartiles(self.ratios(fast, slow))} | {goal or ''}"
            for fast, slow, goal in pairs
        ]
        for ratio in ratios or [" | | "]:
            yield f"| {first} | {ratio} |"
            first = " | | "


def quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}–{high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what `python -m benchmarks --save FILE` wrote")
    bars = {}
    for path in parser.parse_args().files:
        run = Run(**json.loads(path.read_text()))
        rounds = len(next(iter(run.figures.values()))["seconds"])
        slower = f"\nEach flush of commits takes {run.flush} µs longer." if run.flush else ""
        print(f"Medians of {rounds} rounds of {run.messages} messages, with quartiles.{slower}\n")
        print("| consumer | a second | µs of CPU | compared with | ratio | goal |\n|---|---|---|---|---|---|")
        for name, pairs in run.compared.items():
            print("\n".join(run.rows(name)))
            for fast, slow, _ in pairs:
                bars[f"{fast} / {slow}" + (f" (+{run.flush} µs)" if run.flush else "")] = statistics.median(
                    run.ratios(fast, slow)
                )
        print()
    print(
        CHART.format(names=", ".join(f'"{name}"' for name in bars), ratios=", ".join(f"{ratio:.2f}" for ratio in bars.values()))
    )


if __name__ == "__main__":
    main()
