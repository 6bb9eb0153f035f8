"""200 producers of prepared messages, of which 100 are killed, while both servers are restarted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from tests.prepared import Shop
from tests.servers.databases import LOST, create_database, query
from tests.servers.mariadb import Mariadb
from tests.servers.postgresql import Postgresql
from tests.servers.process import wait_until
from tests.test_kills import processes

ROOT = Path(__file__).parents[2]
ORDERS, AT_ONCE, PATIENCE = 4, 8, 120.0


def produce(url: str, shop_url: str, number: int, started: Any) -> None:
    """The body of a producer, which tries until it has an answer."""
    chance = random.Random(number)
    shop = Shop(url, shop_url, check_after=1)
    for count in range(ORDERS):
        key, fails = f"{number}-{count}", chance.random() < 0.1
        for _ in range(100):
            started.value = 1
            try:
                shop.place(key, fails=fails)
            except RuntimeError:
                break
            except Exception as error:
                if type(error).__name__ == "RolledBack":
                    break
                time.sleep(0.1)
            else:
                break


def storm(folder: Path, producers: int = 200, kills: int = 100, restarts: int = 2) -> dict[str, Any]:
    """Return what was committed and what was published."""
    begin, chance = time.monotonic(), random.Random(1)
    with ExitStack() as stack:
        home, work = (stack.enter_context(kind(folder / kind.__name__)) for kind in (Postgresql, Mariadb))
        url, shop_url = create_database(home.url), create_database(work.url)
        database = Database(url)
        upgrade(database)
        database.close()
        Shop(url, shop_url).create().close()
        environment = {**os.environ, "IDEMP_DATABASE_URL": url, "STORM_SHOP": shop_url}
        command = [sys.executable, "-m", "idemp", "relay", "tests.prepared.storm_app"]
        relays: list[subprocess.Popen[bytes]] = []

        def relay() -> None:
            log = stack.enter_context((folder / "relay.log").open("ab"))
            relays.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))

        for _ in range(2):
            relay()
        stack.callback(lambda: [(each.kill(), each.wait(30)) for each in relays])
        left, running, killed, restarted = list(range(producers)), list[Any](), 0, 0
        victims = set(chance.sample(left, kills))
        while left or running:
            while left and len(running) < AT_ONCE:
                number, started = left.pop(), processes.Value("i", 0)
                process = processes.Process(target=produce, args=(url, shop_url, number, started))
                process.start()
                running.append((process, number, started, chance.uniform(0.0, 0.12)))
            for each in list(running):
                process, number, started, moment = each
                if number in victims and started.value:
                    time.sleep(moment)
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGKILL)
                        killed += 1
                    victims.discard(number)
                if not process.is_alive():
                    process.join()
                    running.remove(each)
            for server in (home, work) if producers - len(left) > producers * (restarted + 1) / (restarts + 1) else ():
                server.kill()
                relays[0].kill()
                relays.pop(0).wait(30)
                relay()
                server.start()
                restarted += server is work
            time.sleep(0.01)

        def settled() -> bool:
            with suppress(*LOST):
                return query(url, "SELECT count(*) FROM idemp_pending") == [(0,)]
            return False

        wait_until(settled, "the end of all checks", PATIENCE)
        shop = Shop(url, shop_url)
        orders, published = shop.orders(), shop.published()
        shop.close()
    return {
        "orders": orders,
        "published": published,
        "kills": killed,
        "restarts": restarted * 2,
        "seconds": time.monotonic() - begin,
    }
