"""What is wrong with options, in short sentences: pydantic's findings, and the name that was probably meant."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic import ValidationError


def describe_errors(error: ValidationError, known: Iterable[str]) -> list[str]:
    """What pydantic found, as short sentences; an unknown option comes with the nearest valid one."""
    return [describe_finding(finding, known) for finding in error.errors(include_url=False)]


def describe_finding(finding: Mapping[str, Any], known: Iterable[str], place: str | None = None) -> str:
    """One of pydantic's findings as a short sentence.

    Args:
        finding: as `ValidationError.errors` has it.
        known: the valid names.
        place: how to call the place; default the path to it.
    """
    path = ".".join(str(part) for part in finding["loc"])
    if finding["type"] == "extra_forbidden":
        return f"unknown option {path!r}. {nearest(path.rpartition('.')[2], known)}"
    said = f"{path or 'options'}: " if place is None else place
    return f"{said}{finding['msg'].removeprefix('Value error, ')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known name nearest to an unknown one.

    Example:
        >>> nearest("retentoin", ["retention", "claim"])
        "Did you mean 'retention'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(names)}."
