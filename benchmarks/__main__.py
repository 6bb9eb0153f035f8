"""Consumers side by side: `python -m benchmarks [NAME …] --rounds 16 --messages 200`.

Each consumer runs in processes of its own with its own queue and table. In each round all of them handle as many messages one
after another, in random order; a ratio is that of two consumers in one round, so that a slow minute slows both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.seats import Consumers
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import Rabbitmq

WAYS = {
    "bare": "plain:bare",
    "naive": "plain:naive",
    "single": "own:single",
    "groups": "own:groups",
    "batch-50": "own:batches",
}


class Durable(Postgresql):
    """PostgreSQL that waits for its disk, as those of users do."""

    durable = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk that PostgreSQL is to write to")
    options = parser.parse_args()
    names = list(dict.fromkeys(["bare", *options.names]))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-bench-", dir=options.folder)))
        folder.chmod(0o755)
        database, broker = (stack.enter_context(kind(folder / kind.__name__)) for kind in (Durable, Rabbitmq))
        tables = Database(database.url)
        upgrade(tables)
        tables.close()
        running = {}
        for name in names:
            running[name] = Consumers(name, WAYS[name], database.url, broker.url)
            stack.callback(running[name].close)
        for consumers in running.values():  # caches are filled, plans made
            consumers.run(options.messages)
        taken: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in random.sample(names, len(names)):
                seconds, busy = running[name].run(options.messages)
                taken[name].append(seconds)
                cpu[name].append(busy)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for consumers in running.values():
            consumers.place.check()
    for name in names:
        rates = [options.messages / seconds for seconds in taken[name]]
        ratios = [bare / seconds for bare, seconds in zip(taken["bare"], taken[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        busy = statistics.median(cpu[name]) / options.messages * 1e6
        print(f"{name:12} {statistics.median(rates):7.0f}/s  {busy:6.0f} µs CPU   / bare {middle:5.2f} [{low:.2f}–{high:.2f}]")


if __name__ == "__main__":
    main()
