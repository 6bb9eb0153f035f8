"""`import idemp` is light: what an application does not use is not loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "kombu",
    "amqp",
    "pyspark",
    "sqlalchemy",
    "alembic",
    "psycopg",
    "pymysql",
    "redis",
    "pytest",
    "hypothesis",
    "rich",
    "typer",
)


SPARK = ("pyspark", "py4j", "pyarrow", "pandas", "numpy")


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import idemp", HEAVY),
        ("from idemp import App; App('orders')", HEAVY),
        ("from idemp.inbox.memory import InMemoryStore; from idemp.broker.memory import InMemoryBroker", HEAVY),
        ("import idemp.protocol, idemp.relay, idemp.worker, idemp.retention", HEAVY),
        ("import idemp.inbox.document", (*HEAVY, "httpx", "boto3", "botocore")),
        ("import idemp.inbox.sql", ("alembic", "kombu", "amqp", "pyspark", "psycopg", "pymysql", "rich", "typer")),
        ("import idemp.testing", ("kombu", "amqp", "pyspark", "sqlalchemy", "rich", "typer")),
        ("import idemp.spark, idemp.spark.testing, idemp.spark.testing.plugin", (*SPARK, "psutil", "confluent_kafka")),
    ],
)
def test_light(statement: str, heavy: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_it_would_notice() -> None:
    code = "import sqlalchemy, sys\nprint('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "True"


def test_everything_public_is_there() -> None:
    import idemp

    assert {name for name in idemp.__all__ if not hasattr(idemp, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = idemp.Nonsense
