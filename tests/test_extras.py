"""Packages of extras that are not installed: one line names the extra, and the command line ends with exit code 3."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OPTIONAL = "aiomysql aiosqlite amqp anyio asyncpg boto3 botocore celery deltalake django dramatiq faststream greenlet httpx hypothesis kombu opentelemetry pandas prometheus_client psycopg pyarrow pymysql pyspark starlette stomp time_machine watchfiles"
MODULES = {
    "idemp.brokers.activemq.broker": "No module named 'stomp': pip install 'idemp[activemq]'",
    "idemp.brokers.rabbitmq.broker": "No module named 'amqp': pip install 'idemp[rabbitmq]'",
    "idemp.bulk": "No module named 'psycopg': pip install 'idemp[postgresql]'",
    "idemp.documents.couchdb": "No module named 'httpx': pip install 'idemp[couchdb]'",
    "idemp.documents.dynamodb": "No module named 'botocore': pip install 'idemp[dynamodb]'",
    "idemp.integrations.asgi": "No module named 'anyio': pip install 'idemp[asgi]'",
    "idemp.integrations.celery": "No module named 'celery': pip install 'idemp[celery]'",
    "idemp.integrations.dramatiq": "No module named 'dramatiq': pip install 'idemp[dramatiq]'",
    "idemp.integrations.django": "No module named 'django': pip install 'idemp[django]'",
    "idemp.integrations.faststream": "No module named 'faststream': pip install 'idemp[faststream]'",
    "idemp.prepared.sqs": "No module named 'botocore': pip install 'idemp[sqs]'",
    "idemp.spark": "No module named 'psycopg': pip install 'idemp[spark]'",
    "idemp.sql.aio": "No module named 'greenlet': pip install 'idemp[asyncio]'",
    "idemp.telemetry.metrics": "No module named 'prometheus_client': pip install 'idemp[prometheus]'",
    "idemp.telemetry.tracing": "No module named 'opentelemetry': pip install 'idemp[opentelemetry]'",
    "idemp.testing:redelivery_machine": "No module named 'hypothesis': pip install 'idemp[testing]'",
}
APP = """
from idemp import App
from pydantic import BaseModel
class Pay(BaseModel):
    id: int
app = App("billing")
@app.handler(Pay)
async def pay(message: Pay) -> None: ...
"""
COMMANDS: list[tuple[dict[str, str], list[str], str]] = [
    ({"broker_url": "amqp://host"}, ["worker", "shop"], "No module named 'amqp': pip install 'idemp[rabbitmq]'"),
    ({"broker_url": "stomp://host"}, ["worker", "shop"], "No module named 'stomp': pip install 'idemp[activemq]'"),
    ({"database_url": "mysql://host/shop"}, ["db", "check"], "No module named 'pymysql': pip install 'idemp[mysql]'"),
    ({"database_url": "mariadb+aiomysql://host/shop"}, ["db", "check"], "No module named 'pymysql': pip install 'idemp[aiomysql]'"),
    ({"database_url": "postgres://host/shop"}, ["db", "check"], "No module named 'psycopg': pip install 'idemp[postgresql]'"),
    ({"database_url": "postgresql+asyncpg://host/shop"}, ["dead", "list"], "No module named 'psycopg': pip install 'idemp[asyncpg]'"),
    ({}, ["worker", "shop"], "No module named 'greenlet': pip install 'idemp[aiosqlite]'"),
    ({}, ["worker", "shop", "--reload"], "No module named 'watchfiles': pip install 'idemp[reload]'"),
    ({"metrics_port": "0"}, ["relay"], "No module named 'prometheus_client': pip install 'idemp[prometheus]'"),
    ({}, ["pipeline", "backfill", "shop", "in", "--parked", "out"], "No module named 'psycopg': pip install 'idemp[spark]'"),
    ({}, ["pipeline", "reconcile", "shop", "in"], "No module named 'psycopg': pip install 'idemp[spark]'"),
    ({}, ["pipeline", "outputs", "shop", "lake"], "No module named 'psycopg': pip install 'idemp[lake]'"),
]  # fmt: skip


class Missing:
    """Finds no optional package."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in OPTIONAL.split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def look() -> dict[str, Any]:
    """Use each extra in this process, and return what is said."""
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    said: dict[str, Any] = {}
    for place in MODULES:
        module, _, name = place.partition(":")
        try:
            getattr(importlib.import_module(module), name or "__name__")
        except ImportError as error:
            said[place] = str(error)
    from idemp.cli.main import main

    for number, (settings, arguments, _) in enumerate([({}, ["db", "upgrade"], ""), *COMMANDS]):
        for name, value in settings.items():
            os.environ[f"IDEMP_{name.upper()}"] = value
        sys.argv = ["idemp", *arguments]
        sys.modules.pop("shop", None)
        with redirect_stderr(io.StringIO()) as shown:
            try:
                main()
            except SystemExit as end:
                said[f"{number}"] = [end.code, shown.getvalue()]
        for name in settings:
            del os.environ[f"IDEMP_{name.upper()}"]
    return said


def test_what_is_not_installed_names_its_extra(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "import json, tests.test_extras as here; said = here.look(); print(json.dumps(said))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    said = json.loads(found.stdout.splitlines()[-1])
    assert {place: said[place] for place in MODULES} == MODULES
    assert [said[str(number)] for number in range(1, len(COMMANDS) + 1)] == [[3, f"idemp: {text}\n"] for *_, text in COMMANDS]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = " ".join([*MODULES.values(), *(text for *_, text in COMMANDS)])
    assert {name for name in extras if f"[{name}]" not in named} == {"all"}
    assert set(re.findall(r"[\w-]+", extras["all"][0])) == {"idemp", *extras} - {"all"}
