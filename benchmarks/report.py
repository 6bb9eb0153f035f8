"""`python -m benchmarks report`: the page and the plots, made anew of the JSON below docs/benchmarks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from benchmarks.page import page
from benchmarks.results import FOLDER, load

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Write them."""
    argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__).parse_args(arguments)
    found = load()
    drawn = []
    try:
        from benchmarks.plots import draw
    except ImportError as error:
        print(f"no plots: {error}; `make bench` installs what it takes", file=sys.stderr)
    else:
        drawn = draw(found, FOLDER)
    (FOLDER / "README.md").write_text(page(found), encoding="utf-8")
    print(f"written: {', '.join(['README.md', *drawn])}", file=sys.stderr)
    return 0
