"""A Celery app whose module wires the service: `celery -A tests.forks.tasks worker` forks its processes after that."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from tests.forks import wired

BROKER = "IDEMP_FORKS_CELERY"
TASKS = "tasks"

app: Any = Celery("forks", broker=os.environ.get(BROKER, "memory://"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_default_queue=TASKS,
    task_ignore_result=True,
    task_reject_on_worker_lost=True,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=1,
)


@app.task(name="forks.settle")
def settle(number: int) -> None:
    """Even numbers are messages, odd ones start something."""
    assert wired.SERVICE is not None
    wired.SERVICE.work(number)
