"""Which Java Spark would start, and how old it is."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

OLDEST: Final = 17


def find() -> Path | None:
    """The `java` that Spark's own scripts would take: that of JAVA_HOME, else the first on the PATH.

    Example:
        >>> found = find()
        >>> found is None or found.name == "java"
        True
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    return Path(found).resolve() if found else None


def release(java: Path) -> str:
    """What the file `release` beside a Java says about it, in one text; empty where there is none.

    It names the version, the build and the vendor, without starting a process.

    Example:
        >>> release(Path("/no/such/bin/java"))
        ''
    """
    file = java.parent.parent / "release"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def major(told: str) -> int | None:
    """The version's first number; `None` where nothing is told.

    Example:
        >>> major('JAVA_VERSION="17.0.12"'), major('JAVA_VERSION="1.8.0_402"'), major("")
        (17, 8, None)
    """
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', told, re.MULTILINE)
    return int(found[1]) if found else None
