from typing import Any

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

from idemp.integrations.django.tasks import tasks_app
from tests.integrations.django_shop.models import Payment


@task(takes_context=True)
def pack(context: Any, key: str, cents: int = 0) -> list[Any]:
    Payment.objects.create(key=key, cents=cents)
    if key == "two":
        pack.enqueue("one")
    return [key, cents, context.attempt]


@task()
def broken() -> None:
    Payment.objects.create(key="broken")
    raise ValueError("no")


app = tasks_app()
