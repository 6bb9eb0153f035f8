"""A private moto: the queues of SQS in memory, over HTTP."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

import boto3

from tests.servers.process import Server


class Moto(Server):
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Nothing is kept."""

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def check(self) -> object:
        return urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5).read()


def client(url: str | None = None) -> Any:
    """Return a client for SQS."""
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "eu-central-1"}
    return boto3.client("sqs", endpoint_url=url, **keys)
