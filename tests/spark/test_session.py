"""The Java that Spark needs; no JVM is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from idemp import ConfigurationError
from idemp.spark.session import check_java


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('openjdk version "21" 2023-09-19', None),
        ('openjdk version "11.0.2" 2019-01-15', "is version 11: Spark needs Java 17"),
        ('java version "1.8.0_292"', "is version 1: Spark needs Java 17"),
    ],
)
def test_a_java_that_is_too_old_is_refused(tmp_path: Path, said: str, refusal: str | None) -> None:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    java.chmod(0o755)
    for environment in ({"JAVA_HOME": str(tmp_path)}, {"PATH": f"{tmp_path}/bin:/bin"}):
        if refusal is None:
            check_java(environment)
        else:
            with pytest.raises(ConfigurationError, match=refusal):
                check_java(environment)


def test_no_java_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no Java on the PATH"):
        check_java({"PATH": str(tmp_path)})
