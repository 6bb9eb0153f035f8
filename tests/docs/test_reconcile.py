"""The pages about reconciliation say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from idemp.cli.exits import ExitCode
from idemp.spark.reconcile import Counts, Finding, Kind, Summary

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = (DOCS / "how-to/reconcile.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference/reconciliation.md").read_text(encoding="utf-8")


def test_schema_is_that_of_the_code() -> None:
    """To mend it: write `Summary.model_json_schema(mode="serialization")` there, with an indent of two."""
    written = json.loads((DOCS / "reference/reconciliation.schema.json").read_text(encoding="utf-8"))
    assert written == Summary.model_json_schema(mode="serialization")


def test_all_fields_are_explained() -> None:
    for model, heading in ((Summary, "# Reconciliation"), (Counts, "**Counts**"), (Finding, "**Findings**")):
        table = REFERENCE[REFERENCE.index(heading) :].partition("\n\n|")[2].partition("\n\n")[0]
        firsts = [line.strip("|").partition("|")[0] for line in table.splitlines()]
        told = {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)}
        assert told == set(model.model_fields), model


def test_all_kinds_are_explained() -> None:
    assert re.findall(r"^\| `(\w+)` \| ", HOW_TO, re.MULTILINE) == [kind.value for kind in Kind]
    for kind in Kind:
        assert f"`{kind.value}` | {kind.meaning} |" in HOW_TO, kind
    assert f"{ExitCode.FINDINGS:d} that something was" in HOW_TO
