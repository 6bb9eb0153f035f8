"""The page of the benchmarks is what its results give, and says what they don't reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import telling
from benchmarks.page import page
from benchmarks.results import FOLDER, load

pytestmark = pytest.mark.slow

RESULTS = load(Path(__file__).with_name("results"))  # of runs so short that their figures mean nothing, but for designs


def rows(text: str, of: str) -> list[list[str]]:
    """The table below a heading."""
    _, _, below = text.partition(f"## {of}")
    lines = below.split("\n## ", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]


def test_the_page_is_what_the_committed_results_give() -> None:
    """To mend it: `python -m benchmarks report`."""
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == page(load())


def test_every_goal_is_told_and_the_missed_ones_again() -> None:
    text = page(RESULTS)
    shown = rows(text, "What it shows")
    assert len(shown) == 5 + 1 + 2 + 1  # rates, CPU, growth, purge
    missed = [row for row in shown for cell in row[4:] if "not reached" in cell]
    assert [row[:2] for row in rows(text, "What does not reproduce")] == [row[:2] for row in missed]
    assert ["PostgreSQL x RabbitMQ", "window / DBOS"] in [row[:2] for row in missed]


def test_goals_are_about_postgresql_with_rabbitmq() -> None:
    assert [row for row in rows(page(RESULTS), "What it shows") if "one file" in row[0]] == []


def test_peers_stand_with_what_they_promise() -> None:
    told = {name.partition(" (")[0]: cells for name, *cells in rows(page(RESULTS), "Peers")}
    assert list(told) == ["DBOS", "Powertools", "event-forge", "FastStream"]
    assert told["DBOS"][1].isdigit()
    assert told["Powertools"][0].startswith("RuntimeError: its figures are void")
    assert told["event-forge"][0] == "not run"
    assert all(promises for _, _, promises, _ in told.values())


def test_limits_are_no_variants() -> None:
    text = page(RESULTS)
    assert [row[0] for row in rows(text, "Limits")] == ["pgbench, bare", "py-amqp, publish and confirm"]
    assert not [row for row in rows(text, "PostgreSQL and RabbitMQ") if "limit" in row[0]]


def test_designs_stand_side_by_side() -> None:
    for title, names in RESULTS["designs"]["designs"].items():
        _, _, below = page(RESULTS).partition(f"### {title.capitalize()}")
        told = [
            line.split(" | ")[0].strip("| ") for line in below.partition("##")[0].splitlines() if line.startswith("|")
        ]
        assert told[2:] == list(names)


def test_a_pair_without_figures_is_named() -> None:
    rates = RESULTS["rates"]
    none = {
        "servers": {},
        "variants": {},
        "shows": [],
        "failed": {"all variants": "FileNotFoundError: redis is missing"},
    }
    lost = {"database": "postgresql", "broker": "redis", "round_trip": 0.0, **none}
    text = page({"rates": {**rates, "pairs": [*rates["pairs"], lost]}})
    assert "No figures for *all variants* on PostgreSQL x Redis: FileNotFoundError: redis is missing" in text


def test_whatever_is_missing_is_left_out() -> None:
    for part in RESULTS:
        text = page({name: found for name, found in RESULTS.items() if name != part})
        assert text.count("\n## ") < page(RESULTS).count("\n## ")
    assert "no results here yet" in page({})


def test_plots_are_the_same_bytes_for_the_same_results(tmp_path: Path) -> None:
    from benchmarks.plots import draw

    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        assert draw(RESULTS, folder) == ["throughput.svg", "across.svg"]
    for name in ("throughput.svg", "across.svg"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert "<dc:date>" not in (first / name).read_text(encoding="utf-8")


def test_parts_of_the_pipeline_tell_figures_and_goals() -> None:
    figures = {"making the file": telling.figure([7.9], "s")}
    goals = {
        "a look": telling.goal([1.7, 1.8, 1.9], 5.0, "µs", at_most=True),
        "rate": telling.goal([0.4, 0.5, 0.6], 1.0),
        "by the way": telling.goal([2.0, 2.0, 2.0], None),
    }
    text = page({"guard": telling.found("8,000,000 ids", figures, goals)})
    assert rows(text, telling.HEADINGS["guard"]) == [
        ["making the file", "7.90 s", ""],
        ["a look", "1.80 (1.75 to 1.85) µs", "≤ 5: reached"],
        ["rate", "0.50 (0.45 to 0.55)", "≥ 1: not reached"],
        ["by the way", "2 (2 to 2)", ""],
    ]
    assert [row[:2] for row in rows(text, "What it shows")] == [["8,000,000 ids", "a look"], ["8,000,000 ids", "rate"]]
    assert [row[1] for row in rows(text, "What does not reproduce")] == ["rate"]
