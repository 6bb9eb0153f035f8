"""The same as a task of Celery."""

from __future__ import annotations

from celery import Celery
from celery.exceptions import Reject

from tests.forks import wired

celery = Celery("forks", broker=wired.settings.broker_url)
celery.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, task_ignore_result=True)


@celery.task(name="forks.count")
def count(number: int) -> None:
    try:
        wired.handle({"number": number})
    except Exception as error:
        raise Reject(error, requeue=True) from error
