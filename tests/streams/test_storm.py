"""Commands to a few streams, while workers are killed and the server restarted."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from idemp.context import EXCHANGE
from tests.servers.databases import query
from tests.storms import SHARE, Table, Workers, rage, storm_servers
from tests.streams import AUDIT

COMMANDS, KILLS = round(300 * SHARE), round(30 * SHARE)
RESTARTS = 2


@pytest.mark.slow
def test_each_command_is_committed_once_and_no_number_is_missing() -> None:
    chance = random.Random(1)
    moves = {id: (f"account-{id % 5}", 10 if id < COMMANDS // 6 else chance.choice([-7, 5, 9])) for id in range(COMMANDS)}
    todo = [*moves, *chance.sample(list(moves), COMMANDS // 5)]
    chance.shuffle(todo)
    with ExitStack() as stack:
        servers, environment, url = stack.enter_context(storm_servers("sql"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-streams-")))
        outside = Table(url)
        query(url, "INSERT INTO idemp_binding (exchange, pattern, queue) VALUES (%s, 'bank.Moved', %s)", EXCHANGE, AUDIT)
        for id in todo:
            body = json.dumps({"id": id, "account": moves[id][0], "cents": moves[id][1]}).encode()
            headers = json.dumps({"message_id": f"{id}-{chance.random()}", "type": "bank.Move"}).encode()
            query(url, "INSERT INTO idemp_message (queue, due_at, headers, body) VALUES ('storm', 0, %s, %s)", headers, body)
        workers = Workers(3, "tests.streams.storm_app", environment, folder / "log")
        stack.callback(workers.close)
        done = rage(chance, workers, servers, outside, url, COMMANDS, kills=KILLS, restarts=RESTARTS)
        rows = query(
            url,
            "SELECT stream, number, body, output_id FROM idemp_commit JOIN idemp_output USING (consumer_id, message_key) "
            "ORDER BY stream, number",
        )
        events = [(stream, number, json.loads(bytes(body)), str(id)) for stream, number, body, id in rows]
        for stream in {stream for stream, *_ in events}:
            own = [(number, event) for name, number, event, _ in events if name == stream]
            assert [number for number, _ in own] == list(range(1, len(own) + 1))
            money = 0
            for _, event in own:
                money += event["cents"]
                assert money >= 0  # each was decided on all that come before it
        assert set(Counter(event["id"] for _, _, event, _ in events).values()) == {1}
        assert all(moves[event["id"]] == (stream, event["cents"]) for stream, _, event, _ in events)
        assert {event["id"] for _, _, event, _ in events} >= {id for id, (_, cents) in moves.items() if cents > 0}
        heard: dict[int, set[str]] = {}
        for id, text in outside.outputs():
            heard.setdefault(json.loads(text)["id"], set()).add(id)
        assert heard == {event["id"]: {id} for _, _, event, id in events}
        print(f"{len(events)} events of {done}")
