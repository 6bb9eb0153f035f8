"""The how-to "Keep the order of messages about one thing": its code is what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from idemp.ordering import ORDERED_PREFETCH
from idemp.policy import LONGEST_HELD
from idemp.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs/how-to/order.md").read_text(encoding="utf-8")


def test_apps_of_the_page() -> None:
    """One order for both types; and partitions of one consumer that get only what is sent to them."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    apps = [names[name] for name in ("app", "first", "second", "third")]
    for app in apps:
        app.configure(Settings())
    assert all(app.topology().single_active for app in apps)
    assert [(app.name, app.queue) for app in apps[1:]] == [("billing", f"billing.{number}") for number in range(3)]
    assert [len(app.topology().bindings) for app in apps] == [2, 0, 0, 0]
    assert {names["partition_of"](str(number)) for number in range(30)} == {app.queue for app in apps[1:]}
    assert names["partition_of"]("7") == "billing.0", "the same in all processes"


def test_numbers_of_the_page() -> None:
    assert f"**{ORDERED_PREFETCH} places in the hand.**" in PAGE
    assert LONGEST_HELD.total_seconds() == 15 * 60
    assert "may last a quarter of an hour" in " ".join(PAGE.split())
