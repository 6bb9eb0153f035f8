"""Health of a process, over HTTP: `/health` fails only if a restart helps, `/ready` also during an outage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from idemp.errors import ConfigurationError
from idemp.events import log

__all__ = ["SILENT", "HealthServer", "combine", "status"]

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


class HealthServer:
    """Answers `GET /health` and `GET /ready` with 200 or 503, and the status as JSON.

    Args:
        host: Address to listen at.
        port: TCP port; 0 takes a free one.
        status: Returns the status; called in a thread of the server.

    Attributes:
        port: TCP port that it listens at.

    Raises:
        ConfigurationError: The address cannot be used.

    Example:
        >>> from urllib.request import urlopen
        >>> server = HealthServer("127.0.0.1", 0, lambda: status({"relay": 0.1}))
        >>> json.loads(urlopen(f"http://127.0.0.1:{server.port}/ready").read())["ready"]
        True
        >>> server.close()
    """

    def __init__(self, host: str, port: int, status: Callable[[], Mapping[str, Any]]) -> None:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = status()
                name = {"/health": "healthy", "/ready": "ready"}.get(self.path.partition("?")[0].rstrip("/"))
                body = json.dumps(said if name else {"paths": ["/health", "/ready"]}).encode()
                self.send_response(404 if name is None else 200 if said[name] else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: probes come every few seconds."""

        try:
            self._server = ThreadingHTTPServer((host, port), Answer)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"health_host={host}, health_port={port} cannot be used: {error}") from None
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="idemp-health", daemon=True).start()
        log("health.started", host=host, port=self.port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
