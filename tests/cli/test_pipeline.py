"""`idemp pipeline` without Spark: what is said before it starts. The rest is in tests/spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp import spark

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Shop

BACKFILL = ("pipeline", "backfill", "--input", "archive", "--id", "id", "--type", "shop.Order")


def test_missing_packages_are_named(cli: Cli, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "_PACKAGES", ("no_such_package",))
    answer = cli(*BACKFILL, shop.where, "--json")
    assert (answer.code, answer.error["kind"]) == (3, "ConfigurationError")
    assert "no_such_package" in answer.error["message"]
    assert "idemp[spark]" in answer.error["fix"]


def test_help_needs_nothing(cli: Cli) -> None:
    answer = cli("pipeline", "backfill", "--help")
    assert answer.code == 0
    assert "--dry-run" in answer.out


def test_reconcile_says_the_same_before_it_looks_for_a_log(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("pipeline", "reconcile", "--sent", "nowhere", "--consumer", "shop", "--id", "id", "--time", "at")
    assert cli("pipeline", "reconcile", "--help").code == 0
    assert cli(*asked[:-2]).code == 2
    monkeypatch.setattr(spark, "_PACKAGES", ("no_such_package",))
    answer = cli(*asked, "--json")
    assert (answer.code, "no_such_package" in answer.error["message"]) == (3, True)
