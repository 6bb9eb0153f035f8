"""Worlds, and worker processes on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.world import World

ROOT = Path(__file__).parent.parent.parent


class Processes:
    """Worker processes on a world of their own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.world, self.folder = World(url), folder
        self.environment = {**os.environ, "IDEMP_DATABASE_URL": url, "IDEMP_TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *options: str, target: str = "tests.apps:app", **settings: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "idemp", "worker", target, *options]
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                command, env={**self.environment, **settings}, stderr=log, text=True, start_new_session=True
            )
        self.started.append(process)
        return process

    def runs(self) -> list[str]:
        notes = self.folder / "runs"
        return notes.read_text().splitlines() if notes.exists() else []

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def go_on(self) -> None:
        (self.folder / "go on").touch()

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.world.close()


@pytest.fixture
def begin(url: str) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def begin(*args: Any, **options: Any) -> World:
        worlds.append(World(url, *args, **options))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.close()


@pytest.fixture
def processes(url: str, tmp_path: Path) -> Iterator[Processes]:
    found = Processes(url, tmp_path)
    yield found
    found.close()
