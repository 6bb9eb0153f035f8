"""The how-to "Write a store of your own", run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from idemp.testing.broker_conformance import BrokerConformance
from idemp.testing.store_conformance import EntityStoreConformance, StoreConformance
from tests.docs.test_readme import ROOT, run, write_files

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/how-to/write-a-store.md").read_text(encoding="utf-8")
SHOP = """
import sys
from pathlib import Path

from file_store import FileStore
from idemp import App, Idempotent, Message
from idemp.broker.memory import InMemoryBroker

app = App("shop", store=FileStore(Path("inbox")), broker=InMemoryBroker())

@app.handler(dict, type="shop.Sell", policy=Idempotent(key=sys.argv[1]))
def sell(message, ctx):
    ctx.session["sold"] = ctx.session.get("sold", 0) + 1

app.start()
message = Message(body=b'{"id": 1, "number": 2}', type="shop.Sell", message_id="message-1")
print(app.protocol(app.broker.publisher()).process(message).name, app.store.data["sold"])
"""


def test_the_store_of_the_page_passes_every_case(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path, "file_store.py", "test_file_store.py")
    told = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_file_store.py")
    found = re.search(r"^(\d+) passed in ", told, re.MULTILINE)
    assert found is not None, told
    assert int(found[1]) >= len([name for name in dir(StoreConformance) if name.startswith("test_")])


def test_it_has_less_than_sixty_lines_of_code(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path, "file_store.py")
    lines = (tmp_path / "file_store.py").read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith('"""')]
    assert len(code) < 60
    assert not [line for line in code if re.search(r"import .*\b_|;|.{121}", line)], (
        "public names, one statement a line"
    )


def test_an_app_runs_on_it_in_one_process_after_another(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path, "file_store.py")
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    assert [run(tmp_path, "shop.py", "id") for _ in range(2)] == ["HANDLED 1\n", "SKIPPED 1\n"]
    changed = subprocess.run(
        [sys.executable, "shop.py", "number"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "IdentityChanged: Consumer 'shop' now identifies 'shop.Sell' by 'field:number'" in changed.stderr


@pytest.mark.parametrize(
    ("heading", "suite"), [("## Run every case", StoreConformance), ("## Brokers", BrokerConformance)]
)
def test_the_tables_tell_the_options_and_their_defaults(heading: str, suite: type) -> None:
    section = PAGE.partition(heading)[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| `?([\w.,]+?)`? \|$", section, re.MULTILINE))
    attributes = {name: getattr(suite, name) for name in dir(suite) if not name.startswith("_")}
    options = {name: value for name, value in attributes.items() if isinstance(value, bool | int | float)}
    assert told == {name: f"{value:,}".removesuffix(".0") for name, value in options.items()} | {
        name: str(value) for name, value in options.items() if isinstance(value, bool)
    }


def test_the_suites_of_documents_are_as_the_page_has_them() -> None:
    (block,) = (
        each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "DocumentStoreConformance" in each
    )
    made: dict[str, type] = {}
    exec(block, made)
    assert [name for name in made if name.startswith("Test")] == ["TestMyDocuments", "TestMyInbox"]
    assert issubclass(made["TestMyInbox"], EntityStoreConformance)
