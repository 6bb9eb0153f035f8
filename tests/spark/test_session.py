"""The session that all of these tests share: what it is, how it starts, and what is said where it can't."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from idemp import spark as pipeline
from idemp.errors import ConfigurationError
from idemp.spark.testing import jvm, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_runs_on_this_machine_alone(spark: SparkSession) -> None:
    assert spark.range(1000).selectExpr("sum(id)").collect()[0][0] == 499_500
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None
    heard = listening(psutil.Process())
    assert "127.0.0.1" in heard
    assert [address for address in heard if not ip_address(address).is_loopback] == []


def listening(process: psutil.Process) -> set[str]:
    """The addresses that a process and all that it started listen on."""
    addresses = set()
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found = [at for at in each.net_connections("tcp") if at.status == psutil.CONN_LISTEN]
            addresses |= {str(at.laddr.ip).removeprefix("::ffff:") for at in found}
    return addresses


def test_workers_are_this_python_and_find_what_it_finds(spark: SparkSession) -> None:
    def told(_: object) -> list[str]:
        import tests.spark

        return [sys.executable, str(tests.spark.__file__)]

    told_by_worker = spark.sparkContext.parallelize([0], 1).flatMap(told).collect()
    assert told_by_worker == [sys.executable, str(Path(__file__).with_name("__init__.py"))]


def test_process_has_one_session(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a Spark session already"), local_session(tmp_path):
        pass
    assert spark.range(3).count() == 3


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_PACKAGES", ("pyspark", "no_such_package"))
    with pytest.raises(ConfigurationError, match=r"needs no_such_package\. .*pip install 'idemp\[spark\]'"):
        pipeline.require()


class TestJava:
    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(ConfigurationError, match="Java 17, and there is no java"):
            pipeline.require()

    def test_too_old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, 'JAVA_VERSION="11.0.2"\n')
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        with pytest.raises(ConfigurationError, match=r"needs Java 17, and .*/bin/java is Java 11"):
            pipeline.require()

    @pytest.mark.parametrize("told", ['IMPLEMENTOR="x"\nJAVA_VERSION="21.0.1"\n', ""])
    def test_new_enough_or_silent(self, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, told)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        pipeline.require()

    def install(self, home: Path, told: str) -> None:
        (home / "bin").mkdir()
        (home / "bin" / "java").write_text("#!/bin/sh\n")
        (home / "bin" / "java").chmod(0o755)
        if told:
            (home / "release").write_text(told)


class TestArchive:
    """The classes that a JVM does not have to load again."""

    def test_is_what_the_session_uses(self, spark: SparkSession) -> None:
        (virtual_machine,) = [each for each in psutil.Process().children() if each.name() == "java"]
        assert any(part.startswith("-XX:SharedArchiveFile=") for part in virtual_machine.cmdline())

    def test_two_processes_do_not_make_it_at_once(self, tmp_path: Path) -> None:
        code = f"""
import sys
from pathlib import Path
from idemp.spark.testing import jvm
with jvm._alone(Path({str(tmp_path / "lock")!r})) as alone:
    print(alone, flush=True)
    sys.stdin.read()
"""
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"True\n"
            with jvm._alone(tmp_path / "lock") as alone:
                assert not alone
            other.kill()
        with jvm._alone(tmp_path / "lock") as alone:
            assert alone, "the lock went with the process"

    def test_one_that_does_not_fit_is_not_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jvm, "_make", lambda archive: archive.write_text("made"))
        first = jvm.flags(tmp_path)
        assert jvm.flags(tmp_path) == first
        monkeypatch.setattr(jvm, "LIGHT", (*jvm.LIGHT, "-Dother=1"))
        assert jvm.flags(tmp_path) != f"{first} -Dother=1"
        assert len(list(tmp_path.glob("*.jsa"))) == 2

    def test_starts_without_where_there_is_no_room(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "SharedArchiveFile" not in jvm.flags(tmp_path / "file" / "below")

    def test_old_ones_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        old, recent = tmp_path / "old.jsa", tmp_path / "recent.jsa"
        for file in (old, recent):
            file.touch()
        os.utime(old, (0, 0))
        monkeypatch.setattr(jvm, "_recorded", lambda part: part.write_text("made"))
        jvm._make(tmp_path / "new.jsa")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["new.jsa", "recent.jsa"]
