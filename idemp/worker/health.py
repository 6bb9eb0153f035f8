"""Health of a process, over HTTP: `/health` fails only if a restart helps, `/ready` also during an outage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from idemp.events import log
from idemp.worker.server import Page, Server

__all__ = ["SILENT", "combine", "serve_health", "status"]

SILENT: Final = 60.0
"""Seconds without a sign of life after which a thread counts as stuck. A handler that runs is not judged."""


def status(threads: Mapping[str, float], *, obstacle: str = "", stopping: bool = False, running: str = "") -> dict[str, Any]:
    """Return the status of a process.

    Args:
        threads: Seconds since the last sign of life of each thread.
        obstacle: Why no work is taken.
        stopping: Whether it is stopping.
        running: Type whose handler runs.

    Example:
        >>> status({"relay": 61.0})["healthy"], status({"relay": 1.0}, obstacle="disk full")["ready"]
        (False, False)
    """
    healthy = all(seconds < SILENT for seconds in threads.values())
    ages = {name: round(seconds, 1) for name, seconds in threads.items()}
    ready = healthy and not obstacle and not stopping
    return {"healthy": healthy, "ready": ready, "threads": ages, "running": running, "obstacle": obstacle, "stopping": stopping}


def combine(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the status of several processes: healthy and ready if all are.

    Example:
        >>> combine([status({}), status({}, stopping=True)])["ready"]
        False
    """
    return {
        "healthy": all(each["healthy"] for each in processes),
        "ready": bool(processes) and all(each["ready"] for each in processes),
        "processes": list(processes),
    }


def serve_health(host: str, port: int, status: Callable[[], Mapping[str, Any]]) -> Server:
    """Answer `GET /health` and `GET /ready` with 200 or 503, and the status as JSON.

    Args:
        host: Address to listen at.
        port: TCP port; 0 takes a free one.
        status: Returns the status; called in a thread of the server.

    Raises:
        ConfigurationError: The address cannot be used.

    Example:
        >>> from urllib.request import urlopen
        >>> server = serve_health("127.0.0.1", 0, lambda: status({"relay": 0.1}))
        >>> json.loads(urlopen(f"http://127.0.0.1:{server.port}/ready").read())["ready"]
        True
        >>> server.close()
    """

    def page(name: str) -> Callable[[str], Page]:
        def page(_accept: str) -> Page:
            current = status()
            return Page(200 if current[name] else 503, "application/json", json.dumps(current).encode())

        return page

    server = Server("health", host, port, {"/health": page("healthy"), "/ready": page("ready")})
    log("health.started", host=host, port=server.port)
    return server
