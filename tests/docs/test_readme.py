"""The README's five minutes and the tutorial, run as they stand there."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from idemp import Policy, Settings
from idemp.broker.guarantees import markdown
from idemp.settings import markdown as markdown_of
from tests.docs.pages import query, run, work_until, write_files

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECEIPT = "receipt for 00000000-0000-0000-0000-000000000007\n"


def test_five_minutes(tmp_path: Path) -> None:
    assert all(command in README for command in ("idemp db upgrade\n", "python send.py\n", "idemp worker shop:app\n"))
    write_files(README, tmp_path, "shop.py", "send.py")
    run(tmp_path, "-m", "idemp", "db", "upgrade")
    run(tmp_path, "send.py")
    printed = tmp_path / "printed"
    work_until(tmp_path, "shop:app", lambda: printed.read_text().count(RECEIPT) == 3, "three receipts")
    assert RECEIPT * 3 in README
    story = run(tmp_path, "-m", "idemp", "inbox", "explain", "00000000-0000-0000-0000-000000000007")
    assert "redelivered 2 times, and its handler's work was committed once" in story
    assert query(tmp_path, "SELECT cents FROM account") == [(750,)]


@pytest.mark.slow
def test_does_your_handler_survive_it(tmp_path: Path) -> None:
    write_files(README, tmp_path, "shop.py", "test_shop.py")
    asking = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "test_shop.py")
    assert "1 passed" in run(tmp_path, *asking)
    handler = (tmp_path / "shop.py").read_text()
    assert handler.count("payment_id=message.payment_id") == 1
    (tmp_path / "shop.py").write_text(
        handler.replace("payment_id=message.payment_id", "payment_id=__import__('uuid').uuid4()")
    )
    with pytest.raises(AssertionError):
        run(tmp_path, *asking)


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorial/first-consumer.md").read_text(encoding="utf-8")
    write_files(page, tmp_path, "billing.py", "send.py")
    run(tmp_path, "-m", "idemp", "db", "upgrade")
    run(tmp_path, "send.py")

    listing = ("-m", "idemp", "dead", "list", "--app", "billing:app")

    def dead() -> list[str]:
        return sorted(letter["reason"] for letter in json.loads(run(tmp_path, *listing, "--json")))

    printed = tmp_path / "printed"
    handled = "three messages parked"
    work_until(tmp_path, "billing:app", lambda: printed.read_text().count(" parked: ") == 3, handled)
    assert dead() == ["ConnectionError", "PayloadConflict", "Refuse"]
    assert all(f"`{reason}`" in page for reason in dead())
    assert query(tmp_path, "SELECT * FROM ledger") == [(1, 250)]
    run(tmp_path, "-m", "idemp", "dead", "replay", "--app", "billing:app", "--all")
    back = {"BANK_IS_BACK": "1"}
    work_until(
        tmp_path, "billing:app", lambda: dead() == ["PayloadConflict", "Refuse"], "payment 2 to be handled", **back
    )
    assert query(tmp_path, "SELECT * FROM ledger") == [(1, 250), (2, 5000)]
    assert "All preconditions hold" in run(tmp_path, "-m", "idemp", "doctor", "billing:app")


def test_the_table_of_brokers_is_the_one_in_the_code() -> None:
    found = re.search(r"<!-- guarantees:.*?-->\n(.*?)<!-- end of guarantees -->", README, re.DOTALL)
    assert found is not None
    assert found[1].strip() == markdown().strip()


@pytest.mark.parametrize(
    ("tag", "table"), [("settings", markdown_of(Settings, "setting")), ("options", markdown_of(Policy, "option"))]
)
def test_the_tables_of_settings_and_options_are_those_of_the_code(tag: str, table: str) -> None:
    """To mend it: `python -c "from idemp.settings import *; print(markdown(Settings, 'setting'))"`; `Policy`, 'option'."""
    page = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {tag} -->\n(.*?)<!-- end of {tag} -->", page, re.DOTALL)
    assert found is not None
    assert found[1].strip() == table.strip()


def test_links_of_the_readme_are_whole() -> None:
    """The package index shows the README, too, where a relative link leads nowhere."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", README)
    links = [target.partition("#")[0] for pair in targets for target in pair if target and not target.startswith("#")]
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    own = {link.removeprefix(f"{source}/") for link in links if link.startswith(f"{source}/")}
    missing = {link for link in own if not (ROOT / link.split("/", 2)[2]).exists() or link.split("/")[1] != "main"}
    assert missing == set()
    kinds = {link.split("/")[0] == "tree" for link in own if (ROOT / link.split("/", 2)[2]).is_dir()}
    assert kinds <= {True}


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
