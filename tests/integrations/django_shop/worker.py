from pydantic import BaseModel

from idemp import App, Context, Idempotent, Retry
from idemp.integrations._capture import current
from idemp.integrations.django import on_django

app = App("shop")
app.on_open.append(on_django())

from tests.integrations.django_shop.models import One, Payment  # noqa: E402


class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    key: str
    how: str = ""


@app.handler(Pay, policy=Idempotent(key="key", retry=Retry(attempts=2, delays=(0.0,))))
def pay(message: Pay, ctx: Context) -> None:
    Payment.objects.create(key=message.key, cents=ctx.attempt)
    assert current() is ctx  # what other libraries send is captured into it
    ctx.send({"key": message.key}, to="ledger", type="shop.Paid")
    if message.how in HOWS:
        HOWS[message.how](message)


HOWS = {}
"""What else a handler does, by name."""


def how(function):
    HOWS[function.__name__] = function
    return function


@how
def fail(message: Pay) -> None:
    raise ValueError("no")


@how
def fail_at_first(message: Pay) -> None:
    if Payment.objects.get(key=message.key).cents == 1:
        raise ValueError("not yet")


@how
def catch(message: Pay) -> None:
    """Catch an error, after which Django can only roll back."""
    from contextlib import suppress

    from django.db import IntegrityError

    One.objects.get_or_create(what="a")
    with suppress(IntegrityError):
        One.objects.create(what="a")


@how
def commit(message: Pay) -> None:
    from django.db import connection

    connection.cursor().execute("COMMIT")


@how
def hook(message: Pay) -> None:
    from django.db import transaction

    def broken() -> None:
        raise ValueError("after COMMIT")

    transaction.on_commit(broken)
    transaction.on_commit(lambda: One.objects.create(what=message.key))


@how
def lose(message: Pay) -> None:
    """Lose the connection, at the first run."""
    from django.db import connection

    if connection.vendor == "postgresql" and not HOWS.pop("lost", None):
        HOWS["lost"] = fail
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
