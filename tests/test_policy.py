"""Policies: options, durations, and who has the last word."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from idemp import Fingerprint, Idempotent, Key, Policy, Previous
from idemp.durations import parse_duration
from idemp.errors import ConfigurationError
from idemp.findings import nearest
from idemp.overrides import check_override, merged_policy


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (timedelta(days=1), timedelta(days=1)), (90, timedelta(seconds=90)), (1.5, timedelta(seconds=1.5)),
        ("30s", timedelta(seconds=30)), ("15m", timedelta(minutes=15)), ("12h", timedelta(hours=12)),
        ("7d", timedelta(days=7)), ("500ms", timedelta(milliseconds=500)), ("1h30m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)), (" 1 d 2 h ", timedelta(hours=26)),
    ],
)  # fmt: skip
def test_durations(written: Any, meant: timedelta) -> None:
    assert parse_duration(written) == meant


@pytest.mark.parametrize(
    "written", ["", "7", "7w", "d", "-1s", "1s later", None, True, [], float("nan"), 1e300, "9" * 30 + "d"]
)
def test_no_durations(written: Any) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(written)
    with pytest.raises(ConfigurationError, match="retention"):
        Policy(retention=written)


def test_every_default_is_the_safe_one() -> None:
    policy = Idempotent()
    assert policy.idempotent
    assert not Policy().idempotent
    assert (policy.key.name, policy.claim, policy.redispatch) == ("message_id", "early", "always")
    assert (policy.on_conflict, policy.late, policy.fingerprint) == ("park", "park", Fingerprint())
    assert (policy.retention, policy.claim_wait) == (timedelta(days=7), timedelta(seconds=2))


@pytest.mark.parametrize(
    "options",
    [
        {"retention": 0}, {"retention": "-1s"}, {"retention": timedelta(-1)}, {"claim_wait": 0}, {"dispatch_timeout": 0},
        {"attempts": True}, {"max_hops": False}, {"retry_jitter": True},
        {"attempts": 0}, {"retry_delays": []}, {"retry_delays": [-1]}, {"claim": "never"}, {"redispatch": "no"},
        {"late": "drop"}, {"on_conflict": "ignore"}, {"key": 7}, {"fingerprint": "some"}, {"fingerprint": {"fields": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Policy(**options)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        merged_policy("shop.Sell", None, options)


@pytest.mark.parametrize(("wrong", "right"), [("retentoin", "retention"), ("attempt", "attempts"), ("keys", "key")])
def test_unknown_option_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"'shop.Sell': Policy: unknown option '{wrong}'. Did you mean '{right}'"
    ):
        merged_policy("shop.Sell", None, {wrong: 1})
    with pytest.raises(ConfigurationError, match=f"unknown option '{wrong}'. Did you mean '{right}'"):
        Idempotent(**{wrong: 1})


def test_nothing_near_lists_all() -> None:
    assert nearest("zzz", ["b", "a"]) == "Known are a, b."


def test_later_ones_win_option_by_option() -> None:
    """Code, then file, then environment."""
    code = Idempotent(key="id", retention="7d", attempts=3)
    merged = merged_policy("t", code, {"retention": "1d", "claim": "late"}, {"claim": "early", "attempts": 9})
    assert (merged.key.name, merged.retention, merged.claim, merged.attempts) == (
        "field:id", timedelta(days=1), "early", 9,
    )  # fmt: skip
    assert merged.idempotent


def test_opting_in_and_out_from_outside() -> None:
    assert merged_policy("t", None, {"idempotent": True, "key": {"header": "x-id"}}).key.name == "header:x-id"
    assert not merged_policy("t", Idempotent(), {"idempotent": False}).idempotent
    assert not merged_policy("t", None).idempotent


def test_previous_from_a_file() -> None:
    merged = merged_policy("t", Idempotent(), {"previous": [{"key": "order_no"}, {"opted_in": False}]})
    assert merged.previous == (Previous(key=merged.previous[0].key), Previous(opted_in=False))
    assert merged.previous[0].key is not None
    assert merged.previous[0].key.name == "field:order_no"
    with pytest.raises(ConfigurationError, match=r"Previous: unknown option 'kye'\. Did you mean 'key'"):
        merged_policy("t", Idempotent(), {"previous": [{"kye": "order_no"}]})


def test_retry_delays_end_with_the_last() -> None:
    policy = Policy(retry_delays=["1s", "5s"])
    assert [policy.retry_delay(attempt).total_seconds() for attempt in (1, 2, 3, 100)] == [1, 5, 5, 5]


def test_policies_do_not_change() -> None:
    policy = Policy(key=Key.header("x"))
    with pytest.raises(ValidationError):
        policy.attempts = 1


def test_settings_that_ask_for_batches_of_a_type_that_the_code_opted_in() -> None:
    check_override("orders.Place", {"batch": 50}, "idemp.toml")
    assert merged_policy("orders.Place", Idempotent(key="id"), {"batch": 50}).batch == 50
    for code in (None, Policy(), Idempotent(claim="late")):
        with pytest.raises(ConfigurationError, match=r"what the code and the settings say together|opted in"):
            merged_policy("orders.Place", code, {"batch": 50})
    with pytest.raises(ConfigurationError, match="opted in"):
        check_override("orders.Place", {"batch": 50, "idempotent": False}, "idemp.toml")


def test_entity_is_for_types_that_are_opted_in() -> None:
    with pytest.raises(ConfigurationError, match=r"Idempotent\(entity"):
        Policy(entity="order_id")
    assert Idempotent(entity=["tenant", "order_id"]).entity.name == "field:tenant,order_id"  # type: ignore[union-attr]
