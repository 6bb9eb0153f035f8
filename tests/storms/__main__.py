"""`python -m tests.storms`: the storm at full size; exit code 1 if a promise broke."""

from __future__ import annotations

import argparse
import json
import sys
import threading

from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private
from tests.servers.postgresql import PostgreSQL
from tests.servers.rabbitmq import RabbitMQ
from tests.storms.storm import Storm, as_json, progress


def main() -> int:
    """Run it on private servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--database-restarts", type=int, default=2)
    parser.add_argument("--broker-restarts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1], help="of the workers in turn: messages a transaction"
    )
    parser.add_argument("--broker", choices=("rabbitmq", "activemq"), default="rabbitmq")
    options = parser.parse_args()
    kind: type[ActiveMQ | RabbitMQ] = ActiveMQ if options.broker == "activemq" else RabbitMQ
    stop = threading.Event()
    with private(PostgreSQL) as database, private(kind) as broker:
        storm = Storm(database, broker, messages=options.messages, seed=options.seed, batches=options.batches)
        threading.Thread(target=progress, args=(storm, stop), daemon=True).start()
        report = storm.run(
            kills=options.kills,
            database_restarts=options.database_restarts,
            broker_restarts=options.broker_restarts,
        )
        stop.set()
    print(json.dumps(as_json(report), indent=2))
    return 0 if report.promises_held else 1


if __name__ == "__main__":
    sys.exit(main())
