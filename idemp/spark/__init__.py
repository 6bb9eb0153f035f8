"""The data pipeline: the same inbox, from Spark.

Importing this package loads neither Spark nor Arrow; what needs them says what is missing (`require`).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError
from idemp.spark import java

if TYPE_CHECKING:
    from idemp.spark.archives import backfill
    from idemp.spark.columns import Columns
    from idemp.spark.failures import GivenUp
    from idemp.spark.files import read_messages
    from idemp.spark.summary import Summary
    from idemp.spark.writing import Sink, sink

__all__ = ["Columns", "GivenUp", "Sink", "Summary", "backfill", "read_messages", "require", "sink"]

_FROM: Final = {
    "Columns": "columns",
    "GivenUp": "failures",
    "Sink": "writing",
    "Summary": "summary",
    "backfill": "archives",
    "read_messages": "files",
    "sink": "writing",
}
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas")


def require() -> None:
    """See that Spark can run here.

    Raises:
        ConfigurationError: a Python package or Java is missing, or Java is too old; the error names it.

    Example:
        >>> require()  # answers nothing where all is there
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"The pipeline needs {', '.join(missing)}.",
            fix="Install them: pip install 'idemp[spark]' (PySpark is a download of 456 MB).",
        )
    found = java.find()
    if found is None:
        raise ConfigurationError(
            f"Spark needs Java {java.OLDEST}, and there is no java in JAVA_HOME or on the PATH.",
            fix=f"Install it, such as openjdk-{java.OLDEST}-jre-headless on Debian, or set JAVA_HOME.",
        )
    version = java.major(java.release(found))
    if version is not None and version < java.OLDEST:
        raise ConfigurationError(
            f"Spark needs Java {java.OLDEST}, and {found} is Java {version}.",
            fix=f"Install Java {java.OLDEST}, or set JAVA_HOME to where it is.",
        )


def __getattr__(name: str) -> Any:
    """Public names, each imported when somebody asks for it."""
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
