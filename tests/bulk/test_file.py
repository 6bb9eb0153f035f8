"""`idemp bulk`: files of stored messages, without Spark."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from idemp.app import load_app
from idemp.cli.exits import Exit
from idemp.messages import BOM
from idemp.worker import Worker
from tests.cli.test_commands import run
from tests.world import World

APP = """
from idemp import App, Context, Idempotent
from tests.world import Order, effect, SINK

app = App("shop")

@app.handler(Order, policy=Idempotent(), default=True)
def handle(message: Order, ctx: Context) -> None:
    ctx.connection.execute(effect.insert(), {"what": message.order_id})
    ctx.send({"order_id": message.order_id}, to=SINK, type="shop.Shipped")
    if message.order_id == "fails":
        raise ValueError("no such order")
"""
LINES: list[bytes] = [
    b'{"key": {"id": "a"}, "order_id": "1", "at": 1764000000}',
    b'{"key": {"id": "a"}, "order_id": "1", "at": 1764000000}',
    b'{"key": {"id": "a"}, "order_id": "other", "at": "2026-11-24T10:00:00+01:00"}',
    b"",
    b"   ",
    b'{"key": {"id": 7}, "order_id": "2", "at": "2026-11-24"}\r',
    b'{"key": {"id": 1.5}, "order_id": "3"}',
    b'{"key": {"id": true}, "order_id": "3"}',
    b'{"key": {"id": "fails"}, "order_id": "fails"}',
    b'{"key": {"id": "b"}, "order_id": "\xff"}',
    b"{",
    b"[1]",
]


@pytest.fixture
def shop(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    sys.modules.pop("shop_of_files", None)
    (tmp_path / "shop_of_files.py").write_text(APP)
    return World(url)


def bulk(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = Exit.OK) -> dict[str, Any]:
    capsys.readouterr()
    assert run("bulk", "shop_of_files", *arguments, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {name: found[name] for name in ("rows", "new", "replay", "duplicate", "conflict", "parked", "outputs")}


def counts(*numbers: int) -> dict[str, int]:
    return dict(zip(("rows", "new", "replay", "duplicate", "conflict", "parked", "outputs"), numbers, strict=True))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("packed", [False, True])
def test_each_line_has_one_of_five_answers(shop: World, packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / ("old.jsonl.gz" if packed else "old.jsonl")
    text = BOM.encode() + b"\n".join(LINES)
    file.write_bytes(gzip.compress(text) if packed else text)
    kept, options = tmp_path / f"{file.name}.parked", [str(file), "--id", "key.id", "--time", "at"]
    expected = counts(10, 2, 0, 1, 1, 6, 2)
    assert bulk(capsys, *options, "--dry-run", code=Exit.FAILED) == counts(10, 3, 0, 1, 1, 5, 0)
    assert (shop.effects(), shop.claims(), kept.exists()) == ({}, 0, False)
    assert bulk(capsys, *options, code=Exit.FAILED) == expected
    assert (shop.effects(), shop.pending()) == ({"1": 1, "2": 1}, 2)
    assert bulk(capsys, *options, code=Exit.FAILED) == counts(10, 0, 2, 1, 1, 6, 0)
    assert bulk(capsys, *options, "--run", "another", code=Exit.FAILED) == counts(10, 0, 0, 3, 1, 6, 0)
    assert shop.effects() == {"1": 1, "2": 1}
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) == 3 * 7
    assert {row["rule"] for row in rows} == {"conflict", "unreadable", "handler"}
    assert {row["error"] for row in rows if row["rule"] == "handler"} == {"ValueError: no such order"}
    assert any("body_base64" in row for row in rows)

    # Corrected by a person, and read again: rows without a line are left alone.
    fixed = [row | {"body": row["body"].replace('"fails"}', '"4"}')} for row in rows if row["rule"] == "handler"]
    (tmp_path / "fixed.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in fixed))
    assert bulk(capsys, "fixed.jsonl", "--replay", "--never-send") == counts(3, 1, 0, 2, 0, 0, 1)
    assert (shop.effects(), shop.pending()) == ({"1": 1, "2": 1, "4": 1}, 2)
    assert not (tmp_path / "fixed.jsonl.parked").exists()


def test_what_was_handled_online_is_a_duplicate_and_what_is_adopted_is_not_handled(
    shop: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = load_app("shop_of_files")
    shop.send("1", message_id="m-7", id="m-7")
    shop.work(Worker(app))
    app.close()
    (tmp_path / "old.jsonl").write_text('{"id": "m-7", "order_id": "1"}\n{"id": "new", "order_id": "2"}\n')
    assert bulk(capsys, "old.jsonl", "--adopt") == counts(2, 1, 0, 1, 0, 0, 0)
    assert bulk(capsys, "old.jsonl", "--run", "later") == counts(2, 0, 0, 2, 0, 0, 0)
    assert shop.effects() == {"1": 1}


def test_a_damaged_value_or_file_costs_nobody_else_a_row(
    shop: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemp.cli.bulk.ROWS", 3)
    lines = [
        b'{"id": "1", "order_id": "1", "time": "2026-11-01 10:00:00 UTC"}',
        b'{"id": "fails", "order_id": "fails"}',
        b'{"id": "\\ud83d", "order_id": "2"}\r{"id": "3", "order_id": "3"}',
        b'{"id": "4", "order_id": "4", "time": "yesterday"}',
        b'{"id": "5", "order_id": "5", "time": 1764000000}',
    ]
    (tmp_path / "old.jsonl").write_bytes(b"\n".join(lines))
    assert bulk(capsys, "old.jsonl", code=Exit.FAILED) == counts(6, 3, 0, 0, 0, 3, 3)
    kept = [json.loads(line) for line in (tmp_path / "old.jsonl.parked").read_text().splitlines()]
    assert sorted(row["rule"] for row in kept) == ["handler", "unreadable", "unreadable"]
    (row,) = [row for row in kept if "the time 'yesterday' is neither seconds since 1970 nor ISO 8601" in row["error"]]
    assert row["id"] == "4"  # so that a replay, which a person has decided, finds it

    whole = gzip.compress(b"".join(b'{"id": "z%d", "order_id": "z%d"}\n' % (n, n * 7919) for n in range(2_000)))
    (tmp_path / "cut.jsonl.GZ").write_bytes(whole[: len(whole) // 2])
    assert run("bulk", "shop_of_files", "cut.jsonl.GZ", "--adopt") == Exit.REFUSED
    error = capsys.readouterr().err
    assert (number := int(error.partition("its first ")[2].partition(" lines are handled")[0])) > 100
    assert shop.claims() == 3 + number
    (tmp_path / "bad.gz").write_bytes(whole[:200] + bytes(each ^ 255 for each in whole[200:260]) + whole[260:])
    assert run("bulk", "shop_of_files", "bad.gz", "--adopt") == Exit.REFUSED
    assert "bad.gz cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "options", "code", "error"),
    [
        ("{}", ["--id", "nr"], Exit.REFUSED, "id: none of 1 lines that were read has 'nr': they have"),
        ("{}", ["--id", "a b"], Exit.REFUSED, "id: 'a b' is not a field of a JSON object"),
        ("{}", ["--replay", "--id", "nr"], Exit.USAGE, "--replay reads ids, types and times where idemp has written them"),
        ("{}", ["--parked", "old.jsonl"], Exit.USAGE, "--parked has to be another file than the input"),
        ('{"id": 7}', ["--replay"], Exit.REFUSED, "line 1 is not a parked row, as idemp writes them: a value is not text"),
        ("{}", ["--parked", "none/x"], Exit.USAGE, "--parked none/x: No such file or directory; nothing was handled"),
        ("{}", ["--of-type", "shop.Ordr"], Exit.USAGE, "--of-type shop.Ordr: no handler takes it: shop takes shop.Order"),
        (None, [], Exit.REFUSED, "old.jsonl cannot be read: FileNotFoundError: [Errno 2] No such file or directory"),
    ],
)
def test_what_cannot_be_read_is_refused(
    text: str | None, options: list[str], code: int, error: str, shop: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "old.jsonl").write_text(text)
    assert run("bulk", "shop_of_files", "old.jsonl", *options) == code
    assert error in " ".join(capsys.readouterr().err.split())
    assert (shop.claims(), (tmp_path / "old.jsonl.parked").exists()) == (0, False)
