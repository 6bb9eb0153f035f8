"""Messages for a few documents, while workers are killed and the SQL server restarted; the document server keeps no data."""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from idemp.context import EXCHANGE
from tests.documents import SINK, document_server, open_database
from tests.servers.databases import query
from tests.storms import SHARE, Table, Workers, rage, storm_servers

MESSAGES, KILLS = round(300 * SHARE), round(30 * SHARE)
RESTARTS = 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["couchdb", "dynamodb"])
def test_each_message_is_in_its_document_once_and_its_output_is_sent(kind: str) -> None:
    chance = random.Random(1)
    carts = {id: f"{id % 5}" for id in range(MESSAGES)}
    todo = [*carts, *chance.sample(list(carts), MESSAGES // 5)]
    chance.shuffle(todo)
    with ExitStack() as stack:
        servers, environment, url = stack.enter_context(storm_servers("sql"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-documents-")))
        place = stack.enter_context(document_server(kind, folder))
        outside = Table(url)
        query(url, "INSERT INTO idemp_binding (exchange, pattern, queue) VALUES (%s, 'carts.Added', %s)", EXCHANGE, SINK)
        for id in todo:
            body = json.dumps({"id": id, "cart": carts[id]}).encode()
            headers = json.dumps({"message_id": f"{id}-{chance.random()}", "type": "carts.Add"}).encode()
            query(url, "INSERT INTO idemp_message (queue, due_at, headers, body) VALUES ('storm', 0, %s, %s)", headers, body)
        environment["IDEMP_TEST_DOCUMENTS"] = place
        workers = Workers(3, "tests.documents.storm_app", environment, folder / "log")
        stack.callback(workers.close)
        done = rage(chance, workers, servers, outside, url, MESSAGES, kills=KILLS, restarts=RESTARTS)
        documents, position = open_database(place), dict[int, int]()
        for cart in set(carts.values()):
            items = documents.read(f"cart {cart}").data["items"]
            assert sorted(items) == [id for id in carts if carts[id] == cart]
            position |= {id: number for number, id in enumerate(items, 1)}
        heard: dict[int, set[tuple[str, int]]] = {}
        for id, text in outside.outputs():
            said = json.loads(text)
            heard.setdefault(said["id"], set()).add((id, said["items"]))
        assert {id: [items for _, items in sent] for id, sent in heard.items()} == {id: [position[id]] for id in carts}
        print(kind, done)
