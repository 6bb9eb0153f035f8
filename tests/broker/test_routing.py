"""Topic patterns."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp.broker.routing import matches


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("orders.Placed", "orders.Placed", True),
        ("orders.Placed", "orders.placed", False),
        ("orders.Placed", "orders.Placed.eu", False),
        ("*", "orders", True),
        ("*", "", False),
        ("*", "a.b", False),
        ("*.*", "a.b", True),
        ("a.*", "a.", True),
        ("#", "", True),
        ("#", "a.b.c", True),
        ("a.#", "a", True),
        ("a.#", "ab", False),
        ("#.c", "a.b.c", True),
        ("#.c", "c", True),
        ("a.#.c", "a.c", True),
        ("a.#.c", "a.b.b.c", True),
        ("a.#.c", "a.b.b", False),
        ("#.*", "", False),
        ("#.*", "a", True),
        ("*.#.*", "a", False),
        ("", "", True),
        ("", "a", False),
        ("a*", "ab", False),
        ("a*", "a*", True),
        ("a#", "ab", False),
        ("a", "*", False),
        ("a", "#", False),
    ],
)
def test_rules(pattern: str, key: str, expected: bool) -> None:
    assert matches(pattern, key) is expected


def reference(pattern: tuple[str, ...], key: tuple[str, ...]) -> bool:
    """The rules, word by word, as slow as they read."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return reference(pattern[1:], key) or (bool(key) and reference(pattern, key[1:]))
    return bool(key) and pattern[0] in {"*", key[0]} and reference(pattern[1:], key[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=6),
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=6),
)
def test_like_the_reference(pattern: list[str], key: list[str]) -> None:
    assert matches(".".join(pattern), ".".join(key)) is reference(tuple(pattern), tuple(key))


@given(st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=6))
def test_a_pattern_takes_the_key_that_it_spells(pattern: list[str]) -> None:
    assert matches(".".join(pattern), ".".join("a" if word in {"*", "#"} else word for word in pattern))


def test_no_pattern_takes_exponential_time() -> None:
    pattern, key = ".".join(["#", "a"] * 60), ".".join(["a"] * 200 + ["b"])
    since = time.monotonic()
    assert not matches(pattern, key)
    assert time.monotonic() - since < 5
