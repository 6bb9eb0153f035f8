"""The same as a request of the web: an initiation."""

from __future__ import annotations

from typing import Any

from tests.forks import wired


def application(environment: dict[str, Any], respond: Any) -> list[bytes]:
    wired.initiate(int(environment["PATH_INFO"][1:]))
    respond("204 No Content", [])
    return []
