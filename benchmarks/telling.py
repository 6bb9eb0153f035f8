"""How the parts about the pipeline tell what they found: figures and goals, in the terminal, as JSON and on the page."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any, Final

from benchmarks.figures import machine, spread, versions
from benchmarks.results import save
from benchmarks.shows import verdicts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

HEADINGS: Final = {
    "bulk": "Chunks beside the server's own statements",
    "pipeline": "Spark beside the server's own statements",
    "far": "Ten million messages beside a million",
    "reading": "An inbox read into Spark",
    "reconcile": "A reconciliation beside a distinct count",
    "guard": "The guard against late duplicates",
    "twophase": "Two databases in one handling",
}
_PACKAGES: Final = ("idemp", "pyspark", "pyarrow", "psycopg", "sqlalchemy")


def figure(values: Sequence[float], unit: str) -> dict[str, Any]:
    """One line: what was measured in each round, or just once.

    Example:
        >>> figure([2.0], "s")
        {'unit': 's', 'median': 2.0}
    """
    measured = {"median": statistics.median(values)} if len(values) == 1 else spread(values)
    return {"unit": unit, **measured}


def goal(values: Sequence[float], target: float | None, unit: str = "", *, at_most: bool = False) -> dict[str, Any]:
    """A figure that has to reach something, and whether it does.

    Example:
        >>> goal([2.0, 2.0, 2.0], 1.5)["target_verdict"]
        'reached'
    """
    found = figure(values, unit)
    bounds = {"lower_bound": found["median"], "upper_bound": found["median"], **found}
    told = verdicts(bounds, {"target": target}, at_least=not at_most)
    return {**bounds, "target": target, "at_most": at_most, **told}


def found(where: str, figures: Mapping[str, Any], goals: Mapping[str, Any]) -> dict[str, Any]:
    """What a part answers: where it was measured, in a few words, and both kinds of figures by their names."""
    return {
        "machine": machine(), "versions": versions(*_PACKAGES), "where": where,
        "figures": dict(figures), "goals": dict(goals),
    }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that all of these parts have."""
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    parser.add_argument("--json", action="store_true")


def tell(name: str, told: dict[str, Any], options: argparse.Namespace) -> int:
    """Print it, and save it where that was asked for; 1 if a goal was not reached."""
    if options.save:
        save(name, told)
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        for what, *cells in rows(told):
            print(f"{what:36} {'  '.join(cell for cell in cells if cell)}")
    return int(any(each.get("target_verdict") == "not reached" for each in told["goals"].values()))


def rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What it is, what was measured, and what it had to reach."""
    for name, each in told["figures"].items():
        yield name, _measured(each), ""
    for name, each in told["goals"].items():
        sign = "≤" if each["at_most"] else "≥"
        wanted = f"{sign} {each['target']:g}: {each['target_verdict']}" if each["target"] is not None else ""
        yield name, _measured(each), wanted


def goals(parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Whatever these parts had to reach, for the page."""
    for name in HEADINGS:
        told = parts.get(name) or {"goals": {}}
        for what, each in told["goals"].items():
            if each["target"] is not None:
                yield {"where": told["where"], "name": what, "prototype": None, **each}


def _measured(each: Mapping[str, Any]) -> str:
    """
    Example:
        >>> _measured({"unit": "s", "median": 1200.0})
        '1,200 s'
    """
    told = _number(each["median"])
    if "lower_quartile" in each:
        told += f" ({_number(each['lower_quartile'])} to {_number(each['upper_quartile'])})"
    return f"{told} {each['unit']}".rstrip()


def _number(value: float) -> str:
    """As many digits as say something.

    Example:
        >>> [_number(each) for each in (0.4567, 45.67, 456.7, 0.0)]
        ['0.46', '45.7', '457', '0']
    """
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"  # noqa: PLR2004
