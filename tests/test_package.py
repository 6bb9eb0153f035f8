"""The wheel and the sdist: what they contain, what an index shows, and that they work with the oldest and newest dependencies."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_docs import Reader
from tests.test_extras import MODULES, ROOT

pytestmark = pytest.mark.slow

UV = Path(sys.executable).parent / "uv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
OLDEST = ("--resolution", "lowest-direct", "--only-binary", ":all:", "-r", ROOT / "pyproject.toml")
"""Versions that have no wheel for this Python are not built."""
LARGE = ("spark", "lake", "all")  # with Spark, they take minutes
DRIVERS = ("aiomysql", "aiosqlite", "asyncpg", "psycopg", "pymysql")


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


def build(folder: Path, *options: object) -> Built:
    run(UV, "build", "--quiet", *options, "--out-dir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def run(*command: object, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = subprocess.run(
        [*map(str, command)], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=kept | variables
    )
    assert found.returncode == 0, found.stdout
    return found.stdout


class Environment:
    """An environment of its own, and a folder for programs."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.programs = folder / "environment" / "bin", folder / "programs"
        self.programs.mkdir()
        run(UV, "venv", "--quiet", "--python", sys.executable, self.bin.parent)

    def install(self, *arguments: object) -> None:
        run(UV, "pip", "install", "--quiet", "--python", self.bin / "python", *arguments)

    def read(self, page: str) -> None:
        """Do what a page says."""
        reader = Reader(self.programs)
        reader.environment["PATH"] = f"{self.bin}:{reader.environment['PATH']}"
        assert Path(reader.run("python -c 'import idemp; print(idemp.__file__)'")).is_relative_to(self.bin.parent)
        reader.read(ROOT / page)

    def helps(self) -> None:
        """Ask each command for its help."""
        commands = re.findall(r"^\| `idemp (.+?)`", (ROOT / "docs/reference/commands.md").read_text(), re.MULTILINE)
        assert commands
        program = "import sys; from typer.testing import CliRunner; from idemp.cli.main import cli\nfor each in sys.argv[1:]:"
        program += "\n    found = CliRunner().invoke(cli, [*each.split(), '--help']); assert found.exit_code == 0, (each, found)"
        run(self.bin / "python", "-c", program, *commands)


def test_an_index_shows_pip_first_and_links_that_lead_somewhere(built: Built) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    with zipfile.ZipFile(built.wheel) as wheel:
        (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        text = email.message_from_bytes(wheel.read(metadata)).get_payload()
    assert isinstance(text, str)
    assert text.index("pip install idemp") < text.index("make demo") < text.index("## Why")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    repository = "https://github.com/idemp/idemp/blob/main/"
    assert {link for link in links if not (ROOT / link.removeprefix(repository)).is_file() or link[:8] != "https://"} == set()
    assert len(links) > 30


def test_the_sdist_has_all_files_of_the_repository(built: Built) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    with tarfile.open(built.sdist) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = run("git", "-C", ROOT, "ls-files", "--cached").splitlines()
    assert [name for name in tracked if name not in packed] == []


def test_the_oldest_build_requirements_make_the_same_wheel(built: Built, tmp_path: Path) -> None:
    oldest = tmp_path / "constraints.txt"
    oldest.write_text("\n".join(each.replace(">=", "==") for each in PROJECT["build-system"]["requires"]))
    other = build(tmp_path / "built", "--build-constraint", oldest)
    with zipfile.ZipFile(built.wheel) as new, zipfile.ZipFile(other.wheel) as old:
        assert set(old.namelist()) == set(new.namelist())
        (metadata,) = [name for name in new.namelist() if name.endswith("/METADATA")]
        texts = [email.message_from_bytes(wheel.read(metadata)) for wheel in (old, new)]
    for text in texts:
        del text["Metadata-Version"]
    assert texts[0].items() == texts[1].items()
    assert texts[0].get_payload() == texts[1].get_payload()


def test_the_wheel_works_with_the_oldest_dependencies(built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(*OLDEST)
    environment.install("--no-deps", built.wheel)
    environment.helps()
    environment.read("README.md")


def test_the_sdist_works_with_the_newest_dependencies(built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install("--upgrade", built.sdist)
    environment.helps()
    environment.read("README.md")


def test_extras_work_with_their_oldest_dependencies(built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    chosen = [option for extra in EXTRAS if extra not in LARGE for option in ("--extra", extra)]
    environment.install(*OLDEST, *chosen)
    environment.install("--no-deps", built.wheel)
    places = [place for place in [*DRIVERS, *MODULES] if place != "idemp.spark"]
    program = "import sys; from importlib import import_module\nfor each in sys.argv[1:]:"
    program += "\n    module, _, name = each.partition(':'); getattr(import_module(module), name or '__name__')"
    run(environment.bin / "python", "-W", "error", "-c", program, *places)
    environment.read("docs/asyncio.md")


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_all_extras_fit_together(resolution: str) -> None:
    run(UV, "pip", "compile", "--quiet", "--resolution", resolution, "--extra", "all", ROOT / "pyproject.toml")
