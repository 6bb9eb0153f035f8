"""Servers in containers, where a container engine runs and the programs themselves are not installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import uuid
from pathlib import Path

FILE = Path(__file__).with_name("compose.yaml")
# The name of a need in `programs` -> the service in compose.yaml.
SERVICES = {"PostgreSQL": "postgresql", "MariaDB": "mariadb", "RabbitMQ": "rabbitmq", "Redis": "redis"}


@functools.cache
def available() -> bool:
    """Whether a container engine answers."""
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], check=False, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


class Container:
    """One service of compose.yaml, in a project of its own, published on one loopback port.

    Unlike a local process, a container outlives a test run that is killed: `docker compose ls` names it `idemp-test-…`.
    """

    def __init__(self, need: str, port: int) -> None:
        self._service = SERVICES[need]
        self._project = f"idemp-test-{uuid.uuid4().hex[:8]}"
        self._environment = {**os.environ, "IDEMP_TEST_PORT": str(port)}
        self.running = False

    def start(self) -> None:
        """Start it, with the data that it had before."""
        self._compose("up", "--detach", self._service)
        self.running = True

    def stop(self) -> None:
        """Ask it to stop and wait until it has."""
        self._compose("stop", self._service)
        self.running = False

    def kill(self) -> None:
        """End it at once."""
        self._compose("kill", self._service)
        self.running = False

    def remove(self) -> None:
        """Remove it and its data."""
        self._compose("down", "--volumes")
        self.running = False

    def run(self, *command: str) -> str:
        """Run a command inside the container and return what it says."""
        return self._compose("exec", "-T", self._service, *command)

    def _compose(self, *arguments: str) -> str:
        command = ["docker", "compose", "--file", str(FILE), "--project-name", self._project, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=self._environment)
        if done.returncode:
            raise RuntimeError(f"docker compose {arguments[0]} failed:\n{done.stderr}")
        return done.stdout
