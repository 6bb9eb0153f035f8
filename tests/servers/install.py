"""Install the servers that the tests run against: `python -m tests.servers.install`; with `--slow` the second lane's, too.

Installs what is missing through apt-get, as root or through sudo without a password, and what npm brings into the cache
folder. No service is started, and none that this brought stays enabled. Where nothing can be installed, it says loudly
which tests will be skipped; with CI=true in the environment that is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers import compose, node, programs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

POLICY = Path("/usr/sbin/policy-rc.d")
NO_SERVICE_STARTS = "#!/bin/sh\nexit 101\n"
SYSTEMD_UNITS = Path("/etc/systemd/system")
# --no-remove: another server that the user has installed is never replaced by one of ours.
SLOW = "--slow"
PACKAGES_ONLY = "--packages-only"  # npm's modules are installed for the user, not for root
APT_INSTALL = ("apt-get", "install", "--no-install-recommends", "--no-remove", "-o", "DPkg::Lock::Timeout=120")


@dataclass(frozen=True)
class Facts:
    """What the plan depends on."""

    missing: tuple[programs.Need, ...] = ()
    apt: bool = False
    root: bool = False
    sudo: bool = False
    containers: bool = False
    ci: bool = False


@dataclass(frozen=True)
class Plan:
    """What to do: install `packages`, through sudo or not, and npm's `modules`; then say `lines` and exit with `status`.

    `reason` says why packages can't be installed.
    """

    packages: tuple[str, ...] = ()
    through_sudo: bool = False
    modules: tuple[str, ...] = ()
    reason: str = "it could not be installed"
    lines: tuple[str, ...] = ()
    status: int = 0


def plan(facts: Facts) -> Plan:
    """Decide from the facts alone, so that tests can ask about any machine."""
    if not facts.missing:
        return Plan()
    packages = tuple(package for need in facts.missing for package in need.packages)
    modules = tuple(module for need in facts.missing for module in need.modules)
    if not packages or (facts.apt and (facts.root or facts.sudo)):
        return Plan(packages=packages, through_sudo=bool(packages) and not facts.root, modules=modules)
    reason = "neither root nor sudo without a password" if facts.apt else "no apt-get on this machine"
    return replace(_without(facts, reason), modules=modules, reason=reason)


def _without(facts: Facts, reason: str) -> Plan:
    """What is left to say about servers that could not be installed."""
    contained = [need for need in facts.missing if facts.containers and need.name in compose.SERVICES]
    skipped = [need for need in facts.missing if need not in contained]
    required = [need for need in skipped if facts.ci and not need.optional]
    lines = [f"{need.name} is not installed: docker compose runs it for the tests." for need in contained]
    for need in skipped:
        fate = "and CI=true forbids skipping its tests" if need in required else "its tests WILL BE SKIPPED"
        lines.append(f"!!! {need.name} is MISSING ({reason}): {fate}.")
    return Plan(lines=tuple(lines), status=1 if required else 0)


def look(needs: Sequence[programs.Need]) -> Facts:
    """The facts of this machine; slow questions are asked only where their answer matters."""
    missing = missing_needs(needs)
    apt = shutil.which("apt-get") is not None
    root = os.geteuid() == 0
    sudo = bool(missing) and apt and not root and _succeeds("sudo", "-n", "true")
    containers = bool(missing) and not (apt and (root or sudo)) and compose.available()
    return Facts(missing=missing, apt=apt, root=root, sudo=sudo, containers=containers, ci=in_ci())


def missing_needs(needs: Sequence[programs.Need]) -> tuple[programs.Need, ...]:
    """Every need of which a program is missing."""
    return tuple(need for need in needs if need.missing())


def in_ci() -> bool:
    """Whether a missing server is a failure and not a skip."""
    return os.environ.get("CI") == "true"


def main() -> int:
    """Install what is missing and can be; 0 unless CI lacks a server."""
    needs = programs.SLOW_LANE if SLOW in sys.argv else programs.MAIN_LANE
    if PACKAGES_ONLY in sys.argv:
        install(plan(look(needs)).packages)
        return 0
    facts = look(needs)
    todo = plan(facts)
    if todo.through_sudo:
        again = [sys.executable, "-B", "-m", "tests.servers.install", PACKAGES_ONLY, *sys.argv[1:]]
        subprocess.run(["sudo", "-n", *again], check=False)
    elif todo.packages:
        install(todo.packages)
    if todo.modules:
        node.install(todo.modules)
    if todo.packages or todo.modules:
        missing = missing_needs(needs)
        containers = bool(missing) and compose.available()
        todo = _without(Facts(missing=missing, ci=facts.ci, containers=containers), todo.reason)
    for line in todo.lines:
        print(line, file=sys.stderr)
    return todo.status


def install(packages: tuple[str, ...]) -> None:
    """Install packages as root, without starting or enabling any service."""
    print(f"Installing {' '.join(packages)}", flush=True)
    _apt(("apt-get", "update", "-qq"))
    enabled_before = enabled_units()
    with no_service_starts():
        print(announcement(packages), flush=True)
        began = time.monotonic()
        done = _apt((*APT_INSTALL, "-y", "-qq", *packages))
        if not done and len(packages) > 1:
            # One package that can't be had must not cost the others.
            for package in packages:
                _apt((*APT_INSTALL, "-y", "-qq", package))
        print(f"apt-get took {time.monotonic() - began:.0f} s.", flush=True)
    disable(enabled_units() - enabled_before)


def announcement(packages: tuple[str, ...]) -> str:
    """What apt-get says about the size, and the time that takes."""
    asked = subprocess.run(
        (*APT_INSTALL, "--assume-no", *packages), check=False, capture_output=True, text=True, env=_apt_environment()
    )
    wanted = ("Need to get", "After this operation")
    said = [line.strip() for line in asked.stdout.splitlines() if line.startswith(wanted)]
    return " ".join([*said, "This takes about half a minute, plus the download."])


@contextmanager
def no_service_starts(policy: Path = POLICY) -> Iterator[None]:
    """Forbid package scripts to start services; a policy of the machine's own comes back afterwards."""
    kept = policy.with_name(policy.name + ".kept-by-idemp")
    # A copy kept by a run that was killed is the machine's own policy: never overwrite it with ours.
    if not _lexists(kept) and _lexists(policy):
        policy.rename(kept)
    try:
        policy.write_text(NO_SERVICE_STARTS)
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink(missing_ok=True)
        if _lexists(kept):
            kept.rename(policy)


def enabled_units(folder: Path = SYSTEMD_UNITS) -> frozenset[str]:
    """The units that systemd would start at boot: links, so that it works without systemd running."""
    links = (path for pattern in ("*.wants/*", "*.requires/*") for path in folder.glob(pattern))
    return frozenset(path.name for path in links)


def disable(units: frozenset[str]) -> None:
    """Disable systemd units at boot."""
    if units and shutil.which("systemctl"):
        names = sorted(units)
        print(f"Disabling at boot: {' '.join(names)}", flush=True)
        subprocess.run(["systemctl", "--quiet", "disable", *names], check=False)


def _lexists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _apt(command: tuple[str, ...]) -> bool:
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          env=_apt_environment())  # fmt: skip
    if done.returncode:
        print(f"{' '.join(command)} failed with {done.returncode}", file=sys.stderr, flush=True)
    return done.returncode == 0


def _apt_environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


if __name__ == "__main__":
    raise SystemExit(main())
