"""The documentation, run as printed: files are written, commands typed, and their output compared."""

from __future__ import annotations

import ast
import doctest
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.activemq import Activemq
from tests.servers.java import java_options
from tests.servers.pouchdb import Pouchdb
from tests.worker.test_loop import wait_for

ROOT = Path(__file__).parent.parent
SPARK, ACTIVEMQ, DOCUMENTS, CELERY, FASTSTREAM, DRAMATIQ = (
    ROOT / "docs" / name for name in ("pipeline.md", "activemq.md", "documents.md", "celery.md", "faststream.md", "dramatiq.md")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
BLOCK = re.compile(r"^```(python|toml|sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([a-z0-9_/]+\.(?:py|toml))\n")


VARYING = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d UTC)?|\S+-\d+-[0-9a-f]{8}$", re.MULTILINE
)


def match(expected: str, found: str) -> bool:
    """Compare outputs; ids, times and names of workers differ from run to run."""
    printed, seen = (VARYING.sub("…", text) for text in (expected, found))
    return doctest.OutputChecker().check_output(printed, seen, doctest.ELLIPSIS)


class Reader:
    """Does what a page says, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path, "COLUMNS": "80", "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""}
        self.environment["PYTEST_ADDOPTS"] = "-p no:schemathesis"  # half a second for each pytest

    def read(self, page: Path) -> None:
        for language, text in BLOCK.findall(page.read_text()):
            if language in ("python", "toml"):
                if named := NAMED.match(text):
                    (self.folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / named[1]).write_text(text)
                else:
                    assert language == "python", f"{page.name}: a file without a name"
                    assert self.run(f"{sys.executable} -c '{text}'" if "'" not in text else self.script(text)) == ""
            elif language == "console":
                for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                    if expected.endswith("^C\n"):
                        self.interrupt(command, expected.removesuffix("^C\n"))
                    else:
                        found = self.run(command)
                        assert match(expected, found), f"{page.name}: $ {command}\n{found}"

    def script(self, text: str) -> str:
        (self.folder / "fragment.py").write_text(text)
        return f"{sys.executable} fragment.py"

    def run(self, command: str) -> str:
        found = subprocess.run(
            command,
            check=False,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return found.stdout

    def interrupt(self, command: str, expected: str) -> None:
        """Run a command until it has printed what is expected, then press Ctrl-C."""
        out = self.folder / "out"
        with out.open("w") as file:
            process = subprocess.Popen(shlex.split(command), cwd=self.folder, env=self.environment, stdout=file)
        try:
            wait_for(lambda: match(expected, out.read_text()) or process.poll() is not None)
        except AssertionError:
            print(out.read_text())
            raise
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        assert code == int(command.startswith("celery ")), code  # after Ctrl-C, Celery's is 1
        assert match(expected, out.read_text()), out.read_text()


LONG = [
    ROOT / "docs" / name
    for name in ("databases.md", "django.md", "prepared.md", "testing.md", "write-a-broker.md", "write-a-store.md")
]
"""Pages with suites of tests, or with many processes."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(each, marks=[pytest.mark.slow] if each in LONG else [], id=str(each.relative_to(ROOT)))
        for each in PAGES
        if each not in (SPARK, ACTIVEMQ, DOCUMENTS, CELERY, FASTSTREAM, DRAMATIQ) and BLOCK.search(each.read_text())
    ],
)
def test_a_page_is_true(page: Path, tmp_path: Path) -> None:
    if page.parent.parent.name == "examples":
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    Reader(tmp_path).read(page)


@pytest.mark.slow
def test_the_page_of_the_pipeline_is_true(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.environment["JAVA_TOOL_OPTIONS"] = java_options()
    reader.read(SPARK)


@pytest.mark.slow
def test_the_page_of_activemq_is_true(tmp_path: Path) -> None:
    with Activemq(tmp_path / "activemq") as broker:
        reader = Reader(tmp_path)
        reader.environment["IDEMP_BROKER_URL"] = broker.url
        reader.read(ACTIVEMQ)


@pytest.mark.slow
def test_the_page_of_documents_is_true(tmp_path: Path) -> None:
    with Pouchdb(tmp_path / "pouchdb") as server:
        reader = Reader(tmp_path)
        reader.environment["CARTS_URL"] = f"{server.url}/carts"
        reader.read(DOCUMENTS)


def test_generated_pages_are_up_to_date() -> None:
    for name, text in runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]().items():
        assert (ROOT / "docs" / name).read_text() == text, f"make docs writes {name} again"


def test_files_on_a_page_are_those_of_an_example() -> None:
    files = [path.read_text() for path in (ROOT / "examples").rglob("*") if path.suffix == ".yaml" or path.name == "Dockerfile"]
    for page in PAGES:
        for block in re.findall(r"^```(?:dockerfile|yaml)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert any(block in text for text in files), f"{page.name}: {block}"


def test_tables_and_charts_are_those_of_the_saved_runs() -> None:
    from benchmarks.charts import DOCS, PAGE, RUNS, pages

    page = (DOCS / PAGE).read_text()
    assert re.findall(r"<!-- table: (\w+) -->\n\d+ rounds of [\s\S]*?<!-- end -->", page) == list(RUNS)
    for name, text in pages(page).items():
        assert (DOCS / name).read_text() == text, f"make docs writes {name} again"


def test_each_page_has_one_place_on_the_site() -> None:
    index = ROOT / "docs" / "index.md"
    order = [entry for tree in re.findall(r"```{toctree}\n(.*?)```", index.read_text(), re.DOTALL) for entry in tree.splitlines()]
    placed = [
        re.sub(r".*<(.*)>", r"\1", entry) for entry in order if entry and not entry.startswith(":") and "https:" not in entry
    ]
    pages = {str(page.relative_to(index.parent).with_suffix("")) for page in (ROOT / "docs").rglob("*.md") if page != index}
    assert sorted(placed) == sorted(pages | {"self"})


def public_names() -> dict[str, str]:
    """Return each public name with where it is found: `__all__` of public modules, and what pages import."""
    private = {ROOT / "idemp" / folder / "__init__.py" for folder in ("cli", "demo", "worker")}
    modules = {
        *(ROOT / "idemp").rglob("__init__.py"),
        *(ROOT / "idemp" / f"{name}.py" for name in ("errors", "events", "hooks", "ports")),
    }
    modules |= {*(ROOT / "idemp" / "integrations").glob("[a-z]*.py"), *(ROOT / "idemp" / "telemetry").glob("[a-z]*.py")}
    names = {name: str(module) for module in modules - private for name in exported(module)}
    for page in PAGES:
        for module, imported in re.findall(r"^\s*from (idemp[\w.]*) import (.+)$", page.read_text(), re.MULTILINE):
            names |= {name.strip(): f"{page.name}: {module}" for name in imported.split(",")}
    return names


def exported(module: Path) -> list[str]:
    found = re.search(r"^__all__ = (\[.*?\])$", module.read_text(), re.MULTILINE | re.DOTALL)
    return ast.literal_eval(found[1]) if found else []


def test_the_reference_has_each_public_name() -> None:
    listed: set[str] = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for kind, name, options in re.findall(r"^\.\. auto(\w+):: ([\w.]+)\n((?:   :.*\n)*)", page.read_text(), re.MULTILINE):
            if kind == "module":
                path = ROOT / name.replace(".", "/")
                excluded = re.search(r":exclude-members: (.*)", options)
                module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                members = [] if "def __getattr__" in module.read_text() else exported(module)  # Sphinx does not see those
                listed |= set(members) - set(excluded[1].split(", ") if excluded else ())
            else:
                listed.add(name.rpartition(".")[2])
    names = public_names()
    assert "App" in names
    assert {name: where for name, where in names.items() if name not in listed} == {}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short_and_states_every_promise() -> None:
    readme = (ROOT / "README.md").read_text()
    prose = re.sub(r"^\|.*$", "", re.sub(r"```.*?```", "", readme, flags=re.DOTALL), flags=re.MULTILINE)
    assert len(prose.split()) <= 1000
    promises = (
        "effect once",
        "outputs at least once, same id",
        "nothing sent without commit",
        "nothing marked sent without the broker's word",
        "nothing lost",
        "settled once",
        "no false duplicates",
        "What is not promised",
    )
    assert all(promise in readme for promise in promises)
