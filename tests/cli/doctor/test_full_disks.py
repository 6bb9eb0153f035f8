"""Doctor on a disk without room: of the server, of a SQLite file, of the embedded broker."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import make_url

from tests.cli.doctor.conftest import on_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.doctor.conftest import Patient
    from tests.servers.postgresql import PostgreSQL

MIB = 1024 * 1024
SIZE = 300


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of its own, of 300 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk of its own")
    folder = Path(tempfile.mkdtemp(prefix="idemp-disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}m,mode=777", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


def fill(disk: Path, left: int = 0) -> Path:
    """Leave so many bytes free; what has to be deleted to make room again."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - left)
    return ballast


def check_of(patient: Patient, detail: str) -> dict[str, Any]:
    (found,) = [each for each in patient.look().data["checks"] if each["name"] == "disk" and detail in each["detail"]]
    return dict(found)


@pytest.mark.parametrize("what", ["database", "broker"])
def test_a_file_on_a_full_disk(patient: Patient, disk: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """There nothing fails before a COMMIT: the free space tells."""
    url = f"sqlite:///{disk}/shop.db" if what == "database" else os.environ["IDEMP_DATABASE_URL"]
    if what == "broker":
        monkeypatch.setenv("IDEMP_BROKER_URL", f"local://{disk}/queues.db")
    on_database(patient, url, monkeypatch)
    patient.declare()
    assert patient.red() == []
    for left, verdict in ((5 * MIB, "failed"), (100 * MIB, "warning"), (250 * MIB, "ok")):
        ballast = fill(disk, left)
        found = check_of(patient, str(disk))
        assert found["verdict"] == verdict
        assert ("Make room" in found["fix"]) == (verdict != "ok")
        ballast.unlink()
    if what == "database":  # not even opened
        fill(disk)
        assert check_of(patient, str(disk))["verdict"] == "failed"


def test_a_server_on_a_full_disk(
    patient: Patient, postgresql: PostgreSQL, postgresql_url: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims still fit into the free part of a page, outputs don't."""
    name, space = make_url(postgresql_url).database, f"space_{make_url(postgresql_url).database}"
    place = disk / "space"
    place.mkdir()
    if postgresql.user():
        shutil.chown(place, postgresql.user())
    with psycopg.connect(postgresql.url.replace("+psycopg", ""), autocommit=True) as administrator:
        administrator.execute(f"CREATE TABLESPACE {space} LOCATION '{place}'")
        administrator.execute(f"ALTER DATABASE {name} SET TABLESPACE {space}")
        try:
            on_database(patient, postgresql_url, monkeypatch)
            patient.declare()
            assert patient.red() == []
            ballast = fill(disk)
            (found,) = patient.red()
            assert (found["name"], "No space left on device" in found["detail"]) == ("disk", True)
            assert "make room on its disk" in found["fix"]
            ballast.unlink()
            assert patient.red() == []
        finally:
            (disk / "ballast").unlink(missing_ok=True)
            administrator.execute(f"ALTER DATABASE {name} SET TABLESPACE pg_default")
            administrator.execute(f"DROP TABLESPACE {space}")
