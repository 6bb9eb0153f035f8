"""What the installer decides, on machines of every kind, and what it does to this one's service policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.servers import compose, node, programs
from tests.servers.install import Facts, enabled_units, no_service_starts, plan

if TYPE_CHECKING:
    from pathlib import Path

TWO = (programs.RABBITMQ, programs.AMQP_TOOLS)


def test_nothing_missing_is_nothing_to_do() -> None:
    done = plan(Facts(apt=True, root=True))
    assert (done.packages, done.lines, done.status) == ((), (), 0)


@pytest.mark.parametrize(("root", "through_sudo"), [(True, False), (False, True)])
def test_only_what_is_missing_is_installed(root: bool, through_sudo: bool) -> None:
    done = plan(Facts(missing=TWO, apt=True, root=root, sudo=True))
    assert done.packages == ("rabbitmq-server", "amqp-tools")
    assert done.through_sudo is through_sudo


@pytest.mark.parametrize(
    ("facts", "reason"), [(Facts(missing=TWO, apt=True), "neither root nor sudo"), (Facts(missing=TWO), "no apt-get")]
)
def test_what_cannot_be_installed_is_said_loudly(facts: Facts, reason: str) -> None:
    done = plan(facts)
    assert done.packages == ()
    assert done.status == 0
    assert [line.startswith("!!! ") and reason in line and "WILL BE SKIPPED" in line for line in done.lines] == [
        True
    ] * 2


def test_ci_fails_where_a_server_is_missing() -> None:
    assert plan(Facts(missing=TWO, ci=True)).status == 1


def test_ci_goes_on_without_what_is_optional() -> None:
    done = plan(Facts(missing=(programs.SPIN,), ci=True))
    assert done.status == 0
    assert [line.startswith("!!! spin is MISSING") and "WILL BE SKIPPED" in line for line in done.lines] == [True]
    assert plan(Facts(missing=(programs.SPIN, *TWO), ci=True)).status == 1


def test_what_npm_brings_needs_no_root() -> None:
    done = plan(Facts(missing=(programs.POUCHDB,)))
    assert (done.packages, done.through_sudo, done.modules) == ((), False, ("pouchdb-server@4.2.0",))
    both = plan(Facts(missing=(programs.NODE, programs.POUCHDB), apt=True, sudo=True))
    assert (both.packages, both.through_sudo) == (("nodejs", "npm"), True)
    assert both.modules == done.modules


def test_a_need_without_npm_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the cache that a next run could take for an installation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert not node.install(programs.POUCHDB.modules)
    (tmp_path / "npm").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert not node.install(programs.POUCHDB.modules)
    assert list((tmp_path / "idemp").iterdir()) == []
    done = plan(Facts(missing=(programs.NODE, programs.POUCHDB), ci=True))
    assert done.status == 0
    assert [line.partition(" is MISSING")[0] for line in done.lines] == ["!!! Node.js", "!!! PouchDB Server"]


def test_containers_stand_in_for_servers_but_not_for_tools() -> None:
    done = plan(Facts(missing=TWO, containers=True, ci=True))
    assert "docker compose runs it" in done.lines[0]
    assert done.lines[1].startswith("!!! amqp-tools is MISSING")
    assert done.status == 1
    assert plan(Facts(missing=TWO[:1], containers=True, ci=True)).status == 0


def test_compose_file_has_every_server_on_loopback() -> None:
    text = compose.FILE.read_text()
    published = [line for line in text.splitlines() if "ports:" in line]
    assert len(published) == len(compose.SERVICES)
    assert all('["127.0.0.1:' in line for line in published)
    assert all(f"\n  {service}:" in text for service in compose.SERVICES.values())


@pytest.mark.parametrize("own", ["#!/bin/sh\nexit 0\n", None], ids=["with a policy", "without one"])
def test_service_policy_of_the_machine_comes_back_after_a_failure(own: str | None, tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    if own:
        policy.write_text(own)
    with pytest.raises(KeyboardInterrupt), no_service_starts(policy):
        assert policy.read_text().endswith("exit 101\n")
        assert policy.stat().st_mode & 0o111
        raise KeyboardInterrupt
    assert (policy.read_text() if policy.exists() else None) == own
    assert len(list(tmp_path.iterdir())) == bool(own)


def test_policy_kept_by_a_killed_run_is_not_lost(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("own")
    killed = no_service_starts(policy)
    killed.__enter__()
    with no_service_starts(policy):
        pass
    assert policy.read_text() == "own"
    killed.__exit__(None, None, None)


def test_enabled_units_are_the_links_below_wants_and_requires(tmp_path: Path) -> None:
    for link in ("multi-user.target.wants/a.service", "sockets.target.requires/b.socket", "c.service"):
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to("/dev/null")
    assert enabled_units(tmp_path) == {"a.service", "b.socket"}
