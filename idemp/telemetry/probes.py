"""HTTP paths beside the metrics: `/health` and `/ready`, for Kubernetes and its like."""

from __future__ import annotations

import json
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from idemp.health import Probe

__all__ = ["with_probes"]


def with_probes(metrics: WSGIApplication, probe: Probe) -> WSGIApplication:
    """Return an application that answers `/metrics`, `/health` and `/ready`, and 404 to all other paths.

    `/health` answers 503 if a restart would help, `/ready` if the process does no work now; both say why, as JSON.

    Example:
        >>> from idemp.health import Health
        >>> def answer(status, headers):
        ...     print(status)
        >>> application = with_probes(lambda environ, start: [], lambda: Health(waiting=["starting"]))
        >>> _ = application({"PATH_INFO": "/health"}, answer), application({"PATH_INFO": "/ready"}, answer)
        200 OK
        503 Service Unavailable
        >>> _ = application({"PATH_INFO": "/healthz"}, answer)
        404 Not Found
    """

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        status, body = HTTPStatus.NOT_FOUND, b"Here are /metrics, /health and /ready.\n"
        kind = "text/plain; charset=utf-8"
        if path in {"/health", "/ready"}:
            health = probe()
            fine = health.alive if path == "/health" else health.ready
            status = HTTPStatus.OK if fine else HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"alive": health.alive, "ready": health.ready, **asdict(health)}).encode()
            kind = "application/json"
        start_response(f"{status.value} {status.phrase}", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    return application
