"""The page says what the code decides."""

from __future__ import annotations

from tests.docs.failures import PAGE, page


def test_the_table_is_the_code_s() -> None:
    """If it fails: `python -m tests.docs.failures` writes the table anew."""
    assert PAGE.read_text("utf-8") == page()
