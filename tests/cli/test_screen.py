"""Tables for people."""

from __future__ import annotations

from uuid import uuid4

import pytest
from rich.console import Console
from rich.text import Text

from idemp.cli.letters import COLUMNS
from idemp.cli.screen import Paragraph, Screen, report_error
from idemp.errors import ConfigurationError


@pytest.mark.parametrize("width", [160, 200, 100_000])
def test_ids_and_times_stay_in_one_piece_and_errors_in_one_line(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [str(uuid4()) for _ in range(3)]
    rows = [
        {
            "message_id": name,
            "type": "shop.Order",
            "reason": "KeyError",
            "first_at": "2025-01-01T10:00:00.123456+00:00",
            "last_at": "2025-01-01T13:30:00.5+02:00",
            "error": "no such\ncustomer " * 100,
        }
        for name in ids
    ]
    screen = Screen()
    screen.console = Console(width=width, highlight=False, markup=False)
    screen.rows(rows, COLUMNS)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ids
    for line in lines:
        assert "2025-01-01 10:00:00  2025-01-01 11:30:00  no such cust" in line
        assert line.rstrip().endswith("…")


def test_what_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Who may publish must not colour, overwrite or turn what an operator reads."""
    hostile = "42\x1b[31m\u202e\r\x9b2J\nforged"
    shown = "42\\x1b[31m\\u202e\\r\\x9b2J"
    screen = Screen()
    screen.rows([{"id": hostile, "error": hostile}], {"id": "id", "error": "error"})
    assert capsys.readouterr().out.splitlines()[1].split() == [
        f"{shown}\\nforged",
        "42\\x1b[31m\\u202e",
        "\\x9b2J",
        "forged",
    ]
    screen.result({}, hostile, Paragraph(Text("id "), hostile))
    screen.say(hostile)
    report_error(ConfigurationError(hostile), json_mode=False, with_traceback=False)
    everything = "".join(capsys.readouterr())
    assert everything.count("\\x1b[31m") == 4
    assert not set("\x1b\u202e\r\x9b") & set(everything)
