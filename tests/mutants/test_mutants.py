"""The table of seeded faults is true to the code, a sample of them is caught, and what is not caught is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import main, markdown
from tests.mutants.inside import IMPORTED_ELSEWHERE
from tests.mutants.mutant import Mutant
from tests.mutants.running import ROOT, copied_tree, judged, run
from tests.mutants.seeded import MUTANTS

pytestmark = pytest.mark.slow

QUICK = ["redispatch-ripples", "nack-taken-for-confirm", "memory-acks-on-receipt"]
HARMLESS = Mutant(
    name="harmless",
    file="idemp/durations.py",
    old="from __future__ import annotations\n",
    new="from __future__ import annotations\n\n# Nothing else.\n",
    breaks="Nothing.",
    tests=("tests/test_keys.py",),
)


def test_a_sample_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0, capsys.readouterr()
    assert f"{len(QUICK)} of {len(QUICK)} killed" in capsys.readouterr().out


def test_what_is_not_caught_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], known=[HARMLESS]) == 1
    table = capsys.readouterr().out
    assert "| harmless | Nothing. | **SURVIVED** |" in table
    assert "0 of 1 killed" in table


def test_without_a_healthy_tree_nothing_is_concluded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], known=[replace(HARMLESS, tests=("tests/no_such_file.py",))]) == 2
    assert "without any fault: pytest ended with" in capsys.readouterr().err


def test_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-fault"]) == 2
    assert "no such mutant: no-such-fault" in capsys.readouterr().err


def test_other_code_than_the_copy_s_is_noticed(tmp_path: Path) -> None:
    """An installed idemp must not pass for the copy."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "test_nothing.py").write_text("import idemp\n\n\ndef test() -> None: ...\n")
    done = run(tmp_path, ["test_nothing.py", "-p", "no:xdist", "-o", "addopts="], 60)
    assert (done.verdict, done.by) == ("not run", "idemp was imported from elsewhere"), done.output


@pytest.mark.parametrize(
    ("code", "output", "meaning"),
    [
        (0, "3 passed", ("survived", "")),
        (1, "FAILED t.py::test_x[a - b] - assert 1 == 2", ("killed", "t.py::test_x[a - b]")),
        (1, "FAILED t.py::test_x", ("killed", "t.py::test_x")),
        (1, "ERROR t.py::test_x - no server", ("not run", "pytest ended with 1 without a failed test")),
        (2, "FAILED t.py::test_x", ("not run", "pytest ended with 2 without a failed test")),
        (IMPORTED_ELSEWHERE, "", ("not run", "idemp was imported from elsewhere")),
    ],
)
def test_only_a_failed_test_has_caught_anything(code: int, output: str, meaning: tuple[str, str]) -> None:
    assert judged(code, output) == meaning


def test_a_tree_without_git_is_copied_too(tmp_path: Path) -> None:
    for name in ("idemp/a.py", "idemp/__pycache__/a.pyc", ".venv/b.py", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with copied_tree(tmp_path) as tree:
        assert {str(file.relative_to(tree)) for file in tree.rglob("*.*")} == {"README.md", "idemp/a.py"}


@pytest.fixture(scope="module")
def inherited() -> str:
    """The cases of the conformance suites."""
    return "".join(file.read_text() for file in (ROOT / "idemp" / "testing").rglob("*.py"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_fits_the_code(mutant: Mutant, tmp_path: Path, inherited: str) -> None:
    """Its text occurs exactly once, what it makes of the file is Python, and its tests exist."""
    source = (ROOT / mutant.file).read_text()
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source)
    mutant.seed(tmp_path)
    assert copy.read_text() != source
    compile(copy.read_text(), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, *names = test.split("::")
        assert all(name in (ROOT / file).read_text() + inherited for name in names), test


def test_text_that_is_no_longer_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "idemp").mkdir()
    (tmp_path / HARMLESS.file).write_text("moved on")
    with pytest.raises(ValueError, match="harmless: the text to replace occurs 0 times"):
        HARMLESS.seed(tmp_path)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_readme_has_this_table() -> None:
    """After a change: `python -m tests.mutants --list`."""
    assert f"\n{markdown(MUTANTS)}\n" in (Path(__file__).parent / "README.md").read_text()
