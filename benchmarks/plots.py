"""Plots as SVG, the same bytes for the same results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.page import far_pair, pair_name, real_pair

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

mpl.rcParams.update({"svg.hashsalt": "idemp", "svg.fonttype": "none", "font.size": 9})

OURS: Final = "#2b6cb0"
OTHERS: Final = "#a0aec0"
ACROSS: Final = ("naive", "window", "batch 50", "batch handler 200")


def draw(found: Mapping[str, Any], folder: Path) -> list[str]:
    """Their names."""
    drawn = []
    rates = found.get("rates")
    if rates is None:
        return drawn
    if real := real_pair(rates):
        _save(_throughput(real, rates["peers"]), folder / "throughput.svg")
        drawn.append("throughput.svg")
    others = [pair for pair in rates["pairs"] if pair["variants"] and pair is not far_pair(rates)]
    if len(others) > 1:
        _save(_across(others), folder / "across.svg")
        drawn.append("across.svg")
    return drawn


def _throughput(pair: Mapping[str, Any], peers: Mapping[str, Any]) -> Figure:
    """Bars from the slowest to the fastest, with quartiles."""
    names = sorted(
        (name for name in pair["variants"] if not name.startswith("limit:")),
        key=lambda name: pair["variants"][name]["median"],
    )
    figures = [pair["variants"][name] for name in names]
    medians = [each["median"] for each in figures]
    whiskers = [
        [each["median"] - each["lower_quartile"] for each in figures],
        [each["upper_quartile"] - each["median"] for each in figures],
    ]
    figure = Figure(figsize=(7, 0.24 * len(names) + 0.9), layout="tight")
    axes = figure.subplots()
    colours = [OTHERS if name in peers or _is_plain(name) else OURS for name in names]
    axes.barh(names, medians, xerr=whiskers, color=colours, error_kw={"linewidth": 0.8})
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as bare (blue: idemp)")
    axes.set_title(pair_name(pair), fontsize=9)
    return figure


def _across(pairs: list[Any]) -> Figure:
    """One group of bars for each database and broker."""
    figure = Figure(figsize=(7, 3.4), layout="tight")
    axes = figure.subplots()
    width = 0.8 / len(ACROSS)
    for place, name in enumerate(ACROSS):
        heights = [pair["variants"].get(name, {}).get("median", 0.0) for pair in pairs]
        axes.bar([number + place * width for number in range(len(pairs))], heights, width, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(
        [number + 0.4 - width / 2 for number in range(len(pairs))],
        [pair_name(pair).replace(" x ", "\n") for pair in pairs],
        fontsize=7,
    )
    axes.set_ylabel("times as fast as bare")
    axes.legend(fontsize=7)
    return figure


def _is_plain(name: str) -> bool:
    return "bare" in name or "without idemp" in name or name == "naive"


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
