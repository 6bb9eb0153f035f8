"""What users say to the test kit, checked: crash points, kinds of findings, tables."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from sqlalchemy import MetaData

from idemp.errors import ConfigurationError
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.findings import Kind

if TYPE_CHECKING:
    from sqlalchemy import Engine

ALL_POINTS: Final = tuple(point.name for point in CRASH_POINTS)
KINDS: Final[tuple[str, ...]] = get_args(Kind)


def crash_points(given: str | Iterable[str]) -> list[str]:
    """Names of crash points; one name counts as a list of one.

    Raises:
        ValueError: there is no such crash point.

    Example:
        >>> crash_points("after commit")
        ['after commit']
    """
    points = _listed(given)
    unknown = [point for point in points if point not in ALL_POINTS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no crash point; they are {', '.join(ALL_POINTS)}.")
    return points


def kinds(given: str | Iterable[str], *, but: Iterable[str] = ()) -> frozenset[Kind]:
    """Kinds of findings; one kind counts as a set of one.

    Args:
        given: their names.
        but: those that can't be looked for here.

    Raises:
        ConfigurationError: there is no such kind, or not here: it would be looked for nowhere, and nothing be found.

    Example:
        >>> sorted(kinds({"clock", "random"}))
        ['clock', 'random']
        >>> kinds({"clok"})
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: There is no finding of the kind 'clok'. Did you mean 'clock'? ...
    """
    wanted = _listed(given)
    for kind in wanted:
        if kind not in KINDS:
            close = get_close_matches(kind, KINDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"There is no finding of the kind {kind!r}.{hint}", fix=f"The kinds are {', '.join(KINDS)}."
            )
        if kind in but:
            raise ConfigurationError(f"Nothing looks for {kind!r} here.", fix="assert_idempotent does.")
    return frozenset(cast("list[Kind]", wanted))


def make_tables(tables: Any, engine: Engine) -> None:
    """Make the user's tables: those of a `MetaData`, or of a declarative base, or by a function that is given the engine.

    Raises:
        ConfigurationError: it is none of these.

    Example:
        >>> from sqlalchemy import Column, Integer, MetaData, Table, create_engine, inspect
        >>> metadata, engine = MetaData(), create_engine("sqlite://")
        >>> _ = Table("sale", metadata, Column("id", Integer))
        >>> make_tables(metadata, engine)
        >>> inspect(engine).get_table_names()
        ['sale']
    """
    if tables is None:
        return
    metadata = getattr(tables, "metadata", tables)
    if isinstance(metadata, MetaData):
        metadata.create_all(engine)
    elif callable(tables):
        tables(engine)
    else:
        raise ConfigurationError(
            f"tables={tables!r:.80} are no tables.",
            fix="Give Base.metadata, or a function that makes the tables on the engine that it is given.",
        )


def _listed(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
