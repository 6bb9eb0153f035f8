"""`python -m tests.soak --minutes 30 --seed 1`: the soak at full length; exit code 1 if a promise broke."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.servers.fixtures import private
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import scratch_directory
from tests.servers.rabbitmq import RabbitMQ
from tests.soak.plan import Plan
from tests.soak.soak import Soak
from tests.soak.watching import tails


def main() -> int:
    """Run it on private servers."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100.0, help="messages a second")
    parser.add_argument("--workers", type=int, default=2, help="workers that are killed; one more is not")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1], help="of the workers in turn: messages a transaction"
    )
    parser.add_argument("--logs", type=Path, help="an empty folder where the workers' logs stay")
    options = parser.parse_args()
    plan = Plan(options.minutes, options.seed, options.rate, options.workers, tuple(options.batches))
    with scratch_directory("soak") as scratch, private(PostgreSQL) as database, private(RabbitMQ) as broker:
        logs = options.logs or scratch
        soak = Soak(plan, database, broker, logs)
        try:
            report = soak.run()
        except BaseException:
            print(tails(logs), file=sys.stderr)
            raise
        if report.broken:
            print(tails(logs), file=sys.stderr)
    print(json.dumps(report.as_json(), indent=2))
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
