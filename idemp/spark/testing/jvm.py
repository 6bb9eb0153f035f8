"""What makes Spark's JVM start fast: light flags, and an archive of the classes that it loads.

Of the time that a session's first job takes, most goes into loading and checking some 20,000 classes. Java can keep them
the way it has them in memory. Such an archive fits one Java, one set of jars and one set of flags: its name stands for them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from idemp.spark import java

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

log = logging.getLogger("idemp.spark.testing")

# Quick to start, and slower than the defaults after minutes only.
LIGHT: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",
    "-Xlog:cds=off",
    "-Xlog:cds+dynamic=off",
)
_RECORDING: Final = "IDEMP_SPARK_CLASS_ARCHIVE"
_LONGEST_SECONDS: Final = 300
_UNUSED_DAYS: Final = 30


def flags(cache: Path | None = None) -> str:
    """The options for a JVM of Spark's, in one text; makes the archive where there is none yet and nobody else makes it.

    Args:
        cache: where archives are kept; default `idemp/spark` in the user's cache folder.
    """
    recorded = os.environ.get(_RECORDING)
    if recorded:
        return shlex.join([*LIGHT, f"-XX:ArchiveClassesAtExit={recorded}"])
    archive = _archive(cache or _user_cache())
    if archive is None:
        return shlex.join(LIGHT)
    return shlex.join([*LIGHT, f"-XX:SharedArchiveFile={archive}"])


def spark_home() -> Path:
    """Where Spark's jars and scripts are: SPARK_HOME, else the PySpark that is installed."""
    if home := os.environ.get("SPARK_HOME"):
        return Path(home)
    found = importlib.util.find_spec("pyspark")
    assert found is not None  # noqa: S101 - `require` has seen to it
    assert found.origin is not None  # noqa: S101
    return Path(found.origin).parent


def _archive(cache: Path) -> Path | None:
    """The archive that fits; `None` where there can't be one, or somebody makes it right now."""
    name = _name()
    if name is None:
        return None
    archive = cache / name
    if not archive.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _alone(archive.with_suffix(".lock")) as alone:
                if alone and not archive.exists():
                    _make(archive)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("Spark starts without a class archive: %s", error)
    if not archive.exists():
        return None
    os.utime(archive)
    return archive


def _name() -> str | None:
    """The archive's file name, from what it has to fit; `None` where Java says nothing about itself."""
    found = java.find()
    told = java.release(found) if found else ""
    if not told:
        return None
    jars = sorted((spark_home() / "jars").glob("*.jar"))
    facts = [told, *LIGHT, *(f"{jar} {jar.stat().st_size} {jar.stat().st_mtime_ns}" for jar in jars)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20] + ".jsa"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "idemp" / "spark"


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Whether nobody else is in this block; the lock goes with the process that holds it, however that ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _make(archive: Path) -> None:
    """The archive appears under its name when it is whole; those that nobody has used for long go."""
    log.warning("Making an archive of Spark's classes, once, for about half a minute: %s", archive)
    for old in archive.parent.glob("*.jsa"):
        if old.stat().st_mtime < time.time() - _UNUSED_DAYS * 86_400:
            old.unlink(missing_ok=True)
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    said = _recorded(part)
    if part.exists():
        part.replace(archive)
    else:
        log.warning("It could not be made: %s", said)


def _recorded(part: Path) -> object:
    """Run a small session whose classes are recorded; what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "idemp.spark.testing.jvm"],
        env={**os.environ, _RECORDING: str(part)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_LONGEST_SECONDS,
        check=False,
        text=True,
        errors="replace",
    )
    return done.stdout[-2_000:]


def _record() -> None:
    """A session that does what pipelines do, so that their classes are loaded."""
    from idemp.spark.testing.sessions import local_session

    with TemporaryDirectory(prefix="idemp-classes-") as name, local_session(Path(name)) as spark:
        files = str(Path(name, "files"))
        rows = spark.range(1000).selectExpr(
            "cast(id as string) id", "named_struct('n', id) body", "timestamp_seconds(id) time"
        )
        rows.selectExpr("id", "to_json(body) body", "time").write.parquet(files)
        read = spark.read.parquet(files)
        read.write.json(f"{files}-json")
        spark.read.json(f"{files}-json").groupBy("id").count().count()
        shuffled = read.repartition(2, "id").sortWithinPartitions("id")
        shuffled.mapInArrow(lambda batches: batches, read.schema).count()
        stream = spark.readStream.schema(read.schema).parquet(files).writeStream.foreachBatch(_take)
        query = stream.option("checkpointLocation", f"{files}-checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()


def _take(batch: DataFrame, _number: int) -> None:
    batch.mapInArrow(lambda batches: batches, batch.schema).count()


if __name__ == "__main__":
    if os.environ.get(_RECORDING):
        _record()
    else:
        print(flags())  # noqa: T201 - made ahead of time, for CI
