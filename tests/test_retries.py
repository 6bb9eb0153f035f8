"""Pauses between attempts, and which exceptions get another one."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp import ConfigurationError, Idempotent, Policy
from idemp.overrides import merged_policy
from idemp.retries import MAX_DELAYS, exponential, parse_delays, retries, spread


class SoldOut(LookupError):
    """A failure of the shop's own."""


def seconds(policy: Policy, attempts: int = 5) -> list[float]:
    return [policy.retry_delay(attempt).total_seconds() for attempt in range(1, attempts + 1)]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2s", [2, 2, 2, 2, 2]),
        (0.5, [0.5] * 5),
        (["1s", "10s"], [1, 10, 10, 10, 10]),
        (exponential("1s", longest="5s"), [1, 2, 4, 5, 5]),
        ({"first": "1s", "factor": 10, "longest": "1m"}, [1, 10, 60, 60, 60]),
        ({"first": "5m"}, [300, 600, 600, 600, 600]),
        ({"first": "1h", "longest": "1m"}, [60] * 5),
    ],
    ids=str,
)
def test_fixed_listed_and_exponential(written: Any, meant: list[float]) -> None:
    assert seconds(Idempotent(retry_delays=written)) == meant
    assert seconds(merged_policy("t", None, {"retry_delays": written})) == meant


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": "0s"}, {"factor": 1}, {"factor": 0.5}, {"frist": "1s"}, {"factor": "two"}, ["1s"] * (MAX_DELAYS + 1), [],
        "31d", {"first": "1ms", "factor": 1.01, "longest": "30d"}, None,
    ],
    ids=str,
)  # fmt: skip
def test_no_delays(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry_delays"):
        Policy(retry_delays=wrong)


@given(st.integers(1, 20), st.floats(0, 1), st.lists(st.integers(0, 10_000), min_size=1, max_size=8))
def test_each_pause_is_one_that_was_announced(attempt: int, jitter: float, delays: list[int]) -> None:
    """Brokers that wait by queue declare one for each."""
    policy = Policy(retry_delays=[timedelta(seconds=delay) for delay in delays], retry_jitter=jitter)
    plain = timedelta(seconds=delays[min(attempt, len(delays)) - 1])
    delay = policy.retry_delay(attempt)
    assert delay in policy.all_delays
    assert plain * (1 - jitter) - timedelta(microseconds=2) <= delay <= plain * (1 + jitter) + timedelta(microseconds=2)


def test_jitter_spreads() -> None:
    policy = Policy(retry_delays="10s", retry_jitter=0.5)
    assert {policy.retry_delay(1) for _ in range(200)} == set(spread(timedelta(seconds=10), 0.5))


@pytest.mark.parametrize(
    ("retry_on", "refuse_on", "again", "parked"),
    [
        ([], [], [ValueError(), SoldOut()], []),
        ([], [LookupError], [ValueError()], [SoldOut(), KeyError()]),
        ([TimeoutError], [], [TimeoutError()], [OSError(), ValueError()]),
        ([SoldOut], [LookupError], [SoldOut()], [KeyError(), ValueError()]),
        ([LookupError], [SoldOut], [KeyError()], [SoldOut(), ValueError()]),
        (OSError, "json.JSONDecodeError", [TimeoutError()], [ValueError()]),
        (["tests.test_retries.SoldOut"], [], [SoldOut()], [LookupError()]),
    ],
)
def test_the_nearest_rule_decides(retry_on: Any, refuse_on: Any, again: list[Any], parked: list[Any]) -> None:
    policy = Policy(retry_on=retry_on, refuse_on=refuse_on)
    assert [policy.retries(error) for error in again] == [True] * len(again)
    assert [policy.retries(error) for error in parked] == [False] * len(parked)


@pytest.mark.parametrize("wrong", ["NoSuchError", "no.such.module.Error", "json.dumps", "SystemExit", 7, [int]])
def test_no_exceptions(wrong: Any) -> None:
    for option in ("retry_on", "refuse_on"):
        with pytest.raises(ConfigurationError, match=re.escape(option)):
            Policy(**{option: wrong})


def test_one_class_in_both_lists() -> None:
    with pytest.raises(ConfigurationError, match="both name OSError"):
        Policy(retry_on=OSError, refuse_on=[OSError])


def test_delays_of_a_file_and_of_code_are_the_same() -> None:
    assert parse_delays({"first": "1s", "factor": 2, "longest": "8s"}) == exponential("1s", factor=2, longest="8s")


def test_without_rules_everything_runs_again() -> None:
    assert retries(Exception(), [], [])
