"""A process that lives as often as it is killed: each life runs stored effects until it is killed where its parent says.

Arguments: the database's file, the mail server's port, and one word for each life: `before` or `after` the mail is sent, and
at which of this life's mails; the last life ends by itself. Forked, so that a life costs no start of an interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from sqlalchemy import update

from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.effects import EffectRun, EffectRunner
from idemp.effects.smtp import Mail, Smtp
from idemp.inbox.sql.due import EFFECTS_FROM


def live(file: str, port: int, point: str, number: int) -> None:
    app = App("shop", database=f"sqlite:///{file}", broker=InMemoryBroker())
    send = Smtp("127.0.0.1", port=port, sender="shop@example.org", security="none")
    sent = 0

    @app.effect("mail.send", Mail, timeout="20s")
    def mail(value: Mail, run: EffectRun) -> None:
        nonlocal sent
        sent += 1
        if (point, number) == ("before", sent):
            os.kill(os.getpid(), signal.SIGKILL)
        send(value, run)
        if (point, number) == ("after", sent):
            os.kill(os.getpid(), signal.SIGKILL)

    pending = (
        app.store.tables.pending
    )  # the leases of former lives are over at once, so that nobody waits for their end
    with app.store.engine.begin() as connection:
        connection.execute(update(pending).where(pending.c.attempts > 0).values(due_at=EFFECTS_FROM))
    runner = EffectRunner(app.store.upkeep, "shop", app.registry.effects)
    while app.store.upkeep.pending_count():
        if not runner.run_once().taken:
            time.sleep(0.02)


if __name__ == "__main__":
    file, port, *lives = sys.argv[1:]
    for life in [*lives, "end:0"]:
        point, _, number = life.partition(":")
        child = os.fork()
        if child == 0:
            live(file, int(port), point, int(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) != (point != "end"):
            sys.exit(f"the life {life} ended by {status}")
