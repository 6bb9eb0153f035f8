"""Payments in two databases, while workers are killed and both servers restarted."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.servers.databases import create_database, query
from tests.servers.mariadb import Mariadb
from tests.storms import ROOT, SHARE, Table, Workers, rage, storm_servers
from tests.twophase import engine_of, metadata

PAYMENTS, KILLS = round(300 * SHARE), round(50 * SHARE)
RESTARTS = 3


@pytest.mark.slow
def test_both_or_none_and_nothing_in_doubt() -> None:
    chance = random.Random(1)
    todo = [*range(PAYMENTS), *chance.sample(range(PAYMENTS), PAYMENTS // 5)]
    chance.shuffle(todo)
    with ExitStack() as stack:
        servers, environment, url = stack.enter_context(storm_servers("sql"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-ledger-")))
        folder.chmod(0o755)
        servers.append(stack.enter_context(Mariadb(folder / "ledger")))
        ledger = create_database(servers[1].url)
        engine = engine_of(ledger)
        metadata.create_all(engine)
        engine.dispose()
        environment["STORM_LEDGER"] = ledger
        outside = Table(url)
        for number in todo:
            outside.send(number)
        workers = Workers(3, "tests.twophase.storm_app", environment, folder / "log")
        stack.callback(workers.close)
        done = rage(
            chance, workers, servers, outside, url, PAYMENTS, "SELECT count(*) FROM effect", kills=KILLS, restarts=RESTARTS
        )
        command = [sys.executable, "-m", "idemp", "recover", "tests.twophase.storm_app"]
        recovered = subprocess.run(
            command, cwd=ROOT, env=workers._environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert recovered.returncode == 0, recovered.stdout + recovered.stderr
        effects = Counter(number for (number,) in query(url, "SELECT number FROM effect"))
        booked = Counter(int(what) for (what,) in query(ledger, "SELECT what FROM booked"))
        assert (effects, booked) == (Counter(range(PAYMENTS)), Counter(range(PAYMENTS)))
        assert not query(ledger, "XA RECOVER")
        ids: dict[str, set[str]] = {}
        for id, body in outside.outputs():
            ids.setdefault(body, set()).add(id)
        assert (len(ids), max(map(len, ids.values()))) == (PAYMENTS, 1)
        print(done, recovered.stdout)
