"""Results as files: JSON as it was measured, and the page and the plots made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "benchmarks"
PARTS: Final = (
    "rates", "where", "designs", "cpu", "growth", "purge", "bulk", "pipeline", "far", "reading", "reconcile", "guard",
    "twophase",
)  # fmt: skip


def save(name: str, found: dict[str, Any], folder: Path = FOLDER) -> None:
    """Write what one part has found."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def load(folder: Path = FOLDER) -> dict[str, Any]:
    """What there is, by part."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items() if path.exists()}
