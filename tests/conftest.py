"""What every test may use: real servers (`tests/servers/fixtures.py`), and a time budget for every folder."""

from __future__ import annotations

pytest_plugins = ("tests.servers.fixtures", "tests.budgets")
