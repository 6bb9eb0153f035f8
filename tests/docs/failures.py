"""The table "what an error means" of `docs/explanation/failures.md`; `python -m tests.docs.failures` writes it anew."""

from __future__ import annotations

from pathlib import Path

from idemp.classification import markdown

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "failures.md"
_BEGIN, _END = "<!-- table -->\n", "<!-- end of table -->"


def page() -> str:
    """The page, with the table as the code has it."""
    before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert after, f"{PAGE} has no {_BEGIN.strip()} … {_END}"
    return f"{before}{_BEGIN}{markdown()}{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
