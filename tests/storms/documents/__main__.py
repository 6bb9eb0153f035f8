"""`python -m tests.storms.documents --server couchdb`: the storm at full size; exit code 1 if a promise broke."""

from __future__ import annotations

import argparse
import json
import sys
import threading

from tests.servers.documents import Moto, PouchDB
from tests.servers.fixtures import private
from tests.servers.rabbitmq import RabbitMQ
from tests.storms.documents.storm import Storm, as_json

SERVERS = {"couchdb": PouchDB, "dynamodb": Moto}


def main() -> int:
    """Run it on private servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=SERVERS, required=True)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    stop = threading.Event()
    with private(SERVERS[options.server]) as documents, private(RabbitMQ) as broker:
        storm = Storm(f"{options.server} {documents.url}", broker, messages=options.messages, seed=options.seed)
        threading.Thread(target=_progress, args=(storm, stop), daemon=True).start()
        report = storm.run(kills=options.kills)
        stop.set()
    print(json.dumps(as_json(report), indent=2))
    return 0 if report.promises_held else 1


def _progress(storm: Storm, stop: threading.Event) -> None:
    """One line every few seconds."""
    while not stop.wait(5.0):
        print(f"  {storm.report.kills} kills, {storm.report.orphans_collected} orphans collected", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
