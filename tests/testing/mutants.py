"""Runs single cases of a conformance suite against adapters, sound ones and deliberately broken ones.

A case is called as the plain function that it is, with the parameters of its `parametrize` mark.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Fixtures = Callable[[], AbstractContextManager[Mapping[str, Any]]]


@dataclass(frozen=True)
class Mutant:
    """A broken adapter, and the case that has to notice."""

    made: type[Any]
    case: str

    @property
    def breaks(self) -> str:
        """What is wrong with it."""
        return inspect.cleandoc(self.made.__doc__ or "")

    def __str__(self) -> str:
        return f"{self.made.__name__}-{self.case.removeprefix('test_')}"


class Table:
    """The mutants of one suite, in the order of their definition."""

    def __init__(self) -> None:
        self.mutants: list[Mutant] = []

    def breaks(self, *cases: str) -> Callable[[type[T]], type[T]]:
        """Enter the class that follows, once for each case that must fail on it."""

        def enter(made: type[T]) -> type[T]:
            self.mutants += [Mutant(made, f"test_{case}") for case in cases]
            return made

        return enter

    @property
    def cases(self) -> set[str]:
        """The cases that some mutant breaks."""
        return {mutant.case for mutant in self.mutants}


def cases_of(suite: type[Any]) -> set[str]:
    """The names of a suite's cases."""
    return {name for name in dir(suite) if name.startswith("test_")}


def failure(suite: Any, case: str, fixtures: Fixtures) -> BaseException | None:
    """What the case raises with the first set of its parameters that it fails with; each gets fixtures of its own."""
    function = getattr(suite, case)
    names = set(inspect.signature(function).parameters)
    for parameters in _parameter_sets(function):
        with fixtures() as given:
            try:
                function(**{name: value for name, value in given.items() if name in names}, **parameters)
            except (Exception, pytest.fail.Exception) as error:
                return error
    return None


def _parameter_sets(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        yield dict(zip((mark.args[0] for mark in marks), values, strict=True))
