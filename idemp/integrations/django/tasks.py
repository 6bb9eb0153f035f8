"""A backend of `django.tasks`: a task is enqueued in the transaction that is open, and runs once, in a transaction with its claim."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from django.db import connections
from django.utils import timezone
from django.utils.module_loading import import_string
from pydantic import BaseModel

try:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.utils.json import normalize_json
except ImportError:  # before Django 6
    from django_tasks import task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.utils import normalize_json

from idemp.app import App
from idemp.context import Context
from idemp.errors import ConfigurationError
from idemp.identity import uuid7
from idemp.integrations.django.bridge import on_django, open_database
from idemp.integrations.django.inbox import DjangoInbox, encode
from idemp.policy import Idempotent
from idemp.process import Adapters
from idemp.sql.records.claims import InboxRecords
from idemp.sql.records.failures import DeadLetters

__all__ = ["IdempBackend", "TaskCall", "tasks_app"]

ENQUEUE = "django.Enqueue"


class TaskCall(BaseModel):
    """Message of one call of a task.

    Example:
        >>> TaskCall(id="7", task="shop.tasks.pack", args=[1], kwargs={}).task
        'shop.tasks.pack'
    """

    __message_type__ = "django.Task"
    id: str
    task: str
    args: list[Any]
    kwargs: dict[str, Any]


class IdempBackend(BaseTaskBackend):
    """Backend of TASKS: `{"default": {"BACKEND": "idemp.integrations.django.tasks.IdempBackend"}}`.

    OPTIONS are `app`, the name of the app and of its queue (by default `django-tasks`), and `using`, the alias of the database.

    Example:
        >>> IdempBackend.supports_defer, IdempBackend.supports_priority
        (True, False)
    """

    supports_defer = supports_get_result = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.app, self.using = self.options.get("app", "django-tasks"), self.options.get("using", "default")
        self.inbox = DjangoInbox(f"{self.app}.enqueue", using=self.using)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store a call in the transaction that is open, or in one of its own. On SQLite see `DjangoInbox.prepare`."""
        self.validate_task(task)
        call = TaskCall(id=uuid7(), task=task.module_path, args=normalize_json(list(args)), kwargs=normalize_json(kwargs))
        delay = max(0.0, (task.run_after - timezone.now()).total_seconds()) if task.run_after else None
        claim = self.inbox.joined if connections[self.using].in_atomic_block else self.inbox.once
        with claim(ENQUEUE, key=call.id) as unit:
            unit.send(call, to=self.app, delay=delay)
        return self.result(call, TaskResultStatus.READY, enqueued_at=timezone.now())

    def get_result(self, result_id: str) -> Any:
        """Return what became of a call: READY, FAILED (a dead letter) or SUCCESSFUL, as long as claims are kept."""
        with closing(open_database(self.using)) as database:
            records = InboxRecords(database)
            claims = {claim.consumer: claim for claim in records.find(f"s:{result_id}")}
            if (enqueued := claims.get(self.inbox.consumer)) is None:
                raise TaskResultDoesNotExist(result_id)
            call = TaskCall.model_validate_json(records.outputs(enqueued)[0].body)
            at = {"enqueued_at": datetime.fromtimestamp(enqueued.claimed_at, UTC)}
            if (done := claims.get(self.app)) is not None:
                results = [output.body for output in records.outputs(done) if output.kind == "result"]
                return self.result(call, TaskResultStatus.SUCCESSFUL, results, worker_ids=[done.worker], **at)
            for letter in DeadLetters(database).find(queue=self.app, limit=1_000):
                if f"s:{result_id}" in letter.original_ids:
                    errors = [TaskError(exception_class_path="builtins.Exception", traceback=f"{letter.trace}{letter.error}")]
                    return self.result(call, TaskResultStatus.FAILED, errors=errors, **at)
            return self.result(call, TaskResultStatus.READY, **at)

    def result(self, call: TaskCall, status: Any, results: Any = (), **fields: Any) -> Any:
        """Return the result of a call, as Django has it."""
        times = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
        own = {"id": call.id, "args": call.args, "kwargs": call.kwargs, "backend": self.alias, "errors": [], "worker_ids": []}
        made = TaskResult(task=import_string(call.task), status=status, **{**times, **own, **fields})
        for body in results:
            object.__setattr__(made, "_return_value", json.loads(body))  # frozen, and set so by Django's own backends
        return made


def tasks_app(alias: str = "default") -> App:
    """Return the app whose worker runs the tasks of a backend.

    Args:
        alias: Of the backend in TASKS.

    Raises:
        ConfigurationError: It is another backend.

    Example:
        In a module `shop.worker`, which `manage.py idemp worker shop.worker:app` runs:

        >>> def make() -> App:
        ...     return tasks_app()
    """
    adapt = on_django()  # which sets Django up
    backend = task_backends[alias]
    if not isinstance(backend, IdempBackend):
        raise ConfigurationError(f"TASKS[{alias!r}] is no IdempBackend")

    def prepare(adapters: Adapters) -> Adapters:
        backend.inbox.prepare(ENQUEUE)  # on SQLite a task could not enqueue another one else
        return adapters

    app = App(backend.app)
    app.on_open.append(adapt if backend.using == "default" else on_django(backend.using))
    app.on_open.append(prepare)

    @app.handler(TaskCall, policy=Idempotent(key="id"))
    def run(call: TaskCall, ctx: Context) -> None:
        task = import_string(call.task)
        result = backend.result(call, TaskResultStatus.RUNNING, worker_ids=[""] * ctx.attempt)
        ctx.result = encode(
            task.call(*([TaskContext(task_result=result)] if task.takes_context else []), *call.args, **call.kwargs)
        )

    return app
