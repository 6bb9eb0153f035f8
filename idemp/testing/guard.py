"""Run one server, or another program, so that it ends with the process that asked for it, however that one ends.

    python -I guard.py PARENT USER COMMAND...

Prints the server's pid. When standard input closes, or the parent is gone, or a signal asks for it, kills the server
and everything that it started, daemons included. When the server ends by itself, kills what it left behind and exits.
USER is the one to run the server as, or "-". Run by path with the standard library alone: it has to start fast.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PARENT_CHECK_SECONDS = 0.5
STDIN = 0


def main() -> int:
    """Start the server, watch it and its parent, and leave nothing behind."""
    parent, user, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    _adopt_orphans()
    woken = _wake_on_signals()
    server = _start(command, user)
    try:
        print(server.pid, flush=True)  # noqa: T201 - to whoever started this
        return _watch(parent, server.pid, woken)
    finally:
        _kill_everything(server.pid)


def _adopt_orphans() -> None:
    """Become the parent of every daemon below, so that it can be found: Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wake_on_signals() -> int:
    """A file descriptor that becomes readable at every signal; those that ask for the end raise SystemExit."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for ending in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    return readable


def _start(command: list[str], user: str) -> subprocess.Popen[bytes]:
    # To be kept by the caller: collected, it would reap a server that has ended by then, and nobody would notice the end.
    group = None if user == "-" else pwd.getpwnam(user).pw_gid
    return subprocess.Popen(  # noqa: S603 - what it was given
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        user=None if user == "-" else user,
        group=group,
        extra_groups=None if group is None else [group],
    )


def _watch(parent: int, server: int, woken: int) -> int:
    """Return when the server has ended or has to."""
    # The pipe alone does not do: a forked copy of the parent may hold its other end open.
    while os.getppid() == parent:
        ready = select.select([STDIN, woken], [], [], PARENT_CHECK_SECONDS)[0]
        if STDIN in ready:
            return 0
        if woken in ready:
            os.read(woken, 512)
        status = _reap(server)
        if status is not None:
            return status
    return 0


def _reap(server: int) -> int | None:
    """Reap whatever has ended, adopted orphans too; the exit status if the server is among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                return os.waitstatus_to_exitcode(ended[1]) & 0xFF
    return None


def _kill_everything(server: int) -> None:
    """Kill the tree below until nothing of it is left; what is orphaned meanwhile becomes a child of ours."""
    with suppress(OSError):
        os.killpg(server, signal.SIGKILL)
    while below := _descendants(os.getpid()):
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.wait()


def _descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    found = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    listed = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            listed += [int(child) for child in tasks.read_text().split()]
    return listed


if __name__ == "__main__":
    raise SystemExit(main())
