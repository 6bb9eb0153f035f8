"""A WSGI application whose module wires the service: `gunicorn --preload` forks its workers after that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.forks import wired


def application(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Settle the number that is the path; the number of the process answers."""
    assert wired.SERVICE is not None
    wired.SERVICE.work(int(environ["PATH_INFO"].strip("/")))
    start_response("204 No Content", [])
    return []
