"""Moto's server, as `python -m moto.server`, but one request at a time: `python -m tests.servers.moto_server PORT`.

Its own threads check a write's condition and write in two steps, without a lock: two writers may both succeed there, which
DynamoDB itself never lets happen.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def one_at_a_time(application: Application) -> Application:
    """The same, for one thread after the other."""
    lock = threading.Lock()

    def call(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with lock:
            return list(application(environment, start_response))

    return call


def main() -> None:
    """Serve on 127.0.0.1."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    application = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main()
