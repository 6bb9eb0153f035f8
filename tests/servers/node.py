"""Servers written for Node.js: npm installs them into the cache folder, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Compiling native modules is what their scripts are for; everything here stays in memory without them.
INSTALL = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")


def folder() -> Path:
    """Where they are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "idemp" / "node"


def programs() -> Path:
    """Where their commands are."""
    return folder() / "node_modules" / ".bin"


def install(modules: tuple[str, ...]) -> bool:
    """Install modules in place of what is there, all or nothing; whether that came about."""
    if shutil.which("npm") is None:
        return False
    print(f"Installing {' '.join(modules)} with npm: 44 MB on the disk, about half a minute", flush=True)
    began = time.monotonic()
    folder().parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="node-", dir=folder().parent))
    try:
        command = [*INSTALL, "--prefix", str(made), *modules]  # without it npm looks for a project in the folders above
        status = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
        if status:
            print(f"npm failed with {status}", file=sys.stderr, flush=True)
            return False
        shutil.rmtree(folder(), ignore_errors=True)
        made.rename(folder())
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"npm took {time.monotonic() - began:.0f} s.", flush=True)
    return True
