"""The containers of the example shop, without an engine: schemas, and the steps of the image in a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import psycopg
import pytest
import yaml

from idemp import Settings
from idemp.policy import seconds
from tests.servers import postgresql
from tests.servers.databases import query
from tests.servers.postgresql import Postgresql
from tests.servers.process import find, free_port
from tests.worker.test_loop import wait_for

ROOT = Path(__file__).parent.parent
SHOP = ROOT / "examples" / "orders"
NAMES = re.findall(r"'([A-Z]+)'", (SHOP / "README.md").read_text())  # of the command that writes .env
PASSWORDS = {f"{name}_PASSWORD": f"secret-{name.lower()}" for name in NAMES}
APPS = ("orders", "stock", "migrate")
PORT = 8080


def compose() -> dict[str, Any]:
    """Return the services as `docker compose` reads them."""
    text = re.sub(r"\$\{(\w+):\?\}", lambda found: PASSWORDS[found[1]], (SHOP / "compose.yaml").read_text())
    assert "$" not in text
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def manifests() -> dict[str, dict[str, Any]]:
    texts = [path.read_text() for path in sorted((SHOP / "kubernetes").iterdir())]
    texts.append((SHOP / "kubernetes" / "worker.yaml").read_text().replace("orders", "stock"))  # as README.md says
    found = [yaml.safe_load(text) for text in texts]
    return {each["metadata"].get("name", "migrate"): each for each in found}


def test_the_files_fit_their_schemas() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(SHOP / "compose.yaml")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    for manifest in manifests().values():
        for version in ("1.30", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_an_app_is_run_alike_everywhere_and_has_no_more_rights_than_it_needs() -> None:
    services, image = compose(), Image((SHOP / "Dockerfile").read_text())
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image.user)
    assert str(PORT) == image.environment["IDEMP_HEALTH_PORT"]
    for name in APPS:
        service, template = services[name], manifests()[name]["spec"]["template"]["spec"]
        (container,) = template["containers"]
        assert service["command"] == container["command"]
        assert (service["read_only"], service["cap_drop"], service["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])
        assert template["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if name != "migrate":
            assert seconds(service["stop_grace_period"], "grace") > Settings().grace
            assert template["terminationGracePeriodSeconds"] > Settings().grace
            assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("liveness", "readiness")} == {PORT}
            assert "shop_owner" not in str(service["environment"])
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


class Image:
    """An image: the instructions of a Dockerfile, of which `build` carries out those that change files.

    Attributes:
        user: User and group of its processes.
        environment: Variables.
        command: Command of a container.
        health: Command of the health check.
    """

    def __init__(self, text: str) -> None:
        self.user, self.environment, self.command, self.health = "", dict[str, str](), list[str](), list[str]()
        self._steps: list[tuple[str, str]] = []
        lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
        for name, value in (line.split(maxsplit=1) for line in lines if line):
            if name in ("WORKDIR", "COPY", "RUN"):
                self._steps.append((name, value))
            elif name == "ENV":
                self.environment |= dict(part.split("=", 1) for part in shlex.split(value))
            elif name == "USER":
                self.user = value
            elif name == "HEALTHCHECK":
                self.health = json.loads(value.partition(" CMD ")[2])
            elif name == "CMD":
                self.command = json.loads(value)  # fails if a shell would run it
            else:
                assert name == "FROM", f"{name} is not known to this test"

    def build(self, context: Path, root: Path) -> Path:
        """Carry the steps out in a folder that takes the place of `/`; return the working folder."""
        folder, environment = root, {**os.environ, "PATH": PATH, "PIP_NO_INDEX": "1"}
        for name, value in self._steps:
            if name == "WORKDIR":
                folder = root / value.lstrip("/")
                folder.mkdir(parents=True)
            elif name == "COPY":
                *patterns, target = value.split()
                for pattern in patterns:
                    files = list(context.glob(pattern))
                    assert files, f"COPY {pattern} finds nothing"
                    for file in files:
                        shutil.copy(file, folder / target)
            else:  # everything that the image needs is installed here: pip compares
                subprocess.run(value, shell=True, cwd=folder, env=environment, check=True, capture_output=True)
        for path in (folder, *folder.parents):
            if path.is_relative_to(root):
                path.chmod(0o555)  # read-only
        return folder


PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


class Containers:
    """Processes of an image, as its user and without capabilities where the tests run as root."""

    def __init__(self, root: Path) -> None:
        self.port, self.root = free_port(), root
        self.image = Image((SHOP / "Dockerfile").read_text().replace(str(PORT), str(self.port)))
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        self.folder = self.image.build(SHOP, root)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], variables: Mapping[str, str], out: str = "out") -> subprocess.Popen[bytes]:
        own = {name: value.replace("/tmp/", f"{self.root}/tmp/") for name, value in self.image.environment.items()}
        with (self.root / "tmp" / out).open("ab") as file:
            process = subprocess.Popen(
                [*self._prefix(), *command],
                cwd=self.folder,
                env={"PATH": PATH, "TMPDIR": f"{self.root}/tmp", **own, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], variables: Mapping[str, str], out: str = "out") -> int:
        return self.start(command, variables, out).wait(60)

    def out(self, name: str = "out") -> str:
        return (self.root / "tmp" / name).read_text()

    def _prefix(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        rights = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        used = [path.resolve() for path in (ROOT / "x", Path(sys.executable), Path(sys.prefix) / "x", self.folder)]
        if all(parent.stat().st_mode & 0o001 for path in used for parent in path.parents):  # a home of root is closed to others
            user, _, group = self.image.user.partition(":")
            rights += ["--reuid", user, "--regid", group, "--clear-groups"]
        return [*rights, "--"]

    def close(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


class WithPasswords(Postgresql):
    def prepare(self) -> None:
        super().prepare()
        rules = self.base / "data" / "pg_hba.conf"
        rules.write_text(f"host all shop_owner,shop_worker 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")


@pytest.fixture
def containers() -> Iterator[Containers]:
    with tempfile.TemporaryDirectory(prefix="idemp-image-") as folder:
        Path(folder).chmod(0o755)  # as `/`, also for the image's user
        found = Containers(Path(folder))
        yield found
        found.close()


@pytest.mark.slow
def test_the_shop_runs_in_its_image(containers: Containers, vhost: str, tmp_path: Path) -> None:
    services, image = compose(), containers.image
    with tempfile.TemporaryDirectory(prefix="idemp-roles-") as base:
        Path(base).chmod(0o755)
        with WithPasswords(Path(base) / "server") as server:
            query(server.url, "CREATE DATABASE shop")
            options = [f"--port={server.port}", "--host=127.0.0.1", "--username=postgres", "--dbname=shop"]
            psql = find("psql", "postgresql", postgresql.FOLDERS)
            variables = {**os.environ, **services["postgres"]["environment"]}
            subprocess.run([psql, *options, f"--file={SHOP / 'roles.sql'}"], env=variables, check=True, capture_output=True)

            def variables_of(name: str) -> dict[str, str]:
                found: dict[str, str] = services[name]["environment"]
                url = found["IDEMP_DATABASE_URL"].replace("@postgres/", f"@127.0.0.1:{server.port}/")
                return found | {"IDEMP_DATABASE_URL": url} | ({"IDEMP_BROKER_URL": vhost} if name != "migrate" else {})

            orders, files = variables_of("orders"), set(containers.folder.rglob("*"))
            assert containers.run(image.command, orders) == 3
            assert "has no tables of idemp: idemp db upgrade" in containers.out()
            assert containers.run(services["migrate"]["command"], variables_of("migrate")) == 0, containers.out()
            assert containers.run(services["migrate"]["command"], variables_of("migrate")) == 0, containers.out()
            assert containers.run(image.health, {}) == 1
            assert image.command == services["orders"]["command"]
            workers = [
                containers.start(image.command, orders, "log"),
                containers.start(services["stock"]["command"], variables_of("stock") | {"IDEMP_HEALTH_PORT": "0"}),
            ]
            wait_for(lambda: containers.run(image.health, {}) == 0)
            assert containers.run(["idemp", "doctor", "orders"], orders) == 0, containers.out()
            assert containers.run(["python", "send.py"], orders) == 0, containers.out()
            wait_for(lambda: containers.out("log").count("mail for") == 2)
            assert containers.run(["python", "look.py"], orders, "seen") == 0, containers.out("seen")
            assert containers.out("seen").startswith("A1 confirmed, 1 mail\nB2 cancelled, 1 mail\n")
            for statement in ("CREATE TABLE more (id integer)", "DROP TABLE orders", "ALTER TABLE idemp_inbox ADD more integer"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    query(orders["IDEMP_DATABASE_URL"], statement)
            for worker in workers:
                worker.terminate()
            assert [worker.wait(60) for worker in workers] == [0, 0]
            lines = [json.loads(line) for line in containers.out("log").splitlines() if line.startswith("{")]
            assert lines[-1]["event"] == "worker.stopped"
            assert set(containers.folder.rglob("*")) == files
            written = {path.name for path in (containers.root / "tmp").iterdir()}
            assert written == {"mails.jsonl", "log", "out", "seen"}  # of the app, and of this test
