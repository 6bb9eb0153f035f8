"""A view that sends a task, and tasks that change the database by Django's ORM."""

import os
import signal
from pathlib import Path

from django.db import transaction
from django.http import HttpRequest, HttpResponse

from tests.integrations.django_shop.celery import app, idempotent, inbox
from tests.integrations.django_shop.models import Payment


@app.task(shared=False, acks_late=True, reject_on_worker_lost=True)
def note(key: str) -> None:
    Payment.objects.create(key=f"note {key}")


@app.task(shared=False, base=idempotent)
def ship(key: str) -> str:
    """Ship an order, and end the process between COMMIT and send at the first run."""
    Payment.objects.create(key=f"shipped {key}")
    note.delay(key)
    transaction.on_commit(lambda: _first(Path(os.environ["SHOP_KILLED"]) / key) and os.kill(os.getpid(), signal.SIGKILL))
    return key


def _first(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def order(request: HttpRequest) -> HttpResponse:
    """Take an order, and let a worker ship it."""
    key = request.headers["Idempotency-Key"]
    with inbox.once("shop.order", key=key) as unit:
        if not unit.duplicate:
            Payment.objects.create(key=key)
            unit.result = b'{"task": "%s"}' % ship.delay(key).id.encode()
    return HttpResponse(unit.result, content_type="application/json")
